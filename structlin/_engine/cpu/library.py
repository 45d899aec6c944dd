"""The compiled CPU engine `cpu.cpp`, loaded at first use: from the wheel, or else built once for
this machine and kept in a cache, see `build`. Only a layer that runs compiles it.

    STRUCTLIN_ENGINE=off    plain products instead

Denormal numbers (in float32, below 1.2e-38) keep their values, as in torch's own products, although
some CPUs take a hundred times as long for them. After `torch.set_flush_denormal(True)` the thread
that called it takes them for zero, here as in torch. Products of bfloat16 on a CPU that has
instructions for them always take them for zero, and so does the activation: its exponential.
"""

import logging
import os
import subprocess
import threading
from typing import NamedTuple

import torch

from ..._torch import call_while_tracing
from ..devices import writes_views

torch.library.define("structlin::machine", "(Tensor like) -> (int, int, int)")
_log = logging.getLogger("structlin")
_lock = threading.Lock()


class State(NamedTuple):
    """Whether the engine runs."""

    loaded: bool
    reason: str  #: why it does not, or the library's path


_state: State | None = None
_FAULTS = (OSError, RuntimeError, ValueError, subprocess.SubprocessError)


@call_while_tracing
def load() -> bool:
    """Whether the engine runs; the first call finds or builds it, or logs why there is none."""
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = _load()
    return _state.loaded


@call_while_tracing
def load_if_built() -> bool:
    """Whether the engine runs, without compiling it: the first call that finds it loads it."""
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = _load_built()
    return _state is not None and _state.loaded


def _renew_lock() -> None:
    """A child that is forked while a thread builds lacks that thread, which would free its lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _read_switch() -> State | None:
    """The state of an engine that the user switches off."""
    chosen = os.environ.get("STRUCTLIN_ENGINE", "")
    if chosen.lower() in ("off", "0", "no", "false"):
        return State(False, f"STRUCTLIN_ENGINE={chosen} switches the engine off")
    return None


def _load_built() -> State | None:
    """None: there is no library yet, or one that cannot be used, of which `_load` tells."""
    from . import build

    switched_off = _read_switch()
    if switched_off is not None:
        return switched_off
    for find in (build.find_shipped, build.find_built):
        try:
            path = find()
            if path is not None:
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]
                return State(True, str(path))
        except _FAULTS:
            continue
    return None


def _load() -> State:
    from . import build  # not above: `python -m structlin._engine.cpu.build` would run it twice

    switched_off = _read_switch()
    if switched_off is not None:
        return switched_off
    reason = ""
    for find, consequence in (
        (build.find_shipped, "the CPU engine that the wheel brought is not used"),
        (build.build, "plain products instead of the compiled CPU engine, 2 to 4 times slower"),
    ):
        try:
            path = find()
            if path is not None:
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]
                return State(True, str(path))
        except _FAULTS as error:
            reason = " ".join(str(error).split())[:300]
            _log.warning("%s: %s", consequence, reason)
    return State(False, reason)


@call_while_tracing
def has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles (Intel's AMX)."""
    from .build import describe_cpu

    return "amx_bf16" in describe_cpu().split()


def describe() -> dict[str, str]:
    """Which engine multiplies, for what, and why not a faster one. Nothing is compiled.

    >>> sorted(describe()) >= ["CPU", "CUDA"]
    True
    """
    from .build import find_variants

    loaded = load_if_built()
    engine = "compiled engine" if loaded else _name_products("cpu")
    reason = _foretell() if _state is None else _state.reason
    lines = {"CPU": f"{engine} ({reason}), torch's {torch.get_num_threads()} threads"}
    if loaded:
        l1, l2, bits = torch.ops.structlin.machine(torch.empty(0))
        lines["caches"] = f"{l1 >> 10} KB and {l2 >> 10} KB of a core, vectors of {bits} bits"
    variants = find_variants()
    if variants:
        lines["instructions"] = variants[0]
    return lines | _describe_accelerators()


def _foretell() -> str:
    """What the first layer that runs will find, where there is no engine yet."""
    from .build import read_recipe

    try:
        read_recipe()
    except _FAULTS as error:
        return str(error)
    return "until the first layer runs, which compiles the engine in half a minute"


def _describe_accelerators() -> dict[str, str]:
    """How each accelerator that torch sees multiplies; CUDA in any case."""
    names = {"cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else ""}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        names.setdefault(accelerator.type, accelerator.type)
    lines = {}
    for device, name in names.items():
        line = f"{_name_products(device)}, on {name}" if name else "torch sees no GPU"
        lines[device.upper()] = line
    return lines


def _name_products(device: str) -> str:
    if writes_views(device):
        return "plain products of torch"
    return "plain products of torch, results copied, as torch.bmm writes no view there"


def show_config() -> None:
    """Print which engine multiplies, for what, and why not a faster one. Nothing is compiled: the
    CPU's engine is, once, when a layer first runs.

    >>> show_config()  # doctest: +ELLIPSIS
    CPU: ...
    CUDA: ...
    """
    for name, line in describe().items():
        print(f"{name}: {line}")
