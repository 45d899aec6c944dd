"""What experiments share: how a training ends, and the JSON file of their rows, by which they go
on."""

import json
import math
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

Row = TypeVar("Row")


def name_of(function: Callable[..., Any]) -> str:
    """Module and name; of what functools.partial, or an object that is called, is made of."""
    inner = getattr(function, "func", function)
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


def final_loss(train: Callable[[], float | Tensor], call: str) -> float | None:
    """What `train` returns, as a number; None if it diverged: not finite, or FloatingPointError.

    Raises:
        TypeError: it returns no number; `call` says what was called.
    """
    try:
        loss = train()
    except FloatingPointError:
        return None
    if isinstance(loss, Tensor) and loss.numel() == 1:
        loss = loss.item()
    if not isinstance(loss, int | float):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise TypeError(f"{call} returned {type(loss).__name__}{shape}, not a number")
    return float(loss) if math.isfinite(loss) else None


def read_rows(
    path: Path,
    setting: Mapping[str, Any],
    row: Callable[..., Row],
    key: Callable[[Row], Hashable],
    what: str,
) -> dict[Any, Row]:
    """The rows of the file by `key`; none if there is no file.

    Raises:
        ValueError: it is no file of `what`, or one of another setting.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        rows = [row(**each) for each in content["rows"]]
        theirs = dict(content["setting"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"path={str(path)!r} is not the file of a {what}: {error!r}") from error
    differ = [
        f"{name} is {theirs.get(name)!r} there and {setting.get(name)!r} here"
        for name in dict.fromkeys([*setting, *theirs])
        if theirs.get(name) != setting.get(name)
    ]
    if differ:
        raise ValueError(f"path={str(path)!r} is a {what} of another setting: {'; '.join(differ)}")
    return {key(each): each for each in rows}


def write_rows(path: Path, setting: Mapping[str, Any], rows: Any, **found: Any) -> None:
    """Write dataclass `rows`, and what was `found` in them, whole or not at all."""
    content = {"setting": setting, **found, "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    os.replace(unfinished, path)
