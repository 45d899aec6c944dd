"""What a layer costs beside its products: few tokens, a forward pass, against the bare loop and
against nn.Linear.

    python -m benchmarks.speed.overhead           # two minutes; keeps results/overhead.json
    python -m benchmarks.speed.overhead --smoke   # seconds, keeps nothing

The loop is `_product.multiply` and the bias, with the layer's own cores: what the mathematics asks
for in PyTorch. Below it, how many of the library's own functions a call enters before the first
product, and how many Python functions `convert` calls to convert a model of one linear layer.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import timing
from benchmarks.harness.record import RESULTS, save_json
from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Family,
    Kronecker,
    LowRank,
    Monarch,
    StructuredLinear,
    convert,
)
from structlin._product import multiply
from structlin._report import Table

PACKAGE = os.path.join(os.path.dirname(structlin.__file__), "")
PRODUCTS = (
    "bmm",
    "mm",
    "linear",
    "structlin_multiply",
)  # what a call ends in, and our own operator


def families(width: int) -> dict[str, Family]:
    return {
        "BTT r=1": BTT(rank=1),
        "BTT r=2": BTT(rank=2),
        "BTT r=4": BTT(rank=4),
        "Monarch 16": Monarch(blocks=16),
        "low-rank d/8": LowRank(rank=width // 8),
        "block-diagonal 16": BlockDiagonal(blocks=16),
        "Kronecker": Kronecker(),
        "TT r=4": TT(rank=4),
    }


def count_calls(work: Callable[[], Any], *, until_product: bool = False) -> int:
    """Python functions that `work` enters; with `until_product` the library's own, before the first
    product."""
    calls, done = 0, False

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls, done
        if event == "call" and not done:
            code = frame.f_code
            own = code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")
            calls += own or not until_product
        elif event == "c_call" and until_product and getattr(argument, "__name__", "") in PRODUCTS:
            done = True

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_to_the_first_product(layer: StructuredLinear, tokens: int, *, training: bool) -> int:
    """The library's own functions that a call of `layer` enters before its first product.

    >>> layer = StructuredLinear(64, 64, BTT())
    >>> calls_to_the_first_product(layer, 16, training=True) <= 12
    True
    """
    x = torch.randn(tokens, layer.in_features)
    with torch.set_grad_enabled(training):
        layer(x)  # what is only done once
        return count_calls(lambda: layer(x), until_product=True)


def measure(width: int, tokens: int, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """A row for each family: microseconds of nn.Linear, the loop and the layer, and the ratios of
    the latter two."""
    rows = []
    dense, x = nn.Linear(width, width, dtype=dtype), torch.randn(tokens, width).to(dtype)
    for name, family in families(width).items():
        layer = StructuredLinear(width, width, family, dtype=dtype)
        cores, bias, program = list(layer.cores), layer.bias, layer.structure.program

        def loop(
            cores: list[nn.Parameter] = cores, bias: Tensor | None = bias, program: Any = program
        ) -> Tensor:
            y = multiply(program, cores, x)
            return y if bias is None else y + bias

        works: dict[str, Callable[[], Tensor]] = {
            "dense": lambda: dense(x),
            "loop": loop,
            "layer": partial(layer, x),
        }

        def clock(work: Callable[[], Any]) -> float:
            return timing.wall(lambda: [work() for _ in range(20)], "cpu") / 20

        with torch.no_grad():
            for work in works.values():
                clock(work)
            until = time.perf_counter() + seconds
            samples = timing.interleaved(works, clock, rounds=(5, 400), until=until)
        micro = {key: 1e6 * timing.spread(values)["median"] for key, values in samples.items()}
        ratios = {
            f"{key}_over_layer": timing.spread(
                [a / b for a, b in zip(samples[key], samples["layer"], strict=True)]
            )
            for key in ("dense", "loop")
        }
        rows.append(
            {
                "structure": name,
                "width": width,
                "tokens": tokens,
                "dtype": str(dtype)[6:],
                "us": micro,
                **ratios,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="seconds: does it run? Keeps nothing")
    options = parser.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    width, seconds = (64, 0.01) if options.smoke else (1024, 0.7)
    dtypes = [torch.float32] if options.smoke else [torch.float32, torch.bfloat16]
    rows = [
        row
        for dtype in dtypes
        for tokens in (1, 4, 16)
        for row in measure(width, tokens, dtype, seconds)
    ]
    table = Table(
        "structure",
        "dtype",
        "tokens",
        "dense us",
        "loop us",
        "layer us",
        "loop / layer",
        "dense / layer",
    )
    for row in rows:
        micro = (f"{row['us'][key]:.1f}" for key in ("dense", "loop", "layer"))
        ratios = (f"{row[f'{key}_over_layer']['median']:.2f}" for key in ("loop", "dense"))
        table.row(row["structure"], row["dtype"], f"{row['tokens']}", *micro, *ratios)
    print(
        f"# {width} -> {width}, forward with a bias, no gradients, "
        f"{torch.get_num_threads()} threads\n{table}"
    )

    layer = StructuredLinear(width, width, BTT())
    calls = {
        f"{tokens} tokens, {kind}": calls_to_the_first_product(
            layer, tokens, training=kind == "training"
        )
        for tokens in (16, 4096)
        for kind in ("training", "no gradients")
    }
    model, structure = nn.Sequential(nn.Linear(64, 64)), BTT()
    convert(nn.Sequential(nn.Linear(64, 64)), structure)
    converting = count_calls(lambda: convert(model, structure))
    print(
        f"# functions of ours before the first product: {calls}\n"
        f"# Python calls of convert, one layer: {converting}"
    )
    if not options.smoke:
        path = RESULTS / "overhead.json"
        save_json(path, threads=torch.get_num_threads(), rows=rows, calls=calls, convert=converting)


if __name__ == "__main__":
    main()
