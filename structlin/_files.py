"""The file of a saved model: one safetensors file that describes itself, switched by one rename.

    folder/structlin.safetensors, in its metadata as JSON under "structlin":
        checksum: SHA-256 of the whole file with 64 zeros in the place of the checksum
        version, modules: {name: layer}, aliases: {name: another name of the same tensor}

A saver writes into a folder of its own beside the file, flushes it to the disk and renames it into
place: whoever opens the file at any moment finds the old model or the new one, whole. A reader
reads the file once, and checks and uses those bytes. Needs safetensors.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

if sys.platform != "win32":
    import fcntl

VERSION = 2
FILE = "structlin.safetensors"
OLD_WEIGHTS, OLD_MANIFEST = "model.safetensors", "structlin.json"  # the two files of 0.1.0
_TEMPORARY = ".structlin-"
_BLANK = "0" * 64  # what stands in the place of the checksum while it is computed
_BEFORE_CHECKSUM = rb'{"__metadata__":{"structlin":"{\"checksum\":\"'
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Saved(NamedTuple):
    """What a file holds."""

    modules: dict[str, dict[str, Any]]  #: module name -> a description of its structured layer
    tensors: dict[str, Tensor]  #: under every name that the state had; tied names hold one tensor


def write_file(
    folder: Path,
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
) -> None:
    """Make `folder` hold this model in place of the one that is there.

    Raises:
        OSError: it cannot be written, for example because the disk is full; the old one then stays.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    description = {"checksum": _BLANK, "version": VERSION, "modules": modules, "aliases": aliases}
    metadata = {"structlin": json.dumps(description, separators=(",", ":"))}
    folder.mkdir(parents=True, exist_ok=True)
    with _reserve_folder(folder) as own:
        try:
            save_file(dict(tensors), own / FILE, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{folder / FILE} could not be written: {error}") from error
        (own / "new").touch()
        (own / FILE).chmod((own / "new").stat().st_mode)  # safetensors lets nobody else read it
        _seal(own / FILE)
        os.replace(own / FILE, folder / FILE)
        _flush_folder(folder)


def read_file(folder: Path) -> Saved:
    """What `write_file` wrote into `folder`, or `save` of 0.1.0.

    Raises:
        ValueError: there is no such file, it is no regular file, or it was truncated or edited.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    for name in (FILE, OLD_MANIFEST, OLD_WEIGHTS):  # a pipe or a device would never end
        if (folder / name).exists() and not (folder / name).is_file():
            raise ValueError(f"{folder / name} is a folder, pipe or device, no regular file")
    if (folder / FILE).is_file():
        data = (folder / FILE).read_bytes()
        manifest = _check(folder / FILE, data)
    else:
        manifest, data = _read_old(folder)
    try:
        tensors, modules, aliases = load(data), dict(manifest["modules"]), dict(manifest["aliases"])
        return Saved(modules, tensors | {name: tensors[first] for name, first in aliases.items()})
    except (SafetensorError, *_MALFORMED) as error:
        raise ValueError(f"the model in {folder} cannot be read: {error}") from None


# ---- writing -------------------------------------------------------------------------------------


@contextmanager
def _reserve_folder(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder`, for one saver and for as long as it saves.

    Each saver holds a shared lock on `folder`, which ends with its process. Who gets the lock alone
    knows that no other saver is alive, and removes what killed ones have left.
    """
    with _lock(folder):
        own = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder))
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield  # no such locks: what killed savers leave stays
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if _try_lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for left in folder.glob(f"{_TEMPORARY}*"):
                shutil.rmtree(left, ignore_errors=True)
        _try_lock(handle, fcntl.LOCK_SH)
        yield
        _try_lock(handle, fcntl.LOCK_UN)  # also where a forked child has inherited the handle
    finally:
        os.close(handle)


def _try_lock(handle: int, operation: int) -> bool:
    try:
        fcntl.flock(handle, operation)
    except OSError:  # another saver holds it, or there are no locks, and nobody removes anything
        return False
    return True


def _seal(file: Path) -> None:
    """Write the checksum into the file, and the file to the disk."""
    digest = hashlib.sha256()
    with file.open("r+b") as stream:
        start = stream.read(8 + len(_BEFORE_CHECKSUM) + len(_BLANK))
        if not start.endswith(_BEFORE_CHECKSUM + _BLANK.encode()):
            raise RuntimeError(f"safetensors wrote a header that starts with {start[8:]!r}")
        digest.update(start)
        while chunk := stream.read(1 << 24):
            digest.update(chunk)
        stream.seek(8 + len(_BEFORE_CHECKSUM))
        stream.write(digest.hexdigest().encode())
        stream.flush()
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading -------------------------------------------------------------------------------------


def _check(file: Path, data: bytes) -> dict[str, Any]:
    """The description in the file's header; every other byte is held against its checksum."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        description: dict[str, Any] = json.loads(header["__metadata__"]["structlin"])
        version, checksum = description["version"], str(description["checksum"])
    except _MALFORMED:
        raise ValueError(
            f"{file} is no file of structlin.save, or was truncated or edited"
        ) from None
    _check_version(file, version)
    start = 8 + len(_BEFORE_CHECKSUM)
    view = memoryview(data)
    digest = hashlib.sha256(view[:start])
    digest.update(_BLANK.encode())
    digest.update(view[start + len(_BLANK) :])
    if data[8:start] != _BEFORE_CHECKSUM or digest.hexdigest() != checksum:
        raise ValueError(f"{file} was truncated or edited: its checksum is another")
    return description


def _check_version(file: Path, version: object) -> None:
    if type(version) is not int or version < 1:
        raise ValueError(f"{file} has version {version!r}; versions are integers from 1 on")
    if version > VERSION:
        text = f"upgrade structlin, which reads up to {VERSION}"
        raise ValueError(f"{file} has version {version}; {text}")


def _read_old(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The two files of 0.1.0: a manifest with the checksums of both, and the tensors."""
    manifest_file, weights_file = folder / OLD_MANIFEST, folder / OLD_WEIGHTS
    if not manifest_file.is_file():
        raise ValueError(f"path={str(folder)!r} has no {FILE}; was it written by structlin.save?")
    if not weights_file.is_file():
        raise ValueError(
            f"path={str(folder)!r} has no {OLD_WEIGHTS}, which {OLD_MANIFEST} tells of"
        )
    data = weights_file.read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(manifest_file.read_bytes())
        if manifest["format"] != "structlin":
            raise KeyError("format")
        version, checksum = manifest["version"], manifest.pop("checksum")
        intact = (
            checksum == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        )
    except _MALFORMED:
        raise ValueError(f"{manifest_file} is no manifest of structlin, or is truncated") from None
    _check_version(manifest_file, version)
    if not intact:
        raise ValueError(f"{manifest_file} was edited: its checksum is another")
    if manifest[OLD_WEIGHTS] != hashlib.sha256(data).hexdigest():
        text = f"is not the file that {OLD_MANIFEST} was written with: truncated or edited"
        raise ValueError(f"{weights_file} {text}")
    return manifest, data
