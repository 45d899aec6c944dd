"""Seconds of calls, measured in turn, so that what disturbs the machine disturbs all of them."""

from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import torch

ROUNDS = 9
TICK = 1e-9  # seconds, for clocks that see no difference


def time_in_turn(
    calls: Sequence[Callable[[], Any]], device: torch.device, rounds: int = ROUNDS
) -> list[float]:
    """Median seconds of each call, see `sample_in_turn`."""
    return [median(seconds) for seconds in sample_in_turn(calls, device, rounds)]


def sample_in_turn(
    calls: Sequence[Callable[[], Any]],
    device: torch.device,
    rounds: int = ROUNDS,
    least: float = 0.0,
) -> list[list[float]]:
    """Seconds of each call in each round, on an accelerator with all of its work.

    Every round makes each call once; one round before the first is not counted.

    Args:
        least: seconds that a sample lasts at least: a shorter call is repeated back to back, and
            the sample is the mean.
    """
    first = [_time_call(call, device) for call in calls]
    counts = [max(1, ceil(least / max(seconds, TICK))) for seconds in first]
    timed = [
        [_time_call(call, device, count) for call, count in zip(calls, counts, strict=True)]
        for _ in range(rounds)
    ]
    return [list(seconds) for seconds in zip(*timed, strict=True)]


def _time_call(call: Callable[[], Any], device: torch.device, count: int = 1) -> float:
    _wait_for(device)
    start = perf_counter()
    for _ in range(count):
        call()
    _wait_for(device)
    return (perf_counter() - start) / count


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
