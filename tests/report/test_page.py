"""The page of a report: its facts are the plan's, it needs no network, and a browser shows it."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.formula import ELEMENT
from autopar.cost.peak import moments
from autopar.cost.symbols import MEANING
from autopar.ir.layout import I, Layout, S
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Row, format_bytes, format_seconds
from autopar.tools.report import alternatives, facts, figures, page, pictures
from commands import refused, run

WORLD = autopar.World.preset("dgx-h100", 16)
MOST_BYTES = 6_000_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


INPUTS = (torch.ones(64, 64),)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(model(), WORLD, INPUTS, autopar.Grid4D(x=2, y=2, data=4), smaller=False)


@pytest.fixture(scope="module")
def gathered(plan: Plan) -> facts.Facts:
    return facts.gather(plan, "three <blocks>", INPUTS)


@pytest.fixture(scope="module")
def text(gathered: facts.Facts) -> str:
    return page.render(gathered)


# -- facts -----------------------------------------------------------------------------------------
def test_the_first_screen_has_the_plans_figures(plan: Plan, gathered: facts.Facts) -> None:
    cards = {card.name: card.value for card in gathered.cards}
    assert cards["mesh"] == "data4.x2.y2"
    assert cards["step"].startswith(format_seconds(plan.overlapped or 0.0))
    assert cards["memory"] == format_bytes(plan.peak_bytes)
    assert cards["samples/s"] and cards["gap"] == f"{plan.gap:.2%}"
    assert gathered.why.startswith("Mesh data4.x2.y2 under layout Grid4D")


def test_the_named_layouts_are_those_of_a_plan_of_each(plan: Plan, gathered: facts.Facts) -> None:
    others = {other.layout: other for other in gathered.others}
    # it has neither experts nor a long causal sequence
    assert set(others) == set(alternatives.NAMED) - {"ep", "cp"}
    fsdp = autopar.plan(model(), WORLD, INPUTS, "fsdp", smaller=False)
    assert others["fsdp"].seconds == fsdp.overlapped
    assert others["fsdp"].peak_bytes == fsdp.peak_bytes
    (line,) = (line for line in figures.other_lines(gathered) if line["layout"] == "fsdp")
    more = (fsdp.overlapped or 0.0) / (plan.overlapped or 1.0) - 1
    assert line["lacks"] == (f"slower by {more:.1%}" if more > 5e-4 else "as fast")


def test_what_does_not_fit_is_said_in_short(plan: Plan) -> None:
    why = "no plan fits 68.55 GiB (…) on each of 64 devices: layout 'ddp' needs 74.79 GiB (…). Try"
    others = (alternatives.Alternative("ddp", why=why), alternatives.Alternative("3d", why="odd"))
    page_facts = facts.Facts("", plan, (), "", others, facts.Module(""), {}, ())
    assert [line["lacks"] for line in figures.other_lines(page_facts)] == [
        "does not fit: needs 74.79 GiB",
        "odd",
    ]
    assert "; ddp do not fit the memory" in facts.why_text(plan, others)


@pytest.mark.slow
def test_what_cannot_be_is_said() -> None:
    odd = autopar.plan(model(), WORLD, (torch.ones(8, 64),), smaller=False)
    others = {other.layout: other for other in alternatives.alternatives(odd)}
    assert others["ddp"].seconds is None and "a batch of 8" in others["ddp"].why
    assert alternatives.alternatives(odd, patience=-1.0)[0].why.startswith("not planned")


def test_the_tree_has_all_seconds_of_the_step(plan: Plan, gathered: facts.Facts) -> None:
    assert gathered.tree.seconds == pytest.approx(sum(row.step_seconds for row in plan.rows))
    rows = [Row("blocks.0-3.mlp.up", "", "", 0.0, 1.0), Row("blocks.0-3.mlp", "", "", 0.0, 2.0)]
    tree = facts.module_tree([*rows, Row("head", "", "", 0.0, 4.0)])
    assert [*tree.inside] == ["blocks.0-3.mlp", "head"] and tree.seconds == 7.0
    assert [*tree.inside["blocks.0-3.mlp"].inside] == ["up"]


def test_the_load_of_links_is_what_ranks_send(plan: Plan) -> None:
    inner, outer = facts.level_load(plan)
    assert inner + outer == pytest.approx(plan.comm_bytes)
    across = {each.axes for each in plan.collectives if "data" in each.axes}
    assert outer == pytest.approx(sum(c.bytes for c in plan.collectives if c.axes in across))


def test_memory_over_the_step_reaches_the_peak(plan: Plan) -> None:
    assert plan.context is not None and plan.memory is not None
    states = moments(plan.context.program, plan.optimizer, plan.context.world, most=20)
    totals = [sum(moment[1:]) for moment in states]
    assert max(totals) == pytest.approx(plan.memory.waiting)
    assert len({moment.optimizer for moment in states}) == 1


# -- pictures --------------------------------------------------------------------------------------
def test_blocks_are_those_that_ranks_cut() -> None:
    layout = Layout(Mesh.parse("x2.y2"), (8, 6), (S(0, 4), S(1, 3)))
    whole = torch.arange(48).reshape(8, 6)
    for rank in range(4):
        row, column = pictures.block_of(layout, rank)
        cut = layout.cut(whole, layout.mesh.coordinate(rank))
        assert cut[0, 0] == whole[row * 4, column * 3]
    svg = pictures.owners("W", replace(layout, states=(S(0, 4), I)))
    assert re.findall(r"<title>ranks ([^<]*)</title>", svg) == ["0-1", "2-3"]


# -- the page --------------------------------------------------------------------------------------
class Reader(HTMLParser):
    """The ids, the links and what is loaded of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        if tag == "a":
            self.links.append(values.get("href") or "")
        elif values.get("src") or (tag == "link" and values.get("rel") == "stylesheet"):
            self.loaded.append(str(values.get("src") or values.get("href")))


def test_the_page_is_complete_and_small(text: str) -> None:
    reader = Reader()
    reader.feed(text.replace(figures.bundle(), ""))
    assert not reader.loaded and len(text.encode()) < MOST_BYTES
    names = ("layouts", "timeline", "memory")
    assert {f"figure-{name}" for name in names} <= reader.ids
    inner = {link[1:] for link in reader.links if link.startswith("#")}
    assert inner and inner <= reader.ids
    assert "three &lt;blocks&gt; on 16 ranks" in text and "<math>" in text
    assert '<i class="state S">x:S(1)</i>' in text or '<i class="state S">y:S(1)</i>' in text
    assert f"{Path(__file__).name}:{inspect.getsourcelines(Block.forward)[1] + 1}" in text
    drawn = re.search(r"const figures = (\{ .*\});", text)
    assert drawn is not None and set(json.loads(drawn[1])) >= set(names)


def test_the_page_explains_its_words(text: str, gathered: facts.Facts) -> None:
    """Those of its cards, of its tree, of its lines of layouts, and its units."""
    section = text[text.index('<section id="words">') :]
    explained = {
        word for dt in re.findall("<dt>(.*?)</dt>", section) for word in re.split("[,;] ", dt)
    }
    used = {card.name for card in gathered.cards} - {"model", "world", "samples/s"}
    assert {"b", "s", "h", "f", "v", "e"} <= explained and str(ELEMENT) == "e"
    assert all(MEANING[size] in section for size in "bshfv")
    used |= {"hidden", "exposed", "X", "W", "Y", "rank", "axis", "layout", "MB", "MiB", "GiB"}
    assert used <= explained
    assert 'href="#words"' in text
    kinds = {"AG", "RS", "AR", "A2A", "B"}
    assert kinds <= set(re.findall(r"\((\w+)\)", section))


def test_axes_of_memory_have_the_unit_of_what_they_show(plan: Plan, gathered: facts.Facts) -> None:
    layouts, memory = figures.layouts_figure(gathered), figures.memory_figure(plan)
    assert layouts is not None and memory is not None and plan.memory is not None
    assert layouts.layout.xaxis.title.text.endswith(", MiB") and plan.peak_bytes < 2**27
    assert layouts.data[1].x == (plan.peak_bytes / 2**20,)
    assert memory.layout.yaxis.title.text == "MiB"
    totals = [sum(column) for column in zip(*(line.y for line in memory.data))]
    assert max(totals) == pytest.approx(plan.memory.waiting / 2**20, rel=0.01)
    large = [replace(other, peak_bytes=2.0**40) for other in gathered.others]
    wide = figures.layouts_figure(replace(gathered, others=tuple(large)))
    assert wide is not None and wide.layout.xaxis.title.text.endswith(", GiB")
    assert wide.data[1].x == (plan.peak_bytes / 2**30,)


def test_layouts_whose_points_are_close_are_named_together() -> None:
    figures_of = {"4d": (1.0, 2.0), "atp": (1.01, 2.01), "ddp": (1.01, 3.0), "fsdp": (2.0, 2.0)}
    others = [alternatives.Alternative(name, "x2", *at) for name, at in figures_of.items()]
    assert figures._names_of_points(others) == ["4d, atp", "", "ddp", "fsdp"]


def test_a_plan_from_a_file_is_reported_as_far_as_it_goes(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").report(tmp_path / "report.html", "saved")
    written = (tmp_path / "report.html").read_text()
    assert "saved on 16 ranks" in written and "figure-timeline" not in written.split("<script>")[0]


def test_one_rank_has_a_page(tmp_path: Path) -> None:
    autopar.plan(model(), 1, INPUTS).report(tmp_path / "one.html")
    written = (tmp_path / "one.html").read_text()
    assert "nothing to lay out" in written and "<h1>the model on 1 rank</h1>" in written


def test_missing_libraries_are_named(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(
        figures.ReportError, match=r"plotly and jinja2, which are .*autopar\[report\]"
    ):
        plan.report(tmp_path / "report.html")
    files = ("--save", str(tmp_path / "plan.json"), "--report", str(tmp_path / "report.html"))
    message = refused("plan", "targets:tiny", "--ranks", "2", *files)
    assert "a report needs plotly and jinja2" in message
    assert not [*tmp_path.iterdir()]  # nor was a plan searched


def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = run(
        "plan", "targets:tiny", "--world", "dgx-h100", "--ranks", "2", "--report", str(path)
    )
    assert f"as {path}" in result.stdout.replace("\n", "")
    assert "targets:tiny" in path.read_text()
    assert "there is no folder" in refused(
        "plan", "gpt2", "--report", str(tmp_path / "no" / "r.html")
    )


def test_a_notebook_shows_the_plan(plan: Plan) -> None:
    shown = plan._repr_html_()
    assert "data4.x2.y2" in shown and "<script" not in shown
    assert len(repr(plan).splitlines()) <= 10 and "data4.x2.y2" in repr(plan)


# -- a browser -------------------------------------------------------------------------------------
CHECK = """
<!doctype html><body><iframe id="page" src="report.html"
  style="width:{width}px;height:900px"></iframe>
<script>
const faults = [], frame = document.getElementById("page");
frame.addEventListener("load", () => setTimeout(() => {
  const inside = frame.contentDocument, drawn = inside.querySelectorAll(".js-plotly-plot").length;
  inside.querySelectorAll("details").forEach(d => { d.open = true; });
  const wide = inside.documentElement.scrollWidth - inside.documentElement.clientWidth;
  const summary = inside.querySelector("summary"); summary.focus();
  document.title = JSON.stringify({ drawn, wide, focused: inside.activeElement === summary,
    fonts: getComputedStyle(inside.body).fontSize });
}, 3000));
</script>
"""


def chromium() -> str:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(text: str, tmp_path: Path, width: int, scheme: str) -> None:
    (tmp_path / "report.html").write_text(text)
    (tmp_path / "check.html").write_text(CHECK.replace("{width}", str(width)))
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--enable-logging=stderr", "--virtual-time-budget=20000", "--window-size=1400,1000",
        "--dump-dom", (tmp_path / "check.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    seen = json.loads(title[1].replace("&quot;", '"'))
    assert seen["drawn"] >= 3 and seen["wide"] <= 0 and seen["focused"]
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not messages
