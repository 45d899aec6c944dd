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
        if fused:
            ends = structure.in_features + structure.out_features
            seconds = self._kernel(structure.flops, ends, structure.params, tokens, itemsize)
            if not backward:
                return seconds
            ends += structure.in_features
            return seconds + self._kernel(
                2 * structure.flops, ends, 2 * structure.params, tokens, itemsize
            )
        seconds, width = 0.0, structure.in_features
        for core in structure.cores:
            produced = core.batch * core.repeat * core.fan_out
            seconds += self._kernel(core.flops, width + produced, core.params, tokens, itemsize)
            width = produced
        return seconds * (3 if backward else 1)

    def _kernel(
        self, flops: int, activations: int, params: int, tokens: int, itemsize: int
    ) -> float:
        return max(
            tokens * flops / self.rate, itemsize * (tokens * activations + params) / self.bandwidth
        )


def ceilings(device: str, dtype: torch.dtype, *, smoke: bool = False) -> Ceilings:
    """The best of ten of each, on random data: a square product, a copy larger than any cache, a 1
    x 1 product."""
    n, elements = (256, 2**20) if smoke else (8192, 2**31) if device == "cuda" else (2048, 2**27)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.randint(2**31 - 1, (elements // 2,), device=device, dtype=torch.int32)
    target, one = torch.empty_like(source), torch.ones(1, 1, device=device, dtype=dtype)
    product, copy, call = (
        min(seconds(work, device) for _ in range(10))
        for work in (lambda: a @ b, lambda: target.copy_(source), lambda: one @ one)
    )
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
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
    (first, *middle, last), draw = variants, random.Random(0)
    times: dict[Key, list[float]] = {key: [] for key in variants}
    for done in range(rounds[1]):
        if done and time.perf_counter() > (end if done < rounds[0] else until):
            break
        draw.shuffle(middle)
        for key in (first, *middle, last):
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
    counts = {"rounds": (least + 1, most + 1), "until": until}
    times = interleaved(works, lambda work: wall(work, "cpu"), **counts)
    return {
        key: {"rounds": len(samples) - 1}
        | {name: 1e3 * value for name, value in spread(samples[1:]).items()}
        for key, samples in times.items()
    }


def spread(values: Sequence[float], low: int = 20) -> dict[str, float]:
    """Median, and the percentiles `low` and 100 - `low`.

    >>> spread([1.0, 2.0, 3.0, 4.0, 9.0])
    {'median': 3.0, 'p20': 1.8, 'p80': 5.0}
    """
    cuts = (
        statistics.quantiles(values, n=100, method="inclusive")
        if len(values) > 1
        else [values[0]] * 99
    )
    ends = {f"p{percent}": cuts[percent - 1] for percent in (low, 100 - low)}
    return {"median": statistics.median(values), **ends}


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
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
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
    letter = dict(zip(structure.sizes, ascii_letters[1:], strict=False))

    def term(axes: Sequence[str], prefix: str = "") -> str:
        return prefix + "".join(letter[axis] for axis in axes)

    def split(tensor: Tensor, axes: Sequence[str], *leading: int) -> Tensor:
        return tensor.double().reshape(*leading, *(structure.sizes[axis] for axis in axes))

    axes_of = [
        (*core.batch_axes, *core.fan_out_axes, *core.fan_in_axes) for core in structure.cores
    ]
    operands = [split(core, axes) for core, axes in zip(cores, axes_of, strict=True)]
    terms, h = [term(each) for each in axes_of], split(x, structure.inputs, len(x))
    made, outputs = term(structure.inputs, "a"), term(structure.outputs, "a")
    if structure.between is not None:
        for n, core in enumerate(structure.cores[:-1]):
            axes = term((*core.batch_axes, *core.repeat_axes, *core.fan_out_axes), "a")
            h = torch.einsum(f"{made},{terms[n]}->{axes}", h, operands[n])
            h, made = torch.nn.functional.silu(h) / SILU_RMS, axes
        terms, operands = terms[-1:], operands[-1:]
    y = torch.einsum(f"{','.join((made, *terms))}->{outputs}", h, *operands)
    return y.reshape(len(x), structure.out_features)


@contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that torch makes uninitialised is NaN: what a kernel forgets to write shows."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference, relative; infinite where `found` is not finite."""
    error = (
        torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted)
    ).item()
    return error if torch.isfinite(found).all() else inf
