"""Steps of benchmarks/gpu_run.sh beside the benchmarks: compile what they launch, and stop early.

    python -m benchmarks.gpu_steps collect out/gpu_run  # without a GPU: launches.json, in a minute
    python -m benchmarks.gpu_steps warm out/gpu_run     # with one: compiles them on all cores
    python -m benchmarks.gpu_steps gate FILE            # a gpu.jsonl: exit code 7, do not go on
    python -m benchmarks.gpu_steps --smoke              # collects one layer, compiles nothing

`warm` fills Triton's cache (TRITON_CACHE_DIR), kernels and their C launchers, so that nothing that
is timed waits for a compiler. The gate asks for a passed self-test in bfloat16, and a timed layer.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import ahead, gpu
from benchmarks.speed.variants import families

ARCH = 90  # an H100's and an H200's
FILE = "launches.json"
STOP = 7  # exit code of the gate


# ---- what is launched, as JSON -------------------------------------------------------------------


def plain(pointer: ahead.Pointer) -> dict[str, Any]:
    """As JSON; `live` is the way back of an argument."""
    return {"pointer": str(pointer.dtype).removeprefix("torch."), "address": pointer.address}


def live(value: Any) -> Any:
    if isinstance(value, dict):
        return ahead.Pointer(getattr(torch, value["pointer"]), value["address"])
    return tuple(map(live, value)) if isinstance(value, list) else value


def collect(folder: Path, widths: Sequence[int], names: Sequence[str]) -> int:
    """Write what the jobs of `benchmarks.gpu` launch; the number of kernels."""
    found = ahead.collect(ARCH, partial(gpu.jobs, widths, names)).values()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps([launch[1:] for launch in found], default=plain))
    return len(found)


# ---- compiled ------------------------------------------------------------------------------------


def start() -> None:
    """In a process of its own, whose driver knows the target alone."""
    torch.set_num_threads(1)
    ahead.set_target(ARCH)


def make(row: Any) -> str:
    """Compile a kernel and its launcher; what went wrong."""
    from triton.backends.nvidia.driver import CudaLauncher

    name, arguments, options = row
    try:
        kernel = ahead.kernel_of(name)
        made = kernel.run(*map(live, arguments), grid=(1,), warmup=True, **options)
        with suppress(AttributeError):  # Triton 3.9 has one launcher for all
            CudaLauncher(made.src, made.metadata)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def warm(folder: Path) -> str:
    rows, began = json.loads((folder / FILE).read_text()), time.perf_counter()
    workers = min(os.cpu_count() or 1, len(rows))
    with multiprocessing.get_context("spawn").Pool(workers, start) as pool:
        faults = [each for each in pool.map(make, rows, chunksize=4) if each]
    seconds = time.perf_counter() - began
    return f"warm: {len(rows)} kernels, {len(faults)} faults {faults[:3]}, {seconds:.0f} s"


# ---- the gate ------------------------------------------------------------------------------------


def gate(path: Path) -> bool:
    """Whether the run may go on; prints what is wrong."""
    rows = gpu.read_rows(path)
    faults = [row for row in rows if gpu.is_fault(row)]
    print(f"gate: {len(rows)} rows, {len(faults)} faults")
    for row in faults[:6]:
        print(str(row)[:300])
    tested = [row for row in rows if row["kind"] == "self-test" and row["dtype"] == "bfloat16"]
    timed = any(row["kind"] == "layer" and row["variant"] != "nn.Linear" for row in rows)
    return bool(tested) and not tested[0]["faults"] and timed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="?", choices=("collect", "warm", "gate"))
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(argv)
    if options.smoke:
        options.step, options.path = "collect", Path(tempfile.mkdtemp())
    if options.step is None or options.path is None:
        parser.error("a step and its path are needed")
    if options.step == "gate":
        sys.exit(0 if gate(options.path) else STOP)
    if not find_spec("triton"):
        print("Triton is not installed: nothing to compile")
    elif options.step == "collect":
        every = ([1024], ["BTT r=1"]) if options.smoke else (gpu.WIDTHS, list(families(64)))
        print(f"collected: {collect(options.path, *every)} kernels")
    else:
        print(warm(options.path))


if __name__ == "__main__":
    main()
