"""Layers trained with other libraries -> `StructuredLinear` with the same matrix.

    from importers import from_fly_monarch
    layer = from_fly_monarch(torch.load("theirs.pt"), prefix="blocks.0.mlp.fc1.")

Each importer takes a state_dict and is the library's formula in axis names; nothing is projected.
`prefix` picks one layer out of the state_dict of a model, for example "blocks.0.mlp.fc1.".
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

    Raises:
        ValueError: a tensor is missing or does not fit; the layer is normalised (btt_norm) or has
            more cores.

    Source: github.com/shikaiqiu/compute-better-spent, mm/btt_mvm.py.
    """
    found = _select_below(state, prefix)
    if "op_params.2" in found:
        raise ValueError(
            f"{prefix}op_params.2: only BTT of two cores without normalisation is imported"
        )
    a, b = (
        _take_tensor(found, "op_params.0", 3, prefix),
        _take_tensor(found, "op_params.1", 3, prefix),
    )
    sizes = {
        "g": a.shape[0],
        "a": a.shape[1],
        "f": b.shape[0],
        "e": b.shape[2],
        "r": a.shape[2] // b.shape[0],
    }
    if a.shape[2] != sizes["f"] * sizes["r"] or b.shape[1] != sizes["g"] * sizes["r"]:
        raise ValueError(
            f"op_params: {tuple(a.shape)}, {tuple(b.shape)} are not the two cores of a BTT"
        )
    structure = Structure("g a -> f e", "g f r a", "f e g r", **sizes)
    return _build_layer(structure, [(a, "g a (f r)"), (b, "f (g r) e")], found.get("b"))


def from_fly_monarch(
    state: State,
    prefix: str = "",
    *,
    in_features: int | None = None,
    out_features: int | None = None,
) -> StructuredLinear:
    """Monarch of fly (and its copies): `W[(s l), (k p)] = w2[l, s, r] w1[k, q, p]`, (k q) = (r l).

    Args:
        state: `blkdiag1` (w1), `blkdiag2` (w2) and perhaps `bias`.
        in_features, out_features: where the layer pads: its widths; None: those of the blocks, or
            of the bias.

    Raises:
        ValueError: a tensor is missing; the blocks do not regroup.

    Source: Dao et al. 2022 (arXiv:2204.00595); github.com/HazyResearch/fly,
    blockdiag_butterfly_multiply.py.
    """
    found = _select_below(state, prefix)
    first = _take_tensor(found, "blkdiag1", 3, prefix)  # (k, q, p)
    last = _take_tensor(found, "blkdiag2", 3, prefix)  # (l, s, r)
    bias = found.get("bias")
    widths = len(first) * first.shape[2], len(last) * last.shape[1]
    structure = Monarch(blocks=len(first)).structure(*widths)
    shapes = [tuple(first.shape), tuple(last.shape)]
    if shapes != [core.shape for core in structure.cores]:
        raise ValueError(
            f"blkdiag1 {shapes[0]} and blkdiag2 {shapes[1]} are not the two factors of a Monarch"
        )
    in_features = in_features or structure.in_features
    out_features = out_features or (structure.out_features if bias is None else len(bias))
    return _fill_layer(structure, [first, last], bias, in_features, out_features)


def from_tltorch_tt(state: State, prefix: str = "") -> StructuredLinear:
    """TT-matrix of tensorly-torch (there called BlockTT).

    `W[(o p ..), (i j ..)] = G1[1, o, i, r] G2[r, p, j, s] ..`

    Args:
        state: `weight.factors.factor_0`, `.factor_1`, ... and perhaps `bias`.

    Raises:
        ValueError: no factor, or factors whose ranks do not match.

    Source: Novikov et al. 2015 (arXiv:1509.06569); github.com/tensorly/torch,
    tensorized_matrices.py.
    """
    found = _select_below(state, prefix)
    matches = [(re.search(r"factor_?s?\.?(\d+)$", name), name) for name in found]
    numbered = sorted((int(match[1]), name) for match, name in matches if match)
    factors = [_take_tensor(found, name, 4, prefix) for _, name in numbered]
    ranks = [(factor.shape[0], factor.shape[3]) for factor in factors]
    chain = all(left[1] == right[0] for left, right in pairwise(ranks))
    if not factors or not chain or (ranks[0][0], ranks[-1][1]) != (1, 1):
        names = [name for _, name in numbered]
        raise ValueError(f"the ranks {ranks} of factors {names} are no chain from 1 to 1")
    c, sizes, cores = len(factors), dict[str, int](), list[tuple[Tensor, str]]()
    for t, factor in enumerate(factors, start=1):  # (r of t-1, i of t, j of t, r of t)
        sizes[f"i{t}"], sizes[f"j{t}"] = factor.shape[1:3]
        left, right = f"r{t - 1}" if t > 1 else "1", f"r{t}" if t < c else "1"
        if t < c:
            sizes[right] = factor.shape[3]
        cores.append((factor, f"{left} i{t} j{t} {right}"))
    cores.reverse()  # the last one is applied first
    inputs, outputs = (" ".join(f"{axis}{t}" for t in range(1, c + 1)) for axis in "ji")
    subscripts = [re.sub(r"\b1\b", "", axes) for _, axes in cores]
    structure = Structure(f"{inputs} -> {outputs}", *subscripts, **sizes)
    return _build_layer(structure, cores, found.get("bias"))


def from_lokr(state: State, prefix: str = "", *, scale: float = 1.0) -> StructuredLinear:
    """The update of a LoKr adapter (LyCORIS, PEFT): `W = scale * kron(w1, w2)`.

    Args:
        state: `lokr_w1`, or its factors `lokr_w1_a` and `lokr_w1_b`; the same for `lokr_w2`. A
            suffix such as ".default" is read.
        scale: alpha / rank of the adapter, 1 if it has none.

    Raises:
        ValueError: a tensor is missing, or is a convolution's.

    Source: Yeh et al. 2024 (arXiv:2309.14859).
    """
    found = {
        re.sub(r"(lokr_[wt]\d(_[ab])?)\.\w+$", r"\1", name): tensor
        for name, tensor in _select_below(state, prefix).items()
    }
    if "lokr_t2" in found:
        raise ValueError(
            f"{prefix}lokr_t2 belongs to a convolution; a linear layer has only lokr_w1, lokr_w2"
        )
    w1, w2 = (_take_product(found, name, prefix) for name in ("lokr_w1", "lokr_w2"))
    sizes = {"a": w1.shape[0], "g": w1.shape[1], "b": w2.shape[0], "d": w2.shape[1]}
    structure = Structure("g d -> a b", "b d", "a g", **sizes)
    return _build_layer(structure, [(w2, "b d"), (scale * w1, "a g")], None)


def _select_below(state: State, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def _take_tensor(state: State, name: str, ndim: int, prefix: str) -> Tensor:
    if name not in state:
        found = sorted(state)[:8]
        raise ValueError(
            f"the state has no {prefix + name!r}; below prefix={prefix!r} it has {found}"
        )
    if state[name].ndim != ndim:
        shape = tuple(state[name].shape)
        raise ValueError(f"{prefix + name!r} has shape {shape}; it must have {ndim} dimensions")
    return state[name]


def _take_product(state: State, name: str, prefix: str) -> Tensor:
    """The matrix of that name, or the product of its two factors."""
    if name in state:
        return _take_tensor(state, name, 2, prefix)
    left, right = (_take_tensor(state, f"{name}_{factor}", 2, prefix) for factor in "ab")
    return left @ right


def _build_layer(
    structure: Structure, tensors: Sequence[tuple[Tensor, str]], bias: Tensor | None
) -> StructuredLinear:
    """`tensors`: the cores in the order of the structure, each with the other library's axes."""
    cores = []
    for core, (tensor, axes) in zip(structure.cores, tensors, strict=True):
        groups = (core.batch_axes, core.fan_out_axes, core.fan_in_axes)
        pattern = " ".join(f"({' '.join(group)})" for group in groups)
        sizes = {axis: structure.sizes[axis] for group in groups for axis in group}
        cores.append(rearrange(tensor, f"{axes} -> {pattern}", **sizes))
    return _fill_layer(structure, cores, bias, structure.in_features, structure.out_features)


def _fill_layer(
    structure: Structure,
    cores: Sequence[Tensor],
    bias: Tensor | None,
    in_features: int,
    out_features: int,
) -> StructuredLinear:
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise ValueError(
            f"the bias has shape {tuple(bias.shape)}; the layer has {out_features} outputs"
        )
    options = {"device": cores[0].device, "dtype": cores[0].dtype}
    layer = StructuredLinear(in_features, out_features, structure, bias is not None, **options)
    with torch.no_grad():
        for own, core in zip(layer.cores, cores, strict=True):
            own.copy_(core)
        if layer.bias is not None and bias is not None:
            layer.bias.copy_(bias)
    return layer
