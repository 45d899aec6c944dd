"""Seconds of calls, measured in turn, so that what disturbs the machine disturbs all of them."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

ROUNDS = 9


def time_in_turn(
    calls: Sequence[Callable[[], Any]], device: torch.device, rounds: int = ROUNDS
) -> list[float]:
    """Median seconds of each call, on an accelerator with all of its work.

    Every round makes each call once; one round before the first is not counted.
    """
    timed = [[_time_call(call, device) for call in calls] for _ in range(1 + rounds)]
    return [median(seconds) for seconds in zip(*timed[1:], strict=True)]


def _time_call(call: Callable[[], Any], device: torch.device) -> float:
    _wait_for(device)
    start = perf_counter()
    call()
    _wait_for(device)
    return perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
