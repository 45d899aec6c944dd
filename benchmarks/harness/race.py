"""A benchmark of speed as data, and the one way in which its variants are timed.

A speed alone says little, so a `Bench` follows one protocol. The machine's ceilings come first.
Every variant is compared with its oracle, and one that is wrong ends the run. The variants take
turns, the reference first and last in every round. Speeds are ratios within a round, with their
spread. Jobs come in order of importance; what does not fit the budget of seconds is left out.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from math import ceil, inf
from platform import libc_ver
from typing import Any, Generic

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import structlin
from benchmarks.harness import timing
from benchmarks.harness.experiment import parser, result_path
from benchmarks.harness.record import save_json
from benchmarks.harness.shown import Shown
from benchmarks.harness.timing import Ceilings, Key, Work, ratio, spread
from structlin import Structure

Row = dict[str, Any]
Run = Callable[[Tensor], Tensor]
Oracle = Callable[[Structure, Sequence[Tensor], Tensor], Tensor]

ORACLE_TOKENS = 256  # of a layer's output that are compared with the oracle
LEAST_NUMBERS = 8  # of a gradient that is compared, beyond those of the gains
JOB_SECONDS = 3.0  # that a job's turns may take, however little is left


# ---- one race ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heat:
    """Where one job is measured, and for how long."""

    device: str = "cpu"
    rounds: tuple[int, int] = (3, 25)  #: the least, even if its share is used up, and the most
    end: float = inf  #: of `time.perf_counter`; after it nothing is begun but a first round
    share: float = 1.0  #: of the seconds that are left, for the checks and the rounds of this job
    ceilings: Ceilings | None = None

    def until(self) -> float:
        now = time.perf_counter()
        return now + max(JOB_SECONDS, self.share * (self.end - now))


@dataclass(frozen=True)
class Times(Generic[Key]):
    """Seconds of every variant, round by round, and its error."""

    seconds: dict[Key, list[float]]
    errors: dict[Key, float]

    @property
    def reference(self) -> list[float]:
        """The mean of the first and the last of each round."""
        opening, *_, closing = self.seconds.values()
        return [sum(pair) / 2 for pair in zip(opening, closing, strict=True)]

    def row(self, key: Key) -> Row:
        return {"rounds": len(self.seconds[key]), "ms": self.ms(key), "error": self.errors[key]}

    def ms(self, key: Key) -> dict[str, float]:
        return spread([1e3 * sample for sample in self.seconds[key]])

    def speed(self, key: Key) -> dict[str, float]:
        """Against the reference."""
        return ratio(self.reference, self.seconds[key])


def race(
    works: Mapping[Key, Work],
    heat: Heat,
    *,
    last: Key | None = None,
    errors: Mapping[Key, Callable[[], float]] | None = None,
    tolerance: float = inf,
    clock: Callable[[Work, str], float] = timing.seconds,
    least: float = 0.0,
) -> Times[Key]:
    """Compare the variants with their oracles, then time them in turns.

    Args:
        works: the variants; the first is the reference.
        last: the name under which the reference runs again at the end of every round.
        errors: of variants against their oracles, relative.
        tolerance: what an error has to be below.
        clock: (work, device) -> seconds.
        least: seconds of a sample, by calls back to back.

    Raises:
        ArithmeticError: a variant is wrong; nothing is timed then.
    """
    until = heat.until()
    measured_errors = {key: measure_error() for key, measure_error in (errors or {}).items()}
    for key, error in measured_errors.items():
        if not error < tolerance:
            raise ArithmeticError(f"{key}: relative error {error:.1e}, not below {tolerance:.0e}")

    turns = dict(works)
    if last is not None:
        reference = next(iter(works))
        turns[last] = works[reference]
        if reference in measured_errors:
            measured_errors[last] = measured_errors[reference]

    # a sample of `least` seconds is as many calls back to back as one call's time asks for
    calls = dict.fromkeys(turns, 1)
    if least:
        for key, work in turns.items():
            calls[key] = ceil(least / timing.wall(work, heat.device))
    times = timing.interleaved(
        {key: partial(_repeat, work, calls[key]) for key, work in turns.items()},
        lambda work: clock(work, heat.device),
        rounds=heat.rounds,
        until=until,
        end=heat.end,
    )
    seconds_per_call = {}
    for key, samples in times.items():
        seconds_per_call[key] = [sample / calls[key] for sample in samples]
    return Times(seconds_per_call, measured_errors)


def _repeat(work: Work, count: int) -> None:
    for _ in range(count):
        work()


@dataclass(eq=False)
class Variant:
    """A layer as a function, its parameters, and what says what it has to compute.

    Its work is one forward pass, and the backward pass where `x` requires a gradient.
    """

    name: str
    implementation: str
    structure: Structure
    run: Run
    parameters: Sequence[Tensor]
    x: Tensor
    dy: Tensor
    option: str = ""
    oracle: Oracle = timing.oracle

    @property
    def widths(self) -> tuple[int, int]:
        return self.structure.in_features, self.structure.out_features

    @property
    def title(self) -> str:
        """The implementation, and its option."""
        return f"{self.implementation} + {self.option}" if self.option else self.implementation

    def __str__(self) -> str:
        return f"{self.name}, {self.title}, {len(self.x)} tokens, {self.x.dtype}"

    def work(self) -> Any:
        if self.x.requires_grad:
            return torch.autograd.grad(self.run(self.x), [self.x, *self.parameters], self.dy)
        with torch.no_grad():
            return self.run(self.x)

    def error(self) -> float:
        """The largest relative error of the output and the gradients, on a sample of the tokens.

        The pass has full size, on memory poisoned with NaN. The output's gradient is zero outside
        the sample, so that the parameters' gradients are the sample's alone.
        """
        x = self.x
        has_backward = x.requires_grad
        count = min(len(x), ORACLE_TOKENS)
        sample = torch.linspace(0, len(x) - 1, count, device=x.device).round().long()
        dy = torch.zeros_like(self.dy)
        dy[sample] = self.dy[sample]

        # What is compiled takes its memory past torch's allocations, and would be compiled anew
        # for the poisoned mode
        poisoned = nullcontext() if self.implementation == "compiled" else timing.poisoned()
        with poisoned, torch.set_grad_enabled(has_backward):
            y = self.run(x)
            gradients: Sequence[Tensor] = ()
            if has_backward:
                gradients = torch.autograd.grad(y, [x, *self.parameters], dy)
        if not all(torch.isfinite(tensor).all() for tensor in (y, *gradients)):
            return inf

        # The oracle computes the sampled tokens alone, in float64: x_64 (sample, in_features).
        x_64, *parameters_64 = [
            tensor.detach().double().requires_grad_(has_backward)
            for tensor in (x[sample], *self.parameters)
        ]
        y_64 = self.oracle(self.structure, parameters_64, x_64)
        results = [y[sample]]
        expected = [y_64]
        if has_backward:
            dx, *parameter_gradients = gradients
            results += [dx[sample], *parameter_gradients]
            dy_64 = dy[sample].double()
            expected += torch.autograd.grad(y_64, [x_64, *parameters_64], dy_64)

        # The gradient of a gain is a sum of a million numbers that nearly cancel: bfloat16 has no
        # digits of it
        return max(
            timing.relative_error(result, oracle)
            for result, oracle in zip(results, expected, strict=True)
            if oracle.numel() > LEAST_NUMBERS
        )


# ---- a benchmark ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench(Shown):
    """What is compared, for how many seconds, and what pages show of it (see `Shown`). `main` runs
    it; a result of a GPU has a name that ends in "_gpu".

    Args:
        about: the module's docstring.
        budget: seconds, the default of --budget.
        jobs: (device, smoke) -> settings by importance; a job is a dataclass with a `title`.
        measure: (job, heat) -> a row for each variant.
        table: a job's rows -> how they are shown; None: they are not.
        devices: those it runs on.
        rounds: the least and the most; two in a smoke run.
        keeps_pages: whether a CPU's freed memory stays the process's own.
        ceilings: job -> the dtype whose ceilings it needs, if any.
        weight: (job, device) -> how long its rounds take, relatively.
        least: (job, device, the rows of each job so far) -> seconds that it takes in any case.
        setting: (device, smoke) -> what else describes all rows, kept as "setting".
        beside: smoke -> what else is measured, kept beside the rows.
        below: the result -> what is printed below the tables.
    """

    about: str | None
    budget: float
    jobs: Callable[[str, bool], Sequence[Any]]
    measure: Callable[[Any, Heat], list[Row]]
    table: Callable[[Sequence[Row]], Table | None]
    devices: Sequence[str] = ("cpu", "cuda")
    rounds: tuple[int, int] = (3, 25)
    keeps_pages: bool = True
    ceilings: Callable[[Any], str | None] = lambda job: None
    weight: Callable[[Any, str], float] = lambda job, device: 1.0
    least: Callable[[Any, str, Sequence[list[Row]]], float] = lambda job, device, heats: 0.0
    setting: Callable[[str, bool], Row] = lambda device, smoke: {}
    beside: Callable[[bool], Row] = lambda smoke: {}
    below: Callable[[Row], str] = lambda result: ""

    def main(self, argv: Sequence[str] | None = None) -> list[Row]:
        """Run, print and keep the result, and return its rows."""
        options = self._parser().parse_args(argv)
        structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))  # builds the engine before times
        structlin.show_config()
        end = time.perf_counter() + options.budget
        result: Row = {"setting": self._setting(options)}
        torch.manual_seed(0)
        ceilings = self._ceilings(options)
        if ceilings:
            result["ceilings"] = {dtype: asdict(limits) for dtype, limits in ceilings.items()}
        result |= self.beside(options.smoke)
        suffix = "_gpu" if options.device == "cuda" else ""
        path = result_path(options, self.name + suffix)
        heats: list[list[Row]] = []
        for rows in self._heats(options, end, ceilings):
            print(*(json.dumps(row, allow_nan=False) for row in rows), sep="\n", flush=True)
            heats.append(rows)
            result["rows"] = [*chain.from_iterable(heats)]
            if path:
                save_json(path, **result)
        for table in filter(None, map(self.table, heats)):
            Console(width=210).print(table)
        if heats:
            print(self.below(result))
        return result.get("rows", [])

    def _heats(
        self, options: argparse.Namespace, end: float, ceilings: Mapping[str, Ceilings]
    ) -> Iterator[list[Row]]:
        """The rows of each job that fits."""
        device = options.device
        rounds = (2, 2) if options.smoke else self.rounds
        jobs = self.jobs(device, options.smoke)
        heats: list[list[Row]] = []
        for n, job in enumerate(jobs):
            if end - time.perf_counter() < self.least(job, device, heats):
                print(f"# left out: {job.title}")
                continue
            weight, *later_weights = [self.weight(later, device) for later in jobs[n:]]
            share = weight / (weight + sum(later_weights))
            limits = ceilings.get(self.ceilings(job) or "")
            rows = self.measure(job, Heat(device, rounds, end, share, limits))
            heats.append(rows)
            yield rows

    def _parser(self) -> argparse.ArgumentParser:
        options = parser(self.about, workers=None)
        options.add_argument("--budget", type=float, default=self.budget, help="seconds")
        has_gpu = "cuda" in self.devices and torch.cuda.is_available()
        default = "cuda" if has_gpu else self.devices[0]
        options.add_argument("--device", choices=self.devices, default=default)
        return options

    def _setting(self, options: argparse.Namespace) -> Row:
        device = options.device
        setting = {"device": device, "threads": torch.get_num_threads(), "budget": options.budget}
        if device == "cpu":
            if self.keeps_pages and timing.keep_pages():
                setting["allocator"] = "keeps freed pages"
            else:
                setting["allocator"] = f"{libc_ver()[0] or 'libc'}'s default"
        return setting | self.setting(device, options.smoke)

    def _ceilings(self, options: argparse.Namespace) -> dict[str, Ceilings]:
        device = options.device
        dtypes = dict.fromkeys(map(self.ceilings, self.jobs(device, options.smoke)))
        ceilings = {}
        for dtype in filter(None, dtypes):
            limits = timing.ceilings(device, getattr(torch, dtype), smoke=options.smoke)
            ceilings[dtype] = limits
            rates = f"{limits.rate / 1e12:.3g} TFLOP/s, {limits.bandwidth / 1e9:.3g} GB/s"
            print(f"# ceilings, {dtype}: {rates}, {1e6 * limits.call:.3g} us a call")
        return ceilings
