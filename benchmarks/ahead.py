"""Compile every Triton kernel ahead for sm_80, sm_90 and sm_100: no GPU is needed, and none runs.

    python -m benchmarks.ahead                     # 30 minutes on 2 cores, results/ahead.json
    python -m benchmarks.ahead --arch 90 --widths 1024 --structures "BTT r=1"
    python -m benchmarks.ahead --smoke             # one structure for sm_90

Fake tensors go through the programs themselves: the jobs of `benchmarks.gpu`, and a training step
and the held-out batches of each training example under autocast. Every specialisation that they
launch is compiled once, in the tiles of the architecture's GPUs. A kernel in such a tile that
spills registers, or needs more shared memory than there is, ends the program with an error; one in
a tile that is only tried does not. tests/benchmarks/test_ahead.py shows that the same programs
launch nothing else when they compute, and leave nothing out.

Beside it stands what the package's model predicts for an H100, in microseconds.
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
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call

from benchmarks import gpu
from benchmarks.harness import report, timing
from benchmarks.harness.experiment import parser, result_path
from benchmarks.harness.race import Times
from benchmarks.harness.record import RESULTS, Row, save_json
from benchmarks.speed.variants import families
from structlin import Dense
from structlin._engine import operators, triton
from structlin._engine.triton import check
from structlin._engine.triton import pair as pairs

GPUS = {  # of each architecture, whose tiles are taken
    80: [pairs.Card("NVIDIA A100-SXM4-80GB", 163 * 1024, 108)],
    90: [pairs.Card(name, 227 * 1024, 132) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")],
    100: [pairs.Card("NVIDIA B200", 227 * 1024, 148)],
}
NAMES = ("multiply", "find_gradients", "add_parts")  # of the kernels
AUTOCAST = torch.bfloat16  # of the examples' steps
PREDICTED = ("BTT r=1", "BTT r=4", "Monarch 16", "Monarch 64")
LIMITS = timing.Ceilings(rate=798e12, bandwidth=3.0e12, call=0.0)  # an H100's
SECOND_CACHE = 2  # its bandwidth, over that of memory
EXAMPLES = ("train_gpt", "train_vit", "train_mlp_lm")
TENSOR_PRODUCTS = r"^\s*(?:@%p\d+ )?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)"
Launch = tuple[str, str, list[Any], dict[str, Any]]  # who needs it; the kernel, its arguments
Key = tuple[Any, ...]
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
    """Keeps every specialisation of the kernels that is asked for, once.

    Args:
        run: the module whose kernels compute; None: nothing does.
    """

    def __init__(self, run: ModuleType | None = None) -> None:
        self.run, self.source = run, ""
        self.found: dict[Key, Launch] = {}
        self.binders = {name: kernel_of(name).device_caches[0][-1] for name in NAMES}

    def launch(self, name: str, grid: tuple[int, ...], *operands: Any, **options: Any) -> None:
        if self.run:
            getattr(self.run, name)[grid](*operands, **options)
        seen = [self._seen(each) for each in operands]
        tf32 = operands[0].dtype == torch.float32  # as on a GPU
        arguments = ["tf32" if each == "ieee" and tf32 else each for each in seen]
        _, specialisation, other = self.binders[name](*arguments, **options)
        key = name, tuple(specialisation), str(other)
        self.found.setdefault(key, (self.source, name, arguments, options))

    def _seen(self, operand: Any) -> Any:
        """Memory begins at a multiple of 16 bytes, as allocators give it."""
        if not isinstance(operand, Tensor):
            return operand
        begin = operand.storage_offset() * operand.element_size()
        return Pointer(operand.dtype, operand.data_ptr() if self.run else begin)


@dataclass(frozen=True)
class Kernel:
    """Stands for a kernel of this name."""

    name: str
    launches: Launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launches.launch, self.name, grid)


def kernel_of(name: str) -> Any:
    """Triton's kernel; its module needs Triton."""
    return getattr(import_module("structlin._engine.triton.kernels"), name)


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
def as_on_a_gpu(launches: Launches, card: pairs.Card) -> Iterator[None]:
    """Layers on CPU tensors take the way that they take on such a GPU, where W is never formed.

    A PyTorch without CUDA cannot slice fake tensors of a GPU.
    """
    by = SimpleNamespace(**{name: Kernel(name, launches) for name in NAMES})
    changes = [
        (triton, "kernels", by),
        (pairs, "card_of", lambda device: card),
        (pairs, "align", lambda x: 0),  # a fake tensor has no address
        (check, "_answers", {}),
        (operators, "pays", lambda program, x, *_: check.pays(program.numbers, x.dtype, x.device)),
        (operators, "available", lambda x: True),
        (operators, "_multiply", pairs.multiply),
        (operators, "_gradients", pairs.gradients),
    ]
    with ExitStack() as stack:
        pairs.launches_of.cache_clear()
        stack.callback(pairs.launches_of.cache_clear)
        for where, name, value in changes:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


@contextmanager
def without_values() -> Iterator[None]:
    """Fake tensors have none, so every result passes, and every work is called once. The self-test
    has values, which nobody needs."""
    on_values = unset_fake_temporarily()(check.self_test)
    expected = lambda pair, x, a, b, _: (x + a.sum() + b.sum()).sum().expand(len(x), pair.rows)  # noqa: E731

    def race(works: Any, heat: Any, *, last: Any = None, **_: Any) -> Any:
        for work in works.values():
            work()
        return Times({key: [1.0] for key in (*works, *([last] if last else ()))}, {})

    with (
        mock.patch.object(check, "self_test", lambda *layer: on_values(*layer) and []),
        mock.patch.object(check, "define", expected),
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


def run_jobs(launches: Launches, todo: Iterable[gpu.Job], steps: Iterable[Step] = ()) -> None:
    """The steps, and the jobs of `benchmarks.gpu`, but for those that launch nothing of ours, or
    only what the job of the same layer has launched. Tiles that are only tried come last."""
    for launches.source, step in steps:
        step()
    for launches.source, job in sorted(todo, key=lambda job: job[0].startswith("tiles")):
        if launches.source.split()[0] not in ("ceilings", "pays", "tuned", "compiled"):
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
    with torch.autocast("cpu", AUTOCAST):
        loss = F.cross_entropy(run(inputs).flatten(0, -2), targets.flatten())
        with torch.no_grad():
            for inputs, _ in heldout:
                run(inputs)
    loss.backward()


def collect(
    arch: int, jobs: Callable[[], Iterable[gpu.Job]], steps: Iterable[Step] = ()
) -> dict[Key, Launch]:
    """Every specialisation that these would use on the GPUs of this architecture."""
    set_target(arch)
    launches = Launches()
    tables = {str((pairs.TUNED.get(card.name), card.shared)): card for card in GPUS[arch]}
    for card in tables.values():  # that have other tiles
        with as_on_a_gpu(launches, card), without_values():
            run_jobs(launches, jobs(), steps)
    return launches.found


# ---- compiled ------------------------------------------------------------------------------------


def compile_one(launch: Launch) -> Row:
    """Registers, spills, shared memory and tensor core instructions of a kernel, in a process whose
    target is set."""
    import triton

    source, name, arguments, options = launch
    start, kernel = os.times(), kernel_of(name)
    named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    kinds = {"multiply": "gated" if named.get("z") else "product", "find_gradients": "gradients"}
    row = {"launch": source, "kind": kinds.get(name, name), "dtype": str(named["near"].dtype)[6:]}
    if name != "add_parts":
        tile = [*named["tile"], options["num_warps"], options["num_stages"]]
        row |= {"silu": named["f"] is not None, "tile": tile, "sizes": named["sizes"][:5]}
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found
    return row | {
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": compiled.metadata.shared,
        "tensor_products": len(re.findall(TENSOR_PRODUCTS, compiled.asm["ptx"], re.MULTILINE)),
        "cpu_seconds": sum(os.times()[:4]) - sum(start[:4]),  # with those that it waited for
    }


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
    """What is kept of an architecture: counts, and the kernels with a fault; and how many tiles
    have one that are only tried, which are then slower or refused."""
    most = min(card.shared for card in GPUS[arch])
    faults = {
        "spilling": [row for row in rows if row["spilled_bytes"]],
        "too_large": [row for row in rows if row["shared_bytes"] > most],
    }
    tried = [row for row in rows if row["launch"].startswith("tiles")]
    return {
        "arch": f"sm_{arch}",
        "tiles": [card.name for card in GPUS[arch] if card.name in pairs.TUNED] or "the model's",
        "kernels": len(rows),
        "of": dict(Counter(row["launch"].split()[0] for row in rows)),
        **{fault: [row for row in found if row not in tried] for fault, found in faults.items()},
        "tried": {fault: sum(row in tried for row in found) for fault, found in faults.items()},
        "most_registers": max(row["registers"] for row in rows),
        "most_shared_bytes": max(row["shared_bytes"] for row in rows),
        "on_cores": sum(row["kind"] == "add_parts" for row in rows),
        "with_tensor_cores": sum(row["tensor_products"] > 0 for row in rows),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows)),
    }


# ---- predicted -----------------------------------------------------------------------------------


def predict(name: str, width: int) -> Iterator[Row]:
    """Microseconds of forward and backward on an H100 in bfloat16, without and with SiLU.

    dense, two_kernels, bound: at least, of nn.Linear, of one kernel for each core, whose six
    products are each limited by FLOPs or bytes, and of one kernel each way. fused, plain, matrix:
    by the package's model, of its kernels, PyTorch's products, and W; None where no tile fits.
    """
    tokens, size = gpu.TOKENS, 2
    dense = LIMITS.bound(Dense().structure(width, width), tokens, size, backward=True)
    second = tokens / (SECOND_CACHE * LIMITS.bandwidth)  # of a byte of a token
    for title, structure in gpu.ways_of(name, width).items():
        kernels, bound = gpu.kernels_of(structure), partial(LIMITS.bound, structure, tokens)
        pair = pairs.pair_of(structure.program.numbers)
        if pair is None:
            continue
        row = {"dense": dense, "bound": bound(size, backward=True, fused=True)}
        row["plain"] = 3 * second * pairs.plain_time(pair, structure.program.between, size)
        if structure.between is None:  # where y is turned, it and its gradient are copied
            copied = 4 * tokens * width * size * (pair.y[0] < pair.y[1])
            row["two_kernels"] = bound(size, backward=True) + copied / LIMITS.bandwidth
            each, once = pairs.matrix_times(pair, size)
            row["matrix"] = second * (each + once / tokens)
        times = [pairs.time_of(k[0], k.tile, *k[1:3], GPUS[90][0].shared) for k in kernels.values()]
        row["fused"] = second * sum(times)
        shown = {key: round(1e6 * each) or None for key, each in row.items()}
        yield {"structure": title, "width": width, **shown}


def show_predictions() -> str:
    """A table of docs/speed.md: speeds over dense."""
    rows = json.loads((RESULTS / "ahead.json").read_text())["predicted"]
    keys = ("fused", "plain", "matrix", "bound", "two_kernels")
    lines = [
        [row["structure"], str(row["width"])]
        + [f"{row['dense'] / row[key]:.1f}x" if row.get(key) else "" for key in keys]
        for row in rows
        if row["width"] in (1024, 4096)
    ]
    titles = ["", "width", "one kernel", "PyTorch's products", "W formed", "bound of one kernel"]
    return report.table([*titles, "bound of a kernel for each core"], lines)


def run(options: argparse.Namespace) -> None:
    import triton

    started, result = time.perf_counter(), list[Row]()
    steps = [] if options.smoke else steps_of_examples()
    jobs = partial(gpu.jobs, options.widths, options.structures)
    layers = [layer[::-1] for layer in product(sorted(options.widths), PREDICTED)]
    predicted = [row for n, d in layers if gpu.exists(n, d, d) for row in predict(n, d)]
    print(*map(json.dumps, predicted), sep="\n")
    about = {"triton": triton.__version__, "workers": options.workers, "predicted": predicted}
    for arch in options.arch:
        rows = compile_all(collect(arch, jobs, steps).values(), arch, options.workers)
        seconds = round(time.perf_counter() - started, 1)
        result.append(summarise(rows, arch) | {"seconds": seconds})  # since the start
        print(json.dumps(result[-1]), flush=True)
        if path := result_path(options, "ahead"):
            save_json(path, **about, rows=result)
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
