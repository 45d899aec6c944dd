"""What experiments share: the options, a pool of one-threaded runs, the digits, and how a result is
kept."""

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor

from benchmarks.record import RESULTS, save_json

Job = TypeVar("Job")
PAPERS = RESULTS / "papers"
ONLY = "that are run; the rows of the others are those of the result in --out (default: all)"


def parser(about: str | None, out: Path = PAPERS) -> argparse.ArgumentParser:
    """The options that every experiment has; `about` is its module's docstring."""
    options = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    options.add_argument("--out", type=Path, default=out, help="folder of the JSON and the plot")
    options.set_defaults(kept=out)
    options.add_argument(
        "--smoke",
        action="store_true",
        help="seconds: does it run? Nothing kept unless --out is given",
    )
    return options


def run_all(
    function: Callable[[Job], Any],
    jobs: Sequence[Job],
    options: argparse.Namespace,
    each: Callable[[Any], None] = lambda result: None,
) -> list[Any]:
    """`function` of each job, in the order of `jobs`; longest jobs first keep all workers busy to
    the end.

    `function` must be importable (the top level of a module). With `--smoke` or one worker nothing
    is spawned. `each` is called with every result as it comes; what it raises ends the experiment.
    """
    if options.smoke or options.workers == 1:
        results = []
        for job in track(jobs, "running"):
            results.append(_one(function, job))
            each(results[-1])
        return results
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_one, function, job) for job in jobs]
        try:
            for done in track(as_completed(futures), "running", total=len(jobs)):
                each(done.result())  # an error ends the experiment at once
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def keep(options: argparse.Namespace, name: str, figure: Figure, **content: Any) -> None:
    """`name.json` with machine, versions and command, and `name.png`, in `--out`; a smoke run needs
    it given."""
    if options.smoke and options.out == options.kept:
        return
    save_json(options.out / f"{name}.json", **content)
    figure.savefig(options.out / f"{name}.png", dpi=90)


def rows_of_others(
    options: argparse.Namespace, name: str, setting: dict[str, Any], structures: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What an earlier result has of the structures that are not run again.

    Args:
        options: with `--out`, where `name.json` lies.
        setting: of this run, which that of the earlier one must equal.
        structures: those that are run now.

    Returns:
        Rows, and where they are from: {"structures", "environment"}, and "kept", the same of the
        rows that the earlier result had from one before it (None: none).

    Raises:
        SystemExit: there is no earlier result, or one of another setting.
    """
    path = options.out / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"--structures: {path} has no rows of the others; run all of them once")
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if earlier["setting"] != setting:
        raise SystemExit(f"--structures: {path} is of another setting, {earlier['setting']}")
    rows = [row for row in earlier["rows"] if row["structure"] not in structures]
    names = list(dict.fromkeys(row["structure"] for row in rows))
    source = {"structures": names, "environment": earlier["environment"]}
    return rows, source | {"kept": earlier.get("kept")}


def resume(
    function: Callable[[Job], dict[str, Any]],
    jobs: Sequence[Job],
    options: argparse.Namespace,
    name: str,
    setting: dict[str, Any],
    job_of: Callable[[dict[str, Any]], Job],
) -> list[dict[str, Any]]:
    """The rows of `jobs`, each kept in `name.json` as it is made; those that an earlier result of
    the same setting has, finished or not, are not made again.

    Args:
        setting: of all jobs, plain data.
        job_of: a row -> the job that made it.
    """
    path, rows = options.out / f"{name}.json", {}
    if path.exists() and not options.smoke:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["setting"] == setting:
            rows = {job_of(row): row for row in earlier["rows"]}

    def add(row: dict[str, Any]) -> None:
        rows[job_of(row)] = row
        if not options.smoke:
            save_json(path, setting=setting, rows=[*rows.values()])

    run_all(function, [job for job in jobs if job not in rows], options, each=add)
    return [rows[job] for job in jobs]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 images `(1797, 64)`, standardised as a whole, and their labels
    `(1797,)`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(labels)


def _one(function: Callable[[Job], Any], job: Job) -> Any:
    torch.set_num_threads(1)
    return function(job)
