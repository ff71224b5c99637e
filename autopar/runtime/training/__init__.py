"""What a training script does besides the planned step: validation and other shapes, its data, its
first weights, checkpoints. runtime/module.py calls it.
"""
