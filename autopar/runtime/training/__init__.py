"""What a training script does besides the planned step: validation, other batch sizes and sequence
lengths. runtime/module.py calls it.
"""
