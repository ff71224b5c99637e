"""The layouts of the literature compute what one device does: every named layout, grids with their
corners, hybrids; and where sizes do not fit, an error says so.

All ranks run in lockstep in float64; `autopar.verify` compares every node, the loss, every gradient
and the parameters after three AdamW steps. Labels have unequal numbers of ignored tokens a row, so
unequal numbers on the shards of any layout that splits rows.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
import models
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.planner import exact_search
from autopar.planner.request import Grid2D, Grid3D, Grid4D, Grid25D, GridHSDP, Layouts
from launch import launched
from training_facts import check_layout

LIMIT = 1e-9
MODELS = ["gpt", "llama", "gpt2", "t5"]
NAMES = ["megatron-sp", "atp", "3d", "4d", "2.5d"]  # test_parity.py has the others
WORLDS = [4, 8, 16]

pytestmark = pytest.mark.usefixtures("traced_once")
_examples: dict[str, tuple[nn.Module, Any]] = {}


# -- models ----------------------------------------------------------------------------------------
THREES: dict[str, dict[str, int]] = {  # sizes that 2, 3 and 6 divide; the batch is 12
    "gpt": {"vocabulary": 144, "hidden": 72, "heads": 6},
    "gpt2": {"vocab_size": 144, "n_embd": 72, "n_head": 6},
    "llama": {
        "vocab_size": 144,
        "hidden_size": 72,
        "intermediate_size": 144,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 12,
    },
    "t5": {"vocab_size": 144, "d_model": 72, "d_kv": 12, "d_ff": 144, "num_heads": 6},
}


def example(name: str) -> tuple[nn.Module, Any]:
    """(model, inputs) of models.py, or one of those below; one and the same all through this
    process. "gpt in threes" has sizes that three divides.
    """
    if name not in _examples:
        base, _, variant = name.partition(" ")
        build = globals().get(base) or getattr(models, base)
        model, args, kwargs = build()
        _examples[name] = in_threes(base, model) if variant else (model, args or kwargs)
    return _examples[name]


def in_threes(name: str, model: nn.Module) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    sizes = THREES[name]
    ids = torch.randint(0, 144, (12, models.SEQUENCE))
    if name == "gpt":
        return models.GptWithLogits(**sizes), (ids, models.ignore_some(ids.roll(-1, 1)))
    config = copy.deepcopy(model.config)
    config.update(sizes)
    inputs = {"input_ids": ids, "labels": models.ignore_some(ids)}
    return type(model)(config).train(), inputs  # type: ignore[call-arg]


class Products(nn.Module):
    """A chain of products and nothing else: widths a, b, a, b, …"""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return ((x - target) ** 2).mean()


def products(*widths: int, rows: int = 64) -> models.Example:
    torch.manual_seed(0)
    inputs = (torch.randn(rows, widths[0]), torch.randn(rows, widths[-1]))
    return Products(widths), inputs, {}


def even_chain() -> models.Example:
    return products(32, 64, 32, 64, 32)


def odd_chain() -> models.Example:
    return products(32, 64, 32, 64)


def phi3() -> models.Example:
    """One weight for q, k and v, whose parts are uneven: 8 heads of q, 4 of k, 4 of v."""
    from transformers.models.phi3.configuration_phi3 import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM

    torch.manual_seed(0)
    config = Phi3Config(**models.decoder_config(), pad_token_id=0)
    return Phi3ForCausalLM(config).train(), (), models.decoder_inputs()


def few_kv() -> models.Example:
    """Llama with two heads of keys and values: fewer than most axes have ranks."""
    return models.llama(num_key_value_heads=2)


def holds(name: str, ranks: int, layout: Layouts) -> None:
    model, inputs = example(name)
    check = autopar.verify(model, ranks, inputs, layout=layout)
    assert check.ranks == ranks and check.nodes > 0
    assert check.loss_error < LIMIT
    assert check.grad_error < LIMIT
    assert check.step_error < LIMIT


def planned(name: str, ranks: int, layout: Layouts) -> Plan:
    model, inputs = example(name)
    return autopar.plan(model, ranks, inputs, layout=layout)


# -- names -----------------------------------------------------------------------------------------
def _names() -> list[Any]:
    """Every model under every name on every world; one world of each pair by default."""
    cases = []
    for i, name in enumerate(MODELS):
        for j, layout in enumerate(NAMES):
            for k, ranks in enumerate(WORLDS):
                marks = [] if (i + j) % len(WORLDS) == k else [pytest.mark.slow]
                cases.append(pytest.param(name, ranks, layout, marks=marks))
    return cases


@pytest.mark.slow_cells("gpt-4-4d")
@pytest.mark.slow_cells(
    "*-16-*", "gpt-4-megatron-sp", "gpt-8-2.5d", "gpt-8-atp", "gpt2*", "llama-*", "t5*",
)  # fmt: skip
@pytest.mark.parametrize(("name", "ranks", "layout"), _names())
def test_a_named_layout_equals_one_device(name: str, ranks: int, layout: str) -> None:
    holds(name, ranks, layout)


# -- grids -----------------------------------------------------------------------------------------
GRIDS: list[tuple[int, Layouts]] = [
    (4, Grid25D(2)),
    (8, Grid25D(2, 2)),
    (16, Grid25D(4)),
    (16, Grid4D(2, 2, 2, 2)),
    (16, Grid4D(4, 2, 2, 1)),
    (16, Grid4D(2, 4, 1, 2)),
    (16, Grid4D(1, 1, 4, 4)),
    (8, Grid2D(4, 2)),
    (8, Grid2D(2, 4)),
    (8, Grid2D(4, 2, "row")),
    (8, Grid3D(2, 2, 2)),
    (8, GridHSDP(2, 2, 2)),
    (16, GridHSDP(2, 2, 4, sequence=False)),
]
IN_THREES: list[tuple[int, Layouts]] = [
    (18, Grid25D(3, 2)),
    (12, Grid4D(3, 2, 2, 1)),
    (6, Grid2D(3, 2)),
    (12, Grid3D(2, 3, 2)),
]


def _grids(grids: list[tuple[int, Layouts]], variant: str = "") -> list[Any]:
    """Every model on every grid; two models of each grid by default."""
    cases = []
    for i, (ranks, grid) in enumerate(grids):
        for j, name in enumerate(MODELS):
            marks = [] if (i + j) % 2 == 0 else [pytest.mark.slow]
            cases.append(pytest.param(name + variant, ranks, grid, marks=marks))
    return cases


@pytest.mark.slow_cells(
    "* in threes-18-*", "gpt in threes-6-*", "gpt-16-Grid25D*",
    "gpt-16-Grid4D(x=1, y=1, z=4, data=4)", "gpt-16-Grid4D(x=4*",
    "gpt-16-GridHSDP(replicate=2, shard=2, tensor=4, sequence=False)",
    "gpt-8-Grid2D(d1=2, d2=4, first='column')", "gpt-8-Grid3D(x=2, y=2, z=2)", "gpt2*", "llama*",
    "t5*",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "ranks", "grid"), [*_grids(GRIDS), *_grids(IN_THREES, " in threes")], ids=str
)
def test_a_grid_equals_one_device(name: str, ranks: int, grid: Layouts) -> None:
    holds(name, ranks, grid)


def test_hsdp_stores_replicas_of_shards_and_splits_the_sequence() -> None:
    for sequence, stream in ((True, "tensor→dim 1"), (False, "tensor→I")):
        plan = planned("gpt", 8, GridHSDP(2, 2, 2, sequence))
        up = plan.stored["p_blocks_0_up_weight"]
        assert up.state("replicate").kind == "I"
        assert up.state("shard").kind == up.state("tensor").kind == "S"
        norms = [row.layout for row in plan.rows if row.subgraph.endswith("_norm")]
        assert norms == [f"replicate→dim 0, shard→dim 0, {stream}"] * 2


@pytest.mark.slow_cells("even_chain-Grid25D(q=4, d=4, panels=True)")
@pytest.mark.slow_cells("even_chain-Grid25D(q=8*", "odd_chain-*")
@pytest.mark.parametrize("grid", [Grid25D(4, 4), Grid25D(8)], ids=str)
@pytest.mark.parametrize("name", ["even_chain", "odd_chain"])
def test_chains_on_64_ranks(name: str, grid: Layouts) -> None:
    holds(name, 64, grid)


@pytest.mark.parametrize("layout", [Grid2D(2, 2), Grid4D(2, 2, 2, 1), Grid3D(2, 2, 2), "megatron"])
@pytest.mark.parametrize("name", ["even_chain", "odd_chain"])
def test_a_chain_of_linears_equals_one_device(name: str, layout: Layouts) -> None:
    holds(name, 4 if layout == Grid2D(2, 2) else 8, layout)


@pytest.mark.slow_cells("*phi3", "*z=2, data=2)-*", "Grid4D(x=2, y=4, z=1, data=2)-bert")
@pytest.mark.parametrize("name", ["bert", "phi3"])
@pytest.mark.parametrize("grid", [Grid4D(2, 2, 2, 2), Grid4D(2, 4, 1, 2)], ids=str)
def test_4d_with_an_odd_chain_and_with_an_uneven_weight(name: str, grid: Layouts) -> None:
    holds(name, 16, grid)


@pytest.mark.slow_cells("8-Grid2D(d1=4, d2=2, first='column')")
@pytest.mark.slow_cells("16-*", "8-megatron-sp", "8-megatron")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (8, "megatron"),
        (8, "megatron-sp"),
        (8, Grid2D(4, 2)),
        (16, Grid4D(2, 4, 2, 1)),
        (16, Grid25D(4)),
    ],
    ids=str,
)
def test_fewer_heads_of_keys_than_ranks(ranks: int, layout: Layouts) -> None:
    holds("few_kv", ranks, layout)


# -- panels ----------------------------------------------------------------------------------------
def test_panels_come_twice_where_gathers_are_saved() -> None:
    """With panels: every product is one, and what it takes in is sent again for the backward pass.
    Without: the same layouts, and gathers, whose results are kept.
    """
    panels, whole = (planned("gpt", 8, Grid25D(2, 2, panels=on)) for on in (True, False))
    again = sum(c.bytes for c in panels.collectives if c.kind == "broadcast" and c.backward)
    assert again > 0 and panels.comm_bytes - again == pytest.approx(whole.comm_bytes)
    assert panels.stored == whole.stored and panels.choices == whole.choices
    count = [
        sum("summa_linear" in str(n.target) for n in plan.context.program.module.graph.nodes)
        for plan in (panels, whole)
    ]
    assert count == [4 * models.LAYERS, 0]


@pytest.mark.slow_cells("gpt")
@pytest.mark.slow_cells("llama")
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_25d_without_panels_equals_one_device(name: str) -> None:
    holds(name, 8, Grid25D(2, 2, panels=False))


# -- hybrids ---------------------------------------------------------------------------------------
HYBRIDS: list[tuple[int, dict[str, Any]]] = [
    (8, {"blocks.*.attention": "fsdp", "*": "megatron"}),
    (8, {"blocks.*": Grid4D(2, 2, 2, 1), "*": "fsdp"}),
    (4, {"blocks.0": Grid25D(2), "blocks.1": Grid2D(2, 2), "*": "ddp"}),
    (4, {"blocks.0": "auto", "*": Grid2D(2, 2)}),
]


@pytest.mark.slow_cells("1", "2", "3")
@pytest.mark.parametrize(("ranks", "layout"), HYBRIDS, ids=[str(number) for number in range(4)])
def test_a_hybrid_layout_equals_one_device(ranks: int, layout: dict[str, Any]) -> None:
    holds("gpt", ranks, layout)


def test_a_hybrid_is_what_each_part_says() -> None:
    """Attention stores its weights split on rows or columns by data (FSDP) and splits the batch,
    all else is Megatron's: no batch split, the MLP's width is.
    """
    plan = planned("gpt", *HYBRIDS[0])
    (axis,) = plan.mesh.names
    wanted = {"attention": f"{axis}→m", "up": f"{axis}→n", "down": f"{axis}→k"}
    rows = [(row.subgraph.split("."), row.layout) for row in plan.rows]
    layouts = [(parts[-1], layout) for parts, layout in rows if parts[-1] in wanted]
    assert set(layouts) == wanted.items()


def test_a_hybrid_has_the_panels_of_its_grid() -> None:
    plan = planned("gpt", *HYBRIDS[2])
    panels = [n for n in plan.context.program.module.graph.nodes if "summa_linear" in str(n.target)]
    assert len(panels) == 4


# -- three axes on one dim -------------------------------------------------------------------------
CROWDED: dict[str, Layouts] = {  # each layout of one axis on a mesh of three; "norm" is small
    name: {"norm": Grid3D(2, 2, 2), "*": name}
    for name in ("ddp", "fsdp", "megatron", "megatron-sp")
}
CROWDED |= {"3d": Grid3D(2, 2, 2), "4d": Grid4D(2, 2, 2, 2)}


def most_digits(plan: Plan) -> int:
    """The largest number of axes that split one dim of any value of a plan."""
    choices = [x for c in plan.choices.values() for x in (*c.operands, *c.results) if x is not None]
    layouts: list[Layout] = [*plan.stored.values(), *plan.inputs.values(), *choices]
    return max(len(x.digits(dim)) for x in layouts for dim in range(len(x.shape)))


@pytest.mark.slow_cells("gpt-ddp")
@pytest.mark.slow_cells("gpt-3d", "gpt-4d", "gpt-fsdp", "gpt-megatron-sp", "gpt-megatron", "t5-4d")
@pytest.mark.parametrize(
    ("name", "layout"), [*(("gpt", layout) for layout in CROWDED), ("t5", "4d")]
)
def test_three_axes_on_one_dim(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage is made dear, so that parameters are split as far as their layout allows."""
    monkeypatch.setattr(
        exact_search, "optimizer_seconds", lambda layout, *_: float(layout.local_size)
    )
    ranks = 16 if layout == "4d" else 8
    assert most_digits(planned(name, ranks, CROWDED[layout])) >= 3
    holds(name, ranks, CROWDED[layout])


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_ignored_tokens_are_unequal(name: str) -> None:
    """On all shards of the batch by two, by four and by eight."""
    _, inputs = example(name)
    labels = inputs["labels"] if isinstance(inputs, Mapping) else inputs[1]
    for shards in (2, 4, 8):
        counts = [int((part == -100).sum()) for part in labels.chunk(shards)]
        assert len(set(counts)) > 1, counts


# -- real ranks ------------------------------------------------------------------------------------
@pytest.mark.slow  # 8 processes on 2 cores: two minutes; test_training has 4
def test_grids_on_eight_processes(tmp_path: Path) -> None:
    """Over gloo, in float32: one launch for all layouts."""
    facts = launched(tmp_path, 8, "grids")["grids"]
    meshes = {layout: seen["mesh"] for layout, seen in facts.items()}
    assert list(meshes.values()) == ["z2.x2.y2", "depth2.row2.col2", "x4.y2", "x2.y4", "tp8"]
    for layout, seen in facts.items():
        check_layout(seen, f"{layout} on 8 ranks: ")


# -- errors ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ranks", "layout", "said"),
    [
        (8, Grid4D(2, 2, 2, 2), ["2 · 2 · 2 · 2 = 16 ranks, the world has 8", "product is 8"]),
        (8, Grid25D(1, 2), ["q must be at least d", "for 8 ranks use Grid25D(2, 2)"]),
        (8, Grid25D(1, 8), ["q must be at least d", "for 8 ranks use Grid25D(2, 2)"]),
        (7, "2.5d", ["7 ranks are none", "use 4, 8, 9, 16"]),
        # more ranks than padding to twice the rows would give one
        (37, "fsdp", ["axis data of 37 ranks on the factor batch", "a batch of 16", "use a batch"]),
        (289, Grid25D(17), ["axis row of 17 ranks", "a batch of 16", "a batch that 17 divides"]),
        (
            12,
            Grid4D(3, 2, 2, 1),
            [
                "axis x of 3 ranks",
                "9 of 9 products",
                "qkv (k = 64, n = 3 × 8 × 8 stays whole)",
                "; use an axis",
            ],
        ),
        # more ranks than padding to twice a size would give a part
        (
            1031,
            "megatron",
            ["axis tp of 1031 ranks", "blocks.0.up (k = 64 stays whole, n = 256)", "other sizes"],
        ),
        (
            2062,
            "atp",
            ["no grid of 'atp' fits", "Grid2D(d1=1, d2=2062", "other sizes in the model"],
        ),
        (1031, Grid3D(1031, 1, 1), ["axis x of 1031 ranks", "blocks.0.up (k = 64, n = 256)"]),
        (8, "zero", ["unknown layout 'zero'", "megatron-sp", "2.5d"]),
        (8, 3, ["layout is 3", "megatron-sp"]),
        (8, Grid4D(-2, -2, 2, 1), ["whole numbers, 1 or more"]),
        (8, GridHSDP(2, 2, 0), ["whole numbers, 1 or more"]),
        (8, GridHSDP(8, 4), ["8 · 4 · 1 = 32 ranks, the world has 8"]),
        (8, Grid2D(8, -1), ["whole numbers, 1 or more"]),
        (8, Grid2D(4, 2, "diagonal"), ["`first` is 'column' or 'row'"]),
        (8, {}, ["an empty dict", "'*' for all"]),
        (8, {"*": "auto"}, ["nothing but 'auto'", "use layout='auto'"]),
        (8, {"*": "atp"}, ["layout 'atp' in a dict", "auto, ddp, fsdp"]),
        (8, {"blocks.0": Grid2D(2, 4), "*": Grid2D(4, 2)}, ["has mesh x4.y2", "of equal sizes"]),
        (37, {"blocks.0": "ddp", "*": "megatron"}, ["a batch of 16"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said(ranks: int, layout: Any, said: list[str]) -> None:
    with pytest.raises(autopar.LayoutError) as error:
        planned("gpt", ranks, layout)
    for part in said:
        assert part in str(error.value), str(error.value)


class _OfParameters(nn.Module):
    """No input with dims, so there is no batch to split."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.down = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 4)

    def forward(self, scale: Tensor | float = 1.0) -> Tensor:
        return (self.down(self.table) * scale).square().mean()


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron", "auto"])
@pytest.mark.parametrize("inputs", [(), (torch.tensor(2.0),)], ids=["none", "a scalar"])
def test_without_a_batch_every_rank_computes_all(layout: str, inputs: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    assert autopar.verify(_OfParameters(), 2, inputs, layout=layout).ranks == 2
