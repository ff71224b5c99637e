"""What a training script does besides the planned step: validation and other shapes
(call_graphs.py), its data (data.py, sequence_buckets.py), its first weights (initialize.py,
pretrained.py), checkpoints and their format (checkpoint.py), steps in micro-batches
(microbatches_run.py) and over stages (stages_run.py), the loops of other libraries (adapters.py,
trainer.py). runtime/module.py calls it.
"""
