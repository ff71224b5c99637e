"""The zoo: every model has a factory and a row; the page is what the rows say; one row is run."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
import torch
from torch import nn

import autopar
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import catalog, expert_rows, page, real_models, real_rows, rows
from benchmarks.zoo.torch_models import Classifier

RESULTS = json.loads((zoo.HERE / "models.json").read_text())
REAL_BY_RANKS = {ranks: zoo.load_real(zoo.real_json(ranks)) for ranks in page.REAL_RANKS}
REAL = REAL_BY_RANKS[8]
EXPERTS = zoo.load_experts(zoo.HERE / "expert_rows.json")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", catalog.FACTORIES)
def test_every_model_is_planned_whole_with_its_memory(name):
    """A row proves a plan's numbers; `autopar.plan` also runs the peak and the step."""
    model, inputs = catalog.FACTORIES[name]()
    if name == "llama flex" and not torch.cuda.is_available():
        with pytest.raises(autopar.TraceError, match="FlexAttention does not support backward"):
            autopar.plan(model, 4, inputs)
        return
    plan = autopar.plan(model, 4, inputs)
    assert plan.peak_bytes > 0 and plan.step_seconds > 0


def test_the_page_is_what_the_rows_say():
    assert (
        zoo.PAGE.read_text() == "\n".join(page.page_lines(RESULTS, REAL_BY_RANKS, EXPERTS)) + "\n"
    )


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


@pytest.mark.slow
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


# -- real sizes ------------------------------------------------------------------------------------
def tiny():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 8))
    return Classifier(net), (torch.empty(32, 3, 8, 8), torch.empty(32, dtype=torch.int64))


def absent():
    sys.exit(3)


def forever():
    while True:
        pass


@pytest.mark.slow
def test_a_model_at_real_size_is_planned_under_each_layout(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(real_models, "FACTORIES", {"tiny": tiny, "absent": absent})
    saved = tmp_path / "real.json"
    files = [f"--real-json={saved}", f"--docs={tmp_path / 'models.md'}"]
    assert zoo.main(["--real", "--layouts=fsdp", *files]) == 0
    assert zoo.main(["--real", "--layouts=fsdp,auto", "tiny", *files]) == 0
    assert capsys.readouterr().out.count("tiny: ") == 2
    rows = json.loads(saved.read_text())
    assert rows["tiny"]["fsdp"]["whole"] == 0 and not rows["tiny"]["fsdp"]["no_rule"]
    assert rows["tiny"]["one rank"]["mesh"] == "one rank" and rows["tiny"]["auto"]["plan_s"] >= 0
    assert "the process ended with exit code" in rows["absent"]["reason"]
    text = (tmp_path / "models.md").read_text()
    assert "| tiny |" in text and "| absent |" in text and "1. the process ended" in text


@pytest.mark.slow
def test_a_plan_that_takes_too_long_costs_only_its_cells():
    assert real_rows.apart(forever, 1) == {"reason": "not done after 1 CPU seconds"}


def test_a_cell_that_took_too_long_is_tried_again_with_more_seconds():
    done, cut = {"seconds": 1.0}, {"reason": "not done after 120 CPU seconds"}
    row = {"parameters": 3, "fsdp": done, "auto": cut, "megatron": {"reason": "LayoutError"}}
    assert real_rows.still_known(row, 120) == row == real_rows.still_known(row, 60)
    assert "auto" not in real_rows.still_known(row, 400)
    assert real_rows.still_known({"reason": "it crashed"}, 120) == {}


def test_thirty_models_at_real_sizes():
    assert pickle.dumps(real_models.FACTORIES), "each plan has a process of its own"
    assert len(real_models.FACTORIES) >= 30 and real_models.GLOBAL_BATCH >= 4 * real_rows.RANKS


def test_no_model_at_real_size_runs_a_hundredth_of_its_flops_unsharded_under_fsdp():
    shares = {n: r["fsdp"]["whole"] for n, r in REAL.items() if "whole" in r.get("fsdp", {})}
    assert len(shares) > 20 and not {n for n, share in shares.items() if share >= 0.01}


# -- mixtures of experts ---------------------------------------------------------------------------
def test_no_rank_runs_experts_that_another_one_runs_too():
    planned = {name: row for name, row in EXPERTS.items() if "seconds" in row}
    assert planned and not any(row["whole_experts"] for row in planned.values())
    assert all("reason" in EXPERTS[name] for name in EXPERTS.keys() - planned.keys())
    left = [name for name in expert_rows.CASES if name not in EXPERTS]
    assert not left or f"Not planned yet: {', '.join(left)}." in zoo.PAGE.read_text()


def test_the_page_says_which_mixtures_take_longer_to_plan_than_twice_a_dense_model():
    for name, row in EXPERTS.items():
        said = f"- {name}: planning takes {page.times_dense(row):.1f} times" in zoo.PAGE.read_text()
        assert said == (row["plan_s"] > 2 * row["dense"]["plan_s"]), name


@pytest.mark.slow
def test_a_mixture_of_experts_is_planned_next_to_a_dense_model(monkeypatch, capsys, tmp_path):
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 1, "sliding_window": None,
    }  # fmt: skip
    monkeypatch.setattr(expert_rows, "CASES", {"tiny": expert_rows.Case("mixtral", sizes, 8)})
    monkeypatch.setattr(expert_rows, "planned_dense", lambda name, layers: {"plan_s": 1.0})
    monkeypatch.setattr(expert_rows, "apart", lambda function, seconds: function())
    saved, docs = tmp_path / "experts.json", tmp_path / "models.md"
    assert zoo.main(["--experts", f"--experts-json={saved}", f"--docs={docs}"]) == 0
    row = json.loads(saved.read_text())["tiny"]
    assert row["whole_experts"] == 0 and row["dense"]["plan_s"] > 0 and row["ranks"] == 8
    assert "| tiny |" in docs.read_text() and "tiny: {" in capsys.readouterr().out
