"""Passes over the forward and the backward graph that AOTAutograd derives from an emitted program.

In their order: views, chunk, summa_panels and bucket, schedule (with a limit of memory), reinplace.
They change when and together with what a collective is sent, not what is computed.
"""
