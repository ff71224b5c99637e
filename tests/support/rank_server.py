"""Starts ranks that have imported torch already.

A rank of its own imports torch, autopar and transformers for as long as most tests run. One process
per test worker imports them once and forks the ranks, with the environment that torchrun would give
them. What differs from torchrun: all ranks hash strings alike, and none is started again.

    python rank_server.py     a line of JSON on stdin: a `Request`; on stdout its group, its status
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from datetime import timedelta
from typing import TypedDict

IMPORTED = (
    "autopar",
    "functorch.compile",
    "torch._dynamo.backends.common",
    "torch._functorch.aot_autograd",
    "torch.distributed.tensor",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)


class Request(TypedDict):
    """A script, run by so many ranks; what they print goes to the file `output`."""

    ranks: int
    command: list[str]
    environment: dict[str, str]
    output: str


def serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what is imported stays shared between the ranks
    for line in sys.stdin:
        running, write = os.pipe()  # it ends with the launcher, which alone holds `write`
        launcher = os.fork()
        if not launcher:
            os._exit(_launch(json.loads(line), write))
        os.close(write)
        print(launcher, flush=True)
        _end_with_input(launcher, running)
        print(os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]), flush=True)


def _end_with_input(launcher: int, running: int) -> None:
    """Waits until the launcher has ended; where stdin ends first, as pytest is gone, kills them."""
    readable, _, _ = select.select([sys.stdin, running], [], [])
    os.close(running)
    if running not in readable:
        for kill in (os.killpg, os.kill):  # it may have no process group of its own yet
            with contextlib.suppress(ProcessLookupError):
                kill(launcher, signal.SIGKILL)


def _launch(request: Request, write: int) -> int:
    """Runs the ranks in a process group of their own; as torchrun does, it holds their store, and
    ends all of them where one fails.
    """
    from torch.distributed import TCPStore

    os.setsid()
    _write_to(request["output"])
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    running = {_forked(request, rank, port, write) for rank in range(request["ranks"])}
    wait = timedelta(seconds=60)
    store = TCPStore(
        "127.0.0.1", port, None, True, wait, False, master_listen_fd=listening.detach()
    )
    worst = 0
    while running:
        rank, status = os.wait()
        running.discard(rank)
        if code := os.waitstatus_to_exitcode(status):
            worst = worst or abs(code)
            for other in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    del store
    return worst


def _write_to(output: str) -> None:
    with open(output, "ab") as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _forked(request: Request, rank: int, port: int, write: int) -> int:
    process = os.fork()
    if process:
        return process
    os.close(write)
    code = 1
    try:
        os.environ.clear()
        os.environ.update(request["environment"], **_variables(rank, request["ranks"], port))
        code = _run(request["command"])
    finally:
        os._exit(code)


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank of one node."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _run(command: list[str]) -> int:
    """The status of a script that is run as `python` would."""
    sys.argv, sys.path[0] = command, os.path.dirname(command[0])
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    serve()
