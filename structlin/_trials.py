"""What experiments share: how a training ends, and the JSON file of their rows, by which they go
on."""

import json
import math
import os
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from ._families import Family
from ._structure import Structure

Row = TypeVar("Row")


def name_of(function: Callable[..., Any]) -> str:
    """Module and name; of what functools.partial, or an object that is called, is made of."""
    inner = getattr(function, "func", function)
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


def describe_setting(own: Mapping[str, Any], setting: Mapping[str, Any] | None) -> dict[str, Any]:
    """Plain data that tells an experiment from others: what decides its numbers, and `setting`.

    Raises:
        ValueError: `setting` has an entry of a name that is in `own`.
        TypeError: `setting` is no plain data.
    """
    if taken := sorted(set(own) & set(setting or {})):
        raise ValueError(
            f"setting={dict(setting or {})!r}: {', '.join(taken)} is compared already; "
            "take another name"
        )
    plain: dict[str, Any] = json.loads(json.dumps({**to_plain(own), **(setting or {})}))
    return plain


def to_plain(value: Any) -> Any:
    """`value` as plain data; functions by their names, tensors by their dtypes and shapes.

    >>> import torch
    >>> to_plain({"include": ("2", len), "x": torch.ones(2, 3)})
    {'include': ['2', 'builtins.len'], 'x': 'torch.float32 (2, 3)'}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Family | Structure):
        return value.to_dict()
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return name_of(value) if callable(value) else type(value).__qualname__


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


def check_row(row: Any, *, positive: Collection[str]) -> None:
    """Raises ValueError if a number of a dataclass is none, not finite or, by its name, not above
    0; None is one where the field may be None."""
    for name, kind in get_type_hints(type(row)).items():
        value = getattr(row, name)
        if kind not in (int, float, float | None) or (value is None and kind == (float | None)):
            continue
        types = int if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, types) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r} must be a finite number")
        if name in positive and value <= 0:
            raise ValueError(f"{name}={value!r} must be above 0")


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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
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
