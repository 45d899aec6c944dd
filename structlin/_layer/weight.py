"""What other code finds in place of a dense layer: `layer.weight`, which is formed only where its
numbers are read, one node in the graphs that torch.fx traces, and errors that say what to do."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from .._torch import tree_leaves, tree_map, without_subclasses

_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_cuda is_cpu is_meta is_sparse is_quantized"
)
_METHODS = (
    "size dim numel element_size is_floating_point is_complex get_device stride is_contiguous "
    "__len__"
)
METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}


_IS_LEAF = Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_DETACHING = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


class InPlaceOfLinear(nn.Module):
    """What code that knows nn.Linear finds in a layer whose matrix is made of cores."""

    in_features: int
    out_features: int
    cores: nn.ParameterList

    def __init__(self) -> None:
        super().__init__()
        self.__module__ = nn.__name__  # so torch.fx takes the layer, hooks and all, as one node

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def to_dense(self) -> Tensor:
        raise NotImplementedError

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the cores, which x must have."""
        core: Tensor = self.cores[0]
        return core.dtype

    @property
    def weight(self) -> Tensor:
        if torch.compiler.is_compiling():
            return self.to_dense()
        core: Any = self.cores[0]
        if isinstance(core, Proxy):  # torch.fx traces: its graph reads the weight of this layer
            read: Any = core.tracer.create_proxy("call_function", getattr, (self, "weight"), {})
            return read  # type: ignore[no-any-return]
        return WeightView(self)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        named = name == "weight" and param is not None
        if named or isinstance(param, WeightView):  # which pruning would take as its own
            _refuse_change(f"parameter {name!r}", self)
        super().register_parameter(name, param)

    def __prepare_scriptable__(self) -> NoReturn:  # asked by torch.jit.script
        raise RuntimeError(
            f"torch.jit.script does not take {type(self).__name__}({self.extra_repr()}): use "
            "torch.jit.trace, torch.compile or torch.export"
        )


class WeightView(Tensor):
    """The matrix of a `StructuredLinear`, made only when something needs its numbers.

    dtype, device and shape are free; `F.linear(x, layer.weight, bias)` runs through the structure;
    everything else sees `layer.to_dense()`, differentiable in the cores. Writing to it is an error:
    the numbers live in the cores. For the same reason it is no leaf, and no optimizer takes it.
    A view of it (`layer.weight[0]`, `.T`, `.numpy()`) is a view of a matrix that was formed for it
    alone: writing to such a view is no error, and does not change the layer.
    """

    layer: InPlaceOfLinear
    _is_hf_initialized = True  # or transformers' initialisation would write to it
    detached: bool  #: what `.data` and `.detach()` give: without gradient, and no more writable

    @staticmethod
    def __new__(cls, layer: InPlaceOfLinear, detached: bool = False) -> "WeightView":
        cores = list(layer.cores)
        view: WeightView = Tensor._make_wrapper_subclass(
            cls,
            (layer.out_features, layer.in_features),
            dtype=layer.compute_dtype,
            device=cores[0].device,
            requires_grad=not detached and any(core.requires_grad for core in cores),
        )
        view.layer = layer
        view.detached = detached
        return view

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
        if func == _IS_LEAF:  # made anew at each look-up
            return not args[0].requires_grad
        if func is F.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            reads_numbers = isinstance(x, WeightView)
            if isinstance(weight, WeightView) and not weight.detached and not reads_numbers:
                return weight.layer.multiply(x, bias)
        if func in _DETACHING:
            return cls(args[0].layer, detached=True)
        if func is Tensor.register_hook:
            refuse_hook(args[0].layer)
        _refuse_writing(func, args, kwargs)

        def form(value: Any) -> Any:
            if not isinstance(value, WeightView):
                return value
            dense = value.layer.to_dense()
            return dense.detach() if value.detached else dense

        return func(*tree_map(form, args), **tree_map(form, kwargs))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightView({self.layer!r})"


def _refuse_writing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises: RuntimeError: `func` would write to a `WeightView`."""
    name = getattr(func, "__name__", str(func))
    ends_in_place = name.endswith("_") and not name.endswith("__")
    written = kwargs.get("out")
    if ends_in_place or name in ("__set__", "__setitem__"):
        arguments = [*args, *kwargs.values()]
        written = arguments[:1]
    what = name
    if name == "__set__":
        attribute: Any = getattr(func, "__self__", None)
        what = f"setting {attribute.__name__}"
    for tensor in tree_leaves(written):
        if isinstance(tensor, WeightView):
            _refuse_change(what, tensor.layer)


def refuse_hook(module: nn.Module) -> NoReturn:
    """Raises: RuntimeError: a hook on the weight of `module`, which is made of cores."""
    raise RuntimeError(
        "register_hook: no gradient reaches a weight that is made of cores, so the hook would "
        f"never run: put a hook on each of the cores of {module!r}"
    )


def _refuse_change(what: str, layer: InPlaceOfLinear) -> NoReturn:
    raise RuntimeError(
        f"{what} would change the weight of a structured layer, which is made of its cores: write "
        "to, freeze or prune layer.cores, or project a dense matrix with layer.from_dense_(weight);"
        " an adapter that is to be merged needs a dense layer (densify before it is added); "
        f"the layer: {type(layer).__name__}({layer.extra_repr()})"
    )


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias
