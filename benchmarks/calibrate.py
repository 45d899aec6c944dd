"""Measures the constants of the cost model (`structlin/_kernels/cost.py`) on this machine; prints the table to paste.

python -m benchmarks.calibrate            # CPU, and CUDA if there is one; float32 and bfloat16
python -m benchmarks.calibrate --smoke    # tiny sizes, in seconds: that it runs, not what it says

rate      a square product, 2 tokens width^2 / seconds
permute   each token's features transposed as a square matrix, read and written
call      forward and backward of a tiny layer with one token / the number of calls that the model counts
rows, columns    forward and backward of BTT in that layout: bytes of its products / (seconds - all other terms)
"""

import argparse
import statistics
from collections.abc import Callable
from math import inf, isqrt

import torch

from benchmarks import timing
from structlin import BTT, apply
from structlin._kernels import cost, stages
from structlin._kernels.cost import Machine
from structlin._kernels.layout import Permutation
from structlin._kernels.layout import stages as stages_of


def seconds(work: Callable[[], object], device: str, rounds: int = 15) -> float:
    """Median of `rounds`, after two that do not count."""
    return statistics.median([timing.wall(work, device) for _ in range(rounds + 2)][2:])


def tiny_step(device: str, dtype: torch.dtype) -> Callable[[], object]:
    """Forward and backward of one token through two 4 x 4 blocks, twice: nothing but calls."""
    structure = BTT(rank=1).structure(16, 16)
    cores = [torch.randn(core.shape, device=device).to(dtype).requires_grad_() for core in structure.cores]
    x = torch.randn(1, 16, device=device).to(dtype).requires_grad_()

    def step() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(apply(structure, cores, x, mode="structured").sum(), [x, *cores])

    return step


@torch.no_grad()
def calibrate(device: str, dtype: torch.dtype, tokens: int, width: int) -> Machine:
    """The constants of one device and dtype; they replace those of the table in this process."""

    def gaussian(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    size, x, dy, w = dtype.itemsize, gaussian(tokens, width), gaussian(tokens, width), gaussian(width, width)
    rate = 2 * tokens * width**2 / seconds(lambda: x @ w.mT, device)
    call = seconds(tiny_step(device, dtype), device, rounds=200) / cost.calls(2, backward=True)

    structure = BTT(rank=1).structure(width, width)
    at = stages_of(structure)
    part = min(tokens, cost.chunk(at, device, size))
    swap = Permutation((isqrt(width), isqrt(width)), (1, 0))
    permute = 2 * size * part * width / seconds(lambda: swap.rows(x[:part]), device, rounds=100)

    cores = [gaussian(*core.shape) / core.fan_in**0.5 for core in structure.cores]
    streams = {}
    for columns in (False, True):

        def step(columns: bool = columns) -> None:
            _, middle = stages.forward(at, cores, x, None, columns=columns, keep=True, chunk=part)
            stages.backward(at, cores, x, middle, dy, columns=columns, chunk=part, wants=(True, True, False))

        cost.MACHINES[device, dtype] = Machine(rate, inf, inf, permute, call)
        rest = cost.structured(at, dtype, device, columns=columns, backward=True).at(tokens)
        cost.MACHINES[device, dtype] = Machine(inf, 1.0, 1.0, inf, 0.0)
        moved = cost.structured(at, dtype, device, columns=columns, backward=True).at(tokens)
        streams[columns] = moved / max(seconds(step, device) - rest, 0.1 * rest)  # the rest explains 90 % at most
    cost.MACHINES[device, dtype] = Machine(rate, streams[False], streams[True], permute, call)
    return cost.MACHINES[device, dtype]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
        print(f"# torch {torch.__version__}, {device}, {name}")
        for dtype in (torch.float32, torch.bfloat16):
            tokens, width = (64, 64) if options.smoke else (4096, 1024) if device == "cpu" else (16384, 4096)
            found = calibrate(device, dtype, tokens, width)
            constants = ", ".join(f"{name}={value:.2g}" for name, value in found._asdict().items())
            print(f'("{device}", {dtype}): Machine({constants}),')


if __name__ == "__main__":
    main()
