"""The zoo: every model has a factory and a row; the page is what the rows say; one row is run."""

from __future__ import annotations

import json

import pytest

from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import catalog, page, rows

RESULTS = json.loads((zoo.DOCS / "models.json").read_text())
PROVEN = {layout: {"error": 1e-14, "nodes": 3} for layout in rows.LAYOUTS}


def test_forty_architectures_of_transformers_and_fifteen_plain_models():
    torch_models = catalog.FAMILIES["torch"]
    assert len(torch_models) >= 15 and len(catalog.FACTORIES) - len(torch_models) >= 40
    assert all(callable(factory) for factory in catalog.FACTORIES.values())
    assert sum(map(len, catalog.FAMILIES.values())) == len(catalog.FACTORIES)


def test_every_model_has_a_row_with_parity_or_a_reason():
    assert list(RESULTS["rows"]) == list(catalog.FACTORIES)
    for name, row in RESULTS["rows"].items():
        entries = row["layouts"].values()
        assert entries and all("error" in e or e["reason"] for e in entries), name


def test_the_page_is_what_the_rows_say():
    assert (zoo.DOCS / "models.md").read_text() == "\n".join(page.page_lines(RESULTS)) + "\n"


def test_enough_models_are_at_parity():
    proven = sum(page.at_parity(row) for row in RESULTS["rows"].values())
    assert proven >= 52 and proven / len(RESULTS["rows"]) >= 52 / 55


def test_a_layout_that_does_not_apply_is_no_failure_but_a_wrong_number_is():
    assert page.at_parity({"layouts": PROVEN})
    refused = {"reason": "LayoutError: layout megatron splits no matmul"}
    assert page.at_parity({"layouts": {**PROVEN, "megatron": refused}})
    assert not page.at_parity({"layouts": {**PROVEN, "auto": refused}})
    wrong = {"reason": "VerificationError: grad_error is 1e-3"}
    assert not page.at_parity({"layouts": {**PROVEN, "fsdp": wrong}})
    assert not page.at_parity({"layouts": {"auto": {"reason": "TraceError: no graph"}}})


def test_reasons_are_numbered_once_and_hold_no_path():
    entry = rows.reason(ValueError("in /home/user/lib/model.py: a | b"))
    assert entry["reason"] == "ValueError: in model.py: a | b"
    *_, first, second, _, reason = page.table_lines(
        {name: {"layouts": {"auto": entry, "fsdp": entry}} for name in ("x", "y")}
    )
    assert first.count("[1]") == second.count("[1]") == 2 and reason.startswith("1. ValueError")


def test_a_row_is_measured(capsys, tmp_path):
    files = [f"--json={tmp_path / 'models.json'}", f"--docs={tmp_path / 'models.md'}"]
    assert zoo.main(["mlp", *files]) == 0
    assert capsys.readouterr().out.startswith("mlp: parity")
    (row,) = json.loads((tmp_path / "models.json").read_text())["rows"].values()
    assert set(row["layouts"]) == set(rows.LAYOUTS) and not row["without_rule"]
    assert "| mlp |" in (tmp_path / "models.md").read_text()


def test_a_model_that_ends_its_process_costs_only_its_row(monkeypatch):
    monkeypatch.setitem(catalog.FACTORIES, "mlp", lambda: exit(3))
    assert zoo.run_apart("mlp", 60)["layouts"]["auto"]["reason"].endswith("exit code 3")


def test_an_unknown_name_is_refused():
    with pytest.raises(SystemExit):
        zoo.main(["no such model"])
