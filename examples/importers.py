"""Layers trained with other libraries -> `StructuredLinear` with the same matrix.

    from importers import from_fly_monarch
    layer = from_fly_monarch(torch.load("theirs.pt"), prefix="blocks.0.mlp.fc1.")

Each importer takes a state_dict and is the library's formula in axis names; nothing is projected.
`prefix` picks one layer out of the state_dict of a model. A ValueError says which tensor is missing
or does not fit.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor

from structlin import Monarch, Structure, StructuredLinear

State = Mapping[str, Tensor]


def from_cbs_btt(state: State, prefix: str = "") -> StructuredLinear:
    """BTT of compute-better-spent: `W[(f e), (g a)] = sum_r A[g, a, (f r)] B[f, (g r), e]`.

    Args:
        state: `op_params.0` (A), `op_params.1` (B) and perhaps `b`.
    Source: github.com/shikaiqiu/compute-better-spent, mm/btt_mvm.py.
    """
    found = _select_below(state, prefix)
    if "op_params.2" in found:
        raise ValueError(
            f"{prefix}op_params.2: only BTT of two cores without normalisation is imported"
        )
    a, b = (_take(found, f"op_params.{n}", 3, prefix) for n in (0, 1))
    sizes = dict(zip("gafe", (*a.shape[:2], b.shape[0], b.shape[2]), strict=True))
    sizes["r"] = a.shape[2] // sizes["f"]
    if a.shape[2] != sizes["f"] * sizes["r"] or b.shape[1] != sizes["g"] * sizes["r"]:
        raise ValueError(
            f"op_params: {tuple(a.shape)}, {tuple(b.shape)} are not the two cores of a BTT"
        )
    structure = Structure("g a -> f e", "g f r a", "f e g r", **sizes)
    return _build(structure, [(a, "g a (f r)"), (b, "f (g r) e")], found.get("b"))


def from_fly_monarch(
    state: State, prefix: str = "", *, in_features: int | None = None
) -> StructuredLinear:
    """Monarch of fly (and its copies): `W[(s l), (k p)] = w2[l, s, r] w1[k, q, p]`, (k q) = (r l).

    Args:
        state: `blkdiag1` (w1), `blkdiag2` (w2) and perhaps `bias`.
        in_features: where the layer pads; None: as wide as its blocks. The bias says how many
            outputs there are.
    Source: Dao et al. 2022 (arXiv:2204.00595); github.com/HazyResearch/fly,
    blockdiag_butterfly_multiply.py.
    """
    found = _select_below(state, prefix)
    cores = [_take(found, name, 3, prefix) for name in ("blkdiag1", "blkdiag2")]
    first, last = (tuple(core.shape) for core in cores)  # (k, q, p), (l, s, r)
    structure = Monarch(blocks=first[0]).structure(first[0] * first[2], last[0] * last[1])
    if [first, last] != [core.shape for core in structure.cores]:
        raise ValueError(f"blkdiag1 {first} and blkdiag2 {last} are not the factors of a Monarch")
    return _fill(structure, cores, found.get("bias"), in_features)


def from_tltorch_tt(state: State, prefix: str = "") -> StructuredLinear:
    """TT-matrix of tensorly-torch: `W[(o p ..), (i j ..)] = G1[1, o, i, r] G2[r, p, j, s] ..`

    Args:
        state: `weight.factors.factor_0`, `.factor_1`, ... and perhaps `bias`.
    Source: Novikov et al. 2015 (arXiv:1509.06569); github.com/tensorly/torch,
    tensorized_matrices.py.
    """
    found = _select_below(state, prefix)
    matches = ((re.search(r"factor_?s?\.?(\d+)$", name), name) for name in found)
    names = [name for _, name in sorted((int(m[1]), name) for m, name in matches if m)]
    factors = [_take(found, name, 4, prefix) for name in names]
    ranks = [(factor.shape[0], factor.shape[3]) for factor in factors]
    chain = all(left[1] == right[0] for left, right in pairwise(ranks))
    if not factors or not chain or (ranks[0][0], ranks[-1][1]) != (1, 1):
        raise ValueError(f"the ranks {ranks} of factors {names} are no chain from 1 to 1")
    sizes, cores = dict[str, int](), list[tuple[Tensor, str]]()
    for t, factor in enumerate(factors):  # (r of t, i of t, j of t, r of t+1)
        left, right = f"r{t}" if t else "1", f"r{t + 1}" if t + 1 < len(factors) else "1"
        sizes |= zip((left, f"i{t}", f"j{t}"), factor.shape, strict=False)
        cores.append((factor, f"{left} i{t} j{t} {right}"))
    sizes.pop("1")
    inputs, outputs = (" ".join(f"{axis}{t}" for t in range(len(factors))) for axis in "ji")
    cores.reverse()  # the last one is applied first
    subscripts = [re.sub(r"\b1\b", "", axes) for _, axes in cores]
    structure = Structure(f"{inputs} -> {outputs}", *subscripts, **sizes)
    return _build(structure, cores, found.get("bias"))


def from_lokr(state: State, prefix: str = "", *, scale: float = 1.0) -> StructuredLinear:
    """The update of a LoKr adapter (LyCORIS, PEFT): `W = scale * kron(w1, w2)`.

    Args:
        state: `lokr_w1`, or its factors `lokr_w1_a` and `lokr_w1_b`; the same for `lokr_w2`. A
            suffix such as ".default" is read.
        scale: alpha / rank of the adapter, 1 if it has none.
    Source: Yeh et al. 2024 (arXiv:2309.14859).
    """
    found = {
        re.sub(r"(lokr_[wt]\d(_[ab])?)\.\w+$", r"\1", name): tensor
        for name, tensor in _select_below(state, prefix).items()
    }
    if "lokr_t2" in found:
        raise ValueError(f"{prefix}lokr_t2 belongs to a convolution, which is no linear layer")
    w1, w2 = (
        _take(found, name, 2, prefix)
        if name in found
        else _take(found, f"{name}_a", 2, prefix) @ _take(found, f"{name}_b", 2, prefix)
        for name in ("lokr_w1", "lokr_w2")
    )
    sizes = dict(zip("agbd", (*w1.shape, *w2.shape), strict=True))
    structure = Structure("g d -> a b", "b d", "a g", **sizes)
    return _build(structure, [(w2, "b d"), (scale * w1, "a g")], None)


def _select_below(state: State, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


def _take(state: State, name: str, ndim: int, prefix: str) -> Tensor:
    if name not in state:
        found = sorted(state)[:8]
        raise ValueError(
            f"the state has no {prefix + name!r}; below prefix={prefix!r} it has {found}"
        )
    if state[name].ndim != ndim:
        shape = tuple(state[name].shape)
        raise ValueError(f"{prefix + name!r} has shape {shape}; it must have {ndim} dimensions")
    return state[name]


def _build(
    structure: Structure, tensors: Sequence[tuple[Tensor, str]], bias: Tensor | None
) -> StructuredLinear:
    """`tensors`: the cores in the order of the structure, each with the other library's axes."""
    cores = []
    for core, (tensor, axes) in zip(structure.cores, tensors, strict=True):
        groups = (core.batch_axes, core.fan_out_axes, core.fan_in_axes)
        pattern = " ".join(f"({' '.join(group)})" for group in groups)
        sizes = {axis: structure.sizes[axis] for group in groups for axis in group}
        cores.append(rearrange(tensor, f"{axes} -> {pattern}", **sizes))
    return _fill(structure, cores, bias)


@torch.no_grad()
def _fill(
    structure: Structure, cores: Sequence[Tensor], bias: Tensor | None, width: int | None = None
) -> StructuredLinear:
    outputs = structure.out_features if bias is None else len(bias)
    options = {"device": cores[0].device, "dtype": cores[0].dtype}
    widths = width or structure.in_features, outputs
    layer = StructuredLinear(*widths, structure, bias is not None, **options)
    for own, core in zip(layer.cores, cores, strict=True):
        own.copy_(core)
    if layer.bias is not None:
        layer.bias.copy_(bias)
    return layer
