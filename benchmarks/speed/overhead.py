"""What a layer costs beside its products: few tokens, a forward pass, against the bare loop and
against nn.Linear.

    python -m benchmarks.speed.overhead           # two minutes; keeps results/overhead.json
    python -m benchmarks.speed.overhead --smoke   # seconds, keeps nothing

The loop is one batched product for each of the layer's own cores, and the bias: what the
mathematics asks for in PyTorch. Beside the times stand how many of the library's own functions a
call enters before the first product, and how many Python functions `convert` calls to convert a
model of one linear layer.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from statistics import median
from types import FrameType
from typing import Any

import torch
from rich.table import Table
from torch import nn

import structlin
from benchmarks.harness import report
from benchmarks.harness.race import Bench, Heat, Row, Variant
from benchmarks.harness.timing import Work, ratio
from benchmarks.speed.layer import job_of, race_layers
from benchmarks.speed.variants import SMOKE, Job, biased_oracle, families, loop
from structlin import BTT, BlockDiagonal, Dense, StructuredLinear, convert

PACKAGE = os.path.join(os.path.dirname(structlin.__file__), "")
# what a call ends in, and our own operator
PRODUCTS = ("bmm", "mm", "linear", "structlin_multiply")


def count_calls(work: Work, *, until_product: bool = False) -> int:
    """Python functions that `work` enters; with `until_product` the library's own, before the first
    product."""
    calls, done = 0, False

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls, done
        if event == "call" and not done:
            code = frame.f_code
            own = code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")
            calls += own or not until_product
        elif event == "c_call" and until_product and getattr(argument, "__name__", "") in PRODUCTS:
            done = True

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_to_the_first_product(layer: StructuredLinear, tokens: int, *, training: bool) -> int:
    """The library's own functions that a call of `layer` enters before its first product.

    >>> layer = StructuredLinear(64, 64, BTT())
    >>> calls_to_the_first_product(layer, 16, training=True) <= 12
    True
    """
    x = torch.randn(tokens, layer.in_features)
    with torch.set_grad_enabled(training):
        layer(x)  # what is only done once
        return count_calls(lambda: layer(x), until_product=True)


def jobs(device: str, smoke: bool) -> list[Job]:
    width, dtypes = (SMOKE, ["float32"]) if smoke else (1024, ["float32", "bfloat16"])
    return [Job(width, width, n, dtype, False) for dtype, n in product(dtypes, (1, 4, 16))]


def variants(job: Job) -> list[Variant]:
    """nn.Linear, and of each family the layer and the loop on the layer's parameters."""
    widths, dtype = (job.d_in, job.d_out), getattr(torch, job.dtype)
    x = torch.randn(job.tokens, job.d_in).to(dtype)
    variant = partial(Variant, x=x, dy=x, oracle=biased_oracle)
    linear = nn.Linear(*widths, dtype=dtype)
    parameters = [linear.weight[None], linear.bias]
    found = [variant("dense", "nn.Linear", Dense().structure(*widths), linear, parameters)]
    chosen = families(job.d_in) | {"block-diagonal 16": BlockDiagonal(blocks=16)}
    for name, family in chosen.items():
        layer = StructuredLinear(*widths, family, dtype=dtype)
        structure, cores, bias = layer.structure, list(layer.cores), nn.init.normal_(layer.bias)
        bare = partial(loop, structure, cores, bias=bias)
        for how, run in (("loop", bare), ("layer", layer)):
            found.append(variant(name, how, structure, run, [*cores, bias]))
    return found


def measure(job: Job, heat: Heat) -> list[Row]:
    """A row for each family: microseconds of nn.Linear, the loop and the layer, and the ratios of
    the former two to the last."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for variant, taken in race_layers(job, variants(job), heat).seconds.items():
        seconds.setdefault(variant.name, {})[variant.implementation] = taken
    dense, *_ = seconds.pop("dense").values()
    del seconds["dense, last"]
    rows = []
    for name, found in seconds.items():
        found = {"dense": dense, **found}
        row = asdict(job) | {"structure": name, "width": job.d_in}
        row["us"] = {how: 1e6 * median(taken) for how, taken in found.items()}
        for how in ("dense", "loop"):
            row[f"{how}_over_layer"] = ratio(found[how], found["layer"])
        rows.append(row)
    return rows


def calls(smoke: bool) -> Row:
    """Functions of ours before the first product, and Python calls of `convert`."""
    width = SMOKE if smoke else 1024
    layer, structure = StructuredLinear(width, width, BTT()), BTT()
    found = {
        f"{tokens} tokens, {kind}": calls_to_the_first_product(layer, tokens, training=training)
        for tokens in (16, 4096)
        for kind, training in (("training", True), ("no gradients", False))
    }
    first, second = (nn.Sequential(nn.Linear(64, 64)) for _ in range(2))
    convert(first, structure)  # what is only done once
    return {"calls": found, "convert": count_calls(lambda: convert(second, structure))}


def show(rows: Sequence[Row]) -> Table:
    shown = []
    for row in rows:
        taken = {f"{how} us": f"{us:.1f}" for how, us in row["us"].items()}
        for how in ("dense", "loop"):
            taken[f"{how} / layer"] = f"{row[f'{how}_over_layer']['median']:.2f}"
        shown.append({"structure": row["structure"]} | taken)
    return report.grid(f"{job_of(rows[0]).title} with a bias", shown)


def below(result: Row) -> str:
    counts = "before the first product {calls}, of convert {convert}".format(**result)
    return f"# calls of functions: {counts}"


BENCH = Bench(
    name="overhead",
    about=__doc__,
    budget=60,
    jobs=jobs,
    measure=measure,
    table=show,
    devices=("cpu",),
    rounds=(5, 400),
    beside=calls,
    below=below,
)

if __name__ == "__main__":
    BENCH.main()
