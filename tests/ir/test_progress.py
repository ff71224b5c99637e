"""Long work shows how far it is: on a terminal, on rank 0, once."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autopar
from autopar.ir import progress
from autopar.passes.pass_manager import PassManager


class Screen(io.StringIO):
    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal in the place of stderr, on which work may take no time."""
    out = Screen()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=out))
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    return out


def work() -> None:
    progress.step("choose")
    progress.tell("meshes bounded", 12, 26)
    time.sleep(0.3)


def test_a_bar_says_how_many_of_how_many_are_done(screen: Screen) -> None:
    with progress.shown("planning"):
        work()
    shown = screen.getvalue()
    assert "planning: choose" in shown and "12 of 26 meshes bounded" in shown


def test_nothing_is_shown_before_two_seconds(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 2.0)
    with progress.shown("planning"):
        work()
    assert screen.getvalue() == ""


def test_a_file_or_a_pipe_gets_no_bar(screen: Screen) -> None:
    screen.terminal = False
    with progress.shown("planning"):
        work()
    assert screen.getvalue() == ""


def test_other_ranks_show_nothing(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_rank", lambda: 1)
    with progress.shown("planning"):
        work()
    assert screen.getvalue() == ""


def test_work_within_work_shows_one_bar(screen: Screen) -> None:
    outer = progress.Work("writing")
    with progress.watch(outer), progress.shown("planning"):
        work()
    assert screen.getvalue() == "" and outer.text == "writing: choose"
    assert outer.count == "12 of 26 meshes bounded"
    progress.step("unwatched")
    assert outer.text == "writing: choose"


def test_a_step_forgets_the_count_of_the_last() -> None:
    with progress.watch(progress.Work("planning")) as _:
        work()
        PassManager().progress("rewrite")
        assert progress._WATCHED.get() == progress.Work("planning", "rewrite")


def test_a_plan_tells_meshes_layouts_and_simulated_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: dict[str, list[tuple[int, int]]] = {}

    class Recorded(progress.Work):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "of" and value:
                reported.setdefault(self.what, []).append((self.done, self.of))

    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    with progress.watch(Recorded("planning")):
        autopar.plan(model, 8, (torch.ones(32, 64),), smaller=False)
    assert {"meshes bounded", "named layouts tried", "plans simulated"} <= reported.keys()
    assert reported["meshes bounded"][0][0] == 0
    assert all(done <= of for counts in reported.values() for done, of in counts)
    assert any(done == of > 1 for done, of in reported["meshes bounded"])
