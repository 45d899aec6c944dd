"""Are layers stable, at initialisation and over training, at every width? "Beyond MuP 2".

    python -m benchmarks.papers.bm_metrics            # results/papers/bm_metrics.json
    python -m benchmarks.papers.bm_metrics --smoke    # seconds

For a linear layer on inputs of unit RMS three numbers are to stay of order 1 (see
`benchmarks.harness.live`): forward, dependency = sqrt(d_in / d_out) |W|_2 and update = sqrt(d_in /
d_out) |dW|_2. Order 1 means that a number does not move
with the width: its power of the width is below LEVEL, whatever its size. The article's forward is
the largest over all inputs, which for a linear layer is the dependency; here forward is that of the
inputs that come, RMS(y) / RMS(x). The article derives from them

- the initial variance: entries of std sqrt(d_out / d_in) / (sqrt d_in + sqrt d_out),
  `init="spectral"`, make the dependency 1, and exactly so in wide layers;
- the optimizer: dW = lr sqrt(d_out / d_in) U V^T, which is `Muon`, makes the update lr at every
  width.

It gives formulas and no figure. Here they are measured, with dense and with structured layers: the
dependency of fresh layers by width, initialisation and structure; then the three numbers of the
hidden layer of an MLP on digits, whose inputs are divided by their RMS, over 40 steps, by width and
optimizer. Powers are the slopes of log2 of a number on log2 of the width; AdamW with one rate for
all is there to show what a growing update looks like.
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.harness import training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.live import watch
from benchmarks.harness.models import BASE_WIDTH, STRUCTURES
from benchmarks.harness.report import least_and_most, table
from benchmarks.harness.shown import Claim
from benchmarks.harness.statistics import one, select, slope, values
from benchmarks.harness.tasks import PlainDigits

FAMILIES = {
    name: STRUCTURES[name] for name in ("dense", "low-rank", "Monarch", "BTT r=1", "BTT r=4")
}
INITS = ("spectral", "mup", "orthogonal")
TRAINED = ("dense", "low-rank", "BTT r=4")
OPTIMIZERS = ("Muon", "AdamW, muP", "AdamW, one lr")
LRS = {"Muon": 2.0**-4, "AdamW, muP": 2.0**-8, "AdamW, one lr": 2.0**-8}
WIDTHS = [64, 256, 1024]
BATCH = 128
NUMBERS = ("forward", "dependency", "update")
LEVEL = 0.15  # the largest power of the width of a number of order 1


def fresh(structure: str, init: str, width: int) -> Row:
    """The dependency of a new layer, and the largest of its cores'; the median of 5."""
    torch.manual_seed(0)
    dependencies = []
    largest_norms = []  # of a core
    for _ in range(5):
        layer = structlin.StructuredLinear(
            width, width, FAMILIES[structure](width), bias=False, init=init
        )
        with watch(layer) as log:
            layer(torch.randn(8, width))
        dependencies.append(log.rows[0].dependency)
        norms = []
        for core in layer.cores:  # (batch, fan_out, fan_in)
            spectral = torch.linalg.matrix_norm(core, 2).max()
            norms.append((spectral * math.sqrt(core.shape[2] / core.shape[1])).item())
        largest_norms.append(max(norms))
    return {
        "structure": structure,
        "init": init,
        "width": width,
        "dependency": sorted(dependencies)[2],
        "largest core": sorted(largest_norms)[2],
    }


class MLP(nn.Module):
    """64 -> width -> width -> 10; the square matrix, `hidden`, is structured. Inputs of the last
    two have RMS 1."""

    def __init__(self, width: int, family: structlin.Family) -> None:
        super().__init__()
        self.input = nn.Linear(64, width, bias=False)
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.hidden = structlin.StructuredLinear(width, width, family, bias=False, init="spectral")
        self.head = nn.Linear(width, 10, bias=False)
        nn.init.normal_(self.input.weight, std=1 / 8)  # 1 / sqrt(64)
        nn.init.normal_(self.head.weight, std=1 / width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.input(x)))
        return self.head(self.norm(F.relu(self.hidden(x))))


def make_optimizer(name: str, model: nn.Module, width: int) -> torch.optim.Optimizer:
    if name == "Muon":
        return structlin.optim.Muon(model, LRS[name], method="ns", matrices="all")
    aware = name == "AdamW, muP"
    groups = structlin.param_groups(
        model,
        LRS[name],
        weight_decay=0.0,
        base={width: BASE_WIDTH} if aware else None,
        structure_aware=aware,
    )
    return torch.optim.AdamW(groups)


def train(structure: str, optimizer: str, width: int, steps: int) -> Row:
    torch.manual_seed(0)
    task = PlainDigits()
    model = MLP(width, FAMILIES[structure](width))
    descent = make_optimizer(optimizer, model, width)
    with watch(model, every=max(1, steps // 5)) as log:
        loss = training.train(model, descent, task, steps, batch=BATCH, schedule="constant")
    readings = [row for row in log.rows if row.layer == "hidden" and row.update is not None]
    return {
        "loss": loss,
        "steps": [row.step for row in readings],
        **{number: [getattr(row, number) for row in readings] for number in NUMBERS},
    }


def exponents(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """structure -> optimizer -> number -> its power of the width, at the last reading."""
    powers: dict[str, dict[str, dict[str, float]]] = {}
    for structure, optimizer in product(TRAINED, OPTIMIZERS):
        chosen = select(rows, structure=structure, optimizer=optimizer)
        log_widths = [math.log2(row["width"]) for row in chosen]
        by_number = {}
        for number in NUMBERS:
            by_number[number] = slope(log_widths, [math.log2(row[number][-1]) for row in chosen])
        powers.setdefault(structure, {})[optimizer] = by_number
    return powers


def all_fresh(widths: Sequence[int]) -> Row:
    rows = []
    for structure, init, width in product(FAMILIES, INITS, widths):
        rows.append(fresh(structure, init, width))
    return {"fresh": rows}


# ---- what the pages show -------------------------------------------------------------------------


def dependencies(result: Row, *, dense: bool) -> list[float]:
    """Those of fresh layers, `init="spectral"`: of dense ones, or of products of cores."""
    rows = select(result["fresh"], init="spectral")
    return [row["dependency"] for row in rows if (row["structure"] == "dense") == dense]


def fresh_powers(result: Row) -> list[float]:
    """The powers of the width with which those go, of each structure."""
    rows = select(result["fresh"], init="spectral")
    powers = []
    for structure in values(rows, "structure"):
        chosen = select(rows, structure=structure)
        log_widths = [math.log2(row["width"]) for row in chosen]
        log_dependencies = [math.log2(row["dependency"]) for row in chosen]
        powers.append(slope(log_widths, log_dependencies))
    return powers


def largest_power(result: Row, *optimizers: str) -> float:
    """Without its sign."""
    largest = 0.0
    for by_optimizer in result["exponents"].values():
        for optimizer in optimizers:
            largest = max(largest, *map(abs, by_optimizer[optimizer].values()))
    return largest


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


CLAIMS = [
    Claim(
        "BM",
        "the initial variance gives a dependency of order 1",
        "the initial variance gives a dependency of order 1",
        lambda result: (
            [abs(power) < LEVEL for power in fresh_powers(result)],
            f"powers of the width of at most {max(map(abs, fresh_powers(result))):.2f}; "
            f"{span(dependencies(result, dense=True))} for dense layers, "
            f"{span(dependencies(result, dense=False))} for products of cores",
        ),
        runs="one run",
    ),
    Claim(
        "BM",
        "forward, dependency and update stay of order 1",
        "with its steps forward, dependency and update stay of order 1 at every width",
        lambda result: (
            [largest_power(result, *OPTIMIZERS[:2]) < LEVEL],
            f"powers of the width of at most {largest_power(result, *OPTIMIZERS[:2]):.2f} by Muon "
            "and by `param_groups`, up to "
            f"{largest_power(result, OPTIMIZERS[2]):.2f} with one rate for all widths",
        ),
        runs="one run",
    ),
]


def numbers(result: Row) -> dict[str, str]:
    rows = select(result["fresh"], init="spectral")
    core_errors = [abs(row["largest core"] - 1) for row in rows]
    dense_errors = [abs(dependency - 1) for dependency in dependencies(result, dense=True)]
    return {
        "bm.core": f"{math.ceil(1000 * max(core_errors)) / 10}",
        "bm.dense": f"{math.ceil(1000 * max(dense_errors)) / 10}",
        **least_and_most("bm.product_", dependencies(result, dense=False), ".2f"),
        "bm.fresh_power": f"{math.ceil(100 * max(map(abs, fresh_powers(result)))) / 100:.2f}",
        "bm.power": f"{math.ceil(100 * largest_power(result, *OPTIMIZERS[:2])) / 100:.2f}",
    }


def show_fresh(result: Row) -> str:
    """The dependency of fresh layers, in brackets the largest norm of a core."""
    rows = result["fresh"]
    widths = sorted(values(rows, "width"))
    shown = [("dense", "spectral"), ("dense", "mup")]
    shown += [(name, "spectral") for name in FAMILIES if name != "dense"]
    lines = []
    for structure, init in shown:
        cells = [f"{structure}, {init}"]
        for width in widths:
            row = one(rows, structure=structure, init=init, width=width)
            core = "" if structure == "dense" else f" ({row['largest core']:.2f})"
            cells.append(f"{row['dependency']:.2f}{core}")
        lines.append(cells)
    cells = ["every family, orthogonal"]
    for width in widths:
        orthogonal = select(rows, init="orthogonal", width=width)
        cells.append(span([row["dependency"] for row in orthogonal]))
    return table(["", *(f"width {width}" for width in widths)], [*lines, cells])


def show_training(result: Row) -> str:
    """The three numbers of the hidden layer at the last step that was read, and their powers."""
    widths = sorted(values(result["rows"], "width"))
    lines = []
    for structure, optimizer in product(TRAINED, OPTIMIZERS):
        rows = select(result["rows"], structure=structure, optimizer=optimizer)
        cells = [f"{structure}, {optimizer}"]
        for width in widths:
            forward, dependency, update = (one(rows, width=width)[key][-1] for key in NUMBERS)
            cells.append(f"{forward:.2f} / {dependency:.2f} / {update:.3f}")
        powers = result["exponents"][structure][optimizer]
        cells.append(" / ".join(f"{powers[key]:+.2f}" for key in NUMBERS))
        lines.append(cells)
    return table(["", *(f"width {n}" for n in widths), "powers"], lines)


EXPERIMENT = Experiment(
    name="papers/bm_metrics",
    about=__doc__,
    numbers=numbers,
    tables={"fresh": show_fresh, "training": show_training},
    claims=CLAIMS,
    place="results/beyond_mup.md#fresh-layers",
    run=train,
    axes={"structure": TRAINED, "optimizer": OPTIMIZERS, "width": WIDTHS},
    seeds=0,
    sizes={"steps": 40},
    note={"widths": WIDTHS, "batch": BATCH, "data": "digits", "lr": LRS},
    smoke={"steps": 2, "width": [16, 64]},
    beside=lambda chosen, result: all_fresh(chosen["width"]),
    analyse=lambda rows: {"exponents": exponents(rows)},
)

if __name__ == "__main__":
    EXPERIMENT.main()
