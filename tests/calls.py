"""How many functions of the library a call enters before its first product."""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import structlin

PACKAGE = os.path.join(os.path.dirname(structlin.__file__), "")
PRODUCTS = ("bmm", "mm", "linear", "structlin_multiply")  # functions of C


def count_calls(work: Callable[[], Any]) -> int:
    """The library's own Python functions that `work` enters before the first product."""
    calls, done = 0, False

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls, done
        if event == "call" and not done:
            code = frame.f_code
            calls += code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")
        elif event == "c_call" and getattr(argument, "__name__", "") in PRODUCTS:
            done = True

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_to_the_first_product(
    layer: structlin.StructuredLinear, tokens: int, *, training: bool
) -> int:
    x = torch.randn(tokens, layer.in_features)
    with torch.set_grad_enabled(training):
        layer(x)  # what is only done once
        return count_calls(lambda: layer(x))
