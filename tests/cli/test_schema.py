"""--json of every command holds to its schema, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from autopar.cli import calibrate, main
from autopar.cli.schema import OUTPUTS, PlanFacts, Refusal, schema_of
from autopar.tools.doctor import Finding, examination
from autopar.world import World
from commands import COMMANDS, run

TINY = "targets:tiny"


def hold(kind: Any, text: str) -> None:
    """The text is what the type says: nothing lacks, nothing is there besides."""
    facts = json.loads(text)
    adapter = TypeAdapter(kind)
    value = adapter.validate_json(text)
    assert adapter.dump_python(value, mode="json", exclude_unset=True, by_alias=True) == facts


def test_every_command_has_a_schema() -> None:
    assert set(OUTPUTS) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_its_schema(name: str) -> None:
    """Whatever else is missing in the command line."""
    schema = json.loads(run(name, "--json-schema").stdout)
    assert schema == json.loads(json.dumps(schema_of(name)))
    assert {"$ref": "#/$defs/Refusal"} in schema["anyOf"] and len(schema["anyOf"]) > 1
    first = schema["$defs"][schema["anyOf"][0]["$ref"].rpartition("/")[2]]
    assert first["description"] and first["required"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("plans")
    paths = [str(folder / f"{name}.json") for name in ("ddp", "megatron")]
    for path in paths:
        run("plan", TINY, "--ranks", "4", "--layout", Path(path).stem, "--save", path)
    return paths


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", TINY, "--ranks", "4"),
        ("plan", TINY, "--ranks", "4", "--why", "up"),
        ("verify", TINY, "--ranks", "2", "--layout", "ddp"),
        ("show", "PLAN"),
        ("compare", "PLAN", "OTHER"),
        ("explain", "PLAN"),
        ("explain", "OTHER", "up", "--target", TINY),
        ("sweep", TINY, "--ranks", "2,4", "--price", "1", "--layout", "ddp"),
        ("trace", TINY),
        ("graph", TINY, "--ranks", "2", "--layout", "ddp"),
        ("advise", TINY, "--world", "dgx-h100", "--ranks", "2", "--for", "torchtitan"),
        ("doctor",),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_what_is_printed_is_what_the_schema_says(
    arguments: tuple[str, ...], saved: list[str]
) -> None:
    names = {"PLAN": saved[0], "OTHER": saved[1]}
    words = [names.get(word, word) for word in arguments]
    hold(OUTPUTS[words[0]], run(*words, "--json").stdout)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"calibrate", "doctor"}))
def test_a_refusal_is_what_the_schema_says(name: str) -> None:
    more = {"compare": ["nowhere.json"], "advise": ["--for", "torchtitan"]}
    words = ["nowhere.json", *more.get(name, [])]
    hold(Refusal, run(name, *words, "--json", status=2).stdout)


def test_a_sweep_without_a_plan_is_one_refusal() -> None:
    options = ("--world", "dgx-h100", "--layout", "ddp", "--ranks", "32", "--json")
    hold(Refusal, run("sweep", TINY, *options, status=2).stdout)


def test_calibrate_prints_what_its_schema_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World.of(1)
    monkeypatch.setattr(
        calibrate.calibrate_on_ranks, "calibrate_on_ranks", lambda *arguments: world
    )
    path = tmp_path / "world.json"
    text = run("calibrate", "--save", str(path), "--json").stdout
    hold(OUTPUTS["calibrate"], text)
    assert World.load(path) == world and json.loads(text)["saved"] == str(path)


def test_what_doctor_prints_of_its_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def check_each_rank(examined: examination.Examination) -> None:
        examined.check("first", lambda session: Finding("well", {"error": 1e-7}))
        examined.check("second", lambda session: Finding(fault="too far"))

    monkeypatch.setattr(examination, "check_each_rank", check_each_rank)
    monkeypatch.setattr(examination, "check_all_ranks", lambda examined: None)
    words = ["doctor", "--run", "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(main.app, words)
    assert result.exit_code == 1
    hold(OUTPUTS["doctor"], result.stdout)
    assert json.loads(result.stdout)["counts"]["failed"] == 1


def test_a_field_more_or_less_is_noticed(saved: list[str]) -> None:
    facts = json.loads(run("show", saved[0], "--json").stdout)
    with pytest.raises(ValidationError, match="extra"):
        hold(PlanFacts, json.dumps({**facts, "extra": 1}))
    del facts["mesh"]
    with pytest.raises(ValidationError, match="mesh"):
        hold(PlanFacts, json.dumps(facts))
