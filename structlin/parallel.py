"""Tensor parallelism: one axis of a layer's einsum, divided over processes.

    from torch.distributed.tensor.parallel import parallelize_module
    from structlin.parallel import ColwiseParallel, RowwiseParallel

    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

The styles have torch's names and options, and leave every other layer to torch's. Each core is cut
on the dimension that has the axis; its parameter becomes a DTensor. The layer of a process is the
same einsum with a smaller axis, and runs on plain tensors, so every engine serves it. Importing
this module imports torch.distributed; `import structlin` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor import parallel as styles

from ._engine import product
from ._engine.operands import check_input
from ._engine.operators import Affine
from ._layer.linear import StructuredLinear
from ._layer.order import store_as_declared_, store_outermost_
from ._structure.arguments import checked
from ._structure.cut import Cut, axis_of, cut
from ._structure.structure import Structure

__all__ = [
    "AxisParallel",
    "Collective",
    "ColwiseParallel",
    "RowwiseParallel",
    "list_collectives",
    "store_as_declared_",
    "store_outermost_",
]


# ---- the styles ----------------------------------------------------------------------------------


class ColwiseParallel(styles.ColwiseParallel):
    """Divides the outermost axis of y: x is whole, and each process makes its part of y.

    Layers that are not structured get torch's ColwiseParallel. Forward nothing is communicated,
    backward one sum: of dx, or of the gradient between two cores where that is narrower.

    Args:
        input_layouts: how x comes: Replicate() (None), or Shard of a dimension of tokens.
        output_layouts: how y goes: Shard(-1) (None), or another.
        use_local_output: whether y is a Tensor; False: a DTensor.

    Raises:
        ValueError: (when it is applied, on every process, before anything is communicated) the
            number of processes does not divide the axis, where the message names the axes that it
            does; the mesh has not one dimension; the layer is parallel or sharded already; a
            parameter is parametrised, pruned or has hooks.
        TypeError: the layer multiplies in its own way, as an int8 one.

    >>> ColwiseParallel().output_layouts
    (Shard(dim=-1),)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, StructuredLinear):
            return super()._apply(module, device_mesh)
        layouts = Layouts(self.input_layouts[0], self.output_layouts[0], self.use_local_output)
        return divide_layer(module, "colwise", device_mesh, layouts, self.src_data_rank)


class RowwiseParallel(styles.RowwiseParallel):
    """Divides the outermost axis of x: each process reads its part of x, and y is a sum.

    Layers that are not structured get torch's RowwiseParallel. Forward there is one sum, of y, or
    between two cores where that is narrower; backward nothing is communicated.

    Args:
        input_layouts: how x comes: Shard(-1) (None), or another.
        output_layouts: how y goes: Replicate() (None), or Shard of a dimension of tokens.
        use_local_output: whether y is a Tensor; False: a DTensor.

    Raises:
        ValueError, TypeError: as `ColwiseParallel`.

    >>> RowwiseParallel().input_layouts
    (Shard(dim=-1),)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, StructuredLinear):
            return super()._apply(module, device_mesh)
        layouts = Layouts(self.input_layouts[0], self.output_layouts[0], self.use_local_output)
        return divide_layer(module, "rowwise", device_mesh, layouts, self.src_data_rank)


class AxisParallel(styles.ParallelStyle):
    """Divides any axis of a structured layer by its name, a rank for example.

    Args:
        axis: its name in the structure.
        input_layouts: how x comes; None: cut if x has the axis, else whole.
        output_layouts: how y goes; None: cut if y has the axis, else whole.
        use_local_output: whether y is a Tensor; False: a DTensor.

    Raises:
        ValueError, TypeError: as `ColwiseParallel`; the layer is not structured.

    >>> AxisParallel("r").axis
    'r'
    """

    @checked
    def __init__(
        self,
        axis: str,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.layouts = Layouts(input_layouts, output_layouts, use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, StructuredLinear):
            raise TypeError(
                f"axis={self.axis!r}: a {type(module).__name__} has no axes; take torch's styles"
            )
        return divide_layer(module, self.axis, device_mesh, self.layouts, self.src_data_rank)


@dataclass(frozen=True)
class Layouts:
    """How x comes and how y goes; None: as the divided axis has it."""

    x: Placement | None
    y: Placement | None
    local_output: bool


def divide_layer(
    layer: StructuredLinear,
    role: str,
    mesh: DeviceMesh,
    layouts: Layouts,
    src_data_rank: int | None,
) -> StructuredLinear:
    """Divide an axis of the layer over the mesh, in place.

    Everything that can be refused is refused before the first parameter is distributed, which
    communicates.
    """
    _require_plain(layer, mesh)
    axis = axis_of(layer.structure, role)
    divided = cut(layer.structure, axis, mesh.size())
    x = layouts.x or (Shard(-1) if divided.cuts_x else Replicate())
    y = layouts.y or (Shard(-1) if divided.cuts_y else Replicate())
    _require_layout("input_layouts", x)
    _require_layout("output_layouts", y)
    divided_layer = DividedLayer(
        divided, mesh, x, y, layouts.local_output, layer.in_features, layer.out_features
    )
    divided_layer.require_parts()

    store_outermost_(layer, axis)
    for name, dim in zip(layer.core_names, divided.dims, strict=True):
        placement = Replicate() if dim is None else Shard(dim)
        _distribute(layer.cores, name, mesh, placement, src_data_rank)
    bias_is_cut = divided.cuts_y and not divided_layer.pads_y
    _distribute(layer, "bias", mesh, Shard(0) if bias_is_cut else Replicate(), src_data_rank)
    _distribute(layer, "gains", mesh, Replicate(), src_data_rank)
    layer.divided = divided_layer
    return layer


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None
) -> None:
    parameter = module._parameters.get(name)
    if parameter is not None:
        tensor = distribute_tensor(
            parameter.detach(), mesh, [placement], src_data_rank=src_data_rank
        )
        module.register_parameter(name, nn.Parameter(tensor, parameter.requires_grad))


def _require_plain(layer: StructuredLinear, mesh: DeviceMesh) -> None:
    """Refuse what cannot be divided by any axis: a mesh of several dimensions, and a layer that is
    more than its parameters and the product of them."""
    kind = type(layer)
    label = f"{kind.__name__}({layer.extra_repr()})"
    if kind.multiply is not StructuredLinear.multiply:
        raise TypeError(f"a {kind.__name__} multiplies in its own way, on one process alone")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("...",)
        raise ValueError(
            f"device_mesh has {mesh.ndim} dimensions, {names}: "
            f"take one of them, device_mesh[{names[-1]!r}]"
        )
    if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
        raise ValueError(
            f"{label} is parallel or sharded already: parallelize_module comes once, and before "
            "fully_shard"
        )
    for name, parameter in layer.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"{name} of {label} has hooks, which would be lost: add them later")
    expected = {f"cores.{name}" for name in layer.core_names}
    expected |= {name for name in ("gains", "bias") if layer._parameters.get(name) is not None}
    parameter_names = {name for name, _ in layer.named_parameters()}
    if parameter_names != expected:
        differing = ", ".join(sorted(parameter_names ^ expected))  # in one of both
        raise ValueError(
            f"{label} has other parameters than a layer of its kind, {differing}: it is "
            "parametrised, pruned or adapted; make that permanent, or do it later"
        )


def _require_layout(name: str, layout: Placement) -> None:
    if type(layout) not in (Replicate, Shard):
        raise ValueError(f"{name}={layout!r} must be Replicate() or Shard(dim)")


# ---- the product ---------------------------------------------------------------------------------


class LocalParameters(NamedTuple):
    """What one process multiplies by and adds."""

    cores: list[Tensor]
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class DividedLayer:
    """The product of a layer of which one axis is divided over the processes of a mesh."""

    cut: Cut
    mesh: DeviceMesh
    x_layout: Placement
    y_layout: Placement
    local_output: bool
    in_features: int
    out_features: int

    @property
    def pads_x(self) -> bool:
        return self.cut.structure.in_features != self.in_features

    @property
    def pads_y(self) -> bool:
        return self.cut.structure.out_features != self.out_features

    @property
    def columns(self) -> int:
        """The columns of W that this process has, padding included."""
        return self.cut.structure.in_features // (self.cut.parts if self.cut.cuts_x else 1)

    @property
    def rows(self) -> int:
        """The rows of W that this process has, padding included."""
        return self.cut.structure.out_features // (self.cut.parts if self.cut.cuts_y else 1)

    def require_parts(self) -> None:
        """Refuse a cut that leaves the last process nothing but padding."""
        for side, is_cut, width, local_width in (
            ("x", self.cut.cuts_x, self.in_features, self.columns),
            ("y", self.cut.cuts_y, self.out_features, self.rows),
        ):
            if is_cut and width <= local_width * (self.cut.parts - 1):
                raise ValueError(
                    f"axis={self.cut.axis!r} over {self.cut.parts} processes leaves the last one "
                    f"nothing but padding of {side}: {width} in parts of {local_width}; take fewer"
                )

    def multiply(self, layer: StructuredLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + bias`, x and y as the layouts say."""
        if bias is not None and bias is not layer.bias:
            raise ValueError("a layer that is parallel adds its own bias, layer.bias, or none")
        divided = self.cut
        cores, bias = self._take_parameters(layer, bias, x.ndim)
        h = self._read(x, cores[0])
        has_activation = divided.structure.between is not None

        if divided.head is not None:
            program = divided.head.program.fit(self.in_features, divided.head.out_features)
            h = product.compute(divided.head, Affine(program, cores[: divided.start]), h)
            if has_activation:
                h = product.activate(h)
            (h,) = sum_gradients(self.mesh, h)

        body_bias = bias if divided.cuts_y else None
        in_width = self.in_features if divided.shares_x else divided.body.in_features
        out_width = self.out_features if divided.sums_y else divided.body.out_features
        program = divided.body.program.fit(in_width, out_width)
        body = Affine(program, cores[divided.start : divided.stop], body_bias)
        h = product.compute(divided.body, body, h)

        if divided.tail is not None:
            h = sum_over(self.mesh, h)
            if has_activation:
                h = product.activate(h)
            program = divided.tail.program.fit(divided.tail.in_features, self.out_features)
            h = product.compute(divided.tail, Affine(program, cores[divided.stop :], bias), h)
        return self._write(h, bias if divided.sums_y else None)

    # ---- parameters ------------------------------------------------------------------------------

    def _take_parameters(self, layer: StructuredLinear, bias: Any, ndim: int) -> LocalParameters:
        """The cores that this process multiplies by, and the bias that it adds.

        What is whole while it works on a part has its gradient summed over the processes, all of
        them in one collective.
        """
        divided = self.cut
        cores = [_to_local(core) for core in layer.stored_cores()]
        rank = self.mesh.get_local_rank()
        shares_tokens = divided.sums_y and isinstance(_at(self.y_layout, ndim), Shard)
        if bias is not None and shares_tokens and _at(self.y_layout, ndim).is_shard(ndim - 1):
            bias = bias.redistribute(placements=[Shard(0)])
            shares_tokens = False
        if bias is not None:
            bias = _to_local(bias)

        summed = [cores[n] for n in divided.whole_cores]
        sums_bias = bias is not None and (shares_tokens or (divided.cuts_y and self.pads_y))
        if sums_bias:
            summed.append(bias)
        if summed:
            summed = sum_gradients(self.mesh, *summed)
        if sums_bias:
            bias = summed.pop()
        for n, core in zip(divided.whole_cores, summed, strict=True):
            cores[n] = core
        if bias is not None and divided.cuts_y and self.pads_y:
            padded = F.pad(bias, (0, divided.structure.out_features - self.out_features))
            bias = padded[rank * self.rows : (rank + 1) * self.rows]
        if layer.gains is not None:
            cores = self._normalise(cores, _to_local(layer.gains), layer)
        return LocalParameters(cores, bias)

    def _normalise(
        self, cores: Sequence[Tensor], gains: Tensor, layer: StructuredLinear
    ) -> list[Tensor]:
        """The cores at their norms over all processes, summed in one collective.

        The norm of a core that is cut is sqrt(sum over processes of |part|^2). What depends on that
        sum, and on the gains of the cores between `start` and `stop`, is a term of a gradient on
        each process: the sum of both is one collective too.
        """
        divided = self.cut
        norms = {n: product.find_norm(core) for n, core in enumerate(cores)}
        factors = list(gains.unbind())
        inside = range(divided.start, divided.stop)
        cut_cores = [n for n in inside if divided.dims[n] is not None]
        wide = norms[divided.start].dtype
        squares = [norms[n].square() for n in cut_cores]
        inner_gains = gains[divided.start : divided.stop].to(wide)
        totals = sum_over(self.mesh, torch.stack(squares)) if squares else inner_gains[:0]
        totals, inner_gains = sum_gradients(self.mesh, totals, inner_gains)
        for n, gain in zip(inside, inner_gains.unbind(), strict=True):
            factors[n] = gain

        largest = []  # norm of each core
        for sigma, core in zip(layer.stds, divided.structure.cores, strict=True):
            largest.append(sigma * sqrt(core.params))
        for n, total in zip(cut_cores, totals.unbind(), strict=True):
            norms[n] = total.clamp(min=largest[n] ** 2).sqrt()  # sqrt has no gradient at zero
        return [
            product.scale_core(core, norms[n], factors[n], largest[n])
            for n, core in enumerate(cores)
        ]

    # ---- x and y ---------------------------------------------------------------------------------

    def _read(self, x: Tensor, core: Tensor) -> Tensor:
        """What this process multiplies of x, `(..., columns)`: its part if x is cut, else all."""
        self._check(x, core)
        divided = self.cut
        rank = self.mesh.get_local_rank()
        wanted = Shard(x.ndim - 1) if divided.cuts_x else Replicate()
        if not isinstance(x, DTensor) and _at(self.x_layout, x.ndim) == wanted:
            if divided.cuts_x:
                return F.pad(x, (0, self.columns - x.shape[-1])) if self.pads_x else x
            return sum_gradients(self.mesh, x)[0] if divided.shares_x else x

        if not isinstance(x, DTensor):
            x = self._to_dtensor(x, _at(self.x_layout, x.ndim), self.in_features)
        if divided.cuts_x and self.pads_x:  # a part with padding is none of DTensor's
            whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            padded = F.pad(whole, (0, divided.structure.in_features - self.in_features))
            return padded[..., rank * self.columns : (rank + 1) * self.columns]
        gradient = wanted if divided.cuts_x or divided.head is not None else Partial()
        return x.redistribute(placements=[wanted]).to_local(grad_placements=[gradient])

    def _check(self, x: Tensor, core: Tensor) -> None:
        if isinstance(x, DTensor):
            if x.device_mesh != self.mesh:
                raise ValueError(f"x lies on {x.device_mesh}, the layer on {self.mesh}")
            check_input(x, self.in_features, core)
            return
        layout = _at(self.x_layout, x.ndim) if isinstance(x, Tensor) else self.x_layout
        is_part = isinstance(x, Tensor) and layout.is_shard(x.ndim - 1)
        width = self.in_features
        if is_part:
            rank = self.mesh.get_local_rank()
            # DTensor's parts are rounded up, so that the last ones get less or nothing
            local_width = self.columns if self.cut.cuts_x else -(-width // self.cut.parts)
            width = max(0, min(local_width, width - rank * local_width))
        if isinstance(x, Tensor) and x.ndim and x.shape[-1] != width:
            share = "all of x"
            if is_part:
                share = f"this process's part of in_features={self.in_features}"
            raise ValueError(
                f"x has shape {tuple(x.shape)}, and input_layouts={layout} says that its last "
                f"dimension is {width}, {share}: pass the layout that x has"
            )
        check_input(x, width, core)
        if isinstance(layout, Shard) and not is_part and x.shape[layout.dim] == 0:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, no tokens, and input_layouts={layout}: a plain "
                "tensor has as many on every process; pass a DTensor, which may have none on some"
            )
        if x.is_nested:
            raise TypeError("x is a nested tensor: a layer that is parallel takes none")

    def _write(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """y as it is asked for, of what this process has made, `(..., rows)`.

        The bias is added here where y is a sum over processes.
        """
        divided = self.cut
        placement: Placement = Replicate()  # of y as it is here
        if divided.cuts_y:
            placement = Shard(y.ndim - 1)
        elif divided.sums_y:
            placement = Partial()
        wanted = _at(self.y_layout, y.ndim)
        pads = divided.cuts_y and self.pads_y

        if self.local_output and placement == wanted:
            return y[..., : self._count_local_rows()] if pads else y
        if self.local_output and divided.sums_y and wanted == Replicate():
            y = sum_over(self.mesh, y)
            return y if bias is None else y + bias.to(y.dtype)

        parts = DTensor.from_local(y, self.mesh, [placement], run_check=False)
        if pads:  # a part with padding is none of DTensor's
            inner = Replicate() if wanted == placement else wanted
            cropped = parts.redistribute(placements=[inner]).to_local()[..., : self.out_features]
            parts = self._to_dtensor(cropped, inner, self.out_features, parts.shape[:-1])
        parts = parts.redistribute(placements=[wanted])
        if bias is not None:
            local = parts.to_local() + bias.to(y.dtype)
            parts = self._to_dtensor(local, wanted, self.out_features, parts.shape[:-1])
        return parts.to_local() if self.local_output else parts

    def _count_local_rows(self) -> int:
        """The rows of y that this process has, without padding."""
        return min(self.rows, self.out_features - self.mesh.get_local_rank() * self.rows)

    def _to_dtensor(
        self, local: Tensor, placement: Placement, width: int, tokens: torch.Size | None = None
    ) -> DTensor:
        """This process's part of a tensor `(*tokens, width)`; without `tokens`, all processes have
        as many."""
        shape = None
        stride = None
        if tokens is None and placement.is_shard(local.ndim - 1):
            tokens = local.shape[:-1]
        if tokens is not None:
            shape = torch.Size((*tokens, width))
            stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, [placement], run_check=False, shape=shape, stride=stride
        )


def _at(placement: Placement, ndim: int) -> Placement:
    """The placement with its dimension counted from the first."""
    if isinstance(placement, Shard) and ndim:
        return Shard(placement.dim % ndim)
    return placement


def _to_local(parameter: Any) -> Tensor:
    """This process's part of a parameter; its gradient lies as the parameter does."""
    local: Tensor = parameter.to_local(grad_placements=parameter.placements)
    return local


# ---- sums over processes -------------------------------------------------------------------------


def sum_over(mesh: DeviceMesh, term: Tensor) -> Tensor:
    """The sum of `term` over the processes of `mesh`. What is done with it is done alike on every
    process, so that each has its whole gradient, and backward nothing is communicated."""
    total: Tensor = _Sum.apply(mesh.get_group().group_name, term)  # type: ignore[no-untyped-call]
    return total


def sum_gradients(mesh: DeviceMesh, *tensors: Tensor) -> list[Tensor]:
    """`tensors`, which every process has alike and does another part with: their gradients are
    summed over the processes of `mesh`, in one collective."""
    group = mesh.get_group().group_name
    return list(_SumGradients.apply(group, *tensors))  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, term: Tensor) -> Tensor:
        return _all_reduce(term, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, gradient


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        terms = [gradient for gradient, needed in zip(gradients, needs, strict=True) if needed]
        if len(terms) == 1:
            sums = [_all_reduce(terms[0], ctx.group)]
        else:
            flat = _all_reduce(torch.cat([term.reshape(-1) for term in terms]), ctx.group)
            pieces = torch.split(flat, [term.numel() for term in terms])
            sums = [piece.view(term.shape) for piece, term in zip(pieces, terms, strict=True)]
        in_order = iter(sums)
        return None, *(next(in_order) if needed else None for needed in needs)


def _all_reduce(term: Tensor, group: Any) -> Tensor:
    reduced = collectives.all_reduce(term, "sum", group)
    ready: Tensor = collectives.wait_tensor(reduced)  # type: ignore[no-untyped-call]
    return ready


# ---- what is communicated ------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One message of a layer that is parallel.

    >>> from structlin import LowRank
    >>> structure = LowRank(rank=16).structure(64, 128)
    >>> list_collectives(structure, "colwise", 2)[0].per_token
    16
    """

    name: str  #: "all_reduce" or "all_gather"
    when: str  #: "forward" or "backward"
    what: str  #: what is summed or gathered
    per_token: int  #: numbers for each token
    per_call: int = 0  #: numbers for each call, whatever its tokens


@checked
def list_collectives(
    structure: Structure,
    axis: str,
    processes: int,
    *,
    weight_norm: bool = False,
) -> list[Collective]:
    """What a layer communicates in a forward and a backward pass, in torch's default layouts.

    Args:
        structure: the layer's, without padding.
        axis: "colwise", "rowwise", or the name of an axis.
        processes: over which the axis is divided.
        weight_norm: whether the layer has it.

    Raises:
        ValueError: the axis cannot be divided so.

    >>> from structlin import BTT
    >>> for collective in list_collectives(BTT(rank=1).structure(1024, 4096), "rowwise", 8):
    ...     print(collective.name, collective.when, collective.what, collective.per_token)
    all_reduce forward y 4096
    """
    divided = cut(structure, axis_of(structure, axis), processes)
    cores = divided.structure.cores
    messages = []
    norms = [n for n in range(divided.start, divided.stop) if divided.dims[n] is not None]
    if weight_norm and norms:
        messages.append(Collective("all_reduce", "forward", "squared norms", 0, len(norms)))
    if divided.tail is not None:
        width = divided.tail.in_features
        messages.append(Collective("all_reduce", "forward", "between cores", width))
    if divided.sums_y:
        messages.append(Collective("all_reduce", "forward", "y", structure.out_features))
    if divided.cuts_y and axis == "rowwise":
        messages.append(Collective("all_gather", "forward", "y", structure.out_features))

    if divided.head is not None:
        width = divided.head.out_features
        messages.append(Collective("all_reduce", "backward", "between cores", width))
    if weight_norm:
        numbers = len(norms) + divided.stop - divided.start
        messages.append(Collective("all_reduce", "backward", "norms and gains", 0, numbers))
    if divided.whole_cores:
        numbers = sum(cores[n].params for n in divided.whole_cores)
        messages.append(Collective("all_reduce", "backward", "gradients of cores", 0, numbers))
    if divided.shares_x:
        messages.append(Collective("all_reduce", "backward", "dx", structure.in_features))
    if divided.cuts_x and axis == "colwise":
        messages.append(Collective("all_gather", "backward", "dx", structure.in_features))
    return messages
