"""The file of a saved model: one safetensors file that describes itself, replaced by one rename.

    folder/structlin.safetensors, in its metadata as JSON under "structlin":
        version, modules: {name: layer}, aliases: {name: another name of the same tensor}

A saver writes a temporary file beside it, flushes that file to the disk and renames it: whoever
opens the file at any moment finds the old model or the new one, whole. Needs safetensors.
"""

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, NamedTuple
from uuid import uuid4

from torch import Tensor

VERSION = 1
FILE = "structlin.safetensors"
STALE = 24 * 3600  # seconds after which nobody writes a temporary file any more
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

    description = {"version": VERSION, "modules": modules, "aliases": aliases}
    metadata = {"structlin": json.dumps(description, separators=(",", ":"))}
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    temporary = folder / f".{FILE}-{uuid4().hex}"
    try:
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        save_file(dict(tensors), temporary, metadata=metadata)
        temporary.chmod(mode)  # safetensors lets nobody else read it
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, folder / FILE)
    except SafetensorError as error:
        raise OSError(f"{folder / FILE} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """Remove the temporary files of savers that were killed; younger ones may be in use."""
    for file in folder.glob(f".{FILE}-*"):
        with suppress(OSError):  # its saver has just renamed it, or it is another user's
            if time() - file.stat().st_mtime > STALE:
                file.unlink()


def read_file(folder: Path) -> Saved:
    """What `write_file` wrote into `folder`.

    Raises:
        ValueError: there is no such file, it is no regular file, or it is truncated or malformed.
    """
    from safetensors import SafetensorError, safe_open

    file = folder / FILE
    if not file.exists():
        raise ValueError(f"path={str(folder)!r} has no {FILE}; was it written by structlin.save?")
    if not file.is_file():  # a pipe or a device would never end
        raise ValueError(f"{file} is a folder, pipe or device, no regular file")
    try:
        with safe_open(file, "pt") as opened:
            description = json.loads(opened.metadata()["structlin"])
            version, modules = description["version"], dict(description["modules"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        aliases = {name: tensors[first] for name, first in description["aliases"].items()}
    except (OSError, SafetensorError, *_MALFORMED) as error:
        says = str(error)[:200]
        raise ValueError(f"{file} is truncated, or no file of structlin.save: {says}") from None
    if version != VERSION:
        text = f"this structlin reads version {VERSION}; take the one that wrote the file"
        raise ValueError(f"{file} has version {version!r}; {text}")
    return Saved(modules, tensors | aliases)
