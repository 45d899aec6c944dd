"""One axis of a structure, divided over processes: what each of them multiplies by. No torch here.

`y = W x` is an einsum, so each process may take an equal part of one axis. A core that has the axis
is cut there; the other cores stay whole. If x has the axis, each process reads its part of x. If y
has it, each process makes its part of y. Where the axis begins, the gradient is a sum over the
processes; where it ends, the activation is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .structure import Core, Structure

ROLES = ("colwise", "rowwise")


@dataclass(frozen=True)
class Cut:
    """A structure of which one axis is divided over `parts` processes.

    The cores before `start` and from `stop` on are whole on every process, and so is what they read
    and make. Those between have the axis, or repeat over it. The cut begins where y would be ready
    for it, and ends where the axis is summed, if the activation is no wider there than at x or y:
    the sum over processes is then the smallest.
    """

    axis: str
    parts: int
    structure: Structure  #: the whole one
    dims: tuple[int | None, ...]  #: of each core, the dimension that is cut; None: it stays whole
    start: int  #: number of the first core that works on a part
    stop: int  #: number of the core after the last that does
    head: Structure | None  #: of the cores before `start`
    body: Structure  #: of the others, as one process has them
    tail: Structure | None  #: of the cores from `stop` on

    @property
    def cuts_x(self) -> bool:
        return self.axis in self.structure.inputs

    @property
    def cuts_y(self) -> bool:
        return self.axis in self.structure.outputs

    @property
    def shares_x(self) -> bool:
        """Whether every process reads all of x, and has a part of its gradient: a term of a sum."""
        return not self.cuts_x and self.head is None

    @property
    def sums_y(self) -> bool:
        """Whether y is a sum over the processes."""
        return not self.cuts_y and self.tail is None

    @property
    def whole_cores(self) -> list[int]:
        """The cores that are whole while they work on a part: their gradients are sums over the
        processes."""
        return [n for n in range(self.start, self.stop) if self.dims[n] is None]


def axis_of(structure: Structure, role: str) -> str:
    """The outermost axis of y ("colwise") or of x ("rowwise"), or any axis by its name.

    >>> from .families import BTT
    >>> btt = BTT(rank=2).structure(64, 64)
    >>> axis_of(btt, "colwise"), axis_of(btt, "rowwise"), axis_of(btt, "r1")
    ('i2', 'j1', 'r1')
    """
    if role in ROLES:
        axes = structure.outputs if role == "colwise" else structure.inputs
        return next((axis for axis in axes if structure.sizes[axis] > 1), axes[0])
    if role not in structure.sizes:
        names = ", ".join(map(repr, structure.sizes))
        raise ValueError(f"axis={role!r} is no axis of {structure!r}: it has {names}")
    return role


def outermost(structure: Structure, axis: str) -> Structure:
    """The same matrix, with cores that are stored so that `axis` is outermost in its dimension: a
    part of the axis is then one slice of the core.

    >>> from .families import BTT
    >>> outermost(BTT(rank=2).structure(64, 64), "i2").subscripts
    ('i2 j1 r1 j2', 'i2 i1 j1 r1')
    """
    texts = []
    for core, text in zip(structure.cores, structure.subscripts, strict=True):
        dimensions = core.batch_axes, core.fan_out_axes, core.fan_in_axes
        if any(_lies_inside(axes, axis, structure.sizes) for axes in dimensions):
            others = [name for name in text.split() if name != axis]
            texts.append(" ".join([axis, *others]))
        else:
            texts.append(text)
    return Structure(structure.signature, *texts, between=structure.between, **structure.sizes)


def cut(structure: Structure, axis: str, parts: int) -> Cut:
    """Divide `axis` over `parts` processes.

    Raises:
        ValueError: the structure has no such axis; `parts` does not divide its size; it is not the
            outermost of x or of y, so that a part of it would be no slice. The message names the
            axes that can be divided.

    >>> from .families import LowRank
    >>> divided = cut(LowRank(rank=4).structure(64, 128), "o", 2)
    >>> divided.dims, divided.head, divided.body
    ((None, 1), Structure('i -> r', 'r i', i=64, r=4), Structure('r -> o', 'o r', o=64, r=4))
    """
    axis_of(structure, axis)  # which refuses what is no axis
    _require_divisible(structure, axis, parts)
    structure = outermost(structure, axis)
    dims = tuple(_find_dim(core, axis) for core in structure.cores)
    activations = [_axes_after(core) for core in structure.cores]
    start = _find_start(structure, axis, dims, activations)
    stop = _find_stop(structure, axis, dims, activations)

    axes_in = structure.inputs if start == 0 else activations[start - 1]
    axes_out = structure.outputs if stop == len(dims) else activations[stop - 1]
    head = _take(structure, structure.inputs, axes_in, 0, start)
    body = _take(structure, axes_in, axes_out, start, stop, {axis: structure.sizes[axis] // parts})
    tail = _take(structure, axes_out, structure.outputs, stop, len(dims))
    assert body is not None
    return Cut(axis, parts, structure, dims, start, stop, head, body, tail)


def _axes_after(core: Core) -> tuple[str, ...]:
    """The axes of the activation that a core makes."""
    return *core.batch_axes, *core.repeat_axes, *core.fan_out_axes


def _find_start(
    structure: Structure,
    axis: str,
    dims: Sequence[int | None],
    activations: Sequence[tuple[str, ...]],
) -> int:
    """The number of the first core that works on a part; `activations` has the axes after each."""
    if axis in structure.inputs:
        return 0
    first_cut_core = next(n for n, dim in enumerate(dims) if dim is not None)
    if first_cut_core == 0:
        return 0
    activation = activations[first_cut_core - 1]
    width = _width(structure, activation)
    # Backward the gradient is summed here, so a wide activation costs more than dx.
    if activation and width <= structure.in_features:
        return first_cut_core
    return 0


def _find_stop(
    structure: Structure,
    axis: str,
    dims: Sequence[int | None],
    activations: Sequence[tuple[str, ...]],
) -> int:
    """The number of the core after the last that works on a part."""
    count = len(dims)
    if axis in structure.outputs:
        return count
    stop = 1 + max(n for n, dim in enumerate(dims) if dim is not None)
    activation = activations[stop - 1]
    is_narrow = _width(structure, activation) <= structure.out_features
    # Forward the activation is summed here. What is applied between two cores needs the sum.
    if activation and (is_narrow or structure.between):
        return stop
    return count


def _width(structure: Structure, axes: Sequence[str]) -> int:
    """How many numbers a token has over these axes."""
    return prod(structure.sizes[axis] for axis in axes)


def _take(
    structure: Structure,
    inputs: Sequence[str],
    outputs: Sequence[str],
    start: int,
    stop: int,
    divided: Mapping[str, int] | None = None,
) -> Structure | None:
    """The cores from `start` to `stop` as a structure of its own; None if there are none."""
    texts = structure.subscripts[start:stop]
    if not texts:
        return None
    sizes = {**structure.sizes, **(divided or {})}
    axes = {*inputs, *outputs, *" ".join(texts).split()}
    sizes_here = {axis: size for axis, size in sizes.items() if axis in axes}
    between = structure.between if len(texts) > 1 else None
    signature = f"{' '.join(inputs)} -> {' '.join(outputs)}"
    return Structure(signature, *texts, between=between, **sizes_here)


def _find_dim(core: Core, axis: str) -> int | None:
    """The dimension of a stored core that has the axis."""
    dimensions = core.batch_axes, core.fan_out_axes, core.fan_in_axes
    return next((dim for dim, axes in enumerate(dimensions) if axis in axes), None)


def _lies_inside(axes: Sequence[str], axis: str, sizes: Mapping[str, int]) -> bool:
    """Whether another axis lies around this one, so that a part of it has gaps."""
    if axis not in axes:
        return False
    outer_axes = axes[: axes.index(axis)]
    return prod(sizes[name] for name in outer_axes) > 1


def _require_divisible(structure: Structure, axis: str, parts: int) -> None:
    obstacle = _find_obstacle(structure, axis, parts)
    if not obstacle:
        return
    advice = "none of its axes can be"
    fitting = [name for name in structure.sizes if not _find_obstacle(structure, name, parts)]
    if fitting:
        described = ", ".join(f"{name!r} ({_describe(structure, name)})" for name in fitting)
        advice = f"it can be cut along {described}"
    raise ValueError(
        f"axis={axis!r} cannot be divided over {parts} processes: {obstacle}; {advice}: "
        f"{structure!r}"
    )


def _find_obstacle(structure: Structure, axis: str, parts: int) -> str:
    """Why the axis cannot be divided over so many processes; empty if it can."""
    size = structure.sizes[axis]
    if size % parts:
        return f"its size is {size}, which is no multiple of {parts}"
    for side, axes in (("x", structure.inputs), ("y", structure.outputs)):
        if _lies_inside(axes, axis, structure.sizes):
            return f"it is not the outermost axis of {side}, so that its part of {side} has gaps"
    return ""


def _describe(structure: Structure, axis: str) -> str:
    """Whose axis it is, and its size."""
    axes = {"x": structure.inputs, "y": structure.outputs}
    sides = [side for side in axes if axis in axes[side]]
    return f"size {structure.sizes[axis]}, of {' and '.join(sides) or 'the cores alone'}"
