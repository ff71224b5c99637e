"""The world: presets, files, what is detected, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest
import torch

import autopar
from autopar.errors import WorldError
from autopar.runtime import apply
from autopar.world import PRESETS, Device, Level, Link, World, machines
from autopar.world.gpus import GPUS, NCCL_REACHES, known
from autopar.world.world import running_world

CORE = Device("core", {"float32": 4e10}, 8e9, 1e10)
NODES = World((Level(2, 6e8, 1e-4), Level(2, 5e7, 1e-3)), CORE, factors={"all_reduce": 1.1})


def star(ranks: int) -> nx.Graph:
    graph = nx.Graph()
    graph.add_edges_from(((r, "switch") for r in range(ranks)), bytes_per_s=1e9, latency_s=1e-6)
    return graph


def test_levels_multiply_to_ranks() -> None:
    assert NODES.ranks == 4
    assert World.from_graph(star(5), CORE).ranks == 5
    assert str(NODES) == (
        "4 ranks of core (0.04 TFLOP/s, 7.45 GiB each), gloo; "
        "links: 2 ranks at 0.6 GB/s and 100 µs, 2 groups at 0.05 GB/s and 1e+03 µs"
    )


def test_a_device_has_a_rate_for_every_dtype() -> None:
    device = Device("gpu", {"bfloat16": 3e14, "float32": 2e13}, 8e10, 2e12)
    assert device.flops == 3e14
    assert device.rate(torch.float16) == 3e14  # the other half precision
    assert device.rate(torch.float32) == device.rate(torch.float64) == 2e13
    assert CORE.flops == CORE.rate(torch.bfloat16) == 4e10


# -- presets ---------------------------------------------------------------------------------------
def test_the_presets_are_those_promised() -> None:
    promised = "dgx-a100 dgx-h100 dgx-b200 gb200-nvl72 perlmutter frontier alps pcie-4090"
    assert set(PRESETS) == {*promised.split(), "ethernet-25g", "laptop"}
    assert all(len(preset.source) > 20 for preset in PRESETS.values())


def test_dgx_h100_by_its_data_sheet() -> None:
    world = World.preset("dgx-h100", ranks=1024)
    assert [level.ranks for level in world.levels] == [8, 128]
    assert world.levels[0].bytes_per_s == NCCL_REACHES * 900e9 / 2
    assert world.levels[1].uplink(8) == NCCL_REACHES * 8 * 400e9 / 8
    assert world.device.flops == 989.4e12 and world.device.memory_bytes == 80e9
    assert world.backend == "nccl"


@pytest.mark.parametrize(
    ("name", "ranks", "levels"),
    [
        ("dgx-a100", 1, [1]),
        ("dgx-a100", 4, [4]),
        ("dgx-a100", 24, [8, 3]),
        ("gb200-nvl72", 144, [72, 2]),
        ("frontier", 1, [1]),
        ("frontier", 4, [2, 2]),
        ("frontier", 32768, [2, 4, 4096]),
        ("perlmutter", 4096, [4, 1024]),
        ("laptop", None, [4]),
    ],
)
def test_presets_of_any_size(name: str, ranks: int | None, levels: list[int]) -> None:
    world = World.preset(name, ranks=ranks)
    assert [level.ranks for level in world.levels] == levels
    assert ranks is None or world.ranks == ranks


def test_wires_to_gpus_that_are_not_used_lie_idle() -> None:
    assert World.preset("perlmutter", 2).levels[0].bytes_per_s == pytest.approx(75e9)


def test_a_preset_is_refused_with_what_there_is() -> None:
    with pytest.raises(WorldError, match=r"no world is called 'dgx'; there are dgx-a100, dgx-h100"):
        World.preset("dgx")
    with pytest.raises(WorldError, match=r"8 ranks a node: 12 ranks .* ask for 8 or 16"):
        World.preset("dgx-h100", ranks=12)
    with pytest.raises(WorldError, match=r"0 ranks"):
        World.preset("dgx-h100", ranks=0)


# -- files -----------------------------------------------------------------------------------------
EVERY = [*(World.preset(name) for name in PRESETS), NODES, World.from_graph(star(3), CORE)]


@pytest.mark.parametrize("world", EVERY, ids=lambda world: world.name or "own")
def test_a_world_comes_back_from_its_file(world: World, tmp_path: Path) -> None:
    world.save(tmp_path / "world.json")
    again = World.load(tmp_path / "world.json")
    assert again == world and hash(again) == hash(world)
    assert again.ranks == world.ranks and str(again) == str(world)


def test_units_stand_in_the_names(tmp_path: Path) -> None:
    NODES.save(tmp_path / "world.json")
    data = json.loads((tmp_path / "world.json").read_text())
    assert data["levels"][1] == {
        "ranks": 2, "bytes_per_s": 5e7, "latency_s": 1e-3, "per": "uplink", "direct": False,
    }  # fmt: skip
    assert set(data["device"]) == {
        "name", "flop_per_s", "memory_bytes", "memory_bytes_per_s", "efficiency", "launch_s",
        "forms", "attention", "op_bytes_per_s",
    }  # fmt: skip
    assert data["factors"] == {"all_reduce": 1.1}


def test_defaults_may_be_left_out(tmp_path: Path) -> None:
    NODES.save(tmp_path / "world.json")
    data = json.loads((tmp_path / "world.json").read_text())
    short = {"device": data["device"], "levels": data["levels"], "factors": data["factors"]}
    (tmp_path / "world.json").write_text(json.dumps(short))
    assert World.load(tmp_path / "world.json") == NODES


def change(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        data = data[int(name)] if isinstance(data, list) else data[name]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("levels.1.bytes_per_s", "fast", r"levels\.1\.bytes_per_s: .*number \(it is 'fast'\)"),
        ("levels.0.ranks", 2.5, r"levels\.0\.ranks: .*integer \(it is 2\.5\)"),
        ("levels.0.bandwidth", 1e9, r"levels\.0\.bandwidth: "),
        ("levels.0.bytes_per_s", -1, r"levels\.0: Level\.bytes_per_s is -1\.0: .* above 0"),
        ("levels.0.per", "node", r"levels\.0\.per: .*'uplink' or 'rank'"),
        ("levels", [], r"either levels or links"),
        ("device.flop_per_s.floot", 1e9, r"device: .*no dtype 'floot'"),
        ("device.memory_bytes", None, r"device\.memory_bytes: "),
        ("factors.sum", 2, r"factors names 'sum'; the collectives are all_gather"),
        ("version", 2, r"is version 2, this autopar reads version 1: calibrate again"),
    ],
)
def test_a_bad_file_is_refused_with_the_field(
    path: str, value: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "world.json"
    NODES.save(file)
    data = json.loads(file.read_text())
    change(data, path, value)
    file.write_text(json.dumps(data))
    with pytest.raises(WorldError, match=message) as caught:
        World.load(file)
    assert str(file) in str(caught.value)


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"cannot read the world in .*none\.json"):
        World.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"levels": [')
    with pytest.raises(WorldError, match=r"half\.json describes no world: Invalid JSON"):
        World.load(tmp_path / "half.json")


# -- what cannot be --------------------------------------------------------------------------------
def test_facts_that_cannot_be() -> None:
    with pytest.raises(WorldError, match=r"Level\.ranks is 0"):
        Level(0, 1e9, 0)
    with pytest.raises(WorldError, match=r"Level\.latency_s is -1"):
        Level(2, 1e9, -1)
    with pytest.raises(WorldError, match=r"Device\.memory_bytes is inf"):
        Device("d", {"float32": 1.0}, float("inf"), 1.0)
    with pytest.raises(WorldError, match="names no dtype"):
        Device("d", {}, 1.0, 1.0)
    with pytest.raises(WorldError, match=r"factors\['reduce'\] is 0"):
        World((Level(2, 1e9, 0),), CORE, factors={"reduce": 0})


def test_networks_that_cannot_be() -> None:
    with pytest.raises(WorldError, match=r"the ranks \[0, 2\]"):
        World((), CORE, links=(Link(0, "s", 1e9), Link(2, "s", 1e9)))
    with pytest.raises(WorldError, match="without a way"):
        World((), CORE, links=(Link(0, 1, 1e9), Link(2, 3, 1e9)))
    with pytest.raises(WorldError, match="twice"):
        World((), CORE, links=(Link(0, 1, 1e9), Link(1, 0, 1e9)))
    graph = star(2)
    del graph.edges[0, "switch"]["bytes_per_s"]
    with pytest.raises(WorldError, match="has no bytes_per_s"):
        World.from_graph(graph, CORE)


# -- what runs -------------------------------------------------------------------------------------
def test_what_a_world_may_be_given_as() -> None:
    assert World.of(NODES) is NODES
    assert World.of(3).ranks == 3 and World.of(3).backend == "gloo"
    fake_mesh = SimpleNamespace(mesh=torch.arange(6), mesh_dim_names=("x",))
    assert World.of(fake_mesh).ranks == 6
    for wrong in ("8", True, 0, -1):
        with pytest.raises(WorldError):
            World.of(wrong)


def test_what_is_no_world_is_named_in_short() -> None:
    plan = autopar.plan(torch.nn.Linear(2, 2), 1, (torch.ones(1, 2),))
    assert len(repr(plan)) > 100
    with pytest.raises(WorldError, match=r"of type Plan: Plan layout .*… of \d+ char") as error:
        World.of(plan)
    assert len(str(error.value)) < 200
    with pytest.raises(WorldError, match=r"of type Sequential: Sequential\( \(0\): Linear\("):
        World.of(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_torchruns_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World.detect().ranks == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert [level.ranks for level in World.detect().levels] == [8]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    world = World.detect()
    assert [level.ranks for level in world.levels] == [2, 4]
    assert world.levels[1].bytes_per_s < world.levels[0].bytes_per_s


def test_ranks_of_one_machine_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless OMP_NUM_THREADS says how many each takes."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    single, two, eight = (World.of(ranks).device for ranks in (1, 2, 8))
    assert single.flops == two.flops == eight.flops == 4 * machines.CPU_FLOP_PER_S
    monkeypatch.delenv("OMP_NUM_THREADS")
    alone, two, eight = (World.of(ranks).device for ranks in (1, 2, 8))
    assert alone == single and two.flops == single.flops / 2 and eight.flops == single.flops / 8
    assert two.memory_bytes_per_s == single.memory_bytes_per_s and two.launch_s == single.launch_s
    assert eight.memory_bytes_per_s == single.memory_bytes_per_s / 2
    assert eight.launch_s == 2 * single.launch_s
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert World.detect().device.flops == two.flops  # two ranks on each of two nodes


class Cuda:
    """Stands in for torch.cuda: so many GPUs of one name."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, count: int, peers: bool) -> None:
        facts = SimpleNamespace(name=name, total_memory=85e9)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)


def test_gpus_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, "NVIDIA H100 80GB HBM3", 8, peers=True)
    world = World.of(32)
    assert [level.ranks for level in world.levels] == [8, 4]
    assert world.levels[0].bytes_per_s == pytest.approx(360e9) and world.backend == "nccl"
    assert world.device.flops == 989.4e12 and world.device.memory_bytes == 85e9
    assert world.device.name == "NVIDIA H100 80GB HBM3"


def test_ranks_of_gloo_run_on_cpus_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, "NVIDIA H100 80GB HBM3", 8, peers=True)
    for kinds, name in (
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu"),
        ({"cpu": "gloo"}, "cpu"),
        ({"cpu": "gloo", "cuda": "nccl"}, "NVIDIA H100 80GB HBM3"),
        ({"cuda": "nccl"}, "NVIDIA H100 80GB HBM3"),
    ):
        monkeypatch.setattr(machines, "backends", lambda kinds=kinds: kinds)
        world = World.of(8)
        assert world.device.name == name
        assert world.backend == ("gloo" if name == "cpu" else "nccl")


def test_no_nvlink_without_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, "NVIDIA GeForce RTX 4090", 2, peers=False)
    slow = World.of(2).levels[0].bytes_per_s
    assert slow == pytest.approx(31.5e9 / 2)
    Cuda(monkeypatch, "NVIDIA A100-SXM4-80GB", 2, peers=False)
    assert World.of(2).levels[0].bytes_per_s == slow
    assert World.of(2).device.memory_bytes_per_s == 2039e9


def test_a_gpu_is_known_by_its_drivers_name() -> None:
    names = {
        "NVIDIA GH200 120GB": "GH200", "NVIDIA GB200": "GB200", "NVIDIA B200": "B200",
        "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA A100-SXM4-40GB": "A100", "Tesla T4": "T4",
        "Tesla V100-SXM2-16GB": "V100", "NVIDIA A10G": "A10", "NVIDIA Quadro": None,
        "NVIDIA A100-PCIE-40GB": "A100-PCIE-40GB", "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
        "NVIDIA H100 NVL": "H100 NVL", "NVIDIA H20": "H20", "NVIDIA H200": "H200",
        "NVIDIA B300 SXM6 AC": "B300", "NVIDIA GB300": "GB300", "NVIDIA L4": "L4",
        "NVIDIA L40": "L40", "NVIDIA L40S": "L40S", "NVIDIA A40": "A40", "NVIDIA A10": "A10",
        "NVIDIA GeForce RTX 3090": "RTX 3090", "Quadro RTX 6000": "Quadro RTX 6000",
        "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada", "AMD Instinct MI250X": "MI250X",
        "AMD Instinct MI300X": "MI300X", "NVIDIA RTX A1000": None, "NVIDIA RTX A4000": None,
    }  # fmt: skip
    assert {name: known(name) for name in names} == names
    assert all(gpu.flops > 0 for gpu in GPUS.values())
    assert known("AMD Radeon Graphics", "gfx90a:sramecc+:xnack-") == "MI250X"


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA A100-PCIE-40GB", 31.5e9),
        ("NVIDIA A100 80GB PCIe", 31.5e9),
        ("NVIDIA H100 NVL", 63e9),
        ("NVIDIA L40S", 31.5e9),
        ("NVIDIA H20", 360e9),
        ("NVIDIA B300 SXM6 AC", 720e9),
        ("AMD Instinct MI300X", 358.4e9),
    ],
)
def test_cards_in_slots_have_no_links_to_all(
    monkeypatch: pytest.MonkeyPatch, name: str, rate: float
) -> None:
    Cuda(monkeypatch, name, 4, peers=True)
    assert World.of(4).levels[0].bytes_per_s == pytest.approx(rate)  # as NCCL reaches it


def test_what_is_assumed_of_an_unknown_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, "NVIDIA X900", 4, peers=True)
    with pytest.warns(
        UserWarning, match="nothing is known of a NVIDIA X900: it is planned as an A100"
    ):
        assert World.of(4).levels[0].bytes_per_s == 31.5e9


# -- what was calibrated here ----------------------------------------------------------------------
def test_what_was_calibrated_here_is_what_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    seen, note = running_world()
    assert seen == World.detect() and seen.ranks == 4
    assert note.startswith("links are assumed, not measured (4 ranks of cpu")
    assert "autopar calibrate` takes two minutes" in note
    measured = dataclasses.replace(seen, launch_s=1.25e-4)
    measured.save("world.json")
    world, note = running_world()
    assert world == dataclasses.replace(measured, name="world.json")
    assert note == "the world is world.json, which was calibrated"
    assert apply.named_or_running(None) == world  # what parallelize takes
    assert f"autopar: {note}\n" in capsys.readouterr().err
    assert apply.named_or_running(8).name == ""
    monkeypatch.setenv("WORLD_SIZE", "8")
    world, note = running_world()
    assert world == World.detect()
    assert note.startswith("world.json is of 4 ranks and does not count for 8; links are assumed")
    elsewhere = dataclasses.replace(World.preset("dgx-h100", 8))
    elsewhere.save("world.json")
    world, note = running_world()
    assert world.device.name == "cpu"
    assert note.startswith("world.json is of H100 with nccl, here is cpu with gloo: it does not")
