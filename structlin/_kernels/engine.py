"""The compiled CPU engine `cpu.cpp`: built once for this machine, kept in a cache, loaded at first
use.

    STRUCTLIN_ENGINE=off    plain products instead
    STRUCTLIN_CACHE=folder  where the library is kept; otherwise the user's cache folder, or one
                            under the temporary folder where that cannot be written
    python -m structlin._kernels.build    builds it now, for example in an image of a container

The library's name says what it was made from: source, flags, torch, compiler, CPU. It is built
aside and renamed: there is a whole one or none, whatever happens to the build and however many
processes build at once. A folder that another user owns, or may write to, is not trusted.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
OLDEST = (2, 10)  # torch's stable C++ interface
SECONDS = 600  # a build that takes longer is given up
_log = logging.getLogger("structlin")
_lock = threading.Lock()


class State(NamedTuple):
    """Whether the engine runs, and where it lies or why it does not."""

    loaded: bool
    says: str


_state: State | None = None


def load() -> bool:
    """Whether the engine runs; the first call finds or builds it, and says in the log why there is
    none."""
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = _load()
    return _state.loaded


load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it, and sees its answer


_unit: bool | None = None


def has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles (Intel's AMX)."""
    global _unit
    if _unit is None:
        _unit = "amx_bf16" in _describe_cpu().split()
    return _unit


has_matrix_unit._dynamo_marked_constant = True  # type: ignore[attr-defined]


def show_config() -> None:
    """Print which engine multiplies, for what, and why not a faster one.

    >>> show_config()  # doctest: +ELLIPSIS
    CPU: ...
    CUDA: ...
    """
    way = "compiled engine" if load() else "plain products of torch"
    says = "" if _state is None else _state.says
    print(f"CPU: {way} ({says}), torch's {torch.get_num_threads()} threads")
    cuda = (
        "Triton, after a test of its products at first use"
        if torch.cuda.is_available()
        else "torch sees no GPU"
    )
    print(f"CUDA: {cuda}")


def _load() -> State:
    if os.environ.get("STRUCTLIN_ENGINE", "").lower() in ("off", "0", "no", "false"):
        return State(
            False, f"STRUCTLIN_ENGINE={os.environ['STRUCTLIN_ENGINE']} switches the engine off"
        )
    try:
        path = build()
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        says = " ".join(str(error).split())[:300]
        _log.warning(
            "plain products instead of the compiled CPU engine, two to four times slower: %s", says
        )
        return State(False, says)
    return State(True, str(path))


def build() -> Path:
    """The library, built if there is none.

    Raises:
        RuntimeError: no compiler, a torch that is too old, no folder to keep the library in, or the
            build fails.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        raise RuntimeError(
            f"torch {torch.__version__} has no stable C++ interface; 2.10 and later have"
        )
    if not hasattr(os, "getuid"):
        raise RuntimeError(f"{platform.system()} is not supported, only Linux and macOS")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    describe = _describe_compiler(compiler) if compiler else "none"
    sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    digest = _hash(*sources, *FLAGS, torch.__version__, describe, _describe_cpu())
    name = f"engine-{digest}.so"
    folder = find_folder()
    path = folder / name
    if path.exists():
        _require_private(path)
        return path
    if compiler is None:
        raise RuntimeError("no C++ compiler is found: install g++ or clang++, or set CXX")
    return _compile(compiler, path)


def find_folder() -> Path:
    """The first folder that can be made, written to, and trusted.

    Raises:
        RuntimeError: there is none; it says why for each.
    """
    chosen = os.environ.get("STRUCTLIN_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temporary = os.path.join(tempfile.gettempdir(), f"structlin-{os.getuid()}")
    reasons = []
    for folder in [Path(chosen)] if chosen else [Path(home, "structlin"), Path(temporary)]:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(folder)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise RuntimeError(f"{folder} cannot be written to")
            return folder
        except (OSError, RuntimeError) as error:
            reasons.append(str(error))
    raise RuntimeError(
        f"no folder to keep the engine in: {'; '.join(reasons)}; "
        "set STRUCTLIN_CACHE to one of yours"
    )


def _require_private(path: Path) -> None:
    """Nobody but this user, or root, could have put code there."""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise RuntimeError(
            f"{path} belongs to another user (uid {found.st_uid}), "
            "so what lies there is not trusted"
        )
    if found.st_mode & 0o022:
        raise RuntimeError(
            f"{path} can be written to by other users (mode {found.st_mode & 0o777:o}): "
            "chmod go-w it"
        )


def _compile(compiler: str, path: Path) -> Path:
    _remove_leftovers(path.parent)
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(
        prefix=".build-", dir=path.parent, ignore_cleanup_errors=True
    ) as aside:
        made = Path(aside, path.name)
        libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [
            compiler,
            *FLAGS,
            f"-I{torch_folder / 'include'}",
            str(SOURCE),
            "-o",
            str(made),
            *libraries,
        ]
        print(
            f"structlin: building its CPU engine, once, into {path.parent} ...",
            end="",
            file=sys.stderr,
            flush=True,
        )
        start = time.monotonic()
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=SECONDS, cwd=aside
            )
        except subprocess.CalledProcessError as error:
            print(" failed", file=sys.stderr)
            reason = next(
                (line for line in error.stderr.splitlines() if "error" in line.lower()),
                error.stderr,
            )
            raise RuntimeError(
                f"{Path(compiler).name} cannot build the engine: {reason}"
            ) from error
        made.chmod(0o700)
        made.replace(path)
        print(f" {time.monotonic() - start:.0f} s", file=sys.stderr)
    return path


def _remove_leftovers(folder: Path) -> None:
    """Of builds that were killed."""
    for left in folder.glob(".build-*"):
        if time.time() - left.stat().st_mtime > 2 * SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _describe_compiler(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def _describe_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(
            line
            for line in lines
            if line.startswith(("model name", "flags", "Features", "CPU part"))
        )
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
