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

import torch
from einops import rearrange
from torch import Tensor

import structlin
from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import select
from structlin._projection import relative_error

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


def bounds(structure: str, j: Factors, i: Factors) -> list[int]:
    """The paper's bound on the rank of each bond, from the factors of the inputs and of the
    outputs."""
    if structure == "low-rank":
        return [min(j[0], i[0])]
    if structure.startswith("BTT"):
        return [min(prod(i[:t]), prod(j[t:])) for t in range(1, len(j))]
    return [min(prod(i[:t]) * prod(j[:t]), prod(i[t:]) * prod(j[t:])) for t in range(1, len(j))]


def measure(structure: str, rank: int, seed: int, **sides: int) -> Row:
    in_features, out_features = sides["in"], sides["out"]
    bonds = bonds_of(structure, in_features, out_features, rank)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator, dtype=torch.float64)
    family = FAMILIES[structure](bonds)
    error = relative_error(weight, family, structlin.project(weight, family))
    params = family.structure(in_features, out_features).params
    return {"bonds": bonds, "params": params, "error": error}


def most(structure: str, in_features: int, out_features: int) -> list[int]:
    """The bound of each bond of a layer in SHAPES."""
    ((j, i),) = (
        shape[2:] for shape in SHAPES[structure] if shape[:2] == (in_features, out_features)
    )
    return bounds(structure, j, i)


def bonds_of(structure: str, in_features: int, out_features: int, rank: int) -> list[int]:
    return [min(rank, bound) for bound in most(structure, in_features, out_features)]


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
        return relative_error(weight, family, structlin.project(weight, family))

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


def summarise(rows: list[Row]) -> list[Row]:
    """For each structure and shape: the bound, and the errors over the seeds just below it and at
    it."""
    groups: dict[tuple[str, int, int], dict[int, list[Row]]] = {}
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


def holds(result: Row) -> list[bool]:
    """Whether each layer is exact at the paper's bound and not one rank below, and whether each
    family is in another as the paper has it."""
    exact = [
        row["largest_error_at_bound"] < EXACT < row["least_error_below"] for row in result["table"]
    ]
    inside = [
        (error > EXACT) == (" in no " in text) for text, error in result["containments"].items()
    ]
    return exact + inside


def draw(result: Row) -> figures.Figure:
    rows = [row | {"error": max(row["error"], 1e-16)} for row in select(result["rows"], seed=0)]
    return figures.curves(
        rows, "rank", "error", panel=["structure"], line=["in", "out"], labels="{} -> {}".format
    )


EXPERIMENT = Experiment(
    name="papers/cbs_projection",
    about=__doc__,
    run=measure,
    axes={
        "structure": [*SHAPES],
        "in": lambda job: dict.fromkeys(shape[0] for shape in SHAPES[job["structure"]]),
        "out": lambda job: [n for m, n, *_ in SHAPES[job["structure"]] if m == job["in"]],
        "rank": lambda job: range(1, max(most(job["structure"], job["in"], job["out"])) + 1),
    },
    smoke={"seeds": 1},
    beside=lambda chosen, found: {"containments": containments(0)},
    analyse=lambda rows: {"table": summarise(rows)},
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
