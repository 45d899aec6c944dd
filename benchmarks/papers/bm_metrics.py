"""Are layers stable, at initialisation and over training, at every width? "Beyond MuP 2".

    python -m benchmarks.papers.bm_metrics            # results/papers/bm_metrics.json
    python -m benchmarks.papers.bm_metrics --smoke    # seconds

For a linear layer on inputs of unit RMS three numbers are to stay of order 1 (see
`structlin.stability`): forward, dependency = sqrt(d_in / d_out) |W|_2 and update = sqrt(d_in /
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
from benchmarks.harness.models import BASE_WIDTH, STRUCTURES
from benchmarks.harness.report import least_and_most, table
from benchmarks.harness.shown import Claim
from benchmarks.harness.statistics import one, select, slope, values
from benchmarks.harness.tasks import PlainDigits
from structlin import stability

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
    found, cores = [], []
    for _ in range(5):
        layer = structlin.StructuredLinear(
            width, width, FAMILIES[structure](width), bias=False, init=init
        )
        with stability.watch(layer) as log:
            layer(torch.randn(8, width))
        found.append(log.rows[0].dependency)
        norms = [
            torch.linalg.matrix_norm(core, 2).max() * math.sqrt(core.shape[2] / core.shape[1])
            for core in layer.cores
        ]
        cores.append(max(norm.item() for norm in norms))
    return {
        "structure": structure, "init": init, "width": width,
        "dependency": sorted(found)[2], "largest core": sorted(cores)[2],
    }  # fmt: skip


class MLP(nn.Module):
    """64 -> width -> width -> 10; the square matrix, `hidden`, is structured. Inputs of the last
    two have RMS 1."""

    def __init__(self, width: int, family: structlin.Family) -> None:
        super().__init__()
        self.input = nn.Linear(64, width, bias=False)
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.hidden = structlin.StructuredLinear(width, width, family, bias=False, init="spectral")
        self.head = nn.Linear(width, 10, bias=False)
        nn.init.normal_(self.input.weight, std=1 / 8)
        nn.init.normal_(self.head.weight, std=1 / width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.input(x)))
        return self.head(self.norm(F.relu(self.hidden(x))))


def make_optimizer(name: str, model: nn.Module, width: int) -> torch.optim.Optimizer:
    if name == "Muon":
        return structlin.optim.Muon(model, LRS[name], method="ns", dualize="all")
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
    task, model = PlainDigits(), MLP(width, FAMILIES[structure](width))
    descent = make_optimizer(optimizer, model, width)
    with stability.watch(model, every=max(1, steps // 5)) as log:
        loss = training.train(model, descent, task, steps, batch=BATCH, schedule="constant")
    readings = [row for row in log.rows if row.layer == "hidden" and row.update is not None]
    return {
        "loss": loss,
        "steps": [row.step for row in readings],
        **{number: [getattr(row, number) for row in readings] for number in NUMBERS},
    }


def exponents(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """structure -> optimizer -> number -> its power of the width, at the last reading."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for structure, name in product(TRAINED, OPTIMIZERS):
        chosen = select(rows, structure=structure, optimizer=name)
        widths = [math.log2(row["width"]) for row in chosen]
        found.setdefault(structure, {})[name] = {
            number: slope(widths, [math.log2(row[number][-1]) for row in chosen])
            for number in NUMBERS
        }
    return found


def all_fresh(widths: Sequence[int]) -> Row:
    return {"fresh": [fresh(*each) for each in product(FAMILIES, INITS, widths)]}


# ---- what the pages show -------------------------------------------------------------------------


def dependencies(result: Row) -> tuple[list[float], list[float]]:
    """Those of fresh layers, `init="spectral"`: dense, and products of cores."""
    rows = select(result["fresh"], init="spectral")
    dense, products = (
        [row["dependency"] for row in rows if (row["structure"] == "dense") == is_dense]
        for is_dense in (True, False)
    )
    return dense, products


def fresh_powers(result: Row) -> list[float]:
    """The powers of the width with which those go, of each structure."""
    rows, powers = select(result["fresh"], init="spectral"), []
    for structure in values(rows, "structure"):
        mine = select(rows, structure=structure)
        widths, found = ([math.log2(row[key]) for row in mine] for key in ("width", "dependency"))
        powers.append(slope(widths, found))
    return powers


def largest_power(result: Row, *optimizers: str) -> float:
    """Without its sign."""
    found = [by[name] for by in result["exponents"].values() for name in optimizers]
    return max(abs(power) for powers in found for power in powers.values())


CLAIMS = [
    Claim(
        "BM",
        "the initial variance gives a dependency of order 1",
        "the initial variance gives a dependency of order 1",
        lambda found: (
            [abs(power) < LEVEL for power in fresh_powers(found)],
            f"powers of the width of at most {max(map(abs, fresh_powers(found))):.2f}; "
            "{:.2f} to {:.2f} for dense layers, {:.2f} to {:.2f} for products of cores".format(
                *(end(each) for each in dependencies(found) for end in (min, max))
            ),
        ),
        runs="one run",
    ),
    Claim(
        "BM",
        "forward, dependency and update stay of order 1",
        "with its steps forward, dependency and update stay of order 1 at every width",
        lambda found: (
            [largest_power(found, *OPTIMIZERS[:2]) < LEVEL],
            f"powers of the width of at most {largest_power(found, *OPTIMIZERS[:2]):.2f} by Muon "
            f"and by `param_groups`, up to {largest_power(found, OPTIMIZERS[2]):.2f} with one rate "
            "for all widths",
        ),
        runs="one run",
    ),
]


def numbers(result: Row) -> dict[str, str]:
    dense, products = dependencies(result)
    cores = [abs(row["largest core"] - 1) for row in select(result["fresh"], init="spectral")]
    return {
        "bm.core": f"{math.ceil(1000 * max(cores)) / 10}",
        "bm.dense": f"{math.ceil(1000 * max(abs(each - 1) for each in dense)) / 10}",
        **least_and_most("bm.product_", products, ".2f"),
        "bm.fresh_power": f"{math.ceil(100 * max(map(abs, fresh_powers(result)))) / 100:.2f}",
        "bm.power": f"{math.ceil(100 * largest_power(result, *OPTIMIZERS[:2])) / 100:.2f}",
    }


def show_fresh(result: Row) -> str:
    """The dependency of fresh layers, in brackets the largest norm of a core."""
    rows = result["fresh"]
    widths = sorted(values(rows, "width"))
    chosen = [("dense", "spectral"), ("dense", "mup")]
    chosen += [(name, "spectral") for name in FAMILIES if name != "dense"]
    lines = []
    for structure, init in chosen:
        found = [one(rows, structure=structure, init=init, width=n) for n in widths]
        cores = ["" if structure == "dense" else f" ({row['largest core']:.2f})" for row in found]
        cells = [f"{row['dependency']:.2f}{core}" for row, core in zip(found, cores, strict=True)]
        lines.append([f"{structure}, {init}", *cells])
    cells = ["every family, orthogonal"]
    for n in widths:
        found = [row["dependency"] for row in select(rows, init="orthogonal", width=n)]
        cells.append(f"{min(found):.2f} to {max(found):.2f}")
    return table(["", *(f"width {n}" for n in widths)], [*lines, cells])


def show_training(result: Row) -> str:
    """The three numbers of the hidden layer at the last step that was read, and their powers."""
    widths = sorted(values(result["rows"], "width"))
    lines = []
    for structure, optimizer in product(TRAINED, OPTIMIZERS):
        rows = select(result["rows"], structure=structure, optimizer=optimizer)
        cells = [
            "{:.2f} / {:.2f} / {:.3f}".format(*(one(rows, width=n)[key][-1] for key in NUMBERS))
            for n in widths
        ]
        powers = result["exponents"][structure][optimizer]
        cells.append(" / ".join(f"{powers[key]:+.2f}" for key in NUMBERS))
        lines.append([f"{structure}, {optimizer}", *cells])
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
    beside=lambda chosen, found: all_fresh(chosen["width"]),
    analyse=lambda rows: {"exponents": exponents(rows)},
)

if __name__ == "__main__":
    EXPERIMENT.main()
