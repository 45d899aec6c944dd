"""A structured matrix as an einsum with a fixed contraction order, written in axis names. No torch
here.

Everything that a structure implies is computed here, once, when it is made: for every core the four
integers batch, fan_out, fan_in and repeat, and the `Program`, which says in integers alone how the
cores are applied. The product, the engines, the matrix and the counters of FLOPs read those
integers, and no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
    final_move: Move
    in_features: int
    out_features: int
    numbers: tuple[int, ...]
    padding: tuple[int, int] = (0, 0)  #: columns, taken to be zero in x, and rows, dropped from y
    between: int = 0  #: the number of an activation of `ACTIVATIONS`, from 1; 0: none

    def fit(self, columns: int, rows: int) -> "Program":
        """Return the program of a layer with so many columns and rows of W, at most these."""
        padding = self.in_features - columns, self.out_features - rows
        numbers = columns, rows, *self.numbers[2:]
        return Program(self.steps, self.final_move, columns, rows, numbers, padding, self.between)


def steps_of(program: Sequence[int]) -> list[Sequence[int]]:
    """batch, repeat, fan_in and fan_out of each core."""
    number_of_cores = program[2]
    stop = 3 + 4 * number_of_cores
    return [program[start : start + 4] for start in range(3, stop, 4)]


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
        TypeError: a core is no text, a size no integer.

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
        inputs = read_axes("signature", left)
        outputs = read_axes("signature", right)
        axes_of_cores = [read_axes(f"core {n}", core) for n, core in enumerate(cores, start=1)]
        check_between(between, cores)
        check_sizes(sizes, [*inputs, *outputs, *chain.from_iterable(axes_of_cores)])
        sizes = {axis: int(sizes[axis]) for axis in sorted(sizes)}
        derived_cores = derive_cores(inputs, outputs, axes_of_cores, sizes)
        tidy_signature = f"{' '.join(inputs)} -> {' '.join(outputs)}"
        subscripts = tuple(" ".join(axes) for axes in axes_of_cores)
        activation = 0 if between is None else 1 + ACTIVATIONS.index(between)
        program = _derive_program(inputs, outputs, derived_cores, sizes, activation)
        flops = sum(core.flops for core in derived_cores)
        self.__dict__.update(
            signature=tidy_signature,
            subscripts=subscripts,
            between=between,
            sizes=MappingProxyType(sizes),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            in_features=program.in_features,
            out_features=program.out_features,
            cores=derived_cores,
            params=sum(core.params for core in derived_cores),
            flops=flops,
            density=flops / (2 * program.in_features * program.out_features),
            program=program,
            matrix=_derive_matrix(inputs, outputs, derived_cores, sizes),
            plain=between is None and _is_plain(program),
            _key=(tidy_signature, subscripts, tuple(sizes.items()), between),
        )

    def activate(self, between: str | None = ACTIVATIONS[0]) -> "Structure":
        """Return the same structure with this activation between its cores, or with none."""
        return Structure(self.signature, *self.subscripts, between=between, **self.sizes)

    def require_matrix(self, what: str) -> None:
        """Raises: ValueError: `what` asks for W, and there is an activation between the cores."""
        if self.between is not None:
            raise ValueError(
                f"{what} needs a matrix, and a structure with between={self.between!r} is none; "
                f"the same without activate() or between= is one: {self!r}"
            )

    def __add__(self, other: object) -> "Structure":
        if isinstance(other, Structure):
            refuse_sum(self, other)
        return NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """As plain data (for JSON); `Structure.from_dict` is its inverse."""
        data = {
            "signature": self.signature,
            "cores": list(self.subscripts),
            "sizes": dict(self.sizes),
        }
        if self.between is not None:
            data["between"] = self.between
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Structure":
        """The structure that `to_dict` describes.

        Raises:
            ValueError: an entry that `to_dict` has not, or one that is missing; the structure is
                none.
            TypeError: `cores` is no list of texts, or `sizes` no mapping.
        """
        is_mapping = isinstance(data, Mapping)
        if not is_mapping or not {"signature", "cores", "sizes"} <= {*data}:
            kind = ValueError if is_mapping else TypeError
            raise kind(f"data={data!r} must be a dict with signature, cores and sizes")
        signature = data["signature"]
        cores = data["cores"]
        sizes = data["sizes"]
        entries = "signature", "cores", "sizes", "between"
        unknown = sorted(map(str, {*data} - {*entries}))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: a Structure has {', '.join(entries)} alone")
        check_texts(signature, cores)
        if not isinstance(sizes, Mapping):
            raise TypeError(f"sizes={sizes!r} must be a mapping of axes to sizes")
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
    axes_read_after = [set(outputs)]  # of each core; the last core comes first
    for axes in reversed(subscripts[1:]):
        axes_read_after.append(axes_read_after[-1] | set(axes))
    axes_read_after.reverse()

    activation = inputs
    cores = []
    for number, axes in enumerate(subscripts, start=1):
        later = axes_read_after[number - 1]
        batch = [axis for axis in axes if axis in activation and axis in later]
        fan_in = [axis for axis in axes if axis in activation and axis not in later]
        fan_out = [axis for axis in axes if axis not in activation]
        repeat = [axis for axis in activation if axis not in axes]
        lost = sorted({*repeat, *fan_out} - later)
        if lost:
            raise ValueError(
                f"axis {lost[0]!r} is never consumed: after core {number} {' '.join(axes)!r} no "
                f"core reads it and the output {' '.join(outputs)!r} does not have it"
            )
        core = Core(
            batch=_count(batch, sizes),
            fan_out=_count(fan_out, sizes),
            fan_in=_count(fan_in, sizes),
            repeat=_count(repeat, sizes),
            batch_axes=tuple(batch),
            fan_out_axes=tuple(fan_out),
            fan_in_axes=tuple(fan_in),
            repeat_axes=tuple(repeat),
        )
        cores.append(core)
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
    steps = []
    moves_of_one_token = []
    lying = [TOKENS, *inputs]
    for core in cores:
        # The activation lies as the core before made it, `(batch, tokens, repeat, fan_out)`. This
        # core reads it as `(batch, tokens, repeat, fan_in)` and multiplies by its blocks,
        # `(batch, fan_out, fan_in)`.
        wanted = [*core.batch_axes, TOKENS, *core.repeat_axes, *core.fan_in_axes]
        move = move_of(lying, wanted, sizes)
        steps.append(Step(core.batch, core.repeat, core.fan_in, core.fan_out, move))
        moves_of_one_token.append(move_of(_features(lying), _features(wanted), sizes))
        lying = [*core.batch_axes, TOKENS, *core.repeat_axes, *core.fan_out_axes]
    final_move = move_of(lying, [TOKENS, *outputs], sizes)
    moves_of_one_token.append(move_of(_features(lying), outputs, sizes))

    in_features = _count(inputs, sizes)
    out_features = _count(outputs, sizes)
    numbers = [in_features, out_features, len(steps)]
    for step in steps:
        numbers += [step.batch, step.repeat, step.fan_in, step.fan_out]
    for move in moves_of_one_token:
        numbers += [len(move.sizes), *move.sizes, *move.order]
    numbers.append(between)
    return Program(
        tuple(steps), final_move, in_features, out_features, tuple(numbers), between=between
    )


def _is_plain(program: Program) -> bool:
    """Whether every core is one matrix, and no activation moves."""
    for step in program.steps:
        if step.batch != 1 or step.repeat != 1 or step.move.order:
            return False
    return not program.final_move.order


def _features(axes: Sequence[str]) -> list[str]:
    """The axes of one token."""
    return [axis for axis in axes if axis != TOKENS]


def _count(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """How many entries there are over these axes."""
    return prod(sizes[axis] for axis in axes)


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
    runs_as_they_lie = sorted(runs, key=lambda run: lying.index(run[0]))
    sizes_of_runs = [-1 if TOKENS in run else _count(run, sizes) for run in runs_as_they_lie]
    order = [runs_as_they_lie.index(run) for run in runs]
    return Move(tuple(sizes_of_runs), tuple(order))


def _derive_matrix(
    inputs: Sequence[str], outputs: Sequence[str], cores: Sequence[Core], sizes: Mapping[str, int]
) -> Matrix:
    """An axis that x and y share has a second number on the side of x: W is diagonal there."""
    shared_axes = [axis for axis in inputs if axis in outputs]
    row_numbers = {axis: n for n, axis in enumerate(sizes)}
    column_numbers = dict(row_numbers)
    for n, axis in enumerate(shared_axes, start=len(sizes)):
        column_numbers[axis] = n

    shapes = []
    numbers = []
    for core in cores:
        shapes.append(tuple(sizes[axis] for axis in core.axes))
        numbers.append(tuple(row_numbers[axis] for axis in core.axes))
    for axis in shared_axes:
        numbers.append((row_numbers[axis], column_numbers[axis]))
    identities = [sizes[axis] for axis in shared_axes]
    result = [row_numbers[axis] for axis in outputs]
    result += [column_numbers[axis] for axis in inputs]
    return Matrix(tuple(shapes), tuple(identities), tuple(numbers), tuple(result))
