"""What the benchmarks of compression share: the families, the ways, a compressed model and its
picture."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from rich.pretty import Pretty
from torch import nn

import structlin
from benchmarks.compression import peers
from benchmarks.harness import report
from benchmarks.harness.experiment import Axis, Job
from benchmarks.harness.statistics import select, values
from benchmarks.harness.timing import interleaved, ratio, spread, wall
from structlin._compress import compress as compressing
from structlin._compress import sizes as sizing

Row = dict[str, Any]
Sizes = tuple[tuple[str, Any], ...]
THREADS = torch.get_num_threads()  # of a process of one's own; the harness sets one
FAMILIES: dict[str, Any] = {
    "BTT": structlin.BTT(),
    "Monarch": structlin.Monarch(),
    "low-rank": structlin.LowRank(rank=1),
    "block-diagonal": structlin.BlockDiagonal(blocks=4),
}
METHODS = ("dense", *peers.PEERS, *FAMILIES)
WAYS = ("dense", "peer", "uncorrected", "calibrated", "int8", "refined", "healed")
WHOLE = ("dense", "int8")  # methods that keep all parameters


@dataclass(frozen=True, eq=False)
class Data:
    """A trained model and what it is compressed with.

    Args:
        part: what the names of the layers begin with that are compressed.
        batches: of calibration, the same for all methods.
        seen: the same batches, for the peers.
        healing: batches to distil on, one for each step.
        judges: batches that judge the healed model, if there are any.
    """

    model: nn.Module
    part: str
    batches: Sequence[peers.Batch]
    seen: peers.Seen
    healing: Sequence[peers.Batch]
    judges: Sequence[peers.Batch]


def axes_of(keeps: Sequence[float], healed: Mapping[str, Sequence[float]]) -> dict[str, Axis]:
    """The axes of an experiment; 1.0 is among what is kept, by dense models and int8."""
    combined = partial(combine, healed=healed)
    return {"method": [*METHODS], "keep": [*keeps], "way": [*WAYS], "seed": combined}


def combine(job: Job, healed: Mapping[str, Sequence[float]]) -> list[int]:
    """The axis of seeds: one for a combination of method, keep and way that there is, else none.

    Args:
        healed: the families that are refined -> what is kept where they are healed too.
    """
    method, keep, way = job["method"], job["keep"], job["way"]
    if (keep == 1) != (method in WHOLE):
        return []
    kinds = {"dense": ["dense", "int8"], **{name: ["peer"] for name in peers.PEERS}}
    more = ["refined", "uncorrected"] * (method in healed)
    ours = ["calibrated", "int8", *more, *["healed"] * (keep in healed.get(method, ()))]
    return [0] if way in kinds.get(method, ours) else []


def runner(
    prepare: Callable[[Sizes], tuple[Data, Any]],
    measure: Callable[[nn.Module, Any, Row], Row],
    speeds: Callable[[nn.Module, Data, Any, Row], Row],
) -> Callable[..., Row]:
    """What an experiment runs: one model, compressed, measured, and timed where its structure is
    not that of another row.

    Args:
        prepare: what all runs of a process share: the data to compress with, what is held out.
    """

    def run(method: str, keep: float, way: str, seed: int, **sizes: Any) -> Row:
        torch.set_num_threads(THREADS)
        torch.manual_seed(seed)
        data, held = prepare(tuple(sizes.items()))
        heal = {"steps": sizes["heal_steps"], "lr": sizes["heal_lr"]}
        model, row = compress(data, method, keep, way, refine=sizes["refine"], heal=heal)
        row |= measure(model, held, sizes)
        if way in ("dense", "peer", "calibrated", "int8") and method not in ("pruning", "Wanda"):
            row["speed"] = speeds(model, data, held, sizes)
        return row

    return run


def compress(
    data: Data,
    method: str,
    keep: float,
    way: str,
    *,
    refine: int,
    heal: Mapping[str, Any],
    refined: Sequence[str] = ("refined", "healed"),
) -> tuple[nn.Module, Row]:
    """A model that one of the methods made, and its size and seconds.

    Args:
        refine: steps of each block's refinement, in the ways of `refined`.
        heal: options of `structlin.distill`.
    """
    if way == "peer":
        start = time.process_time()
        model = copy.deepcopy(data.model)
        layers = peers.layers_of(model, data.part)
        peer = (peers.PEERS | peers.SEARCHED)[method]
        found: Row = peer(model, layers, keep, data.seen)
        return model.eval(), found | {"cpu_seconds": time.process_time() - start}
    if way == "plain":
        start, model = time.process_time(), copy.deepcopy(data.model)
        options = {"include": f"{data.part}*", "keep": keep, "allocation": "error"}
        structlin.plan_compression(model, FAMILIES[method], None, **options).apply()
        return model.eval(), count(model, data.part) | {"cpu_seconds": time.process_time() - start}
    options = {"refine": refine if way in refined else 0, "corrected": way != "uncorrected"}
    made, seconds = compress_once(data, method, keep, **options)
    model = copy.deepcopy(made)
    if way == "int8":
        quantize(model, data.part)
    found = count(model, data.part) | {"cpu_seconds": seconds}
    if way == "healed":
        start = time.process_time()
        healed = structlin.distill(
            model, data.model, data.healing, held_out=data.judges or None, progress=False, **heal
        )
        found["heal_seconds"] = time.process_time() - start
        found["heal_loss"] = [healed.before, healed.after]
    return model.eval(), found


@lru_cache(maxsize=1)  # int8 follows calibrated, and healed refined: each pair is compressed once
def compress_once(
    data: Data, method: str, keep: float, refine: int, corrected: bool
) -> tuple[nn.Module, float]:
    """The model as `structlin.compress` leaves it, and the processor's seconds of that."""
    if method == "dense":
        return data.model, 0.0
    measured, seconds = measure_once(data, method, corrected)
    start = time.process_time()
    plan = measured.plan(sizing.Share(keep), refine, progress=False)
    model = copy.deepcopy(plan).apply()  # the measured model serves again
    return model, seconds + time.process_time() - start


@lru_cache(maxsize=2)
def measure_once(data: Data, method: str, corrected: bool) -> tuple[compressing.Measured, float]:
    """What `structlin.compress` measures whatever is kept, `corrected` or by the predicted harm
    alone, and the processor's seconds of that."""
    start, model = time.process_time(), copy.deepcopy(data.model)
    selection: Row = {"include": f"{data.part}*", "exclude": (), "overrides": None, "untie": False}
    correct = sizing._correct_curves if corrected else lambda replay, offers, curves, *_: curves
    with patch.object(sizing, "_correct_curves", correct):
        share = sizing.Share(0.5)  # any: what is measured is the same
        given = (model, FAMILIES[method], data.batches, share, None, False)
        found = compressing.measure(*given, **selection)
    return found, time.process_time() - start


@torch.no_grad()
def time_in_turns(
    make: Callable[[nn.Module], Callable[[], Any]],
    model: nn.Module,
    dense: nn.Module,
    count: int,
    rounds: int,
) -> Row:
    """How many of `count` a model does in a second, and how many times dense's in the same round:
    on one thread, and on as many as this process has.

    Args:
        make: a model -> work on `count` tokens or images.
    """
    works, found = {"dense": make(dense), "model": make(model)}, {}
    before = torch.get_num_threads()
    for threads in sorted({1, before}):
        torch.set_num_threads(threads)
        times = interleaved(works, lambda work: wall(work, "cpu"), rounds=(rounds + 1,) * 2)
        mine, theirs = (times[name][1:] for name in ("model", "dense"))  # the first one warms up
        rate = spread([count / seconds for seconds in mine])["median"]
        found[str(threads)] = {"per_second": rate, "x_dense": ratio(theirs, mine)}
    torch.set_num_threads(before)
    return found


def quantize(model: nn.Module, part: str) -> None:
    """Make all linear layers of that part int8 by our engine, dense ones as one core."""
    if peers.layers_of(model, part):
        structlin.convert(model, structlin.Dense(), include=f"{part}*", init="project")
    structlin.quantize(model, include=f"{part}*")


def count(model: nn.Module, part: str) -> Row:
    """The size of the linear layers of that part, structured or not."""
    rows = [row for row in structlin.summary(model).rows if row.name.startswith(part)]
    sizes = {name: sum(getattr(row, name) for row in rows) for name in ("params", "bytes", "flops")}
    return {**sizes, "dense_layers": sum(row.layers for row in rows if row.structure == "dense")}


# ---- shown ---------------------------------------------------------------------------------------


def name_of(row: Row) -> str:
    """The method, and the way where a method has several."""
    return row["method"] + ("" if row["way"] in ("dense", "peer") else f", {row['way']}")


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By what is kept, then peers, then structures."""

    def key(row: Row) -> tuple[float, int, int]:
        method = row["method"]
        place = METHODS.index(method) if method in METHODS else len(METHODS)
        return -row["keep"], place, WAYS.index(row["way"])

    return sorted(rows, key=key)


def show(result: Row, line_of: Callable[[Row], dict[str, str]], **tables: Any) -> list[Any]:
    """A line of each row, and what else was computed of them."""
    lines = [line_of(row) for row in in_order(result["rows"])]
    return [report.grid(result["setting"]["model"], lines), Pretty(tables)]


def cells_of(row: Row, figures: Mapping[str, str]) -> dict[str, str]:
    """A line of a table: `figures` between what was done and what that took."""
    line = {"": name_of(row), "keep": f"{row['keep']:g}", "MB": f"{row['bytes'] / 1e6:.1f}"}
    line |= figures
    for kind, found in row.get("speed", {}).items():
        speeds = " / ".join(f"{each['x_dense']['median']:.2f}" for each in found.values())
        line[f"{kind}, x dense"] = f"{speeds} (threads: {' / '.join(found)})"
    healing = f" + {row['heal_seconds']:.0f}" if "heal_seconds" in row else ""
    return line | {"CPU s": f"{row['cpu_seconds']:.0f}{healing}"}


STYLES: dict[str, dict[str, Any]] = {
    "dense": {"linestyle": "", "marker": "D", "color": "black"},
    "plain": {"linestyle": "--", "marker": "x"},
    "calibrated": {"linestyle": "-.", "marker": "v"},
    "int8": {"linestyle": "", "marker": "P"},
    "refined": {"linestyle": "-", "marker": "o"},
    "healed": {"linestyle": "", "marker": "*", "markersize": 12},
    "peer": {"linestyle": ":", "marker": "s", "color": "0.5"},
}


def plot(
    rows: Iterable[Row],
    wanted: Mapping[str, str],
    *,
    by: str = "family",
    log: Sequence[str] = (),
    tops: Mapping[str, float] = MappingProxyType({}),
) -> Figure:
    """A panel for each figure of `wanted`, name -> title, against bytes; a line for each method.

    Args:
        by: what rows call their method.
        log: figures whose axis is logarithmic.
        tops: figures above these numbers are not shown, and the title says so.
    """
    rows = list(rows)
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, len(wanted), squeeze=False)[0]
    names = values(rows, by)
    for axes, (figure_of, title) in zip(panels, wanted.items(), strict=True):
        top = tops.get(figure_of, math.inf)
        for name, way in product(names, STYLES):
            chosen = select(rows, **{by: name, "way": way})
            shown = [row for row in chosen if row[figure_of] <= top]
            points = sorted((row["bytes"], row[figure_of]) for row in shown)
            colour = {"color": f"C{names.index(name)}"}
            label = name if way in ("dense", "peer", "plain") else f"{name}, {way}"
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **colour | STYLES[way])
                if way == "peer":
                    axes.annotate(name, points[-1], fontsize="x-small", color="0.4")
        if figure_of in tops:
            title = f"{title}, up to {top:,.0f}"
        axes.set(xlabel="bytes of the linear layers", title=title)
        axes.title.set_size("medium")
        axes.set_yscale("log" if figure_of in log else "linear")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} MB")
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="x-small")
    return figure
