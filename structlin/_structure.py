"""A structured matrix as an einsum with a fixed contraction order, written in axis names. No torch here.

Everything else in the library is derived from what this file computes: for every core the four integers
batch, fan_out, fan_in and repeat, and the axis permutations between consecutive cores.
"""

import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

TOKENS = "tokens"  # the axis of `contract.apply` that runs over all leading dimensions of the input
_RESERVED = {TOKENS, "tensor", "pattern", "reduction", "axis", *keyword.kwlist}  # einops' own arguments, and Python's
_AXIS = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Core:
    """One batched dense matrix of a structure, stored as `(batch, fan_out, fan_in)`.

    Every token multiplies by each of the `batch` blocks `repeat` times.

    >>> right, left = Structure("g d -> b a", "g s b d", "b a g s", g=4, d=8, s=2, b=4, a=8).cores
    >>> right.shape, right.fan_in_axes, left.shape, left.fan_in_axes
    ((4, 8, 8), ('d',), (4, 8, 8), ('g', 's'))
    """

    batch: int  #: number of independent blocks
    fan_out: int  #: rows of a block
    fan_in: int  #: columns of a block
    repeat: int  #: times that the same block is used for one token
    batch_axes: tuple[str, ...]
    fan_out_axes: tuple[str, ...]
    fan_in_axes: tuple[str, ...]
    repeat_axes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.fan_out, self.fan_in

    @property
    def params(self) -> int:
        return self.batch * self.fan_out * self.fan_in

    @property
    def flops(self) -> int:
        """Per token, 2 per multiply-add."""
        return 2 * self.params * self.repeat


class Structure:
    """An einsum whose cores are applied from left to right; immutable, hashable, serialisable.

    Args:
        signature: `"axes of x -> axes of y"`, row-major: the last axis runs fastest.
        cores: the axes of each core. Seen from a core, an axis is *batch* (in the activation, needed later),
            *fan-in* (in the activation, never needed again: summed) or *fan-out* (not yet in the activation); an axis
            of the activation that is not in the core *repeats* it. Inside each of the three groups of a stored core
            the axes keep the order in which they are written here.
        sizes: the size of each axis.

    Attributes:
        in_features, out_features: products of the signature's axes.
        cores: a `Core` each.
        params, flops: of the whole structure; FLOPs per token, 2 per multiply-add.
        plain: whether every core is one matrix and nothing is permuted between them, as in low-rank.
        text: all of it on one line, as `"i -> o; r i; o r; i=6 o=4 r=2"`, which `Structure.parse` reads.

    Raises:
        ValueError: an axis without a size, never consumed, never produced, or named twice; a size below 1.

    >>> btt = Structure("g d -> b a", "g s b d", "b a g s", g=32, d=32, s=2, b=32, a=32)
    >>> btt.in_features, btt.out_features, btt.params, btt.flops
    (1024, 1024, 131072, 262144)
    """

    signature: str
    subscripts: tuple[str, ...]
    sizes: dict[str, int]
    in_features: int
    out_features: int
    cores: tuple[Core, ...]
    params: int
    flops: int
    plain: bool
    text: str
    rearrangements: tuple[tuple[str, dict[str, int]], ...]
    """einops patterns, one before each core and one after the last, each with the sizes of its axes."""

    def __init__(self, signature: str, /, *cores: str, **sizes: int) -> None:
        if signature.count("->") != 1:
            raise ValueError(f"signature={signature!r} must read 'axes of x -> axes of y', for example 'i -> o'")
        if not cores:
            raise ValueError(f"a structure {signature!r} needs at least one core, for example 'o i'")
        left, right = signature.split("->")
        inputs, outputs = _axes("signature", left), _axes("signature", right)
        subscripts = [_axes(f"core {n}", core) for n, core in enumerate(cores, start=1)]
        _check_sizes(sizes, [*inputs, *outputs, *(axis for core in subscripts for axis in core)])

        activation, derived = list(inputs), []
        for n, core in enumerate(subscripts):
            later = {*outputs, *(axis for rest in subscripts[n + 1 :] for axis in rest)}
            batch = [axis for axis in core if axis in activation and axis in later]
            fan_in = [axis for axis in core if axis in activation and axis not in later]
            fan_out = [axis for axis in core if axis not in activation]
            repeat = [axis for axis in activation if axis not in core]
            lost = sorted({*repeat, *fan_out} - later)
            if lost:
                raise ValueError(
                    f"axis {lost[0]!r} is never consumed: after core {n + 1} {cores[n]!r} no core reads it "
                    f"and the output {right.strip()!r} does not have it"
                )
            groups = (batch, fan_out, fan_in, repeat)
            batch_size, rows, columns, repeats = (prod(sizes[axis] for axis in group) for group in groups)
            derived.append(Core(batch_size, rows, columns, repeats, *(tuple(group) for group in groups)))
            activation = [*batch, *repeat, *fan_out]
        missing = [axis for axis in outputs if axis not in activation]
        if missing:
            raise ValueError(f"axis {missing[0]!r} of the output {right.strip()!r} is never produced by any core")

        self.signature = f"{' '.join(inputs)} -> {' '.join(outputs)}"
        self.subscripts = tuple(" ".join(core) for core in subscripts)
        self.sizes = {axis: int(sizes[axis]) for axis in sorted(sizes)}
        self.in_features = prod(sizes[axis] for axis in inputs)
        self.out_features = prod(sizes[axis] for axis in outputs)
        self.cores = tuple(derived)
        self.params = sum(core.params for core in self.cores)
        self.flops = sum(core.flops for core in self.cores)
        read, written = [core.fan_in_axes for core in derived], [core.fan_out_axes for core in derived]
        self.plain = [tuple(inputs), *written] == [*read, tuple(outputs)]
        named = " ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        self.text = "; ".join([self.signature, *self.subscripts, named])
        self.rearrangements = _rearrangements(inputs, outputs, self.cores, self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """As plain data (for JSON); `Structure.from_dict` is its inverse."""
        return {"signature": self.signature, "cores": list(self.subscripts), "sizes": dict(self.sizes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Structure":
        return cls(data["signature"], *data["cores"], **data["sizes"])

    @classmethod
    def parse(cls, text: str) -> "Structure":
        """The structure that says so of itself in `text`.

        >>> structure = Structure("i -> o", "r i", "o r", i=6, o=4, r=2)
        >>> Structure.parse(structure.text) == structure
        True
        """
        signature, *cores, sizes = text.split("; ")
        named = (size.split("=") for size in sizes.split())
        return cls(signature, *cores, **{axis: int(size) for axis, size in named})

    def __repr__(self) -> str:
        strings = ", ".join(repr(text) for text in (self.signature, *self.subscripts))
        return f"Structure({strings}, {', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def _axes(where: str, text: str) -> list[str]:
    axes = text.split()
    for axis in axes:
        if not _AXIS.fullmatch(axis):
            raise ValueError(f"{where}: {axis!r} is not an axis name (ASCII letters and digits, a letter first)")
        if axis in _RESERVED:
            raise ValueError(f"{where}: the axis name {axis!r} is reserved; take another, for example {axis + '1'!r}")
        if axes.count(axis) > 1:
            raise ValueError(f"{where}: axis {axis!r} appears more than once in {text.strip()!r}")
    return axes


def _check_sizes(sizes: Mapping[str, int], axes: Iterable[str]) -> None:
    named = set(axes)
    for axis in sorted(named):
        if axis not in sizes:
            raise ValueError(f"axis {axis!r} has no size: pass {axis}=<size>; sizes were given for {sorted(sizes)}")
    for axis, size in sizes.items():
        if axis not in named:
            raise ValueError(f"{axis}={size!r}: no core and no side of the signature has an axis {axis!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{axis}={size!r}: the size of an axis is an integer of at least 1")


def _rearrangements(
    inputs: list[str], outputs: list[str], cores: tuple[Core, ...], sizes: Mapping[str, int]
) -> tuple[tuple[str, dict[str, int]], ...]:
    """The fixed permutations: einops patterns from each layout of the activation to the next one."""

    def layout(batch: Iterable[str], repeat: Iterable[str], features: Iterable[str]) -> str:
        return f"({' '.join(batch)}) ({' '.join([TOKENS, *repeat])}) ({' '.join(features)})"

    present, patterns = layout([], [], inputs), []
    for core in cores:
        patterns.append(f"{present} -> {layout(core.batch_axes, core.repeat_axes, core.fan_in_axes)}")
        present = layout(core.batch_axes, core.repeat_axes, core.fan_out_axes)
    patterns.append(f"{present} -> {layout([], [], outputs)}")
    named = [set(re.findall(r"\w+", pattern)) - {TOKENS} for pattern in patterns]
    return tuple(
        (pattern, {axis: sizes[axis] for axis in sorted(axes)}) for pattern, axes in zip(patterns, named, strict=True)
    )
