"""Plans and worlds as files: what is none is refused with the file and the field; a file is saved
whole or not at all; digests switch no check off.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli.main import app
from autopar.runtime.apply import renew_plan
from autopar.world import World, json_file
from models import mlp

Json = dict[str, Any]
EARLIER = Path(__file__).parent / "earlier"  # files as earlier versions wrote them


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    model, args, _ = mlp()
    return autopar.plan(model, 4, args, "megatron")


@pytest.fixture
def data(plan: autopar.Plan) -> Json:
    return json.loads(json.dumps(plan.to_json()))  # type: ignore[no-any-return]


@pytest.fixture
def world() -> Json:
    return json.loads(json.dumps(World.preset("dgx-h100", 8).to_json()))  # type: ignore[no-any-return]


# -- what is no document ---------------------------------------------------------------------------
BYTES: dict[str, tuple[bytes, str]] = {
    "bad bytes": (b'{"version": \xff\xfe}', "utf-8"),
    "in UTF-16": ('{"version": 3}'.encode("utf-16"), "utf-8"),
    "empty": (b"", "Invalid JSON"),
    "cut short": (b'{"version": 3, "mesh": "x', "Invalid JSON"),
    "deep": (b'{"version": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "deep, but read": (b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}", ""),
    "no object": (b"[1, 2]", "it is a list, not an object"),
    "null": (b"null", "it is a null, not an object"),
    "long number": (b'{"version": ' + b"9" * 5000 + b"}", "Invalid JSON"),
    "twice": (b'{"version": 1, "version": 1}', "names 'version' twice"),
    "half a character": (b'{"version": "\\ud800"}', "version"),
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("kind", ["plan", "world"])
def test_bytes_that_are_no_document(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    content, says = BYTES[name]
    path.write_bytes(content)
    _refused(path, kind, says)


@pytest.mark.parametrize("kind", ["plan", "world"])
def test_paths_that_lead_to_no_file(kind: str, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    _refused(tmp_path / "none.json", kind, "No such file")
    _refused(tmp_path / "folder.json", kind, "Is a directory")
    _refused(tmp_path / "a.json", kind, "symbolic links")
    for path in ("null\0byte.json", 3.5):
        load: Callable[[Any], Any] = autopar.Plan.load if kind == "plan" else World.load
        with pytest.raises(autopar.AutoparError, match="cannot read the"):
            load(path)


def test_files_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "LARGEST_BYTES", 2**20)
    with pytest.raises(autopar.WorldError, match="larger than 1 MiB"):
        World.load("/dev/zero")
    (tmp_path / "large.json").write_bytes(b" " * 2**20 + b"{}")
    with pytest.raises(autopar.PlanError, match="larger than 1 MiB"):
        autopar.Plan.load(tmp_path / "large.json")


def _refused(path: Path, kind: str, says: str) -> None:
    """By the library with the error of this kind and the file's name, by the command with 2."""
    error = autopar.PlanError if kind == "plan" else autopar.WorldError
    load: Callable[[Any], Any] = autopar.Plan.load if kind == "plan" else World.load
    with pytest.raises(error) as caught:
        load(path)
    assert str(path) in str(caught.value) and says in str(caught.value)
    command = ["show", str(path)] if kind == "plan" else ["plan", "gpt2", "--world", str(path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert error.__name__ in result.output


# -- versions --------------------------------------------------------------------------------------
def test_files_of_other_versions_say_so(data: Json, world: Json) -> None:
    for version in (2, 4, "3", 3.0, True, None):
        with pytest.raises(autopar.PlanError, match=r"is version .*reads version 3: plan again$"):
            autopar.Plan.from_json({**data, "version": version})
        with pytest.raises(autopar.WorldError, match=r"is version .*reads version 1: calibrate"):
            World.from_json({**world, "version": version}, "world.json")
    del data["version"], world["version"]
    with pytest.raises(autopar.PlanError, match="names no version, so it is of an older one"):
        autopar.Plan.from_json(data)
    assert World.from_json(world, "world.json") == World.preset("dgx-h100", 8)


class UpDown(nn.Module):
    """What the plans in earlier/ are for, with an input (4, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def test_a_plan_of_version_0_1_0_runs() -> None:
    """Written by 0.1.0, commit e971077 of 2026-11-23."""
    plan = autopar.Plan.load(EARLIER / "plan_3.json")
    assert plan.layout == "megatron" and plan.world == World.preset("laptop", 2)
    check = autopar.verify(UpDown(), None, (torch.randn(4, 8),), layout=plan)
    assert check.grad_error < 1e-9


@pytest.mark.parametrize(
    ("name", "says"),
    [  # written before 0.1.0, by the commits 91c86a8, 2cdab50 and 8cc8f89 of 2026-11-21
        ("plan_1", "is version 1, this autopar reads version 3: plan again"),
        ("plan_2", "is version 2, this autopar reads version 3: plan again"),
        ("plan_3_without_limit", "limit: it is missing, .* or of an old autopar. Plan again"),
    ],
)
def test_plans_of_earlier_versions_say_what_to_do(name: str, says: str) -> None:
    with pytest.raises(autopar.PlanError, match=rf"{name}.json .*{says}$"):
        autopar.Plan.load(EARLIER / f"{name}.json")


def test_a_world_of_an_earlier_version_is_read() -> None:
    """Written by commit 2cdab50 of 2026-11-21, when worlds had fewer fields."""
    assert World.load(EARLIER / "world_1.json") == World.preset("laptop", 2)


def test_contention_of_version_0_1_0_is_read_as_one_share(world: Json) -> None:
    """Calibration wrote `meeting_s`, and `takes_s` and `slows` of every pattern."""
    row = {"kind": "all_reduce", "ranks": 2, "start_s": 1e-3, "s_per_byte": 1e-9, "takes_s": 2e-3}
    strides = {1: 0.9, 2: 0.3, 4: 0.4}
    rows = [{**row, "pattern": [[2, stride]], "slows": slows} for stride, slows in strides.items()]
    rows.append({**rows[0], "together": False, "slows": 0.0})
    del world["contention"]
    read_back = World.from_json({**world, "meeting_s": 1e-3, "measured": rows}, "world.json")
    assert read_back.contention == 0.4 and len(read_back.measured) == 4
    assert World.from_json({**world, "meeting_s": 1e-3}, "world.json").contention == 0.0
    rows[0]["slows"], rows[1]["start_s"] = "much", "soon"
    with pytest.raises(autopar.WorldError, match=r"measured.1.start_s: .* \(it is 'soon'\)$"):
        World.from_json({**world, "measured": rows}, "world.json")
    with pytest.raises(autopar.WorldError, match=r"measured"):
        World.from_json({**world, "meeting_s": 1e-3, "measured": [1, "x"]}, "world.json")


# -- fields ----------------------------------------------------------------------------------------
def put(data: Json, path: str, value: Any) -> Json:
    *parents, last = path.split("/")
    place: Any = data
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[int(last) if isinstance(place, list) else last] = value
    return data


LINEAR = "choices/linear"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("seconds", "soon", "seconds: Input should be a valid number (it is 'soon')"),
        ("seconds", -1.0, "seconds: Input should be greater than or equal to 0 (it is -1.0)"),
        ("peak_bytes", float("nan"), "peak_bytes: Input should be a finite number"),
        ("comm_bytes", float("inf"), "comm_bytes: Input should be a finite number"),
        ("bound", 1e308, "bound: Input should be less than or equal to 1000"),
        ("limit", True, "limit: Input should be a valid number (it is True)"),
        ("optimizer", "adamv", "optimizer: it is one of adamw, adam, rmsprop"),
        ("optimizer", -3, "optimizer: it is one of adamw, adam, rmsprop"),
        ("fingerprint", "'; x", "fingerprint: String should match pattern"),
        ("planned", ["", ""], "planned.0: String should match pattern"),
        ("planned", ["0" * 16], "planned.1: it is missing"),
        ("mesh", "tp4.", "mesh: mesh 'tp4.': cannot read ''"),
        ("mesh", "a1.b1.c1.d1.tp4", "mesh: a1.b1.c1.d1.tp4 has 5 axes, 4 are the most"),
        ("mesh", "tp0", "mesh: mesh axis 'tp' has size 0"),
        ("mesh", "tp2", "mesh: mesh tp2 has 2 ranks, its world 4"),
        ("mesh", "tp" + "9" * 5000, "mesh: String should have at most 256 characters"),
        ("reduce_dtype", "float8", "reduce_dtype: Input should be 'float32' (it is 'float8')"),
        ("panels", ["row", "col"], "panels: 'row', 'col': the mesh has the axes tp"),
        ("panels", ["tp"], "panels: tp: give a row and a column axis of one size"),
        ("recompute", ["up", "up"], "recompute: 'up', 'up': name each block once"),
        ("copies", [["linear", -1, None]], "copies.0.1: Input should be greater than or equal"),
        ("smaller", [0, 1.0], "smaller.0: Input should be greater than or equal to 1 (it is 0)"),
        ("meshes", [["tp4", -1]], "meshes.0.1: Input should be greater than or equal to 0"),
        ("rows/0/bytes", None, "rows.0.bytes: Input should be a valid number (it is None)"),
        ("rows/0/more", 1, "rows.0.more: there is no field of this name"),
        ("collectives/0/kind", "sum", "collectives.0.kind: Input should be 'all_gather'"),
        ("collectives/0/axes", ["q"], "collectives.0.axes: 'q': the mesh has the axes tp"),
        ("memory/peak", -1, "memory.peak: Input should be greater than or equal to 0 (it is -1)"),
        (LINEAR, 7, "choices.linear: Input should be an object (it is 7)"),
        (f"{LINEAR}/splits", "n", "choices.linear.splits: Input should be a valid array"),
        (f"{LINEAR}/results/0/shape/0", -16, "choices.linear.results.0.shape.0: Input should be"),
        (f"{LINEAR}/results/0/shape/0", 16.0, "choices.linear.results.0.shape.0: Input should be"),
        (f"{LINEAR}/results/0/states", ["S(9,1)"], "choices.linear.results.0: state 'S(9,1)'"),
        (f"{LINEAR}/results/0/states", ["S(٣,1)"], "choices.linear.results.0: state 'S(٣,1)'"),
        (f"{LINEAR}/results/0/states", ["I", "I"], "choices.linear.results.0: 2 states, the mesh"),
        (f"{LINEAR}/results/0", None, "choices.linear.results.0: Input should be an object"),
        ("stored/p_up_bias/states", ["S(0,5)"], "stored.p_up_bias: axis tp of size 4 cannot"),
        ("world", None, "world: Input should be an object (it is None)"),
        ("world/levels/0/ranks", 0, "world.levels.0: Level.ranks is 0"),
    ],
)
def test_a_plan_is_refused_with_the_field(path: str, value: Any, says: str, data: Json) -> None:
    with pytest.raises(autopar.AutoparError) as caught:
        autopar.Plan.from_json(put(data, path, value), "my plan")
    assert says in str(caught.value) and str(caught.value).startswith("my plan")
    kind = autopar.WorldError if path.startswith("world") else autopar.PlanError
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("levels/0/bytes_per_s", 0, "levels.0: Level.bytes_per_s is 0.0: give a finite"),
        ("levels/0/bytes_per_s", 1e-30, "levels.0: Level.bytes_per_s is 1e-30: no machine has"),
        ("levels/0/ranks", 10**308, "levels.0: Level.ranks is 1000"),
        ("levels/0/latency_s", -1e-6, "levels.0: Level.latency_s is -1e-06"),
        ("levels/0/latency_s", float("nan"), "levels.0: Level.latency_s is nan"),
        ("device/flop_per_s/float32", 0, "device: Device.flop_per_s['float32'] is 0.0"),
        ("device/flop_per_s/float32", 1e308, "device: Device.flop_per_s['float32'] is 1e+308"),
        ("device/memory_bytes", 0, "device: Device.memory_bytes is 0.0"),
        ("device/memory_bytes_per_s", -1, "device: Device.memory_bytes_per_s is -1.0"),
        ("device/op_bytes_per_s", -1, "device: Device.op_bytes_per_s is -1.0"),
        ("device/launch_s", 1e9, "device: Device.launch_s is 1000000000.0"),
        ("launch_s", float("inf"), "World.launch_s is inf: give a finite number"),
        ("contention", -1, "World.contention is -1.0"),
        ("contention", 1.5, "World.contention is 1.5"),
        ("factors", {"all_reduce": 1e300}, "World.factors['all_reduce'] is 1e+300"),
        ("backend", "glop", "World.backend: 'glop' is none of fake, gloo"),
        ("device/efficiency", {"float32": [[1e9, 0]]}, "share is 0.0: give a finite"),
    ],
)
def test_a_world_is_refused_with_the_field(path: str, value: Any, says: str, world: Json) -> None:
    with pytest.raises(autopar.WorldError) as caught:
        World.from_json(put(world, path, value), "my world")
    assert says in str(caught.value) and str(caught.value).startswith("my world")


def test_levels_may_not_multiply_to_more_ranks_than_there_are(world: Json) -> None:
    world["levels"] *= 8
    with pytest.raises(autopar.WorldError, match=r"World has 16777216 ranks: 1,048,576 are the"):
        World.from_json(world, "world.json")


def test_messages_stay_short(data: Json) -> None:
    data["choices"] = {f"node {number}": "x" * 10_000 for number in range(1000)}
    with pytest.raises(autopar.PlanError, match="and 992 more") as caught:
        autopar.Plan.from_json(data)
    assert len(str(caught.value)) < 1500


# -- held against the rules ------------------------------------------------------------------------
def halved_sum(data: Json) -> None:
    """The second product's partial sums are handed on as if they were whole: half of the loss."""
    choice = next(c for c in data["choices"].values() if c["results"][0]["states"] == ["P"])
    choice["results"][0]["states"] = ["R"]


@pytest.mark.parametrize("digests", ["as planned", "of the file as it is", "wrong"])
def test_digests_switch_no_check_off(digests: str, data: Json, plan: autopar.Plan) -> None:
    model, args, _ = mlp()
    halved_sum(data)
    if digests == "of the file as it is":
        data["planned"] = _digests_of(data)
    if digests == "wrong":
        data["planned"] = ["0" * 16, "f" * 16]
    loaded = autopar.Plan.from_json(data)
    for use in (
        lambda: renew_plan(model, loaded, args),
        lambda: autopar.verify(model, None, args, layout=loaded),
        lambda: autopar.apply(model, loaded, args),
    ):
        with pytest.raises(autopar.PlanError, match=r"the plan lays .* which no way to run it"):
            use()


def _digests_of(data: Json) -> list[str]:
    """What autopar would write, had it planned this."""
    blank = dataclasses.replace(autopar.Plan.from_json(data), planned=("", ""))
    return list(blank.to_json()["planned"])


def test_splits_that_contradict_layouts_are_refused_with_right_digests_too(data: Json) -> None:
    model, args, _ = mlp()
    data["choices"]["linear"]["splits"] = ["k"]
    data["planned"] = _digests_of(data)
    loaded = autopar.Plan.from_json(data)
    assert not loaded.edited
    with pytest.raises(autopar.PlanError, match="change both"):
        renew_plan(model, loaded, args)


def test_every_output_has_its_layout(data: Json) -> None:
    model, args, _ = mlp()
    data["outputs"] = {}
    with pytest.raises(autopar.PlanError, match=r"`outputs` of the plan lacks '0'"):
        renew_plan(model, autopar.Plan.from_json(data), args)


def test_a_plan_that_was_changed_in_this_process_is_read_again() -> None:
    model, args, _ = mlp()
    planned = autopar.plan(model, 1, args)
    changed = dataclasses.replace(planned, stored={})
    with pytest.raises(autopar.InputError, match="that was changed since it was made"):
        autopar.apply(model, changed)
    with pytest.raises(autopar.PlanError, match="`stored` of the plan lacks"):
        autopar.apply(model, changed, args)


# -- what is printed and written -------------------------------------------------------------------
def test_names_in_a_file_are_no_markup(data: Json, tmp_path: Path) -> None:
    data["rows"][0] |= {"subgraph": "[/red]", "layout": "[/b]", "collectives": "[/i]"}
    data["recompute"] = ["[/blocks]"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["show", str(tmp_path / "plan.json")])
    assert result.exit_code == 0 and re.search(r"\[/red\].*\[/b\].*\[/i\]", result.output)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file(
    fails: str, plan: autopar.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path, world = tmp_path / "plan.json", tmp_path / "world.json"
    path.write_text("old plan")
    world.write_text("old world")
    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        for save in (lambda: plan.save(path), lambda: plan.world.save(world)):
            with pytest.raises(OSError, match="No space"):
                save()
    assert path.read_text() == "old plan" and world.read_text() == "old world"
    assert {file.name for file in tmp_path.iterdir()} == {"plan.json", "world.json"}


def test_a_save_follows_links_and_keeps_permissions(plan: autopar.Plan, tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("")
    (tmp_path / "real.json").chmod(0o640)
    (tmp_path / "link.json").symlink_to("real.json")
    plan.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert autopar.Plan.load(tmp_path / "real.json") == plan
    assert (tmp_path / "real.json").stat().st_mode & 0o777 == 0o640
    plan.save("/dev/null")
    assert not Path("/dev/null").is_file()


def test_a_byte_order_mark_is_no_mistake(plan: autopar.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("\ufeff" + json.dumps(plan.to_json()), encoding="utf-8")
    assert autopar.Plan.load(path) == plan
