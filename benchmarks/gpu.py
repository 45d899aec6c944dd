"""Are the Triton kernels right, and how fast? One command for a machine with a GPU, which checks,
tunes and measures everything; untested on GPU so far.

    python -m benchmarks.gpu                         # 9 minutes at most, results/gpu.jsonl
    python -m benchmarks.gpu --budget 300 --out out
    python -m benchmarks.gpu --smoke                 # no GPU: tiny layers in Triton's interpreter

On a GPU, in this order: the self-test; the machine's ceilings; every product of the goals' layers
against float64, with ragged tokens; other tiles than the rule's for these products, of which the
faster ones go into structlin/_engine/triton/tiles.json under the name of the GPU; then layers,
forward and backward, by order of the goals below: nn.Linear first and last, `StructuredLinear`
(whatever path it takes), what users would take in its place (one torch.bmm per core, strided
products, torch.compile), and the Triton stages without autograd, from Python and as a CUDA graph;
each product alone; products past 2**31 elements, and of every other structure. Outputs are poisoned
with NaN and compared with float64 before they are timed; what is wrong is not timed, the rest is.
Caches are cold; variants take turns. Device and wall time stand side by side.

Every row is a line of JSON, written at once; a failure is a row too, and the rest goes on, in a new
process if the GPU is lost. The last line says what failed, and the exit code is 1 then.
`benchmarks.ahead` compiles without a GPU what these jobs launch.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from math import nan, prod, sqrt
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.harness import record, report, timing
from benchmarks.harness.experiment import parser
from benchmarks.harness.race import Heat, Variant, race
from benchmarks.speed.variants import StridedProducts, families, loop
from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Family,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
)

Result = TypeVar("Result")

# The most important first: forward + backward, bfloat16, 16384 tokens. The goal of each is SHARE of
# the roofline of its kernels on the card that is found.
GOALS = [
    ("BTT r=1", 4096),
    ("BTT r=1", 1024),
    ("Monarch 16", 4096),
    ("Monarch 4", 4096),
    ("BTT r=1", 2048),
    ("Monarch 16", 1024),
    ("BTT r=1", 768),
    ("Monarch 16", 2048),
    ("Monarch 16", 768),
]
SHARE = 0.7
# two products whose operands are cut to tf32's 10 bits are 1.4e-3 off
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "tf32": 4e-3, "float32": 1e-5}
ROUNDS = (5, 25)
WAITS = 5  # samples of what a user waits for a call
MIN_GAIN = 0.02  # of a tile's time over the rule's
# A tile that is tried: outputs, by warps, whose sums the registers hold; shared memory
MOST_OUTPUTS, MOST_BYTES = {4: 128 * 64, 8: 128 * 256}, 160 * 1024
MOST_SIDES = (128, 256, 256)  # m, n, k; with 256 rows a kernel spills registers on sm_100
JOB_SECONDS = 30  # at most, of a layer's rounds and of a product's tiles
# tokens of every check of a goal's layer, in all types; and of the others, in two
CHECKED = (1000,)
FEW, FEW_TYPES = (17,), ("float16", "float32")
FAR_TOKENS = 2**21 + 77
# The layers of tests/kernels/test_triton.py, of these widths
SMALL: list[tuple[Family, int, int]] = [
    (BTT(), 24, 20),
    (BTT(rank=2), 24, 24),
    (BTT(rank=2, cores=3), 24, 36),
    (Monarch(blocks=2), 24, 24),
    (Monarch(blocks=8), 16, 16),
    (LowRank(rank=3), 24, 12),
    (BlockDiagonal(blocks=4), 24, 12),
    (Kronecker(), 24, 20),
    (TT(rank=2), 24, 24),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (4096, 1024, 2048, 8192, 768)  # by order of importance
TOKENS = 16384
CEILINGS: dict[str, timing.Ceilings] = {}  # of a dtype, once measured
UNKNOWN = timing.Ceilings(rate=nan, bandwidth=nan, call=nan)


@cache
def kernels() -> SimpleNamespace:
    """structlin's Triton modules, which have no public name: their stages and products are what is
    checked here. Imported at the first call, when Triton reads TRITON_INTERPRET."""
    from structlin._engine.triton import check as triton_check
    from structlin._engine.triton import gemm as triton_gemm
    from structlin._engine.triton import stages as triton_stages

    return SimpleNamespace(check=triton_check, gemm=triton_gemm, stages=triton_stages)


@contextmanager
def precision(dtype: str) -> Iterator[torch.dtype]:
    """As PyTorch's dtype: "tf32" is float32 with the tensor cores allowed.

    It is said in the older of PyTorch's two ways, which torch.compile reads, as one may not mix
    them.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    finally:
        torch.set_float32_matmul_precision(before)


def least_seconds(
    limit: timing.Ceilings, structure: Structure, tokens: int, itemsize: int, *, fused: bool = False
) -> float:
    """What forward and backward take at least by these stages: the products', and the copies of y
    and of its gradient where a plan has them. `fused`: by one kernel each, see `Ceilings.bound`."""
    seconds = limit.bound(structure, tokens, itemsize, backward=True, fused=fused)
    plan = kernels().stages.lay_out(structure.program.numbers)
    copied = 0 if fused or not plan.order else 2 * structure.out_features
    return seconds + 2 * tokens * copied * itemsize / limit.bandwidth


# ---- a layer and its products --------------------------------------------------------------------


@dataclass
class Product:
    """One call of `block_gemm`, with the views that a layer gives it."""

    name: str  #: y, dx or dw, and the number of the core
    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None = None
    rows: str = "m"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n and k."""
        return prod(self.out.shape[2:4]), prod(self.out.shape[4:]), prod(self.a.shape[4:])

    def bound(self, ceilings: timing.Ceilings) -> float:
        """Seconds that it takes at least."""
        flops = 2 * self.a.numel() * self.b.shape[4] * self.b.shape[5]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (self.a, self.b, self.out))
        return max(flops / ceilings.rate, moved / ceilings.bandwidth)

    def run(self, **options: Any) -> None:
        kernels().gemm.block_gemm(self.a, self.b, self.out, self.bias, rows=self.rows, **options)

    def error(self, **options: Any) -> float:
        """The error of `run` on a poisoned output, relative to float64, in norm."""
        self.out.fill_(nan)
        self.run(**options)
        wanted = torch.einsum("yzmlkj,yzkjnp->yzmlnp", self.a.double(), self.b.double())
        return timing.relative_error(self.out, wanted)


class Layer:
    """A structured layer on random inputs, as its Triton stages."""

    def __init__(self, structure: Structure, tokens: int, dtype: torch.dtype, device: str) -> None:
        def data(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_()

        self.structure, self.program = structure, structure.program.numbers
        self.x, self.dy = data(tokens, structure.in_features), data(tokens, structure.out_features)
        self.cores = [data(*core.shape).div_(sqrt(core.fan_in)) for core in structure.cores]

    def forward_backward(self, by: Any = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        stages, by = kernels().stages, by or kernels().gemm.block_gemm
        y, *middle = stages.forward(self.program, self.cores, self.x, None, by)
        given = (self.program, self.cores, self.x, middle, self.dy, (True, True))
        dx, *gradients = stages.backward(*given, by)
        return y, dx, gradients

    def products(self) -> list[Product]:
        """All that `forward_backward` computes, in that order."""
        count, found = len(self.cores), list[Product]()
        names = [f"y{i + 1}" for i in range(count)]
        names += [f"{kind}{i}" for i in range(count, 0, -1) for kind in ("dw", "dx")]

        def by(*operands: Any, **options: Any) -> None:
            found.append(Product(names[len(found)], *operands, **options))
            found[-1].run()

        self.forward_backward(by)
        return found

    def error(self, run: Callable[[], Any] | None = None) -> float:
        """The largest of y, dx and the cores' gradients, relative to float64 autograd of one
        einsum; `run` in place of `forward_backward`."""
        x, *cores = (tensor.double().requires_grad_() for tensor in (self.x, *self.cores))
        y = timing.oracle(self.structure, cores, x)
        wanted = [y.detach(), *torch.autograd.grad(y, [x, *cores], self.dy.double())]
        y, dx, gradients = (run or self.forward_backward)()
        return max(map(timing.relative_error, (y, dx, *gradients), wanted))


# ---- rows ----------------------------------------------------------------------------------------


class Rows:
    """A file of JSON lines, one a row, written at once; `show` is a short line for the terminal."""

    def __init__(self, path: Path | None, *, fresh: bool = True) -> None:
        self.path, self.terminal = path, sys.stdout
        self.job = ""  # that is under way
        self.skipped = set[str]()  # what failed in it before the process was lost
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                path.unlink(missing_ok=True)

    def begin(self, job: str) -> None:
        self.job = job
        mine = (row for row in read_rows(self.path) if row.get("job") == job)
        self.skipped = {row["what"] for row in mine if row["what"]}

    def add(self, kind: str, show: str = "", **content: Any) -> None:
        line = json.dumps({"kind": kind, **content}, default=str)
        if self.path:
            with self.path.open("a") as file:
                file.write(line + "\n")
        print(f"{kind:10} {show}" if show else line, file=self.terminal, flush=True)

    def fail(self, what: str, failure: Exception, *, kind: str = "error", **content: Any) -> None:
        """Note that `what` of the job has failed; "" is all of it."""
        first = (str(failure).splitlines() or [type(failure).__name__])[0]
        show = f"{self.job}{', ' * bool(what)}{what}: {first[:200]}"
        self.add(kind, show, job=self.job, what=what, error=str(failure), **content)

    def attempt(
        self, what: str, work: Callable[[], Result], *, kind: str = "error"
    ) -> Result | None:
        """What `work` returns; None, and a row, where it raises or did so before the GPU was lost.

        Raises:
            Exception: the GPU is lost, and nothing on it works any more.
        """
        if what in self.skipped:
            return None
        try:
            return work()
        except Exception as failure:
            self.fail(what, failure, kind=kind)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return None

    def right(self, what: str, error: Callable[[], float], dtype: str, **how: Any) -> float | None:
        """The error of a variant; None, and a row, where it is too large or there is none."""
        off = self.attempt(what, error, **how)
        if off is None or off < TOLERANCE[dtype]:
            return off
        self.fail(what, ArithmeticError(f"relative error {off:.1e} in {dtype}"))
        return None

    def check(self, errors: dict[str, float], **layer: Any) -> None:
        """Whether the errors of a layer are within the tolerance of its dtype."""
        passed = all(error <= TOLERANCE[layer["dtype"]] for error in errors.values())
        words = "{structure} {width} {dtype} {tokens} tokens, largest error".format(**layer)
        show = f"{'passed' if passed else 'FAILED'} {words} {max(errors.values()):.1e}"
        self.add("check", show, **layer, passed=passed, errors=errors)

    def product(self, kind: str, product: Product, seconds: list[float], **content: Any) -> None:
        took, bound = median(seconds), product.bound(CEILINGS.get(content["dtype"], UNKNOWN))
        words = " ".join(map(str, content.values()))
        show = f"{words} {product.name} {1e6 * took:.0f} us, {bound / took:.0%} of its bound"
        found = {"seconds": took, "bound": bound, "share": bound / took}
        self.add(kind, show, product=product.name, **found, **content)

    def read(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.path) if row["kind"] == kind]


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """None where there is no file; a line that was cut off is no row."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def is_fault(row: dict[str, Any]) -> bool:
    """Whether a row says that something is wrong. A tile that the compiler refuses is no fault."""
    return row["kind"] == "error" or bool(row.get("faults")) or row.get("passed") is False


# ---- on a GPU ------------------------------------------------------------------------------------

# a job gets the time (`time.perf_counter`) at which to stop
Job = tuple[str, Callable[[Rows, float], None]]


def jobs(
    widths: Sequence[int],
    names: Sequence[str],
    *,
    dtype: str = "bfloat16",
    tokens: int = TOKENS,
    far_tokens: int = FAR_TOKENS,
    table: Path | None = None,
) -> list[Job]:
    """The jobs, the most important first.

    Args:
        dtype, tokens: what is timed.
        table: the file that gets the tiles that were found; None: none does.
    """
    every = [(name, d) for d in widths for name in names if exists(name, d)]
    goals = [key for key in GOALS if key in every]
    others = [key for key in every if key not in goals]
    timed = {"dtype": dtype, "tokens": tokens}

    def each(
        work: Callable[..., None], keys: Iterable[tuple[str, int]], **options: Any
    ) -> list[Job]:
        words = f"{work.__name__} {{}} {{}} {options.get('dtype', '')}"
        return [
            (words.format(name, d).rstrip(), partial(work, name=name, width=d, **options))
            for name, d in keys
        ]

    return [
        *((f"self_test {of}", partial(self_test, dtype=of)) for of in TOLERANCE if of != "tf32"),
        ("ceilings", ceilings),
        *each(check, goals[:4]),
        *each(tiles, goals[:4], **timed),
        ("tuned", partial(tuned, path=table)),
        *each(layer, goals, **timed),
        *each(layer, goals[:2], **timed | {"dtype": "float32"}),
        *each(compiled, goals[:2], **timed),
        ("small", small),
        ("far", partial(far, tokens=far_tokens)),
        *each(layer, others, **timed),
        *each(check, (key for key in every if key[1] == min(widths)), dtypes=FEW_TYPES, tokens=FEW),
        *each(layer, goals, **timed | {"dtype": "tf32"}),
    ]


def exists(name: str, width: int) -> bool:
    """Whether there is this layer, and the kernels take it."""
    try:
        structure = families(width)[name].structure(width, width)
    except ValueError:  # the width cannot be divided so
        return False
    return not structure.plain and bool(kernels().stages.supported(structure.program.numbers))


def self_test(rows: Rows, until: float, dtype: str) -> None:
    start = time.perf_counter()
    faults = kernels().check.self_test(torch.device(DEVICE), getattr(torch, dtype))
    seconds = time.perf_counter() - start
    show = f"{dtype}: {faults or 'passed'}, {seconds:.1f} s"
    rows.add("self-test", show, dtype=dtype, faults=faults, seconds=seconds)


def check(
    rows: Rows,
    until: float,
    name: str,
    width: int,
    dtypes: Iterable[str] = tuple(TOLERANCE),
    tokens: Sequence[int] = CHECKED,
) -> None:
    """Every product of a layer, ragged tokens."""
    structure = families(width)[name].structure(width, width)
    for dtype in dtypes:
        for n in tokens:
            with precision(dtype) as kind:
                make = Layer(structure, n, kind, DEVICE).products
                products = rows.attempt(f"{dtype}, {n} tokens", make) or []
                found = [(p.name, rows.attempt(f"{dtype}, {p.name}", p.error)) for p in products]
            errors = {product: off for product, off in found if off is not None}
            if errors:
                rows.check(errors, structure=name, width=width, dtype=dtype, tokens=n)


def small(rows: Rows, until: float, tokens: int = 19) -> None:
    """The layers of the tests, with a bias, as users have them, differentiated twice."""
    for family, d_in, d_out in SMALL:
        for dtype in FEW_TYPES:
            with precision(dtype) as kind:
                layer = StructuredLinear(d_in, d_out, family, device=DEVICE, dtype=kind)
                x = torch.randn(tokens, d_in, device=DEVICE, dtype=kind, requires_grad=True)
                leaves = [x, *layer.cores, layer.bias]
                y = layer(x)
                dy = torch.randn_like(y).requires_grad_()
                found = [y, *torch.autograd.grad(y, leaves, dy, create_graph=True)]
                found += torch.autograd.grad(found[1].sum(), [dy, *layer.cores])
                plain = [tensor.double() for tensor in (*layer.cores, layer.bias)]
                wide = x.detach().double().requires_grad_()
                again = timing.oracle(layer.structure, plain[:-1], wide) + plain[-1]
                wanted = [again, *torch.autograd.grad(again, [wide, *plain], dy.double())]
            names = ("y", "dx", *(f"dw{n}" for n in range(1, len(plain))), "dbias")
            errors = dict(zip(names, map(timing.relative_error, found, wanted), strict=False))
            shown = {"width": d_in, "dtype": dtype, "tokens": tokens}
            rows.check(errors, structure=f"{family} -> {d_out}", **shown)


def far(rows: Rows, until: float, tokens: int) -> None:
    """Activations of more than 2**31 elements: the last tokens, and a gradient that ends with
    them."""
    width, last = 1024, 333
    whole = Layer(BTT().structure(width, width), tokens, torch.bfloat16, DEVICE)
    whole.dy[:-last] = 0
    y, dx, gradients = whole.forward_backward()
    part = Layer(whole.structure, last, torch.bfloat16, DEVICE)
    part.x, part.dy, part.cores = whole.x[-last:], whole.dy[-last:], whole.cores
    errors = {"past 2**31 elements": part.error(lambda: (y[-last:], dx[-last:], gradients))}
    rows.check(errors, structure="BTT r=1", width=width, dtype="bfloat16", tokens=tokens)


def ceilings(rows: Rows, until: float) -> None:
    for dtype in ("bfloat16", "tf32", "float32"):
        with precision(dtype) as kind:
            found = CEILINGS[dtype] = timing.ceilings(DEVICE, kind)
        show = f"{dtype}: {found.rate / 1e12:.0f} TFLOP/s, {found.bandwidth / 1e12:.2f} TB/s"
        rows.add("ceilings", show, dtype=dtype, **vars(found))


def layer(rows: Rows, until: float, name: str, width: int, dtype: str, tokens: int) -> None:
    """Forward and backward of nn.Linear, of `StructuredLinear`, of what users would take in its
    place, and of the stages; then each product alone."""
    with precision(dtype) as kind:
        stages = Layer(families(width)[name].structure(width, width), tokens, kind, DEVICE)
        found = variants_of(name, width, stages)
        products = rows.attempt("stages", stages.products)
        works: dict[str, Callable[[], Any]] = {n: each.work for n, each in found.items()}
        tests = {n: each.error for n, each in found.items()}
        if products:
            works["stages"], tests["stages"] = stages.forward_backward, stages.error
            if DEVICE == "cuda" and (replay := rows.attempt("graph", partial(graph_of, stages))):
                works["graph"], tests["graph"] = replay, partial(stages.error, replay)
        compare(rows, until, name, stages, dtype, works, tests)
        heat = Heat(DEVICE, (3, 9), min(until, time.perf_counter() + 5))
        right = {
            p.name: p for p in products or () if rows.right(p.name, p.error, dtype) is not None
        }
        if right:
            times = race({n: product.run for n, product in right.items()}, heat)
            for n, product in right.items():
                content = {"structure": name, "width": width, "dtype": dtype}
                rows.product("product", product, times.seconds[n], **content)


def compiled(rows: Rows, until: float, name: str, width: int, dtype: str, tokens: int) -> None:
    """The same of torch.compile, of the loop and of `StructuredLinear`."""
    with precision(dtype) as kind:
        stages = Layer(families(width)[name].structure(width, width), tokens, kind, DEVICE)
        found = variants_of(name, width, stages)
        torch.compiler.reset()
        for n in ("layer", "loop"):
            run = torch.compile(found[n].run, fullgraph=True, dynamic=False)
            found[f"{n}, compiled"] = replace(found.pop(n), implementation="compiled", run=run)
        works = {n: each.work for n, each in found.items()}
        tests = {n: each.error for n, each in found.items()}
        compare(rows, until, name, stages, dtype, works, tests)


def variants_of(name: str, width: int, like: Layer) -> dict[str, Variant]:
    """nn.Linear, `StructuredLinear`, whatever path it takes, and the ways without a kernel of its
    own, on the inputs of a layer."""
    ends = like.x.detach().requires_grad_(), like.dy
    options = {"bias": False, "device": DEVICE, "dtype": like.x.dtype}
    linear = nn.Linear(width, width, **options)
    module = StructuredLinear(width, width, families(width)[name], **options)
    structure, cores = module.structure, list(module.cores)
    runs: dict[str, Callable[[Tensor], Tensor]] = {"layer": module}
    runs["loop"] = partial(loop, structure, cores)
    if len(cores) == 2 and all(core.repeat == 1 and core.batch > 1 for core in structure.cores):
        runs["strided"] = partial(StridedProducts.apply, structure, *cores)
    dense = Dense().structure(width, width), linear, [linear.weight]
    found = {"dense": Variant("dense", "nn.Linear", *dense, *ends)}
    return found | {n: Variant(name, n, structure, run, cores, *ends) for n, run in runs.items()}


def compare(
    rows: Rows,
    until: float,
    name: str,
    stages: Layer,
    dtype: str,
    works: dict[str, Callable[[], Any]],
    tests: dict[str, Callable[[], float]],
) -> None:
    """A row for each of `works` that is right by its test, the first of them nn.Linear."""
    found = {n: rows.right(n, test, dtype) for n, test in tests.items()}
    works = {n: work for n, work in works.items() if found[n] is not None}
    if "dense" not in works:
        return
    launched = {n: launches(work) for n, work in works.items()}
    times = race(works, Heat(DEVICE, ROUNDS, until), last="dense again")
    waits = race(works, Heat(DEVICE, (WAITS, WAITS)), clock=timing.wall, last="dense again")
    tokens, itemsize = stages.x.shape[0], stages.x.element_size()
    bounds = {
        key: least_seconds(
            CEILINGS.get(dtype, UNKNOWN), stages.structure, tokens, itemsize, fused=key == "fused"
        )
        for key in ("bound", "fused")
    }
    content = {"structure": name, "width": stages.structure.in_features, "dtype": dtype}
    for variant, samples in times.seconds.items():
        took, wall = median(samples), median(waits.seconds[variant])
        speed, share = times.speed(variant)["median"], bounds["bound"] / took
        again = variant.removesuffix(" again")
        rows.add(
            "layer",
            f"{' '.join(map(str, content.values()))} {variant}: {1e6 * took:.0f} us, {speed:.2f}x, "
            f"{share:.0%} of bound, {1e6 * wall:.0f} us of wall time",
            **content, tokens=tokens, variant=variant, error=found[again],
            seconds=timing.spread(samples), wall=timing.spread(waits.seconds[variant]),
            speed=speed, share=share, launches=launched[again], **bounds,
        )  # fmt: skip


def launches(work: Callable[[], Any]) -> int:
    """How many of structlin's kernels a call launches from Python."""
    plan = kernels().gemm._plan
    before = plan.cache_info()
    work()
    return sum(plan.cache_info()[:2]) - sum(before[:2])


def graph_of(stages: Layer) -> Callable[[], Any]:
    """`forward_backward` as a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = stages.forward_backward()

    def replay() -> Any:
        graph.replay()
        return found

    return replay


def candidates(tile: Any, sizes: Sequence[int]) -> list[Any]:
    """The rule's tile for these sizes, and others that need no more padding, more registers or more
    shared memory than there are."""
    changes: list[dict[str, int]] = [{}, {"warps": 12 - tile.warps}]
    sides = ("m", "n", "k") if tile.stages > 1 else ("m", "n")
    changes += [
        {side: size}
        for side in sides
        for size in (getattr(tile, side) // 2, 2 * getattr(tile, side))
    ]
    # one step of k, too: loads past the registers leave room for more programs at a time
    changes += [{"stages": 2}, {"stages": 4}] if tile.stages > 1 else [{"stages": 2}]
    limits = zip(sizes, MOST_SIDES, strict=True)
    most = [max(16, min(limit, 1 << (size - 1).bit_length())) for size, limit in limits]
    return [
        each
        for each in (tile._replace(**change) for change in changes)
        if all(16 <= side <= largest for side, largest in zip(each, most, strict=False))
        and each.m * each.n <= MOST_OUTPUTS[each.warps]
        and each.stages * (each.m + each.n) * each.k * 2 <= MOST_BYTES
    ]


def tiles(rows: Rows, until: float, name: str, width: int, dtype: str, tokens: int) -> None:
    """Other tiles than the rule's for every product: what the table should say on this device."""
    with precision(dtype) as kind:
        gemm = kernels().gemm
        structure = families(width)[name].structure(width, width)
        for product in Layer(structure, tokens, kind, DEVICE).products():
            gpu, of = gemm.gpu_of(product.a.device), gemm.kind_of(kind, product.rows)
            rule, tile = gemm.rule(*product.sizes, gpu, of)
            works = dict[Any, Callable[[], None]]()
            for each in candidates(tile, product.sizes):
                if time.perf_counter() > until:
                    return
                what, error = f"{product.name} {tuple(each)}", partial(product.error, tile=each)
                if rows.right(what, error, dtype, kind="refused") is not None:
                    works[each] = partial(product.run, tile=each)
            if tile not in works:  # then nothing can be compared with it
                continue
            content = {"structure": name, "width": width, "dtype": dtype, "rule": rule}
            times = race(works, Heat(DEVICE, (3, 7), until))
            for each, seconds in times.seconds.items():
                rows.product("tile", product, seconds, **content, tile=list(each))


def tuned(rows: Rows, until: float, path: Path | None) -> None:
    """Use the tiles that were faster than the rule's, and write them into the table of this GPU."""
    gemm, better = kernels().gemm, faster_tiles(rows.read("tile"))
    gpu = gemm.gpu_of(torch.device(DEVICE))
    gemm.TILES[gpu] = gemm.TILES.get(gpu, {}) | {"tuned": better}
    gemm.tile_for.cache_clear()
    if path:
        path.write_text(json.dumps(gemm.TILES, indent=2) + "\n")
    rows.add("tuned", f"{len(better)} tiles of {gpu}, in {path}", gpu=gpu, tuned=better)


def faster_tiles(rows: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """The fastest tile for each rule's, where it gains more than `MIN_GAIN` over all products that
    have that rule. Each product's tiles were timed side by side, the rule's among them."""
    found = dict[str, dict[Any, dict[tuple[int, ...], float]]]()
    for row in rows:
        product = tuple(row[key] for key in ("structure", "width", "dtype", "product"))
        times = found.setdefault(row["rule"], {}).setdefault(product, {})
        times[tuple(row["tile"])] = row["seconds"]
    better = dict[str, list[int]]()
    for rule, products in found.items():
        own = tuple(map(int, rule.split()[2:]))
        cost = {
            tile: mean(times[tile] / times[own] for times in products.values())
            for tile in set.intersection(*map(set, products.values()))
        }
        best = min(cost, key=lambda tile: cost[tile])
        if cost[best] < 1 - MIN_GAIN:
            better[rule] = list(best)
    return better


# how each way of a layer is called where it is shown
WAYS = {
    "layer": "StructuredLinear",
    "graph": "stages, CUDA graph",
    "stages": "stages",
    "layer, compiled": "compiled",
    "loop": "bmm",
    "loop, compiled": "bmm, compiled",
    "strided": "strided bmm",
}


def cells_of(rows: Sequence[dict[str, Any]], dtype: str) -> dict[tuple[str, str], str]:
    """(layer, way) -> what was found: nn.Linear's time, and of the others the speed against it and
    the share of the bound. Layers in the order of the goals."""
    names = ("structure", "width", "variant")
    layers = [row for row in rows if row["kind"] == "layer" and row["dtype"] == dtype]
    found = {tuple(row[name] for name in names): row for row in layers}
    keys = dict.fromkeys([*GOALS, *((row["structure"], row["width"]) for row in layers)])
    cells = {}
    for name, width in keys:
        title = f"{name}, {width}"
        if dense := found.get((name, width, "dense")):
            cells[title, "nn.Linear"] = f"{1e6 * dense['seconds']['median']:.0f} us"
        for variant, way in WAYS.items():
            if row := found.get((name, width, variant)):
                cells[title, way] = f"{row['speed']:.2f}x ({row['share']:.0%})"
    return cells


def markdown(rows: Sequence[dict[str, Any]], dtype: str = "bfloat16") -> str:
    """The table of docs/speed.md."""
    return report.pivot(cells_of(rows, dtype))


def goals_table(rows: Rows) -> Table:
    """Each goal as a speed, what was found, and whether one of the ways reaches it."""
    found, lines = read_rows(rows.path), list[dict[str, str]]()
    cells = cells_of(found, "bfloat16")
    for name, width in GOALS:
        mine = [
            row
            for row in found
            if row["kind"] == "layer" and (row["structure"], row["width"]) == (name, width)
            if row["dtype"] == "bfloat16" and row["variant"] in ("layer", "stages", "graph")
        ]
        wanted = f"{SHARE * mine[0]['speed'] / mine[0]['share']:.2f}x" if mine else ""
        line = {"goal": f"{name}, {width}", f"{SHARE:.0%} is": wanted}
        for way in ("nn.Linear", *WAYS.values()):
            line[way] = cells.get((line["goal"], way), "not measured")
        reached = max((row["share"] for row in mine), default=0.0) >= SHARE
        lines.append(line | {"": "reached" if reached else "NOT reached"})
    where = "; ".join(row["machine"] for row in rows.read("environment"))
    what = f"{where}: forward + backward, bfloat16, {TOKENS} tokens"
    return report.grid(f"{what}: speed against nn.Linear (share of the bound)", lines)


def summarise(rows: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The last line, and the faults."""
    kinds = [row["kind"] for row in rows]
    faults = [row for row in rows if is_fault(row)]
    left = sum(len(row["jobs"]) for row in rows if row["kind"] == "stopped")
    counts = [f"{kinds.count(kind)} {kind}" for kind in ("self-test", "check", "layer", "refused")]
    words = f"{', '.join(counts)} rows; {left} jobs left by the budget; {len(faults)} FAULTS"
    return words, faults


def measure(options: argparse.Namespace, started: float) -> None:
    """Each job in turn; after an error that takes the GPU's context with it, the rest in a new
    process, and this job again without what failed.

    Raises:
        SystemExit: something is wrong, as the last line says.
    """
    import triton

    rows = Rows(options.out / "gpu.jsonl", fresh=options.start == 0)
    if options.start == 0:
        rows.add("environment", **record.environment(), triton=triton.__version__)
    else:
        ceilings(rows, nan)
    table = None if options.smoke else kernels().gemm.TILES_PATH
    todo = jobs(options.widths, options.structures, table=table)
    for number, (title, job) in enumerate(todo[options.start :], options.start):
        left = options.budget - (time.perf_counter() - started)
        if left < 0:
            names = [name for name, _ in todo[number:]]
            rows.add("stopped", f"by the budget, before: {title}", jobs=names)
            break
        rows.begin(title)
        try:
            with redirect_stdout(io.StringIO()):  # Triton prints all of what ptxas refuses
                job(rows, time.perf_counter() + min(left, JOB_SECONDS))
        except Exception as failure:
            before = rows.skipped
            rows.fail("", failure, trace=traceback.format_exc())
            try:
                torch.cuda.synchronize()
            except Exception:  # nothing on this device works any more
                rows.begin(title)
                restart(options, left, number if rows.skipped > before else number + 1)
        torch.cuda.empty_cache()
    Console(width=170).print(goals_table(rows))
    words, faults = summarise(read_rows(rows.path))
    print(f"summary: {words}")
    if faults:
        raise SystemExit(1)


def restart(options: argparse.Namespace, left: float, start: int) -> None:
    """This program again, from another job on; it does not return."""
    own = ["--out", str(options.out), "--budget", str(left), "--start", str(start)]
    own += ["--widths", *map(str, options.widths), "--structures", *options.structures]
    own += ["--smoke"] * options.smoke
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *own])


# ---- without a GPU -------------------------------------------------------------------------------


def smoke() -> None:
    """The jobs on tiny layers in the interpreter, which Triton chooses when the kernel is
    imported. Its bfloat16 is wrong."""
    os.environ["TRITON_INTERPRET"] = "1"
    rows = Rows(Path(tempfile.mkdtemp()) / "gpu.jsonl")
    for name in ("BTT r=1", "Monarch 4", "Kronecker"):
        check(rows, nan, name, 16, FEW_TYPES, FEW)
    tiles(rows, time.perf_counter() + 5, "BTT r=1", 16, "float16", 17)
    tuned(rows, nan, None)


NO_GPU = """\
Triton kernels for NVIDIA GPUs exist (`pip install triton`). They pass in Triton's interpreter
and compile for sm_80, sm_90 and sm_100, but are **untested on GPU**. `benchmarks/gpu_run.sh`
checks, tunes and measures them.
"""


def show_results() -> str:
    """What was measured on a GPU; until then, that nothing was."""
    rows = read_rows(record.RESULTS / "gpu.jsonl")
    if not rows:
        return NO_GPU
    (about,) = (row for row in rows if row["kind"] == "environment")
    return (
        f"{about['machine']}: speed of forward + backward against nn.Linear, and the share of the "
        "kernels' bound (`python -m benchmarks.gpu`, [json](../benchmarks/results/gpu.jsonl)).\n\n"
        f"{markdown(rows)}\n"
    )


def main() -> None:
    about = parser(__doc__, workers=None)
    add = about.add_argument
    add("--budget", type=float, default=540, help="seconds")
    add("--widths", type=int, nargs="+", default=WIDTHS)
    add("--structures", nargs="+", default=list(families(64)), choices=families(64))
    add("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = about.parse_args()
    if not find_spec("triton"):
        print("Triton is not installed: nothing to run")
    elif options.smoke and not torch.cuda.is_available():
        smoke()
    elif torch.cuda.is_available():
        if options.smoke:
            options.widths, options.structures = [1024], ["BTT r=1"]
            options.budget = min(options.budget, 60)
            if options.out == options.kept:
                options.out = Path(tempfile.mkdtemp())
        measure(options, time.perf_counter())
    else:
        print("no GPU: nothing to measure; --smoke and benchmarks.ahead need none")


if __name__ == "__main__":
    main()
