"""The private names of torch, each behind what it is used for.

A release of torch may take one away without a word; then this file changes, and no other. What is
not here yet is listed in tests/test_imports.py, which also looks up every private name.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

Function = TypeVar("Function", bound=Callable[..., Any])


def call_while_tracing(function: Function) -> Function:
    """Let torch.compile call `function` while it traces, and take its answer as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def leave_uncompiled(function: Function) -> Function:
    """`torch.compiler.disable`, which would load the compiler now."""
    uncompiled: Any = _disable_dynamo(function)
    return uncompiled  # type: ignore[no-any-return]


def is_autocast_enabled() -> bool:
    """Whether autocast is on for any device."""
    return torch._C._is_any_autocast_enabled()


def keeps_graph() -> bool:
    """Whether the backward pass that runs now was called with retain_graph=True."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def clone_lazily(tensor: Tensor) -> Tensor:
    """A clone whose memory is copied when somebody writes into it or into the original."""
    try:
        return torch._lazy_clone(tensor)
    except (AttributeError, RuntimeError):  # another torch, or memory that torch does not own
        return tensor.clone()


def is_of_c(kind: type) -> bool:
    """Whether it is a class of torch's C++; some say that they are of `torch`."""
    in_c = getattr(torch._C, kind.__name__, None) is kind
    return in_c or str(kind.__module__).startswith("torch._C")


def without_subclasses() -> AbstractContextManager[Any]:
    """Within it no `__torch_function__` of a tensor subclass is called."""
    return torch._C.DisableTorchFunctionSubclass()


def has_bfloat16_instructions(machine: str) -> bool:
    """Whether this CPU, of which `platform.machine()` is `machine`, multiplies bfloat16."""
    if machine.lower() in ("arm64", "aarch64"):
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, question, bool)() for question in questions)
