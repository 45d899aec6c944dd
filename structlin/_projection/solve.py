"""A dense matrix -> the cores of a structure: the nearest one in closed form where there is one, and alternating least
squares for any structure. Everything is read from the axes, so a structure of one's own gets what the families get.

Read as a tensor over the axes of the signature, W is to be a product of cores. Cut it between the first core and the
others: the axes in both that are also in W number independent problems, the axes in both that are not in W are summed,
so each problem is a matrix (axes of the others) x (axes of the first core) of a rank of at most the product of the
summed sizes. Truncated SVDs give it (Eckart & Young 1936), and the others are cut in the same way. For two cores this
one rule is the SVD of LowRank, one SVD per block of BTT and Monarch (Dao et al. 2022, arXiv:2204.00595), and the
rearrangement of Kronecker (Van Loan & Pitsianis 1993); for more it is the TT-SVD (Oseledets 2011).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod, sqrt
from string import ascii_letters

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _product as contract
from .._families import Family, structure_of
from .._structure import Core, Structure

SWEEPS = 1000  # of alternating least squares, at most
TOLERANCE = 1e-3  # relative decrease of the error by which a sweep must pay
STEPS = 20  # of conjugate gradient for a core, at most
CLOSE = 1e-2  # relative decrease of its squared gradient at which a core is solved well enough
RESTARTS = 3  # random starts of a structure whose first start may be a bad one
EXACT = 1e-6  # relative error that needs no other start
BALANCING = 10  # passes over all pairs of cores
DOUBLE = 2**20  # numbers in an activation up to which alternating least squares runs in float64 for any weight


@torch.no_grad()
def project(
    weight: Tensor, structure: Family | Structure, *, covariance: Tensor | None = None, sweeps: int = SWEEPS
) -> list[Tensor]:
    """The cores whose matrix B is nearest to `weight`: least ||W - B||_F, or least error of the layer's outputs.

    With the covariance C = X X^T / N of the layer's inputs, the root mean square error of the outputs is
    ||(W - B) C^(1/2)||_F, and that is what becomes small. What is optimal:

    - one core; two cores without covariance; two cores with covariance if the first one sums all inputs (LowRank);
    - otherwise the closed form is the start of alternating least squares, which ends near a local minimum and never
      above its start. Where W is a grid of blocks of a rank (BTT, Monarch) it solves block by block, by their SVD. If
      the cores are no chain (BLAST, say), random starts follow, from a generator of its own.

    Where the structure is larger than the weight (padding), the extra inputs and outputs are free: they have no error.

    Args:
        weight: `(out_features, in_features)`, real floating point; computed in float32 or better.
        structure: a family such as `BTT(rank=4)`, or a `Structure` at least as large as the weight.
        covariance: `(in_features, in_features)`, symmetric positive semi-definite, possibly singular.
        sweeps: of alternating least squares, at most; it ends by itself. 0: the closed form alone.

    Returns:
        One tensor `(batch, fan_out, fan_in)` per core, of the dtype and on the device of `weight`; balanced: whatever
        can be moved from one core to another by scaling is shared equally.

    Raises:
        ValueError: `weight` is not a matrix, not finite or has no values (meta); the structure does not fit it;
            `covariance` has another shape, is not finite, not symmetric or not positive semi-definite; `sweeps` is
            negative.
        TypeError: `weight` or `covariance` is not real floating point; `structure` is neither family nor `Structure`.

    Source: Eckart & Young 1936; Van Loan & Pitsianis 1993; Oseledets 2011; Dao et al. 2022 (arXiv:2204.00595).

    >>> from structlin import BTT, to_dense
    >>> structure = BTT(rank=2).structure(16, 16)
    >>> target = to_dense(structure, [torch.randn(core.shape) for core in structure.cores])
    >>> torch.allclose(to_dense(structure, project(target, structure)), target, atol=1e-5)
    True
    """
    _check_weight(weight)
    structure = structure_of(structure, weight.shape[1], weight.shape[0])
    _check_covariance(covariance, weight.shape[1])
    if sweeps < 0:
        raise ValueError(f"sweeps={sweeps} must be at least 0")

    w = weight.detach().to(torch.float64)
    scale = w.square().mean().sqrt().item() or 1.0
    w = w / scale
    c = None if covariance is None else _definite(covariance.to(w))
    columns, rows = structure.in_features - w.shape[1], structure.out_features - w.shape[0]
    padded = F.pad(w, (0, columns, 0, rows))
    cores = _cut(structure, padded, c if c is None else _extended(c, columns))
    if sweeps and not _is_optimal(structure, c is not None, columns + rows > 0):
        starts = [cores] if c is None else [cores, _cut(structure, padded, None)]
        cores = _alternate(structure, starts, w, c, weight.dtype, sweeps)
    cores[0] = cores[0] * scale
    return [core.to(weight.dtype).contiguous() for core in _balanced(structure, cores)]


@torch.no_grad()
def relative_error(
    weight: Tensor, structure: Family | Structure, cores: Sequence[Tensor], *, covariance: Tensor | None = None
) -> float:
    """||W - B||_F / ||W||_F, or with the covariance of the inputs that of the outputs, ||(W - B) C^1/2|| / ||W C^1/2||.

    Computed in float64; 0 if both norms are 0.

    Args:
        weight, structure, covariance: as of `project`.
        cores: as `project` returns them.

    Raises:
        ValueError, TypeError: as `project`; the cores do not fit the structure.

    >>> from structlin import Kronecker
    >>> weight = torch.kron(torch.ones(2, 2), torch.randn(3, 3))
    >>> relative_error(weight, Kronecker(), project(weight, Kronecker())) < 1e-5
    True
    """
    _check_weight(weight)
    structure = structure_of(structure, weight.shape[1], weight.shape[0])
    _check_covariance(covariance, weight.shape[1])
    w = weight.detach().to(torch.float64)
    dense = contract.to_dense(structure, [core.detach().to(w) for core in cores])
    error = w - dense[: w.shape[0], : w.shape[1]]
    squares = [(e.square() if covariance is None else (e @ covariance.to(w)) * e).sum().item() for e in (error, w)]
    above, below = (sqrt(max(square, 0.0)) for square in squares)
    return above / below if below else float("inf") if above else 0.0


# ---- closed form: cut the cores off, from left to right --------------------------------------------------------------


def _cut(structure: Structure, w: Tensor, c: Tensor | None) -> list[Tensor]:
    """Truncated SVDs, one core after the other; with `c` of W L in place of W, L L^T the covariance of the inputs that
    the core sums."""
    size, subscripts, (inputs, outputs) = structure.sizes, _subscripts(structure), _signature(structure)
    target, axes = _blocks(structure, w, c)
    cores = []
    for n, core in enumerate(subscripts[:-1]):
        later = {axis for rest in subscripts[n + 1 :] for axis in rest}
        batch = [axis for axis in axes if axis in core and axis in later]
        own = [axis for axis in axes if axis in core and axis not in later]
        rest = [axis for axis in axes if axis not in core]
        bond = [axis for axis in core if axis not in axes]
        rank, kept = prod(size[axis] for axis in bond), [*batch, *bond, *own]
        if c is None:
            left, right = _truncated(_matrices(target, axes, (batch, rest, own), size), rank)
            first = _shaped(right, kept, size)
        else:
            weighed = [axis for axis in own if axis in inputs and axis not in outputs]
            given = [axis for axis in axes if axis in inputs and axis in core and axis not in weighed]
            root = _root(_covariance(structure, c, given, weighed))
            factor, white = [*given, *weighed, *_prime(weighed)], _prime(axes, weighed)
            whitened = _einsum(white, (target, axes), (_shaped(root, factor, size), factor))
            left, right = _truncated(_matrices(whitened, axes, (batch, rest, own), size), rank)
            inverse = torch.linalg.solve_triangular(root.mT, _identity(root), upper=True)  # [column, primed row]
            first = _einsum(
                kept,
                (_shaped(right, kept, size), _prime(kept, weighed)),
                (_shaped(inverse, factor, size), factor),
            )
        cores.append(_stored(structure, n, first, kept))
        axes = [*batch, *rest, *bond]
        target = _shaped(left, axes, size)
    return [*cores, _stored(structure, -1, target, axes)]


def _blocks(structure: Structure, w: Tensor, c: Tensor | None) -> tuple[Tensor, list[str]]:
    """W as a tensor over the axes of the signature.

    An axis on both of its sides makes the structure block diagonal: of W counts its regression on the inputs of each
    block. If no core has that axis, the same block is used again: the regression is one over all of its uses.
    """
    size, (inputs, outputs) = structure.sizes, _signature(structure)
    kept = [axis for axis in inputs if axis in outputs]
    if not kept:
        return _shaped(w, [*outputs, *inputs], size), [*outputs, *inputs]
    used = {axis for core in _subscripts(structure) for axis in core}
    blocks = [axis for axis in kept if axis in used]
    rows = [axis for axis in outputs if axis not in kept]
    columns = [axis for axis in inputs if axis not in kept]
    axes = [*blocks, *rows, *columns]
    sums = _einsum(axes, (_shaped(w if c is None else w @ c, [*outputs, *inputs], size), [*outputs, *inputs]))
    if c is None:
        return sums / prod(size[axis] for axis in kept if axis not in used), axes
    root = _root(_covariance(structure, c, blocks, columns))
    solved = torch.cholesky_solve(_matrices(sums, axes, (blocks, rows, columns), size).mT, root).mT
    return _shaped(solved, axes, size), axes


def _covariance(structure: Structure, c: Tensor, given: list[str], axes: list[str]) -> Tensor:
    """The covariance over `axes` for each value of `given`, summed over the other inputs: `(given, axes, axes)`."""
    inputs, _ = _signature(structure)
    rows = _shaped(c, [*inputs, *inputs], structure.sizes)
    marginal = _einsum([*given, *axes, *_prime(axes)], (rows, [*inputs, *_prime(inputs, axes)]))
    n = prod(structure.sizes[axis] for axis in axes)
    return marginal.reshape(-1, n, n)


def _truncated(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The nearest `left @ right` of `rank` to each matrix of a batch; the rows of `right` are orthonormal.

    Where the matrix is too small for the rank, rows of `right` come again and `left` is zero there.
    """
    *_, m, n = matrices.shape
    k = min(rank, m, n)
    if n <= m:
        right = _eigenvectors(matrices.mT @ matrices, k).mT
        left = matrices @ right.mT
    else:
        basis = _eigenvectors(matrices @ matrices.mT, k)
        orthonormal, triangle = torch.linalg.qr((basis.mT @ matrices).mT)
        left, right = basis @ triangle.mT, orthonormal.mT
    return F.pad(left, (0, rank - k)), right[:, torch.arange(rank, device=right.device) % k]


def _eigenvectors(gram: Tensor, k: int) -> Tensor:
    """Of the k largest eigenvalues, as columns.

    On one thread for small blocks: LAPACK gains nothing from more, and loses a factor of 100 where cores are busy.
    """
    threads = torch.get_num_threads()
    try:
        if gram.is_cpu and gram.shape[-1] <= 256:
            torch.set_num_threads(1)
        vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    return vectors[..., -k:].flip(-1)


def _is_optimal(structure: Structure, weighed: bool, padded: bool) -> bool:
    """Whether `_cut` gives the global optimum."""
    subscripts, (inputs, outputs) = _subscripts(structure), _signature(structure)
    kept = {*inputs} & {*outputs}
    unused = kept - {axis for core in subscripts for axis in core}
    if len(subscripts) == 1:
        return not (padded and unused)
    if len(subscripts) > 2:
        return False
    first, last = ({*core} for core in subscripts)
    one_sided = all({*side} <= first or {*side} <= last for side in (inputs, outputs))
    if padded and not one_sided:  # the numbers that are free are not whole rows and columns of the matrices
        return False
    return not weighed or ({*inputs} - unused <= first and last.isdisjoint({*inputs} - kept))


# ---- alternating least squares: any structure ------------------------------------------------------------------------


def _alternate(
    structure: Structure, starts: list[list[Tensor]], w: Tensor, c: Tensor | None, dtype: torch.dtype, limit: int
) -> list[Tensor]:
    """The best of alternating least squares from the best of `starts` and, unless the structure is a chain, from random
    ones; `limit` sweeps from each."""
    columns = w.shape[1]
    x = torch.eye(columns, dtype=w.dtype, device=w.device) if c is None else _root(c).mT  # x^T x = C
    y, x = x @ w.mT, F.pad(x, (0, structure.in_features - columns))
    width = max(tail.in_features for _, tail in _stages(structure))
    if dtype != torch.float64 and len(x) * width > DOUBLE:
        x, y = x.float(), y.float()
    starts = [[core.to(x) for core in start] for start in starts]
    starts = [min(starts, key=lambda start: _norm(_residual(structure, start, x, y)))]
    if not _is_chain(structure):
        generator = torch.Generator().manual_seed(0)
        starts += [[core.to(x) for core in _random(structure, generator)] for _ in range(RESTARTS)]
    best, least = starts[0], float("inf")
    for start in starts:
        for cores, error in alternate(structure, start, x, y, limit):
            if error < least:
                best, least = cores, error
        if least <= EXACT:
            break
    return [core.to(w) for core in best]


def alternate(
    structure: Structure, cores: list[Tensor], x: Tensor, y: Tensor, limit: int = SWEEPS
) -> Iterator[tuple[list[Tensor], float]]:
    """Alternating least squares: cores and error ||y - x B^T|| / ||y||, of the start and after each sweep.

    The error never increases. A sweep solves for each core in turn with the others fixed, which is a linear problem;
    where the blocks of W are independent matrices (`_is_blockwise`), for both factors of each block in turn and then
    for the last core. `y` may be narrower than the structure: the outputs that it lacks are free.
    """
    stages = _stages(structure)
    refit = _blockwise(structure, x, y) if _is_blockwise(structure) else None
    residual = _residual(structure, cores, x, y)
    norm = _norm(y) or 1.0
    error = _norm(residual) / norm
    yield cores, error
    for _ in range(limit):
        previous, cores, h = error, refit(cores, residual) if refit else [*cores], x
        for n, (step, tail) in enumerate(stages):
            if len(tail.cores) == 1 and tail.out_features == y.shape[1]:
                cores[n], residual = _regression(tail, cores[n], h, y)
            elif n or not refit:
                cores[n], residual = _least_squares(tail, cores[n:], h, y)
            h = contract.apply(step, cores[n : n + 1], h)
        error = _norm(residual) / norm
        if not error < previous:
            return
        yield cores, error
        if error > (1 - TOLERANCE) * previous or error <= torch.finfo(y.dtype).eps:
            return


def _residual(structure: Structure, cores: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    return y - contract.apply(structure, cores, x)[:, : y.shape[1]]


def _norm(y: Tensor) -> float:
    return float(y.norm())


def _is_blockwise(structure: Structure) -> bool:
    """Whether the structure is two cores, from all inputs and to all outputs: W is then a grid of matrices of a rank,
    one for each value of the axes that W and both cores have, as of BTT and Monarch."""
    subscripts, (inputs, outputs) = _subscripts(structure), _signature(structure)
    if len(subscripts) != 2 or {*inputs} & {*outputs}:
        return False
    return {*inputs} <= {*subscripts[0]} and {*outputs} <= {*subscripts[1]}


def _blockwise(structure: Structure, x: Tensor, y: Tensor) -> Callable[[list[Tensor], Tensor], list[Tensor]]:
    """A pass over the blocks of W: one column of blocks after the other gets its optimum with the others fixed.

    With what the other blocks give subtracted from y, a block's optimum is the truncated SVD of its regression on its
    inputs, whitened. A ridge on the change of a block keeps the error from increasing where inputs never vary.

    Returns:
        A function of the cores and their residual y - x B^T; outputs that y lacks are zero in the new cores.
    """
    (inputs, outputs), (first, last) = _signature(structure), _subscripts(structure)
    given, own = [axis for axis in inputs if axis in last], [axis for axis in inputs if axis not in last]
    shared, rest = [axis for axis in outputs if axis in first], [axis for axis in outputs if axis not in first]
    bond = [axis for axis in first if axis not in (*inputs, *outputs)]
    factors = [given, shared, bond, own], [given, shared, rest, bond]
    size, padding = {**structure.sizes, "tokens": len(x)}, structure.out_features - y.shape[1]
    present = _matrices(F.pad(torch.ones_like(y[0]), (0, padding)), outputs, (shared, rest), size)[..., None]

    columns = _matrices(x, ["tokens", *inputs], (given, ["tokens"], own), size)
    used = (columns != 0).any(-1)  # x that comes from a covariance is triangular: half of its products are with zeros
    ends = (used * torch.arange(1, len(x) + 1, device=x.device)).amax(-1).tolist()
    grams = columns.double().mT @ columns.double()
    ridge = 10 * torch.finfo(x.dtype).eps * (_mean_diagonal(grams).mean().item() or 1.0)
    grams = grams + ridge * _identity(grams)
    roots, grams = _root(grams).to(x), grams.to(x)

    def refit(cores: list[Tensor], residual: Tensor) -> list[Tensor]:
        missing = _matrices(F.pad(residual, (0, padding)), ["tokens", *outputs], (["tokens"], [*shared, *rest]), size)
        missing = missing.clone()
        axes = [_stored_axes(core) for core in structure.cores]
        right, left = (_matrices(*core, size) for core in zip(cores, axes, factors, strict=True))
        steps, found = zip(ends, columns, grams, roots, left * present, right, strict=True), []
        for end, column, gram, root, old_left, old_right in steps:
            part, column, old = missing[:end], column[:end], old_left @ old_right  # old: (shared, rest, own)
            goal = (part.mT @ column).reshape(old.shape) + old @ gram
            white = torch.linalg.solve_triangular(root, goal.mT, upper=False).mT
            new_left, basis = _truncated(white, right.shape[-2])
            new_right = torch.linalg.solve_triangular(root.mT, basis.mT, upper=True).mT
            change = new_left @ new_right - old
            part.addmm_(column, change.flatten(0, 1).mT, alpha=-1)
            found.append((new_right, new_left))
        return [
            _stored(structure, n, torch.stack(parts), [axis for group in groups for axis in group])
            for n, (parts, groups) in enumerate(zip(zip(*found, strict=True), factors, strict=True))
        ]

    return refit


def _regression(structure: Structure, core: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The core of a structure that has only one for the least ||y - x B^T||^2 + ridge ||core - new||^2, and the
    residual: normal equations, one for each block, that all uses of the block share."""
    (only,), (inputs, outputs) = structure.cores, _signature(structure)
    size, uses = {**structure.sizes, "tokens": len(x)}, ["tokens", *only.repeat_axes]
    rows = _matrices(x, ["tokens", *inputs], (only.batch_axes, uses, only.fan_in_axes), size)
    residual = _matrices(y, ["tokens", *outputs], (only.batch_axes, uses, only.fan_out_axes), size) - rows @ core.mT
    change = _inverse(rows.mT @ rows) @ (rows.mT @ residual)
    residual = _shaped(residual - rows @ change, [*only.batch_axes, *uses, *only.fan_out_axes], size)
    order = [[*only.batch_axes, *uses, *only.fan_out_axes].index(axis) for axis in ["tokens", *outputs]]
    return core + change.mT, residual.permute(order).reshape(y.shape)


def _least_squares(tail: Structure, cores: list[Tensor], h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The first core of `tail` for a smaller ||y - tail(h)||, and that residual: preconditioned conjugate gradient.

    What is minimised is ||y - tail(h)||^2 + ridge ||core - cores[0]||^2: where y has no say, the core stays.
    """

    def predict(core: Tensor) -> Tensor:
        return contract.apply(tail, [core, *cores[1:]], h)[:, : y.shape[1]]

    core, direction = cores[0], torch.zeros_like(cores[0])
    prediction, transposed, *_ = torch.func.vjp(predict, core)
    precondition, ridge = _preconditioner(tail, cores, h)
    residual, first, last = y - prediction, 0.0, 1.0
    for _ in range(STEPS):
        gradient = transposed(residual)[0] - ridge * (core - cores[0])
        conjugate = precondition(gradient)
        descent = (gradient * conjugate).sum().item()
        first = first or descent
        if not descent > CLOSE * first:
            break
        direction, last = conjugate + descent / last * direction, descent
        change = predict(direction)
        curvature = change.square().sum().item() + ridge * direction.square().sum().item()
        step = descent / curvature
        core, residual = core + step * direction, residual - step * change
    return core, residual


def _preconditioner(tail: Structure, cores: list[Tensor], h: Tensor) -> tuple[Callable[[Tensor], Tensor], float]:
    """The inverse of the Kronecker part of the normal equations of the first core of `tail`, and a ridge for them.

    A core is a batched matrix between the features `h` before it and the linear maps after it; if inputs are white,
    the normal equations of each block are (maps^T maps) (x) (h^T h), for all families.
    """
    core, *later = tail.cores
    inputs, outputs = _signature(tail)
    axes, fan_in = _stored_axes(core), [*core.fan_in_axes]
    fan_out = [axis for axis in core.fan_out_axes if axis not in outputs]
    hidden = [axis for core in later for axis in _stored_axes(core) if axis not in (*inputs, *outputs)]
    blocks = [axis for axis in axes if axis not in (*fan_in, *fan_out) and any(axis in _stored_axes(c) for c in later)]

    tokens, size = ["tokens", *inputs], {**tail.sizes, "tokens": len(h)}
    features = _shaped(h, tokens, size)
    right = [*core.batch_axes, *fan_in, *_prime(fan_in)]
    left = [*blocks, *fan_out, *_prime(fan_out)]
    maps = [
        (_shaped(tensor, names, size), names)
        for core, tensor in reversed([*zip(later, cores[1:], strict=True)])
        for names in (_stored_axes(core), _prime(_stored_axes(core), hidden))
    ]
    after = _einsum(left, *maps) if maps else torch.ones((), dtype=h.dtype, device=h.device)
    before = _einsum(right, (features, tokens), (features, _prime(tokens, fan_in)))
    grams = [(_square(after, fan_out, size), left), (_square(before, fan_in, size), right)]
    factors = [(_shaped(_inverse(gram), names, size), names) for gram, names in grams]
    ridge = sqrt(torch.finfo(h.dtype).eps) * prod(_mean_diagonal(gram).mean().item() for gram, _ in grams) / core.repeat

    def precondition(gradient: Tensor) -> Tensor:
        primed = _prime(axes, [*fan_in, *fan_out])
        return _einsum(axes, (_shaped(gradient, axes, size), primed), *factors).reshape(gradient.shape)

    return precondition, ridge


def _stages(structure: Structure) -> list[tuple[Structure, Structure]]:
    """For each core the structure of it alone, and that of it and all after it."""
    inputs, outputs = _signature(structure)
    states = [[*core.batch_axes, *core.repeat_axes, *core.fan_in_axes] for core in structure.cores[1:]]
    stages = []
    for n, (before, after) in enumerate(zip([inputs, *states], [*states, outputs], strict=True)):
        ends = (after, structure.subscripts[n : n + 1]), (outputs, structure.subscripts[n:])
        step, tail = (_structure(before, end, cores, structure.sizes) for end, cores in ends)
        stages.append((step, tail))
    return stages


def _is_chain(structure: Structure) -> bool:
    """Whether every core can absorb any change of basis in what the core before it hands over: then cutting the cores
    off one by one loses nothing."""
    cores, (inputs, outputs) = _subscripts(structure), _signature(structure)
    for n, core in enumerate(cores[:-1]):
        later = {axis for rest in cores[n + 2 :] for axis in rest}
        seen = {axis for before in cores[:n] for axis in before}
        bond = {*core} - {*inputs, *outputs} - seen
        if not {*core} & later <= {*cores[n + 1]} or bond & later:
            return False
    return True


def _random(structure: Structure, generator: torch.Generator) -> list[Tensor]:
    cores = (torch.randn(core.shape, generator=generator, dtype=torch.float64) for core in structure.cores)
    return [tensor / sqrt(core.fan_in) for core, tensor in zip(structure.cores, cores, strict=True)]


def _balanced(structure: Structure, cores: list[Tensor]) -> list[Tensor]:
    """The same matrix with the scales shared equally: any two cores have, at each value of the axes that they share,
    the same norm. A part that is zero in one of them stays alive in the other."""
    cores, size = [*cores], structure.sizes
    axes = [_stored_axes(core) for core in structure.cores]
    pairs = [*combinations(range(len(cores)), 2)]
    for m, n in pairs * (1 if len(pairs) == 1 else BALANCING):
        shared = [axis for axis in axes[m] if axis in axes[n]]
        first, second = (_einsum(shared, (_shaped(cores[k], axes[k], size).square(), axes[k])).sqrt() for k in (m, n))
        alive = torch.minimum(first, second) > torch.finfo(torch.float32).tiny
        ratio = torch.where(alive, (second / first).sqrt(), torch.ones_like(first))
        for k, scale in ((m, ratio), (n, 1 / ratio)):
            scaled = _einsum(axes[k], (_shaped(cores[k], axes[k], size), axes[k]), (scale, shared))
            cores[k] = scaled.reshape(cores[k].shape)
    return cores


# ---- named axes ------------------------------------------------------------------------------------------------------


def _signature(structure: Structure) -> tuple[list[str], list[str]]:
    return [*structure.inputs], [*structure.outputs]


def _subscripts(structure: Structure) -> list[list[str]]:
    return [[*core.axes] for core in structure.cores]


def _stored_axes(core: Core) -> list[str]:
    return [*core.batch_axes, *core.fan_out_axes, *core.fan_in_axes]


def _structure(inputs: list[str], outputs: list[str], cores: Sequence[str], sizes: Mapping[str, int]) -> Structure:
    named = {*inputs, *outputs, *(axis for core in cores for axis in core.split())}
    signature = f"{' '.join(inputs)} -> {' '.join(outputs)}"
    return Structure(signature, *cores, **{axis: sizes[axis] for axis in sizes if axis in named})


def _prime(axes: Sequence[str], those: Sequence[str] | None = None) -> list[str]:
    """The axes with a prime, all or only `those`: the second index of a matrix over the same axis."""
    return [f"{axis}'" if those is None or axis in those else axis for axis in axes]


def _shape(axes: Sequence[str], size: Mapping[str, int]) -> list[int]:
    return [size[axis.rstrip("'")] for axis in axes]


def _shaped(tensor: Tensor, axes: Sequence[str], size: Mapping[str, int]) -> Tensor:
    return tensor.reshape(_shape(axes, size))


def _einsum(to: Sequence[str], *operands: tuple[Tensor, Sequence[str]]) -> Tensor:
    """`torch.einsum` over named axes: `operands` are tensors, one dimension an axis, with their names."""
    names = dict.fromkeys(axis for _, axes in operands for axis in axes)
    letter = dict(zip(names, ascii_letters, strict=False))
    terms = ("".join(letter[axis] for axis in axes) for axes in (*(axes for _, axes in operands), to))
    *sources, result = terms
    return torch.einsum(f"{','.join(sources)}->{result}", *(tensor for tensor, _ in operands))


def _matrices(tensor: Tensor, axes: Sequence[str], groups: Sequence[Sequence[str]], size: Mapping[str, int]) -> Tensor:
    """A tensor over `axes` as one with a dimension for each group of them."""
    order = [axis for group in groups for axis in group]
    permuted = _shaped(tensor, axes, size).permute([axes.index(axis) for axis in order])
    return permuted.reshape([prod(_shape(group, size)) for group in groups])


def _square(tensor: Tensor, group: Sequence[str], size: Mapping[str, int]) -> Tensor:
    """A tensor whose last axes are `group` twice, as a batch of square matrices."""
    n = prod(_shape(group, size))
    return tensor.reshape(-1, n, n)


def _stored(structure: Structure, n: int, tensor: Tensor, axes: Sequence[str]) -> Tensor:
    core = structure.cores[n]
    return _matrices(tensor, axes, (core.batch_axes, core.fan_out_axes, core.fan_in_axes), structure.sizes)


# ---- positive semi-definite matrices ---------------------------------------------------------------------------------


def _definite(c: Tensor) -> Tensor:
    """C to a mean variance of 1, plus the least multiple of the identity that makes it numerically positive definite:
    inputs that never vary keep W's own columns, as far as the structure can hold them."""
    c = (c + c.mT) / 2
    c = c / (c.diagonal().mean().abs() or 1.0)
    for exponent in range(-14, -3):
        shifted = c + 10.0**exponent * _identity(c)
        if torch.linalg.cholesky_ex(shifted).info == 0:
            return shifted
    raise ValueError(
        f"covariance has an eigenvalue of {torch.linalg.eigvalsh(c)[0].item():.3g} times its mean variance; it must be "
        "positive semi-definite: X X^T / N of the layer's inputs"
    )


def _extended(c: Tensor, columns: int) -> Tensor:
    """C with inputs more that are always zero."""
    extended = F.pad(c, (0, columns, 0, columns))
    extended.diagonal()[len(c) :] = 1e-14
    return extended


def _root(c: Tensor) -> Tensor:
    """Lower triangular L, L L^T = C."""
    root: Tensor = torch.linalg.cholesky(c)
    return root


def _inverse(gram: Tensor) -> Tensor:
    """The inverse, slightly damped."""
    mean = _mean_diagonal(gram)[..., None, None]
    damping = torch.where(mean > 0, mean, torch.ones_like(mean)) * sqrt(torch.finfo(gram.dtype).eps)
    return torch.cholesky_inverse(torch.linalg.cholesky(gram + damping * _identity(gram)))


def _mean_diagonal(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).mean(-1)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _check_weight(weight: Tensor) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be a matrix (out_features, in_features)")
    if not weight.is_floating_point():
        raise TypeError(f"weight has dtype {weight.dtype}; it must be real floating point")
    if weight.is_meta:
        raise ValueError("weight is on the meta device: no values to project; load the weights first")
    if not weight.isfinite().all():
        raise ValueError(f"weight has {(~weight.isfinite()).sum().item()} values that are not finite")


def _check_covariance(covariance: Tensor | None, in_features: int) -> None:
    if covariance is None:
        return
    if covariance.shape != (in_features, in_features):
        raise ValueError(
            f"covariance has shape {tuple(covariance.shape)}; it must be (in_features, in_features) = "
            f"{(in_features, in_features)}: X X^T / N of the layer's inputs"
        )
    if not covariance.is_floating_point():
        raise TypeError(f"covariance has dtype {covariance.dtype}; it must be real floating point")
    if covariance.is_meta:
        raise ValueError("covariance is on the meta device: it has no values")
    if not covariance.isfinite().all():
        raise ValueError(f"covariance has {(~covariance.isfinite()).sum().item()} values that are not finite")
    skew = (covariance - covariance.mT).abs().max().item()
    if skew > 1e-3 * covariance.abs().max().item():
        raise ValueError(f"covariance differs from its transpose by {skew:.3g}; it must be symmetric: X X^T / N")
