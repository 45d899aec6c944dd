"""A structured matrix as an einsum with a fixed contraction order, written in axis names. No torch
here.

Everything that a structure implies is computed here, once, when it is made: for every core the four
integers batch, fan_out, fan_in and repeat, and the `Program`, which says in integers alone how the
cores are applied. The product, the engines, the matrix and the counters of FLOPs read those
integers, and no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from .axes import (
    ACTIVATIONS,
    SYNTAX,
    check_between,
    check_number,
    check_sizes,
    check_texts,
    read_axes,
    refuse_sum,
)

TOKENS = "tokens"  # the axis that runs over all leading dimensions of an input


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
    def axes(self) -> tuple[str, ...]:
        """The axes of the stored core; the last one runs fastest."""
        return *self.batch_axes, *self.fan_out_axes, *self.fan_in_axes

    @property
    def params(self) -> int:
        return self.batch * self.fan_out * self.fan_in

    @property
    def flops(self) -> int:
        """Per token, 2 per multiply-add."""
        return 2 * self.params * self.repeat


SILU_RMS = 0.5964692111227136  # sqrt(E silu(z)^2), z ~ N(0, 1): an integral, no choice


class Move(NamedTuple):
    """How an activation is seen anew: `h.view(sizes).permute(order)`. Empty where nothing moves."""

    sizes: tuple[int, ...]  #: of its axes, as they lie; -1 is the tokens
    order: tuple[int, ...]  #: in which they are read


class Step(NamedTuple):
    """One core of a program: a batched product, and where its operands lie.

    Between the cores an activation lies as `(batch, tokens, repeat, fan_out)` of the core that made
    it; `move` gives the order `(batch, tokens, repeat, fan_in)` in which the next core reads it.
    """

    batch: int
    repeat: int
    fan_in: int
    fan_out: int
    move: Move


class Program(NamedTuple):
    """A structure as integers: a step for each core, what is applied between the cores, and the
    last result's move into y's order.

    `numbers` is the program for an engine that speaks no Python: in_features, out_features, number
    of cores; batch, repeat, fan_in and fan_out of each core; then the moves of one token's features
    before each core and after the last, each as its number of axes, their sizes and their order;
    and `between`.
    """

    steps: tuple[Step, ...]
    last: Move
    in_features: int
    out_features: int
    numbers: tuple[int, ...]
    padding: tuple[int, int] = (0, 0)  #: columns, taken to be zero in x, and rows, dropped from y
    between: int = 0  #: the number of an activation of `ACTIVATIONS`, from 1; 0: none

    def fit(self, columns: int, rows: int) -> "Program":
        """Return the program of a layer with so many columns and rows of W, at most these."""
        padding = self.in_features - columns, self.out_features - rows
        numbers = columns, rows, *self.numbers[2:]
        return Program(self.steps, self.last, columns, rows, numbers, padding, self.between)


def steps_of(program: Sequence[int]) -> list[Sequence[int]]:
    """batch, repeat, fan_in and fan_out of each core."""
    each = program[3 : 3 + 4 * program[2]]
    return [each[at : at + 4] for at in range(0, len(each), 4)]


class Matrix(NamedTuple):
    """W as one einsum of the cores and of an identity for each axis that x and y share."""

    shapes: tuple[tuple[int, ...], ...]  #: of each core, an entry per axis
    identities: tuple[int, ...]  #: size of each
    axes: tuple[tuple[int, ...], ...]  #: of each core and each identity, as numbers
    result: tuple[int, ...]  #: the axes of y, then those of x


class Structure:
    """An einsum whose cores are applied from left to right; immutable, hashable, serialisable.

    Args:
        signature: `"axes of x -> axes of y"`, row-major: the last axis runs fastest.
        cores: the axes of each core. Seen from a core, an axis is *batch* (in the activation,
            needed later), *fan-in* (in the activation, never needed again: summed) or *fan-out*
            (not yet in the activation); an axis of the activation that is not in the core *repeats*
            it. Inside each of the three groups of a stored core the axes keep the order in which
            they are written here.
        between: an activation after each core but the last, or None. "silu" is h -> silu(h) /
            sqrt(E silu(z)^2), z ~ N(0, 1), which keeps unit RMS. There is then no matrix W.
        sizes: the size of each axis.

    Attributes:
        in_features, out_features: products of the signature's axes.
        inputs, outputs: the axes of x and of y.
        cores: a `Core` each.
        params, flops: of the whole structure; FLOPs per token, 2 per multiply-add.
        density: FLOPs relative to those of a dense matrix.
        program: the same in integers, for whoever multiplies.
        matrix: the same in integers, for whoever wants W.
        plain: whether every core is one matrix, and nothing lies in between, as in low-rank.

    Raises:
        ValueError: an axis without a size, never consumed, never produced, or named twice; a size
            below 1; more axes than `MOST_AXES`; `between` is unknown, or there is one core.

    >>> btt = Structure("g d -> b a", "g s b d", "b a g s", g=32, d=32, s=2, b=32, a=32)
    >>> btt.in_features, btt.out_features, btt.params, btt.flops
    (1024, 1024, 131072, 262144)
    >>> btt
    Structure('g d -> b a', 'g s b d', 'b a g s', a=32, b=32, d=32, g=32, s=2)
    """

    signature: str
    subscripts: tuple[str, ...]
    between: str | None
    sizes: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_features: int
    out_features: int
    cores: tuple[Core, ...]
    params: int
    flops: int
    density: float
    program: Program
    matrix: Matrix
    plain: bool
    _key: tuple[Any, ...]

    def __init__(
        self, signature: str, /, *cores: str, between: Any = None, **sizes: int
    ) -> None:  # `between` is Any, or type checkers would refuse a mapping as **sizes
        check_texts(signature, cores)
        if signature.count("->") != 1:
            raise ValueError(
                f"signature={signature!r} must read 'axes of x -> axes of y', for example 'i -> o'"
            )
        if not cores:
            raise ValueError(f"signature={signature!r} needs at least one core; {SYNTAX}")
        left, right = signature.split("->")
        check_number(left.split(), right.split(), cores)
        inputs, outputs = read_axes("signature", left), read_axes("signature", right)
        subscripts = [read_axes(f"core {n}", core) for n, core in enumerate(cores, start=1)]
        check_between(between, cores)
        check_sizes(sizes, [*inputs, *outputs, *(axis for core in subscripts for axis in core)])
        sizes = {axis: int(sizes[axis]) for axis in sorted(sizes)}
        derived = derive_cores(inputs, outputs, subscripts, sizes)
        text = f"{' '.join(inputs)} -> {' '.join(outputs)}"
        names = tuple(" ".join(core) for core in subscripts)
        activation = 0 if between is None else 1 + ACTIVATIONS.index(between)
        program = _derive_program(inputs, outputs, derived, sizes, activation)
        flops = sum(core.flops for core in derived)
        self.__dict__.update(
            signature=text,
            subscripts=names,
            between=between,
            sizes=MappingProxyType(sizes),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            in_features=program.in_features,
            out_features=program.out_features,
            cores=derived,
            params=sum(core.params for core in derived),
            flops=flops,
            density=flops / (2 * program.in_features * program.out_features),
            program=program,
            matrix=_derive_matrix(inputs, outputs, derived, sizes),
            plain=between is None
            and all(step.batch == step.repeat == 1 for step in program.steps)
            and not any(
                move.order for move in (*(step.move for step in program.steps), program.last)
            ),
            _key=(text, names, tuple(sizes.items()), between),
        )

    def activate(self, between: str | None = ACTIVATIONS[0]) -> "Structure":
        """Return the same structure with this activation between its cores, or with none."""
        return Structure(self.signature, *self.subscripts, between=between, **self.sizes)

    def require_matrix(self, what: str) -> None:
        """Raises: ValueError: `what` asks for W, and there is an activation between the cores."""
        if self.between is not None:
            raise ValueError(
                f"{what} needs a matrix, and a structure with between={self.between!r} is none; "
                f"the same without between= is one: {self!r}"
            )

    def __add__(self, other: object) -> "Structure":
        if isinstance(other, Structure):
            refuse_sum(self, other)
        return NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """As plain data (for JSON); `Structure.from_dict` is its inverse."""
        return {
            "signature": self.signature,
            "cores": list(self.subscripts),
            "sizes": dict(self.sizes),
            **({} if self.between is None else {"between": self.between}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Structure":
        """The structure that `to_dict` describes.

        Raises:
            ValueError: `cores` is no list of texts, or `sizes` no mapping; an entry that `to_dict`
                has not, or one that is missing; the structure is none.
        """
        if not isinstance(data, Mapping) or not {"signature", "cores", "sizes"} <= {*data}:
            raise ValueError(f"data={data!r} must be a dict with signature, cores and sizes")
        signature, cores, sizes = data["signature"], data["cores"], data["sizes"]
        known = "signature", "cores", "sizes", "between"
        if more := sorted(map(str, {*data} - {*known})):
            raise ValueError(f"{', '.join(more)}: a Structure has {', '.join(known)} alone")
        check_texts(signature, cores)
        if not isinstance(sizes, Mapping):
            raise ValueError(f"sizes={sizes!r} must be a mapping of axes to sizes")
        if "between" in sizes:
            read_axes("sizes", "between")  # which refuses it
        return cls(signature, *cores, between=data.get("between"), **sizes)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}={value!r}: a Structure is immutable; make a new one")

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        strings = ", ".join(repr(text) for text in (self.signature, *self.subscripts))
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        between = "" if self.between is None else f"between={self.between!r}, "
        return f"Structure({strings}, {between}{sizes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


# ---- what is derived -----------------------------------------------------------------------------


def derive_cores(
    inputs: list[str], outputs: list[str], subscripts: list[list[str]], sizes: Mapping[str, int]
) -> tuple[Core, ...]:
    """The role of every axis of every core."""
    read_after = [set(outputs)]  # of each core, the axes that are read after it; last core first
    for core in reversed(subscripts[1:]):
        read_after.append(read_after[-1] | set(core))
    activation, cores = inputs, []
    for n, (core, later) in enumerate(zip(subscripts, reversed(read_after), strict=True)):
        batch = [axis for axis in core if axis in activation and axis in later]
        fan_in = [axis for axis in core if axis in activation and axis not in later]
        fan_out = [axis for axis in core if axis not in activation]
        repeat = [axis for axis in activation if axis not in core]
        lost = sorted({*repeat, *fan_out} - later)
        if lost:
            raise ValueError(
                f"axis {lost[0]!r} is never consumed: after core {n + 1} {' '.join(core)!r} no "
                f"core reads it and the output {' '.join(outputs)!r} does not have it"
            )
        groups = (batch, fan_out, fan_in, repeat)
        batch_size, rows, columns, repeats = (prod(sizes[a] for a in group) for group in groups)
        cores.append(Core(batch_size, rows, columns, repeats, *map(tuple, groups)))
        activation = [*batch, *repeat, *fan_out]
    missing = [axis for axis in outputs if axis not in activation]
    if missing:
        raise ValueError(
            f"axis {missing[0]!r} of the output {' '.join(outputs)!r} is never produced by any core"
        )
    return tuple(cores)


def _derive_program(
    inputs: Sequence[str],
    outputs: Sequence[str],
    cores: Sequence[Core],
    sizes: Mapping[str, int],
    between: int,
) -> Program:
    """Where each core finds its axes, and where it puts them."""
    read = [[*core.batch_axes, TOKENS, *core.repeat_axes, *core.fan_in_axes] for core in cores]
    made = [[*core.batch_axes, TOKENS, *core.repeat_axes, *core.fan_out_axes] for core in cores]
    before, after = [[TOKENS, *inputs], *made], [*read, [TOKENS, *outputs]]
    steps = [
        Step(core.batch, core.repeat, core.fan_in, core.fan_out, move_of(lying, wanted, sizes))
        for core, lying, wanted in zip(cores, before, read, strict=False)
    ]
    widths = prod(sizes[axis] for axis in inputs), prod(sizes[axis] for axis in outputs)
    numbers = [*widths, len(steps), *(number for step in steps for number in step[:4])]
    for lying, wanted in zip(before, after, strict=True):
        own = [[axis for axis in axes if axis != TOKENS] for axes in (lying, wanted)]
        move = move_of(own[0], own[1], sizes)
        numbers += [len(move.sizes), *move.sizes, *move.order]
    last, numbers = move_of(before[-1], after[-1], sizes), [*numbers, between]
    return Program(tuple(steps), last, *widths, tuple(numbers), between=between)


def move_of(lying: Sequence[str], wanted: Sequence[str], sizes: Mapping[str, int]) -> Move:
    """From one order of axes to another; runs of axes that stay together move as one."""
    lying = [axis for axis in lying if sizes.get(axis, 0) != 1]
    wanted = [axis for axis in wanted if sizes.get(axis, 0) != 1]
    runs: list[list[str]] = []
    for axis in wanted:
        if runs and lying.index(axis) == lying.index(runs[-1][-1]) + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    if len(runs) == 1:
        return Move((), ())
    lie = sorted(runs, key=lambda run: lying.index(run[0]))
    size = tuple(-1 if TOKENS in run else prod(sizes[axis] for axis in run) for run in lie)
    return Move(size, tuple(lie.index(run) for run in runs))


def _derive_matrix(
    inputs: Sequence[str], outputs: Sequence[str], cores: Sequence[Core], sizes: Mapping[str, int]
) -> Matrix:
    """An axis that x and y share has a second number on the side of x: W is diagonal there."""
    number = {axis: n for n, axis in enumerate(sizes)}
    shared = [axis for axis in inputs if axis in outputs]
    column = number | {axis: len(sizes) + n for n, axis in enumerate(shared)}
    return Matrix(
        tuple(tuple(sizes[axis] for axis in core.axes) for core in cores),
        tuple(sizes[axis] for axis in shared),
        (
            *(tuple(number[axis] for axis in core.axes) for core in cores),
            *((number[axis], column[axis]) for axis in shared),
        ),
        (*(number[axis] for axis in outputs), *(column[axis] for axis in inputs)),
    )
