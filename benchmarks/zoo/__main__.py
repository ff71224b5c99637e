"""Trace, plan and prove the models of the zoo: `python -m benchmarks.zoo llama bert`.

Every model runs in a process of its own, so one that crashes costs only its row. A row is saved as
soon as it is there. Without names, the models that have no row yet are run; `--again` runs all.

`python -m benchmarks.zoo --real` plans models at the sizes of their papers on the meta device, and
needs torchvision and timm: `pip install -e '.[zoo]'`; with `--ranks 64`, for 64 GPUs.
`python -m benchmarks.zoo --experts` plans mixtures of experts at theirs, on 64 ranks and more; with
`--layers 8` the first layers alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.zoo import catalog, expert_rows, page, real_models, real_rows, rows

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "models.md"


def run_apart(name: str, timeout: float) -> rows.Row:
    """Return the row of a model that is measured in a process of its own.

    The process is a fork, so that torch is imported once for all of them.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_row, args=(name, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return failure(f"not done after {timeout:.0f} s")
        row: rows.Row = receiver.recv()
        return row
    except EOFError:
        process.join()
        return failure(f"the process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def send_row(name: str, sender: Connection) -> None:
    """Measure a model and send its row."""
    try:
        sender.send(rows.measure(catalog.FACTORIES[name]))
    except Exception as error:
        sender.send(failure(f"its factory fails: {rows.reason(error)['reason']}"))


def failure(text: str) -> rows.Row:
    """Return the row of a model that has no plan."""
    return {"layouts": {"auto": {"reason": text}}}


def load(path: Path) -> dict[str, Any]:
    """Return the rows of a file, in the order of the catalog; none where there is no file."""
    saved = json.loads(path.read_text())["rows"] if path.is_file() else {}
    return {name: saved[name] for name in catalog.FACTORIES if name in saved}


def save(table: dict[str, rows.Row], path: Path) -> None:
    """Write the rows with the versions they were measured with."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    text = json.dumps({"versions": versions, "rows": table}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def real_json(ranks: int) -> Path:
    """Return the file of the rows at real sizes for so many ranks."""
    return HERE / ("real_models.json" if ranks == real_rows.RANKS else f"real_models_{ranks}.json")


def load_real(path: Path) -> dict[str, rows.Row]:
    """Return the rows at real sizes, in the order of the models; none where there is no file."""
    saved = json.loads(path.read_text()) if path.is_file() else {}
    return {name: saved[name] for name in real_models.FACTORIES if name in saved}


def run_real(
    names: Sequence[str],
    layouts: Sequence[str],
    again: bool,
    ranks: int,
    jobs: int,
    cpu_seconds: int,
    path: Path,
) -> None:
    """Plan the models at real sizes for so many ranks, `jobs` at a time, and save every row as it
    comes. A row keeps the layouts that it has, but for `again` and those that had fewer CPU seconds
    and needed more.
    """
    table = load_real(path)

    def row(name: str) -> rows.Row:
        known = {} if again else real_rows.still_known(table.get(name, {}), cpu_seconds)
        if all(layout in known for layout in layouts):
            return known
        measure = partial(
            real_rows.measure, real_models.FACTORIES[name], known, layouts, ranks, cpu_seconds
        )
        return {**known, **real_rows.apart(measure, cpu_seconds)}

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(row, name): name for name in names}
        for done in as_completed(waiting):
            table[waiting[done]] = done.result()
            ordered = {n: table[n] for n in real_models.FACTORIES if n in table}
            path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
            print(f"{waiting[done]}: {json.dumps(done.result())}", flush=True)


def load_experts(path: Path) -> dict[str, rows.Row]:
    """Return the rows of mixtures of experts, in their order; none where there is no file."""
    saved = json.loads(path.read_text()) if path.is_file() else {}
    return {name: saved[name] for name in expert_rows.CASES if name in saved}


def run_experts(names: Sequence[str], layers: int | None, again: bool, path: Path) -> None:
    """Plan mixtures of experts at real sizes, or the first `layers` of them, and save every row as
    it grows.
    """
    table = load_experts(path)
    for name in names:
        known = table.get(name, {})
        if again or known.get("layers") != expert_rows.depth(name, layers):
            known = {}
        for row in expert_rows.measure(name, known, layers):
            print(f"{name}: {json.dumps(row, ensure_ascii=False)}", flush=True)
            table[name] = row
            ordered = {n: table[n] for n in expert_rows.CASES if n in table}
            text = json.dumps(ordered, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the models that are asked for, and write the page. The exit code says whether all fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of models; by default those without a row")
    parser.add_argument("--again", action="store_true", help="run all, rows or not")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a model, in seconds")
    parser.add_argument("--json", type=Path, default=HERE / "models.json", metavar="FILE")
    parser.add_argument("--docs", type=Path, default=PAGE, metavar="PAGE")
    parser.add_argument("--real", action="store_true", help="plan models at the sizes of papers")
    parser.add_argument("--real-json", type=Path, metavar="FILE")
    parser.add_argument("--ranks", type=int, default=real_rows.RANKS, help="of --real")
    parser.add_argument("--experts", action="store_true", help="plan mixtures of experts")
    parser.add_argument("--layers", type=int, help="of --experts: the first ones alone")
    parser.add_argument(
        "--experts-json", type=Path, default=HERE / "expert_rows.json", metavar="FILE"
    )
    parser.add_argument("--layouts", default=",".join(real_rows.LAYOUTS), help="of --real")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, of --real")
    parser.add_argument(
        "--cpu-seconds", type=int, default=real_rows.CPU_SECONDS, help="of a plan, of --real"
    )
    options = parser.parse_args(arguments)
    models: Mapping[str, Any] = catalog.FACTORIES
    if options.real or options.experts:
        models = real_models.FACTORIES if options.real else expert_rows.CASES
    if unknown := sorted(set(options.names) - set(models)):
        parser.error(f"no model is called {unknown[0]!r}: {', '.join(models)}")
    if options.experts:
        names = options.names or list(models)
        run_experts(names, options.layers, options.again, options.experts_json)
        write_page(options)
        return 0
    if options.real:
        layouts = (real_rows.ALONE, *options.layouts.split(","))
        names = options.names or list(models)
        limits = options.ranks, options.jobs, options.cpu_seconds
        path = options.real_json or real_json(options.ranks)
        run_real(names, layouts, options.again, *limits, path)
        write_page(options)
        return 0
    table = load(options.json)
    for name in options.names or catalog.FACTORIES:
        if options.names or options.again or name not in table:
            table[name] = run_apart(name, options.timeout)
            save({n: table[n] for n in catalog.FACTORIES if n in table}, options.json)
            print(f"{name}: {page.verdict(table[name])}", flush=True)
    table = load(options.json)
    write_page(options)
    return int(not all(page.at_parity(row) for row in table.values()))


def write_page(options: argparse.Namespace) -> None:
    """Write the page of all tables."""
    results = json.loads(options.json.read_text())
    own = {options.ranks: options.real_json} if options.real_json else {}
    real = {ranks: load_real(own.get(ranks, real_json(ranks))) for ranks in page.REAL_RANKS}
    page.write(results, real, load_experts(options.experts_json), options.docs)


if __name__ == "__main__":
    sys.exit(main())
