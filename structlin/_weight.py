"""`layer.weight` of a structured layer: what other code reads there, without a dense matrix being kept anywhere."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from ._linear import StructuredLinear

_PROPERTIES = "shape dtype device layout ndim requires_grad is_cuda is_cpu is_meta is_leaf is_sparse is_quantized"
_METHODS = "size dim numel element_size is_floating_point is_complex get_device stride is_contiguous __len__"
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}


_DETACHING = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


class WeightView(Tensor):
    """The matrix of a `StructuredLinear`, made only when something needs its numbers.

    dtype, device and shape are free; `F.linear(x, layer.weight, bias)` runs through the structure; everything else
    sees `layer.to_dense()`, differentiable in the cores. Writing to it is an error: the numbers live in the cores.
    """

    layer: "StructuredLinear"
    _is_hf_initialized = True  # or transformers' initialisation would write to it
    detached: bool  #: what `.data` and `.detach()` give: without gradient, and no more writable

    @staticmethod
    def __new__(cls, layer: "StructuredLinear", detached: bool = False) -> "WeightView":
        core = layer.cores[0]
        view: WeightView = Tensor._make_wrapper_subclass(
            cls,
            (layer.out_features, layer.in_features),
            dtype=core.dtype,
            device=core.device,
            requires_grad=not detached and any(core.requires_grad for core in layer.cores),
        )
        view.layer, view.detached = layer, detached
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
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if isinstance(weight, WeightView) and not isinstance(x, WeightView) and not weight.detached:
                return weight.layer.multiply(x, bias)
        if func in _DETACHING:
            return cls(args[0].layer, detached=True)
        name = getattr(func, "__name__", str(func))
        in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__set__", "__setitem__")
        target = (args[:1] or list(kwargs.values())[:1]) if in_place else kwargs.get("out")
        if any(isinstance(value, WeightView) for value in tree_leaves(target)):
            raise RuntimeError(
                f"{name} would write to the weight of {cls._of(args)}, which is a view made of its cores: "
                "write to layer.cores, or project a dense matrix with layer.from_dense_(weight)"
            )
        args, kwargs = tree_map(_materialise, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)

    @staticmethod
    def _of(args: tuple[Any, ...]) -> str:
        return next((repr(value.layer) for value in args if isinstance(value, WeightView)), "a StructuredLinear")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightView({self.layer!r})"


def _materialise(value: Any) -> Any:
    if not isinstance(value, WeightView):
        return value
    return value.layer.to_dense().detach() if value.detached else value.layer.to_dense()


def _linear_arguments(input: Tensor, weight: Tensor, bias: Any = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias
