"""Compile every Triton kernel ahead for sm_80, sm_90 and sm_100: no GPU is needed, and none runs.

    python -m benchmarks.ahead                     # 10 minutes on 2 cores, results/ahead.json
    python -m benchmarks.ahead --arch 90 --widths 1024 --structures "BTT r=1"
    python -m benchmarks.ahead --smoke             # one structure for sm_90

Fake tensors go through the programs themselves: the self-test, the jobs of `benchmarks.gpu`, the
tests' layers among them, and a training step and the held-out batches of each training example.
Every specialisation that they launch is compiled once, in the tiles of the architecture's GPUs. A
kernel that spills registers, or needs more shared memory than there is, ends the program with an
error. tests/kernels/test_triton.py shows that the same programs launch nothing else when they
compute, and leave nothing out.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, product
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from benchmarks import gpu
from benchmarks.harness import timing
from benchmarks.harness.experiment import parser, result_path
from benchmarks.harness.race import Times
from benchmarks.harness.record import Row, save_json
from benchmarks.speed.variants import families
from structlin._engine import product as product_module
from structlin._engine.triton import launch as triton_op
from structlin._engine.triton import stages

# The GPUs whose tiles are taken for each architecture, and their shared memory
GPUS = {
    80: ("NVIDIA A100-SXM4-80GB",),
    90: ("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
    100: ("NVIDIA B200",),
}
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
EXAMPLES = ("train_gpt", "train_vit", "train_mlp_lm")
TENSOR_PRODUCTS = r"^\s*(?:@%p\d+ )?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)"
Launch = tuple[str, list[Any], dict[str, Any]]  # who needs it; the arguments
Key = tuple[Any, str]
Step = tuple[str, Callable[[], None]]  # its name, and what launches kernels


# ---- what is launched ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pointer:
    """A tensor as a compiler sees it."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class Launches:
    """Stands for the kernel: keeps every specialisation that is asked for, once.

    Args:
        kernel: Triton's, whose specialisations are meant.
        run: what computes; None: nothing does.
    """

    def __init__(self, kernel: Any, run: Any = None) -> None:
        self.binder, self.run = kernel.device_caches[0][-1], run
        self.source = ""
        self.found: dict[Key, Launch] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*operands: Any, **options: Any) -> None:
            arguments = [self._seen(each) for each in operands]
            _, specialisation, other = self.binder(*arguments, **options)
            key = tuple(specialisation), str(other)
            self.found.setdefault(key, (self.source, arguments, options))
            if self.run:
                self.run[grid](*operands, **options)

        return launch

    def _seen(self, operand: Any) -> Any:
        """Memory begins at a multiple of 16 bytes, as allocators give it."""
        if not isinstance(operand, Tensor):
            return operand
        if self.run:
            return Pointer(operand.dtype, operand.data_ptr())
        return Pointer(operand.dtype, operand.storage_offset() * operand.element_size())


def set_target(arch: int) -> None:
    """Let Triton compile for `sm_{arch}`, on a machine that has no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = GPUTarget("cuda", arch, 32)
    functions = {"target": lambda: found, "device": lambda: 0, "stream": lambda device: 0}
    driver.set_active(
        SimpleNamespace(**{f"get_current_{name}": each for name, each in functions.items()})
    )


@contextmanager
def as_on_a_gpu(launches: Launches, name: str) -> Iterator[None]:
    """Layers on CPU tensors take the way that they take on a GPU of this name.

    A PyTorch without CUDA cannot slice fake tensors of a GPU.
    """

    def available(x: Tensor, structure: Any) -> bool:
        return stages.supported(structure.program.numbers)

    with ExitStack() as stack:
        patch = lambda *args, **options: stack.enter_context(mock.patch.object(*args, **options))  # noqa: E731
        patch(gpu.kernels().gemm, "_product", launches)
        patch(gpu.kernels().gemm, "gpu_of", lambda device: name)
        patch(product_module.operators, "pays", lambda program, x: False)
        patch(triton_op, "available", available)
        # of fake tensors, too, products are called
        patch(triton_op, "nothing", gpu.kernels().gemm.block_gemm)
        yield


@contextmanager
def without_values() -> Iterator[None]:
    """Fake tensors have none, so every result passes, and every work is called once."""

    def race(works: Any, heat: Any, *, errors: Any = None, last: Any = None, **_: Any) -> Any:
        found = {key: error() for key, error in (errors or {}).items()}
        for work in works.values():
            work()
        return Times({key: [1.0] for key in (*works, *([last] if last else ()))}, found)

    def faults(name: str, call: Callable[..., None], buffer: Any, out: Tensor, _: Any) -> Any:
        call(out=out)
        return []

    with (
        mock.patch.object(gpu.kernels().check, "_faults", faults),
        mock.patch.object(timing, "relative_error", return_value=0.0),
        mock.patch.object(gpu.Variant, "error", lambda variant: variant.work() and 0.0),
        mock.patch.object(gpu, "race", race),
        FakeTensorMode(),
    ):
        yield


class Quiet(gpu.Rows):
    """Rows that nobody reads; a failure is one."""

    def __init__(self) -> None:
        super().__init__(None)

    def add(self, kind: str, show: str = "", **content: Any) -> None:
        pass

    def fail(self, job: str, failure: Exception, **content: Any) -> None:
        raise failure

    def read(self, kind: str) -> list[dict[str, Any]]:
        return []


def run_jobs(launches: Launches, todo: Iterable[gpu.Job]) -> None:
    """The jobs of `benchmarks.gpu`, but for those that launch nothing of ours, or only what the job
    of the same layer has launched."""
    for title, job in todo:
        if title.split()[0] in ("ceilings", "tuned", "compiled"):
            continue
        launches.source = title
        job(Quiet(), inf)


def steps_of_examples(
    names: Iterable[str] = EXAMPLES, ways: Iterable[list[str]] = ([], ["--smoke"])
) -> list[Step]:
    """For each structured model of a training example, what launches the kernels of a training step
    and of the held-out batches; `ways` are options of its command."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    loop, steps = import_module("train_gpt"), list[Step]()
    for name, argv in product(names, ways):
        with (
            warnings.catch_warnings(),
            mock.patch.object(loop, "train") as made,
            mock.patch.object(loop.structlin, "show_config", side_effect=InterruptedError),
            suppress(InterruptedError),
        ):
            warnings.simplefilter("ignore")  # a small layer grows
            import_module(name).main(argv)
        for call in made.call_args_list:
            model, _, batch, heldout, _, row = call.args
            if row["label"] == "dense":
                continue
            batches = [batch(0), *({len(part[0]): part for part in heldout}.values())]
            kinds = [[(part.shape, part.dtype) for part in each] for each in batches]
            title = f"{name} {row['label']}, width {row['width']}"
            steps.append((title, partial(step_of_example, model, kinds)))
    return steps


def step_of_example(model: nn.Module, kinds: list[list[Any]]) -> None:
    """A step on the first batch, of the given shapes and dtypes, and the others without one."""
    values = {
        name: torch.full(each.shape, 0.01, dtype=each.dtype, requires_grad=each.requires_grad)
        for name, each in chain(model.named_parameters(), model.named_buffers())
    }
    run = partial(functional_call, model, values)
    (inputs, targets), *heldout = [
        [torch.ones(shape, dtype=dtype) for shape, dtype in batch] for batch in kinds
    ]
    F.cross_entropy(run(inputs).flatten(0, -2), targets.flatten()).backward()
    with torch.no_grad():
        for inputs, _ in heldout:
            run(inputs)


def collect(arch: int, todo: Iterable[gpu.Job], steps: Iterable[Step] = ()) -> dict[Key, Launch]:
    """Every specialisation that these would use on the GPUs of this architecture."""
    set_target(arch)
    launches = Launches(gpu.kernels().gemm._product)
    for name in tables_of(arch).values():
        with as_on_a_gpu(launches, name), without_values():
            run_jobs(launches, todo)
            for source, step in steps:
                launches.source = source
                step()
    return launches.found


def tables_of(arch: int) -> dict[str, str]:
    """The tables of tiles of an architecture's GPUs, each once, and a GPU that has it."""
    tables = {json.dumps(gpu.kernels().gemm.table_of(name)): name for name in GPUS[arch]}
    return {table: tables[table] for table in sorted(tables)}


# ---- compiled ------------------------------------------------------------------------------------


def compile_one(launch: Launch) -> Row:
    """Registers, spills, shared memory and tensor core instructions of a kernel, in a process whose
    target is set."""
    import triton

    source, arguments, options = launch
    start, kernel = cpu_seconds(), gpu.kernels().gemm._product
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found
    tile = [options[f"block_{axis}"] for axis in "mnk"]
    return {
        "launch": source,
        "tile": [*tile, options["num_warps"], options["num_stages"]],
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": compiled.metadata.shared,
        "tensor_products": len(re.findall(TENSOR_PRODUCTS, compiled.asm["ptx"], re.MULTILINE)),
        "cpu_seconds": cpu_seconds() - start,
    }


def cpu_seconds() -> float:
    """What this process and those that it waited for have used."""
    return sum(os.times()[:4])


def compile_all(launches: Iterable[Launch], arch: int, workers: int) -> list[Row]:
    """A row for each, compiled anew, unless TRITON_CACHE_DIR has it."""
    start = multiprocessing.get_context("spawn").Pool
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": cache, **os.environ}),
        start(workers, set_target, (arch,)) as pool,
    ):
        return pool.map(compile_one, launches, chunksize=1)


def summarise(rows: Sequence[Row], arch: int) -> Row:
    """What is kept of an architecture: counts, and the kernels with a fault."""
    spilling = [row for row in rows if row["spilled_bytes"]]
    large = [row for row in rows if row["shared_bytes"] > SHARED_BYTES[arch]]
    return {
        "arch": f"sm_{arch}",
        "tiles": [name for name in GPUS[arch] if name in gpu.kernels().gemm.TILES] or "fallback",
        "kernels": len(rows),
        "of": dict(Counter(row["launch"].split()[0] for row in rows)),
        "spilling": spilling,
        "too_large": large,
        "most_registers": max(row["registers"] for row in rows),
        "most_shared_bytes": max(row["shared_bytes"] for row in rows),
        "with_tensor_cores": sum(row["tensor_products"] > 0 for row in rows),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows)),
    }


def run(options: argparse.Namespace) -> None:
    import triton

    started, result = time.perf_counter(), list[Row]()
    todo = gpu.jobs(options.widths, options.structures)
    steps = [] if options.smoke else steps_of_examples()
    found = dict[tuple[str, ...], dict[Key, Launch]]()  # by the tables of tiles
    for arch in options.arch:
        tables = tuple(tables_of(arch))
        if tables not in found:
            found[tables] = collect(arch, todo, steps)
        rows = compile_all(found[tables].values(), arch, options.workers)
        seconds = round(time.perf_counter() - started, 1)
        result.append(summarise(rows, arch) | {"seconds": seconds})  # since the start
        print(json.dumps(result[-1]), flush=True)
    if path := result_path(options, "ahead"):
        save_json(path, triton=triton.__version__, workers=options.workers, rows=result)
    if any(row["spilling"] or row["too_large"] for row in result):
        raise SystemExit("some kernels spill registers or need too much shared memory")


def main() -> None:
    about = parser(__doc__, workers=2)
    add, names = about.add_argument, list(families(64))
    add("--arch", type=int, nargs="+", default=list(GPUS), choices=GPUS)
    add("--widths", type=int, nargs="+", default=gpu.WIDTHS)
    add("--structures", nargs="+", default=names, choices=names)
    options = about.parse_args()
    if options.smoke:
        options.arch, options.widths, options.structures = [90], [1024], ["BTT r=1"]
    if find_spec("triton"):
        run(options)
    else:
        print("Triton is not installed: nothing to compile")


if __name__ == "__main__":
    main()
