"""Are the Triton kernels right, and how fast? One command for a machine with a GPU; untested on GPU
so far.

    python -m benchmarks.gpu                         # 9 minutes at most, results/gpu.jsonl
    python -m benchmarks.gpu --budget 300 --out out
    python -m benchmarks.gpu --compile --all         # no GPU: compiles every kernel ahead
    python -m benchmarks.gpu --smoke                 # no GPU: tiny layers in Triton's interpreter

On a GPU, in this order: the self-test; every product of every structure against float64, also with
ragged tokens and past 2**31 elements; the machine's ceilings; then layers, forward and backward, by
order of the goals below: nn.Linear first and last, `StructuredLinear` (whatever path it takes), and
the Triton stages without autograd, from Python and as a CUDA graph; each product alone; and, for
products of the largest goals, other tiles than the table's. Outputs are poisoned with NaN and
compared with float64 before they are timed; caches are cold; variants take turns. Every row is a
line of JSON, written at once; a failure is a row too, and the rest goes on, in a new process if the
GPU is lost.
"""

import argparse
import collections
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from math import nan, prod, sqrt
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness import record, report, timing
from benchmarks.harness.experiment import parser
from benchmarks.harness.race import Heat, Variant, race
from benchmarks.speed.variants import families
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

# Speed of forward + backward against nn.Linear, bfloat16, 16384 tokens, on an H200; and of the
# strided bound, anywhere.
GOALS = {
    ("BTT r=1", 4096): 4.5,
    ("BTT r=1", 1024): 1.3,
    ("Monarch 16", 4096): 4.5,
    ("Monarch 4", 4096): 1.8,
    ("BTT r=1", 2048): 2.2,
    ("Monarch 16", 1024): 1.3,
    ("BTT r=1", 768): 1.1,
    ("Monarch 16", 2048): 2.2,
    ("Monarch 16", 768): 1.1,
}
SHARE = 0.7
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "tf32": 2e-3, "float32": 1e-5}
ROUNDS = (5, 25)
JOB_SECONDS = 30  # at most, of a layer's rounds and of a product's tiles
CHECKED = (
    1000,
)  # tokens of every check of a goal's layer, in all types; and of the others, in two
FEW, FEW_TYPES = (17,), ("float16", "float32")
FAR_TOKENS = 2**21 + 77
# What is compiled ahead: by architecture, a GPU whose tiles are taken, and its shared memory
GPUS = {80: "NVIDIA A100-SXM4-80GB", 90: "NVIDIA H200", 100: "NVIDIA B200"}
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# The layers of tests/kernels/test_triton.py
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
TOKENS = 16384
CEILINGS: dict[str, timing.Ceilings] = {}  # of a dtype, once measured
Sample = tuple[Structure, str, int, str]  # a layer, its dtype and tokens, and who has it
Launch = tuple[str, list[Any], dict[str, Any]]  # who needs it; the arguments
UNKNOWN = timing.Ceilings(rate=nan, bandwidth=nan, call=nan)


@cache
def kernels() -> SimpleNamespace:
    """structlin's Triton modules, which have no public name: their stages and products are what is
    checked here. Imported at the first call, when Triton reads TRITON_INTERPRET."""
    from structlin._kernels import triton_check, triton_gemm, triton_stages

    return SimpleNamespace(check=triton_check, gemm=triton_gemm, stages=triton_stages)


@contextmanager
def precision(dtype: str) -> Iterator[torch.dtype]:
    """As PyTorch's dtype: "tf32" is float32 with the tensor cores allowed."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if dtype == "tf32" else "ieee"
    try:
        yield torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    finally:
        matmul.fp32_precision = before


# ---- a layer and its products --------------------------------------------------------------------


@dataclass
class Product:
    """One call of `block_gemm` or `block_gemm_weight`, with the views that a layer gives it."""

    name: str  #: y, dx or dw, and the number of the core
    a: Tensor
    b: Tensor
    out: Tensor

    @property
    def weight(self) -> bool:
        return self.name.startswith("dw")

    def bound(self, ceilings: timing.Ceilings) -> float:
        """Seconds that it takes at least."""
        flops = 2 * self.a.numel() * self.b.shape[4] * self.b.shape[5]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (self.a, self.b, self.out))
        return max(flops / ceilings.rate, moved / ceilings.bandwidth)

    def run(self, **options: Any) -> None:
        gemm = kernels().gemm
        (gemm.block_gemm_weight if self.weight else gemm.block_gemm)(
            self.a, self.b, self.out, **options
        )

    def error(self) -> float:
        """The error of `run` on a poisoned output, relative to float64, in norm."""
        self.out.fill_(nan)
        self.run()
        equation = "yzmlnp,yzmlkj->yznpkj" if self.weight else "yzmlkj,yzkjnp->yzmlnp"
        wanted = torch.einsum(equation, self.a.double(), self.b.double())
        return timing.relative_error(self.out, wanted)


class Layer:
    """A structured layer on random inputs, as its Triton stages."""

    def __init__(self, structure: Structure, tokens: int, dtype: torch.dtype, device: str) -> None:
        def data(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_()

        self.structure, self.program = structure, structure.program.numbers
        self.x, self.dy = data(tokens, structure.in_features), data(tokens, structure.out_features)
        self.cores = [data(*core.shape).div_(sqrt(core.fan_in)) for core in structure.cores]

    def forward_backward(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        stages = kernels().stages
        y, middle = stages.forward(self.program, self.cores, self.x)
        return y, *stages.backward(self.program, self.cores, self.x, middle, self.dy)

    def products(self) -> list[Product]:
        """All that `forward_backward` computes, in that order."""
        stages, c = kernels().stages, len(self.cores)
        names = [f"y{i + 1}" for i in range(c)]
        names += [f"{kind}{i}" for i in range(c, 0, -1) for kind in ("dw", "dx")]
        found: list[Product] = []

        def recorded(original: Callable[..., None]) -> Callable[..., None]:
            def call(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
                found.append(Product(names[len(found)], a, b, out))
                original(a, b, out, **options)

            return call

        kinds = ("block_gemm", "block_gemm_weight")
        with mock.patch.multiple(
            stages, **{kind: recorded(getattr(stages, kind)) for kind in kinds}
        ):
            self.forward_backward()
        return found

    def error(self) -> float:
        """The largest of y, dx and the cores' gradients, relative to float64 autograd of one
        einsum."""
        x, *cores = (tensor.double().requires_grad_() for tensor in (self.x, *self.cores))
        y = timing.oracle(self.structure, cores, x)
        wanted = [y.detach(), *torch.autograd.grad(y, [x, *cores], self.dy.double())]
        y, dx, gradients = self.forward_backward()
        return max(map(timing.relative_error, (y, dx, *gradients), wanted))


# ---- rows ----------------------------------------------------------------------------------------


class Rows:
    """A file of JSON lines, one a row, written at once; `show` is a short line for the terminal."""

    def __init__(self, path: Path | None, *, fresh: bool = True) -> None:
        self.path = path
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                path.unlink(missing_ok=True)

    def add(self, kind: str, show: str = "", **content: Any) -> None:
        line = json.dumps({"kind": kind, **content}, default=str)
        if self.path:
            with self.path.open("a") as file:
                file.write(line + "\n")
        print(f"{kind:10} {show}" if show else line, flush=True)

    def fail(self, job: str, failure: Exception, **content: Any) -> None:
        self.add("error", f"{job}: {failure}", job=job, error=str(failure), **content)

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
        assert self.path
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [row for row in rows if row["kind"] == kind]


# ---- on a GPU ------------------------------------------------------------------------------------

# a job gets the time (`time.perf_counter`) at which to stop
Job = tuple[str, Callable[[Rows, float], None]]


def jobs(widths: list[int], names: list[str]) -> list[Job]:
    """By order of importance."""
    goals = [key for key in GOALS if key[0] in names and key[1] in widths]
    others = [(name, d) for d in (4096, 1024, 2048, 8192, 768) if d in widths for name in names]

    def each(
        kind: str, work: Callable[..., None], keys: Iterable[tuple[str, int]], **options: Any
    ) -> list[Job]:
        words = " ".join(map(str, options.values()))
        return [
            (f"{kind} {name} {d} {words}".rstrip(), partial(work, name=name, width=d, **options))
            for name, d in keys
        ]

    dtypes = ("bfloat16", "float16", "float32")
    return [
        *((f"self-test {dtype}", partial(self_test, dtype=dtype)) for dtype in dtypes),
        ("ceilings", ceilings),
        *each("check", check, goals[:4]),
        *each("layer", layer, goals),
        ("check past 2**31", far),
        *each("tiles", tiles, goals[:4]),
        *each("layer", layer, (key for key in others if key not in goals)),
        *each("check", check, ((name, 768) for name in names), dtypes=FEW_TYPES, tokens=FEW),
        *each("layer", layer, goals, dtype="tf32"),
    ]


def self_test(rows: Rows, until: float, dtype: str) -> None:
    start, device = time.perf_counter(), torch.device(DEVICE, torch.cuda.current_device())
    faults = kernels().check.self_test(device, getattr(torch, dtype))
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
                products = Layer(structure, n, kind, DEVICE).products()
                errors = {product.name: product.error() for product in products}
            rows.check(errors, structure=name, width=width, dtype=dtype, tokens=n)


def far(rows: Rows, until: float) -> None:
    """Activations of more than 2**31 elements: the last tokens, and a gradient that ends with
    them."""
    width, tokens, last = 1024, FAR_TOKENS, 333
    whole = Layer(BTT().structure(width, width), tokens, torch.bfloat16, DEVICE)
    whole.dy[:-last] = 0
    y, dx, gradients = whole.forward_backward()
    part = Layer(whole.structure, last, torch.bfloat16, DEVICE)
    part.x, part.dy, part.cores = whole.x[-last:], whole.dy[-last:], whole.cores
    found = (y[-last:], dx[-last:], gradients)
    with mock.patch.object(part, "forward_backward", return_value=found):
        errors = {"past 2**31 elements": part.error()}
    rows.check(errors, structure="BTT r=1", width=width, dtype="bfloat16", tokens=tokens)


def ceilings(rows: Rows, until: float) -> None:
    for dtype in ("bfloat16", "tf32"):
        with precision(dtype) as kind:
            found = CEILINGS[dtype] = timing.ceilings(DEVICE, kind)
        show = f"{dtype}: {found.rate / 1e12:.0f} TFLOP/s, {found.bandwidth / 1e12:.2f} TB/s"
        rows.add("ceilings", show, dtype=dtype, **vars(found))


def layer(rows: Rows, until: float, name: str, width: int, dtype: str = "bfloat16") -> None:
    """Forward and backward of nn.Linear, of `StructuredLinear` and of the stages; then each product
    alone."""
    family = families(width)[name]
    with precision(dtype) as kind:
        stages = Layer(family.structure(width, width), TOKENS, kind, DEVICE)
        if not kernels().stages.supported(stages.program):
            raise NotImplementedError(f"{name}: an index of more than two axes")
        products = {product.name: product for product in stages.products()}
        ends = stages.x.detach().requires_grad_(), stages.dy
        options = {"bias": False, "device": DEVICE, "dtype": kind}
        linear = nn.Linear(width, width, **options)
        module = StructuredLinear(width, width, family, **options)
        dense = Dense().structure(width, width), linear, [linear.weight]
        own = module.structure, module, list(module.cores)
        modules = {
            "dense": Variant("dense", "nn.Linear", *dense, *ends),
            "layer": Variant(name, "auto", *own, *ends),
        }
        calls = kernels().gemm._plan.cache_info()
        modules["layer"].work()
        used = sum(kernels().gemm._plan.cache_info()[:2]) > sum(calls[:2])
        works = {variant: module.work for variant, module in modules.items()}
        works["stages"] = stages.forward_backward
        try:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                stages.forward_backward()
            works["graph"] = graph.replay
        except Exception as failure:  # then without
            rows.fail(f"graph {name} {width}", failure)
        errors = {n: each.error for n, each in (modules | products | {"stages": stages}).items()}
        heat = Heat(DEVICE, ROUNDS, until)
        times = race(works, heat, last="dense again", errors=errors, tolerance=TOLERANCE[dtype])
        limit = CEILINGS.get(dtype, UNKNOWN)
        bound = limit.bound(stages.structure, TOKENS, kind.itemsize, backward=True)
        content = {"structure": name, "width": width, "dtype": dtype}
        for variant, samples in times.seconds.items():
            took, speed = median(samples), times.speed(variant)["median"]
            rows.add(
                "layer",
                f"{name} {width} {dtype} {variant}: {1e6 * took:.0f} us, {speed:.2f}x, "
                f"{bound / took:.0%} of bound",
                **content, tokens=TOKENS, variant=variant, errors=times.errors,
                seconds=timing.spread(samples), speed=speed, bound=bound, share=bound / took,
                layer_uses_triton=used,
            )  # fmt: skip
        heat = Heat(DEVICE, (3, 9), min(until, time.perf_counter() + 5))
        times = race({n: product.run for n, product in products.items()}, heat)
        for n, product in products.items():
            rows.product("product", product, times.seconds[n], **content)


def tiles(rows: Rows, until: float, name: str, width: int) -> None:
    """Other tiles than the table's for every product: what the table should say on this device."""
    stages = Layer(families(width)[name].structure(width, width), TOKENS, torch.bfloat16, DEVICE)
    content = {"structure": name, "width": width, "dtype": "bfloat16"}
    for product in stages.products():
        m, n = prod(product.out.shape[2:4]), prod(product.out.shape[4:])
        k = prod(product.a.shape[2:4] if product.weight else product.a.shape[4:])
        gpu = kernels().gemm.gpu_of(product.a.device)
        table = kernels().gemm.tile_for(m, n, k, gpu, "half", weight=product.weight)
        changes = (
            {"m": 64}, {"m": 256}, {"n": max(16, table.n // 2)}, {"n": 256}, {"k": 128},
            {"warps": 12 - table.warps}, {"stages": 2}, {"stages": 4},
        )  # fmt: skip
        works: dict[Any, Callable[[], None]] = {}
        for tile in dict.fromkeys([table, *(table._replace(**change) for change in changes)]):
            if time.perf_counter() > until:
                return
            try:
                product.run(tile=tile)
                works[tile] = partial(product.run, tile=tile)
            except Exception as failure:  # too much shared memory, for one
                torch.cuda.synchronize()
                rows.fail(f"tile of {product.name}", failure, tile=tuple(tile), **content)
        for tile, seconds in race(works, Heat(DEVICE, (3, 7), until)).seconds.items():
            rows.product("tile", product, seconds, **content, tile=tuple(tile))


def goals_table(rows: Rows) -> Table:
    """Reached or not, by `StructuredLinear`, by the stages, and by the stages in a CUDA graph."""
    names = ("structure", "width", "variant", "dtype")
    found = {tuple(row[name] for name in names): row for row in rows.read("layer")}

    def cell(name: str, width: int, variant: str) -> str:
        if (row := found.get((name, width, variant, "bfloat16"))) is None:
            return "not measured"
        reached = [row["speed"] >= GOALS[name, width], row["share"] >= SHARE]
        speed, share = ("reached" if each else "NOT reached" for each in reached)
        return f"{row['speed']:.2f}x {speed}, {row['share']:.0%} {share}"

    ways = {"StructuredLinear": "layer", "stages": "stages", "in a CUDA graph": "graph"}
    lines = [
        {"goal": f"{name} at {width}", ">=": f"{least}x, {SHARE:.0%}"}
        | {title: cell(name, width, variant) for title, variant in ways.items()}
        for (name, width), least in sorted(GOALS.items())
    ]
    what = f"forward + backward, bfloat16, {TOKENS} tokens"
    return report.grid(f"{what}: speed against nn.Linear; share of the strided bound", lines)


def measure(options: argparse.Namespace, started: float) -> None:
    """Each job in turn; after an error that takes the GPU's context with it, the rest in a new
    process."""
    import triton

    rows = Rows(options.out / "gpu.jsonl", fresh=options.start == 0)
    if options.start == 0:
        rows.add("environment", **record.environment(), triton=triton.__version__)
    else:
        ceilings(rows, nan)
    todo = jobs(options.widths, options.structures)
    for number, (title, job) in enumerate(todo[options.start :], options.start):
        left = options.budget - (time.perf_counter() - started)
        if left < 0:
            names = [name for name, _ in todo[number:]]
            rows.add("stopped", f"by the budget, before: {title}", jobs=names)
            break
        try:
            job(rows, time.perf_counter() + min(left, JOB_SECONDS))
        except Exception as failure:
            rows.fail(title, failure, trace=traceback.format_exc())
            try:
                torch.cuda.synchronize()
            except Exception:  # nothing on this device works any more
                own = ["--out", str(options.out), "--budget", str(left), "--start", str(number + 1)]
                own += ["--widths", *map(str, options.widths), "--structures", *options.structures]
                os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *own])
        torch.cuda.empty_cache()
    Console(width=170).print(goals_table(rows))


# ---- without a GPU -------------------------------------------------------------------------------


class MadeError(Exception):
    """The models of an example are made; nothing is trained."""


@dataclass(frozen=True)
class Pointer:
    """A tensor as a compiler sees it."""

    dtype: torch.dtype
    offset: int  #: bytes from the start of its memory, which is aligned

    def data_ptr(self) -> int:
        return self.offset


class Collector:
    """Stands for the kernel: keeps every specialisation that is asked for, once, and launches
    nothing."""

    def __init__(self, kernel: Any) -> None:
        self.binder = kernel.device_caches[0][-1]
        self.source = ""
        self.found: dict[str, Launch] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def keep(*operands: Any, **options: Any) -> None:
            arguments = [
                Pointer(each.dtype, each.storage_offset() * each.element_size())
                if isinstance(each, Tensor)
                else each
                for each in operands
            ]
            _, specialisation, other = self.binder(*arguments, **options)
            self.found.setdefault(f"{specialisation} {other}", (self.source, arguments, options))

        return keep


def target(arch: int) -> None:
    """Let Triton compile for `sm_{arch}`, on a machine that has no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = GPUTarget("cuda", arch, 32)
    functions = {"target": lambda: found, "device": lambda: 0, "stream": lambda device: 0}
    driver.set_active(
        SimpleNamespace(**{f"get_current_{name}": each for name, each in functions.items()})
    )


def collect(options: argparse.Namespace, arch: int) -> list[Launch]:
    """Every specialisation that the self-test, the tests' and the examples' layers and this program
    would use on a GPU of that architecture, found on fake tensors.

    They are fake tensors of a CPU: a PyTorch without CUDA cannot slice those of a GPU.
    """
    gemm, check = kernels().gemm, kernels().check
    target(arch)
    collector = Collector(gemm._product)
    fakes = mock.patch.multiple(gemm, _product=collector, gpu_of=lambda device: GPUS[arch])
    no_values = mock.patch.object(check, "_faults", lambda name, call, _, out, __: call(out) or [])
    layers = [*smallest(), *own_layers(options), *(example_layers() if options.all else ())]
    with fakes, no_values, FakeTensorMode():
        for dtype in options.dtypes:
            collector.source = f"self-test {dtype}"
            with precision(dtype) as kind:
                check.self_test(torch.device("cpu"), kind)
        for structure, dtype, tokens, source in layers:
            if dtype in options.dtypes and kernels().stages.supported(structure.program.numbers):
                collector.source = f"{source} {dtype} {tokens} tokens"
                with precision(dtype) as kind:
                    Layer(structure, tokens, kind, "cpu").forward_backward()
    return list(collector.found.values())


def smallest() -> Iterator[Sample]:
    for family, d_in, d_out in SMALL:
        for dtype in ("float32", "float16"):
            yield family.structure(d_in, d_out), dtype, 19, f"test {family} {d_in} {d_out}"


def own_layers(options: argparse.Namespace) -> Iterator[Sample]:
    """The layers of the jobs."""
    for _, job in jobs(options.widths, options.structures):
        if job is far:
            yield BTT().structure(1024, 1024), "bfloat16", FAR_TOKENS, "far"
        if not (isinstance(job, partial) and "name" in job.keywords):
            continue
        name, width = job.keywords["name"], job.keywords["width"]
        try:
            structure = families(width)[name].structure(width, width)
        except ValueError:  # this width has no such layer
            continue
        settings = [(job.keywords.get("dtype", "bfloat16"), TOKENS)]
        if job.func is check:
            dtypes, sizes = (
                job.keywords.get("dtypes", TOLERANCE),
                job.keywords.get("tokens", CHECKED),
            )
            settings = [(dtype, tokens) for dtype in dtypes for tokens in sizes]
        for dtype, tokens in settings:
            yield structure, dtype, tokens, f"{name} {width}"


def example_layers() -> Iterator[Sample]:
    """The layers of the models that the training examples make, by default and with --smoke, in a
    training step and held out."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    compare = import_module("compare")
    found = dict[tuple[Structure, int], None]()

    def note(program: Any, cores: Any, x: Tensor, *rest: Any) -> Tensor:
        structure = by_program[program.numbers]
        found[structure, x.numel() // program.in_features] = None
        return x.new_empty(*x.shape[:-1], program.out_features)

    for program in ("train_gpt", "train_vit", "train_mlp_lm"):
        for argv in ([], ["--smoke"]):
            with (
                mock.patch.object(compare, "train_all", side_effect=MadeError) as made,
                suppress(MadeError),
            ):
                import_module(program).main(argv)
            task, runs = made.call_args.args[:2]
            for run in runs:
                model = compare.build(task, run.width, run.structure, 0, "meta")
                layers = [each for each in model.modules() if isinstance(each, StructuredLinear)]
                by_program = {each.structure.program.numbers: each.structure for each in layers}
                with mock.patch("structlin._product.define", note), torch.no_grad():
                    for inputs, _ in (task.batch(0), *task.heldout[:1]):
                        model(inputs.to("meta"))
    for structure, tokens in found:
        yield structure, "float32", tokens, "example"


def machine_code(compiled: Any) -> dict[str, Any]:
    """Registers, spills, shared memory and instructions of interest, from Triton's own
    disassembler."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        show = partial(subprocess.run, capture_output=True, text=True, check=True)
        usage = show([tools / "cuobjdump", "--dump-resource-usage", file.name]).stdout
        code = show([tools / "nvdisasm", "-c", file.name]).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", code)
    counts = collections.Counter(name.split(".")[0] for name in names)
    moves = [name for name in names if name.split(".")[0] in ("LDG", "LDGSTS", "STG")]
    return {
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": compiled.metadata.shared,
        "tensor_products": sum(counts[name] for name in ("HGMMA", "HMMA", "UTCHMMA")),
        "moves_of_16_bytes": sum(name.endswith("128") for name in moves),
        "moves": len(moves),
        "instructions": len(names),
    }


def compile_one(launch: Launch) -> dict[str, Any]:
    """In a process whose target is set."""
    source, arguments, options = launch
    start, kernel = time.perf_counter(), kernels().gemm._product
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    tile = [options[f"block_{axis}"] for axis in "mnk"]
    tile += [options["num_warps"], options["num_stages"]]
    seconds = time.perf_counter() - start
    return {"layer": source, "tile": tile, **machine_code(compiled), "seconds": seconds}


def compile_all(options: argparse.Namespace, started: float) -> None:
    """Every specialisation of `collect`, and nothing else, for each architecture."""
    rows, context = Rows(None), multiprocessing.get_context("spawn")
    spilling = 0
    for arch in options.arch:
        launches = collect(options, arch)
        with context.Pool(options.workers, target, (arch,)) as pool:
            for row in pool.imap_unordered(compile_one, launches):
                rows.add("compiled", arch=arch, **row)
                spilling += row["spilled_bytes"] > 0 or row["shared_bytes"] > SHARED_BYTES[arch]
        seconds = time.perf_counter() - started
        print(
            f"{len(launches)} kernels compiled for sm_{arch} after {seconds:.0f} s, run on no GPU"
        )
    if spilling:
        raise SystemExit(f"{spilling} kernels spill registers or need too much shared memory")


def smoke() -> None:
    """A few tiny layers in the interpreter, which Triton chooses when the kernel is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("BTT r=1", "Monarch 4", "Kronecker"):
        check(Rows(None), nan, name, 16, ("float32", "float16"), tokens=(17,))


def main() -> None:
    names, started = list(families(64)), time.perf_counter()
    about = parser(__doc__, workers=2)
    add = about.add_argument
    add("--budget", type=float, default=540, help="seconds")
    add("--widths", type=int, nargs="+", default=[768, 1024, 2048, 4096, 8192])
    add("--structures", nargs="+", default=names, choices=names)
    add("--dtypes", nargs="+", default=[*TOLERANCE], choices=TOLERANCE, help="of --compile")
    add("--compile", action="store_true", help="ahead, every kernel once; needs no GPU")
    add("--arch", type=int, nargs="+", default=[90], choices=GPUS, help="of --compile")
    add("--all", action="store_true", help="of --compile: for the examples too")
    add("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = about.parse_args()
    if not (torch.cuda.is_available() or options.compile or options.smoke):
        print("no GPU: nothing to measure; --compile and --smoke need none")
    elif not find_spec("triton"):
        print("Triton is not installed: nothing to run")
    elif options.compile:
        compile_all(options, started)
    elif torch.cuda.is_available():
        if options.smoke:
            options.widths, options.structures, options.budget = [1024], ["BTT r=1"], 60
            if options.out == options.kept:
                options.out = Path(tempfile.mkdtemp())
        measure(options, started)
    else:
        smoke()


if __name__ == "__main__":
    main()
