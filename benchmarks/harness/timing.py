"""The instruments of `benchmarks.harness.race`: ceilings of the machine, interleaved samples and
their spread, memory, and the float64 oracle.

The variants of a benchmark take turns, so that a machine that slows down slows all of them.
"""

import ctypes
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from string import ascii_letters
from typing import Any, TypeVar

import torch
from torch import Tensor

from structlin import Structure
from structlin._structure.structure import SILU_RMS

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], Any]

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
SLEEP_CYCLES = 4_000_000  # of a GPU, 2 ms: a host enqueues a layer's kernels in 0.4 to 1 ms

# or the profiler, which measures memory on a CPU, logs every use
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


# ---- what the machine can do ---------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches on the three things that a layer is made of."""

    rate: float  #: FLOP/s of a large matrix product
    bandwidth: float  #: bytes/s of a large copy, read and write both counted
    call: float  #: seconds of the smallest product

    def bound(
        self,
        structure: Structure,
        tokens: int,
        itemsize: int,
        *,
        backward: bool,
        fused: bool = False,
    ) -> float:
        """Seconds that a layer takes at least: of every kernel, max(FLOPs / rate, bytes /
        bandwidth).

        A core is one product forward and two backward. Each is a kernel that reads its two operands
        and writes its result once, whatever their strides; so all three have the same FLOPs and the
        same bytes. `fused`: one kernel forward and one backward, which keep the middle in a cache
        and move only x, y, the cores and their gradients.

        >>> from structlin import BTT, Dense
        >>> h200 = Ceilings(rate=790e12, bandwidth=4.3e12, call=2e-6)
        >>> dense, btt = (family.structure(4096, 4096) for family in (Dense(), BTT()))
        >>> round(1e6 * h200.bound(dense, 16384, 2, backward=False))
        696
        >>> bounds = [h200.bound(btt, 16384, 2, backward=False, fused=f) for f in (False, True)]
        >>> [round(1e6 * bound) for bound in bounds]
        [125, 63]
        """
        flops = structure.flops
        params = structure.params
        if fused:
            ends = structure.in_features + structure.out_features
            seconds = self._kernel(flops, ends, params, tokens, itemsize)
            if backward:
                ends += structure.in_features
                seconds += self._kernel(2 * flops, ends, 2 * params, tokens, itemsize)
            return seconds

        seconds = 0.0
        width = structure.in_features
        for core in structure.cores:
            next_width = core.batch * core.repeat * core.fan_out
            seconds += self._kernel(core.flops, width + next_width, core.params, tokens, itemsize)
            width = next_width
        return 3 * seconds if backward else seconds

    def _kernel(
        self, flops: int, activations: int, params: int, tokens: int, itemsize: int
    ) -> float:
        """Seconds of a kernel that spends `flops` and moves `activations` numbers per token."""
        bytes_moved = itemsize * (tokens * activations + params)
        return max(tokens * flops / self.rate, bytes_moved / self.bandwidth)


def ceilings(device: str, dtype: torch.dtype, *, smoke: bool = False) -> Ceilings:
    """The best of ten of each, on random data: a square product, a copy larger than any cache, a 1
    x 1 product."""
    if smoke:
        n = 256
        elements = 2**20
    elif device == "cuda":
        n = 8192
        elements = 2**31
    else:
        n = 2048
        elements = 2**27
    left = torch.randn(n, n, device=device).to(dtype)
    right = torch.randn(n, n, device=device).to(dtype)
    source = torch.randint(2**31 - 1, (elements // 2,), device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    unit = torch.ones(1, 1, device=device, dtype=dtype)

    def least_seconds(work: Work) -> float:
        return min(seconds(work, device) for _ in range(10))

    product = least_seconds(lambda: left @ right)
    copy = least_seconds(lambda: target.copy_(source))
    call = least_seconds(lambda: unit @ unit)
    return Ceilings(rate=2 * n**3 / product, bandwidth=2 * source.nbytes / copy, call=call)


# ---- time ----------------------------------------------------------------------------------------


def wall(work: Work, device: str) -> float:
    """Seconds that a user waits for `work`."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def seconds(work: Work, device: str) -> float:
    """Wall-clock time on a CPU. On a GPU the time between two events on the stream, caches cold: a
    1 GiB write goes before, which evicts the L2 cache, and then the GPU sleeps, so that the host
    has enqueued a layer's kernels before the first one begins."""
    if device != "cuda":
        return wall(work, device)
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.empty(2**30, dtype=torch.int8, device=device).zero_()
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(
    variants: Mapping[Key, Work],
    clock: Callable[[Work], float],
    *,
    rounds: tuple[int, int],
    until: float = inf,
    end: float = inf,
) -> dict[Key, list[float]]:
    """A sample of every variant a round.

    The first and the last of `variants` keep their places, to show drift; those between are
    shuffled every round.

    Args:
        rounds: the least, made even after `until`, and the most.
        until, end: of `time.perf_counter`; after `end` nothing is begun but a first round.
    """
    least_rounds, most_rounds = rounds
    opening, *middle, closing = variants
    draw = random.Random(0)
    times: dict[Key, list[float]] = {key: [] for key in variants}
    for n in range(most_rounds):
        deadline = end if n < least_rounds else until
        if n > 0 and time.perf_counter() > deadline:
            break
        draw.shuffle(middle)
        for key in (opening, *middle, closing):
            times[key].append(clock(variants[key]))
    return times


def milliseconds(
    works: Mapping[Key, Work], *, rounds: tuple[int, int], seconds: float = inf
) -> dict[Key, dict[str, float]]:
    """The `spread` of each work's milliseconds on this CPU, in turns, and of how many "rounds"; one
    more warms up.

    Args:
        rounds: the least, and the most that are made before `seconds` are over.
    """
    least, most = rounds
    until = time.perf_counter() + seconds
    times = interleaved(
        works, lambda work: wall(work, "cpu"), rounds=(least + 1, most + 1), until=until
    )
    rows: dict[Key, dict[str, float]] = {}
    for key, (_, *samples) in times.items():
        rows[key] = {"rounds": len(samples)}
        rows[key] |= {name: 1e3 * value for name, value in spread(samples).items()}
    return rows


def spread(values: Sequence[float], low: int = 20) -> dict[str, float]:
    """Median, and the percentiles `low` and 100 - `low`.

    >>> spread([1.0, 2.0, 3.0, 4.0, 9.0])
    {'median': 3.0, 'p20': 1.8, 'p80': 5.0}
    """
    if len(values) > 1:
        percentiles = statistics.quantiles(values, n=100, method="inclusive")
    else:
        percentiles = [values[0]] * 99
    high = 100 - low
    return {
        "median": statistics.median(values),
        f"p{low}": percentiles[low - 1],
        f"p{high}": percentiles[high - 1],
    }


def ratio(first: Sequence[float], second: Sequence[float], low: int = 20) -> dict[str, float]:
    """`spread` of the first's samples over the second's, round by round.

    >>> ratio([2.0, 8.0], [1.0, 2.0])["median"]
    3.0
    """
    return spread([a / b for a, b in zip(first, second, strict=True)], low)


# ---- memory --------------------------------------------------------------------------------------


def keep_pages() -> bool:
    """Let glibc keep what this process frees, in place of returning it to the kernel; whether it is
    glibc.

    By default the kernel takes back every tensor of more than 32 MB and whatever lies at the end of
    the heap, and the next tensor pays for fresh, zeroed pages: about 1 us each, many times what a
    write to kept ones costs. Which of two variants pays is an accident of what was freed before.
    The first few tensors of a size are fresh all the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def peak_bytes(work: Work, device: str) -> int:
    """The most that `work` has allocated at one time, on top of what was there."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    options = {"profile_memory": True, "acc_events": True}  # or torch 2.11 warns that it drops some
    with torch.profiler.profile(activities=activities, **options) as profile:
        work()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    allocated = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def saved_bytes(work: Work, parameters: Sequence[Tensor]) -> int:
    """What the forward passes in `work` keep for the backward pass: distinct storages, those of
    `parameters` left out.

    >>> x, layer = torch.ones(4, 8), torch.nn.Linear(8, 8)
    >>> saved_bytes(lambda: layer(x), list(layer.parameters())) == x.nbytes
    True
    """
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()  # held until the count is done, so that no two storages share an address
    for parameter in parameters:
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    del result
    return sum(sizes.values())


# ---- results -------------------------------------------------------------------------------------


def oracle(structure: Structure, cores: Sequence[Tensor], x: Tensor) -> Tensor:
    """`y = W x` by one einsum over the whole expression, or by one for each core where something
    lies between them, in float64; nothing of `structlin._engine.product` is used.

    >>> from structlin import LowRank
    >>> v, u, x = torch.randn(1, 2, 6), torch.randn(1, 4, 2), torch.randn(5, 6)
    >>> y = oracle(LowRank(rank=2).structure(6, 4), [v, u], x)
    >>> y.dtype, torch.allclose(y.float(), x @ (u[0] @ v[0]).T, atol=1e-5)
    (torch.float64, True)
    """
    letters = dict(zip(structure.sizes, ascii_letters[1:], strict=False))

    def to_term(axes: Sequence[str]) -> str:
        return "".join(letters[axis] for axis in axes)

    def split(tensor: Tensor, axes: Sequence[str], *leading: int) -> Tensor:
        return tensor.double().reshape(*leading, *(structure.sizes[axis] for axis in axes))

    # y = core_n ... core_1 x as an einsum: each axis is a letter, the tokens are "a". x, h and y
    # are (tokens, *axes), a core is (*batch axes, *fan-out axes, *fan-in axes). An axis that y does
    # not have is summed over.
    terms = []
    operands = []
    for core, values in zip(structure.cores, cores, strict=True):
        axes = (*core.batch_axes, *core.fan_out_axes, *core.fan_in_axes)
        terms.append(to_term(axes))
        operands.append(split(values, axes))
    h = split(x, structure.inputs, len(x))
    h_term = "a" + to_term(structure.inputs)

    # Where SiLU lies between the cores, each core but the last is an einsum of its own.
    if structure.between is not None:
        for n, core in enumerate(structure.cores[:-1]):
            next_axes = (*core.batch_axes, *core.repeat_axes, *core.fan_out_axes)
            next_term = "a" + to_term(next_axes)
            h = torch.einsum(f"{h_term},{terms[n]}->{next_term}", h, operands[n])
            h = torch.nn.functional.silu(h) / SILU_RMS
            h_term = next_term
        terms = terms[-1:]
        operands = operands[-1:]

    y_term = "a" + to_term(structure.outputs)
    y = torch.einsum(f"{','.join((h_term, *terms))}->{y_term}", h, *operands)
    return y.reshape(len(x), structure.out_features)


@contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that torch makes uninitialised is NaN: what a kernel forgets to write shows."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference, relative; infinite where `result` is not finite."""
    if not torch.isfinite(result).all():
        return inf
    difference = torch.linalg.vector_norm(result.double() - expected)
    return (difference / torch.linalg.vector_norm(expected)).item()
