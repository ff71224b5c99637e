"""The command line: what it prints for people and for programs, and how it refuses."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from autopar.cli import main, options, terminal
from autopar.errors import LayoutError, WorldError
from autopar.planner.request import Grid2D, Grid3D, Grid4D, Grid25D
from autopar.tools.targets import NAMED, Batch, TargetError, resolve
from autopar.world import World
from autopar.world.hardware import Measured
from commands import refused, run

RED = "\x1b[31m"
TARGETS = Path(__file__).parents[1] / "support" / "targets.py"


# -- plan, show ------------------------------------------------------------------------------------
@pytest.mark.slow_cells("gpt2-*")
@pytest.mark.parametrize(
    ("target", "heading", "subgraph"),
    [
        ("targets:tiny", "targets:tiny: 33.1 k parameters", "up"),
        ("gpt2", "gpt2, batch 8x128: 124 M parameters", r"blocks\.[0-9-]+\.up"),
    ],
)
def test_plan_prints_a_table_and_saves_what_show_prints(
    target: str, heading: str, subgraph: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "plan.json")
    batch = ("--batch", "8x128") if target == "gpt2" else ()
    printed = run("plan", target, "--ranks", "8", *batch, "--save", saved).stdout
    assert heading in printed
    assert "8 ranks of" in printed
    assert re.search(rf"{subgraph} ", printed)
    assert " at the peak on each device" in printed
    shown = run("show", saved).stdout
    assert table(shown) == table(printed)
    assert len(table(shown)) > (10 if target == "gpt2" else 4)
    facts = json.loads(run("show", saved, "--json").stdout)
    assert facts["ranks"] == 8
    assert facts["seconds"] > 0
    assert any(re.fullmatch(subgraph, row["subgraph"]) for row in facts["rows"])


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("│")]


def test_plan_writes_the_timeline_of_the_step_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    more = ("--ranks", "4", "--layout", "fsdp", "--timeline", str(path))
    for overlap in (True, False):
        how = "--overlap" if overlap else "--no-overlap"
        facts = json.loads(run("plan", "targets:tiny", *more, how, "--json").stdout)
        seconds = facts["overlapped"] if overlap else facts["seconds"]
        shown = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        assert max(e["ts"] + e["dur"] for e in shown) / 1e6 == pytest.approx(seconds, rel=0.01)
        assert sum(e["args"].get("bytes", 0) for e in shown) == pytest.approx(facts["comm_bytes"])


@pytest.mark.slow
def test_rates_that_are_assumed_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that calibrate measured."""
    monkeypatch.chdir(tmp_path)
    printed = run("plan", "targets:tiny", "--ranks", "4", "--save", "plan.json").stdout
    assert (
        "rates    assumed of devices and links like these, not measured: `torchrun --np" in printed
    )
    assert "--nproc-per-node 4 -m autopar calibrate`" in run("show", "plan.json").stdout
    preset = run("plan", "targets:tiny", "--world", "dgx-h100").stdout
    assert "rates    assumed from published figures of dgx-h100, not measured" in preset
    timing = Measured("all_reduce", ((4, 1),), 4, 1e-4, 1e-9)
    dataclasses.replace(World.of(4), measured=(timing,)).save("world.json")
    assert "assumed" not in run("plan", "targets:tiny", "--ranks", "4").stdout
    facts = json.loads(run("plan", "targets:tiny", "--ranks", "4", "--json").stdout)
    assert facts["measured"] is True
    facts = json.loads(run("plan", "targets:tiny", "--ranks", "2", "--json").stdout)
    assert facts["measured"] is False


def test_plan_as_json_is_all_of_stdout() -> None:
    arguments = ("plan", "targets:tiny", "--ranks", "4", "--layout", "ddp", "--json")
    result = run(*arguments)
    facts = json.loads(result.stdout)
    assert facts["target"] == "targets:tiny"
    assert facts["parameters"] == 64 * 256 * 2 + 64 + 256
    assert facts["mesh"] == {"data": 4}
    # a ring sends 2 · 3/4 of every gradient, and of the loss
    gradients = 2 * 3 / 4 * 4 * facts["parameters"]
    assert facts["comm_bytes"] == pytest.approx(gradients, rel=0.001)
    assert set(facts["seconds_by_pass"]) >= {"trace", "choose", "finalize"}
    assert "a model that talks" in result.stderr


def test_plan_takes_a_grid_and_a_batch() -> None:
    arguments = ("--ranks", "4", "--layout", "4d:x=2,y=2", "--batch", "8x64", "--json")
    facts = json.loads(run("plan", "targets:tiny_of", *arguments).stdout)
    assert facts["mesh"] == {"x": 2, "y": 2}
    assert facts["target"] == "targets:tiny_of, batch 8x64"


FILE = """
from dataclasses import dataclass  # which looks for the module among those that are imported
import torch
from width_beside_it import WIDTH

@dataclass
class Sizes:
    width: int = WIDTH

def make():
    return torch.nn.Linear(Sizes().width, 8), (torch.ones(16, 4),)
"""


@pytest.mark.parametrize("stem", ["stranger_model", "json"])
def test_a_file_is_a_target(stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has the name of a module that is there, and imports what is beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / f"{stem}.py"
    file.write_text(FILE)
    message = refused("plan", f"{file}:make", "--ranks", "2")
    assert "it imports 'width_beside_it', which is not installed and not beside it" in message
    (tmp_path / "width_beside_it.py").write_text("WIDTH = 4")
    facts = json.loads(run("plan", f"{file}:make", "--ranks", "2", "--json").stdout)
    assert facts["target"] == f"{file}:make" and facts["parameters"] == 40
    file.write_text("raise RuntimeError('not today')")
    assert f"running {file} gave RuntimeError: not today" in refused("plan", f"{file}:make")
    assert sys.modules["json"] is json
    del sys.modules["width_beside_it"]


def test_a_plan_needs_no_values() -> None:
    facts = json.loads(run("plan", "targets:on_meta", "--ranks", "2", "--json").stdout)
    assert facts["ranks"] == 2


# -- verify ----------------------------------------------------------------------------------------
def test_verify_takes_a_function() -> None:
    printed = run("verify", "targets:tiny", "--ranks", "8", "--layout", "4d").stdout
    assert "8 ranks equal one" in printed


def test_verify_takes_a_saved_plan(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    run("plan", "targets:tiny", "--ranks", "4", "--layout", "megatron", "--save", path)
    printed = run("verify", "targets:tiny", "--layout", path).stdout
    assert "4 ranks equal one" in printed
    run("verify", "targets:tiny", "--layout", path, "--ranks", "4")
    for option in (("--ranks", "8"), ("--world", "dgx-h100")):
        message = refused("verify", "targets:tiny", "--layout", path, *option)
        assert "is a plan for 4 ranks of its own world: leave --world and --ranks out" in message
    assert "gpt2 is cut down to be verified" in refused("verify", "gpt2", "--layout", path)
    other = refused("verify", f"{TARGETS}:wide", "--layout", path)
    assert "plan again" in other


@pytest.mark.slow_cells("llama3-8b-megatron")
@pytest.mark.slow_cells("gpt2-4d:x=2,y=2")
@pytest.mark.parametrize(("name", "layout"), [("gpt2", "4d:x=2,y=2"), ("llama3-8b", "megatron")])
def test_verify_takes_a_named_model_smaller(name: str, layout: str) -> None:
    arguments = ("verify", name, "--ranks", "4", "--layout", layout, "--json")
    facts = json.loads(run(*arguments).stdout)
    assert facts["verified"] is True
    assert facts["ranks"] == 4
    assert facts["target"].startswith(f"{name} cut down to 2 layers of width ")
    assert max(facts["loss_error"], facts["grad_error"], facts["step_error"]) < 1e-9
    assert facts["nodes"] > 50


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "gpt9"), "TargetError: unknown target 'gpt9': write file.py:function or package"),
        (("plan", "no/such.py:f"), "target 'no/such.py:f': there is no file /"),
        (("plan", __file__), "name the function, too, which returns (model, inputs), as /"),
        (("plan", f"{TARGETS}:nothing"), "targets.py has no function 'nothing'; it has tiny"),
        (("plan", "no_such:f"), "there is no module 'no_such' here"),
        (
            ("plan", "targets:nothing"),
            "targets has no function 'nothing'; it has tiny, tiny_of, wide, on_meta",
        ),
        (("plan", "targets:broken"), "calling it gave RuntimeError: no weights today at "),
        (("plan", "targets:no_pair"), "returned (Mlp): return (model, inputs)"),
        (("plan", "targets:tiny", "--batch", "8x8"), "makes its own batch: leave --batch out"),
        (("plan", "gpt2", "--batch", "8"), "batch '8': write samples x sequence"),
        (("plan", "gpt2", "--batch", "8x0"), "batch '8x0': write samples x sequence"),
        (("plan", "gpt2", "--batch", "8x2048"), "gpt2 reads at most 1024 tokens, not 2048"),
        (("plan", "gpt2", "--layout", "5d"), "LayoutError: unknown layout '5d'; known ones: auto"),
        (("plan", "gpt2", "--world", "no/such.json"), "Error: "),
        (("plan", "targets:tiny", "--outputs", "half"), "outputs is 'half': it is to be"),
        (("verify", "targets:on_meta"), "parameters on the meta device"),
        (("verify", "targets:tiny", "--ranks", "64", "--layout", "ddp"), "a batch of 16"),
        (("show", "no_such_plan.json"), "no_such_plan.json: No such file or directory"),
        (
            ("plan", "gpt2", "--timeline", "nowhere/x.json"),
            "--timeline nowhere/x.json: there is no",
        ),
        (("plan", "gpt2", "--save", "no_such_folder/x.json"), "there is no folder no_such_folder"),
    ],
)
def test_a_mistake_is_one_clean_message(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_a_message_is_red_on_a_terminal() -> None:
    environment = {"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": ""}
    result = CliRunner().invoke(main.app, ["plan", "gpt9"], env=environment, color=True)
    assert result.exit_code == 2
    assert RED in result.stderr


def test_a_mistake_as_json() -> None:
    facts = json.loads(run("plan", "gpt9", "--json", status=2).stdout)
    assert facts["error"] == "TargetError"
    assert facts["message"].startswith("unknown target 'gpt9'")


@pytest.mark.parametrize(
    "text", ["{}", '{"version": 1}', "[1]", "no json", '{"version": 1, "mesh": 3}']
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert "PlanError: " in refused("show", str(tmp_path / "plan.json"))


# -- the world -------------------------------------------------------------------------------------
def test_a_world_by_name_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert options.read_world("dgx-h100", 16).ranks == 16
    assert options.read_world("dgx-h100", None).ranks == 8
    assert options.read_world(None, 8) == World.of(8)
    World.of(6).save("own.json")
    assert options.read_world("own.json", None) == options.read_world("own.json", 6) == World.of(6)
    with pytest.raises(WorldError, match="--ranks 8: the world of own"):
        options.read_world("own.json", 8)


def test_world_json_is_read_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    World.of(6).save("world.json")
    assert options.read_world(None, None).ranks == options.read_world(None, 6).ranks == 6
    assert options.read_world(None, 8) == World.of(8)
    assert "world.json is of 6 ranks and does not count for 8" in capsys.readouterr().err


# -- the parts -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("auto", "auto"),
        ("2.5d", "2.5d"),
        ("4d:x=2,y=2,z=2,data=2", Grid4D(2, 2, 2, 2)),
        ("4d:2,data=4", Grid4D(2, data=4)),
        ("2.5d:q=2,d=2", Grid25D(2, 2)),
        ("atp:4,2", Grid2D(4, 2)),
        ("atp:4, 2, first=row", Grid2D(4, 2, "row")),
        ("3d:2,2,2", Grid3D(2, 2, 2)),
    ],
)
def test_a_layout_is_read_as_text(text: str, layout: Any) -> None:
    assert options.read_layout(text) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ddp:2", "unknown layout 'ddp:2'"),
        ("4d:w=2", "'w=2' is no size of 4d; it takes x, y, z, data"),
        ("4d:x=2,x=2", "'x=2' is no size of 4d"),
        ("4d:x=two", "'x=two' is no whole number of ranks"),
        ("4d:", "'' is no whole number"),
        ("3d:2,2", "lacks z"),
        ("3d:2,2,2,2", "'2' is no size of 3d"),
    ],
)
def test_layouts_that_are_none(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        options.read_layout(text)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2", 0.124), ("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 405.9)],
)
def test_named_models_have_their_published_sizes(name: str, billions: float) -> None:
    target = resolve(name, Batch(2, 16), 1)
    assert target.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in target.model.parameters())
    assert [tuple(t.shape) for t in target.inputs] == [(2, 16), (2, 16)]


@pytest.mark.slow_cells("gpt-640b")
@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith("gpt-")])
def test_the_sizes_of_axonn_are_their_names(name: str) -> None:
    billions = float(name.removeprefix("gpt-").removesuffix("b"))
    assert resolve(name, None, 1).parameters / 1e9 == pytest.approx(billions, rel=0.07)


def test_llama_is_the_published_architecture() -> None:
    """The same numbers as transformers' Llama with the same weights."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    ours = resolve("llama3-8b", Batch(2, 16), 1, real=True)
    sizes = NAMED["llama3-8b"].small()
    config = LlamaConfig(
        hidden_size=sizes.width, num_attention_heads=sizes.heads, num_hidden_layers=sizes.layers,
        num_key_value_heads=sizes.key_heads, intermediate_size=sizes.inner, rms_norm_eps=1e-5,
        vocab_size=sizes.vocabulary, max_position_embeddings=sizes.context,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict({their_name(n): t for n, t in ours.model.state_dict().items()})
    tokens, targets = ours.inputs
    logits = theirs(tokens).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert ours.model(tokens, targets).item() == pytest.approx(expected.item(), rel=1e-6)


def their_name(name: str) -> str:
    pairs = {
        "blocks.": "model.layers.", "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm", "attention.out": "self_attn.o_proj",
        "gate.": "gate_proj.", "up.": "up_proj.", "down.": "down_proj.",
        "token.": "model.embed_tokens.", "head.": "lm_head.",
    }  # fmt: skip
    for letter in "qkv":
        pairs[f"attention.{letter}."] = f"self_attn.{letter}_proj."
    if name.startswith("norm."):
        return f"model.{name}"
    for ours, theirs in pairs.items():
        name = name.replace(ours, theirs)
    return name


def test_a_batch_is_read_as_text() -> None:
    assert Batch.parse("64x4096") == Batch.parse("64 × 4096") == Batch(64, 4096)
    with pytest.raises(TargetError, match="64x4096"):
        Batch.parse("64x4096x2")


def test_progress_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.PATIENCE_S == 2.0
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.05)

    def work(report: Callable[[str], None]) -> int:
        for name in ("first", "second"):
            report(name)
            time.sleep(0.4)
        return 3

    assert terminal.watch_progress("counting", work) == 3
    assert terminal.watch_progress("resting", lambda report: 4) == 4
    assert terminal.watch_progress("counting", work, quiet=True) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "counting: first … 0 s\ncounting: second … 0 s\n"


@pytest.mark.slow
def test_python_m_autopar_refuses_in_one_line() -> None:
    command = [sys.executable, "-m", "autopar", "plan", "gpt9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("TargetError: unknown target 'gpt9'")
    assert len(done.stderr.splitlines()) == 1


def test_a_command_ends_without_a_search_for_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "app", lambda: None)
    assert gc.get_freeze_count() == 0
    try:
        main.main()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
