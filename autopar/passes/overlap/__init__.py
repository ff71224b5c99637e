"""Passes over the forward and the backward graph that AOTAutograd derives from an emitted program.

runtime/backends.py runs them on each graph in this order: chunk (chunk_units.py finds what can be
cut), bucket (with summa_fusion.py; fuse.py writes the buckets), schedule (with a memory limit),
reinplace, views, and last `reinplace.fill_buckets`. They change when a collective is sent and
together with which others, not what is computed. aux_outputs.py comes before all of these.
"""
