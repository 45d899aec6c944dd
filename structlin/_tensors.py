"""The checks of arguments that are tensors, or say what tensors are."""

from math import inf
from typing import Annotated, Any

import torch
from torch import Tensor

from ._structure.arguments import CheckedBy, read_check, show

_check_number = read_check(float)


def require_real(name: str, value: Any, dimensions: int = 0) -> None:
    """Raises TypeError if `value` is no tensor of real floating point, ValueError if it has fewer
    dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}={show(value)} is no tensor; take torch.as_tensor")
    if not value.is_floating_point():
        raise TypeError(f"{name} has dtype {value.dtype}; it must be real floating point")
    if value.ndim < dimensions:
        shape = tuple(value.shape)
        raise ValueError(f"{name} has shape {shape}; it needs at least {dimensions} dimensions")


def require_finite(name: str, value: Tensor) -> None:
    """Raises TypeError for other than real floating point, ValueError for what is not finite."""
    require_real(name, value)
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device: it has no values, load them first")
    if unfit := int((~value.isfinite()).sum()):
        raise ValueError(f"{name} has {unfit} values that are not finite")


# ---- hints, see `_structure/arguments.py` --------------------------------------------------------


def check_rate(name: str, value: Any) -> float | Tensor:
    """A number, or a tensor with one, that is finite and not negative."""
    if not isinstance(value, Tensor):
        number: float = _check_number(name, value)
        return number
    require_real(name, value)
    if value.numel() != 1:
        raise ValueError(f"{name}={value!r}: a Tensor {name} must be 1-element")
    if not 0 <= value < inf:
        raise ValueError(f"{name}={value!r} must be finite and not negative")
    return value


def check_dtype(name: str, value: Any) -> torch.dtype | None:
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        words = "a torch.dtype of floating point, as torch.float32, or None"
        raise TypeError(f"{name}={show(value)} must be {words}")
    return value


def check_device(name: str, value: Any) -> Any:
    if value is None or isinstance(value, torch.device):
        return value
    try:
        torch.empty(0, device=value)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        reason = str(error).partition("\n")[0]
        raise kind(f"{name}={show(value)} cannot be used: {reason}") from None
    return value


Rate = Annotated[float | Tensor, CheckedBy(check_rate)]
Dtype = Annotated[torch.dtype | None, CheckedBy(check_dtype)]
Device = Annotated[torch.device | str | int | None, CheckedBy(check_device)]
