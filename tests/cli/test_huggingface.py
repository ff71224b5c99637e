"""A config.json of transformers as a target: what is built of it, and what is said of a bad one."""

from __future__ import annotations

import json
from importlib.util import find_spec as unpatched_find
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.tools import huggingface
from autopar.tools.targets import Batch, resolve
from commands import refused, run

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 300,
    "max_position_embeddings": 64, "torch_dtype": "float16",
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300,
    "n_positions": 64,
}  # fmt: skip


def write(folder: Path, data: object) -> Path:
    path = folder / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.slow_cells("gpt2--", "llama--")
@pytest.mark.parametrize(
    ("data", "dtype", "parameter"),
    [
        (LLAMA, torch.float16, "model.layers.2.mlp.up_proj.weight"),
        (GPT2, torch.bfloat16, "transformer.h.2.mlp.c_fc.weight"),
        (
            {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
            torch.float16,
            "model.layers.2.self_attn.q_proj.weight",
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_a_causal_model_is_built_on_meta(
    data: dict[str, Any], dtype: torch.dtype, parameter: str, tmp_path: Path
) -> None:
    target = resolve(str(write(tmp_path, data)), Batch(4, 32), 8)
    parameters = dict(target.model.named_parameters())
    assert parameters[parameter].is_meta and parameters[parameter].dtype == dtype
    assert {name: tuple(x.shape) for name, x in target.inputs.items()} == {
        "input_ids": (4, 32),
        "labels": (4, 32),
    }
    assert str(dtype).removeprefix("torch.") in target.name and "batch 4x32" in target.name


def test_a_folder_is_its_config_and_a_batch_has_the_models_context(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    assert resolve(str(tmp_path), None, 8).inputs["labels"].shape == (8, 64)
    write(tmp_path, {**LLAMA, "max_position_embeddings": 10**6})
    shape = resolve(str(tmp_path), None, 8).inputs["labels"].shape
    assert shape == (8, huggingface.DEFAULT_CONTEXT)


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    """Of the model cut down, with the same weights; and it is all that forward returns."""
    from transformers import AutoModelForCausalLM

    target = resolve(str(write(tmp_path, LLAMA)), Batch(2, 16), 8, real=True)
    theirs = AutoModelForCausalLM.from_config(target.model.config)  # type: ignore[arg-type]
    theirs.load_state_dict(target.model.state_dict())
    assert len(theirs.model.layers) == 2 and target.parameters < 200_000
    expected = theirs(**target.inputs).loss
    loss = target.model(**target.inputs)
    assert isinstance(loss, torch.Tensor) and loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("kind", ["gptj", "mamba", "opt", "qwen3_moe"])
def test_other_kinds_are_cut_down_for_verify(kind: str, tmp_path: Path) -> None:
    """In their published default sizes, whose parts hang together in ways of their own."""
    target = resolve(str(write(tmp_path, {"model_type": kind})), Batch(2, 16), 8, real=True)
    assert target.parameters < 2_000_000
    assert target.model(**target.inputs).isfinite()


@pytest.mark.slow
def test_plan_and_verify_take_a_config(tmp_path: Path) -> None:
    path = str(write(tmp_path, LLAMA))
    arguments = (path, "--ranks", "2", "--batch", "4x16", "--json")
    facts = json.loads(run("plan", *arguments, "--layout", "ddp").stdout)
    assert facts["target"] == f"{path} (LlamaForCausalLM, float16), batch 4x16"
    assert any(row["subgraph"] == "model.layers.0-2.mlp" for row in facts["rows"])
    assert json.loads(run("verify", *arguments, "--layout", "megatron").stdout)["verified"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"model_type": ', "config.json: it is no JSON: Expecting value at line 1, column 16"),
        ([1], "it has no model_type, as a config.json of transformers has"),
        ({"architectures": ["X"]}, "it has architectures"),
        ({"model_type": "lama"}, "knows no model_type 'lama'; near it are llama"),
        ({"model_type": "own", "auto_map": {}}, "(code beside the file, auto_map, is not run)"),
        ({"model_type": "vit"}, "transformers has no causal language model of a vit"),
        ({"model_type": "musicgen"}, "building its model gave ValueError: Multiple valid text"),
        (
            {"model_type": "gpt_neo", "num_layers": 2},
            "verify the value of `config.attention_types`",
        ),
        ({**LLAMA, "hidden_size": "wide"}, "building its model gave StrictDataclass"),
    ],
)
def test_a_bad_file_is_one_clean_message(data: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, data)
    text = refused("plan", str(path), "--ranks", "2")
    assert message in text and str(path) in text


def test_a_path_that_is_none(tmp_path: Path) -> None:
    assert "the folder has no config.json; it has nothing" in refused("plan", str(tmp_path))
    assert "there is no such file (looked in " in refused("plan", str(tmp_path / "x.json"))
    assert "unknown target ''" in refused("plan", "")
    write(tmp_path, LLAMA)
    assert "reads at most 64 tokens" in refused("plan", str(tmp_path), "--batch", "8x65")


def test_a_name_of_a_hub_is_not_downloaded() -> None:
    text = refused("plan", "meta-llama/Llama-3.1-8B")
    assert text.endswith("; nothing is downloaded: fetch its config.json first")
    assert "downloaded" not in refused("plan", "gpt9")


def test_without_transformers_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_others(name: str) -> Any:
        return None if name == "transformers" else unpatched_find(name)

    monkeypatch.setattr(huggingface.importlib.util, "find_spec", find_others)
    path = str(write(tmp_path, LLAMA))
    assert "pip install 'autopar[hf]'" in refused("plan", path, "--ranks", "2")


def test_a_module_that_is_not_found_names_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refused("plan", "no_such:f")
    assert f"(looked in {tmp_path}, " in text
    (tmp_path / "here_it_is.py").write_text("def make(): ...\n")
    text = refused("plan", "here_it_is:nothing")
    assert "it has make" in text and "here_it_is.py)" in text
