"""`summary`: the linear layers of a model, row by row, against the same layers dense."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from .._layer.experts import StructuredExperts
from .._layer.linear import StructuredLinear
from .._layer.quantized import QuantizedLinear
from .._model.linears import Layer, LooseMatrices, find_loose_matrices, linear_layers
from .._model.parameters import parameters_of
from .._model.stacks import structured_experts
from .._structure.arguments import checked
from .._tables import Table, hide_numbers, name_group, percent

ROUNDS = 9  # in which each layer is timed


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
        columns = ["layer", "x", "in -> out", "structure", "params", "/dense"]
        columns += ["FLOPs/token", "/dense"]
        shows_bytes = any(row.bytes != 4 * row.params for row in self.rows)
        if shows_bytes:
            columns.append("bytes")
        if self.seconds is not None:
            columns += ["ms", "dense ms"]
        if any(sum(row.padding) for row in self.rows):
            columns.append("padding")
        table = Table(*columns)
        for row in self.rows:
            cells = [row.name, f"{row.layers}", f"{row.in_features} -> {row.out_features}"]
            cells += [row.structure, *_count_cells(row, row.dense_params, shows_bytes)]
            padding_in, padding_out = row.padding
            if padding_in or padding_out:
                wider = percent(padding_in, row.in_features)
                higher = percent(padding_out, row.out_features)
                cells.append(f"+{wider} in, +{higher} out")
            table.row(*cells)
        layers = sum(row.layers for row in self.rows)
        dense_params = sum(row.dense_params for row in self.rows)
        cells = _count_cells(self, dense_params, shows_bytes)
        table.row("linear layers", f"{layers}", "", "", *cells)
        for loose in self.loose:
            step = f"{loose.role}: {loose.stepped_by}"
            table.row(loose.name, loose.count, loose.size, step, f"{loose.params:,}")
        other_params = self.other_params - sum(loose.params for loose in self.loose)
        table.row("other parameters", "", "", "", f"{other_params:,}")
        return str(table)


def _count_cells(layers: Row | Summary, dense_params: int, shows_bytes: bool) -> list[str]:
    """The cells from "params" to "dense ms"; `dense_params`: of the same layers dense."""
    cells = [f"{layers.params:,}", percent(layers.params, dense_params)]
    cells += [f"{layers.flops:,}", percent(layers.flops, 2 * dense_params)]
    if shows_bytes:
        cells.append(f"{layers.bytes:,}")
    for seconds in (layers.seconds, layers.dense_seconds):
        if seconds is not None:
            cells.append(f"{1e3 * seconds:.2f}")
    return cells


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
    names_of_pattern = defaultdict[str, list[str]](list)
    matrices = set[nn.Parameter]()
    for layer in layers:
        infos = parameters_of(layer.module)
        matrices.update(info.parameter for info in infos if info.weight.kind == "matrix")
        row = _describe(layer)
        names_of_pattern[row.name].append(layer.name)
        key = (row.name, row.in_features, row.out_features, row.structure)
        if key in merged:
            merged[key] = _join(merged[key], row)
        else:
            merged[key] = row if tokens is None else _time(layer, row, tokens)
    rows = []
    for row in merged.values():
        rows.append(replace(row, name=name_group(row.names, names_of_pattern[row.name])))
    sizes = [p.numel() for p in model.parameters() if p not in matrices]
    loose = [*group_loose_matrices(model), *_group_structured_experts(model)]
    return Summary(tuple(rows), sum(sizes), tuple(loose))


def group_loose_matrices(model: nn.Module, without: Collection[str] = ()) -> list[LooseRow]:
    """A row for parameters of matrices that no linear layer holds, alike ones in one row.

    Args:
        without: names of parameters that have rows elsewhere.
    """
    groups = defaultdict[tuple[object, ...], list[LooseMatrices]](list)
    names_of_pattern = defaultdict[str, list[str]](list)
    for matrices in find_loose_matrices(model):
        if matrices.name in without:
            continue
        pattern = hide_numbers(matrices.name)
        names_of_pattern[pattern].append(matrices.name)
        groups[pattern, matrices.shape, matrices.size].append(matrices)
    rows = []
    for group in groups.values():
        names = [matrices.name for matrices in group]
        name = name_group(names, names_of_pattern[hide_numbers(names[0])])
        count = sum(matrices.count for matrices in group)
        example = group[0]
        params = len(group) * prod(example.shape)
        rows.append(LooseRow(name, example.role, count, example.size, params, example.stepped_by))
    return rows


def _group_structured_experts(model: nn.Module) -> list[LooseRow]:
    """A row for the structured experts of what was one parameter, alike ones in one row."""
    groups = defaultdict[tuple[object, ...], list[StructuredExperts]](list)
    alike = defaultdict[str, list[str]](list)
    names = structured_experts(model)
    for stack, names_of_stack in names.items():
        pattern = hide_numbers(names_of_stack[0])
        alike[pattern].append(names_of_stack[0])
        groups[pattern, stack.lay, stack.structure, stack.label].append(stack)
    rows = []
    for group in groups.values():
        example = group[0]
        lay = example.lay
        first_names = [names[stack][0] for stack in group]
        count = len(group) * lay.count
        share = percent(example.structure.params, lay.fan_in * lay.fan_out)
        rows.append(
            LooseRow(
                name=name_group(first_names, alike[hide_numbers(first_names[0])]),
                role="experts",
                matrices=count,
                size=f"{lay.fan_in} -> {lay.fan_out}",
                params=count * example.structure.params,
                stepped_by=f"{example.label}, {share} of dense; Muon and SOAP step each matrix",
            )
        )
    return rows


def _describe(layer: Layer) -> Row:
    """A row of one layer alone, the numbers in its name replaced by `*`."""
    module = layer.module
    if isinstance(module, StructuredLinear):
        structure = module.label
        params = module.structure.params
        flops = module.structure.flops
        padding = module.padding
        tensors = [*module.cores]
    else:
        structure = "dense"
        params = layer.in_features * layer.out_features
        flops = 2 * params
        padding = (0, 0)
        tensors = [module.weight]
    if isinstance(module, QuantizedLinear):
        structure += ", int8"
        tensors += module.scales
    return Row(
        hide_numbers(layer.name),
        1,
        layer.in_features,
        layer.out_features,
        structure,
        params,
        flops,
        padding,
        bytes=sum(map(_count_bytes, tensors)),
        names=(layer.name,),
    )


def _count_bytes(tensor: Any) -> int:
    """The bytes of a tensor, and of the tensors that make one up, as of torchao's."""
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "full_tensor"):
        return int(tensor.numel() * tensor.element_size())  # of a DTensor, over all processes
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


def _time(layer: Layer, row: Row, tokens: int) -> Row:
    """The layer's row with the seconds of a forward and a backward pass of it, and of the dense
    one; the gradients of the model's parameters stay as they are."""
    module = layer.module
    weight = next(module.parameters(), None)
    if weight is None or weight.is_meta or hasattr(weight, "full_tensor"):
        is_sharded = weight is not None and not weight.is_meta
        reason = "is sharded: gather it first" if is_sharded else "has no values (meta)"
        raise ValueError(f"tokens={tokens}: layer {layer.name!r} {reason}")
    device = weight.device
    dtype = getattr(module, "compute_dtype", weight.dtype)
    random = torch.Generator(device).manual_seed(0)  # the user's random numbers stay
    options: dict[str, Any] = {"generator": random, "device": device, "dtype": dtype}
    x = torch.randn(tokens, layer.in_features, **options)
    dy = torch.randn(tokens, layer.out_features, **options)
    modules = [module]
    if isinstance(module, StructuredLinear):
        widths = (layer.in_features, layer.out_features)
        dense = nn.Linear(*widths, bias=module.bias is not None, device="meta", dtype=dtype)
        dense = dense.to_empty(device=device).requires_grad_(weight.requires_grad)
        for parameter in dense.parameters():
            nn.init.zeros_(parameter)  # numbers that nobody has written may be slow
        modules.append(dense)
    seconds = _time_in_turn([partial(_step, module, x, dy) for module in modules], device)
    # a dense layer was the only one: both are its seconds
    return replace(row, seconds=seconds[0], dense_seconds=seconds[-1])


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    """A forward and a backward pass, which leaves the layer's gradients as they are."""
    x = x.detach().requires_grad_()
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        torch.autograd.grad(layer.forward(x), [x, *parameters], dy)


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
    measured = [time for time in seconds if time is not None]
    return sum(measured) if measured else None
