"""The text of a structure read: axis names, sizes, and the name of an activation. No torch here."""

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import NoReturn

MOST_AXES = 52  # letters of torch.einsum; an axis of x and of y takes two
ACTIVATIONS = ("silu",)  # that may stand between cores; a program has their numbers, from 1
# our own axis over all leading dimensions, an option of `Structure`, einops' own, and Python's
_RESERVED = {"tokens", "between", "tensor", "pattern", "reduction", "axis", *keyword.kwlist}
# what torch.einsum and einops write in other ways
SYNTAX = (
    "axes are separated by spaces, each core is a text of its own, and the leading dimensions of x "
    "have no axis: Structure('i -> o', 'r i', 'o r', i=64, r=4, o=128) is low-rank"
)
# what to do in the place of a sum
NO_SUM = (
    "a structure is a product of cores and cannot be a sum; add the outputs of two layers, see "
    "'What an einsum cannot say' in docs/choose.md"
)
_AXIS = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")


def check_number(inputs: list[str], outputs: list[str], cores: Sequence[str]) -> None:
    axes = {*inputs, *outputs, *" ".join(cores).split()}
    shared_axes = {*inputs} & {*outputs}
    number = len(axes) + len(shared_axes)
    if number > MOST_AXES:
        raise ValueError(
            f"{number} axes, those that x and y share counted twice; at most {MOST_AXES}: "
            "torch.einsum, which forms the matrix, has no more letters"
        )


def check_texts(signature: object, cores: object) -> None:
    if not isinstance(cores, list | tuple) or not all(
        isinstance(core, str) for core in (signature, *cores)
    ):
        raise TypeError(
            f"signature={signature!r}, cores={cores!r} must be a text and a list of texts"
        )


def read_axes(where: str, text: str) -> list[str]:
    axes = text.split()
    if "," in text:
        raise ValueError(f"{where}: {text.strip()!r} has a comma; {SYNTAX}")
    if "+" in text:
        raise ValueError(f"{where}: {text.strip()!r} has a plus; {NO_SUM}")
    for axis in axes:
        if not _AXIS.fullmatch(axis):
            raise ValueError(
                f"{where}: {axis!r} is not an axis name (ASCII letters and digits, a letter first)"
            )
        if axis in _RESERVED:
            raise ValueError(
                f"{where}: the axis name {axis!r} is reserved; take another, for example "
                f"{axis + '1'!r}"
            )
        if axes.count(axis) > 1:
            raise ValueError(f"{where}: axis {axis!r} appears more than once in {text.strip()!r}")
    return axes


def check_between(between: object, cores: Sequence[str]) -> None:
    if between is None:
        return
    if not isinstance(between, str) or between not in ACTIVATIONS:
        kind = ValueError if isinstance(between, str) else TypeError
        raise kind(
            f"between={between!r} is no activation; there are {', '.join(ACTIVATIONS)}, and None"
        )
    if len(cores) < 2:
        raise ValueError(
            f"between={between!r} needs two cores or more, for example 'r i' and 'o r'; there is "
            f"one, {cores[0]!r}"
        )


def check_sizes(sizes: Mapping[str, int], axes: Iterable[str]) -> None:
    axes = set(axes)
    for axis in sorted(axes):
        if axis not in sizes:
            advice = ""
            if len(axis) > 1 and sizes.keys() >= set(axis):
                advice = f", or write {' '.join(axis)!r}, for axes are separated by spaces"
            raise ValueError(
                f"axis {axis!r} has no size: pass {axis}=<size>{advice}; "
                f"sizes were given for {sorted(sizes)}"
            )
    for axis, size in sizes.items():
        if axis not in axes:
            raise ValueError(
                f"{axis}={size!r}: no core and no side of the signature has an axis {axis!r}"
            )
        is_integer = isinstance(size, Integral) and not isinstance(size, bool)
        if not is_integer or size < 1:
            kind = ValueError if is_integer else TypeError
            raise kind(f"{axis}={size!r}: the size of an axis is an integer of at least 1")


def refuse_sum(left: object, right: object) -> NoReturn:
    raise TypeError(f"{left!r} + {right!r}: {NO_SUM}")
