"""structlin's layers against other packages' layers for the same matrices, and nn.Linear, on a CPU,
in one run.

    pip install pyfastkron==1.1.0 tensorly-torch==0.5.0 tensorly torch-structured==1.3.0 triton
    pip install --no-build-isolation torchTT==0.5.0  # or it is built against a torch of its own

    OMP_NUM_THREADS=2 python -m benchmarks.speed.peers     # 4 minutes at most, results/peers.json
    python -m benchmarks.speed.peers --budget 60 --out out
    python -m benchmarks.speed.peers --smoke               # seconds

A peer that is not installed is left out, with a line. The protocol of `benchmarks.speed.layer`:
every layer, peers included, is compared with the matrix that its parameters stand for, in float64,
on memory poisoned with NaN, before it is timed; all take turns, dense first and last; speeds are
ratios within a round. All are without bias but torchTT's, which always adds one. Not packaged, and
so written here from the formula: strided products, as the published BTT and Monarch layers do them,
BLAST's two batched products with sums over the blocks between them, and a low-rank layer of two
linear maps.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness import report, timing
from benchmarks.harness.record import RESULTS, save_json
from benchmarks.speed import layer
from benchmarks.speed.variants import SMOKE, Job, Run, StridedProducts, Variant
from structlin import (
    BTT,
    TT,
    Dense,
    Family,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
    show_config,
)

Oracle = Callable[[Structure, Sequence[Tensor], Tensor], Tensor]

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
    sizes = {"i": 4, "j": 4, "p": width // 4, "q": width // 4, "r": width // 8}
    blast = Structure("j q -> i p", "j r q", "r i j", "i p r", **sizes)

    def square(family: Family) -> Structure:
        return family.structure(width, width)

    tensor_trains = (
        partial(tltorch, how="factorized"), partial(tltorch, how="reconstructed"), torchtt
    )  # fmt: skip
    return {
        "Kronecker": (square(Kronecker()), (fastkron,)),
        "TT r=8": (square(TT(rank=8)), tensor_trains),
        "Monarch 4": (square(Monarch(blocks=4)), (torch_structured, strided)),
        "Monarch 16": (square(Monarch(blocks=16)), (torch_structured, strided)),
        "BTT r=1": (square(BTT(rank=1)), (strided,)),
        "BTT r=2": (square(BTT(rank=2)), (strided,)),
        "BLAST 4, r=d/8": (blast, (shared_factors,)),
        "low-rank d/4": (square(LowRank(rank=width // 4)), (two_linear,)),
        "low-rank d/32": (square(LowRank(rank=width // 32)), (two_linear,)),
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
    linear = FactorizedLinear(
        inputs,
        outputs,
        bias=False,
        factorization="BlockTT",
        rank=ranks,
        implementation=how,
        dtype=dtype,
    )
    return Implementation(
        f"{_named('tensorly-torch')} {how}", linear, list(linear.parameters()), tensor_train
    )


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

    blocks = structure.cores[0].batch
    linear = MonarchLinear(
        structure.in_features, structure.out_features, bias=False, nblocks=blocks
    ).to(dtype)
    return Implementation(_named("torch-structured"), linear, [linear.w1, linear.w2], monarch)


def _named(package: str) -> str:
    return f"{package} {version(package)}"


def _tt_sizes(structure: Structure) -> tuple[tuple[int, ...], ...]:
    inputs, outputs, (rank,) = (
        tuple(size for axis, size in structure.sizes.items() if axis.startswith(kind))
        for kind in "jir"
    )
    return inputs, outputs, (1, rank, 1)


# ---- the matrices of their parameters, from the definitions --------------------------------------


def kronecker(structure: Structure, factors: Sequence[Tensor], x: Tensor) -> Tensor:
    return x.double() @ torch.kron(*(factor.double() for factor in factors))


def tensor_train(structure: Structure, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """`W[(o p), (i j)] = sum_r first[o, i, r] last[r, p, j]`."""
    first, last = (core.double() for core in cores)
    w = torch.einsum("oir,rpj->opij", first[0], last[..., 0])
    return x.double() @ rearrange(w, "o p i j -> (i j) (o p)")


def monarch(structure: Structure, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """w1 `(k, q, p)`, w2 `(l, s, r)`: the middle (k q) is read as (r l), the outputs are (s l)."""
    w1, w2 = (core.double() for core in cores)
    middle = torch.einsum("kqp,nkp->nkq", w1, rearrange(x.double(), "n (k p) -> n k p", k=len(w1)))
    middle = rearrange(rearrange(middle, "n k q -> n (k q)"), "n (r l) -> n r l", l=len(w2))
    return rearrange(torch.einsum("lsr,nrl->nsl", w2, middle), "n s l -> n (s l)")


# ---- written here --------------------------------------------------------------------------------


def structlin(structure: Structure, dtype: torch.dtype) -> Implementation:
    linear = StructuredLinear(
        structure.in_features, structure.out_features, structure, bias=False, dtype=dtype
    )
    return Implementation("structlin", linear, list(linear.cores))


def strided(structure: Structure, dtype: torch.dtype) -> Implementation:
    cores = [_normal(*core.shape, dtype=dtype) for core in structure.cores]
    return Implementation(
        "strided products", partial(StridedProducts.apply, structure, *cores), cores
    )


def shared_factors(structure: Structure, dtype: torch.dtype) -> Implementation:
    """BLAST: `z_j = V_j x_j`, `y_i = U_i sum_j s_ij * z_j`, the sum by elementwise products."""
    v, s, u = cores = [_normal(*core.shape, dtype=dtype) for core in structure.cores]

    def run(x: Tensor) -> Tensor:
        z = torch.bmm(rearrange(x, "n (j q) -> j n q", j=len(v)), v.mT)
        sums = (rearrange(s, "r i j -> i j 1 r") * z).sum(1)
        return rearrange(torch.bmm(sums, u.mT), "i n p -> n (i p)")

    return Implementation("batched products and sums", run, cores)


def two_linear(structure: Structure, dtype: torch.dtype) -> Implementation:
    v, u = cores = [_normal(*core.shape[1:], dtype=dtype) for core in structure.cores]
    return Implementation("two linear maps", lambda x: F.linear(F.linear(x, v), u), cores)


def dense(structure: Structure, dtype: torch.dtype) -> Implementation:
    weight = _normal(structure.out_features, structure.in_features, dtype=dtype)
    return Implementation("nn.Linear", partial(F.linear, weight=weight), [weight])


def _normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) / sqrt(shape[-1])).to(dtype)


# ---- measuring -----------------------------------------------------------------------------------


def variants(job: Job) -> tuple[list[Variant], list[str]]:
    """nn.Linear first and last, between them structlin and its peers; and a line for each peer that
    cannot be had."""
    dtype = getattr(torch, job.dtype)
    x, dy = (torch.randn(job.tokens, width).to(dtype) for width in (job.d_in, job.d_out))
    x.requires_grad_(job.backward)
    found, left_out = list[Variant](), list[str]()
    rows = {"dense": (Dense().structure(job.d_in, job.d_out), (dense,))} | {
        name: (structure, (structlin, *peers))
        for name, (structure, peers) in structures(job.d_in).items()
    }
    for name, (structure, builds) in rows.items():
        for build in builds:
            try:
                with warnings.catch_warnings():
                    # of what torch and NumPy will not do for the peers much longer
                    warnings.simplefilter("ignore")
                    how, run, parameters, oracle = build(structure, dtype)
            except ImportError as missing:
                left_out.append(f"{name}: {missing}")
                continue
            for parameter in parameters:
                parameter.requires_grad_(job.backward)
            found.append(Variant(name, how, structure, run, parameters, x, dy, oracle=oracle))
    return [*found, replace(found[0], name="dense, last")], left_out


def measure(job: Job, found: Sequence[Variant], **limits: Any) -> list[dict[str, Any]]:
    """A row for every variant; `limits` are those of `timing.interleaved`.

    Raises:
        ArithmeticError: a variant does not compute its matrix or its gradients; nothing is timed
            then.
    """
    errors = [layer.error(variant, backward=job.backward) for variant in found]
    for variant, off in zip(found, errors, strict=True):
        if not off < layer.TOLERANCE[job.dtype]:
            raise ArithmeticError(
                f"{variant.name}, {variant.implementation}: relative error {off:.1e} in {job.title}"
            )
    works = [variant.forward_backward if job.backward else variant.forward for variant in found]
    times = layer.sample(works, job, "cpu", **limits)
    of_dense = [sum(pair) / 2 for pair in zip(times[0], times[-1], strict=True)]
    of_structlin = {
        v.name: t for v, t in zip(found, times, strict=True) if v.implementation == "structlin"
    }
    rows = []
    for variant, samples, off in zip(found, times, errors, strict=True):
        row = {
            **asdict(job),
            "structure": variant.name,
            "implementation": variant.implementation,
            "params": sum(parameter.numel() for parameter in variant.parameters),
            "rounds": len(samples),
            "ms": timing.spread([1e3 * sample for sample in samples]),
            "x_dense": _speed(samples, of_dense),
            "error": off,
        }
        if variant.name in of_structlin and variant.implementation != "structlin":
            row["structlin_x"] = _speed(of_structlin[variant.name], samples)
        rows.append(row)
    return rows


def _speed(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return timing.spread([b / a for a, b in zip(mine, theirs, strict=True)])


# ---- showing -------------------------------------------------------------------------------------


LEGEND = """x dense: speed against nn.Linear; structlin x: structlin's speed against this
implementation, above 1 where structlin is faster; both are ratios within a round."""


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(
        title=f"{layer.job_of(rows[0]).title}: "
        f"median of {rows[0]['rounds']} interleaved rounds (p20-p80)"
    )
    for column in ("structure", "implementation"):
        table.add_column(column, no_wrap=True)
    for column in ("params", "ms", "(p20-p80)", "x dense", "(p20-p80)", "structlin x", "(p20-p80)"):
        table.add_column(column, justify="right", no_wrap=True)
    for row, before in zip(rows, [rows[0], *rows], strict=False):
        if row["structure"] != before["structure"]:
            table.add_section()
        compared = _cells(row["structlin_x"], ".2f") if "structlin_x" in row else ()
        table.add_row(
            row["structure"],
            row["implementation"],
            str(row["params"]),
            *_cells(row["ms"], ".3g"),
            *_cells(row["x_dense"], ".2f"),
            *compared,
        )
    console.print(table)


def _cells(spread: dict[str, float], digits: str) -> tuple[str, str]:
    return f"{spread['median']:{digits}}", f"({spread['p20']:{digits}}-{spread['p80']:{digits}})"


def markdown(result: dict[str, Any]) -> str:
    """Our speed over each implementation's: a row for each of them, a column for each job."""
    speeds: dict[tuple[str, str], dict[Job, str]] = {}
    for row in result["rows"]:
        if "structlin_x" in row:
            found = speeds.setdefault((row["structure"], row["implementation"]), {})
            found[layer.job_of(row)] = f"{row['structlin_x']['median']:.2f}"
    chosen = sorted(
        {job for found in speeds.values() for job in found},
        key=lambda job: (job.dtype != "float32", -job.tokens, job.backward),
    )
    titles = [f"{job.dtype}, {job.tokens}, forward{' + backward' * job.backward}" for job in chosen]
    lines = [
        [f"{structure}, {implementation}", *(found[job] for job in chosen)]
        for (structure, implementation), found in speeds.items()
    ]
    return report.table(["", *titles], lines)


def losses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for every peer that structlin is slower than, in the median."""
    return [
        f"{row['structure']}, {layer.job_of(row).title}: "
        f"{' '.join(_cells(row['structlin_x'], '.2f'))} of the speed of {row['implementation']}"
        for row in rows
        if "structlin_x" in row and row["structlin_x"]["median"] < 1
    ]


# ---- the run -------------------------------------------------------------------------------------


def jobs() -> list[Job]:
    """Few tokens first: they leave most of their share of the time to the others."""
    return [
        Job(WIDTH, WIDTH, tokens, dtype, backward)
        for tokens in (16, 4096)
        for dtype in ("float32", "bfloat16")
        for backward in (False, True)
    ]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=240,
        metavar="SECONDS",
        help="three rounds are made in any case",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny layers, kept only if --out is given"
    )
    options = parser.parse_args(argv)
    show_config()  # builds the engine, so that no time has that in it
    end, todo, rounds = time.perf_counter() + options.budget, jobs(), layer.ROUNDS
    if options.smoke:
        todo, rounds = (
            [Job(SMOKE, SMOKE, 256, "float32", True), Job(SMOKE, SMOKE, 16, "bfloat16", False)],
            (2, 2),
        )
    keeps_pages = timing.keep_pages()
    torch.manual_seed(0)
    results: list[list[dict[str, Any]]] = []
    missing: list[str] = []
    for n, job in enumerate(todo):
        now = time.perf_counter()
        found, left_out = variants(job)
        for line in left_out:
            if line not in missing:
                print(f"# left out: {line}")
                missing.append(line)
        results.append(
            measure(job, found, rounds=rounds, until=now + (end - now) / (len(todo) - n))
        )
        for row in results[-1]:
            print(json.dumps(row, allow_nan=False), flush=True)
    rows = [row for rows in results for row in rows]
    if not options.smoke or options.out != RESULTS:
        setting = {
            "threads": torch.get_num_threads(),
            "budget": options.budget,
            "keeps_pages": keeps_pages,
        }
        save_json(options.out / "peers.json", setting=setting, left_out=missing, rows=rows)
    console = Console(width=150)
    for table in results:
        show(table, console)
    print(LEGEND)
    for line in losses(rows):
        print(f"# structlin is slower: {line}")
    return rows


if __name__ == "__main__":
    main()
