"""The ways to multiply by a structure, timed in turns: the loop that defines the product, batched
products without copies, the compiled engine, and nn.Linear.

    python -m benchmarks.speed.products                 # 13 minutes at most, results/products.json
                                                        # on a GPU results/products_gpu.json
    python -m benchmarks.speed.products --smoke

On a CPU: float32, 4,096 tokens, one thread, and the seconds that the CPU worked, so that other
programs on the machine count little. On a GPU: bfloat16, 16,384 tokens, cold caches, and three more
ways: nn.Linear of equal FLOPs, the products in chunks of tokens whose activations stay in the
second cache, and torch.compile of the loop. Every way is compared with float64 before it is timed.

`predicted` is the roofline: every product reads its two operands and writes its result once, at the
ceilings that were measured before, or that are supposed of an H100.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import nan, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn

from benchmarks.harness import report, timing
from benchmarks.harness.experiment import parser, result_path
from benchmarks.harness.figures import panels, save_picture
from benchmarks.harness.race import Bench, Heat, Row, Variant, race
from benchmarks.harness.statistics import select, values
from benchmarks.speed.variants import TOLERANCE, compile_all, equal_flops_widths
from structlin import BLAST, BTT, TT, BlockDiagonal, Dense, Family, Kronecker, Monarch, Structure
from structlin._engine import operators, views
from structlin._engine.operators import Affine
from structlin._engine.product import define

LOOP = "loop"
VIEWS = "without copies"
CHUNKS = "without copies, in chunks"
ENGINE = "engine"
DENSE = "nn.Linear"
EQUAL = "nn.Linear, equal FLOPs"
CHUNK = 2048  # tokens
H100 = timing.Ceilings(rate=798e12, bandwidth=3.0e12, call=nan)  # of bfloat16; see the docs
PREDICTED_AT = (1024, 2048, 4096)
PREDICTED_TOKENS = 16384


def families(width: int) -> dict[str, Family]:
    """The rows of the table; low-rank is not among them, as it is two nn.Linear everywhere."""
    return {
        "BTT r=1": BTT(),
        "BTT r=4": BTT(rank=4),
        "BTT r=1, SiLU": BTT().activate(),
        "BTT r=1, 3 cores": BTT(cores=3),
        "BTT r=4, 3 cores": BTT(rank=4, cores=3),
        "Monarch 4": Monarch(blocks=4),
        "Monarch 16": Monarch(blocks=16),
        "BLAST 4": BLAST(blocks=4, rank=width // 4),
        "block-diagonal 4": BlockDiagonal(blocks=4),
        "Kronecker": Kronecker(),
        "TT r=4": TT(rank=4),
    }


@dataclass(frozen=True)
class Job:
    width: int
    tokens: int
    dtype: str
    backward: bool

    @property
    def title(self) -> str:
        work = "forward + backward" if self.backward else "forward"
        return f"{self.width} -> {self.width}, {self.tokens} tokens, {self.dtype}, {work}"


def jobs(device: str, smoke: bool) -> list[Job]:
    """By importance."""
    if smoke:
        return [Job(64, 128, "float32", backward) for backward in (True, False)]
    if device == "cuda":
        ways = [(width, True) for width in (4096, 1024, 2048, 8192)] + [(4096, False)]
        return [Job(width, 16384, "bfloat16", backward) for width, backward in ways]
    ways = product((1024, 512, 2048), (True, False))
    return [Job(width, 4096, "float32", backward) for width, backward in ways]


class InChunks(Variant):
    """A layer that takes some tokens through forward and backward, then the next."""

    def work(self) -> Any:
        if not self.x.requires_grad:
            with torch.no_grad():
                return [self.run(chunk) for chunk in self.x.split(CHUNK)]
        sums: list[Tensor] = []  # of the parameters' gradients
        for x, dy in zip(self.x.detach().split(CHUNK), self.dy.split(CHUNK), strict=True):
            leaves = [x.requires_grad_(), *self.parameters]
            _, *gradients = torch.autograd.grad(self.run(x), leaves, dy)
            sums = torch._foreach_add(sums, gradients) if sums else gradients
        return sums


def variants(job: Job, heat: Heat) -> list[Variant]:
    """nn.Linear first; then every way of every family that the width has."""
    dtype = getattr(torch, job.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=heat.device).to(dtype)

    def dense(width: int, name: str) -> Variant:
        x = draw(job.tokens, width).requires_grad_(job.backward)
        dy = draw(job.tokens, width)
        weight = nn.Parameter(draw(width, width) / sqrt(width))
        structure = Dense().structure(width, width)
        return Variant(name, DENSE, structure, partial(F.linear, weight=weight), [weight], x, dy)

    reference = dense(job.width, "dense")
    ways = [reference]
    to_compile = []
    equal_widths: dict[int, str] = {}  # width of nn.Linear -> the first structure of its FLOPs
    for name, family in families(job.width).items():
        try:
            structure = family.structure(job.width, job.width)
        except ValueError as misfit:
            print(f"# left out: {name} in {job.title}: {misfit}")
            continue
        cores = [nn.Parameter(draw(*core.shape) / sqrt(core.fan_in)) for core in structure.cores]
        affine = Affine(structure.program, cores)
        run = partial(define, affine)
        loop = Variant(name, LOOP, structure, run, cores, reference.x, reference.dy)
        run = partial(operators.multiply_views, define, structure.program, cores, None)
        without_copies = replace(loop, implementation=VIEWS, run=run)
        ways += [loop, without_copies]
        if operators.available(reference.x):
            run = partial(operators.multiply, define, affine)
            ways.append(replace(loop, implementation=ENGINE, run=run))
        if heat.device == "cuda":
            chunks = {**vars(without_copies), "implementation": CHUNKS}
            ways.append(InChunks(**chunks))
            to_compile.append(replace(loop, implementation="compiled"))
            equal_widths.setdefault(equal_flops_widths(structure)[0], name)
    if job.width == 1024:
        ways += compile_all(to_compile[:2], heat.end - 30)
    for width, name in equal_widths.items():
        ways.append(dense(width, f"{EQUAL} as {name}"))
    return ways


def measure(job: Job, heat: Heat) -> list[Row]:
    if heat.device == "cpu":
        torch.set_num_threads(1)
    ways = variants(job, heat)
    works = {(way.name, way.implementation): way.work for way in ways}
    times = race(
        works,
        heat,
        errors={(way.name, way.implementation): way.error for way in ways},
        tolerance=TOLERANCE[job.dtype],
        clock=cpu_seconds if heat.device == "cpu" else timing.seconds,
    )
    rows = []
    for way in ways:
        key = (way.name, way.implementation)
        row = {"structure": way.name, "way": way.implementation} | times.row(key)
        row["x_dense"] = timing.ratio(times.seconds["dense", DENSE], times.seconds[key])
        if (way.name, LOOP) in times.seconds:
            row["x_loop"] = timing.ratio(times.seconds[way.name, LOOP], times.seconds[key])
        if heat.ceilings:
            itemsize = getattr(torch, job.dtype).itemsize
            row["predicted_ms"] = 1e3 * heat.ceilings.bound(
                way.structure, job.tokens, itemsize, backward=job.backward
            )
        rows.append(asdict(job) | row)
    return rows


def cpu_seconds(work: timing.Work, device: str) -> float:
    """Seconds that this process's threads worked."""
    start = time.process_time()
    work()
    return time.process_time() - start


# ---- showing -------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> Table:
    job = Job(**{name: rows[0][name] for name in Job.__annotations__})
    title = f"{job.title}, {rows[0]['rounds']} rounds"
    lines = []
    for row in rows:
        predicted = f"{row['predicted_ms']:.2f}" if "predicted_ms" in row else ""
        against_loop = report.with_spread(row["x_loop"], ".2f") if "x_loop" in row else ""
        lines.append(
            {
                "structure": row["structure"],
                "way": row["way"],
                "ms": report.with_spread(row["ms"], ".2f"),
                "predicted": predicted,
                "x nn.Linear": report.with_spread(row["x_dense"], ".2f"),
                "x loop": against_loop,
            }
        )
    return report.grid(title, lines, names=2)


def is_chosen(row: Row) -> bool:
    """Whether a layer of this structure takes the products without copies, by today's rule."""
    structure = families(row["width"])[row["structure"]].structure(row["width"], row["width"])
    return views.pays(structure.program.numbers)


def markdown(result: Row) -> str:
    """The table of docs/speed.md: speed against the loop, and in brackets against nn.Linear."""
    cells = {}
    for row in select(result["rows"], way=VIEWS):
        work = "fwd + bwd" if row["backward"] else "fwd"
        mark = "" if is_chosen(row) else " *"
        against_loop = row["x_loop"]["median"]
        against_dense = row["x_dense"]["median"]
        text = f"{against_loop:.2f}x ({against_dense:.1f}x){mark}"
        cells[row["structure"], f"{row['width']}, {work}"] = text
    measured = {title for _, title in cells}
    titles = [
        f"{width}, {work}" for width, work in product((512, 1024, 2048), ("fwd", "fwd + bwd"))
    ]
    return report.pivot(cells, [title for title in titles if title in measured])


def numbers(result: Row) -> dict[str, str]:
    """Of the rows in which the products without copies are chosen."""
    chosen = [row for row in select(result["rows"], way=VIEWS) if is_chosen(row)]
    trained = {row["structure"]: row for row in select(chosen, width=1024, backward=True)}
    ratios = [row["x_loop"]["median"] for row in chosen]
    return {
        **report.least_and_most("products.loop_", ratios, ".2f"),
        "products.btt1": f"{trained['BTT r=1']['x_loop']['median']:.2f}",
        "products.btt4": f"{trained['BTT r=4']['x_loop']['median']:.2f}",
    }


def predict(structure: Structure, ceilings: timing.Ceilings = H100) -> float:
    """Microseconds of forward and backward of 16,384 tokens in bfloat16, by the roofline."""
    return 1e6 * ceilings.bound(structure, PREDICTED_TOKENS, 2, backward=True)


def show_predictions(result: Row) -> str:
    """The speed over nn.Linear on an H100 by the roofline of every product: nothing is measured."""
    cells = {}
    for width in PREDICTED_AT:
        dense = predict(Dense().structure(width, width))
        cells["nn.Linear", str(width)] = f"{dense:.0f} us"
        for name, family in families(width).items():
            structure = family.structure(width, width)
            if views.pays(structure.program.numbers):
                microseconds = predict(structure)
                speed = f"{dense / microseconds:.2f}x"
                cells[name, str(width)] = f"{speed} ({microseconds:.0f} us)"
    return report.pivot(cells)


def picture(result: Row) -> Figure:
    """A panel for each width: forward and backward, by each way, as bars of nn.Linear's time."""
    rows = select(result["rows"], backward=True)
    widths = sorted({row["width"] for row in rows})
    figure, places = panels([f"width {width}" for width in widths], size=4)
    for axes, width in zip(places, widths, strict=True):
        at_width = select(rows, width=width)
        names = [name for name in values(at_width, "structure") if name != "dense"]
        for n, way in enumerate((LOOP, VIEWS, ENGINE)):
            bars = select(at_width, way=way)
            heights = [names.index(row["structure"]) + 0.27 * (n - 1) for row in bars]
            speeds = [row["x_dense"] for row in bars]
            medians = [speed["median"] for speed in speeds]
            below = [abs(speed["p20"] - speed["median"]) for speed in speeds]
            above = [abs(speed["p80"] - speed["median"]) for speed in speeds]
            axes.barh(heights, medians, height=0.25, xerr=[below, above], label=way)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel("speed / nn.Linear, forward + backward")
    places[0].legend()
    return figure


BENCH = Bench(
    name="products",
    about=__doc__,
    numbers=numbers,
    tables={"products": markdown, "gpu predicted": show_predictions},
    budget=720,
    jobs=jobs,
    measure=measure,
    table=show,
    ceilings=lambda job: job.dtype,
    weight=lambda job, device: job.width**1.5 * (3 if job.backward else 1),
    rounds=(3, 15),
)

if __name__ == "__main__":
    rows = BENCH.main()
    path = result_path(parser(None, workers=None).parse_known_args()[0], BENCH.name)
    if path and rows[0]["dtype"] == "float32":
        save_picture(picture({"rows": rows}), path.with_suffix(".png"))
