"""How well a structure of a given rank fits a dense matrix: appendix D of "Compute Better Spent".

    python -m benchmarks.papers.cbs_projection            # the full result, seconds
    python -m benchmarks.papers.cbs_projection --smoke    # fewer matrices

The paper says from which rank on a structure is every matrix: W = `(b a) x (g d)`, two cores: BTT
from min(a, d), which is sqrt(width) for a square one; TT only from min(a g, b d), which is the
width; low-rank from min(d_in, d_out). Below that no rank is enough. And it orders the families:
Kronecker is TT of rank 1, TT of rank r is in BTT of rank r, BTT of rank 1 is Monarch with
sqrt(width) blocks.

Here: Gaussian matrices, square and rectangular, float64, `structlin.project` at every rank up to
the bound, two and three cores. With c cores bond t has its own bound: BTT min(i_1 .. i_t, j_(t+1)
.. j_c), TT min(i_1 j_1 .. i_t j_t, the rest). A rank is then cut to each bond's bound.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isqrt, prod
from typing import Any

import torch
from einops import rearrange
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

import structlin
from benchmarks.papers.cbs_report import Claim, claim, show_claims
from benchmarks.runs import keep, parser, run_all

FAMILIES: dict[str, Callable[..., structlin.Family]] = {
    "low-rank": lambda bonds: structlin.LowRank(rank=bonds[0]),
    "TT": lambda bonds: structlin.TT(rank=tuple(bonds)),
    "BTT": lambda bonds: structlin.BTT(rank=tuple(bonds)),
    "TT, 3 cores": lambda bonds: structlin.TT(rank=tuple(bonds), cores=3),
    "BTT, 3 cores": lambda bonds: structlin.BTT(rank=tuple(bonds), cores=3),
}
# in, out, and their factors j_1 .. j_c, i_1 .. i_c (BTT's outputs come in reverse order)
SHAPES = {
    "low-rank": [(64, 64, (64,), (64,)), (64, 36, (64,), (36,))],
    "TT": [(64, 64, (8, 8), (8, 8)), (64, 36, (8, 8), (6, 6)), (30, 64, (5, 6), (8, 8))],
    "BTT": [(64, 64, (8, 8), (8, 8)), (64, 36, (8, 8), (6, 6)), (30, 64, (5, 6), (8, 8))],
    "TT, 3 cores": [(27, 27, (3, 3, 3), (3, 3, 3)), (8, 27, (2, 2, 2), (3, 3, 3))],
    "BTT, 3 cores": [(64, 64, (4, 4, 4), (4, 4, 4)), (27, 64, (3, 3, 3), (4, 4, 4))],
}
EXACT = 1e-10  # relative error
Factors = Sequence[int]
Job = tuple[str, int, int, tuple[int, ...], int, int]  # structure, in, out, bonds, rank, seed


def bounds(structure: str, j: Factors, i: Factors) -> list[int]:
    """The paper's bound on the rank of each bond, from the factors of the inputs and of the
    outputs."""
    if structure == "low-rank":
        return [min(j[0], i[0])]
    if structure.startswith("BTT"):
        return [min(prod(i[:t]), prod(j[t:])) for t in range(1, len(j))]
    return [min(prod(i[:t]) * prod(j[:t]), prod(i[t:]) * prod(j[t:])) for t in range(1, len(j))]


def measure(job: Job) -> dict[str, Any]:
    structure, in_features, out_features, bonds, rank, seed = job
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator, dtype=torch.float64)
    family = FAMILIES[structure](bonds)
    error = structlin.relative_error(weight, family, structlin.project(weight, family))
    params = family.structure(in_features, out_features).params
    row = {
        "structure": structure,
        "in": in_features,
        "out": out_features,
        "rank": rank,
        "bonds": bonds,
        "seed": seed,
    }
    return row | {"params": params, "error": error}


def containments(seed: int, width: int = 64) -> dict[str, float]:
    """Relative errors of matrices of one family projected onto another, for a square of side
    sqrt(width)."""
    torch.manual_seed(seed)
    n = isqrt(width)

    def drawn(family: structlin.Family) -> Tensor:
        structure = family.structure(width, width)
        cores = [torch.randn(core.shape, dtype=torch.float64) for core in structure.cores]
        return structlin.to_dense(structure, cores)

    def swapped(
        weight: Tensor,
    ) -> Tensor:  # BTT writes its outputs in the order in which its cores produce them
        return rearrange(weight, "(a b) i -> (b a) i", a=n)

    def error(weight: Tensor, family: structlin.Family) -> float:
        return structlin.relative_error(weight, family, structlin.project(weight, family))

    btt, monarch = drawn(structlin.BTT(rank=1)), drawn(structlin.Monarch(blocks=n))
    return {
        "Kronecker is TT of rank 1": error(drawn(structlin.Kronecker()), structlin.TT(rank=1)),
        "TT of rank 1 is Kronecker": error(drawn(structlin.TT(rank=1)), structlin.Kronecker()),
        "TT of rank 3 is in BTT of rank 3": error(
            swapped(drawn(structlin.TT(rank=3))), structlin.BTT(rank=3)
        ),
        "Monarch of sqrt(width) blocks is BTT of rank 1": error(
            swapped(monarch), structlin.BTT(rank=1)
        ),
        "BTT of rank 1 is Monarch of sqrt(width) blocks": error(
            swapped(btt), structlin.Monarch(blocks=n)
        ),
        "BTT of rank 1 is in no TT of rank 3": error(swapped(btt), structlin.TT(rank=3)),
    }


def jobs(seeds: int) -> list[Job]:
    found = []
    for structure, shapes in SHAPES.items():
        for in_features, out_features, j, i in shapes:
            most = bounds(structure, j, i)
            for rank in range(1, max(most) + 1):
                bonds = tuple(min(rank, bound) for bound in most)
                found += [
                    (structure, in_features, out_features, bonds, rank, seed)
                    for seed in range(seeds)
                ]
    return found


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each structure and shape: the bound, and the errors over the seeds just below it and at
    it."""
    groups: dict[tuple[str, int, int], dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        group = groups.setdefault((row["structure"], row["in"], row["out"]), {})
        group.setdefault(row["rank"], []).append(row)
    table = []
    for (structure, in_features, out_features), by_rank in groups.items():
        bound = max(by_rank)
        means = [
            sum(row["error"] for row in by_rank[rank]) / len(by_rank[rank])
            for rank in sorted(by_rank)
        ]
        table.append(
            {
                "structure": structure,
                "in": in_features,
                "out": out_features,
                "bonds": by_rank[bound][0]["bonds"],
                "params_over_dense": by_rank[bound][0]["params"] / (in_features * out_features),
                "error_of_rank_1": means[0],
                "least_error_below": min(row["error"] for row in by_rank[bound - 1]),
                "largest_error_at_bound": max(row["error"] for row in by_rank[bound]),
                "falls": all(after < before for before, after in pairwise(means)),
            }
        )
    return table


def claims(result: dict[str, Any]) -> list[Claim]:
    found = []
    for row in result["table"]:
        at, below = row["largest_error_at_bound"], row["least_error_below"]
        layer = f"{row['structure']} {row['in']} -> {row['out']}"
        text = f"{layer} is exact at {tuple(row['bonds'])}, not one rank below"
        found.append(claim(text, at < EXACT < below, f"error {at:.0e}, one rank below {below:.0e}"))
    for text, error in result["containments"].items():
        apart = " in no " in text
        found.append(claim(text, (error > EXACT) == apart, f"error {error:.0e}"))
    return found


# ---- the program ---------------------------------------------------------------------------------


def show(table: list[dict[str, Any]], console: Console) -> None:
    shown = Table(title="relative error ||W - B|| / ||W|| of Gaussian matrices, float64")
    for title in (
        "structure",
        "in -> out",
        "bound",
        "params / dense",
        "rank 1",
        "one rank below",
        "at the bound",
        "falls",
    ):
        shown.add_column(title, justify="left" if title == "structure" else "right")
    for row in table:
        errors = (row["error_of_rank_1"], row["least_error_below"], row["largest_error_at_bound"])
        bonds = ", ".join(str(bond) for bond in row["bonds"])
        shape = f"{row['in']} -> {row['out']}"
        cells = [f"{row['params_over_dense']:.2f}", *(f"{error:.1e}" for error in errors)]
        shown.add_row(
            row["structure"],
            shape,
            bonds,
            *cells,
            "at every rank" if row["falls"] else "not always",
        )
    console.print(shown)


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_rank, by_params = figure.subplots(1, 2, sharey=True)
    keys = dict.fromkeys((row["structure"], row["in"], row["out"]) for row in rows)
    for n, (structure, in_features, out_features) in enumerate(keys):
        kept = [
            r
            for r in rows
            if (r["structure"], r["in"], r["out"]) == (structure, in_features, out_features)
        ]
        kept = sorted((row for row in kept if row["seed"] == 0), key=lambda row: row["rank"])
        errors = [max(row["error"], 1e-16) for row in kept]
        style = {"color": f"C{n % 10}", "ls": "--" if n > 9 else "-", "marker": ".", "ms": 4}
        label = f"{structure}, {in_features} -> {out_features}"
        by_rank.loglog([row["rank"] for row in kept], errors, label=label, **style)
        dense = in_features * out_features
        by_params.loglog([row["params"] / dense for row in kept], errors, **style)
    by_rank.set(xlabel="rank", ylabel="relative error")
    by_params.set(xlabel="parameters / dense")
    by_rank.legend(fontsize="small")
    return figure


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    seeds = 1 if arguments.smoke else arguments.seeds
    rows = run_all(measure, jobs(seeds), arguments)
    result = {"table": summarise(rows), "containments": containments(0)}
    result["claims"] = claims(result)
    console = Console(width=120)
    show(result["table"], console)
    show_claims(result["claims"], console)
    keep(arguments, "cbs_projection", plot(rows), **result, rows=rows)


if __name__ == "__main__":
    main()
