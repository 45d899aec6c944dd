"""Tables for people: `summary` of a model, and the small table that `convert.Plan` prints with."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from .._layer.linear import StructuredLinear
from .._layer.quantized import QuantizedLinear
from .._model.linears import Layer, LooseMatrices, find_loose_matrices, linear_layers
from .._model.parameters import parameters_of
from .._structure.arguments import checked

ROUNDS = 9  # in which each layer is timed
NUMBER = r"(?<![^.])\d+(?![^.])"  # a part of a dotted name that is a number


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
        # in a notebook rich would show HTML and leave the text empty, but for the last option
        console = Console(
            file=text, width=1000, color_system=None, markup=False, emoji=False, force_jupyter=False
        )
        console.print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def hide_numbers(name: str) -> str:
    """A layer's name with `*` for each number, which equal layers of a model share.

    >>> hide_numbers("h.11.mlp.fc1")
    'h.*.mlp.fc1'
    """
    return re.sub(NUMBER, "*", name)


def name_group(names: Sequence[str], alike: Sequence[str]) -> str:
    """A short name for layers whose names differ in numbers alone.

    Args:
        names: of the layers.
        alike: of all layers of the model whose names are the same but for numbers, `names` too.
            Where `names` are not all of them, their numbers are given.

    >>> layers = [f"h.{n}.mlp.fc1" for n in range(12)]
    >>> name_group(layers, layers), name_group([*layers[:6], layers[9]], layers)
    ('h.*.mlp.fc1', 'h.{0-5,9}.mlp.fc1')
    """
    if len(names) == 1:
        return names[0]
    pattern = hide_numbers(names[0])
    if len(names) == len(alike):
        return pattern
    # one set of numbers for each `*` of the pattern
    chosen = [set(numbers) for numbers in zip(*map(_find_numbers, names), strict=True)]
    every = [set(numbers) for numbers in zip(*map(_find_numbers, alike), strict=True)]
    short = pattern
    for numbers, possible in zip(chosen, every, strict=True):
        text = "\0" if numbers == possible else _shorten(numbers)  # \0: `*` that stays
        short = short.replace("*", text, 1)
    return short.replace("\0", "*")


def _find_numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(NUMBER, name)]


def _shorten(numbers: Iterable[int]) -> str:
    """Numbers as text, three and more in sequence as a range: `{0-5,9}`; one alone: `9`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return texts[0] if texts == [str(runs[0][0])] else f"{{{','.join(texts)}}}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%"


@dataclass(frozen=True)
class Row:
    """Equal layers of a model, with the numbers of all of them together."""

    #: `*` for numbers that differ between the layers; `{0,3-5}` where layers with others differ
    name: str
    layers: int
    in_features: int
    out_features: int
    structure: str
    params: int  #: biases and gains left out
    flops: int  #: per token, 2 per multiply-add
    padding: tuple[int, int]  #: columns and rows that the structure has beyond each layer's
    bytes: int  #: of the parameters as they are stored, scales of int8 included
    seconds: float | None = None  #: of a forward and a backward pass, if it was measured
    dense_seconds: float | None = None  #: of the same layers dense, measured in turn
    names: tuple[str, ...] = ()  #: of the layers

    @property
    def dense_params(self) -> int:
        return self.layers * self.in_features * self.out_features


@dataclass(frozen=True)
class LooseRow:
    """Parameters that are alike, each of one or more matrices that no linear layer holds."""

    name: str  #: as of `Row`
    role: str  #: "experts" or "attention"
    matrices: int  #: in all of the parameters; 0: nobody knows how they lie
    size: str  #: inputs and outputs of each matrix, or the shape of the parameter
    params: int
    stepped_by: str  #: which optimizers step them, and how

    @property
    def count(self) -> str:
        """The cell for the number of matrices."""
        return f"{self.matrices}" if self.matrices else ""


@dataclass(frozen=True)
class Summary:
    """The linear layers of a model against the same layers dense. Print it."""

    rows: tuple[Row, ...]
    other_params: int  #: parameters that are no matrix of a linear layer
    loose: tuple[LooseRow, ...] = ()  #: those of them that are matrices, such as experts

    @property
    def params(self) -> int:
        """Parameters of the linear layers' matrices."""
        return sum(row.params for row in self.rows)

    @property
    def flops(self) -> int:
        """FLOPs of the linear layers per token, 2 per multiply-add."""
        return sum(row.flops for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of these parameters, scales of int8 included."""
        return sum(row.bytes for row in self.rows)

    @property
    def seconds(self) -> float | None:
        """Seconds of a forward and a backward pass of the linear layers, if they were measured."""
        return _add(row.seconds for row in self.rows)

    @property
    def dense_seconds(self) -> float | None:
        """Seconds of the same layers dense."""
        return _add(row.dense_seconds for row in self.rows)

    def __str__(self) -> str:
        times = ["ms", "dense ms"] if self.seconds is not None else []
        sizes = ["bytes"] if any(row.bytes != 4 * row.params for row in self.rows) else []
        pads = ["padding"] if any(sum(row.padding) for row in self.rows) else []
        counts = "params", "/dense", "FLOPs/token", "/dense"
        table = Table("layer", "x", "in -> out", "structure", *counts, *sizes, *times, *pads)
        for row in self.rows:
            columns, rows = row.padding
            wide, high = percent(columns, row.in_features), percent(rows, row.out_features)
            last = [f"+{wide} in, +{high} out"] if columns + rows else []
            first = row.name, f"{row.layers}", f"{row.in_features} -> {row.out_features}"
            cells = _cells(row, row.dense_params, show_bytes=bool(sizes))
            table.row(*first, row.structure, *cells, *last)
        layers = sum(row.layers for row in self.rows)
        dense = sum(row.dense_params for row in self.rows)
        cells = _cells(self, dense, show_bytes=bool(sizes))
        table.row("linear layers", f"{layers}", "", "", *cells)
        for loose in self.loose:
            what = f"{loose.role}: {loose.stepped_by}"
            table.row(loose.name, loose.count, loose.size, what, f"{loose.params:,}")
        others = self.other_params - sum(loose.params for loose in self.loose)
        table.row("other parameters", "", "", "", f"{others:,}")
        return str(table)


def _cells(part: Row | Summary, dense: int, *, show_bytes: bool) -> list[str]:
    """The cells from "params" to "dense ms"; `dense`: parameters of the same layers dense."""
    params = f"{part.params:,}", percent(part.params, dense)
    flops = f"{part.flops:,}", percent(part.flops, 2 * dense)
    sizes = [f"{part.bytes:,}"] if show_bytes else []
    times = [each for each in (part.seconds, part.dense_seconds) if each is not None]
    return [*params, *flops, *sizes, *(f"{1e3 * each:.2f}" for each in times)]


@checked
def summary(model: nn.Module, *, tokens: int | None = None) -> Summary:
    """Layer, structure, parameters and FLOPs of every linear layer of `model`, against dense.

    Equal layers are one row. Where layers whose names differ in numbers alone are not equal, a row
    gives its layers' numbers, as in `h.{0,3-5}.mlp.fc1`. A column "bytes" stands where parameters
    are not float32. Below the layers stand parameters of several matrices, such as the experts of a
    mixture: how many there are, their inputs and outputs, and which optimizers step them.

    Args:
        tokens: of a forward and a backward pass that is timed: the first layer of each row
            in turn with a dense one, medians of nine rounds, without optimizer. The times in the
            table are of all layers of a row, one after the other. None: nothing runs.

    Raises:
        ValueError: the model has no linear layer; `tokens` is not positive; a layer to be timed
            has no values (meta) or is sharded.

    >>> from structlin import LowRank, convert
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> print(summary(convert(model, LowRank(rank=8))))
    layer              x   in -> out   structure         params   /dense   FLOPs/token   /dense
    ───────────────────────────────────────────────────────────────────────────────────────────
    *                  2   64 -> 64    LowRank(rank=8)    2,048    25.0%         4,096    25.0%
    linear layers      2                                  2,048    25.0%         4,096    25.0%
    other parameters                                        128
    """
    layers = linear_layers(model)
    if not layers:
        raise ValueError(f"model={type(model).__name__} has no linear layer")
    merged: dict[tuple[object, ...], Row] = {}
    matrices = set[nn.Parameter]()
    for layer in layers:
        own = (info for info in parameters_of(layer.module) if info.weight.kind == "matrix")
        matrices.update(info.parameter for info in own)
        row = _describe(layer)
        key = (row.name, row.in_features, row.out_features, row.structure)
        if key in merged:
            merged[key] = _join(merged[key], row)
            continue
        seconds, dense = (None, None) if tokens is None else _time(layer, tokens)
        merged[key] = replace(row, seconds=seconds, dense_seconds=dense)
    alike = defaultdict[str, list[str]](list)
    for layer in layers:
        alike[hide_numbers(layer.name)].append(layer.name)
    rows = [replace(row, name=name_group(row.names, alike[row.name])) for row in merged.values()]
    others = (parameter for parameter in model.parameters() if parameter not in matrices)
    other_params = sum(parameter.numel() for parameter in others)
    return Summary(tuple(rows), other_params, tuple(group_loose_matrices(model)))


def group_loose_matrices(model: nn.Module) -> list[LooseRow]:
    """A row for parameters of matrices that no linear layer holds, alike ones in one row."""
    groups = defaultdict[tuple[object, ...], list[LooseMatrices]](list)
    alike = defaultdict[str, list[str]](list)
    for matrices in find_loose_matrices(model):
        pattern = hide_numbers(matrices.name)
        alike[pattern].append(matrices.name)
        groups[pattern, matrices.shape, matrices.size].append(matrices)
    rows = []
    for group in groups.values():
        first = group[0]
        name = name_group([matrices.name for matrices in group], alike[hide_numbers(first.name)])
        count = sum(matrices.count for matrices in group)
        params = len(group) * prod(first.shape)
        rows.append(LooseRow(name, first.role, count, first.size, params, first.stepped_by))
    return rows


def _describe(layer: Layer) -> Row:
    """A row of one layer alone, the numbers in its name replaced by `*`."""
    module = layer.module
    name = hide_numbers(layer.name)
    shape = layer.in_features, layer.out_features
    params = layer.in_features * layer.out_features
    names = (layer.name,)
    if not isinstance(module, StructuredLinear):
        stored = _count_bytes(module.weight)
        return Row(name, 1, *shape, "dense", params, 2 * params, (0, 0), stored, names=names)
    structure, kind = module.structure, module.label
    stored = sum(map(_count_bytes, module.cores))
    if isinstance(module, QuantizedLinear):
        kind, stored = f"{kind}, int8", stored + sum(map(_count_bytes, module.scales))
    counts = structure.params, structure.flops
    return Row(name, 1, *shape, kind, *counts, module.padding, stored, names=names)


def _count_bytes(tensor: Any) -> int:
    """The bytes of a tensor, and of the tensors that make one up, as of torchao's."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    return sum(_count_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def _join(row: Row, other: Row) -> Row:
    """The row with one layer more; as long as one of its layers takes, so long does the other."""
    count = row.layers + 1
    return replace(
        row,
        names=row.names + other.names,
        layers=count,
        params=row.params + other.params,
        flops=row.flops + other.flops,
        bytes=row.bytes + other.bytes,
        seconds=row.seconds and row.seconds / row.layers * count,
        dense_seconds=row.dense_seconds and row.dense_seconds / row.layers * count,
    )


def _time(layer: Layer, tokens: int) -> tuple[float, float]:
    """Seconds of a forward and a backward pass of the layer, and of the dense one; the gradients of
    the model's parameters stay as they are."""
    module = layer.module
    weight = next(module.parameters(), None)
    if weight is None or weight.is_meta or hasattr(weight, "full_tensor"):
        sharded = weight is not None and not weight.is_meta
        reason = "is sharded: gather it first" if sharded else "has no values (meta)"
        raise ValueError(f"tokens={tokens}: layer {layer.name!r} {reason}")
    device, dtype = weight.device, getattr(module, "compute_dtype", weight.dtype)
    random = torch.Generator(device).manual_seed(0)  # the user's random numbers stay
    shape = layer.in_features, layer.out_features
    x, dy = (
        torch.randn(tokens, width, generator=random, device=device, dtype=dtype) for width in shape
    )
    modules = [module]
    if isinstance(module, StructuredLinear):
        dense = nn.Linear(*shape, bias=module.bias is not None, device="meta", dtype=dtype)
        dense = dense.to_empty(device=device).requires_grad_(weight.requires_grad)
        for parameter in dense.parameters():
            nn.init.zeros_(parameter)  # numbers that nobody has written may be slow
        modules.append(dense)
    seconds = _time_in_turn([partial(_step, each, x, dy) for each in modules], device)
    return seconds[0], seconds[-1]


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    """A forward and a backward pass, which leaves the layer's gradients as they are."""
    x = x.detach().requires_grad_()
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        torch.autograd.grad(layer.forward(x), [x, *trained], dy)


def _time_in_turn(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Median seconds of each call, on an accelerator with all of its work.

    Every round makes each call once, so that what disturbs the machine disturbs all of them. One
    round before the first is not counted.
    """
    rounds = [[_time_call(call, device) for call in calls] for _ in range(1 + ROUNDS)]
    return [median(seconds) for seconds in zip(*rounds[1:], strict=True)]


def _time_call(call: Callable[[], object], device: torch.device) -> float:
    start = _read_clock(device)
    call()
    return _read_clock(device) - start


def _read_clock(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


def _add(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return sum(known) if known else None
