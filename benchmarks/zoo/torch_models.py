"""Plain models of torch.nn."""
from benchmarks.zoo.sizes import Factory
MODELS: dict[str, Factory] = {}
