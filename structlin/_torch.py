"""The private names of torch, each behind what it is used for.

A release of torch may take one away without a word; then this file changes, and no other.
tests/test_imports.py looks up every one of them.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

# The classes that torch's own layers of a kind share.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
ConvNd = torch.nn.modules.conv._ConvNd
ConvTransposeNd = torch.nn.modules.conv._ConvTransposeNd
# One operation on each tensor of a list. torch's optimizers take them.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_
foreach_zero_ = torch._foreach_zero_
# Whether autocast is on for any device. A layer asks at every call, so no function stands between.
is_autocast_enabled = torch._C._is_any_autocast_enabled
_BATCHED = torch._C._dispatch_key_parse("Batched")

Function = TypeVar("Function", bound=Callable[..., Any])


def call_while_tracing(function: Function) -> Function:
    """Let torch.compile call `function` while it traces, and take its answer as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def leave_uncompiled(function: Function) -> Function:
    """`torch.compiler.disable`, which would load the compiler now."""
    uncompiled: Any = _disable_dynamo(function)
    return uncompiled  # type: ignore[no-any-return]


def is_compiler_loaded() -> bool:
    """Whether torch.compile may have been called in this process: it loads the compiler."""
    return "torch._dynamo.eval_frame" in sys.modules


def keep_stance() -> Callable[[], object]:
    """A function that sets the stance of torch.compile to what it is now."""
    from torch._dynamo.eval_frame import _set_stance, _stance

    return partial(_set_stance, _stance)


# while torch 2.10 traces, it takes the first for true and the third for a tensor
@call_while_tracing
def is_transformed() -> bool:
    """Whether the call is exported or traced, so that the result needs no structlin, or derivatives
    are taken by anything else than autograd's backward pass."""
    return bool(
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def is_in_vmap(tensor: Tensor) -> bool:
    """Whether it stands for many, within `torch.vmap`."""
    return torch._C._functorch.is_batchedtensor(tensor)


def is_batch(dy: Tensor) -> bool:
    """Whether it stands for many, in `autograd.grad(is_grads_batched=True)`, an older vmap."""
    return bool(torch._C._dispatch_keys(dy).has(_BATCHED))


def sum_over_processes(term: Tensor, group: Any) -> Tensor:
    """The sum of a term over the processes of a group, ready to be read. No derivative is taken."""
    import torch.distributed._functional_collectives as collectives

    reduced = collectives.all_reduce(term, "sum", group)
    ready: Tensor = collectives.wait_tensor(reduced)  # type: ignore[no-untyped-call]
    return ready


def keeps_graph() -> bool:
    """Whether the backward pass that runs now was called with retain_graph=True."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def clone_lazily(tensor: Tensor) -> Tensor:
    """A clone whose memory is copied when somebody writes into it or into the original."""
    try:
        return torch._lazy_clone(tensor)
    except (AttributeError, RuntimeError):  # another torch, or memory that torch does not own
        return tensor.clone()


@cache
def find_freer_of_buffers() -> Callable[[], None] | None:
    """MKL's function that frees what it keeps for products of the thread that calls it; None where
    torch has no MKL."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function: Callable[[], None] = ctypes.CDLL(str(library)).mkl_serv_thread_free_buffers
    except (AttributeError, OSError):
        return None
    function.restype = None  # type: ignore[attr-defined]
    return function


def is_of_c(kind: type) -> bool:
    """Whether it is a class of torch's C++; some say that they are of `torch`."""
    in_c = getattr(torch._C, kind.__name__, None) is kind
    return in_c or str(kind.__module__).startswith("torch._C")


def without_subclasses() -> AbstractContextManager[Any]:
    """Within it no `__torch_function__` of a tensor subclass is called."""
    return torch._C.DisableTorchFunctionSubclass()


def without_torch_functions() -> AbstractContextManager[Any]:
    """Within it no `__torch_function__` of a mode or of a tensor subclass is called."""
    return torch._C.DisableTorchFunction()


def has_bfloat16_instructions(machine: str) -> bool:
    """Whether this CPU, of which `platform.machine()` is `machine`, multiplies bfloat16."""
    if machine.lower() in ("arm64", "aarch64"):
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, question, bool)() for question in questions)
