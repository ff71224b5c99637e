"""A Hugging Face `config.json` as a target: any causal language model of transformers, built from
its sizes alone.

Example: build("my-model/config.json", None, 8) is the model on the meta device in the dtype of the
file, with tokens and labels; nothing is downloaded. Its forward returns the loss alone, so that no
plan gathers the logits. Called by targets.resolve.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError

FILE = "config.json"
DEFAULT_CONTEXT = 4096  # tokens of a sample where no --batch is given, if the model reads so many
_SMALL_HEAD = 8  # features of a head in a model that is cut down
_NEAR = 3  # model types that a message suggests


class ConfigError(AutoparError):
    """A `config.json` that cannot be read, or whose model cannot be built."""


def names_config(text: str) -> bool:
    """Whether a target is a path of a `config.json`, or of a folder that should hold one.

    >>> names_config("my-model/config.json"), names_config("gpt2"), names_config("mine:make")
    (True, False, False)
    """
    return text.endswith(".json") or Path(text).is_dir()


def build(
    text: str, batch: tuple[int, int] | None, samples: int, real: bool = False
) -> tuple[str, nn.Module, dict[str, torch.Tensor]]:
    """Return the name, the model and its inputs, int64 `input_ids` and `labels` of (samples,
    tokens).

    The model is on the meta device in the dtype of the file, bfloat16 where the file names none.
    `batch`: samples and tokens of each; None: `samples` of the model's context, of DEFAULT_CONTEXT
    tokens at most. `real`: in float32 on the CPU, cut down to two layers with all heads, but narrow
    ones. Raises ConfigError.
    """
    path = config_path(text)
    data = read_config(path)
    config = _config(path, data)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if real:
        _cut_down(config.get_text_config())
    shape = batch or (samples, 16 if real else min(context or DEFAULT_CONTEXT, DEFAULT_CONTEXT))
    if context and shape[1] > context:
        raise ConfigError(
            f"batch {shape[0]}x{shape[1]}: the model of {path} reads at most {context} tokens "
            f"(max_position_embeddings), not {shape[1]}"
        )
    dtype = torch.float32 if real else config.dtype or torch.bfloat16
    model = _model(path, config, dtype, "cpu" if real else "meta")
    with torch.device("cpu" if real else "meta"):
        tokens, labels = (
            torch.randint(0, config.get_text_config().vocab_size, shape) for _ in range(2)
        )
    kind = type(model).__name__ + (" cut down to 2 narrow layers" if real else "")
    name = f"{path} ({kind}, {str(dtype).removeprefix('torch.')}), batch {shape[0]}x{shape[1]}"
    return name, model, {"input_ids": tokens, "labels": labels}


def config_path(text: str) -> Path:
    """Return the path of the file that a target names: itself, or the one in a folder. Raises
    ConfigError where there is none.
    """
    path = Path(text)
    if path.is_dir():
        path = path / FILE
        if not path.is_file():
            names = ", ".join(sorted(entry.name for entry in Path(text).iterdir())[:6])
            raise ConfigError(f"{text}: the folder has no {FILE}; it has {names or 'nothing'}")
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file (looked in {path.absolute().parent})")
    return path


def read_config(path: Path) -> dict[str, Any]:
    """Return the file's object. Raises ConfigError where it is none with a `model_type`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{path}: it is no JSON: {error.msg} at {place}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        keys = ", ".join(list(data)[:6]) if isinstance(data, dict) else type(data).__name__
        raise ConfigError(
            f"{path}: it has no model_type, as a {FILE} of transformers has ('llama', 'gpt2'); it "
            f"has {keys or 'nothing'}"
        )
    return data


def _config(path: Path, data: dict[str, Any]) -> Any:
    """Return transformers' configuration of the file."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"{path}: its model is built by transformers, which is not installed: "
            "pip install 'autopar[hf]' (or transformers alone)"
        )
    from transformers import CONFIG_MAPPING

    kind = data["model_type"]
    if kind not in CONFIG_MAPPING:
        known = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=_NEAR)
        near = f"; near it are {', '.join(known)}" if known else ""
        own = " (code beside the file, auto_map, is not run)" if "auto_map" in data else ""
        raise ConfigError(
            f"{path}: this transformers knows no model_type {kind!r}{own}{near}; a newer one may, "
            "or write package.module:function, which returns (model, inputs)"
        )
    plain = {name: value for name, value in data.items() if name != "quantization_config"}
    try:
        config = CONFIG_MAPPING[kind].from_dict(plain)
    except Exception as error:
        raise _build_error(path, "reading its sizes", error) from error
    config.use_cache = False  # a step of training needs no cache of keys and values
    return config


def _model(path: Path, config: Any, dtype: torch.dtype, device: str) -> nn.Module:
    """Return the causal model of a configuration, whose forward returns the loss alone."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.manual_seed(0)
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise _build_error(
            path, f"building the causal model of {type(config).__name__}", error
        ) from error
    finally:
        logging.set_verbosity(before)
    kind = type(model)

    def forward(self: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the next tokens."""
        result: torch.Tensor = kind.forward(self, input_ids=input_ids, labels=labels).loss
        return result

    # A subclass and no module around it, so that parameters keep the names that transformers gives.
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def _cut_down(config: Any) -> None:
    """Make a configuration small enough to be trained in float64: two layers, heads of
    _SMALL_HEAD features, a vocabulary with the same remainder to 256.
    """
    width, heads = config.hidden_size, getattr(config, "num_attention_heads", 1)
    config.hidden_size = _SMALL_HEAD * heads
    config.num_hidden_layers = 2
    config.vocab_size = 256 + config.vocab_size % 256
    inner = getattr(config, "intermediate_size", None)
    if isinstance(inner, int):
        config.intermediate_size = max(8, inner * config.hidden_size // width)
    if getattr(config, "head_dim", None):
        config.head_dim = _SMALL_HEAD
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)


def _build_error(path: Path, doing: str, error: Exception) -> ConfigError:
    """Return what to tell where transformers fails, in its own first line."""
    first = str(error).strip().splitlines()[:1] or ["no message"]
    return ConfigError(f"{path}: {doing} gave {type(error).__name__}: {first[0]}")
