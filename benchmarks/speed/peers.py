"""structlin's layers against other packages' layers for the same matrices, and nn.Linear, on a CPU,
in one run.

    pip install pyfastkron==1.1.0 tensorly-torch==0.5.0 tensorly torch-structured==1.3.0 triton
    pip install --no-build-isolation torchTT==0.5.0  # or it is built against a torch of its own

    OMP_NUM_THREADS=2 python -m benchmarks.speed.peers     # 4 minutes at most, results/peers.json
    python -m benchmarks.speed.peers --budget 60 --out out
    python -m benchmarks.speed.peers --smoke               # seconds

A peer that is not installed is left out, with a line. Everything is compared and timed as by
`benchmarks.speed.layer`. All are without bias but torchTT's, which always adds one. Not packaged,
and so written here from the formula: strided products, as the published BTT and Monarch layers do
them, BLAST's two batched products with sums over the blocks between them, and a low-rank layer of
two linear maps.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import product
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from rich.table import Table
from torch import Tensor

from benchmarks.harness import report, timing
from benchmarks.harness.race import Bench, Heat, Oracle, Row, Run, Variant
from benchmarks.harness.statistics import select
from benchmarks.harness.timing import ratio
from benchmarks.speed.layer import job_of, race_layers
from benchmarks.speed.variants import SMOKE, Job, StridedProducts
from structlin import (
    BLAST,
    BTT,
    TT,
    Dense,
    Family,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
)

WIDTH = 1024


class Implementation(NamedTuple):
    """A way to compute `y = W x`, its parameters in its own layout, and what it has to compute with
    them."""

    name: str
    run: Run
    parameters: Sequence[Tensor]
    oracle: Oracle = timing.oracle


Build = Callable[[Structure, torch.dtype], Implementation]


def structures(width: int) -> dict[str, tuple[Structure, tuple[Build, ...]]]:
    """structlin's structure, and the peers that compute the same kind of matrix."""
    tensorly = tuple(partial(tltorch, how=how) for how in ("factorized", "reconstructed"))
    families: dict[str, tuple[Family, tuple[Build, ...]]] = {
        "Kronecker": (Kronecker(), (fastkron,)),
        "TT r=8": (TT(rank=8), (*tensorly, torchtt)),
        "Monarch 4": (Monarch(blocks=4), (torch_structured, strided)),
        "Monarch 16": (Monarch(blocks=16), (torch_structured, strided)),
        "BTT r=1": (BTT(rank=1), (strided,)),
        "BTT r=2": (BTT(rank=2), (strided,)),
        "BLAST 4, r=d/8": (BLAST(blocks=4, rank=width // 8), (shared_factors,)),
        "low-rank d/4": (LowRank(rank=width // 4), (two_linear,)),
        "low-rank d/32": (LowRank(rank=width // 32), (two_linear,)),
    }
    return {
        name: (family.structure(width, width), peers) for name, (family, peers) in families.items()
    }


# ---- packages ------------------------------------------------------------------------------------


def fastkron(structure: Structure, dtype: torch.dtype) -> Implementation:
    """`x (A kron B)`. It refuses an nn.Parameter; bfloat16 goes through its torch fallback."""
    from pyfastkron.fastkrontorch import gemkm

    g, d, a, b = (structure.sizes[axis] for axis in "gdab")
    factors = [_normal(g, a, dtype=dtype), _normal(d, b, dtype=dtype)]
    return Implementation(_named("pyfastkron"), partial(gemkm, fs=factors), factors, kronecker)


def tltorch(structure: Structure, dtype: torch.dtype, how: str) -> Implementation:
    """What this package calls BlockTT is the TT matrix; `how` is "factorized" or
    "reconstructed"."""
    from tltorch import FactorizedLinear

    inputs, outputs, ranks = _tt_sizes(structure)
    options = {"factorization": "BlockTT", "rank": ranks, "implementation": how}
    linear = FactorizedLinear(inputs, outputs, bias=False, dtype=dtype, **options)
    name = f"{_named('tensorly-torch')} {how}"
    return Implementation(name, linear, list(linear.parameters()), tensor_train)


def torchtt(structure: Structure, dtype: torch.dtype) -> Implementation:
    from torchtt.nn import LinearLayerTT

    inputs, outputs, ranks = map(list, _tt_sizes(structure))
    linear = LinearLayerTT(inputs, outputs, ranks, dtype=dtype)

    def run(x: Tensor) -> Tensor:
        y: Tensor = linear(x.view(-1, *inputs))
        return y.flatten(1)

    return Implementation(_named("torchTT"), run, list(linear.cores), tensor_train)


def torch_structured(structure: Structure, dtype: torch.dtype) -> Implementation:
    """Its import needs triton, on a CPU too."""
    from torch_structured.monarch.monarch_linear import MonarchLinear

    linear = MonarchLinear(
        structure.in_features, structure.out_features, bias=False, nblocks=structure.cores[0].batch
    ).to(dtype)
    return Implementation(_named("torch-structured"), linear, [linear.w1, linear.w2], monarch)


def _named(package: str) -> str:
    return f"{package} {version(package)}"


class TTSizes(NamedTuple):
    """Sizes of a TT matrix of two cores."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ranks: tuple[int, int, int]


def _tt_sizes(structure: Structure) -> TTSizes:
    sizes = defaultdict[str, list[int]](list)  # of the axes i, j and r, by their first letter
    for axis, size in structure.sizes.items():
        sizes[axis[0]].append(size)
    (rank,) = sizes["r"]
    return TTSizes(tuple(sizes["j"]), tuple(sizes["i"]), (1, rank, 1))


# ---- the matrices of their parameters, from the definitions --------------------------------------


def kronecker(structure: Structure, factors: Sequence[Tensor], x: Tensor) -> Tensor:
    return x.double() @ torch.kron(*(factor.double() for factor in factors))


def tensor_train(structure: Structure, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """`W[(o p), (i j)] = sum_r left[o, i, r] right[r, p, j]`."""
    left, right = (core.double() for core in cores)
    w = torch.einsum("oir,rpj->opij", left[0], right[..., 0])
    return x.double() @ rearrange(w, "o p i j -> (i j) (o p)")


def monarch(structure: Structure, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """w1 `(k, q, p)`, w2 `(l, s, r)`: the middle (k q) is read as (r l), the outputs are (s l)."""
    w1, w2 = (core.double() for core in cores)
    blocks = rearrange(x.double(), "n (k p) -> n k p", k=len(w1))
    middle = torch.einsum("kqp,nkp->nkq", w1, blocks)
    middle = rearrange(middle, "n k q -> n (k q)")
    middle = rearrange(middle, "n (r l) -> n r l", l=len(w2))
    y = torch.einsum("lsr,nrl->nsl", w2, middle)
    return rearrange(y, "n s l -> n (s l)")


# ---- written here --------------------------------------------------------------------------------


def structlin(structure: Structure, dtype: torch.dtype) -> Implementation:
    widths = structure.in_features, structure.out_features
    linear = StructuredLinear(*widths, structure, bias=False, dtype=dtype)
    return Implementation("structlin", linear, list(linear.cores))


def strided(structure: Structure, dtype: torch.dtype) -> Implementation:
    cores = [_normal(*core.shape, dtype=dtype) for core in structure.cores]
    run = partial(StridedProducts.apply, structure, *cores)
    return Implementation("strided products", run, cores)


def shared_factors(structure: Structure, dtype: torch.dtype) -> Implementation:
    """BLAST: `z_j = V_j x_j`, `y_i = U_i sum_j s_ij * z_j`, the sum by elementwise products."""
    cores = [_normal(*core.shape, dtype=dtype) for core in structure.cores]
    v, s, u = cores

    def run(x: Tensor) -> Tensor:
        z = torch.bmm(rearrange(x, "n (j q) -> j n q", j=len(v)), v.mT)
        sums = (rearrange(s, "r i j -> i j 1 r") * z).sum(1)
        return rearrange(torch.bmm(sums, u.mT), "i n p -> n (i p)")

    return Implementation("batched products and sums", run, cores)


def two_linear(structure: Structure, dtype: torch.dtype) -> Implementation:
    cores = [_normal(*core.shape[1:], dtype=dtype) for core in structure.cores]
    v, u = cores
    return Implementation("two linear maps", lambda x: F.linear(F.linear(x, v), u), cores)


def dense(structure: Structure, dtype: torch.dtype) -> Implementation:
    weight = _normal(structure.out_features, structure.in_features, dtype=dtype)
    return Implementation("nn.Linear", partial(F.linear, weight=weight), [weight])


def _normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) / sqrt(shape[-1])).to(dtype)


# ---- measuring -----------------------------------------------------------------------------------


def jobs(device: str, smoke: bool) -> list[Job]:
    """Few tokens first: they leave most of their share of the time to the others."""
    if smoke:
        return [Job(SMOKE, SMOKE, 256, "float32", True), Job(SMOKE, SMOKE, 16, "bfloat16", False)]
    settings = product((16, 4096), ("float32", "bfloat16"), (False, True))
    return [Job(WIDTH, WIDTH, *setting) for setting in settings]


class Peers(NamedTuple):
    """nn.Linear, structlin and its peers."""

    variants: list[Variant]
    left_out: list[str]  #: a line for each peer that cannot be had


def variants(job: Job) -> Peers:
    dtype = getattr(torch, job.dtype)
    x = torch.randn(job.tokens, job.d_in).to(dtype).requires_grad_(job.backward)
    dy = torch.randn(job.tokens, job.d_out).to(dtype)
    peers_of_job = Peers([], [])
    whole = Dense().structure(job.d_in, job.d_out)
    builds: list[tuple[str, Structure, Build]] = [("dense", whole, dense)]
    for name, (structure, peer_builds) in structures(job.d_in).items():
        builds += [(name, structure, build) for build in (structlin, *peer_builds)]
    for name, structure, build in builds:
        try:
            with warnings.catch_warnings():
                # of what torch and NumPy will not do for the peers much longer
                warnings.simplefilter("ignore")
                how, run, parameters, oracle = build(structure, dtype)
        except ImportError as missing:
            peers_of_job.left_out.append(f"{name}: {missing}")
            continue
        for parameter in parameters:
            parameter.requires_grad_(job.backward)
        variant = Variant(name, how, structure, run, parameters, x, dy, oracle=oracle)
        peers_of_job.variants.append(variant)
    return peers_of_job


def measure(job: Job, heat: Heat) -> list[Row]:
    """A row for every variant."""
    times = race_layers(job, variants(job).variants, heat)
    ours = {}
    for variant, seconds in times.seconds.items():
        if variant.implementation == "structlin":
            ours[variant.name] = seconds
    rows = []
    for variant, seconds in times.seconds.items():
        row = asdict(job) | {
            "structure": variant.name,
            "implementation": variant.implementation,
            "params": sum(parameter.numel() for parameter in variant.parameters),
            **times.row(variant),
            "x_dense": times.speed(variant),
        }
        if variant.name in ours and variant.implementation != "structlin":
            row["structlin_x"] = ratio(seconds, ours[variant.name])
        rows.append(row)
    return rows


def missing(smoke: bool) -> Row:
    """A line for each peer that is not installed."""
    small = Job(SMOKE, SMOKE, 1, "float32", False)
    left_out = list(dict.fromkeys(variants(small).left_out))
    for line in left_out:
        print(f"# left out: {line}")
    return {"left_out": left_out}


# ---- showing -------------------------------------------------------------------------------------


LEGEND = """x dense: speed against nn.Linear; structlin x: structlin's speed against this
implementation, above 1 where structlin is faster; both are ratios within a round."""


def show(rows: Sequence[Row]) -> Table:
    title = f"{job_of(rows[0]).title}: median of {rows[0]['rounds']} interleaved rounds (p20-p80)"
    lines = []
    for row in rows:
        line = {
            "structure": row["structure"],
            "implementation": row["implementation"],
            "params": str(row["params"]),
            "ms": report.with_spread(row["ms"], ".3g"),
            "x dense": report.with_spread(row["x_dense"], ".2f"),
        }
        if "structlin_x" in row:
            line["structlin x"] = report.with_spread(row["structlin_x"], ".2f")
        lines.append(line)
    return report.grid(title, lines, names=2)


def markdown(result: Row) -> str:
    """structlin's speed over each peer's: a row for each peer, a column for each job."""
    rows = [row for row in result["rows"] if "structlin_x" in row]
    # the columns: float32 first, many tokens first, forward first
    rows.sort(key=lambda row: (row["dtype"] != "float32", -row["tokens"], row["backward"]))
    cells = {}
    for row in rows:
        work = "forward + backward" if row["backward"] else "forward"
        job = f"{row['dtype']}, {row['tokens']}, {work}"
        peer = f"{row['structure']}, {row['implementation']}"
        cells[peer, job] = f"{row['structlin_x']['median']:.2f}"
    return report.pivot(cells)


def numbers(result: Row) -> dict[str, str]:
    """Our speed over that of other packages, and all that is below 1."""
    rows = [row for row in result["rows"] if "structlin_x" in row]

    def find(structure: str, name: str = "", **wanted: Any) -> list[Row]:
        chosen = [row for row in select(rows, **wanted) if row["structure"].startswith(structure)]
        return [row for row in chosen if name in row["implementation"]]

    def speeds(chosen: Sequence[Row]) -> list[float]:
        return [row["structlin_x"]["median"] for row in chosen]

    def behind(chosen: Sequence[Row]) -> list[float]:
        return [speed for speed in speeds(chosen) if speed < 1]

    training = {"dtype": "float32", "backward": True}
    few = [*find("Monarch 4", tokens=16, **training), *find("BLAST", tokens=16, **training)]
    forming = {"tokens": 4096, "dtype": "bfloat16", "backward": False}
    fastkron = find("Kronecker", "fastkron")
    return {
        "peers.cases": str(len(rows)),
        "peers.behind": str(len(behind(rows))),
        "peers.fastkron": str(len(fastkron)),
        "peers.fastkron_ahead": str(sum(row["structlin_x"]["p20"] > 1 for row in fastkron)),
        **report.least_and_most("peers.btt_", speeds(find("BTT", "strided", tokens=4096)), ".1f"),
        **report.least_and_most("peers.low_few_", behind(find("low-rank", tokens=16)), ".2f"),
        **report.least_and_most("peers.low_many_", behind(find("low-rank", tokens=4096)), ".3f"),
        "peers.monarch": f"{min(speeds(find('Monarch 4', tokens=4096, **training))):.2f}",
        **report.least_and_most("peers.few_", behind(few), ".2f"),
        "peers.tt": f"{min(speeds(find('TT r=8', 'reconstructed', **forming))):.2f}",
        "peers.day": report.day(result),
    }


BENCH = Bench(
    name="peers",
    about=__doc__,
    numbers=numbers,
    tables={"peers": markdown},
    budget=240,
    jobs=jobs,
    measure=measure,
    table=show,
    devices=("cpu",),
    beside=missing,
    below=lambda result: LEGEND,
)

if __name__ == "__main__":
    BENCH.main()
