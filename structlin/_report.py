"""Tables for people: `summary` of a model, and the small table that `convert.Plan` prints with."""

import re
from dataclasses import dataclass
from io import StringIO

from torch import nn

from ._linear import StructuredLinear
from ._model.parameters import parameters_of
from ._model.survey import linear_layers


class Table:
    """A table whose text does not depend on the terminal: text left, numbers right. Needs rich."""

    def __init__(self, *columns: str) -> None:
        self.columns, self.rows = columns, list[tuple[str, ...]]()

    def row(self, *cells: str) -> None:
        self.rows.append((*cells, *[""] * (len(self.columns) - len(cells))))

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for n, column in enumerate(self.columns):
            numbers = all(re.match(r"[\d.,]*%?$", row[n]) for row in self.rows)
            table.add_column(column, justify="right" if numbers else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        text = StringIO()
        Console(file=text, width=1000, color_system=None, markup=False, emoji=False).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%"


@dataclass(frozen=True)
class Row:
    """Equal layers of a model, with the numbers of all of them together."""

    name: str  #: numbers that differ between the layers replaced by `*`
    layers: int
    in_features: int
    out_features: int
    structure: str
    params: int  #: biases and gains left out
    flops: int  #: per token, 2 per multiply-add
    padding: tuple[int, int]  #: columns and rows that the structure has beyond each layer's
    #: "structured" or "dense": how a training step of so many tokens multiplies; "" if none were
    #: given
    way: str

    @property
    def dense_params(self) -> int:
        return self.layers * self.in_features * self.out_features

    @property
    def dense_flops(self) -> int:
        return 2 * self.dense_params


@dataclass(frozen=True)
class Summary:
    """The linear layers of a model against the same layers dense. Print it."""

    rows: tuple[Row, ...]
    other_params: int  #: parameters that are no matrix of a linear layer

    @property
    def params(self) -> int:
        """Of the linear layers' matrices."""
        return sum(row.params for row in self.rows)

    @property
    def flops(self) -> int:
        """Of the linear layers, per token, 2 per multiply-add."""
        return sum(row.flops for row in self.rows)

    def __str__(self) -> str:
        ways = ["runs as"] if any(row.way for row in self.rows) else []
        head = (
            "layer",
            "x",
            "in -> out",
            "structure",
            "params",
            "/dense",
            "FLOPs/token",
            "/dense",
            "padding",
        )
        table = Table(*head, *ways)
        for row in self.rows:
            shape, (columns, rows) = f"{row.in_features} -> {row.out_features}", row.padding
            waste = (
                f"+{percent(columns, row.in_features)} in, +{percent(rows, row.out_features)} out"
            )
            counts = f"{row.params:,}", percent(row.params, row.dense_params)
            flops = f"{row.flops:,}", percent(row.flops, row.dense_flops)
            last = (waste if columns + rows else "", *([row.way] if ways else []))
            table.row(row.name, f"{row.layers}", shape, row.structure, *counts, *flops, *last)
        layers = sum(row.layers for row in self.rows)
        dense = sum(row.dense_params for row in self.rows)
        counts = f"{self.params:,}", percent(self.params, dense)
        table.row(
            "linear layers",
            f"{layers}",
            "",
            "",
            *counts,
            f"{self.flops:,}",
            percent(self.flops, 2 * dense),
        )
        table.row("other parameters", "", "", "", f"{self.other_params:,}")
        return str(table)


def summary(model: nn.Module, *, tokens: int | None = None) -> Summary:
    """Layer, structure, parameters and FLOPs of every linear layer of `model`, against dense; equal
    layers in one row.

    Args:
        tokens: of one training step, over all leading dimensions; the table then shows whether each
            layer multiplies core by core ("structured") or forms its matrix ("dense"), see
            `StructuredLinear.mode`.

    Raises:
        ValueError: the model has no linear layer; `tokens` is negative.

    >>> from structlin import TT, convert
    >>> print(summary(convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), TT(rank=4))))
    layer              x   in -> out   structure    params   /dense   FLOPs/token   /dense   padding
    ────────────────────────────────────────────────────────────────────────────────────────────────
    *                  2   64 -> 64    TT(rank=4)    1,024    12.5%        16,384   100.0%
    linear layers      2                             1,024    12.5%        16,384   100.0%
    other parameters                                   128
    >>> summary(nn.Sequential(StructuredLinear(64, 64, TT(rank=16))), tokens=4096).rows[0].way
    'dense'
    """
    if tokens is not None and tokens < 0:
        raise ValueError(f"tokens={tokens} is negative")
    layers = linear_layers(model)
    if not layers:
        raise ValueError(f"model={type(model).__name__} has no linear layer")
    merged: dict[tuple[object, ...], Row] = {}
    matrices = set[nn.Parameter]()
    for layer in layers:
        module = layer.module
        own = (info for info in parameters_of(module) if info.weight.kind == "matrix")
        matrices.update(info.parameter for info in own)
        params = layer.in_features * layer.out_features
        flops, text, padding, way = 2 * params, "dense", (0, 0), ""
        if isinstance(module, StructuredLinear):
            params, flops = module.structure.params, module.structure.flops
            text, padding = module.label, module.padding
            way = "" if tokens is None else module.way(tokens)
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name)
        key = (pattern, layer.in_features, layer.out_features, text, way)
        before = merged.get(key)
        if before is not None:
            params, flops = params + before.params, flops + before.flops
        name, count = (pattern, before.layers + 1) if before is not None else (layer.name, 1)
        merged[key] = Row(
            name, count, layer.in_features, layer.out_features, text, params, flops, padding, way
        )
    rows = tuple(merged.values())
    others = (parameter for parameter in model.parameters() if parameter not in matrices)
    return Summary(rows, sum(parameter.numel() for parameter in others))
