"""Are the Triton kernels right, and how fast? One command for a machine with a GPU; untested on GPU
so far.

    python -m benchmarks.gpu                         # 9 minutes at most, results/gpu.jsonl
    python -m benchmarks.gpu --budget 300 --out out
    python -m benchmarks.gpu --compile               # no GPU: compiles, reads the machine code
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
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import nan, prod, sqrt
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness import record, timing
from benchmarks.speed.variants import families
from structlin import BTT, Structure, StructuredLinear

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
SM_90 = 90
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 16384


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

    @property
    def flops(self) -> int:
        return 2 * self.a.numel() * self.b.shape[4] * self.b.shape[5]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.a, self.b, self.out))

    def run(self, **options: Any) -> None:
        from structlin._kernels.triton_gemm import block_gemm, block_gemm_weight

        (block_gemm_weight if self.weight else block_gemm)(self.a, self.b, self.out, **options)

    def error(self) -> float:
        """Of `run` on a poisoned output, relative to float64, in norm."""
        self.out.fill_(nan)
        self.run()
        equation = "yzmlnp,yzmlkj->yznpkj" if self.weight else "yzmlkj,yzkjnp->yzmlnp"
        expected = torch.einsum(equation, self.a.double(), self.b.double())
        return float((self.out.double() - expected).norm() / expected.norm())


class Layer:
    """A structured layer on random inputs, as its Triton stages."""

    def __init__(self, structure: Structure, tokens: int, dtype: torch.dtype, device: str) -> None:
        def data(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_()

        self.structure = structure
        self.x, self.dy = data(tokens, structure.in_features), data(tokens, structure.out_features)
        self.cores = [data(*core.shape).div_(sqrt(core.fan_in)) for core in structure.cores]

    def forward_backward(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        from structlin._kernels import triton_stages

        y, middle = triton_stages.forward(self.structure.program.numbers, self.cores, self.x)
        return y, *triton_stages.backward(
            self.structure.program.numbers, self.cores, self.x, middle, self.dy
        )

    def products(self) -> list[Product]:
        """All that `forward_backward` computes, in that order."""
        from structlin._kernels import triton_stages

        c = len(self.cores)
        names = [f"y{i + 1}" for i in range(c)] + [
            f"{kind}{i}" for i in range(c, 0, -1) for kind in ("dw", "dx")
        ]
        found: list[Product] = []

        def recorded(original: Callable[..., None]) -> Callable[..., None]:
            def call(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
                found.append(Product(names[len(found)], a, b, out))
                original(a, b, out, **options)

            return call

        with (
            mock.patch.object(triton_stages, "block_gemm", recorded(triton_stages.block_gemm)),
            mock.patch.object(
                triton_stages, "block_gemm_weight", recorded(triton_stages.block_gemm_weight)
            ),
        ):
            self.forward_backward()
        return found

    def error(self) -> float:
        """The largest of y, dx and the cores' gradients, relative to float64 autograd of one
        einsum."""
        x, *cores = (tensor.double().requires_grad_() for tensor in (self.x, *self.cores))
        y = timing.oracle(self.structure, cores, x)
        expected = [y.detach(), *torch.autograd.grad(y, [x, *cores], self.dy.double())]
        y, dx, gradients = self.forward_backward()
        return max(
            float((found.double() - wanted).norm() / wanted.norm())
            for found, wanted in zip((y, dx, *gradients), expected, strict=True)
        )


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

    def read(self, kind: str) -> list[dict[str, Any]]:
        assert self.path
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [row for row in rows if row["kind"] == kind]


def environment() -> dict[str, Any]:
    import triton

    with suppress(ImportError):  # the distribution's version: this may run from a checkout
        return {**record.environment(), "triton": triton.__version__}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"machine": gpu, "torch": torch.__version__, "triton": triton.__version__}


# ---- on a GPU ------------------------------------------------------------------------------------

# a job gets the time (`time.perf_counter`) at which to stop
Job = tuple[str, Callable[[Rows, float], None]]


def jobs(widths: list[int], names: list[str]) -> list[Job]:
    """By order of importance."""
    goals = [key for key in GOALS if key[0] in names and key[1] in widths]
    others = [(name, d) for d in (4096, 1024, 2048, 8192, 768) if d in widths for name in names]
    layers = [*goals, *(key for key in others if key not in goals)]
    return [
        *(
            (f"self-test {dtype}", partial(self_test, dtype=dtype))
            for dtype in ("bfloat16", "float16", "float32")
        ),
        ("ceilings", ceilings),
        *((f"check {name} {d}", partial(check, name=name, width=d)) for name, d in goals[:4]),
        *(
            (f"layer {name} {d}", partial(layer, name=name, width=d, dtype="bfloat16"))
            for name, d in goals
        ),
        ("check past 2**31", far),
        *((f"tiles {name} {d}", partial(tiles, name=name, width=d)) for name, d in goals[:4]),
        *(
            (f"layer {name} {d}", partial(layer, name=name, width=d, dtype="bfloat16"))
            for name, d in layers[len(goals) :]
        ),
        *((f"check {name} 768", partial(check, name=name, width=768)) for name in names),
        *(
            (f"layer {name} {d} tf32", partial(layer, name=name, width=d, dtype="tf32"))
            for name, d in goals
        ),
    ]


def self_test(rows: Rows, until: float, dtype: str) -> None:
    from structlin._kernels import triton_check

    start = time.perf_counter()
    faults = triton_check.self_test(
        torch.device(DEVICE, torch.cuda.current_device()), getattr(torch, dtype)
    )
    seconds = time.perf_counter() - start
    rows.add(
        "self-test",
        f"{dtype}: {faults or 'passed'}, {seconds:.1f} s",
        dtype=dtype,
        faults=faults,
        seconds=seconds,
    )


def check(
    rows: Rows, until: float, name: str, width: int, tokens: tuple[int, ...] = (1000, 17, 1)
) -> None:
    """Every product of a layer, ragged tokens, all types."""
    structure = families(width)[name].structure(width, width)
    for dtype in TOLERANCE if DEVICE == "cuda" else ("float32", "float16"):
        for n in tokens:
            with precision(dtype) as kind:
                errors = {
                    product.name: product.error()
                    for product in Layer(structure, n, kind, DEVICE).products()
                }
            passed = all(error <= TOLERANCE[dtype] for error in errors.values())
            worst = max(errors.values(), key=lambda error: (error != error, error))
            rows.add(
                "check",
                f"{'passed' if passed else 'FAILED'} {name} {width} {dtype} {n} tokens, "
                f"largest error {worst:.1e}",
                structure=name, width=width, dtype=dtype, tokens=n, passed=passed, errors=errors,
            )  # fmt: skip


def far(rows: Rows, until: float) -> None:
    """Activations of more than 2**31 elements: the last tokens, and a gradient that ends with
    them."""
    width, tokens, last = 1024, 2**21 + 77, 333
    whole = Layer(BTT().structure(width, width), tokens, torch.bfloat16, DEVICE)
    whole.dy[:-last] = 0
    y, dx, gradients = whole.forward_backward()
    part = Layer(whole.structure, last, torch.bfloat16, DEVICE)
    part.x, part.dy, part.cores = whole.x[-last:], whole.dy[-last:], whole.cores
    found = (y[-last:], dx[-last:], gradients)
    with mock.patch.object(part, "forward_backward", return_value=found):
        error = part.error()
    passed = error <= TOLERANCE["bfloat16"]
    show = f"{'passed' if passed else 'FAILED'} past 2**31 elements, error {error:.1e}"
    rows.add(
        "check", show, structure="BTT r=1", width=width, tokens=tokens, passed=passed, error=error
    )


def ceilings(rows: Rows, until: float) -> None:
    for dtype in ("bfloat16", "tf32"):
        with precision(dtype) as kind:
            found = timing.ceilings(DEVICE, kind)
        CEILINGS[dtype] = found
        show = f"{dtype}: {found.rate / 1e12:.0f} TFLOP/s, {found.bandwidth / 1e12:.2f} TB/s"
        rows.add("ceilings", show, dtype=dtype, **vars(found))


CEILINGS: dict[str, timing.Ceilings] = {}


def layer(rows: Rows, until: float, name: str, width: int, dtype: str) -> None:
    """Forward and backward of nn.Linear, of `StructuredLinear` and of the stages; then each product
    alone."""
    from structlin._kernels import triton_gemm, triton_stages

    family = families(width)[name]
    with precision(dtype) as kind:
        stages = Layer(family.structure(width, width), TOKENS, kind, DEVICE)
        if not triton_stages.supported(stages.structure.program.numbers):
            raise NotImplementedError(f"{name}: an index of more than two axes")
        products = stages.products()
        errors = {
            "layer": stages.error(),
            **{product.name: product.error() for product in products},
        }
        if not all(error <= TOLERANCE[dtype] for error in errors.values()):
            raise ArithmeticError(f"relative errors {errors}")
        x = stages.x.detach().requires_grad_()
        weight = (
            torch.randn(width, width, device=DEVICE, dtype=kind).div_(sqrt(width)).requires_grad_()
        )
        module = StructuredLinear(width, width, family, bias=False, device=DEVICE, dtype=kind)

        def dense() -> Any:
            return torch.autograd.grad(F.linear(x, weight), [x, weight], stages.dy)

        def structured() -> Any:
            return torch.autograd.grad(module(x), [x, *module.cores], stages.dy)

        calls = triton_gemm._plan.cache_info()
        structured()
        used = sum(triton_gemm._plan.cache_info()[:2]) > sum(calls[:2])
        variants: dict[str, Callable[[], Any]] = {
            "dense": dense,
            "layer": structured,
            "stages": stages.forward_backward,
            "dense again": dense,
        }
        try:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                stages.forward_backward()
            variants = {
                "dense": dense,
                "graph": graph.replay,
                **{k: v for k, v in variants.items() if k != "dense"},
            }
        except Exception as failure:  # then without
            rows.add(
                "error",
                f"CUDA graph of {name} {width}: {failure}",
                job=f"graph {name} {width}",
                error=str(failure),
            )
        for work in variants.values():
            work()
        clock = partial(timing.seconds, device=DEVICE)
        times = timing.interleaved(variants, clock, rounds=ROUNDS, until=until)
        reference = [(a + b) / 2 for a, b in zip(times["dense"], times["dense again"], strict=True)]
        bound = (
            CEILINGS[dtype].bound(stages.structure, TOKENS, kind.itemsize, backward=True)
            if CEILINGS
            else nan
        )
        for variant, values in times.items():
            took = median(values)
            speed = median([dense / value for dense, value in zip(reference, values, strict=True)])
            rows.add(
                "layer",
                f"{name} {width} {dtype} {variant}: {1e6 * took:.0f} us, {speed:.2f}x, "
                f"{bound / took:.0%} of bound",
                structure=name, width=width, dtype=dtype, tokens=TOKENS, variant=variant,
                errors=errors, seconds=timing.spread(values), speed=speed, bound=bound,
                share=bound / took, layer_uses_triton=used,
            )  # fmt: skip
        times = timing.interleaved(
            {product.name: product.run for product in products},
            clock,
            rounds=(3, 9),
            until=min(until, time.perf_counter() + 5),
        )
        for product in products:
            add_product(
                rows,
                "product",
                product,
                times[product.name],
                structure=name,
                width=width,
                dtype=dtype,
            )


def add_product(
    rows: Rows, kind: str, product: Product, values: list[float], **content: Any
) -> None:
    limit = CEILINGS.get(content["dtype"])
    bound = max(product.flops / limit.rate, product.bytes / limit.bandwidth) if limit else nan
    took, share = median(values), bound / median(values)
    words = " ".join(map(str, content.values()))
    show = f"{words} {product.name} {1e6 * took:.0f} us, {share:.0%} of its bound"
    rows.add(kind, show, product=product.name, seconds=took, bound=bound, share=share, **content)


def tiles(rows: Rows, until: float, name: str, width: int) -> None:
    """Other tiles than the table's for every product: what the table should say on this device."""
    from structlin._kernels.triton_gemm import tile_for

    stages = Layer(families(width)[name].structure(width, width), TOKENS, torch.bfloat16, DEVICE)
    clock = partial(timing.seconds, device=DEVICE)
    for product in stages.products():
        m, n = prod(product.out.shape[2:4]), prod(product.out.shape[4:])
        k = prod(product.a.shape[2:4] if product.weight else product.a.shape[4:])
        table = tile_for(m, min(n, 128) if product.weight else n, k, torch.bfloat16)
        others = [
            table._replace(m=64), table._replace(m=256), table._replace(n=max(16, table.n // 2)),
            table._replace(n=256), table._replace(k=128), table._replace(warps=12 - table.warps),
            table._replace(stages=2), table._replace(stages=4),
        ]  # fmt: skip
        for tile in dict.fromkeys([table, *others]):
            if time.perf_counter() > until:
                return
            content = {"structure": name, "width": width, "dtype": "bfloat16", "tile": tuple(tile)}
            try:
                product.run(tile=tile)
                values = [clock(partial(product.run, tile=tile)) for _ in range(7)]
                add_product(rows, "tile", product, values, **content)
            except Exception as failure:  # too much shared memory, for one
                torch.cuda.synchronize()
                rows.add(
                    "error",
                    f"{content} {product.name}: {failure}",
                    job="tiles",
                    error=str(failure),
                    **content,
                )


def goals_table(rows: Rows) -> Table:
    """Reached or not, by `StructuredLinear`, by the stages, and by the stages in a CUDA graph."""
    found = {
        (row["structure"], row["width"], row["variant"]): row
        for row in rows.read("layer")
        if row["dtype"] == "bfloat16"
    }
    table = Table(
        title="forward + backward, bfloat16, 16384 tokens: speed against nn.Linear; "
        "share of the strided bound"
    )
    for title in ("goal", ">=", "StructuredLinear", "stages", "in a CUDA graph"):
        table.add_column(title)
    for (name, width), least in sorted(GOALS.items()):
        cells = []
        for variant in ("layer", "stages", "graph"):
            row = found.get((name, width, variant))
            if row is None:
                cells.append("not measured")
                continue
            speed, share = row["speed"], row["share"]
            cells.append(
                f"{speed:.2f}x {'reached' if speed >= least else 'NOT reached'}, "
                f"{share:.0%} {'reached' if share >= SHARE else 'NOT reached'}"
            )
        table.add_row(f"{name} at {width}", f"{least}x, {SHARE:.0%}", *cells)
    return table


def measure(options: argparse.Namespace, started: float) -> None:
    """Each job in turn; after an error that takes the GPU's context with it, the rest in a new
    process."""
    rows = Rows(options.out / "gpu.jsonl", fresh=options.start == 0)
    if options.start == 0:
        rows.add("environment", **environment())
    else:
        ceilings(rows, nan)
    todo = jobs(options.widths, options.structures)
    for number, (title, job) in enumerate(todo):
        if number < options.start:
            continue
        left = options.budget - (time.perf_counter() - started)
        if left < 0:
            rows.add(
                "stopped",
                f"by the budget, before: {title}",
                jobs=[name for name, _ in todo[number:]],
            )
            break
        try:
            job(rows, time.perf_counter() + min(left, 30))
        except Exception as failure:
            rows.add(
                "error",
                f"{title}: {failure}",
                job=title,
                error=str(failure),
                trace=traceback.format_exc(),
            )
            try:
                torch.cuda.synchronize()
            except Exception:  # nothing on this device works any more
                own = ["--out", str(options.out), "--budget", str(left), "--start", str(number + 1)]
                own += ["--widths", *map(str, options.widths), "--structures", *options.structures]
                os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *own])
        torch.cuda.empty_cache()
    Console(width=140).print(goals_table(rows))


# ---- without a GPU -------------------------------------------------------------------------------


class Compiler:
    """Stands for the kernel: compiles it for sm_90 with the arguments of a launch, and launches
    nothing."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        class Target:
            def get_current_target(self) -> Any:
                return GPUTarget("cuda", SM_90, 32)

            def get_current_device(self) -> int:
                return 0

            def get_current_stream(self, device: int) -> int:
                return 0

        driver.set_active(Target())
        self.kernel = kernel
        self.found: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_for(*arguments: Any, **options: Any) -> None:
            self.found.append((self.kernel.warmup(*arguments, grid=grid, **options), options))

        return compile_for


def machine_code(compiled: Any) -> dict[str, Any]:
    """Registers, spills, shared memory and instructions of interest, from Triton's own
    disassembler."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [tools / tool, *flags, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, flags in (("cuobjdump", ["--dump-resource-usage"]), ("nvdisasm", ["-c"]))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", code)
    counts = collections.Counter(name.split(".")[0] for name in names)
    moves = [name for name in names if name.split(".")[0] in ("LDG", "LDGSTS", "STG")]
    return {
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": compiled.metadata.shared,
        **{name: counts[name] for name in ("HGMMA", "HMMA", "FFMA")},
        "moves_of_16_bytes": sum(name.endswith("128") for name in moves),
        "moves": len(moves),
        "instructions": len(names),
    }


def compile_all(options: argparse.Namespace) -> None:
    """Every product of every structure, width and type, at 16384 tokens."""
    from structlin._kernels import triton_gemm

    triton_gemm._product = compiler = Compiler(triton_gemm._product)
    rows = Rows(None)
    spilled = done = 0
    for width in options.widths:
        for name in options.structures:
            try:
                structure = families(width)[name].structure(width, width)
            except ValueError as misfit:
                rows.add("left out", f"{name} at {width}: {misfit}", structure=name, width=width)
                continue
            for dtype in options.dtypes:
                compiler.found.clear()
                with precision(dtype) as kind:
                    products = Layer(structure, TOKENS, kind, "meta").products()
                for product, (compiled, launch) in zip(products, compiler.found, strict=True):
                    tile = [
                        launch[key]
                        for key in ("block_m", "block_n", "block_k", "num_warps", "num_stages")
                    ]
                    code = machine_code(compiled)
                    rows.add(
                        "compiled",
                        structure=name,
                        width=width,
                        dtype=dtype,
                        product=product.name,
                        tile=tile,
                        **code,
                    )
                    done, spilled = done + 1, spilled + (code["spilled_bytes"] > 0)
    print(
        f"{done} kernels compiled for sm_{SM_90}, {spilled} of them spill registers; run on no GPU"
    )


def smoke() -> None:
    """A few tiny layers in the interpreter, which Triton chooses when the kernel is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    rows = Rows(None)
    for name in ("BTT r=1", "Monarch 4", "Kronecker"):
        check(rows, nan, name=name, width=16, tokens=(17,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=540, help="seconds")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1024, 2048, 4096, 8192])
    parser.add_argument(
        "--structures", nargs="+", default=list(families(64)), choices=list(families(64))
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE), help="of --compile"
    )
    parser.add_argument("--compile", action="store_true", help="for sm_90; needs no GPU")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny, in the interpreter, if there is no GPU"
    )
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    options, started = parser.parse_args(), time.perf_counter()
    if not (torch.cuda.is_available() or options.compile or options.smoke):
        print("no GPU: nothing to measure; --compile and --smoke need none")
        return
    try:
        import triton  # noqa: F401
    except ImportError:
        print("Triton is not installed: nothing to run")
        return
    if options.compile:
        compile_all(options)
    elif torch.cuda.is_available():
        if options.smoke:
            options.widths, options.structures, options.budget = [1024], ["BTT r=1"], 60
        measure(options, started)
    else:
        smoke()


if __name__ == "__main__":
    main()
