"""Graphs as people read them: shapes, folded blocks, parts, and what a pass changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.ir.show import difference, listing


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.fixture(scope="module")
def graphs() -> dict[str, torch.fx.GraphModule]:
    plan = autopar.plan(Model(), 4, (torch.ones(4, 8),), "megatron")
    assert plan.context is not None
    return plan.context.graphs


def test_shapes_are_a_ranks_and_the_unsharded(graphs: dict[str, torch.fx.GraphModule]) -> None:
    lines = listing(graphs["rewrite"], shapes=True).splitlines()
    (up,) = (line for line in lines if line.strip().startswith("linear_default = linear("))
    assert up.endswith("# float32 4×4 of 4×16 tp:S(1)")
    (down,) = (line for line in lines if line.strip().startswith("linear_default_1 = linear("))
    assert down.endswith("# float32 4×8 tp:P")
    assert not any("float32" in line for line in listing(graphs["rewrite"]).splitlines())


def test_equal_blocks_are_folded(graphs: dict[str, torch.fx.GraphModule]) -> None:
    folded = listing(graphs["rewrite"], fold=True)
    assert "# blocks.2-3 as blocks.1" in folded  # the first has no sum to wait for
    assert "# blocks.1.up" in folded and "# blocks.2.up" not in folded
    assert "input p_blocks_1_up_weight" in folded and "input p_blocks_2_up_weight" not in folded
    whole = listing(graphs["rewrite"])
    assert "# blocks.3.up" in whole and len(folded.splitlines()) < len(whole.splitlines())


def test_a_block_that_differs_is_shown() -> None:
    model = Model(6)
    model.blocks[3].up = nn.Linear(8, 32)
    model.blocks[3].down = nn.Linear(32, 8)
    plan = autopar.plan(model, 4, (torch.ones(4, 8),), "megatron")
    assert plan.context is not None
    folded = listing(plan.context.graphs["rewrite"], fold=True)
    assert "# blocks.2 as blocks.1" in folded and "# blocks.3.up" in folded
    assert "# blocks.5 as blocks.4" in folded and "as blocks.3" not in folded


def test_masks_and_positions_are_one_line_where_folded() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(4)
            mask = rows.unsqueeze(1) >= rows
            return x.masked_fill(mask.logical_not(), 0.0)

    plan = autopar.plan(Masked(), 1, (torch.ones(4, 4),))
    assert plan.context is not None
    graph = plan.context.graphs["trace"]
    folded, whole = listing(graph, fold=True), listing(graph)
    assert "arange" in whole and "arange" not in folded and "masked_fill" in folded
    assert folded.count("ops that hang on no input: masks, positions") == 1


def test_a_part_is_shown_alone(graphs: dict[str, torch.fx.GraphModule]) -> None:
    part = listing(graphs["rewrite"], "blocks.1")
    assert "# blocks.1.up" in part and "blocks.0" not in part and "input" not in part
    with pytest.raises(PlanError, match=r"'blocks.9' names no subgraph of the graph; it has"):
        listing(graphs["rewrite"], "blocks.9")


def test_the_models_own_code_has_a_headline(graphs: dict[str, torch.fx.GraphModule]) -> None:
    assert "\n# (model)\n" in listing(graphs["rewrite"], fold=True)


def test_a_difference_is_what_a_pass_did(graphs: dict[str, torch.fx.GraphModule]) -> None:
    assert difference(graphs["annotate"], graphs["annotate"]) == ""
    changed = difference(graphs["rewrite"], graphs["finalize"]).splitlines()
    before, after = (set(listing(graphs[n]).splitlines()) for n in ("rewrite", "finalize"))
    assert {line[2:] for line in changed if line[0] == "-"} == {
        x for x in before - after if not x.startswith("# ") and x.strip()
    }
    assert {line[2:] for line in changed if line[0] == "+"} >= {
        x for x in after - before if not x.startswith("# ") and x.strip()
    }


def test_a_parallel_module_answers() -> None:
    par = autopar.parallelize(Model(), 1, (torch.ones(4, 8),))
    assert "# blocks.1-3 as blocks.0" in par.listing()
    assert "linear_2 = linear" in par.listing("blocks.1")
    assert "linear_4 = linear" not in par.listing("blocks.1")
    assert par.diff("trace", "rewrite") == difference(par.graphs["trace"], par.graphs["rewrite"])
    with pytest.raises(PlanError, match="there is no scheduled graph 'forward': there are"):
        par.listing(phase="forward")
    with pytest.raises(PlanError, match="there is no graph 'nothing': there are trace"):
        par.diff("trace", "nothing")
    assert "<pre>" in par._repr_html_()
