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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError

FILE = "config.json"
DEFAULT_CONTEXT = 4096  # tokens of a sample where no --batch is given, if the model reads so many
_SMALL_HEAD = 8  # features of a head in a model that is cut down
_SMALL_EXPERTS = 8
_HEAD_SIZES = ("head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_INNER_SIZES = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim",
    "word_embed_proj_dim", "n_inner", "q_lora_rank", "kv_lora_rank",
)  # fmt: skip
_NEAR = 3  # model types that a message suggests
_LINES = 3  # of what transformers says


class ConfigError(AutoparError):
    """A `config.json` that cannot be read, or whose model cannot be built."""


def names_config(text: str) -> bool:
    """Whether a target is a path of a `config.json`, or of a folder that should hold one.

    >>> names_config("my-model/config.json"), names_config("gpt2"), names_config("mine:make")
    (True, False, False)
    """
    return text.endswith(".json") or (text != "" and Path(text).is_dir())


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
    with _quiet_transformers(path):
        config, text_config = _config(path, data)
        context = getattr(text_config, "max_position_embeddings", None) or 0
        context = context if context > 0 else None  # XLNet's is -1: as many as there are
        if real:
            _cut_down(text_config)
    shape = batch or (samples, 16 if real else min(context or DEFAULT_CONTEXT, DEFAULT_CONTEXT))
    if context and shape[1] > context:
        raise ConfigError(
            f"batch {shape[0]}x{shape[1]}: the model of {path} reads at most {context} tokens "
            f"(max_position_embeddings), not {shape[1]}"
        )
    dtype = torch.float32 if real else config.dtype or torch.bfloat16
    with _quiet_transformers(path), torch.device("cpu" if real else "meta"):
        model = _model(path, config, dtype)
        tokens, labels = (torch.randint(0, text_config.vocab_size, shape) for _ in range(2))
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


@contextmanager
def _quiet_transformers(path: Path) -> Iterator[None]:
    """Silence what transformers logs within the block. Raises ConfigError where it, or the block,
    raises anything; and where it is not installed, with what to install.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"{path}: its model is built by transformers, which is not installed: "
            "pip install 'autopar[hf]' (or transformers alone)"
        )
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " ".join(lines[:_LINES]) or "no message"
        raise ConfigError(
            f"{path}: building its model gave {type(error).__name__}: {text}"
        ) from error
    finally:
        logging.set_verbosity(before)


def _config(path: Path, data: dict[str, Any]) -> tuple[Any, Any]:
    """Return transformers' configuration of the file, and that of its language model."""
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
    config = CONFIG_MAPPING[kind].from_dict(plain)
    config.use_cache = False  # a step of training needs no cache of keys and values
    return config, config.get_text_config()


def _model(path: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the causal model of a configuration on the current device; its forward returns the
    loss alone. Raises ConfigError for a configuration of another kind of model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if not {type(config), type(config.get_text_config())} & set(MODEL_FOR_CAUSAL_LM_MAPPING):
        raise ConfigError(
            f"{path}: transformers has no causal language model of a {config.model_type}: write "
            "package.module:function, which returns (model, inputs)"
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    kind = type(model)

    def forward(self: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the next tokens."""
        result: torch.Tensor = kind.forward(self, input_ids=input_ids, labels=labels).loss
        return result

    # A subclass and no module around it, so that parameters keep the names that transformers gives.
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def _cut_down(config: Any) -> None:
    """Make a configuration small enough to be trained in float64: two layers, all heads, of
    _SMALL_HEAD features each, _SMALL_EXPERTS experts, a vocabulary with the same remainder to 256.
    """
    width, narrow = config.hidden_size, _SMALL_HEAD * getattr(config, "num_attention_heads", 8)
    sizes = {"hidden_size": narrow, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 256 + config.vocab_size % 256}
    sizes |= dict.fromkeys(_HEAD_SIZES, _SMALL_HEAD) | dict.fromkeys(_EXPERTS, _SMALL_EXPERTS)
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    sizes |= {
        name: max(_SMALL_HEAD, size * narrow // width)
        for name in _INNER_SIZES
        if isinstance(size := getattr(config, name, None), int)
    }
    for name, size in sizes.items():
        present = getattr(config, name, None)
        if isinstance(present, int) and (present > size or name in ("hidden_size", "vocab_size")):
            with suppress(AttributeError):  # of a size that follows from others
                setattr(config, name, size)
    if isinstance(getattr(config, "layer_types", None), list):
        with suppress(AttributeError):
            config.layer_types = config.layer_types[:2]
