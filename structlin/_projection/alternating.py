"""Alternating least squares, for any structure: a sweep solves for each core in turn with the
others fixed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from .._engine.product import apply
from .._structure.structure import Structure
from .axes import as_squares, contract, group_axes, prime, split_axes, store
from .matrices import approach, identity_like, invert, limit_threads, mean_diagonal, solve_damped
from .outputs import weigh

SWEEPS = 1000  # of alternating least squares, at most
TOLERANCE = 1e-3  # relative decrease of the error by which a sweep must pay
# In sweeps over the blocks of W: how far each block goes beyond its optimum, after the first two
# sweeps, and by what they must pay. By trial, on the layers of all-MiniLM-L6-v2 at half the
# parameters (BTT, Monarch): the errors of 1 and 0.001 within 0.2 %, in half the time.
RELAXATION = 1.7
RELAXED_TOLERANCE = 2e-3
UNRELAXED_SWEEPS = 2
MAX_SERIAL_SIZE = 2**20  # numbers in y up to which one thread is as quick over blocks as two
MAX_STEPS = 20  # of conjugate gradient for a core, at most
STEP_TOLERANCE = 1e-2  # relative decrease of a core's squared gradient that is enough
RESTARTS = 3  # random starts of a structure whose first start may be a bad one
MAX_ROUNDING = 1e-6  # relative error that needs no other start
# numbers in an activation up to which alternating least squares runs in float64 for any weight
MAX_FLOAT64_SIZE = 2**17


def search(
    structure: Structure,
    starts: list[list[Tensor]],
    w: Tensor,
    c: Tensor | None,
    dtype: torch.dtype,
    limit: int,
    root: Tensor | None = None,
) -> list[Tensor]:
    """The best of alternating least squares from the best of `starts` and, unless the structure is
    a chain, from random ones; `limit` sweeps from each. `root` is of the outputs' metric."""
    columns = w.shape[1]
    # Rows x with x^T x = C, (columns, columns), have the errors that all inputs have. Their outputs
    # y = x W^T are the targets, (columns, rows of W).
    x = identity_like(w) if c is None else torch.linalg.cholesky(c).mT
    y = x @ w.mT
    x = F.pad(x, (0, structure.in_features - columns))
    width = max(stage.tail.in_features for stage in _stages_of(structure))
    if dtype != torch.float64 and len(x) * width > MAX_FLOAT64_SIZE:
        x = x.float()
        y = y.float()
    if root is not None:
        root = root.to(x)
    y = weigh(y, root)

    def first_error(cores: list[Tensor]) -> float:
        error: float = _residual(structure, cores, x, y, root).norm().item()
        return error

    candidates = [[core.to(x) for core in start] for start in starts]
    chosen_starts = [min(candidates, key=first_error)]
    if not _is_chain(structure):
        generator = torch.Generator().manual_seed(0)
        for _ in range(RESTARTS):
            chosen_starts.append([core.to(x) for core in _draw(structure, generator)])
    best_cores = chosen_starts[0]
    least_error = inf
    for start in chosen_starts:
        for cores, error in alternate(structure, start, x, y, limit, root):
            if error < least_error:
                best_cores = cores
                least_error = error
        if least_error <= MAX_ROUNDING:
            break
    return [core.to(w) for core in best_cores]


def alternate(
    structure: Structure,
    cores: list[Tensor],
    x: Tensor,
    y: Tensor,
    limit: int = SWEEPS,
    root: Tensor | None = None,
) -> Iterator[tuple[list[Tensor], float]]:
    """Alternating least squares: cores and error ||y - x B^T|| / ||y||, of the start and after each
    sweep.

    The error never increases. A sweep solves for each core in turn with the others fixed, which is
    a linear problem; where the blocks of W are independent matrices (`_is_blockwise`), for both
    factors of each block in turn and then for the last core. Those go beyond each block's optimum
    until a sweep does not gain by it, which is then taken back. `y` may be narrower than the
    structure: the outputs that it lacks are free. With a root of the outputs' metric `y` has been
    multiplied by it, and x B^T is; no core's problem falls into blocks then.
    """
    stages = _stages_of(structure)
    blocks = None
    tolerance = TOLERANCE
    relaxation = 1.0
    if root is None and _is_blockwise(structure):
        blocks = _Blocks(structure, x, y)
        tolerance = RELAXED_TOLERANCE
        relaxation = RELAXATION
    residual = _residual(structure, cores, x, y, root)
    norm = y.norm().item() or 1.0
    error = residual.norm().item() / norm
    yield cores, error
    for sweep in range(limit):
        step_length = 1.0 if sweep < UNRELAXED_SWEEPS else relaxation
        new_cores, new_residual = _sweep(stages, blocks, cores, x, y, residual, step_length, root)
        previous_error = error
        new_error = new_residual.norm().item() / norm
        if new_error < previous_error:
            cores = new_cores
            residual = new_residual
            error = new_error
            yield cores, error
            if error > (1 - tolerance) * previous_error or error <= torch.finfo(y.dtype).eps:
                return
        elif step_length == 1:
            return
        else:  # this sweep went too far: the next ones go to each block's optimum
            relaxation = 1.0


def _sweep(
    stages: list["_Stage"],
    blocks: "_Blocks | None",
    cores: list[Tensor],
    x: Tensor,
    y: Tensor,
    residual: Tensor,
    step_length: float,
    root: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """New cores, and their residual y - x B^T."""
    cores = [*cores]
    if blocks is not None:
        with limit_threads(1, y.is_cpu and y.numel() <= MAX_SERIAL_SIZE):
            cores = blocks.refit(cores, residual, step_length)
    h = x  # what the core reads, (tokens, features)
    for n, stage in enumerate(stages):
        is_last = len(stage.tail.cores) == 1 and stage.tail.out_features == y.shape[1]
        if is_last and root is None:
            cores[n], residual = _regression(stage.tail, cores[n], h, y)
        elif n > 0 or blocks is None:  # the blocks have refitted the first core
            cores[n], residual = _least_squares(stage.tail, cores[n:], h, y, root)
        h = apply(stage.alone, cores[n : n + 1], h)
    return cores, residual


def _residual(
    structure: Structure, cores: list[Tensor], x: Tensor, y: Tensor, root: Tensor | None
) -> Tensor:
    return y - weigh(apply(structure, cores, x)[:, : y.shape[1]], root)


# ---- blocks of W ---------------------------------------------------------------------------------


def _is_blockwise(structure: Structure) -> bool:
    """Whether the structure is two cores, from all inputs and to all outputs: W is then a grid of
    matrices of a rank, one for each value of the axes that W and both cores have, as of BTT and
    Monarch."""
    inputs = set(structure.inputs)
    outputs = set(structure.outputs)
    if len(structure.cores) != 2 or inputs & outputs:
        return False
    first, last = structure.cores
    return inputs <= set(first.axes) and outputs <= set(last.axes)


@dataclass(frozen=True)
class _Column:
    """What one column of blocks reads: inputs X, their gram and its root."""

    inputs: Tensor  #: (tokens, inner), without the last tokens where these inputs are all zero
    gram: Tensor  #: X^T X + ridge, (inner, inner)
    root: Tensor  #: lower triangular, root root^T = gram


class _Blocks:
    """The blocks of W, which are fitted one column after the other.

    With what the other blocks give subtracted from y, a block's optimum is the truncated SVD of its
    regression on its inputs, whitened; one step of subspace iteration from the block as it is goes
    there. A ridge on the change of a block keeps the error from increasing where inputs never vary.
    """

    def __init__(self, structure: Structure, x: Tensor, y: Tensor) -> None:
        inputs = structure.inputs
        outputs = structure.outputs
        first, last = structure.cores
        self.structure = structure
        # the axes that number the columns of blocks and their rows, then those inside a block
        self.column_axes = [axis for axis in inputs if axis in last.axes]
        self.inner_inputs = [axis for axis in inputs if axis not in last.axes]
        self.row_axes = [axis for axis in outputs if axis in first.axes]
        self.inner_outputs = [axis for axis in outputs if axis not in first.axes]
        ends = {*inputs, *outputs}
        self.rank_axes = [axis for axis in first.axes if axis not in ends]
        self.sizes = {**structure.sizes, "tokens": len(x)}
        self.padding = structure.out_features - y.shape[1]

        outputs_of_y = F.pad(torch.ones_like(y[0]), (0, self.padding))  # 0 where y lacks one
        grouped = group_axes(outputs_of_y, outputs, (self.row_axes, self.inner_outputs), self.sizes)
        self.present = grouped[..., None]  # (rows, inner, 1)
        self.columns = self._read_columns(x)

    def _read_columns(self, x: Tensor) -> list[_Column]:
        groups = self.column_axes, ["tokens"], self.inner_inputs
        tokens = ["tokens", *self.structure.inputs]
        columns = group_axes(x, tokens, groups, self.sizes)  # (columns, tokens, inner)
        # x that comes from a covariance is triangular: half of its products are with zeros
        has_numbers = (columns != 0).any(-1)  # (columns, tokens)
        positions = torch.arange(1, len(x) + 1, device=x.device)
        lengths = (has_numbers * positions).amax(-1).tolist()  # up to the last that has
        grams = columns.double().mT @ columns.double()  # (columns, inner, inner)
        mean = mean_diagonal(grams).mean().item() or 1.0
        ridge = 10 * torch.finfo(x.dtype).eps * mean
        grams = grams + ridge * identity_like(grams)
        roots = torch.linalg.cholesky(grams).to(x)
        grams = grams.to(x)
        read_columns = []
        for n, length in enumerate(lengths):
            read_columns.append(_Column(columns[n, :length], grams[n], roots[n]))
        return read_columns

    def refit(self, cores: list[Tensor], residual: Tensor, step_length: float) -> list[Tensor]:
        """Both cores, by one pass over the columns of blocks.

        Args:
            residual: y - x B^T of these cores.
            step_length: 1 goes to the regression, more beyond it.

        Returns:
            The new cores. Outputs that y lacks are zero in them.
        """
        first, last = self.structure.cores
        right_groups = self.column_axes, self.row_axes, self.rank_axes, self.inner_inputs
        left_groups = self.column_axes, self.row_axes, self.inner_outputs, self.rank_axes
        # (columns, rows, rank, inner inputs), (columns, rows, inner outputs, rank)
        right = group_axes(cores[0], [*first.axes], right_groups, self.sizes)
        left = group_axes(cores[1], [*last.axes], left_groups, self.sizes) * self.present
        padded = F.pad(residual, (0, self.padding))
        groups = ["tokens"], [*self.row_axes, *self.inner_outputs]
        names = ["tokens", *self.structure.outputs]
        missing = group_axes(padded, names, groups, self.sizes).clone()  # (tokens, outputs)

        new_right = []
        new_left = []
        for n, column in enumerate(self.columns):
            factors = _refit_column(column, left[n], right[n], missing, step_length)
            new_left.append(factors[0])
            new_right.append(factors[1])
        return [
            store(self.structure, 0, torch.stack(new_right), [*chain(*right_groups)]),
            store(self.structure, 1, torch.stack(new_left), [*chain(*left_groups)]),
        ]


def _refit_column(
    column: _Column, left: Tensor, right: Tensor, missing: Tensor, step_length: float
) -> tuple[Tensor, Tensor]:
    """The new factors of one column of blocks L R: L' `(rows, inner outputs, rank)` and R' `(rows,
    rank, inner inputs)`.

    `missing` is M `(tokens, outputs)`, what all blocks still miss of y, and is brought up to date
    for the columns after this one. With A = root root^T the gram of the inputs X, the regression of
    M on X is L R + M^T X A^-1. So `goal` is that times A, and `white`, goal root^-T, is what the
    SVD truncates.
    """
    missing = missing[: len(column.inputs)]
    block = left @ right  # (rows, inner outputs, inner inputs)
    regression = (missing.mT @ column.inputs).reshape(block.shape)
    goal = step_length * regression + block @ column.gram
    white = torch.linalg.solve_triangular(column.root, goal.mT, upper=False).mT
    new_left, basis = approach(white, right @ column.root)  # (rows, rank, inner inputs)
    new_right = torch.linalg.solve_triangular(column.root.mT, basis.mT, upper=True).mT
    change = new_left @ new_right - block
    missing.addmm_(column.inputs, change.flatten(0, 1).mT, alpha=-1)
    return new_left, new_right


# ---- one core ------------------------------------------------------------------------------------


def _regression(structure: Structure, core: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The core of a structure that has only one for the least ||y - x B^T||^2 + ridge ||core -
    new||^2, and the residual: normal equations, one for each block, that all uses of the block
    share."""
    (only,) = structure.cores
    sizes = {**structure.sizes, "tokens": len(x)}
    inputs = ["tokens", *structure.inputs]
    outputs = ["tokens", *structure.outputs]
    uses = ["tokens", *only.repeat_axes]
    # (batch, uses, fan_in), (batch, uses, fan_out)
    rows = group_axes(x, inputs, (only.batch_axes, uses, only.fan_in_axes), sizes)
    goal = group_axes(y, outputs, (only.batch_axes, uses, only.fan_out_axes), sizes)
    residual = goal - rows @ core.mT  # (batch, uses, fan_out)
    change = solve_damped(rows.mT @ rows, rows.mT @ residual)  # (batch, fan_in, fan_out)
    residual = residual - rows @ change
    names = [*only.batch_axes, *uses, *only.fan_out_axes]
    residual_of_y = group_axes(residual, names, (["tokens"], structure.outputs), sizes)
    return core + change.mT, residual_of_y


def _least_squares(
    tail: Structure, cores: list[Tensor], h: Tensor, y: Tensor, root: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The first core of `tail` for a smaller ||y - tail(h) root||, and that residual, by
    preconditioned conjugate gradient (CGLS: residual is y's, gradient that of the core).

    What is minimised is ||y - tail(h)||^2 + ridge ||core - cores[0]||^2: where y has no say, the
    core stays.
    """

    def predict(core: Tensor) -> Tensor:
        prediction = apply(tail, [core, *cores[1:]], h)
        return weigh(prediction[:, : y.shape[1]], root)

    core = cores[0]
    prediction, transposed, *_ = torch.func.vjp(predict, core)
    preconditioner = _Preconditioner(tail, cores, h)
    ridge = preconditioner.ridge
    residual = y - prediction
    direction = torch.zeros_like(core)
    first_descent = 0.0
    last_descent = 1.0
    for _ in range(MAX_STEPS):
        gradient = transposed(residual)[0] - ridge * (core - cores[0])
        conjugate = preconditioner.apply(gradient)
        descent = (gradient * conjugate).sum().item()  # g^T P g
        first_descent = first_descent or descent
        if not descent > STEP_TOLERANCE * first_descent:
            break
        direction = conjugate + descent / last_descent * direction  # Fletcher & Reeves
        last_descent = descent
        change = predict(direction)  # as y: the prediction is linear in the core
        curvature = change.square().sum().item()
        damping = ridge * direction.square().sum().item()
        step = descent / (curvature + damping)
        core = core + step * direction
        residual = residual - step * change
    return core, residual


class _Preconditioner:
    """The inverse of the Kronecker part of the normal equations of the first core of `tail`, and a
    ridge for them.

    A core is a batched matrix between the features `h` before it and the linear maps after it; if
    inputs are white, the normal equations of each block are (maps^T maps) (x) (h^T h), for all
    families.
    """

    def __init__(self, tail: Structure, cores: list[Tensor], h: Tensor) -> None:
        core = tail.cores[0]
        ends = {*tail.inputs, *tail.outputs}
        self.axes = [*core.axes]
        self.sizes = {**tail.sizes, "tokens": len(h)}
        fan_in = [*core.fan_in_axes]
        fan_out = [axis for axis in core.fan_out_axes if axis not in tail.outputs]
        self.primed_axes = prime(self.axes, [*fan_in, *fan_out])

        # maps^T maps, (blocks, fan_out, fan_out'): each later core twice, the second time with a
        # prime on the axes that lie between cores
        read_later = set(chain.from_iterable(later.axes for later in tail.cores[1:]))
        hidden = [axis for axis in read_later if axis not in ends]
        inside = {*fan_in, *fan_out}
        blocks = [axis for axis in self.axes if axis in read_later and axis not in inside]
        after_axes = [*blocks, *fan_out, *prime(fan_out)]
        maps = []
        for n in range(len(tail.cores) - 1, 0, -1):
            names = [*tail.cores[n].axes]
            tensor = split_axes(cores[n], names, self.sizes)
            maps += [(tensor, names), (tensor, prime(names, hidden))]
        after = torch.ones((), dtype=h.dtype, device=h.device)
        if maps:
            after = contract(after_axes, *maps)
        gram_after = as_squares(after, fan_out, self.sizes)

        # h^T h, (batch, fan_in, fan_in')
        tokens = ["tokens", *tail.inputs]
        features = split_axes(h, tokens, self.sizes)
        before_axes = [*core.batch_axes, *fan_in, *prime(fan_in)]
        before = contract(before_axes, (features, tokens), (features, prime(tokens, fan_in)))
        gram_before = as_squares(before, fan_in, self.sizes)

        # (A (x) B)^-1 = A^-1 (x) B^-1, so that each is inverted by itself
        self.factors = [
            (split_axes(invert(gram_after), after_axes, self.sizes), after_axes),
            (split_axes(invert(gram_before), before_axes, self.sizes), before_axes),
        ]
        scale = mean_diagonal(gram_after).mean().item() * mean_diagonal(gram_before).mean().item()
        self.ridge = sqrt(torch.finfo(h.dtype).eps) * scale / core.repeat

    def apply(self, gradient: Tensor) -> Tensor:
        """A^-1 G B^-1, block by block."""
        operand = split_axes(gradient, self.axes, self.sizes), self.primed_axes
        return contract(self.axes, operand, *self.factors).reshape(gradient.shape)


# ---- structures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """A core of a structure, as structures of their own."""

    alone: Structure
    tail: Structure  #: the core and all after it


def _stages_of(structure: Structure) -> list[_Stage]:
    states = [[*structure.inputs]]  # the axes of the activation before each core, then of y
    for core in structure.cores[1:]:
        states.append([*core.batch_axes, *core.repeat_axes, *core.fan_in_axes])
    states.append([*structure.outputs])
    stages = []
    for n in range(len(structure.cores)):
        cores = structure.subscripts[n:]
        alone = _make_structure(states[n], states[n + 1], cores[:1], structure.sizes)
        tail = _make_structure(states[n], structure.outputs, cores, structure.sizes)
        stages.append(_Stage(alone, tail))
    return stages


def _make_structure(
    inputs: Sequence[str], outputs: Sequence[str], cores: Sequence[str], sizes: Mapping[str, int]
) -> Structure:
    named = {*inputs, *outputs}
    for core in cores:
        named.update(core.split())
    signature = f"{' '.join(inputs)} -> {' '.join(outputs)}"
    return Structure(signature, *cores, **{axis: sizes[axis] for axis in sizes if axis in named})


def _is_chain(structure: Structure) -> bool:
    """Whether every core can absorb any change of basis in what the core before it hands over: then
    cutting the cores off one by one loses nothing."""
    axes_of_cores = [set(core.axes) for core in structure.cores]
    ends = {*structure.inputs, *structure.outputs}
    for n, axes in enumerate(axes_of_cores[:-1]):
        axes_before = set().union(*axes_of_cores[:n])
        next_axes = axes_of_cores[n + 1]
        axes_after_next = set().union(*axes_of_cores[n + 2 :])
        rank_axes = axes - ends - axes_before  # made by this core, and summed by another
        skips_the_next_core = not axes & axes_after_next <= next_axes
        if skips_the_next_core or rank_axes & axes_after_next:
            return False
    return True


def _draw(structure: Structure, generator: torch.Generator) -> list[Tensor]:
    cores = []
    for core in structure.cores:
        normal = torch.randn(core.shape, generator=generator, dtype=torch.float64)
        cores.append(normal / sqrt(core.fan_in))
    return cores
