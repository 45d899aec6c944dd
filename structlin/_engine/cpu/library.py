"""The compiled CPU engine `cpu.cpp`, loaded at first use: from the wheel, or else built once for
this machine and kept in a cache.

    STRUCTLIN_ENGINE=off    plain products instead
    STRUCTLIN_CACHE=folder  where the library is kept; otherwise the user's cache folder, or one
                            under the temporary folder where that cannot be written
    STRUCTLIN_CXXFLAGS=...  compiler flags after ours, for example -march=x86-64-v3; if it is set,
                            the wheel's libraries are not used
    CXX="ccache g++"        the compiler; otherwise g++ or clang++
    python -m structlin._engine.cpu.build    builds it now, for example in an image of a container

A wheel may bring one library per `VARIANTS`. The first whose instructions this CPU has is loaded,
if it was made from the sources beside it. torch's stable C++ interface lets it serve every torch
from `OLDEST` on.

The library's name says what it was made from (source, flags, torch, compiler, CPU) and holds the
digest of the library itself. A library that is not what its name says, torn by a full disk or a
power cut, is built again. One process builds, aside, and renames; the others wait for it, at most
`PATIENCE` seconds. A folder that is read-only, as in a container's image, is read. A folder that
another user can change, or that lies in such a folder, is not trusted.

Denormal numbers (in float32, below 1.2e-38) are taken for zero, as in all of torch after
`torch.set_flush_denormal(True)`: a CPU may take a hundred times as long for them.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import torch

if sys.platform != "win32":
    import fcntl

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-shared",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
OLDEST = (2, 10)  # torch's stable C++ interface
SHIPPED = SOURCE.parent / "lib"  # the libraries that a wheel brings
SECONDS = 1800  # a build that takes longer is given up; 30 are usual, 500 on a busy machine
torch.library.define("structlin_cpu::machine", "(Tensor like) -> (int, int, int)")
PATIENCE = 600  # seconds for another process to build, before plain products
_log = logging.getLogger("structlin")
_lock = threading.Lock()
_held: IO[str] | None = None  # the lock of the cache


class Variant(NamedTuple):
    """A library of a wheel: the compiler's options, and the flags of /proc/cpuinfo they imply."""

    options: str
    needs: str


_V2 = "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
_BF16 = f"{_V4} avx512_bf16"
VARIANTS = {  # the best first
    "amx": Variant(
        "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16", f"{_BF16} amx_tile amx_bf16"
    ),
    "x86-64-v4-bf16": Variant("-march=x86-64-v4 -mavx512bf16", _BF16),
    "x86-64-v4": Variant("-march=x86-64-v4", _V4),
    "x86-64-v3": Variant("-march=x86-64-v3", _V3),
    "x86-64-v2": Variant("-march=x86-64-v2", _V2),
}


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


def _free_locks() -> None:
    """A child that is forked while a thread builds lacks that thread: nobody would free its locks.
    Its parent still holds the cache's lock, until it has built."""
    global _lock, _held
    _lock = threading.Lock()
    if _held is not None:
        _held.close()
        _held = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)


_unit: bool | None = None


def has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles (Intel's AMX)."""
    global _unit
    if _unit is None:
        _unit = "amx_bf16" in _describe_cpu().split()
    return _unit


has_matrix_unit._dynamo_marked_constant = True  # type: ignore[attr-defined]


def describe() -> dict[str, str]:
    """Which engine multiplies, for what, and why not a faster one.

    >>> sorted(describe()) >= ["CPU", "CUDA"]
    True
    """
    way = "compiled engine" if load() else "plain products of torch"
    says = "" if _state is None else _state.says
    found = {"CPU": f"{way} ({says}), torch's {torch.get_num_threads()} threads"}
    if load():
        l1, l2, bits = torch.ops.structlin_cpu.machine(torch.empty(0))
        found["caches"] = f"{l1 >> 10} KB and {l2 >> 10} KB of a core, vectors of {bits} bits"
    if fitting := _find_variants():
        found["instructions"] = fitting[0]
    found["CUDA"] = "torch sees no GPU"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        found["CUDA"] = f"Triton, after a test of its products at first use, on {name}"
    return found


def show_config() -> None:
    """Print which engine multiplies, for what, and why not a faster one.

    >>> show_config()  # doctest: +ELLIPSIS
    CPU: ...
    CUDA: ...
    """
    for name, says in describe().items():
        print(f"{name}: {says}")


def _load() -> State:
    if os.environ.get("STRUCTLIN_ENGINE", "").lower() in ("off", "0", "no", "false"):
        return State(
            False, f"STRUCTLIN_ENGINE={os.environ['STRUCTLIN_ENGINE']} switches the engine off"
        )
    says = ""
    for find, instead in (
        (find_shipped, "the CPU engine that the wheel brought is not used"),
        (build, "plain products instead of the compiled CPU engine, two to four times slower"),
    ):
        try:
            path = find()
            if path:
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]
                return State(True, str(path))
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            says = " ".join(str(error).split())[:300]
            _log.warning("%s: %s", instead, says)
    return State(False, says)


def find_shipped() -> Path | None:
    """The wheel's library for this CPU, if there is one from these sources and the user asks for
    none of their own.

    Raises:
        RuntimeError: the library is damaged.
    """
    if _torch_version() < OLDEST or "STRUCTLIN_CXXFLAGS" in os.environ:
        return None
    for name in _find_variants():
        for path in SHIPPED.glob(f"{_name_variant(name)}-*.so"):
            if not _is_whole(path):
                raise RuntimeError(f"{path} is damaged: install structlin again")
            return path
    return None


def _find_variants() -> list[str]:
    """The `VARIANTS` whose instructions this CPU has, the best first."""
    found = set(_describe_cpu().split())
    return [name for name, variant in VARIANTS.items() if found.issuperset(variant.needs.split())]


def build_variants(folder: Path) -> list[Path]:
    """The libraries of a wheel, built into `folder`, on every processor."""
    compiler = find_compiler()

    def build_one(name: str) -> Path:
        options = VARIANTS[name].options.split()
        return _compile([*compiler, *FLAGS, *options, "-s"], folder, _name_variant(name))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(build_one, VARIANTS))


def build() -> Path:
    """The library of this machine, built if there is none.

    Raises:
        RuntimeError: no compiler, a torch that is too old, no folder to keep the library in, or the
            build fails.
    """
    if _torch_version() < OLDEST:
        raise RuntimeError(
            f"torch {torch.__version__} has no stable C++ interface; 2.10 and later have"
        )
    if not hasattr(os, "getuid"):
        raise RuntimeError(f"{platform.system()} is not supported, only Linux and macOS")
    compiler = find_compiler()
    flags = (*FLAGS, "-march=native", *shlex.split(os.environ.get("STRUCTLIN_CXXFLAGS", "")))
    tools = *flags, torch.__version__, _run([*compiler, "--version"]), _describe_cpu()
    stem = f"engine-{_hash_sources(*tools)}"
    for folder in _list_folders():
        with suppress(OSError, RuntimeError):  # find_folder says why
            if found := _find_library(folder.resolve(), stem):
                return found
    folder = find_folder()
    with _lock_folder(folder):
        found = _find_library(folder, stem)
        if found:
            return found
        with _announce(f"building its CPU engine, once, into {folder}"):
            return _compile([*compiler, *flags], folder, stem)


def find_compiler() -> list[str]:
    """The command of CXX, or g++ or clang++.

    Raises:
        RuntimeError: there is no such program.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["g++"], ["clang++"]]:
        program = shutil.which(command[0])
        if program:
            return [program, *command[1:]]
    raise RuntimeError(
        "no C++ compiler is found: install g++ or clang++, or set CXX"
        + (f", which is {os.environ['CXX']!r}" if chosen else "")
    )


def find_folder() -> Path:
    """The first folder that can be made, written to, and trusted.

    Raises:
        RuntimeError: there is none; it says why for each.
    """
    reasons = []
    for folder in _list_folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = folder.resolve()
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


def _list_folders() -> list[Path]:
    if chosen := os.environ.get("STRUCTLIN_CACHE"):
        return [Path(chosen)]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temporary = os.path.join(tempfile.gettempdir(), f"structlin-{os.getuid()}")
    return [Path(home, "structlin"), Path(temporary)]


def _require_private(path: Path) -> None:
    """Only this user and the machine's own can put code there: `path`, which has no links in it,
    and the folders above. In a sticky folder, such as /tmp, nobody can replace what is another's.
    """
    trusted = os.getuid(), 0, os.stat("/").st_uid  # in a container / may be nobody's
    for part in (path, *path.parents):
        found = part.lstat()
        if found.st_uid not in trusted:
            raise RuntimeError(
                f"{part} belongs to another user (uid {found.st_uid}), "
                "so what lies there is not trusted"
            )
        others = 0o002 if found.st_gid == found.st_uid else 0o022  # or the group is the user's own
        if found.st_mode & others and (part == path or not found.st_mode & stat.S_ISVTX):
            raise RuntimeError(
                f"{part} can be written to by other users (mode {stat.S_IMODE(found.st_mode):o}): "
                "chmod go-w it"
            )


def _find_library(folder: Path, stem: str) -> Path | None:
    """The library that was made as `stem` says and is still what its name says."""
    for path in folder.glob(f"{stem}-*.so"):
        _require_private(path)
        if _is_whole(path):
            return path
    return None


def _is_whole(path: Path) -> bool:
    """Whether the library is what the digest in its name says."""
    return path.stem.endswith(f"-{_hash(path.read_bytes())}")


def _name_variant(name: str) -> str:
    return f"engine-{name}-{_hash_sources(*FLAGS, VARIANTS[name].options)}"


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """One process at a time. A file system without locks lets all of them build, which harms
    nobody.

    Raises:
        RuntimeError: another process has held the lock for `PATIENCE` seconds.
    """
    global _held
    with (folder / "lock").open("w") as file:
        _held = file
        try:
            with suppress(OSError):
                if not _try_lock(file):
                    with _announce(f"another process builds its CPU engine into {folder}, waiting"):
                        _wait_for_lock(file)
            yield
        finally:
            _held = None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(file: IO[str]) -> None:
    end = time.monotonic() + PATIENCE
    while not _try_lock(file):
        if time.monotonic() > end:
            raise RuntimeError(
                f"another process has held {file.name} for {PATIENCE} s: end it, or set "
                "STRUCTLIN_CACHE to another folder"
            )
        time.sleep(0.1)


@contextmanager
def _announce(work: str) -> Iterator[None]:
    """Say what begins, and how many seconds it took."""
    print(f"structlin: {work} ...", end="", file=sys.stderr, flush=True)
    start, end = time.monotonic(), "failed"
    try:
        yield
        end = f"{time.monotonic() - start:.0f} s"
    finally:
        print(f" {end}", file=sys.stderr)


def _compile(command: Sequence[str], folder: Path, stem: str) -> Path:
    _remove_leftovers(folder, stem)
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(
        prefix=".build-", dir=folder, ignore_cleanup_errors=True
    ) as aside:
        made = Path(aside, "engine.so")
        try:
            include = f"-I{torch_folder / 'include'}"
            _run([*command, include, str(SOURCE), "-o", str(made), *libraries], aside)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.splitlines()
            reason = next((line for line in lines if "error" in line.lower()), error.stderr)
            raise RuntimeError(
                f"{Path(command[0]).name} cannot build the engine: {reason}"
            ) from error
        made.chmod(0o700)
        path = folder / f"{stem}-{_hash(made.read_bytes())}.so"
        made.replace(path)
    return path


def _remove_leftovers(folder: Path, stem: str) -> None:
    """Remove what killed builds have left, and the library that is not what its name says."""
    for torn in folder.glob(f"{stem}-*.so"):
        torn.unlink()
    for left in folder.glob(".build-*"):
        if time.time() - left.stat().st_mtime > 2 * SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _run(command: Sequence[str], folder: str | None = None) -> str:
    """What a compiler prints, whatever its encoding."""
    done = subprocess.run(
        command, check=True, capture_output=True, errors="replace", timeout=SECONDS, cwd=folder
    )
    return done.stdout


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


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


def _hash_sources(*tools: str) -> str:
    """What a library is made from: the sources, and what `tools` says of how."""
    sources = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return _hash(*sources, *(text.encode() for text in tools))


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
