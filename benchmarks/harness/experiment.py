"""An experiment as data: what is run, how its rates are found, and what its rows come to.

An `Experiment` names its axes (task, structure, width, optimizer, ...), the function that makes a
row from a value of each, and what is computed from all rows. Here is what experiments share: the
options, the pool of processes, the search for learning rates, and the result, which keeps each row
as it is made, so that the same command goes on where it was interrupted.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import structlin
from benchmarks.harness import report, statistics
from benchmarks.harness.figures import save_picture
from benchmarks.harness.record import RESULTS, Row, save_json
from benchmarks.harness.shown import Shown
from benchmarks.harness.statistics import select

T = TypeVar("T")
Job = dict[str, Any]  # a value of each axis
Axis = Sequence[Any] | Callable[[Job], Iterable[Any]]  # the latter from the values of those before
SECONDS_BETWEEN_SAVES = 5.0


# ---- options, processes --------------------------------------------------------------------------


def parser(
    about: str | None, out: Path = RESULTS, *, workers: int | None = 2
) -> argparse.ArgumentParser:
    """The options that every benchmark has; `about` is its module's docstring.

    Args:
        workers: the default number of processes; None: the benchmark has one, and no such option.
    """
    options = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if workers is not None:
        help_text = "processes, of one thread each"
        options.add_argument("--workers", type=int, default=workers, help=help_text)
    options.add_argument("--out", type=Path, default=out, help="folder of the JSON and the plot")
    options.set_defaults(kept=out)
    options.add_argument(
        "--smoke",
        action="store_true",
        help="seconds: does it run? Nothing kept unless --out is given",
    )
    return options


def result_path(options: argparse.Namespace, name: str) -> Path | None:
    """Where a result is kept; None: a smoke run is kept only where --out is given."""
    if options.smoke and options.out == options.kept:
        return None
    path: Path = options.out / f"{name}.json"
    return path


def run_all(
    function: Callable[[T], Any],
    jobs: Sequence[T],
    options: argparse.Namespace,
    collect: Callable[[Any], None],
) -> None:
    """Call `collect` with `function` of every job, as it comes; an error of either ends the
    experiment.

    `function` must be importable (the top level of a module). With `--smoke` or one worker nothing
    is spawned.
    """
    if not jobs:
        return
    if options.smoke or options.workers == 1:
        for job in track(jobs, "running"):
            collect(_run_on_one_thread(function, job))
        return
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_run_on_one_thread, function, job) for job in jobs]
        try:
            for future in track(as_completed(futures), "running", total=len(jobs)):
                collect(future.result())  # an error ends the experiment at once
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _run_on_one_thread(function: Callable[[T], Any], job: T) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(job)
    finally:
        torch.set_num_threads(threads)  # what is timed beside the runs has them all


# ---- rows that are kept --------------------------------------------------------------------------


class Runs:
    """The rows of one result: those that its file has from a run of the same setting, and those
    that `of` adds, each written as it is made.

    Args:
        function: of `sizes` and of a job's values, by keyword; it returns what it measured, or a
            list of that. It must be importable.
        names: of a job's values; a row has them too.
        path: of the JSON; None: nothing is read or written.
        setting: what all rows share, plain data; rows of another setting are not taken.
        again: a job that must be run again, whatever the file has.
    """

    def __init__(
        self,
        function: Callable[..., Row | list[Row]],
        names: Sequence[str],
        options: argparse.Namespace,
        *,
        path: Path | None,
        setting: Mapping[str, Any],
        sizes: Mapping[str, Any],
        again: Callable[[Row], bool],
    ) -> None:
        self.names = names
        self.options = options
        self.sizes = dict(sizes)
        self.work = partial(_measure, function, self.sizes)
        self.path = path
        self.setting = _plain(setting)
        self.rows: dict[str, list[Row]] = {}  # by `key`
        self.earlier: Row = {}  # the result that the file has, if its setting is this one
        if path is not None and path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if (earlier.get("setting") or {}) == self.setting:
                self.earlier = earlier
                for row in earlier["rows"]:
                    if not again(row):
                        self.rows.setdefault(self.key(row), []).append(row)
        self.earlier_count = sum(map(len, self.rows.values()))
        self.new_count = 0
        self.last_save = time.monotonic()

    def key(self, row: Row) -> str:
        return json.dumps({name: row[name] for name in self.names if name in row})

    def of(self, jobs: Iterable[Job]) -> list[Row]:
        """The rows of `jobs`, in their order; the widest models first keep all workers busy."""
        jobs = list(jobs)
        missing = {self.key(job): job for job in jobs if self.key(job) not in self.rows}
        ordered = sorted(missing.values(), key=lambda job: -job.get("width", 0))
        try:
            run_all(self.work, ordered, self.options, collect=self._add)
        except BaseException:
            if self.new_count:
                self.save()
            raise
        return [*chain.from_iterable(self.rows[self.key(job)] for job in jobs)]

    def all(self) -> list[Row]:
        return [*chain.from_iterable(self.rows.values())]

    def save(self, rows: Sequence[Row] | None = None, **content: Any) -> None:
        """Write the rows and `content`; where every row was there before, so is their origin."""
        self.last_save = time.monotonic()
        if self.path is None:
            return
        content = {"setting": self.setting} | content
        content["rows"] = self.all() if rows is None else rows
        save_json(self.path, **self._origin(), **content)

    def _origin(self) -> Row:
        """Where the rows of earlier runs were made."""
        if self.earlier and not self.new_count:
            origin = {"environment": self.earlier["environment"]}
            if "earlier" in self.earlier:
                origin["earlier"] = self.earlier["earlier"]
            return origin
        if self.earlier_count:
            source = {"rows": self.earlier_count, "environment": self.earlier["environment"]}
            return {"earlier": [*self.earlier.get("earlier", []), source]}
        return {}

    def note_change(self, measured: Row) -> None:
        """Count what was `measured` beside the rows as new, unless the file has the same."""
        for name, value in _plain(measured).items():
            if self.earlier.get(name) != value:
                self.new_count += 1
                return

    def _add(self, rows: list[Row]) -> None:
        self.rows[self.key(rows[0])] = rows
        self.new_count += len(rows)
        if time.monotonic() > self.last_save + SECONDS_BETWEEN_SAVES:
            self.save()


def _measure(function: Callable[..., Any], sizes: Row, job: Job) -> list[Row]:
    measured = function(**sizes | job)
    rows = measured if isinstance(measured, list) else [measured]
    return [job | row for row in rows]


def _plain(content: Any) -> Any:
    """As a file has it."""
    return json.loads(json.dumps(content))


# ---- experiments ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """Learning rates by factors of 2 along the axis "size", ascending: at each size from the best
    rate of the size before until the best has both its neighbours.

    The first size starts at `start` of the job's other values. A smoke run takes one round a size.
    """

    start: Callable[[Job], float]


@dataclass(frozen=True)
class Tune:
    """Learning rates by factors of 2 on seed 0, from `start` of the job's other values until the
    best has both its neighbours; then the other seeds at the best.

    A smoke run has the rate at the start alone.
    """

    start: Callable[[Job], float]


@dataclass(frozen=True, kw_only=True)
class Experiment(Shown):
    """What is compared, and what pages show of it (see `Shown`). `main` runs it.

    Args:
        about: the module's docstring.
        run: a value of each axis, "lr" and "seed" among them, and `sizes` -> what was measured.
        axes: every combination of their values is run. An axis may be a function of the values
            before it; where it gives none the combination is left out. Each axis of fixed values
            has an option `--<name>s`: only those are run, the others' rows stay.
        rates: how learning rates are found, where "lr" is no axis.
        sizes: what all runs share, and kept with the rows.
        smoke: the axes and sizes of a smoke run.
        note: what else describes all runs, kept with the rows.
        seeds: how many; 0: runs have none. An axis "seed" says which for each run.
        analyse: rows -> what they come to, kept before them.
        beside: what needs more than the rows, as what is measured once: (axes, sizes and `extra`,
            what was found so far with its "rows") -> plain data.
        extra: options of the command that change no row, and their defaults.
        workers: processes; 1 where rows are times.
        show: the result -> what is printed; by default all but the rows.
        draw: the result -> its picture.
        design: (runs, axes) -> rows, where the runs follow from one another in another way.
    """

    about: str | None
    run: Callable[..., Row | list[Row]]
    axes: Mapping[str, Axis]
    analyse: Callable[[list[Row]], Row]
    show: Callable[[Row], Iterable[Any]] = report.without_rows
    draw: Callable[[Row], Figure] | None = None
    rates: Search | Tune | None = None
    seeds: int = 3
    sizes: Mapping[str, Any] = field(default_factory=dict)
    smoke: Mapping[str, Any] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)
    beside: Callable[[Row, Row], Row] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 2
    design: Callable[[Runs, Mapping[str, Axis]], list[Row]] | None = None

    def main(self, argv: Sequence[str] | None = None) -> Row:
        """Run, print and keep the result, and return it."""
        options = self._parser().parse_args(argv)
        structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))  # builds the engine before times
        structlin.show_config()
        axes = dict(self.axes)
        sizes = dict(self.sizes)
        if options.smoke:
            for settings in (axes, sizes):
                settings |= {name: self.smoke[name] for name in settings if name in self.smoke}
            for name in self.extra:
                if name in self.smoke:
                    setattr(options, name, self.smoke[name])

        chosen: Row = {}  # the axes of which the command names values
        for name in axes:
            values = getattr(options, f"{name}s", None)
            if values:
                chosen[name] = values
        if self.seeds:
            count = self.smoke.get("seeds", 2) if options.smoke else self.seeds
            axes.setdefault("seed", range(getattr(options, "seeds", None) or count))

        runs = self._runs(options, [*axes], sizes, chosen)
        rows = [*self._rows(runs, axes, chosen, options.smoke)]
        result: Row = {"setting": runs.setting, **self.analyse(rows)}
        if self.beside:
            extra = {name: getattr(options, name) for name in self.extra}
            measured = self.beside(axes | chosen | sizes | extra, result | {"rows": rows})
            runs.note_change(measured)
            result |= measured
        runs.save(rows, **result)
        result["rows"] = rows
        Console(width=140, markup=False).print(*self.show(result), sep="\n")
        if self.draw and runs.path:
            save_picture(self.draw(result), runs.path.with_suffix(".png"))
        return result

    def _parser(self) -> argparse.ArgumentParser:
        options = parser(self.about, (RESULTS / self.name).parent, workers=self.workers)
        if self.seeds and "seed" not in self.axes:
            options.add_argument("--seeds", type=int, help=f"their number (default: {self.seeds})")
        for name, values in self.axes.items():
            has_option = values and not callable(values) and name not in ("lr", "seed")
            if has_option:
                options.add_argument(
                    f"--{name}s",
                    nargs="+",
                    type=type(values[0]),
                    choices=values,
                    help="only these are run; the rows of others that --out has stay",
                )
        for name, default in self.extra.items():
            options.add_argument(
                f"--{name}", type=type(default), default=default, help="%(default)s"
            )
        help_text = "run what is chosen again, though --out has rows of the same setting"
        options.add_argument("--again", action="store_true", help=help_text)
        return options

    def _runs(self, options: argparse.Namespace, names: list[str], sizes: Row, chosen: Row) -> Runs:
        if self.rates:
            names = [*names[:-1], "lr", "seed"]
        return Runs(
            self.run,
            names,
            options,
            path=result_path(options, Path(self.name).name),
            setting={**sizes, **self.note},
            sizes=sizes,
            again=lambda row: options.again and _is_chosen(row, chosen),
        )

    def _rows(self, runs: Runs, axes: Row, chosen: Row, smoke: bool) -> Iterator[Row]:
        if self.design:
            yield from self.design(runs, axes | chosen)
            return
        if self.rates is None:
            jobs = [*combinations(axes)]
            runs.of(job for job in jobs if _is_chosen(job, chosen))
            for job in jobs:
                yield from runs.rows.get(runs.key(job), [])
            return

        searched_within = ("seed",) if isinstance(self.rates, Tune) else ("size", "seed")
        outer_axes = {name: axis for name, axis in axes.items() if name not in searched_within}
        for group in combinations(outer_axes):
            if not _is_chosen(group, chosen):
                yield from select(runs.all(), **group)
            elif isinstance(self.rates, Tune):
                yield from tune(runs, group, axes["seed"], self.rates)
            else:
                sizes = [job["size"] for job in combinations({"size": axes["size"]}, group)]
                start = self.rates.start(group)
                rounds = 1 if smoke else 100
                yield from follow(runs, group, sizes, axes["seed"], start, rounds)


def follow(
    runs: Runs, group: Job, sizes: Sequence[Any], seeds: Axis, start: float, rounds: int
) -> list[Row]:
    """The rows of one group of values: at each size from the best rate of the one before by factors
    of 2 until the best has both its neighbours; and at the last with the first one's best rate."""
    rows: list[Row] = []

    def run(size: Any, lrs: list[float]) -> list[Row]:
        grid = combinations({"lr": lrs, "seed": seeds})
        return runs.of({**group, "size": size, **job} for job in grid)

    def curve(size: Any) -> dict[float, float]:
        return statistics.curve_of_rates(select(rows, size=size))

    for size in sizes:
        for _ in range(rounds):
            lrs = statistics.untried(curve(size), start)
            if not lrs:
                break
            rows += run(size, lrs)
        start = statistics.best(curve(size))
    first_best = statistics.best(curve(sizes[0]))
    if first_best not in curve(sizes[-1]):
        rows += run(sizes[-1], [first_best])
    return rows


def tune(runs: Runs, group: Job, seeds: Sequence[int], rates: Tune) -> list[Row]:
    """The rows of one group of values, at the rates that `rates` asks for."""
    rows: list[Row] = []
    while True:
        curve = statistics.curve_of_rates(rows)
        if not runs.options.smoke:
            lrs = statistics.untried(curve, rates.start(group))
        elif not rows:
            lrs = [rates.start(group)]
        else:
            lrs = []
        if not lrs:
            break
        rows += runs.of({**group, "lr": lr, "seed": seeds[0]} for lr in lrs)
    best_lr = statistics.best(curve)
    return rows + runs.of({**group, "lr": best_lr, "seed": seed} for seed in seeds[1:])


def climb(
    runs: Runs,
    places: Iterable[tuple[Job, T]],
    untried: Callable[[list[Row], T], Iterable[Job]],
    seeds: Sequence[int],
    rounds: int,
) -> None:
    """Run what `untried` of a place's rows and its start asks for, at all places together, until it
    asks for nothing or `rounds` are over."""
    places = list(places)
    for _ in range(rounds):
        jobs: list[Job] = []
        for where, start in places:
            for rates in untried(select(runs.all(), **where), start):
                jobs += [{**where, **rates, "seed": seed} for seed in seeds]
        if not jobs:
            return
        runs.of(jobs)


def combinations(axes: Mapping[str, Axis], outer: Job | None = None) -> Iterator[Job]:
    """Every job of the axes, each after the values of the `outer` job.

    >>> axes = {"rule": ["naive", "aware"], "lr": lambda job: [1] if job["rule"] == "naive" else []}
    >>> list(combinations(axes))
    [{'rule': 'naive', 'lr': 1}]
    """
    jobs: list[Job] = [outer or {}]
    for name, axis in axes.items():
        longer_jobs: list[Job] = []
        for job in jobs:
            values = axis(job) if callable(axis) else axis
            longer_jobs += [{**job, name: value} for value in values]
        jobs = longer_jobs
    yield from jobs


def _is_chosen(row: Row, chosen: Mapping[str, Sequence[Any]]) -> bool:
    return all(row[name] in values for name, values in chosen.items() if name in row)
