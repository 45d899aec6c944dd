"""Experts in one parameter, as structured matrices: what stands in that parameter's place.

A mixture of experts keeps the matrices of all experts in one parameter `(experts, out, in)`. Its
forward reads that parameter in few ways: the matrix of one expert, the matrices of the experts of
each token, or all of them in one batched or grouped product. An `ExpertStack` is a module under the
parameter's name that answers each of these by a product for each expert with its own tokens. So the
forward of the user's class stays as it is, routing and all, whatever `experts_implementation` is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._engine import product
from .._engine.operands import check_input
from .._engine.operators import Affine
from .._hosts.transformers import is_guarded
from .._structure.structure import Structure
from .._torch import tree_leaves, tree_map, without_subclasses
from ..scaling import init_std
from .state import DescribedModule
from .weight import METADATA, refuse_hook

_TRANSPOSING = {Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes}
_MT = Tensor.mT.__get__  # type: ignore[attr-defined]
_T = Tensor.T.__get__  # type: ignore[attr-defined]
_SWAPPING_LAST = {_MT, _T, Tensor.t, torch.t}
_DETACHING = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_MULTIPLYING = {
    *(torch.matmul, torch.mm, torch.bmm),
    *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__),
}
# products of rows that are sorted by expert: torch's own, and transformers' for other devices
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
# what Python looks up in a class, and not by `__getattr__`; a module must keep its own `__eq__`
_OPERATORS = (
    "__neg__ __abs__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ "
    "__pow__ __rpow__ __matmul__ __rmatmul__ __lt__ __le__ __gt__ __ge__ __setitem__"
)
# methods of a module that a parameter has too: there they give a new tensor
_CASTS = "float double half bfloat16 type"


@dataclass(frozen=True)
class Lay:
    """How the matrices of experts lie in one parameter `(experts, ., .)`.

    >>> gate_and_up = Lay(experts=8, fused=2, fan_out=32, fan_in=16)
    >>> gate_and_up.shape, gate_and_up.count
    ((8, 64, 16), 16)
    """

    experts: int
    fused: int  #: matrices of each expert, such as gate and up
    fan_out: int  #: of each matrix
    fan_in: int
    takes_turns: bool = False  #: rows of the fused matrices alternate; else one follows the other
    transposed: bool = False  #: `(experts, inputs, outputs)`

    @property
    def count(self) -> int:
        """Matrices in all."""
        return self.experts * self.fused

    @property
    def sides(self) -> tuple[int, int]:
        """Outputs and inputs of one expert: `(fused * fan_out, fan_in)`."""
        return self.fused * self.fan_out, self.fan_in

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the parameter."""
        outputs, inputs = self.sides
        return (self.experts, inputs, outputs) if self.transposed else (self.experts, *self.sides)

    def split(self, weight: Tensor) -> Tensor:
        """The matrices of a parameter, as a view of it: `(experts, fused, fan_out, fan_in)`."""
        rows = weight.mT if self.transposed else weight  # (experts, fused * fan_out, fan_in)
        if self.takes_turns:
            return torch.unflatten(rows, 1, (self.fan_out, self.fused)).transpose(1, 2)
        return torch.unflatten(rows, 1, (self.fused, self.fan_out))

    def join(self, matrices: Tensor) -> Tensor:
        """The way back."""
        if self.takes_turns:
            matrices = matrices.transpose(1, 2)
        rows = matrices.flatten(1, 2)
        return (rows.mT if self.transposed else rows).contiguous()

    def join_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """The outputs of one expert of those of its matrices: `(..., fused * fan_out)`."""
        if len(outputs) == 1:
            return outputs[0]
        if self.takes_turns:
            return torch.stack([*outputs], -1).flatten(-2)
        return torch.cat([*outputs], -1)


class ExpertStack(nn.Module):
    """The matrices of all experts of one parameter, in that parameter's place.

    Code that reads the parameter finds a tensor's shape, dtype, device and methods. Products with
    one expert's matrix, with those of each token, and batched and grouped products run through
    `multiply_rows`. Any other use sees the dense tensor, differentiably.
    """

    def __init__(self, lay: Lay) -> None:
        super().__init__()
        self.lay = lay

    def multiply_rows(self, rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The outputs of each expert, `(..., fused * fan_out)`, of its rows `(..., fan_in)`.

        Args:
            rows: of each expert in its order; None where it has none.
        """
        raise NotImplementedError

    def matrices(self) -> Tensor:
        """All of them: `(experts, fused, fan_out, fan_in)`."""
        raise NotImplementedError

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and on the device that inputs must have."""
        raise NotImplementedError

    def to_dense(self) -> Tensor:
        """The parameter that it stands for."""
        return self.lay.join(self.matrices())

    def as_tensor(self) -> Tensor:
        """What code that reads the parameter gets."""
        return self.to_dense() if torch.compiler.is_compiling() else ExpertsView(self)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """A tensor of another dtype, as of a parameter. To another device it moves, as a module."""
        asked = [*args, *kwargs.values()]
        if any(isinstance(value, torch.dtype | Tensor) for value in asked):
            return self.as_tensor().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def __getitem__(self, index: Any) -> Tensor:
        return self.as_tensor()[index]

    def __len__(self) -> int:
        return self.lay.experts

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name) and not name.startswith("_"):
            return getattr(self.as_tensor(), name)
        return super().__getattr__(name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def read(value: Any) -> Any:
            return value.as_tensor() if isinstance(value, ExpertStack) else value

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))

    def extra_repr(self) -> str:
        lay = self.lay
        return f"{lay.count} matrices {lay.fan_in} -> {lay.fan_out} of {lay.experts} experts"


def _read_by(name: str) -> Callable[..., Any]:
    """The method of a tensor, for a stack."""

    def call(self: ExpertStack, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.as_tensor(), name)(*args, **kwargs)

    return call


for _name in [*_OPERATORS.split(), *_CASTS.split()]:
    setattr(ExpertStack, _name, _read_by(_name))


class DenseExperts(ExpertStack):
    """The matrices of one parameter as they are, each as a linear layer that shares its memory.

    What runs a model on data puts it into a copy of the model, so that each matrix is called with
    the tokens that reach it, as any linear layer is.

    Attributes:
        layers: nn.Linear without bias, one for each matrix, the experts outermost.
    """

    def __init__(self, lay: Lay, weight: nn.Parameter) -> None:
        super().__init__(lay)
        self.layers = nn.ModuleList()
        for matrix in lay.split(weight.detach()).flatten(0, 1).unbind(0):
            with torch.device("meta"):
                layer = nn.Linear(lay.fan_in, lay.fan_out, bias=False)
            layer.weight = nn.Parameter(matrix, requires_grad=weight.requires_grad)
            self.layers.append(layer)

    @property
    def like(self) -> Tensor:
        weight = self.layers[0].weight
        assert isinstance(weight, Tensor)
        return weight

    def multiply_rows(self, rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        lay = self.lay
        results: list[Tensor | None] = []
        for expert, x in enumerate(rows):
            if x is None:
                results.append(None)
                continue
            layers = self.layers[expert * lay.fused : (expert + 1) * lay.fused]
            results.append(lay.join_outputs([layer(x) for layer in layers]))
        return results

    def matrices(self) -> Tensor:
        weights: list[Any] = [layer.weight for layer in self.layers]
        return torch.unflatten(torch.stack(weights), 0, (self.lay.experts, self.lay.fused))


class StructuredExperts(DescribedModule, ExpertStack):
    """The matrices of all experts of one parameter, each with cores of one structure.

    The expert is one more batch axis of every core: the first `batch` blocks of a core are the
    first matrix of the first expert, and the next ones its second matrix, or the next expert's.

    Args:
        lay: how they lie in the parameter.
        structure: of each matrix, at least as large.

    Attributes:
        cores: ParameterList, one parameter `(experts * fused * batch, fan_out, fan_in)` per core.
        label: what tables call the structure.
        in_features, out_features: of each matrix.

    >>> from structlin import LowRank
    >>> lay = Lay(experts=4, fused=2, fan_out=32, fan_in=16)
    >>> experts = StructuredExperts(lay, LowRank(rank=3).structure(16, 32))
    >>> experts.shape, [tuple(core.shape) for core in experts.cores]
    (torch.Size([4, 64, 16]), [(8, 3, 16), (8, 32, 3)])
    >>> x = torch.randn(5, 16)
    >>> y = torch.nn.functional.linear(x, experts[1])
    >>> torch.allclose(y, x @ experts.to_dense()[1].mT, atol=1e-5)
    True
    """

    gains = None  # weight normalisation is for linear layers

    def __init__(
        self,
        lay: Lay,
        structure: Structure,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(lay)
        self.structure = structure
        self.label = repr(structure)
        self.core_names = [str(n) for n in range(len(structure.cores))]
        self._program = structure.program.fit(lay.fan_in, lay.fan_out)
        shapes = [(lay.count * core.batch, *core.shape[1:]) for core in structure.cores]
        self.cores = nn.ParameterList(
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in shapes
        )
        self.reset_parameters()

    @property
    def in_features(self) -> int:
        return self.lay.fan_in

    @property
    def out_features(self) -> int:
        return self.lay.fan_out

    @property
    def like(self) -> Tensor:
        core: Tensor = self.cores[0]
        return core

    def reset_parameters(self) -> None:
        """Draw the cores anew, as those of a `StructuredLinear`."""
        self._draw(is_guarded)

    @torch.no_grad()
    def _draw(self, keeps: Callable[[Tensor], bool]) -> None:
        for core, parameter in zip(self.structure.cores, self.cores, strict=True):
            if not keeps(parameter):
                parameter.normal_(0, init_std(core, "mup", bottleneck_variance=True))
        self._undrawn = self.like.is_meta

    def multiply_rows(self, rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        lay = self.lay
        # of each core a part for each matrix: (matrices, batch, fan_out, fan_in)
        parts_of_cores: list[Any] = []
        for core in self.cores:
            parts_of_cores.append(torch.unflatten(core, 0, (lay.count, -1)))
        if sum(x is not None for x in rows) > 1:  # one node of the graph for all of them
            parts_of_cores = [parts.unbind(0) for parts in parts_of_cores]
        results: list[Tensor | None] = []
        for expert, x in enumerate(rows):
            if x is None:
                results.append(None)
                continue
            check_input(x, lay.fan_in, self.like)
            outputs = []
            for number in range(expert * lay.fused, (expert + 1) * lay.fused):
                affine = Affine(self._program, [parts[number] for parts in parts_of_cores])
                outputs.append(product.compute(self.structure, affine, x))
            results.append(lay.join_outputs(outputs))
        return results

    def matrices(self) -> Tensor:
        lay = self.lay
        parts_of_cores = [torch.unflatten(core, 0, (lay.count, -1)) for core in self.cores]
        matrices = [
            product.to_dense(self.structure, parts)[: lay.fan_out, : lay.fan_in]
            for parts in zip(*parts_of_cores, strict=True)
        ]
        return torch.unflatten(torch.stack(matrices), 0, (lay.experts, lay.fused))

    def computes_with(self) -> dict[str, Any]:
        """The widths, the structure, and how the matrices lie."""
        return describe_experts(self.lay, self.structure)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.label}"


def describe_experts(lay: Lay, structure: Structure) -> dict[str, Any]:
    """What `StructuredExperts` of these compute with, as plain data."""
    return {
        "in_features": lay.fan_in,
        "out_features": lay.fan_out,
        "structure": structure.to_dict(),
        "experts": lay.experts,
        "fused": lay.fused,
        "takes_turns": lay.takes_turns,
        "transposed": lay.transposed,
    }


def uninitialised_experts(
    lay: Lay, structure: Structure, *, device: torch.device | str, dtype: torch.dtype
) -> StructuredExperts:
    """Experts whose cores have no values yet, and that drew no random number."""
    experts = StructuredExperts(lay, structure, device="meta", dtype=dtype)
    experts._undrawn = False  # its values come from elsewhere
    return experts.to_empty(device=device)


# ---- what code that reads the parameter gets -----------------------------------------------------


class ExpertsView(Tensor):
    """The dense parameter of an `ExpertStack`, or the part of some experts, made only when
    something needs its numbers."""

    stack: ExpertStack
    experts: Any  #: None: all; an int: one, without its dimension; a tensor: one for each token
    swapped: bool  #: its last two dimensions, beside those of the parameter
    detached: bool  #: what `.data` and `.detach()` give: without gradient, and no more writable

    @staticmethod
    def __new__(
        cls,
        stack: ExpertStack,
        experts: Any = None,
        swapped: bool = False,
        detached: bool = False,
    ) -> Any:
        count, rows, columns = stack.lay.shape
        sides = (columns, rows) if swapped else (rows, columns)
        batch: tuple[int, ...] = (count,)
        if experts is not None:
            batch = () if isinstance(experts, int) else tuple(experts.shape)
        like = stack.like
        view: ExpertsView = Tensor._make_wrapper_subclass(
            cls,
            (*batch, *sides),
            dtype=like.dtype,
            device=like.device,
            requires_grad=not detached
            and any(parameter.requires_grad for parameter in stack.parameters()),
        )
        view.stack = stack
        view.experts = experts
        view.swapped = swapped
        view.detached = detached
        return view

    def part(self, experts: Any) -> Any:
        """The part of one expert, or of those of each token."""
        return ExpertsView(self.stack, experts, self.swapped, self.detached)

    @property
    def reads_columns(self) -> bool:
        """Whether it is `(..., outputs, inputs)`, so that `view @ x` takes x as columns."""
        return self.stack.lay.transposed == self.swapped

    def form(self) -> Tensor:
        """Its numbers."""
        dense = self.stack.to_dense()
        if self.experts is not None:
            dense = dense[self.experts]
        dense = dense.mT if self.swapped else dense
        return dense.detach() if self.detached else dense

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with without_subclasses():
                return func(*args, **kwargs)
        if func in _DETACHING:
            view = args[0]
            return cls(view.stack, view.experts, view.swapped, detached=True)
        answer = _answer(func, args, kwargs)
        if answer is not None:
            return answer
        if func is Tensor.register_hook:
            refuse_hook(args[0].stack)
        refuse_writing(func, args, kwargs)

        def form(value: Any) -> Any:
            return value.form() if isinstance(value, ExpertsView) else value

        return func(*tree_map(form, args), **tree_map(form, kwargs))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ExpertsView({self.stack!r})"


def refuse_writing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises: RuntimeError: `func` would write to the weight of structured experts."""
    name = getattr(func, "__name__", str(func))
    is_in_place = name.endswith("_") and not name.endswith("__")
    written = kwargs.get("out")
    if is_in_place or name in ("__set__", "__setitem__"):
        arguments = [*args, *kwargs.values()]  # torch.nn.init names its own
        written = arguments[:1]
    if any(isinstance(tensor, ExpertsView) for tensor in tree_leaves(written)):
        raise RuntimeError(
            f"{name} would change the weight of structured experts, which is made of their cores: "
            "write to the cores, or densify the model first"
        )


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` gives without a dense parameter; None where that one is needed."""
    tensor = args[0] if args else None
    operand = args[1] if len(args) > 1 else None
    if func in (Tensor.__getitem__, torch.select, Tensor.select):
        return _select(func, args, kwargs)
    if func in _SWAPPING_LAST and isinstance(tensor, ExpertsView):
        return _swap(tensor) if tensor.ndim == 2 or func == _MT else None
    if func in _TRANSPOSING and isinstance(tensor, ExpertsView) and len(args) == 3 and not kwargs:
        dims = {dim % tensor.ndim for dim in args[1:]}
        return _swap(tensor) if dims == {tensor.ndim - 2, tensor.ndim - 1} else None
    if func is Tensor.to and isinstance(tensor, ExpertsView):
        same = kwargs in ({}, {"dtype": tensor.dtype}) and args[1:] in ((), (tensor.dtype,))
        return tensor if same else None
    if func is F.linear:
        return _linear(*args, **kwargs)
    is_product = func in _MULTIPLYING and len(args) == 2 and not kwargs
    if is_product and isinstance(tensor, Tensor) and isinstance(operand, Tensor):
        return _multiply(tensor, operand)
    # torch.ops have their names with the overload's: "grouped_mm_fallback.default"
    if getattr(func, "__name__", "").partition(".")[0] in _GROUPED:
        return _multiply_groups(*args, **kwargs)
    return None


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The view of one expert or of each token's, for `view[index]` and `view.select(0, index)`;
    None for every other part of the parameter."""
    if kwargs:
        return None
    view = args[0]
    if not isinstance(view, ExpertsView) or view.experts is not None:
        return None
    is_select = func is not Tensor.__getitem__
    if is_select and args[1] != 0:
        return None
    index = args[-1]
    if isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64):
        if index.ndim == 1:
            return view.part(index)
        index = int(index) if index.numel() == 1 and index.ndim == 0 else None
    if not isinstance(index, int) or isinstance(index, bool):
        return None
    count = view.stack.lay.experts
    if not -count <= index < count:
        raise IndexError(f"expert {index} is out of range: there are {count}")
    return view.part(index % count)


def _swap(view: ExpertsView) -> Any:
    return ExpertsView(view.stack, view.experts, not view.swapped, view.detached)


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """x W^T + bias with one expert's W, `(outputs, inputs)`."""
    is_one = isinstance(weight, ExpertsView) and isinstance(weight.experts, int)
    if not is_one or not weight.reads_columns or isinstance(input, ExpertsView):
        return None
    if weight.detached:
        return None
    y = _multiply_one(weight, input)
    return y if bias is None else y + bias


def _multiply(first: Tensor, second: Tensor) -> Any:
    """x @ view, or view @ x, where the view has the dimensions that x has."""
    if isinstance(first, ExpertsView) and not isinstance(second, ExpertsView):
        if first.reads_columns and second.ndim >= 2:
            y = _multiply_rows(first, second.mT)  # W x = (x^T W^T)^T
            return None if y is None else y.mT
        return None
    if isinstance(second, ExpertsView) and not second.reads_columns:
        return _multiply_rows(second, first)
    return None


def _multiply_rows(view: ExpertsView, x: Tensor) -> Tensor | None:
    """x `(..., inputs)` by one expert, `(tokens, rows, inputs)` by that of each token, or
    `(experts, rows, inputs)` by all."""
    if view.detached:
        return None
    if isinstance(view.experts, int):
        return _multiply_one(view, x)
    if x.ndim != 3 or len(x) != len(view):
        return None
    if view.experts is None:
        return torch.stack([*_all_of(view.stack.multiply_rows([*x]))])
    count = view.stack.lay.experts
    experts = torch.where(view.experts < 0, view.experts + count, view.experts)
    order = experts.argsort(stable=True)  # of tokens, by expert
    sizes = experts.bincount(minlength=count).tolist()
    if len(sizes) > count:
        raise IndexError(f"expert {len(sizes) - 1} is out of range: there are {count}")
    y = _multiply_sorted(view.stack, x[order], sizes)
    unsorted: Tensor = y[order.argsort()]
    return unsorted


def _multiply_one(view: ExpertsView, x: Tensor) -> Tensor:
    rows: list[Tensor | None] = [None] * view.stack.lay.experts
    rows[view.experts] = x
    y: Tensor | None = view.stack.multiply_rows(rows)[view.experts]
    assert y is not None
    return y


def _multiply_groups(
    input: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Rows `(rows, inputs)` that are sorted by expert; `offs` says where each expert's rows end."""
    if not isinstance(weight, ExpertsView) or weight.experts is not None or weight.reads_columns:
        return None
    if offs is None or bias is not None or out_dtype is not None or input.ndim != 2:
        return None
    if weight.detached:
        return None
    ends = offs.tolist()
    sizes = [stop - start for start, stop in pairwise([0, *ends])]
    return _multiply_sorted(weight.stack, input, sizes)


def _multiply_sorted(stack: ExpertStack, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The products of rows that are sorted by expert: the first sizes[0] rows are those of expert
    0, and so on. Rows after those of the last expert give zeros."""
    outputs, _ = stack.lay.sides
    rows_beyond = len(x) - sum(sizes)
    *rows_of_experts, beyond = torch.split(x, [*sizes, rows_beyond])
    # an expert without rows is not multiplied; if none has any, the first one is, or the cores
    # would have no gradient, where those of a dense parameter are zeros
    reached = [rows if len(rows) else None for rows in rows_of_experts]
    if not any(sizes):
        reached[0] = rows_of_experts[0]
    results = stack.multiply_rows(reached)
    products = [product for product in results if product is not None]
    products.append(x.new_zeros(*beyond.shape[:-1], outputs))
    return torch.cat(products)


def _all_of(results: Iterable[Tensor | None]) -> Iterator[Tensor]:
    for result in results:
        assert result is not None
        yield result
