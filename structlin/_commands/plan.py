"""`structlin plan`: what `convert` or `compress` would do to a model, found without its weights."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlin

from .._families import label
from .._model.decide import Decision
from .._report import Table, hide_numbers, percent
from . import read
from .arguments import parse_structure


@dataclass(frozen=True)
class Line:
    """What happens to one linear layer."""

    name: str
    role: str
    in_features: int
    out_features: int
    structure: str | None  #: None: it stays dense
    reason: str  #: why it stays
    params: int
    dense_params: int
    flops: int  #: per token, 2 per multiply-add
    dense_flops: int
    bytes: int
    dense_bytes: int


def run(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The table, and all of it as plain data."""
    sizes_open = options.keep is not None
    text = options.structure or ("LowRank" if sizes_open else "BTT(rank=1)")
    structure = parse_structure(text, open_size=sizes_open)
    model = read.build_skeleton(options.model)
    chosen: dict[str, Any] = {"include": options.include, "exclude": options.exclude}
    if sizes_open:
        chosen |= {"keep": options.keep, "allocation": "error"}
        planned = structlin.plan_compression(model, structure, None, **chosen)
    else:
        planned = structlin.plan(model, structure, **chosen)
    lines = [_describe(decision) for decision in planned.decisions]
    whole = list(model.parameters())
    dense, stored = sum(p.numel() for p in whole), sum(p.nbytes for p in whole)
    totals = {
        "params": dense - sum(line.dense_params - line.params for line in lines),
        "dense_params": dense,
        "flops": sum(line.flops for line in lines),
        "dense_flops": sum(line.dense_flops for line in lines),
        "bytes": stored - sum(line.dense_bytes - line.bytes for line in lines),
        "dense_bytes": stored,
    }
    about = {"model": options.model, "class": type(model).__name__, "keep": options.keep}
    about["dtype"] = str(whole[0].dtype).removeprefix("torch.")
    return show(lines, totals, about), {
        **about,
        **totals,
        "layers": [asdict(line) for line in lines],
    }


def _describe(decision: Decision) -> Line:
    layer, new = decision.layer, decision.resolved
    dense = layer.in_features * layer.out_features
    size = layer.matrix.element_size()
    params, flops = (dense, 2 * dense) if new is None else (new.params, new.flops)
    chosen = None if new is None else decision.structure
    return Line(
        name=layer.name,
        role=layer.role,
        in_features=layer.in_features,
        out_features=layer.out_features,
        structure=None if chosen is None else label(chosen),
        reason=decision.reason,
        params=params,
        dense_params=dense,
        flops=flops,
        dense_flops=2 * dense,
        bytes=params * size,
        dense_bytes=dense * size,
    )


def show(lines: Sequence[Line], totals: dict[str, int], about: dict[str, Any]) -> str:
    """The lines, equal ones as one, and their sums."""
    counts = "params", "/dense", "FLOPs/token", "/dense", "bytes"
    table = Table("layer", "x", "role", "in -> out", "structure", *counts)
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        key = hide_numbers(line.name), line.role, line.in_features, line.out_features
        groups.setdefault((*key, line.structure, line.reason), []).append(line)
    for group in groups.values():
        first = group[0]
        name = first.name if len(group) == 1 else hide_numbers(first.name)
        shape = f"{first.in_features} -> {first.out_features}"
        text = first.structure or f"- ({first.reason})"
        numbers = ("params", "dense_params", "flops", "dense_flops", "bytes")
        sums = {number: sum(getattr(line, number) for line in group) for number in numbers}
        table.row(name, f"{len(group)}", first.role, shape, text, *_cells(sums))
    table.row("whole model", "", "", "", "", *_cells(totals))
    before, after = totals["dense_bytes"] / 1e6, totals["bytes"] / 1e6
    bytes_ = f"{before:,.1f} MB -> {after:,.1f} MB in {about['dtype']}"
    return f"{table}\n\n{about['class']}: {bytes_}"


def _cells(sums: dict[str, int]) -> list[str]:
    params, flops = sums["params"], sums["flops"]
    return [
        f"{params:,}",
        percent(params, sums["dense_params"]),
        f"{flops:,}",
        percent(flops, sums["dense_flops"]),
        f"{sums['bytes']:,}",
    ]
