"""What could one operator save that computes both structured layers of an MLP and the activation
between them?

    OMP_NUM_THREADS=1 python -m benchmarks.speed.activation    # results/activation.json
    python -m benchmarks.speed.activation --smoke              # seconds

Such an operator still computes the activation and, in the backward pass, its derivative; and the
bias before it is added by the layer already. It saves the way to memory and back. ReLU takes that
way too and computes next to nothing. So the operator saves at most what a step with ReLU takes
beyond one without an activation. Steps of GPT-2 small and ViT-S whose MLPs are BTT take turns, and
of what each saves the median within a round counts. On one thread the time is the processor's, so
that other programs count less. "compiled" means torch.compile of every block, bfloat16 autocast.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.harness import report, timing
from benchmarks.harness.experiment import parser, result_path
from benchmarks.harness.race import Heat, Row, race
from benchmarks.harness.record import environment, save_json
from benchmarks.harness.statistics import select
from benchmarks.speed.model import MODELS, TINY_MODELS, Shape, blocks, shape_of, training

FULL, LAST = "all of it", "all of it, last"
WITHOUT, RELU, ONE = "without it", "ReLU in its place", "as one operation"


def shape(name: str) -> Shape:
    found = shape_of(name, "cpu")
    if name in TINY_MODELS:
        return found
    return replace(found, batch=2, context=256) if found.text else replace(found, batch=4)


def make_step(shape: Shape, change: str, compiled: bool, half: bool) -> Callable[[], Tensor]:
    """A training step of a model whose MLPs are BTT, with its activations changed."""
    model = structlin.convert(shape.build(), structlin.BTT(rank=1), include="ffn")
    for path, module in [*model.named_modules()]:
        if "GELU" in type(module).__name__ and change != FULL:
            one = nn.GELU("tanh" if shape.text else "none")
            new = {WITHOUT: nn.Identity(), RELU: nn.ReLU(), ONE: one}[change]
            model.set_submodule(path, new)
    if compiled:
        for block in blocks(model):
            block.compile()
    step = training(model.train(), shape)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return step()

    return run


def processor(work: Callable[[], Any], device: str) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(name: str, compiled: bool, half: bool, seconds: float) -> list[Row]:
    """A row for each change: the share of the step that it saves."""
    several = shape(name).text and not compiled  # operations in the place of one
    changes = [FULL, WITHOUT, RELU, ONE] if several else [FULL, WITHOUT, RELU]
    works = {change: make_step(shape(name), change, compiled, half) for change in changes}
    for work in works.values():
        work()  # memory, state of the optimizer, compilation
    heat = Heat(rounds=(2, 25), end=time.perf_counter() + seconds)
    clock = processor if torch.get_num_threads() == 1 else timing.wall
    times = race(works, heat, last=LAST, clock=clock)
    case = {"model": name, "compiled": compiled, "dtype": "bfloat16" if half else "float32"}
    rows = []
    for change in changes[1:]:
        pairs = zip(times.seconds[change], times.reference, strict=True)
        saved = timing.spread([1 - some / full for some, full in pairs])
        step = {"rounds": len(times.reference), "ms": times.ms(FULL)["median"]}
        rows.append({**case, "change": change, "saved": saved, **step})
    return rows


def show(rows: Sequence[Row]) -> Table:
    shown = [
        {
            "step": f"{row['model']}, {row['dtype']}" + (", compiled" if row["compiled"] else ""),
            "activation": row["change"],
            "saves (p20-p80)": report.with_spread(row["saved"], ".1%"),
            "of ms": f"{row['ms']:.0f}",
            "rounds": str(row["rounds"]),
        }
        for row in rows
    ]
    return report.grid("share of a step that the activation's time is", shown)


def bounds(rows: Sequence[Row]) -> list[float]:
    """What one operator saves at most, for each case: a share of the step.

    >>> rows = [{"change": WITHOUT, "saved": {"median": 0.25}}]
    >>> bounds([*rows, {"change": RELU, "saved": {"median": 0.125}}])
    [0.125]
    """
    gone, cheap = (select(rows, change=change) for change in (WITHOUT, RELU))
    pairs = zip(gone, cheap, strict=True)
    return [one["saved"]["median"] - other["saved"]["median"] for one, other in pairs]


def main(argv: list[str] | None = None) -> Row:
    about = parser(__doc__, workers=None)
    about.add_argument("--seconds", type=float, default=240, help="of rounds, of all steps")
    options = about.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    names = TINY_MODELS if options.smoke else MODELS[::-1]
    cases = [(name, c, h) for c in (False, True) for name in names for h in (False, True)]
    path, rows = result_path(options, "activation"), []
    for case in cases[:4] if options.smoke else cases:
        rows += measure(*case, 0 if options.smoke else options.seconds / len(cases))
        Console(width=120).print(show(rows))
        result = {"rows": rows, "threads": torch.get_num_threads(), "environment": environment()}
        if path:
            save_json(path, **result)  # after each case, as the compiled ones take long
    return result


if __name__ == "__main__":
    main()
