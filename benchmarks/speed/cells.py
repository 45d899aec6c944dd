"""Is a layer ever slower than the plain loop? Every structure, width, count of tokens and dtype.

    python -m benchmarks.speed.cells            # results/cells.json
    python -m benchmarks.speed.cells --smoke    # seconds, keeps nothing

The loop is one batched product for each of the layer's own cores, as in `benchmarks.speed.layer`.
Loop and layer take turns, on one machine's CPU. A cell is the loop's seconds over the layer's in
the same round: below 1 the layer loses. A cell whose 80th percentile is below `LEAST` is a loss.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product

import torch
from rich.table import Table

from benchmarks.harness import report
from benchmarks.harness.race import Bench, Heat, Row, Variant, race
from benchmarks.harness.statistics import select, values
from benchmarks.harness.timing import ratio
from benchmarks.speed.layer import SAMPLE_SECONDS
from benchmarks.speed.variants import TOLERANCE, Job, families, loop
from structlin import BTT, BlockDiagonal, StructuredLinear

WIDTHS = 1024, 512, 2048, 256, 4096, 8192
TOKENS = 4096, 256, 16
LEAST = 0.97  # of the loop's speed; closer, the two are level
# features times tokens; beyond, a round takes seconds: torch multiplies float16 slowly
LARGEST = {"float32": 2**23, "bfloat16": 2**23, "float16": 2**18}


def jobs(device: str, smoke: bool) -> list[Job]:
    widths, counts, dtypes = ([64], [16], ["float32"]) if smoke else (WIDTHS, TOKENS, [*TOLERANCE])
    return [
        Job(width, width, tokens, dtype, backward)
        for dtype, width, tokens, backward in product(dtypes, widths, counts, (True, False))
        if width * tokens <= LARGEST[dtype]
    ]


def layers(job: Job) -> dict[str, StructuredLinear]:
    """The layers of every family that fits the width."""
    chosen = families(job.d_in) | {
        "block-diagonal 16": BlockDiagonal(blocks=16),
        "BTT r=2, 3 cores": BTT(rank=2, cores=3),
    }
    found, dtype = {}, getattr(torch, job.dtype)
    for name, family in chosen.items():
        try:
            found[name] = StructuredLinear(job.d_in, job.d_out, family, bias=False, dtype=dtype)
        except ValueError:
            continue  # no such rank or number of blocks at this width
    return found


def measure(job: Job, heat: Heat) -> list[Row]:
    """A row for each family: milliseconds of the loop and the layer, and their ratio."""
    rows = []
    for name, layer in layers(job).items():
        x = torch.randn(job.tokens, job.d_in).to(layer.cores[0].dtype)
        inputs = x.clone().requires_grad_(job.backward)
        structure, cores = layer.structure, list(layer.cores)
        runs = {"loop": partial(loop, structure, cores), "layer": layer}
        variants = {
            how: Variant(name, how, structure, run, cores, inputs, x) for how, run in runs.items()
        }
        times = race(
            {how: variant.work for how, variant in variants.items()},
            heat,
            errors={how: variant.error for how, variant in variants.items()},
            tolerance=TOLERANCE[job.dtype],
            least=SAMPLE_SECONDS,
        )
        row = asdict(job) | {"structure": name}
        row["ms"] = {how: times.ms(how) for how in runs}
        rows.append(row | {"loop_over_layer": ratio(times.seconds["loop"], times.seconds["layer"])})
    return rows


def losses(rows: Sequence[Row]) -> list[Row]:
    """The cells in which the layer is slower than the loop beyond the spread."""
    return [row for row in rows if row["loop_over_layer"]["p80"] < LEAST]


def show(rows: Sequence[Row]) -> Table:
    shown = [
        {
            "structure": row["structure"],
            "layer ms": f"{row['ms']['layer']['median']:.3g}",
            "loop / layer": f"{row['loop_over_layer']['median']:.2f}",
        }
        for row in rows
    ]
    return report.grid(Job(*(rows[0][name] for name in Job.__dataclass_fields__)).title, shown)


def below(result: Row) -> str:
    rows = result["rows"]
    lines = [f"{len(losses(rows))} of {len(rows)} cells are losses:"]
    for row in losses(rows):
        work = "both" if row["backward"] else "forward"
        speed = row["loop_over_layer"]
        cell = f"{row['structure']}, {row['d_in']}, {row['tokens']} tokens, {row['dtype']}, {work}"
        lines.append(f"  {cell}: {speed['median']:.2f} ({speed['p20']:.2f} to {speed['p80']:.2f})")
    for name in values(rows, "structure"):
        found = sorted(row["loop_over_layer"]["median"] for row in select(rows, structure=name))
        lines.append(
            f"{name}: {found[0]:.2f} to {found[-1]:.2f}, median {found[len(found) // 2]:.2f}"
        )
    return "\n".join(lines)


BENCH = Bench(
    name="cells",
    about=__doc__,
    budget=900,
    jobs=jobs,
    measure=measure,
    table=show,
    devices=("cpu",),
    rounds=(5, 5),
    below=below,
)

if __name__ == "__main__":
    BENCH.main()
