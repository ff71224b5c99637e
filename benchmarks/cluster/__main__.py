"""The command line: `python -m benchmarks.cluster --nodes 2 --rate 400mbit -- COMMAND…`"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

from .launch import launch, stop_on_signals
from .network import Unavailable, network
from .shape import Shape, read_rate


def _typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The sentence of a ValueError, where argparse would show only that there was one."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reading


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options, `command` and `shape`; says what is wrong and exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description="Run a command as every rank of a cluster of network namespaces.",
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument(
        "--rate", type=_typed(read_rate), default=None, help="of each node's link: 400mbit, 2gbit"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (default: 600)")
    parser.add_argument(
        "--loopback", action="store_true", help="no namespaces, no limits: needs no root"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args(arguments)
    options.command = [word for i, word in enumerate(options.command) if i or word != "--"]
    if not options.command:
        parser.error("no command: give one after --")
    if options.loopback and options.rate is not None:
        parser.error("loopback has no limit: leave out --rate or --loopback")
    try:
        options.shape = Shape(options.nodes, options.ranks_per_node, options.rate)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    """The exit status: of the rank that failed first, 124 where the time was up, 2 where there can
    be no cluster here.
    """
    options = parse(arguments)
    stop_on_signals()
    try:
        with contextlib.nullcontext() if options.loopback else network(options.shape):
            done = launch(options.shape, options.command, options.timeout, options.loopback)
    except Unavailable as error:
        print(f"no cluster: {error}\n--loopback runs the ranks without limits", file=sys.stderr)
        return 2
    if done.status:
        what = f"rank {done.rank}" if done.rank is not None else f"limit of {options.timeout:g} s"
        print(f"{what}: status {done.status}\n{done.tail}", file=sys.stderr)
    return done.status


if __name__ == "__main__":
    sys.exit(main())
