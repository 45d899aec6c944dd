"""The polar factors that a group of a Muon asks for, or the defaults."""

import platform
from typing import Any

import torch
from torch import Tensor

from ..duality import Schedule, check_method, dualize, dualize_small, has_fast_batches, is_small

DEFAULT, DEFAULT_STEPS = "fast", 5
SMALLEST_BFLOAT16 = 64  # short side from which 16 bits are quicker, but for the engine


def has_bfloat16_products(device: torch.device) -> bool:
    """Whether `device` has instructions for products of bfloat16; others widen every number first,
    which takes more than ten times as long as float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return True
    if platform.machine().lower() in ("arm64", "aarch64"):
        asked = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return bool(asked and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, question, bool)() for question in questions)


has_bfloat16_products._dynamo_marked_constant = True  # type: ignore[attr-defined]


def method_of(group: dict[str, Any]) -> tuple[str | Schedule, int | None]:
    """The method, which is no function, and its steps."""
    method, ns_steps = group["method"], group["ns_steps"]
    if method is None:
        return DEFAULT, DEFAULT_STEPS if ns_steps is None else ns_steps
    return method, ns_steps


def _dtype_of(group: dict[str, Any], matrix: Tensor) -> torch.dtype | None:
    dtype: torch.dtype | None = group["dtype"]
    chosen = group["method"] is not None or dtype is not None
    if chosen or min(matrix.shape[-2:]) < SMALLEST_BFLOAT16:
        return dtype
    exact = matrix.dtype == torch.float64 or is_small(matrix, DEFAULT)
    return None if exact or not has_bfloat16_products(matrix.device) else torch.bfloat16


def check_polar(group: dict[str, Any]) -> None:
    """Raises what `dualize` would raise of these options, before there is a matrix."""
    if callable(group["method"]):
        if group["ns_steps"] is not None:
            raise ValueError(f"ns_steps={group['ns_steps']!r}: a function as method takes none")
    else:
        check_method(*method_of(group))


def dualize_by(group: dict[str, Any], matrix: Tensor) -> Tensor:
    """The polar factors of `(batch, m, n)`.

    Raises:
        ValueError: a function as method returns something else than a tensor of that shape.
    """
    if callable(group["method"]):
        found = group["method"](matrix)
        says = f"method={group['method']!r} of matrices {tuple(matrix.shape)}"
        if not isinstance(found, Tensor) or found.shape != matrix.shape:
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{says} returned {what}; it must be a tensor of their shape")
        return found
    method, ns_steps = method_of(group)
    return dualize(matrix, method=method, ns_steps=ns_steps, dtype=_dtype_of(group, matrix))


def is_batched(group: dict[str, Any], matrices: list[Tensor]) -> bool:
    """Whether large ones are stacked on a CPU; not to equal torch.optim.Muon bit for bit."""
    dtypes = {_dtype_of(group, matrix) or matrix.dtype for matrix in matrices}
    named = isinstance(method_of(group)[0], str)
    return named and all(map(has_fast_batches, dtypes))


def is_small_for(group: dict[str, Any], matrix: Tensor) -> bool:
    """Whether `dualize_small_by` takes it."""
    if callable(group["method"]):
        return False
    default = _dtype_of(group, matrix) in (None, matrix.dtype)
    return default and is_small(matrix, method_of(group)[0])


def dualize_small_by(group: dict[str, Any], matrices: list[Tensor]) -> list[Tensor]:
    """Dualize small stacks `(batch, m, n)` in one call."""
    method, ns_steps = method_of(group)
    return dualize_small(matrices, method=method, ns_steps=ns_steps)
