"""What test_weights.py starts under torchrun: `weights_ranks.py FILE FOLDER LAYOUT`. Models from
the meta device get their first numbers, or read them, and are held against one device; weights are
written and read by transformers. Each rank measures what its process holds meanwhile.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.world import ranks


class Plain(nn.Module):
    """Modules of torch with an initialization of their own, a tied weight, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.embedding(ids))))


class Own(nn.Module):
    """A parameter that a function of the user's initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(16, 32), nn.Parameter(torch.empty(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.scale


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    if isinstance(module, Own):
        nn.init.uniform_(module.scale)
        module.up.weight.mul_(2)  # that of a module below, once more


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, use_cache=False)
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=64,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config.use_cache = False
    return GPT2LMHeadModel(config)


IDS = torch.arange(8 * 12).reshape(8, 12) % 64
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "plain": (Plain, (IDS,)),
    "llama": (llama, {"input_ids": IDS}),
    "gpt2": (gpt2, {"input_ids": IDS}),
}


def on_meta(make: Callable[[], nn.Module], inputs: Any, layout: str) -> Any:
    with torch.device("meta"):
        model = make()
    return autopar.parallelize(model, inputs=inputs, layout=layout)


def equal(par: Any, single: nn.Module) -> list[str]:
    """The names of what is not, to the bit, what one device holds."""
    state = {
        n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in par.state_dict().items()
    }
    return [n for n, x in single.state_dict().items() if not torch.equal(state[n], x)]


def started(name: str, layout: str) -> dict[str, Any]:
    make, inputs = MODELS[name]
    torch.manual_seed(3)
    single = make()
    draw = float(torch.rand(()))
    par = on_meta(make, inputs, layout)
    facts: dict[str, Any] = {"empty": ""}
    try:
        par(**inputs) if isinstance(inputs, dict) else par(*inputs)
    except autopar.InputError as error:
        facts["empty"] = str(error)
    torch.manual_seed(3 + dist.get_rank())  # rank 0's counts
    par.init_weights()
    facts["unequal"] = equal(par, single)
    facts["draw"] = dist.get_rank() > 0 or float(torch.rand(())) == draw
    first = par(**inputs) if isinstance(inputs, dict) else par(*inputs)
    right = single(**inputs) if isinstance(inputs, dict) else single(*inputs)
    first, right = (x if isinstance(x, Tensor) else x.logits for x in (first, right))
    facts["apart"] = float((first - right).detach().abs().max())
    return facts


def own_function() -> dict[str, Any]:
    torch.manual_seed(5)
    single = Own()
    with torch.no_grad():
        single.apply(initialize)
    par = on_meta(Own, (torch.ones(4, 16),), "megatron")
    said = ""
    try:
        par.init_weights()
    except autopar.InputError as error:
        said = str(error)
    torch.manual_seed(5)
    par.init_weights(initialize)
    return {"unequal": equal(par, single), "said": said}


def read(folder: Path, layout: str) -> dict[str, Any]:
    """A model of transformers that was saved by it, and saved again under a layout."""
    make, inputs = MODELS["llama"]
    torch.manual_seed(6)
    single: Any = make()
    if dist.get_rank() == 0:
        single.save_pretrained(folder / "one", max_shard_size="20KB")
    dist.barrier()
    par = on_meta(make, inputs, layout)
    par.load_weights(folder / "one")
    facts: dict[str, Any] = {"read": equal(par, single)}
    par.save_pretrained(folder / layout, file_bytes=2e4)
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(folder / layout)
    facts["by transformers"] = [
        n for n, x in again.state_dict().items() if not torch.equal(single.state_dict()[n], x)
    ]
    autopar.Checkpoints(folder / "run", model=par).save(1)
    other = on_meta(make, inputs, "fsdp")
    other.load_weights(folder / "run" / "step-1")
    facts["from a checkpoint"] = equal(other, single)
    facts["said"] = {}
    for what, make_other in (("missing", gpt2), ("shape", wide)):
        par = on_meta(make_other, inputs, "fsdp")
        try:
            par.load_weights(folder / "one")
        except autopar.InputError as error:
            facts["said"][what] = str(error)
    return facts


def wide() -> nn.Module:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, use_cache=False)
    )


class Peak(threading.Thread):
    """The most memory of its own that this process holds, in bytes above what it began with."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = self._now()
        self._done = threading.Event()

    def _now(self) -> int:
        _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - of_files) * 4096  # pages of files can be dropped

    def run(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, self._now())

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.most - self.before


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48)))


def memory(folder: Path) -> dict[str, Any]:
    """Peaks over what each rank stores of 192 MiB in 48 modules."""
    par = on_meta(lambda: nn.Linear(1024, 1024), (torch.ones(2, 1024),), "fsdp")
    par.init_weights()  # so that what every process needs once is there
    par.save_pretrained(folder / "one linear")
    par.load_weights(folder / "one linear")
    par = on_meta(deep, (torch.ones(2, 1024),), "fsdp")
    own = sum(p.to_local().nbytes for p in par.parameters())
    peaks: dict[str, Any] = {"own": own, "largest": 1024 * 1024 * 4}
    for what, work in (
        ("init_weights", par.init_weights),
        ("save_pretrained", lambda: par.save_pretrained(folder / "deep", file_bytes=2e7)),
        ("load_weights", lambda: par.load_weights(folder / "deep")),
    ):
        dist.barrier()
        peak = Peak()
        peak.start()
        work()
        peaks[what] = max(ranks.all_of(peak.stop()))
    return peaks


def main() -> None:
    path, folder, layout = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts: dict[str, Any] = {"memory": memory(folder)}
    for name in MODELS:
        facts[name] = ranks.all_of(started(name, layout))
    facts["own function"] = own_function()
    facts["files"] = read(folder, layout)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
