"""Weights from and to files, of which each rank reads and holds its own parts alone.

    par.load_weights("llama-3.1-8b")     # safetensors as transformers writes them, or a checkpoint
    par.save_pretrained("out")           # AutoModelForCausalLM.from_pretrained("out") reads it

The tensors of a ParallelModule enter as `StoredTensor`s; runtime/module.py calls these functions.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.errors import InputError
from autopar.runtime.training.stored import StoredTensor, StoredTensors
from autopar.world import ranks

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3  # names in a message


# -- reading ---------------------------------------------------------------------------------------
def load_weights(path: str | os.PathLike[str], stored: StoredTensors, prefix: str = "") -> None:
    """Read every tensor's own part from safetensors files (a file, or a folder with one or with an
    index) or from a folder of torch.distributed.checkpoint. Collective. `prefix`: what names may
    have more or less in the files, as transformers' base_model_prefix. Raises InputError where
    something is missing or has another shape; nothing is written then.
    """
    place, tensors = Path(path), stored.each()
    if (place / ".metadata").exists():
        _load_checkpoint(place, tensors)
    else:
        ranks.together(
            "reading the weights",
            lambda: _load_files(place, tensors, stored.coordinate, prefix),
        )
    stored.filled(name for x in tensors for name in x.names)


def _load_files(
    place: Path, stored: Sequence[StoredTensor], coordinate: Mapping[str, int], prefix: str
) -> None:
    safe_open = _safetensors().safe_open
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(safe_open(file, framework="pt")) for file in _files(place)
        }
        where = {name: file for file, opened in files.items() for name in list(opened.keys())}
        sources = [(x, _name_there(x, where, prefix)) for x in stored]
        slices = {name: files[where[name]].get_slice(name) for _, name in sources if name}
        _refuse(place, sources, {name: tuple(part.get_shape()) for name, part in slices.items()})
        for x, name in sources:
            assert name is not None
            part = (
                slices[name][x.box(coordinate)] if x.shape else files[where[name]].get_tensor(name)
            )
            with torch.no_grad():
                x.local.copy_(part)


def _files(place: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint of transformers."""
    if place.is_file():
        return [place]
    if (place / _INDEX).exists():
        index = json.loads((place / _INDEX).read_text(encoding="utf-8"))
        return [place / name for name in sorted(set(index["weight_map"].values()))]
    if (place / _FILE).exists():
        return [place / _FILE]
    raise InputError(
        f"{place} has no weights: no {_FILE}, no {_INDEX}, and no checkpoint of "
        "torch.distributed.checkpoint"
    )


def _name_there(x: StoredTensor, there: Mapping[str, Any], prefix: str) -> str | None:
    """Return the name that a tensor has in files, None where it has none."""
    for name in x.names:
        for other in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if other in there:
                return other
    return None


def _refuse(
    place: Path,
    sources: Sequence[tuple[StoredTensor, str | None]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise InputError where a tensor is missing or has another shape."""
    faults = [f"{x.names[0]} is missing" for x, name in sources if name is None]
    faults += [
        f"{name} is {shapes[name]} there and {x.shape} here"
        for x, name in sources
        if name is not None and shapes[name] != x.shape
    ]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise InputError(
            f"{place} has the weights of something else: {'; '.join(faults[:_SHOWN])}{more}"
        )


def _load_checkpoint(place: Path, stored: Sequence[StoredTensor]) -> None:
    """Read parts from a folder of torch.distributed.checkpoint, named as the model's or "model.…"
    as `Checkpoints` names them.
    """
    metadata = ranks.together("reading the weights", dcp.FileSystemReader(place).read_metadata)
    there = metadata.state_dict_metadata
    sources = [(x, _name_there(x, there, "model")) for x in stored]
    sizes = {name: x.size for name, x in there.items() if isinstance(x, TensorStorageMetadata)}
    shapes = {name: tuple(sizes.get(name, ())) for _, name in sources if name is not None}
    ranks.together("comparing the weights", lambda: _refuse(place, sources, shapes))
    state = {name: x.tensor.detach() for x, name in sources if name is not None}
    dcp.load(state, checkpoint_id=place, no_dist=not ranks.others())


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise InputError(
            "safetensors is not installed: pip install safetensors (transformers brings it along)"
        ) from error
    return safetensors


# -- writing ---------------------------------------------------------------------------------------
def save_pretrained(
    folder: str | os.PathLike[str],
    stored: Sequence[StoredTensor],
    gather: Callable[[str, torch.Tensor], torch.Tensor],
    config: Any = None,
    file_bytes: float = 5e9,
) -> None:
    """Write the tensors under their first names, as transformers writes them: in files of at most
    `file_bytes`, which the ranks write in turn, so that none holds more than one of them, and an
    index. `gather`: gives the global tensor of a name and what the rank has of it, on all ranks
    together. `config` is saved beside them where it can be. Collective.
    """
    place, writer = Path(folder), _safetensors()
    files = list(_split(stored, file_bytes))
    names = [
        _FILE if len(files) == 1 else f"model-{n + 1:05}-of-{len(files):05}.safetensors"
        for n in range(len(files))
    ]
    ranks.together("making the folder", lambda: place.mkdir(parents=True, exist_ok=True))
    for number, (name, tensors) in enumerate(zip(names, files, strict=True)):
        own = ranks.rank() == number % ranks.running()
        values = {
            x.names[0]: value for x in tensors if (value := _unsharded(x, gather, own)) is not None
        }

        def write(name: str = name, values: Mapping[str, torch.Tensor] = values) -> None:
            if values:
                writer.torch.save_file(values, place / f".{name}", metadata={"format": "pt"})
                os.replace(place / f".{name}", place / name)

        ranks.together("writing weights", write)
    ranks.together("writing the index", lambda: _write_index(place, names, files, config))


def _split(stored: Sequence[StoredTensor], file_bytes: float) -> Iterator[list[StoredTensor]]:
    """Yield the tensors of each file."""
    tensors: list[StoredTensor] = []
    bytes_in_file = 0
    for x in stored:
        size = math.prod(x.shape) * x.tensor.itemsize
        if tensors and bytes_in_file + size > file_bytes:
            yield tensors
            tensors, bytes_in_file = [], 0
        tensors.append(x)
        bytes_in_file += size
    yield tensors


def _unsharded(
    x: StoredTensor, gather: Callable[[str, torch.Tensor], torch.Tensor], own: bool
) -> torch.Tensor | None:
    """Return the global tensor on the CPU, on the rank that writes it. Collective."""
    value = gather(x.names[0], x.tensor)
    return value.cpu().contiguous().clone() if own else None


def _write_index(
    place: Path, names: Sequence[str], files: Sequence[Sequence[StoredTensor]], config: Any
) -> None:
    if ranks.rank():
        return
    if len(names) > 1:
        total = sum(math.prod(x.shape) * x.tensor.itemsize for tensors in files for x in tensors)
        weight_map = {
            x.names[0]: name for name, tensors in zip(names, files, strict=True) for x in tensors
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (place / f".{_INDEX}").write_text(json.dumps(index, indent=2), encoding="utf-8")
        os.replace(place / f".{_INDEX}", place / _INDEX)
    if callable(save := getattr(config, "save_pretrained", None)):
        save(place)
