"""Are the Triton kernels right, and how fast? One command for a machine with a GPU, which checks,
tunes and measures everything; untested on GPU so far.

    python -m benchmarks.gpu                         # 9 minutes at most, results/gpu.jsonl
    python -m benchmarks.gpu --budget 300 --out out
    python -m benchmarks.gpu --smoke                 # no GPU: tiny layers in Triton's interpreter

On a GPU, in this order: the self-test of the goals' layers; the machine's ceilings; every kernel of
these layers, without and with SiLU between the cores, against float64 with ragged tokens; other
tiles than the model's, of which the faster ones go into structlin/_engine/triton/tiles.json under
the name of the GPU, with which way of a layer is the fastest; then layers, forward and
backward, by order of the goals below. nn.Linear comes first and last; then nn.Linear of equal
FLOPs, `StructuredLinear` (whatever path it takes; also with SiLU and weight normalisation, as the
README recommends), what users would take in its place, the kernels without autograd, and each
kernel alone. Tiny layers of every structure, and activations past 2**31 elements, are checked only.
Outputs are poisoned with NaN and compared with float64 before they are timed; what is wrong is not
timed, the rest is. Caches are cold; variants take turns. Device and wall time stand side by side.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain, product
from math import ceil, inf, nan, prod, sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.harness import record, report, timing
from benchmarks.harness.experiment import parser
from benchmarks.harness.race import Heat, Variant, race
from benchmarks.speed import variants
from benchmarks.speed.variants import families
from structlin import Dense, Structure, StructuredLinear
from structlin._engine import OF_CORES, OF_X
from structlin._engine.product import to_dense
from structlin._engine.triton import check as triton_check
from structlin._engine.triton import pair as pairs

Result = TypeVar("Result")
Runs = dict[Any, Callable[[], Any]]
Variants = dict[str, Variant]

# The most important first: forward + backward, bfloat16, 16384 tokens. The goal of each is SHARE of
# the roofline of one kernel each way on the card that is found.
GOALS = [
    *(("BTT r=1", 4096), ("BTT r=1", 1024), ("Monarch 16", 4096), ("Monarch 4", 4096)),
    *(("BTT r=1", 2048), ("Monarch 16", 1024), ("BTT r=1", 768), ("Monarch 16", 2048)),
    ("Monarch 16", 768),
]
SHARE = 0.7
# two products whose operands are cut to tf32's 10 bits are 1.4e-3 off
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "tf32": 4e-3}
ALL = tuple(TOLERANCE)
ROUNDS = (5, 25)
WAITS = 5  # samples of what a user waits for a call
MIN_GAIN = 0.02  # of a tile's time over that of the tile in use
TRIED = 12  # tiles of each kernel, of each shape two with other warps or stages
JOB_SECONDS = 30  # at most, of a layer's rounds and of its tiles
TUNED_LAYERS = 4  # the first of the goals that the kernels take
FEW, FEW_TYPES = 17, ("float16", "tf32")  # of tiny layers
FAR_TOKENS = 2**21 + 77
SMALL = (48, 32)  # widths
EQUAL, BEST = "nn.Linear, equal FLOPs", "with SiLU, normalised"  # two of the ways of a layer
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (4096, 1024, 2048, 8192, 768)  # by order of importance
TOKENS, DTYPE = 16384, "bfloat16"  # of what is timed
CEILINGS: dict[str, timing.Ceilings] = {}  # of a dtype, once measured
UNKNOWN = timing.Ceilings(rate=nan, bandwidth=nan, call=nan)
TABLE = Path(pairs.__file__).with_name("tiles.json")


@contextmanager
def precision(dtype: str) -> Iterator[torch.dtype]:
    """As PyTorch's dtype: "tf32" is float32 with the tensor cores allowed, said in the older of
    PyTorch's two ways, which torch.compile reads."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def tuned_as(entries: dict[str, Any]) -> Iterator[None]:
    """Let tiles.json have these entries of this card, beside those that it has."""
    name = card().name
    with mock.patch.dict(pairs.TUNED, {name: pairs.TUNED.get(name, {}) | entries}):
        forget_tiles()
        try:
            yield
        finally:
            forget_tiles()


def forget_tiles() -> None:
    pairs.tile_for.cache_clear()
    pairs.launches_of.cache_clear()
    pairs.tokens_for_matrix.cache_clear()


def card() -> pairs.Card:
    return pairs.card_of(torch.empty(0, device=DEVICE).device)  # which has a number


# ---- a layer and its kernels ---------------------------------------------------------------------


def ways_of(name: str, width: int) -> dict[str, Structure]:
    """A layer's structure by its name, without and with SiLU between the cores."""
    family = families(width)[name]
    found = {name: family, f"{name}, SiLU": family.activate()}
    return {title: each.structure(width, width) for title, each in found.items()}


class Kernel(NamedTuple):
    """A kernel of a layer of two cores; the first three choose its tile."""

    pair: pairs.Pair
    kind: str
    itemsize: int
    tile: pairs.Tile


def kernels_of(structure: Structure, itemsize: int = 2) -> dict[str, Kernel]:
    """By y, dx and dw, the gradients of both cores; none where one has no tile that fits."""
    numbers, gpu = structure.program.numbers, card()
    if pairs.pair_of(numbers) is None:
        return {}
    keys = dict(zip(("y", "dx", "dw"), pairs.kernels_of(numbers), strict=True))
    tiles = {n: pairs.tile_for(*key, itemsize, *gpu[:2]) for n, key in keys.items()}
    return {n: Kernel(*keys[n], itemsize, tile) for n, tile in tiles.items() if all(tiles.values())}


class Layer:
    """A layer of two cores on random inputs, as its kernels; with SiLU between the cores they are
    scaled, as weight normalisation does it."""

    def __init__(
        self, structure: Structure, tokens: int, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        def data(*shape: int) -> Tensor:
            return torch.empty(shape, device=DEVICE, dtype=dtype).normal_()

        self.structure, self.program = structure, structure.program.numbers
        self.x, self.dy = data(tokens, structure.in_features), data(tokens, structure.out_features)
        self.cores = [data(*core.shape).div_(sqrt(core.fan_in)) for core in structure.cores]
        self.bias = data(structure.out_features) if bias else None
        one = torch.ones((), device=DEVICE, dtype=torch.float64)
        norms = pairs.Norms(one, one, torch.tensor([0.75, 1.5], device=DEVICE), (1.0, 1.0))
        self.norms = norms if structure.between else pairs.Norms()
        self.kernels = kernels_of(structure, dtype.itemsize)

    def run(self, name: str) -> Sequence[Tensor]:
        """The results of a kernel."""
        launches = pairs.launches_of(self.program, self.x.dtype, self.x.device)
        (to_y, to_dx, to_parts, to_cores), (near, far) = launches, self.cores
        if name == "dw":
            parts, _ = pairs._find_gradients(to_parts, self.x, self.dy, near, far, self.norms)
            found = [torch.empty_like(core, dtype=torch.float32) for core in (near, far)]
            ends = near, far, *found, pairs.Norms(), parts.new_empty(0)
            pairs._finish(to_cores, parts, None, *ends)
            return found
        out = torch.empty_like(self.dy if name == "y" else self.x)
        if name == "dx":
            z = self.x if self.structure.between else None
            given = self.dy, far, near, out, None, self.norms.turn(), z
            pairs._multiply(to_dx, *given, turned=True)
        else:
            pairs._multiply(to_y, self.x, near, far, out, self.bias, self.norms)
        return [out]

    def bound(self, name: str, ceilings: timing.Ceilings) -> float:
        """Seconds that a kernel takes at least; for gradients and slopes h is computed again."""
        gated = self.kernels[name].kind == "gated"
        flops = self.structure.flops * (2 if name == "dw" else 1)
        flops += self.structure.cores[0].flops * gated
        moved = sum(each.nbytes for each in [self.x, self.dy, *[self.x] * gated, *self.cores])
        return max(len(self.x) * flops / ceilings.rate, moved / ceilings.bandwidth)

    def forward_backward(self) -> list[Tensor]:
        """y, dx and the gradients of the cores of a layer without bias and factors."""
        y = pairs.multiply(self.x, self.cores, None, None, (), self.program)
        given = (self.dy, self.x, self.cores, None, (), self.program, OF_X | OF_CORES)
        return [y, *pairs.gradients(*given)[:3]]

    @cached_property
    def wanted(self) -> dict[str, list[Tensor]]:
        """The results of each kernel, by autograd of einsum in float64."""
        scales = [1, 1] if self.norms.gains is None else self.norms.gains.double()
        cores = [core.double() * scale for core, scale in zip(self.cores, scales, strict=True)]
        leaves = [each.detach().requires_grad_() for each in (self.x.double(), *cores)]
        y = timing.oracle(self.structure, leaves[1:], leaves[0])
        dx, *dw = torch.autograd.grad(y, leaves, self.dy.double())
        y = y.detach() if self.bias is None else y.detach() + self.bias.double()
        return {"y": [y], "dx": [dx], "dw": dw}

    def error(self, run: Callable[[], Sequence[Tensor]], *names: str) -> float:
        """The largest error of what `run` computes, relative to float64, in norm: the results of
        these kernels, or of all."""
        with timing.poisoned():
            found = run()
        wanted = chain(*(self.wanted[name] for name in names or self.wanted))
        both = zip(found, wanted, strict=True)
        return max(timing.relative_error(each, right.reshape(each.shape)) for each, right in both)


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

    def kernel(self, row: str, layer: Layer, name: str, samples: Any, **content: Any) -> None:
        bound = layer.bound(name, CEILINGS.get(content["dtype"], UNKNOWN))
        took, words = median(samples), "{structure} {width} {dtype}".format(**content)
        show = f"{words} {name} {content.get('tile', '')} {1e6 * took:.0f} us"
        found = {"seconds": took, "bound": bound, "share": bound / took}
        self.add(row, f"{show}, {bound / took:.0%} of bound", kernel=name, **found, **content)

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


def jobs(widths: Sequence[int], names: Sequence[str], table: Path | None = None) -> list[Job]:
    """The jobs, the most important first; `table` is the file that gets the tiles, if any does."""
    layers = [(name, d) for d in widths for name in names if exists(name, d, d)]
    every = [(name, d) for name, d in layers if not name.startswith("low-rank")]  # nn.Linear's
    goals = [key for key in GOALS if key in every]
    others = [key for key in every if key not in goals]
    own = [key for key in goals if kernels_of(ways_of(*key)[key[0]])][:TUNED_LAYERS]
    timed = {"dtype": DTYPE, "tokens": TOKENS}

    def each(work: Callable[..., None], keys: Iterable[Any], **options: Any) -> list[Job]:
        title = f"{work.__name__} {{}} {{}} {options.get('dtype', '')}"
        return [
            (title.format(name, d).rstrip(), partial(work, name=name, width=d, **options))
            for name, d in keys
        ]

    return [
        *((f"self_test {of}", partial(self_test, dtype=of, layers=goals)) for of in TOLERANCE),
        ("ceilings", ceilings),
        *each(check, own),
        *each(tiles, own, **timed),
        *each(pays, own, **timed),
        ("tuned", partial(tuned, path=table)),
        *each(layer, goals, **timed),
        *each(compiled, goals[:2], **timed),
        ("small", small),
        ("far", partial(far, tokens=FAR_TOKENS)),
        *each(layer, others, **timed),
        *each(layer, goals[:2], **timed | {"dtype": "tf32"}),
    ]


def exists(name: str, *widths: int) -> bool:
    """Whether there is this layer."""
    try:
        families(min(widths))[name].structure(*widths)
    except ValueError:  # a width cannot be divided so
        return False
    return True


def self_test(rows: Rows, until: float, dtype: str, layers: Sequence[tuple[str, int]]) -> None:
    """What the package does before the first use of a layer."""
    start, found = time.perf_counter(), dict[str, list[str] | None]()
    every = [(width, *way) for name, width in layers for way in ways_of(name, width).items()]
    with precision(dtype) as kind:
        for width, title, structure in every:
            if time.perf_counter() < until and kernels_of(structure, kind.itemsize):
                device = torch.empty(0, device=DEVICE).device
                run = partial(triton_check.self_test, structure.program.numbers, kind, device)
                found[f"{title} {width}"] = rows.attempt(f"{title} {width}", run)
    faults = {layer: faults for layer, faults in found.items() if faults != []}
    seconds = time.perf_counter() - start
    show = f"{dtype}: {len(found)} layers, {faults or 'passed'}, {seconds:.1f} s"
    rows.add("self-test", show, dtype=dtype, layers=len(found), faults=faults, seconds=seconds)


def check(
    rows: Rows, until: float, name: str, width: int, dtypes: Iterable[str] = ALL, tokens: int = 1000
) -> None:
    """Every kernel of a layer, ragged tokens, without and with SiLU."""
    for dtype, (title, structure) in product(dtypes, ways_of(name, width).items()):
        with precision(dtype) as kind:
            layer, errors = Layer(structure, tokens, kind, bias=True), dict[str, float]()
            for n in layer.kernels:
                error = partial(layer.error, partial(layer.run, n), n)
                off = rows.attempt(f"{title}, {dtype}, {tokens} tokens, {n}", error)
                errors |= {} if off is None else {n: off}
        if errors:
            rows.check(errors, structure=title, width=width, dtype=dtype, tokens=tokens)


def small(rows: Rows, until: float, tokens: int = FEW) -> None:
    """Tiny layers with a bias, as users have them, differentiated twice; by the kernels wherever
    they can serve."""
    names = [name for name in families(min(SMALL)) if exists(name, *SMALL)]
    for name, dtype in product(names, FEW_TYPES):
        with precision(dtype) as kind:
            family = families(min(SMALL))[name]
            layer = StructuredLinear(*SMALL, family, device=DEVICE, dtype=kind)
            x = torch.randn(tokens, SMALL[0], device=DEVICE, dtype=kind, requires_grad=True)
            leaves = [x, *layer.cores, layer.bias]
            with served(layer):
                y = layer(x)
                dy = torch.randn_like(y).requires_grad_()
                found = [y, *torch.autograd.grad(y, leaves, dy, retain_graph=True)]
                (again,) = torch.autograd.grad(y, x, dy, create_graph=True)
                torch.autograd.grad(again.sum(), [dy, *layer.cores])
            *cores, bias = (each.double() for each in leaves[1:])
            wide = x.detach().double().requires_grad_()
            y = timing.oracle(layer.structure, cores, wide) + bias
            wanted = [y, *torch.autograd.grad(y, [wide, *cores, bias], dy.double())]
        named = ("y", "dx", *(f"dw{n}" for n in range(1, 1 + len(cores))), "dbias")
        errors = dict(zip(named, map(timing.relative_error, found, wanted), strict=True))
        rows.check(errors, structure=name, width=SMALL[0], dtype=dtype, tokens=tokens)


@contextmanager
def served(layer: StructuredLinear, by: str = "kernels") -> Iterator[None]:
    """Let a layer have this way, whether it pays or not: "kernels", PyTorch's "products", or the
    "matrix" W, formed anew."""
    core, least = layer.cores[0], 0 if by == "matrix" else pairs.NEVER
    usable = by == "kernels" and bool(kernels_of(layer.structure, core.element_size()))
    key = layer._program.numbers, core.dtype, core.device
    with (
        mock.patch.dict(triton_check._answers, {key: usable}),
        mock.patch.object(pairs, "tokens_for_matrix", return_value=least),
    ):
        yield


def far(rows: Rows, until: float, tokens: int) -> None:
    """Activations of more than 2**31 elements: the last tokens, and a gradient that ends with
    them."""
    width, last = 1024, 333
    whole = Layer(ways_of("BTT r=1", width)["BTT r=1"], tokens, torch.bfloat16)
    whole.dy[:-last] = 0
    y, dx, *gradients = whole.forward_backward()
    part = Layer(whole.structure, last, torch.bfloat16)
    part.x, part.dy, part.cores = whole.x[-last:], whole.dy[-last:], whole.cores
    errors = {"past 2**31 elements": part.error(lambda: [y[-last:], dx[-last:], *gradients])}
    rows.check(errors, structure="BTT r=1", width=width, dtype="bfloat16", tokens=tokens)


def ceilings(rows: Rows, until: float) -> None:
    for dtype in ("bfloat16", "tf32"):
        with precision(dtype) as kind:
            found = CEILINGS[dtype] = timing.ceilings(DEVICE, kind)
        show = f"{dtype}: {found.rate / 1e12:.0f} TFLOP/s, {found.bandwidth / 1e12:.2f} TB/s"
        rows.add("ceilings", show, dtype=dtype, **vars(found))


def layer(rows: Rows, until: float, name: str, width: int, dtype: str, tokens: int) -> None:
    """Forward and backward of nn.Linear, of `StructuredLinear`, of what users would take in its
    place, and of the kernels; then each kernel alone."""
    with precision(dtype) as kind:
        plain = Layer(ways_of(name, width)[name], tokens, kind)
        more = Runs()
        if plain.kernels:
            more["kernels"] = plain.forward_backward
            if DEVICE == "cuda" and (replay := rows.attempt("graph", partial(graph_of, plain))):
                more["kernels, CUDA graph"] = replay
        compare(rows, until, name, plain, dtype, variants_of(name, width, plain), more)
        for title, structure in ways_of(name, width).items():
            content = {"structure": title, "width": width, "dtype": dtype}
            own, alone = Layer(structure, tokens, kind), Runs()
            for n in own.kernels:
                run = partial(own.run, n)
                if rows.right(f"{title}, {n}", partial(own.error, run, n), dtype) is not None:
                    alone[n] = run
            heat = Heat(DEVICE, (3, 9), min(until, time.perf_counter() + 5))
            times = race(alone, heat).seconds if alone else {}
            for n, seconds in times.items():
                rows.kernel("kernel", own, n, seconds, **content)


def compiled(rows: Rows, until: float, name: str, width: int, dtype: str, tokens: int) -> None:
    """The same of torch.compile, of the loop and of `StructuredLinear`."""
    with precision(dtype) as kind:
        plain = Layer(ways_of(name, width)[name], tokens, kind)
        found = variants_of(name, width, plain)
        torch.compiler.reset()
        for n in ("StructuredLinear", BEST, "torch.bmm"):
            run = torch.compile(found[n].run, fullgraph=True, dynamic=False)
            found[f"{n}, compiled"] = replace(found.pop(n), implementation="compiled", run=run)
        compare(rows, until, name, plain, dtype, found, {})


def variants_of(name: str, width: int, like: Layer) -> Variants:
    """nn.Linear, also of equal FLOPs; `StructuredLinear`, whatever path it takes, also as the
    README recommends it; and the ways without a kernel of their own. On the inputs of a layer."""
    ends, family = (like.x.detach().requires_grad_(), like.dy), families(width)[name]
    options = {"bias": False, "device": DEVICE, "dtype": like.x.dtype}

    def dense(*widths: int) -> Variant:
        linear, structure = nn.Linear(*widths, **options), Dense().structure(*widths)
        x, dy = (torch.randn(len(like.x), d, device=DEVICE).to(like.x.dtype) for d in widths)
        run = structure, linear, [linear.weight]
        return Variant("dense", "nn.Linear", *run, x.requires_grad_(), dy)

    module = StructuredLinear(width, width, family, **options)
    equal = dense(*variants.equal_flops_widths(module.structure))
    best = StructuredLinear(width, width, family.activate(), weight_norm=True, **options)
    structure, cores = module.structure, list(module.cores)
    runs = {"StructuredLinear": module, "torch.bmm": partial(variants.loop, structure, cores)}
    if len(cores) == 2 and all(core.repeat == 1 and core.batch > 1 for core in structure.cores):
        runs["strided torch.bmm"] = partial(variants.StridedProducts.apply, structure, *cores)
    found = {"nn.Linear": dense(width, width), EQUAL: equal}
    found |= {n: Variant(name, n, structure, run, cores, *ends) for n, run in runs.items()}
    return found | {BEST: variants._with_option(name, "weight norm", best, *ends)}


def compare(
    rows: Rows, until: float, name: str, layer: Layer, dtype: str, ways: Variants, more: Runs
) -> None:
    """A row for each way of a layer that is right, the first of them nn.Linear; `more` run the
    layer's kernels. The time of nn.Linear of equal FLOPs is scaled to exactly the layer's."""
    tests = {n: each.error for n, each in ways.items()}
    tests |= {n: partial(layer.error, run) for n, run in more.items()}
    found = {n: rows.right(n, test, dtype) for n, test in tests.items()}
    works = {n: each.work for n, each in ways.items()} | more
    works = {n: work for n, work in works.items() if found[n] is not None}
    if "nn.Linear" not in works:
        return
    launched = {n: count_launches(work) for n, work in works.items()}
    times = race(works, Heat(DEVICE, ROUNDS, until), last="nn.Linear again")
    waits = race(works, Heat(DEVICE, (WAITS, WAITS)), clock=timing.wall, last="nn.Linear again")
    tokens, structure = layer.x.shape[0], layer.structure
    limit, widths = CEILINGS.get(dtype, UNKNOWN), variants.equal_flops_widths(structure)
    bound = limit.bound(structure, tokens, layer.x.element_size(), backward=True, fused=True)
    content = {"structure": name, "width": structure.in_features, "dtype": dtype}
    for variant, samples in times.seconds.items():
        scale = structure.flops / (2 * prod(widths)) if variant == EQUAL else 1.0
        took, wall = scale * median(samples), scale * median(waits.seconds[variant])
        speed, share = times.speed(variant)["median"] / scale, bound / took
        again = variant.removesuffix(" again")
        rows.add(
            "layer",
            f"{' '.join(map(str, content.values()))} {variant}: {1e6 * took:.0f} us, {speed:.2f}x, "
            f"{share:.0%} of bound, {1e6 * wall:.0f} us of wall time",
            **content, tokens=tokens, variant=variant, error=found[again], scale=scale,
            seconds=timing.spread(samples), wall=timing.spread(waits.seconds[variant]),
            speed=speed, bound=bound, share=share, launches=launched[again],
        )  # fmt: skip


def count_launches(work: Callable[[], Any]) -> int:
    """How many of the package's kernels it launches."""
    call = pairs.Launch.__call__
    with mock.patch.object(pairs.Launch, "__call__", autospec=True, side_effect=call) as launch:
        work()
    return int(launch.call_count)


def graph_of(layer: Layer) -> Callable[[], Any]:
    """`forward_backward` as a CUDA graph."""
    layer.forward_backward()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.forward_backward()

    return lambda: (graph.replay(), found)[1]


def candidates(kernel: Kernel) -> list[pairs.Tile]:
    """The tile in use, and the best others by the model; each shape with two pairs of warps and
    stages at most."""
    pair, kind, size, own = kernel
    time_of = lambda tile: pairs.time_of(pair, tile, kind, size, card().shared)  # noqa: E731
    found, shapes = [own], Counter([own[:6]])
    for tile in sorted(pairs.tiles_of(pair, kind), key=time_of):
        if len(found) < TRIED and tile != own and shapes[tile[:6]] < 2 and time_of(tile) < inf:
            found.append(tile)
            shapes[tile[:6]] += 1
    return found


def tiles(rows: Rows, until: float, name: str, width: int, dtype: str, tokens: int) -> None:
    """Other tiles than the one in use for every kernel: what tiles.json should say of this GPU.
    With SiLU only the kernel of dx has a tile of its own."""
    with precision(dtype) as kind:
        layers = {n: Layer(each, tokens, kind) for n, each in ways_of(name, width).items()}
        every = [(*way, n) for way in layers.items() for n in way[1].kernels]
        for title, layer, n in every:
            kernel, works = layer.kernels[n], Runs()
            if (title != name) != (kernel.kind == "gated"):
                continue
            entry = pairs.name_of(*kernel[:3])
            for tile in candidates(kernel):
                if time.perf_counter() > until:
                    return
                run = tuned_as({entry: list(tile)})(partial(layer.run, n))
                what, error = f"{title}, {n} {tuple(tile)}", partial(layer.error, run, n)
                if rows.right(what, error, dtype, kind="refused") is not None:
                    works[tile] = run
            if kernel.tile not in works:  # then nothing can be compared with it
                continue
            content = {"structure": title, "width": width, "dtype": dtype}
            content |= {"entry": entry, "own": list(kernel.tile)}
            for tile, seconds in race(works, Heat(DEVICE, (3, 7), until)).seconds.items():
                rows.kernel("tile", layer, n, seconds, **content, tile=list(tile))


def pays(rows: Rows, until: float, name: str, width: int, dtype: str, tokens: int) -> None:
    """Which way is the fastest in `StructuredLinear`: the kernels, in the fastest tiles, PyTorch's
    products, or W; and what it takes of that to form W, and to take its gradient to the cores."""
    with precision(dtype) as kind, tuned_as(faster_tiles(rows.read("tile"))):
        plain = Layer(ways_of(name, width)[name], tokens, kind)
        content = {"structure": name, "width": width, "dtype": dtype, "tokens": tokens}
        found = variants_of(name, width, plain)
        for variant in ("StructuredLinear", BEST):
            work, module, gated = found[variant].work, found[variant].run, variant == BEST
            ways = ["kernels", "products", "matrix"][: 3 - gated]
            works = {way: served(module, way)(work) for way in ways}
            works |= {} if gated else {"forming": partial(form_matrix, module)}
            times = race(works, Heat(DEVICE, (3, 9), until)).seconds
            took = {way: median(samples) for way, samples in times.items()}
            shown = ", ".join(f"{way} {1e6 * each:.0f} us" for way, each in took.items())
            kernel = "pays with SiLU" if gated else "pays"
            entry = pairs.name_of(plain.kernels["y"].pair, kernel, kind.itemsize)
            show = f"{name} {width} {dtype} {variant}: {shown}"
            rows.add("pays", show, **content, entry=entry, variant=variant, **took)


def form_matrix(layer: StructuredLinear) -> Any:
    """W, and a gradient of it taken to the cores."""
    cores = list(layer.cores)
    matrix = to_dense(layer.structure, cores)
    return torch.autograd.grad(matrix, cores, matrix.detach())


def tuned(rows: Rows, until: float, path: Path | None) -> None:
    """Use the tiles that were faster, and write them into the table of this GPU, with which way is
    the fastest."""
    gpu, found = card().name, faster_tiles(rows.read("tile"))
    for row in rows.read("pays"):
        found[row["entry"]] = row["kernels"] < row["products"]
        if "matrix" in row:
            found[row["entry"].replace("pays", "matrix")] = tokens_for_matrix(row)
    pairs.TUNED[gpu] = pairs.TUNED.get(gpu, {}) | found
    forget_tiles()
    triton_check._answers.clear()
    if path:
        path.write_text(json.dumps(pairs.TUNED, indent=2) + "\n")
    rows.add("tuned", f"{len(found)} entries of {gpu}, in {path}", gpu=gpu, tuned=found)


def tokens_for_matrix(row: dict[str, Any]) -> int:
    """From how many tokens on W beats the other two, by these seconds.

    >>> tokens_for_matrix({"kernels": 5, "products": 6, "matrix": 4, "forming": 1, "tokens": 100})
    50
    """
    gain = min(row["kernels"], row["products"]) - (row["matrix"] - row["forming"])
    return ceil(row["forming"] / gain * row["tokens"]) if gain > 0 else pairs.NEVER


def faster_tiles(rows: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """The fastest tile of each entry, where it gains more than `MIN_GAIN` over all kernels that
    have that entry. Each kernel's tiles were timed side by side, the one in use among them."""
    kernel = lambda row: [row[key] for key in ("structure", "width", "dtype", "kernel")]  # noqa: E731
    own = {str(kernel(row)): row["seconds"] for row in rows if row["tile"] == row["own"]}
    costs = dict[str, dict[tuple[int, ...], list[float]]]()
    for row in rows:
        cost = costs.setdefault(row["entry"], {}).setdefault(tuple(row["tile"]), [])
        cost.append(row["seconds"] / own[str(kernel(row))])
    better = dict[str, list[int]]()
    for entry, tiles in costs.items():
        most = max(map(len, tiles.values()))
        least, tile = min((mean(each), tile) for tile, each in tiles.items() if len(each) == most)
        if least < 1 - MIN_GAIN:
            better[entry] = list(tile)
    return better


OURS = ("StructuredLinear", "kernels", "kernels, CUDA graph")  # that may reach a goal


def markdown(rows: Sequence[dict[str, Any]], dtype: str = DTYPE) -> str:
    """The table of docs/speed.md: nn.Linear's time, and of each other way its speed against it and
    the share of the bound; each goal as a speed, and whether one of our ways reaches it."""
    found = dict[tuple[str, int], dict[str, dict[str, Any]]]({goal: {} for goal in GOALS})
    for row in rows:
        if row["kind"] == "layer" and row["dtype"] == dtype:
            found.setdefault((row["structure"], row["width"]), {})[row["variant"]] = row
    cells = {}
    for (name, width), layer in found.items():
        title, cells[f"{name}, {width}", "nn.Linear"] = f"{name}, {width}", "not measured"
        for way, row in layer.items():
            cells[title, way] = f"{row['speed']:.2f}x ({row['share']:.0%})"
        if dense := layer.get("nn.Linear"):
            cells[title, "nn.Linear"] = f"{1e6 * dense['seconds']['median']:.0f} us"
            wanted = f"{SHARE:.0%} is {SHARE * dense['speed'] / dense['share']:.2f}x"
            most = max((layer[way]["share"] for way in OURS if way in layer), default=0.0)
            cells[title, "goal"] = f"{wanted}, {'' if most >= SHARE else 'NOT '}reached"
    return report.pivot(cells)


def finish(path: Path | None) -> None:
    """Print the last line.

    Raises:
        SystemExit: something is wrong.
    """
    rows = read_rows(path)
    kinds, faults = [row["kind"] for row in rows], sum(map(is_fault, rows))
    left = sum(len(row["jobs"]) for row in rows if row["kind"] == "stopped")
    counts = [f"{kinds.count(kind)} {kind}" for kind in ("self-test", "check", "layer", "refused")]
    print(f"summary: {', '.join(counts)} rows; {left} jobs left by the budget; {faults} FAULTS")
    if faults:
        raise SystemExit(1)


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
    todo = jobs(options.widths, options.structures, None if options.smoke else TABLE)
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
    print(f"speed against nn.Linear (share of the bound), {TOKENS} tokens in {DTYPE}:\n")
    print(markdown(read_rows(rows.path)))
    finish(rows.path)


def restart(options: argparse.Namespace, left: float, start: int) -> None:
    """This program again, from another job on; it does not return."""
    own = ["--out", str(options.out), "--budget", str(left), "--start", str(start)]
    own += ["--widths", *map(str, options.widths), "--structures", *options.structures]
    own += ["--smoke"] * options.smoke
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *own])


# ---- without a GPU -------------------------------------------------------------------------------


def smoke() -> None:
    """The jobs on tiny layers in the interpreter, which Triton chooses when the kernels are
    imported. Its bfloat16 is wrong."""
    import triton

    os.environ["TRITON_INTERPRET"] = "1"
    triton.language.sum = triton.jit(triton.language.sum.fn)  # which was imported before
    rows = Rows(Path(tempfile.mkdtemp()) / "gpu.jsonl")
    for layer in (("BTT r=1", 16), ("Monarch 4", 16), ("Kronecker", 16)):
        check(rows, nan, *layer, FEW_TYPES, FEW)
    self_test(rows, inf, "float16", [("BTT r=1", 16)])
    tiles(rows, time.perf_counter() + 5, "BTT r=1", 16, "float16", FEW)
    tuned(rows, nan, None)
    finish(rows.path)


NO_GPU = """\
The kernels need `pip install triton`. They pass in Triton's interpreter and compile for sm_80,
sm_90 and sm_100 without spills, but **no GPU has run them**. `benchmarks/gpu_run.sh` checks, tunes
and measures them.
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
