"""Words of the layouts: published figures, the lower bound, a count by autopar's own layouts."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import sympy
import torch
from sympy import Rational

from autopar.ir.mesh import Mesh
from benchmarks.model import formulas, words
from benchmarks.pictures.__main__ import IMAGES, PICTURES
from benchmarks.pictures.chains import CHAINS, Chain, Placed, blocks, place
from launch import ROOT

DOCS = ROOT / "docs"
SIZES = {"m": 64, "k": 16, "n": 32}  # unequal, so that no term of a formula can stand for another
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}

# The axes of each picture's mesh, by their symbols in the formulas.
AXES = {
    "ddp": {formulas.P: "data"},
    "fsdp": {formulas.P: "data"},
    "megatron": {formulas.P: "tp"},
    "megatron-sp": {formulas.P: "tp"},
    "atp": {formulas.d1: "x", formulas.d2: "y"},
    "3d": {formulas.on_m: "x", formulas.on_n: "y", formulas.on_k: "z"},
    "4d": {formulas.x: "x", formulas.y: "y", formulas.z: "z"},
    "2.5d": {formulas.q: "row", formulas.d: "depth"},
}
by_chain = pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)


# -- published -------------------------------------------------------------------------------------
def test_atp_all_reduce_words_of_a_transformer_layer():
    table = {
        (8, 1): 7.0,
        (4, 2): 6.0,
        (2, 4): 10.0,
        (16, 1): 7.5,
        (8, 2): 5.0,
        (4, 4): 6.0,
        (64, 1): 7.875,
        (32, 2): 4.25,
        (16, 4): 3.0,
        (8, 8): 3.5,
    }
    assert {grid: float(formulas.atp_layer(*grid)) for grid in table} == table


@pytest.mark.parametrize(
    ("ratio", "three_d", "two_d", "deep"),
    [(1, "1.000", "1.556", "1.667"), (4, "1.271", "1.648", "1.130")],
)
def test_forward_words_of_64_ranks_over_the_lower_bound(ratio, three_d, two_d, deep):
    def over_the_bound(name, grid):
        layout = words.BY_NAME[name]
        forward = words.at(layout.words.forward, layout, grid, ratio)
        return f"{float(forward / words.bound(64, ratio)):.3f}"

    assert over_the_bound("3d", (4, 4, 4)) == three_d
    assert over_the_bound("2d summa", (8,)) == two_d
    assert over_the_bound("2.5d", (4, 4)) == deep


def test_the_cube_meets_the_bound_exactly():
    cube = words.BY_NAME["3d"]
    assert words.at(cube.words.forward, cube, (4, 4, 4), 1) == Rational(9, 64) == words.bound(64, 1)


@pytest.mark.parametrize(("ratio", "deep", "flat"), [(16, "2.91", "5.58"), (1, "0.80", "0.66")])
def test_deep_and_flat_grids_of_64_ranks_forward_and_backward(ratio, deep, flat):
    for name, grid, figure in (("2.5d", (4, 4), deep), ("2d summa", (8,), flat)):
        layout = words.BY_NAME[name]
        assert f"{float(words.at(layout.words.again, layout, grid, ratio)):.2f}" == figure


def test_depth_pays_only_for_tall_inputs():
    assert words.break_even("forward") == Rational(5, 4)
    assert words.break_even("again") == Rational(7, 4)
    deep, flat = words.BY_NAME["2.5d"], words.BY_NAME["2d summa"]
    for ratio, deep_wins in ((Rational(17, 10), False), (Rational(18, 10), True)):
        of_deep = words.at(deep.words.again, deep, (4, 4), ratio)
        assert bool(of_deep < words.at(flat.words.again, flat, (8,), ratio)) == deep_wins


def test_zero_3_sends_three_times_the_parameters():
    """arXiv 1910.02054, section 7: 3Ψ against 2Ψ of plain data parallelism."""
    sharded, plain = formulas.fsdp().again, formulas.ddp().again
    assert sympy.limit(sharded / (formulas.k * formulas.n), formulas.P, sympy.oo) == 3
    assert sympy.simplify(sharded / plain) == Rational(3, 2)


def test_every_published_figure_is_met_to_its_digits():
    for entry in words.published():
        digits = len(entry.published.partition(".")[2])
        assert f"{float(entry.computed):.{digits}f}" == entry.published, entry.what


# -- the lower bound -------------------------------------------------------------------------------
def test_the_bound_is_continuous_and_knows_no_order():
    """Its three cases meet at P = m/n and at P = mn/k²."""
    m, n, k = 1024, 64, 16
    for edge in (m // n, m * n // k**2):
        at, beyond = (float(formulas.lower_bound(ranks, m, n, k)) for ranks in (edge, edge + 1))
        assert beyond == pytest.approx(at, rel=0.05)
        assert len({formulas.lower_bound(edge, *p) for p in itertools.permutations((m, n, k))}) == 1
    assert formulas.lower_bound(1, m, n, k) == 0


@pytest.mark.parametrize("name", ["fsdp", "megatron-sp", "3d", "2d summa"])
def test_layouts_with_one_copy_stay_above_the_bound_on_every_grid(name):
    layout = words.BY_NAME[name]
    for ranks, ratio in itertools.product(words.RANKS, words.RATIOS):
        for grid in layout.grids(ranks):
            assert words.at(layout.words.stored, layout, grid, ratio) == Rational(
                2 * ratio + 1, ranks
            )
            least = float(words.bound(ranks, ratio))
            assert float(words.at(layout.words.forward, layout, grid, ratio)) >= least - 1e-12


def test_copies_may_go_below_the_bound():
    assert words.row(words.BY_NAME["ddp"], 64, 1).of_bound == 0


# -- grids -----------------------------------------------------------------------------------------
def test_the_grid_of_fewest_words_is_found():
    assert words.row(words.BY_NAME["3d"], 64, 1).grid == "m=4 n=4 k=4"
    assert words.row(words.BY_NAME["atp"], 64, 1).grid == "d1=8 d2=8"
    assert words.row(words.BY_NAME["2.5d"], 64, 16).grid == "q=4 d=4"
    assert words.row(words.BY_NAME["2.5d"], 16, 1) == words.Row("2.5d")
    assert words.row(words.BY_NAME["4d"], 4, 16).grid == "x=1 y=1 z=1 data=4"  # that is ddp


def test_4d_has_its_neighbours_as_corners():
    corners = {
        (1, 1, 1, 64): ("ddp", (64,)),
        (1, 1, 64, 1): ("fsdp", (64,)),
        (1, 64, 1, 1): ("megatron", (64,)),
        (4, 16, 1, 1): ("atp", (16, 4)),
    }
    for grid, (name, of_corner) in corners.items():
        for part in ("forward", "again", "saved", "stored"):
            of_4d = words.at(getattr(formulas.four_d(), part), words.BY_NAME["4d"], grid, 4)
            corner = words.BY_NAME[name]
            expected = words.at(getattr(corner.words, part), corner, of_corner, 4)
            assert of_4d == expected, (name, part)


# -- counted again, by layouts and changes of state ------------------------------------------------
def _placed(chain: Chain) -> list[Placed]:
    return [place(matrix, Mesh.parse(chain.mesh), SIZES) for matrix in chain.matrices]


def _received(placed: Placed, backward: bool) -> float:
    """Words a rank receives for the changes of state of one matrix, by the ring formulas."""
    total = 0.0
    for step in placed.path:
        traffic = step.traffic(True)[backward]
        if traffic is not None:
            share = (step.group_size - 1) / step.group_size
            total += PASSES[traffic.collective] * share * traffic.elements
    return total


def _formula(chain: Chain, expression: sympy.Expr) -> float:
    sizes = Mesh.parse(chain.mesh).sizes
    values = {symbol: sizes[axis] for symbol, axis in AXES[chain.name].items()}
    loops = {getattr(formulas, dim): size for dim, size in SIZES.items()}
    return float(expression.subs(loops | values | {formulas.data: 1}))


@by_chain
def test_formulas_count_what_reshards_send(chain):
    """Two products have twice the words of one; their middle matrix is stored for both."""
    placed, chain_words = _placed(chain), words.BY_NAME[chain.name].words
    products = len(placed) // 2
    forward = sum(_received(matrix, backward=False) for matrix in placed)
    backward = sum(_received(matrix, backward=True) for matrix in placed)
    stored = (
        sum(matrix.stored.local_size for matrix in placed)
        + (products - 1) * placed[2].stored.local_size
    )
    assert forward / products == pytest.approx(_formula(chain, chain_words.forward), rel=1e-12)
    assert (forward + backward) / products == pytest.approx(
        _formula(chain, chain_words.saved), rel=1e-12
    )
    assert stored / products == pytest.approx(_formula(chain, chain_words.stored), rel=1e-12)


@by_chain
def test_formulas_repeat_the_gathers_of_operands(chain):
    placed, chain_words = _placed(chain), words.BY_NAME[chain.name].words
    operands = [
        operand
        for operand, matrix in zip(placed, chain.matrices, strict=True)
        if matrix.computed is None
    ]
    gathered = sum(_received(operand, backward=False) for operand in operands) / (len(placed) // 2)
    assert gathered == pytest.approx(
        _formula(chain, chain_words.again - chain_words.saved), rel=1e-12
    )


# -- pictures --------------------------------------------------------------------------------------
@by_chain
def test_the_drawn_blocks_multiply_to_the_result(chain):
    """Every rank multiplies its blocks of the lower row; joined, they are the whole product."""
    mesh, matrices = Mesh.parse(chain.mesh), chain.matrices
    generator = torch.Generator().manual_seed(0)
    for left, right, result in zip(matrices[:-2:2], matrices[1:-1:2], matrices[2::2], strict=True):
        operands = []
        for matrix in (left, right):
            shape = [SIZES[dim] for dim in matrix.dims]
            whole = torch.randn(shape, generator=generator, dtype=torch.float64)
            operand = type(matrix)(matrix.name, matrix.dims, matrix.stored, matrix.used)
            operands.append((whole, place(operand, mesh, SIZES).working))
        (x, of_x), (w, of_w) = operands
        at = [mesh.coordinate(rank) for rank in range(mesh.size)]
        parts = [of_x.cut(x, here) @ of_w.cut(w, here) for here in at]
        torch.testing.assert_close(place(result, mesh, SIZES).working.join(parts), x @ w)


@by_chain
def test_blocks_cover_every_entry_once_and_every_rank_its_share(chain):
    for placed in _placed(chain):
        for layout in (placed.stored, placed.working):
            rectangles = blocks(layout)
            assert sum(block.rows * block.columns for block in rectangles) == math.prod(
                layout.shape
            )
            for rank in range(layout.mesh.size):
                own = [block.rows * block.columns for block in rectangles if rank in block.owners]
                assert sum(own) == layout.local_size


@pytest.mark.parametrize("name", PICTURES)
def test_a_committed_picture_is_the_one_that_its_script_draws(name):
    drawn = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == PICTURES[name](), f"python -m benchmarks.pictures {name}"


# -- what the documentation says -------------------------------------------------------------------
def test_docs_hold_the_tables_that_the_benchmark_prints():
    text = (DOCS / "layouts.md").read_text(encoding="utf-8")
    for ratio in (1, 16):
        assert words.markdown(64, ratio) in text, (
            f"python -m benchmarks.model.words --markdown --ranks 64 --ratio {ratio}"
        )


def test_docs_show_every_picture():
    text = (DOCS / "layouts.md").read_text(encoding="utf-8")
    assert all(f"images/layout-{chain.name}.svg" in text for chain in CHAINS)


def test_json_holds_what_is_printed(tmp_path, capsys):
    words.main(["--ranks", "64", "--ratio", "1", "--json", str(tmp_path / "words.json")])
    assert "1.667" in capsys.readouterr().out
    document = json.loads((tmp_path / "words.json").read_text())
    by_layout = {row["layout"]: row for row in document["words"]}
    assert by_layout["3d"]["of_bound"] == 1.0 and by_layout["2.5d"]["forward"] == 15 / 64
    assert len(document["published"]) == 22
