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
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from structlin import Monarch, Structure, StructuredLinear

State = Mapping[str, Tensor]


class ForeignCore(NamedTuple):
    """A core as the other library stores it, with the names of its axes for einops."""

    tensor: Tensor
    axes: str


def from_cbs_btt(state: State, prefix: str = "") -> StructuredLinear:
    """BTT of compute-better-spent: `W[(f e), (g a)] = sum_r A[g, a, (f r)] B[f, (g r), e]`.

    Args:
        state: `op_params.0` (A), `op_params.1` (B) and perhaps `b`.
    Source: github.com/shikaiqiu/compute-better-spent, mm/btt_mvm.py.
    """
    tensors = _select_below(state, prefix)
    if "op_params.2" in tensors:
        raise ValueError(
            f"{prefix}op_params.2: only BTT of two cores without normalisation is imported"
        )
    core_a = _take(tensors, "op_params.0", 3, prefix)
    core_b = _take(tensors, "op_params.1", 3, prefix)
    g, a, f_r = core_a.shape
    f, g_r, e = core_b.shape
    r = f_r // f
    if f_r != f * r or g_r != g * r:
        shapes = f"{tuple(core_a.shape)}, {tuple(core_b.shape)}"
        raise ValueError(f"op_params: {shapes} are not the two cores of a BTT")
    structure = Structure("g a -> f e", "g f r a", "f e g r", g=g, a=a, f=f, e=e, r=r)
    cores = [ForeignCore(core_a, "g a (f r)"), ForeignCore(core_b, "f (g r) e")]
    return _build(structure, cores, tensors.get("b"))


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
    tensors = _select_below(state, prefix)
    w1 = _take(tensors, "blkdiag1", 3, prefix)
    w2 = _take(tensors, "blkdiag2", 3, prefix)
    k, _, p = w1.shape
    groups, s, _ = w2.shape  # groups: l
    structure = Monarch(blocks=k).structure(k * p, groups * s)
    if [w1.shape, w2.shape] != [core.shape for core in structure.cores]:
        shapes = f"blkdiag1 {tuple(w1.shape)} and blkdiag2 {tuple(w2.shape)}"
        raise ValueError(f"{shapes} are not the factors of a Monarch")
    return _fill(structure, [w1, w2], tensors.get("bias"), in_features)


def from_tltorch_tt(state: State, prefix: str = "") -> StructuredLinear:
    """TT-matrix of tensorly-torch: `W[(o p ..), (i j ..)] = G1[1, o, i, r] G2[r, p, j, s] ..`

    Args:
        state: `weight.factors.factor_0`, `.factor_1`, ... and perhaps `bias`.
    Source: Novikov et al. 2015 (arXiv:1509.06569); github.com/tensorly/torch,
    tensorized_matrices.py.
    """
    tensors = _select_below(state, prefix)
    numbers = {}  # of the factors, by name
    for name in tensors:
        match = re.search(r"factor_?s?\.?(\d+)$", name)
        if match:
            numbers[name] = int(match[1])
    names = sorted(numbers, key=numbers.__getitem__)
    factors = [_take(tensors, name, 4, prefix) for name in names]
    ranks = [(factor.shape[0], factor.shape[3]) for factor in factors]
    is_chain = all(left[1] == right[0] for left, right in pairwise(ranks))
    if not factors or not is_chain or ranks[0][0] != 1 or ranks[-1][1] != 1:
        raise ValueError(f"the ranks {ranks} of factors {names} are no chain from 1 to 1")

    # Factor t has the axes (r_t, i_t, j_t, r_t+1): i of the outputs, j of the inputs. The ranks at
    # both ends are 1: einops writes these two axes as 1, a core leaves them out.
    count = len(factors)
    rank_axes = ["1", *(f"r{t}" for t in range(1, count)), "1"]
    sizes: dict[str, int] = {}
    cores = []
    subscripts = []
    for t, factor in enumerate(factors):
        axes = [rank_axes[t], f"i{t}", f"j{t}", rank_axes[t + 1]]
        sizes |= zip(axes, factor.shape, strict=True)
        cores.append(ForeignCore(factor, " ".join(axes)))
        subscripts.append(" ".join(axis for axis in axes if axis != "1"))
    del sizes["1"]
    inputs = " ".join(f"j{t}" for t in range(count))
    outputs = " ".join(f"i{t}" for t in range(count))
    # the last factor is applied first
    structure = Structure(f"{inputs} -> {outputs}", *reversed(subscripts), **sizes)
    return _build(structure, cores[::-1], tensors.get("bias"))


def from_lokr(state: State, prefix: str = "", *, scale: float = 1.0) -> StructuredLinear:
    """The update of a LoKr adapter (LyCORIS, PEFT): `W = scale * kron(w1, w2)`.

    Args:
        state: `lokr_w1`, or its factors `lokr_w1_a` and `lokr_w1_b`; the same for `lokr_w2`. A
            suffix such as ".default" is read.
        scale: alpha / rank of the adapter, 1 if it has none.
    Source: Yeh et al. 2024 (arXiv:2309.14859).
    """
    tensors = {}
    for name, tensor in _select_below(state, prefix).items():
        without_suffix = re.sub(r"(lokr_[wt]\d(_[ab])?)\.\w+$", r"\1", name)
        tensors[without_suffix] = tensor
    if "lokr_t2" in tensors:
        raise ValueError(f"{prefix}lokr_t2 belongs to a convolution, which is no linear layer")
    w1 = _take_lokr_matrix(tensors, "lokr_w1", prefix)
    w2 = _take_lokr_matrix(tensors, "lokr_w2", prefix)
    a, g = w1.shape
    b, d = w2.shape
    structure = Structure("g d -> a b", "b d", "a g", a=a, g=g, b=b, d=d)
    return _build(structure, [ForeignCore(w2, "b d"), ForeignCore(scale * w1, "a g")], None)


def _take_lokr_matrix(tensors: State, name: str, prefix: str) -> Tensor:
    if name in tensors:
        return _take(tensors, name, 2, prefix)
    return _take(tensors, f"{name}_a", 2, prefix) @ _take(tensors, f"{name}_b", 2, prefix)


def _select_below(state: State, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


def _take(state: State, name: str, ndim: int, prefix: str) -> Tensor:
    if name not in state:
        names = sorted(state)[:8]
        raise ValueError(
            f"the state has no {prefix + name!r}; below prefix={prefix!r} it has {names}"
        )
    if state[name].ndim != ndim:
        shape = tuple(state[name].shape)
        raise ValueError(f"{prefix + name!r} has shape {shape}; it must have {ndim} dimensions")
    return state[name]


def _build(
    structure: Structure, foreign_cores: Sequence[ForeignCore], bias: Tensor | None
) -> StructuredLinear:
    """The layer with these cores, which are in the order of the structure's."""
    cores = []
    for core, foreign in zip(structure.cores, foreign_cores, strict=True):
        batch = " ".join(core.batch_axes)
        fan_out = " ".join(core.fan_out_axes)
        fan_in = " ".join(core.fan_in_axes)
        sizes = {axis: structure.sizes[axis] for axis in core.axes}
        pattern = f"{foreign.axes} -> ({batch}) ({fan_out}) ({fan_in})"
        cores.append(rearrange(foreign.tensor, pattern, **sizes))
    return _fill(structure, cores, bias)


@torch.no_grad()
def _fill(
    structure: Structure,
    cores: Sequence[Tensor],
    bias: Tensor | None,
    in_features: int | None = None,
) -> StructuredLinear:
    layer = StructuredLinear(
        in_features or structure.in_features,
        structure.out_features if bias is None else len(bias),
        structure,
        bias is not None,
        device=cores[0].device,
        dtype=cores[0].dtype,
    )
    for parameter, core in zip(layer.cores, cores, strict=True):
        parameter.copy_(core)
    if layer.bias is not None:
        layer.bias.copy_(bias)
    return layer
