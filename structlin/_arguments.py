"""The checks of arguments: each refuses one by its name and value, before anything is computed."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

if TYPE_CHECKING:
    from ._structure import Structure

Number = TypeVar("Number", int, float)


# ---- options and numbers -------------------------------------------------------------------------


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; there are {', '.join(choices)}")


def require_flags(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, str):  # "False" is true
            raise ValueError(f"{name}={value!r} is a text; take True or False")


def require_positive(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def require_bounded(name: str, value: int, bound: int, formula: str) -> None:
    if value > bound:
        raise ValueError(
            f"{name}={value} is over the useful bound {formula} = {bound}: "
            f"pass {name}={bound} or less"
        )


def take_positive(
    name: str, values: Iterable[Any], convert: Callable[[Any], Number]
) -> list[Number]:
    """Return `values` as plain numbers, by `convert`; numpy's become Python's.

    Raises:
        ValueError: one is not positive and finite.
        TypeError: `convert` does not take one.
    """
    given = list(values)
    for value in given:
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={given}: {value!r} is not positive and finite")
    try:
        return [convert(value) for value in given]
    except TypeError as error:
        raise TypeError(f"{name}={given}: {error}") from None


# ---- models --------------------------------------------------------------------------------------


def require_module(name: str, value: object, hint: str = "") -> None:
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name}={type(value).__name__} must be a torch.nn.Module{hint}")


def require_values(model: nn.Module) -> None:
    """Raises TypeError if `model` is no module, ValueError if a parameter's values are not here."""
    require_module("model", model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"model={type(model).__name__}: {name} is on meta; materialise it first (to_empty)"
            )
        if hasattr(parameter, "full_tensor"):
            raise ValueError(
                f"model={type(model).__name__}: {name} is sharded (DTensor), which is not supported"
            )


# ---- what a product is given ---------------------------------------------------------------------


def check_cores(structure: "Structure", cores: Sequence[Tensor], experts: int = 1) -> None:
    if len(cores) != len(structure.cores):
        raise ValueError(
            f"{len(cores)} cores given; the structure has {len(structure.cores)}: {structure!r}"
        )
    for n, (core, tensor) in enumerate(zip(structure.cores, cores, strict=True)):
        shape = experts * core.batch, core.fan_out, core.fan_in
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"cores[{n}] has shape {tuple(tensor.shape)}; the structure needs {shape}"
            )
        if tensor.dtype != cores[0].dtype or tensor.device != cores[0].device:
            raise ValueError(
                f"cores[{n}] is {tensor.dtype} on {tensor.device}, "
                f"cores[0] is {cores[0].dtype} on {cores[0].device}"
            )


def check_input(
    x: Tensor, in_features: int, core: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Refuse what the layer cannot take; `dtype` is that of x, the core's if it is None."""
    dtype = dtype or core.dtype
    if not isinstance(x, Tensor):
        way = "torch.as_tensor(x)"
        if isinstance(x, Proxy):
            way = "nn.Sequential(layer): torch.fx traces a model, which has the layer as one node"
        raise TypeError(f"x is a {type(x).__name__}, no tensor; take {way}")
    if x.is_nested and x.layout == torch.strided:
        raise TypeError("x is a nested tensor of layout=torch.strided; take layout=torch.jagged")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: its last dimension must be in_features={in_features}"
        )
    if x.dtype == dtype and x.device == core.device and x.is_floating_point():
        return
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}; a structured product needs a floating-point input")
    if x.device != core.device:
        raise ValueError(f"x is on {x.device}, the cores are on {core.device}")
    if not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"x has dtype {x.dtype}, the cores have {dtype}; cast one of them or use autocast"
        )


def check_bias(bias: Tensor | None, out_features: int, device: torch.device) -> None:
    if bias is not None and (bias.shape != (out_features,) or bias.device != device):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} on {bias.device}; it must be (out_features,) = "
            f"({out_features},) on {device}"
        )


def check_dense(
    weight: Tensor, bias: Tensor | None, shape: tuple[int, int], has_bias: bool
) -> None:
    """What a structured layer is to take over from a dense one, `(out_features, in_features)`."""
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; "
            f"it must be (out_features, in_features) = {shape}"
        )
    if bias is None:
        return
    if not has_bias:
        raise ValueError("bias is given, but the layer has none: make it with bias=True")
    check_bias(bias, shape[0], bias.device)
    if bias.is_meta or not bias.isfinite().all():
        raise ValueError("bias has no values (meta), or some that are not finite")
