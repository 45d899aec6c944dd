"""`structlin bench`: a dense layer and structured ones on this machine, in turn."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from .._families import BTT, Family, LowRank, Monarch
from .._kernels import engine
from .._linear import StructuredLinear
from .._report import Table, step
from .._timing import sample_in_turn
from .arguments import parse_structure

SECONDS = 4.0  # that all rounds take, about
ROUNDS = 5, 15  # at least, at most
SAMPLE_SECONDS = 2e-3  # at least: a call of few tokens is made again and again
DTYPES = ("float32", "bfloat16", "float16", "float64")


def run(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The table, and all of it as plain data."""
    widths = options.widths or [1024, 1024]
    if len(widths) != 2:
        raise ValueError(f"IN OUT: {' '.join(map(str, widths))} must be two widths, or none")
    on = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if on.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    place = {"device": on, "dtype": getattr(torch, options.dtype)}
    layers: list[nn.Module] = [nn.Linear(widths[0], widths[1], bias=False, **place)]
    layers += _build_layers(options.structures, widths, place)
    x, dy = (torch.randn(options.tokens, width, **place) for width in widths)
    calls = [_make_call(layer, x, dy, options.forward) for layer in layers]
    engine.load()  # builds it, so that no time has that in it
    warm = sum(map(min, sample_in_turn(calls, on, 1)))
    rounds = min(max(round(SECONDS / warm), ROUNDS[0]), ROUNDS[1])
    samples = sample_in_turn(calls, on, rounds, SAMPLE_SECONDS)
    rows = [_describe(*each, samples[0]) for each in zip(layers, samples, strict=True)]
    way = "forward" if options.forward else "forward and backward"
    sizes = {"in_features": widths[0], "out_features": widths[1], "tokens": options.tokens}
    about = {**sizes, "dtype": options.dtype, "passes": way, "rounds": rounds}
    about |= {"device": on.type, "threads": torch.get_num_threads()}
    return show(about, rows), {**about, "rows": rows}


def _build_layers(
    texts: Sequence[str] | None, widths: Sequence[int], place: dict[str, Any]
) -> list[StructuredLinear]:
    """Those of the command line; otherwise the usual ones that fit the widths."""
    if texts is not None:
        return [_build(parse_structure(text), widths, place) for text in texts]
    low = LowRank(rank=max(1, min(widths) // 8))
    found = []
    for family in (BTT(rank=1), BTT(rank=4), Monarch(blocks=16), low):
        try:
            found.append(_build(family, widths, place))
        except ValueError:  # these widths have no such structure
            continue
    return found


def _build(family: Family, widths: Sequence[int], place: dict[str, Any]) -> StructuredLinear:
    return StructuredLinear(widths[0], widths[1], family, bias=False, **place)


def _make_call(layer: nn.Module, x: Tensor, dy: Tensor, forward: bool) -> Callable[[], Any]:
    return partial(torch.no_grad()(layer), x) if forward else partial(step, layer, x, dy)


def _describe(layer: nn.Module, seconds: list[float], dense: list[float]) -> dict[str, Any]:
    ratios = [own / other for own, other in zip(seconds, dense, strict=True)]
    low, *_, high = quantiles(ratios, n=5, method="inclusive")
    params = sum(parameter.numel() for parameter in layer.parameters())
    name, flops, dense_flops = "dense", 2 * params, 2 * params
    if isinstance(layer, StructuredLinear):
        name, flops = layer.label, layer.structure.flops
        dense_flops = 2 * layer.in_features * layer.out_features
    return {
        "structure": name,
        "params": params,
        "flops": flops,
        "flops_to_dense": flops / dense_flops,
        "ms": 1e3 * median(seconds),
        "ms_to_dense": median(ratios),
        "ms_to_dense_p20": low,
        "ms_to_dense_p80": high,
    }


def show(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The rows under a line that says what was measured."""
    table = Table("structure", "params", "ms", "ms/dense", "20 to 80 %", "FLOPs/dense")
    for row in rows:
        spread = f"{row['ms_to_dense_p20']:.2f} to {row['ms_to_dense_p80']:.2f}"
        times = f"{row['ms']:.2f}", f"{row['ms_to_dense']:.2f}", spread
        table.row(row["structure"], f"{row['params']:,}", *times, f"{row['flops_to_dense']:.3f}")
    shape = f"{about['in_features']} -> {about['out_features']}"
    where = "GPU" if about["device"] == "cuda" else f"CPU threads: {about['threads']}"
    return (
        f"{shape}, {about['tokens']} tokens, {about['dtype']}, {about['passes']}, {where}; "
        f"median of {about['rounds']} rounds\n\n{table}"
    )
