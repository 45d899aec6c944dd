"""Alternating least squares, for any structure: a sweep solves for each core in turn with the
others fixed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod, sqrt

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
RELAXATION, RELAXED_TOLERANCE = 1.7, 2e-3
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
    # x^T x = C: these rows, (columns, columns), have the errors that all inputs have
    x = identity_like(w) if c is None else torch.linalg.cholesky(c).mT
    y, x = x @ w.mT, F.pad(x, (0, structure.in_features - columns))  # y: (columns, rows of W)
    width = max(tail.in_features for _, tail in _tails(structure))
    if dtype != torch.float64 and len(x) * width > MAX_FLOAT64_SIZE:
        x, y = x.float(), y.float()
    root = None if root is None else root.to(x)
    y = weigh(y, root)
    starts = [[core.to(x) for core in start] for start in starts]
    starts = [min(starts, key=lambda start: _residual(structure, start, x, y, root).norm().item())]
    if not _is_chain(structure):
        generator = torch.Generator().manual_seed(0)
        starts += [[core.to(x) for core in _draw(structure, generator)] for _ in range(RESTARTS)]
    best, least = starts[0], float("inf")
    for start in starts:
        for cores, error in alternate(structure, start, x, y, limit, root):
            if error < least:
                best, least = cores, error
        if least <= MAX_ROUNDING:
            break
    return [core.to(w) for core in best]


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
    stages = _tails(structure)
    blockwise = root is None and _is_blockwise(structure)
    refit = _blockwise(structure, x, y) if blockwise else None
    tolerance, relaxation = (RELAXED_TOLERANCE, RELAXATION) if refit else (TOLERANCE, 1.0)
    residual = _residual(structure, cores, x, y, root)
    norm = y.norm().item() or 1.0
    error = residual.norm().item() / norm
    yield cores, error
    for sweep in range(limit):
        ahead = relaxation if sweep > 1 else 1.0
        found, rest, h = [*cores], residual, x  # h: what the core reads, (tokens, features)
        if refit:
            with limit_threads(1, y.is_cpu and y.numel() <= MAX_SERIAL_SIZE):
                found = refit(cores, residual, ahead)
        for n, (step, tail) in enumerate(stages):
            last = len(tail.cores) == 1 and tail.out_features == y.shape[1]
            if last and root is None:
                found[n], rest = _regression(tail, found[n], h, y)
            elif n or not refit:
                found[n], rest = _least_squares(tail, found[n:], h, y, root)
            h = apply(step, found[n : n + 1], h)
        previous, now = error, rest.norm().item() / norm
        if now < previous:
            cores, residual, error = found, rest, now
            yield cores, error
            if error > (1 - tolerance) * previous or error <= torch.finfo(y.dtype).eps:
                return
        elif ahead == 1:
            return
        else:
            relaxation = 1.0


def _residual(
    structure: Structure, cores: list[Tensor], x: Tensor, y: Tensor, root: Tensor | None
) -> Tensor:
    return y - weigh(apply(structure, cores, x)[:, : y.shape[1]], root)


def _is_blockwise(structure: Structure) -> bool:
    """Whether the structure is two cores, from all inputs and to all outputs: W is then a grid of
    matrices of a rank, one for each value of the axes that W and both cores have, as of BTT and
    Monarch."""
    inputs, outputs = {*structure.inputs}, {*structure.outputs}
    if len(structure.cores) != 2 or inputs & outputs:
        return False
    first, last = (core.axes for core in structure.cores)
    return inputs <= {*first} and outputs <= {*last}


def _blockwise(
    structure: Structure, x: Tensor, y: Tensor
) -> Callable[[list[Tensor], Tensor, float], list[Tensor]]:
    """A pass over the blocks of W: one column of blocks after the other gets nearer to its optimum
    with the others fixed.

    With what the other blocks give subtracted from y, a block's optimum is the truncated SVD of its
    regression on its inputs, whitened; one step of subspace iteration from the block as it is goes
    there. A ridge on the change of a block keeps the error from increasing where inputs never vary.

    Returns:
        A function of the cores, their residual y - x B^T, and how far to go: 1 to the regression,
        more beyond it. Outputs that y lacks are zero in the new cores.
    """
    inputs, outputs = structure.inputs, structure.outputs
    first, last = (core.axes for core in structure.cores)
    given = [axis for axis in inputs if axis in last]  # they number the columns of blocks
    own = [axis for axis in inputs if axis not in last]  # the columns of a block
    shared = [axis for axis in outputs if axis in first]  # they number the rows of blocks
    rest = [axis for axis in outputs if axis not in first]  # the rows of a block
    bond = [axis for axis in first if axis not in (*inputs, *outputs)]  # its rank
    factors = [given, shared, bond, own], [given, shared, rest, bond]
    size, padding = {**structure.sizes, "tokens": len(x)}, structure.out_features - y.shape[1]
    ones = F.pad(torch.ones_like(y[0]), (0, padding))  # (outputs,), 0 where y lacks one
    present = group_axes(ones, outputs, (shared, rest), size)[..., None]  # (shared, rest, 1)

    columns = group_axes(x, ["tokens", *inputs], (given, ["tokens"], own), size)
    # x that comes from a covariance is triangular: half of its products are with zeros
    used = (columns != 0).any(-1)
    ends = (used * torch.arange(1, len(x) + 1, device=x.device)).amax(-1).tolist()  # (given,)
    grams = columns.double().mT @ columns.double()  # (given, own, own)
    ridge = 10 * torch.finfo(x.dtype).eps * (mean_diagonal(grams).mean().item() or 1.0)
    grams = grams + ridge * identity_like(grams)
    roots, grams = torch.linalg.cholesky(grams).to(x), grams.to(x)  # for each column of blocks

    def refit(cores: list[Tensor], residual: Tensor, ahead: float) -> list[Tensor]:
        padded = F.pad(residual, (0, padding))
        groups = ["tokens"], [*shared, *rest]
        missing = group_axes(padded, ["tokens", *outputs], groups, size).clone()
        axes = [[*core.axes] for core in structure.cores]
        # (given, shared, bond, own), (given, shared, rest, bond)
        right, left = (group_axes(*core, size) for core in zip(cores, axes, factors, strict=True))
        steps, found = zip(ends, columns, grams, roots, left * present, right, strict=True), []
        for end, column, gram, root, old_left, old_right in steps:
            # (tokens, shared rest), (tokens, own), (shared, rest, own)
            part, column, old = missing[:end], column[:end], old_left @ old_right
            # the regression of what is missing on these inputs, times their gram: (shared, rest,
            # own); times the inverse of its root it is what the SVD truncates
            goal = ahead * (part.mT @ column).reshape(old.shape) + old @ gram
            white = torch.linalg.solve_triangular(root, goal.mT, upper=False).mT
            new_left, basis = approach(white, old_right @ root)  # basis: (shared, bond, own)
            new_right = torch.linalg.solve_triangular(root.mT, basis.mT, upper=True).mT
            change = new_left @ new_right - old
            part.addmm_(column, change.flatten(0, 1).mT, alpha=-1)  # for the blocks after it
            found.append((new_right, new_left))
        return [
            store(structure, n, torch.stack(parts), [axis for group in groups for axis in group])
            for n, (parts, groups) in enumerate(zip(zip(*found, strict=True), factors, strict=True))
        ]

    return refit


def _regression(structure: Structure, core: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The core of a structure that has only one for the least ||y - x B^T||^2 + ridge ||core -
    new||^2, and the residual: normal equations, one for each block, that all uses of the block
    share."""
    (only,), inputs, outputs = structure.cores, structure.inputs, structure.outputs
    size, uses = {**structure.sizes, "tokens": len(x)}, ["tokens", *only.repeat_axes]
    # (batch, uses, fan_in), (batch, uses, fan_out)
    rows = group_axes(x, ["tokens", *inputs], (only.batch_axes, uses, only.fan_in_axes), size)
    goal = group_axes(y, ["tokens", *outputs], (only.batch_axes, uses, only.fan_out_axes), size)
    residual = goal - rows @ core.mT  # (batch, uses, fan_out)
    change = solve_damped(rows.mT @ rows, rows.mT @ residual)  # (batch, fan_in, fan_out)
    lying = [*only.batch_axes, *uses, *only.fan_out_axes]
    residual = group_axes(residual - rows @ change, lying, (["tokens"], outputs), size)  # as y
    return core + change.mT, residual


def _least_squares(
    tail: Structure, cores: list[Tensor], h: Tensor, y: Tensor, root: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The first core of `tail` for a smaller ||y - tail(h) root||, and that residual, by
    preconditioned conjugate gradient (CGLS: residual is y's, gradient that of the core).

    What is minimised is ||y - tail(h)||^2 + ridge ||core - cores[0]||^2: where y has no say, the
    core stays.
    """

    def predict(core: Tensor) -> Tensor:
        return weigh(apply(tail, [core, *cores[1:]], h)[:, : y.shape[1]], root)

    core, direction = cores[0], torch.zeros_like(cores[0])
    prediction, transposed, *_ = torch.func.vjp(predict, core)
    precondition, ridge = _preconditioner(tail, cores, h)
    residual, first, last = y - prediction, 0.0, 1.0
    for _ in range(MAX_STEPS):
        gradient = transposed(residual)[0] - ridge * (core - cores[0])
        conjugate = precondition(gradient)
        descent = (gradient * conjugate).sum().item()  # g^T P g
        first = first or descent
        if not descent > STEP_TOLERANCE * first:
            break
        direction, last = conjugate + descent / last * direction, descent  # Fletcher & Reeves
        change = predict(direction)  # as y: the prediction is linear in the core
        curvature = change.square().sum().item() + ridge * direction.square().sum().item()
        step = descent / curvature
        core, residual = core + step * direction, residual - step * change
    return core, residual


def _preconditioner(
    tail: Structure, cores: list[Tensor], h: Tensor
) -> tuple[Callable[[Tensor], Tensor], float]:
    """The inverse of the Kronecker part of the normal equations of the first core of `tail`, and a
    ridge for them.

    A core is a batched matrix between the features `h` before it and the linear maps after it; if
    inputs are white, the normal equations of each block are (maps^T maps) (x) (h^T h), for all
    families.
    """
    core, *later = tail.cores
    inputs, outputs = tail.inputs, tail.outputs
    axes, fan_in = [*core.axes], [*core.fan_in_axes]
    fan_out = [axis for axis in core.fan_out_axes if axis not in outputs]
    read_later = {axis for each in later for axis in each.axes}
    hidden = [axis for axis in read_later if axis not in (*inputs, *outputs)]
    blocks = [axis for axis in axes if axis not in (*fan_in, *fan_out) and axis in read_later]

    tokens, size = ["tokens", *inputs], {**tail.sizes, "tokens": len(h)}
    features = split_axes(h, tokens, size)  # (tokens, *inputs)
    right = [*core.batch_axes, *fan_in, *prime(fan_in)]
    left = [*blocks, *fan_out, *prime(fan_out)]
    maps = [
        (split_axes(tensor, names, size), names)
        for core, tensor in reversed([*zip(later, cores[1:], strict=True)])
        for names in ([*core.axes], prime([*core.axes], hidden))
    ]
    # maps^T maps, (blocks, fan_out, fan_out'), and h^T h, (batch, fan_in, fan_in')
    after = contract(left, *maps) if maps else torch.ones((), dtype=h.dtype, device=h.device)
    before = contract(right, (features, tokens), (features, prime(tokens, fan_in)))
    grams = [(as_squares(after, fan_out, size), left), (as_squares(before, fan_in, size), right)]
    # (A (x) B)^-1 = A^-1 (x) B^-1, so that each is inverted by itself
    factors = [(split_axes(invert(gram), names, size), names) for gram, names in grams]
    ridge = (
        sqrt(torch.finfo(h.dtype).eps)
        * prod(mean_diagonal(gram).mean().item() for gram, _ in grams)
        / core.repeat
    )

    def precondition(gradient: Tensor) -> Tensor:
        primed = prime(axes, [*fan_in, *fan_out])  # A^-1 G B^-1, block by block
        scaled = contract(axes, (split_axes(gradient, axes, size), primed), *factors)
        return scaled.reshape(gradient.shape)

    return precondition, ridge


def _tails(structure: Structure) -> list[tuple[Structure, Structure]]:
    """Each core's structure alone, and that of the core and all after it."""
    inputs, outputs = structure.inputs, structure.outputs
    states = [
        [*core.batch_axes, *core.repeat_axes, *core.fan_in_axes] for core in structure.cores[1:]
    ]
    stages = []
    for n, (before, after) in enumerate(zip([inputs, *states], [*states, outputs], strict=True)):
        ends = (after, structure.subscripts[n : n + 1]), (outputs, structure.subscripts[n:])
        step, tail = (_make_structure(before, end, cores, structure.sizes) for end, cores in ends)
        stages.append((step, tail))
    return stages


def _make_structure(
    inputs: Sequence[str], outputs: Sequence[str], cores: Sequence[str], sizes: Mapping[str, int]
) -> Structure:
    named = {*inputs, *outputs, *(axis for core in cores for axis in core.split())}
    signature = f"{' '.join(inputs)} -> {' '.join(outputs)}"
    return Structure(signature, *cores, **{axis: sizes[axis] for axis in sizes if axis in named})


def _is_chain(structure: Structure) -> bool:
    """Whether every core can absorb any change of basis in what the core before it hands over: then
    cutting the cores off one by one loses nothing."""
    cores, ends = [core.axes for core in structure.cores], {*structure.inputs, *structure.outputs}
    for n, core in enumerate(cores[:-1]):
        later = {axis for rest in cores[n + 2 :] for axis in rest}
        seen = {axis for before in cores[:n] for axis in before}
        bond = {*core} - ends - seen  # made by this core, and summed by another
        if not {*core} & later <= {*cores[n + 1]} or bond & later:
            return False
    return True


def _draw(structure: Structure, generator: torch.Generator) -> list[Tensor]:
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [draw(core.shape) / sqrt(core.fan_in) for core in structure.cores]
