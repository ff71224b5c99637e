"""Lightning Fabric's loop and Accelerate's train a parallel model as plain torch trains one device:
two batches a step, clipped gradients, a schedule.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import autopar
from launch import launched


def facts_of(folder: Path, library: str) -> dict[str, Any]:
    return launched(folder, 2, library, script="adapter_ranks.py")


@pytest.mark.slow
def test_accelerate_trains_a_parallel_model_as_one_device_does(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    facts = facts_of(tmp_path, "accelerate")
    assert facts["losses"] == pytest.approx(facts["one device"], rel=1e-5)
    assert facts["as it was"]
    assert facts["rates"][1::2] == pytest.approx([5e-3, 2.5e-3, 1.25e-3])  # not once for each rank
    assert facts["refused"].startswith("InputError: ")
    assert "autopar.prepare has a Model, which is not parallel" in facts["refused"]


@pytest.mark.slow
def test_fabric_trains_and_goes_on_from_a_checkpoint_as_one_device_does(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    facts = facts_of(tmp_path, "fabric")
    assert facts["losses"] == pytest.approx(facts["one device"], rel=1e-5)
    assert facts["later"] == facts["losses"][2:]  # from the checkpoint, to the bit
    assert facts["rest"] == {} and facts["as it was"]
    assert facts["rows"] == [8]  # of the global batch
    refusals = [facts[name] for name in ("refused", "refused state", "refused load")]
    assert all(text.startswith("InputError: ") for text in refusals)
    assert "fabric.setup has a Model, which is not parallel" in facts["refused"]
    assert "0 parallel models and 0 optimizers" in facts["refused state"]
    assert "without a dict of what is loaded" in facts["refused load"]


def test_without_fabric_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0].startswith("lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(ImportError, match="pip install lightning"):
        autopar.fabric_strategy()
