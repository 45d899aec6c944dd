"""`python -m structlin._engine.cpu.build` builds the CPU engine ahead of its first use, for example
in an image of a container, and says where it lies.

    STRUCTLIN_CACHE=folder  where the library is kept; otherwise the user's cache folder, or one
                            under the temporary folder where that cannot be written
    STRUCTLIN_CXXFLAGS=...  compiler flags after ours, for example -march=x86-64-v3; if it is set,
                            the wheel's libraries are not used
    CXX="ccache g++"        the compiler; otherwise g++ or clang++

A wheel may bring one library per `VARIANTS`, for every torch from `OLDEST` on, whose C++ interface
is stable. The first whose instructions this CPU has is loaded.

The library's name says what it was made from (source, flags, torch, compiler, CPU) and holds the
digest of the library itself; one torn by a full disk or a power cut is built again. One process
builds, aside, and renames; the others say that they wait, and after `WAIT` seconds take torch's
products. A folder that is read-only, as in a container's image, is read. A folder that another user
can change, or that lies in such a folder, is not trusted. This file imports nothing of the package:
the wheel's build runs it alone.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

import torch

if sys.platform != "win32":
    import fcntl

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-DTORCH_TARGET_VERSION=0x020a000000000000")
OLDEST = (2, 10)  # torch's stable C++ interface
SHIPPED = SOURCE.parent / "lib"  # the libraries that a wheel brings
SECONDS = 1800  # for a build by this process; 30 are usual, 500 on a busy machine
WAIT = 600  # seconds for a build by another process: more than a build takes on a busy machine
QUIET = 1  # second that a process waits for another one without a word


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


# ---- the wheel's libraries -----------------------------------------------------------------------


def find_shipped() -> Path | None:
    """The wheel's library for this CPU, if there is one from these sources and the user asks for
    none of their own.

    Raises:
        RuntimeError: the library is damaged.
    """
    if _torch_version() < OLDEST or "STRUCTLIN_CXXFLAGS" in os.environ:
        return None
    for name in find_variants():
        for path in SHIPPED.glob(f"{_name_variant(name)}-*.so"):
            if not _is_whole(path):
                raise RuntimeError(f"{path} is damaged: install structlin again")
            return path
    return None


def find_variants() -> list[str]:
    """The `VARIANTS` whose instructions this CPU has, the best first."""
    features = set(describe_cpu().split())
    return [
        name for name, variant in VARIANTS.items() if features.issuperset(variant.needs.split())
    ]


def build_variants(folder: Path) -> list[Path]:
    """The libraries of a wheel, built into `folder`, on every processor."""
    compiler = find_compiler()

    def build_one(name: str) -> Path:
        options = VARIANTS[name].options.split()
        return _compile([*compiler, *FLAGS, *options, "-s"], folder, _name_variant(name))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(build_one, VARIANTS))


def _name_variant(name: str) -> str:
    return f"engine-{name}-{_hash_sources(*FLAGS, VARIANTS[name].options)}"


# ---- this machine's library ----------------------------------------------------------------------


class Recipe(NamedTuple):
    """How this machine's library is made, and how its name begins."""

    command: tuple[str, ...]
    stem: str


def read_recipe() -> Recipe:
    """Nothing is compiled.

    Raises:
        RuntimeError: no compiler, or torch or the system is not supported.
    """
    if _torch_version() < OLDEST:
        raise RuntimeError(
            f"torch {torch.__version__} has no stable C++ interface; 2.10 and later have"
        )
    if not hasattr(os, "getuid"):
        raise RuntimeError(f"{platform.system()} is not supported, only Linux and macOS")
    compiler = find_compiler()
    flags = (*FLAGS, "-march=native", *shlex.split(os.environ.get("STRUCTLIN_CXXFLAGS", "")))
    version = _run([*compiler, "--version"])
    stem = f"engine-{_hash_sources(*flags, torch.__version__, version, describe_cpu())}"
    return Recipe((*compiler, *flags), stem)


def find_built() -> Path | None:
    """The library of this machine, if it was built before. Nothing is compiled or written.

    Raises:
        RuntimeError: as `read_recipe`.
    """
    stem = read_recipe().stem
    for folder in _list_folders():
        try:
            folder = folder.resolve()
            _require_private(folder)
            library = _find_library(folder, stem)
        except OSError:  # `build` says why
            continue
        if library is not None:
            return library
    return None


def build() -> Path:
    """The library of this machine, built if there is none.

    Raises:
        RuntimeError: as `read_recipe`; or no folder for the library, or the build fails.
    """
    command, stem = read_recipe()
    reasons = []
    for folder in _list_folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = folder.resolve()
            _require_private(folder)
            library = _find_library(folder, stem)
            if library is not None:
                return library
            with _lock(folder):
                library = _find_library(folder, stem)  # another process may have built it
                if library is not None:
                    return library
                _tell(f"building its CPU engine, once, into {folder}: about half a minute")
                return _compile(command, folder, stem)
        except OSError as error:
            reasons.append(str(error))
    why = "; ".join(reasons)
    raise RuntimeError(f"no folder to keep the engine in: {why}; set STRUCTLIN_CACHE to another")


def find_compiler() -> list[str]:
    """The command of CXX, or g++ or clang++."""
    chosen = os.environ.get("CXX", "").strip()
    for command in [chosen] if chosen else ["g++", "clang++"]:
        name, *options = shlex.split(command)
        program = shutil.which(name)
        if program is not None:
            return [program, *options]
    raise RuntimeError(
        f"no C++ compiler is found: install g++ or clang++, or set CXX, which is {chosen!r}"
    )


def _compile(command: Sequence[str], folder: Path, stem: str) -> Path:
    library = folder / f".{stem}-{os.getpid()}.so"  # aside, for others read what has its last name
    torch_folder = Path(torch.__file__).parent
    options = [f"-I{torch_folder / 'include'}", str(SOURCE), "-o", str(library)]
    try:
        _run([*command, *options, f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"])
        library.chmod(0o700)
        return library.replace(folder / f"{stem}-{_hash(library.read_bytes())}.so")
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines()
        reason = next((line for line in lines if "error" in line.lower()), error.stderr)
        program = Path(command[0]).name
        raise RuntimeError(f"{program} cannot build the engine: {reason}") from error
    finally:
        library.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> str:
    """What a compiler prints, whatever its encoding."""
    process = subprocess.run(
        command, check=True, capture_output=True, errors="replace", timeout=SECONDS
    )
    return process.stdout


# ---- the folder where it is kept -----------------------------------------------------------------


def _list_folders() -> list[Path]:
    chosen = os.environ.get("STRUCTLIN_CACHE")
    if chosen:
        return [Path(chosen)]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temporary = os.path.join(tempfile.gettempdir(), f"structlin-{os.getuid()}")
    return [Path(home, "structlin"), Path(temporary)]


def _require_private(path: Path) -> None:
    """Only this user and the machine's own can put code there: `path`, which has no links in it,
    and the folders above. In a sticky folder, such as /tmp, nobody can replace what is another's.
    """
    trusted = (os.getuid(), 0, os.stat("/").st_uid)  # in a container / may be nobody's
    for place in (path, *path.parents):
        status = place.lstat()
        # the rights by which another user writes; the group may be the user's own
        foreign_rights = 0o002 if status.st_gid == status.st_uid else 0o022
        is_sticky_parent = place != path and status.st_mode & stat.S_ISVTX
        is_open = status.st_mode & foreign_rights and not is_sticky_parent
        if status.st_uid not in trusted or is_open:
            raise PermissionError(
                f"{place} is not trusted, for another user can change it (owner "
                f"{status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}): chmod go-w it"
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


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time. Each try opens the file anew: if a user removes it, because whoever
    holds it builds nothing, those that wait go on.

    Raises:
        RuntimeError: another process has held it for `WAIT` seconds.
    """
    path = folder / "lock"
    start = time.monotonic()
    told = False
    while True:
        with path.open("w") as file:
            if _try_lock(file):
                yield
                return
        waited = time.monotonic() - start
        if waited > WAIT:
            raise RuntimeError(
                f"another process has held {path} for {WAIT} s: end it, remove that file, or set "
                "STRUCTLIN_CACHE to another folder"
            )
        if waited > QUIET and not told:
            _tell(
                f"waiting for another process that builds the engine, for {WAIT} s at most; if "
                f"there is none, remove {path}"
            )
            told = True
        time.sleep(0.1)


def _tell(text: str) -> None:
    print(f"structlin: {text}", file=sys.stderr)


def _try_lock(file: IO[str]) -> bool:
    """False while another process holds it; a forked child does not. A file system without locks
    lets all of them build, which harms nobody."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


# ---- what it is made from ------------------------------------------------------------------------


def _torch_version() -> tuple[int, ...]:
    return tuple(int(number) for number in torch.__version__.split(".")[:2])


@cache
def describe_cpu() -> str:
    try:
        first_cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in first_cpu.splitlines() if line.startswith(keys))


def _hash_sources(*tools: str) -> str:
    """What a library is made from: the sources, and what `tools` says of how."""
    sources = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return _hash(*sources, *(text.encode() for text in tools))


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


if __name__ == "__main__":
    print(build())
