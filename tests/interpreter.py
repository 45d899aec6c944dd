"""The Triton kernels once more, interpreted: Triton decides that when it decorates one."""

import importlib.util
import sys
from types import ModuleType

import pytest

KERNELS = "structlin._engine.triton.kernels"


def interpret(patch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the kernels; until `patch` is undone Triton's own sum is interpreted too."""
    import triton

    spec = importlib.util.find_spec(KERNELS)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, KERNELS + "_interpreted", module)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
        patch.setattr(triton.language, "sum", triton.jit(triton.language.sum.fn))
    return module
