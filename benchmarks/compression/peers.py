"""Peers of `benchmarks.compression`: other ways to make a model's linear layers smaller.

Each is a function `(model, layers, keep, seen) -> counts`, which changes these layers in place: to
`keep` of their parameters, uniformly, or, for int8, to a quarter of their bytes. What each does to
the data is one pass of the dense model; none updates weights afterwards.

Sources: ASVD, Yuan et al. 2023 (arXiv:2312.05821), alpha = 1/2, the same share of every layer or,
as `SEARCHED`, its search for them;
SVD-LLM, Wang et al. 2024 (arXiv:2403.07378), section 3.2; K-FAC, Martens & Grosse 2015
(arXiv:1503.05671), as the metric of the truncation; magnitude pruning of all layers together, Han
et al. 2015 (arXiv:1506.02626); Wanda, Sun et al. 2023 (arXiv:2306.11695), unstructured; torchao
(github.com/pytorch/ao), `Int8WeightOnlyConfig`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Counts = dict[str, int]
Layers = dict[str, nn.Linear]
RIDGE = 1e-6  # of the mean of a covariance's diagonal, added to it
SEARCHED_SHARES = tuple(n / 10 for n in range(1, 10))  # ASVD's
DAMPING = 1e-3  # the same, of the outputs' gradients: most of their directions hold next to nothing


def layers_of(model: nn.Module, part: str) -> Layers:
    """The linear layers whose names begin with `part`."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(part) and isinstance(module, nn.Linear)
    }


# ---- what peers ask of the data ------------------------------------------------------------------


@dataclass(eq=False)
class Seen:
    """What some batches say of a dense model's layers; each measured once, when it is asked for.

    Padding, where `attention_mask` is 0, does not count.

    Args:
        loss: (model, batch) -> a number whose gradients are those of the model's own loss, a sum
            over tokens, with labels that the model itself draws; what "K-FAC SVD" alone needs.
    """

    model: nn.Module
    layers: Layers
    batches: Sequence[Batch]
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    _sizes: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def grams(self) -> dict[str, Tensor]:
        """`X^T X` of each layer's inputs."""
        grams: dict[str, Tensor] = {}
        last: list[Any] = [None, None, None]  # query, key and value get the same tensor
        mask: Tensor | None = None

        def collect(name: str) -> Callable[..., None]:
            def add(module: nn.Module, args: tuple[Tensor]) -> None:
                if args[0] is not last[0]:
                    x = _take_tokens(args[0], mask).double()  # (tokens, in)
                    last[:] = args[0], x.mT @ x, x.abs().sum(0)
                grams[name] = grams.get(name, 0) + last[1]
                self._sizes[name] = self._sizes.get(name, 0) + last[2]

            return add

        hooks = [
            layer.register_forward_pre_hook(collect(name)) for name, layer in self.layers.items()
        ]
        with torch.no_grad():
            for batch in self.batches:
                mask = batch.get("attention_mask")
                self.model(**batch)
        for hook in hooks:
            hook.remove()
        return {name: gram.float() for name, gram in grams.items()}

    @property
    def sizes(self) -> dict[str, Tensor]:
        """The sum of |x| of each input feature."""
        _ = self.grams
        return self._sizes

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """`G^T G`, where G are the gradients of `loss` for each layer's outputs, token by token."""
        if self.loss is None:
            raise ValueError("loss=None: the gradients of the outputs need a loss")
        grams: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., Tensor]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                outputs[name] = output if output.requires_grad else output.requires_grad_()
                return outputs[name]

            return hook

        hooks = [layer.register_forward_hook(keep(name)) for name, layer in self.layers.items()]
        for batch in self.batches:
            with torch.enable_grad():
                loss = self.loss(self.model, batch)
                found = torch.autograd.grad(loss, [*outputs.values()])
            for name, gradient in zip(outputs, found, strict=True):
                g = _take_tokens(gradient, batch.get("attention_mask"))  # (tokens, out)
                grams[name] = grams.get(name, 0) + g.mT @ g  # damped, so that float32 will do
        for hook in hooks:
            hook.remove()
        return grams


def _take_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """`(batch, tokens, features)` -> `(tokens that count, features)`."""
    return x.flatten(0, -2) if mask is None else x[mask.bool()]


def take_root(gram: Tensor, ridge: float = RIDGE) -> Tensor:
    """L, lower triangular, L L^T = the gram matrix and a ridge; the identity for a matrix of zeros,
    by which all features count alike.

    Raises:
        ValueError: the matrix is not finite.
    """
    gram = gram.double()
    if not gram.isfinite().all():
        raise ValueError("the gram matrix is not finite: the inputs have NaN or infinite values")
    eye = torch.eye(len(gram), dtype=gram.dtype)
    scale = gram.diagonal().mean()
    if scale == 0:
        return eye
    while True:
        root, failed = torch.linalg.cholesky_ex(gram + ridge * scale * eye)
        if not failed:
            return root
        ridge *= 10


# ---- pairs of factors ----------------------------------------------------------------------------


class Pair(nn.Module):
    """Two dense layers in place of one: `y = U (V x) + bias`."""

    def __init__(self, u: Tensor, v: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.u, self.v, self.bias = nn.Parameter(u), nn.Parameter(v), bias

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features)
        return nn.functional.linear(x @ self.v.mT, self.u, self.bias)  # (..., out_features)


Root = Callable[[str], Tensor]  # the name of a layer -> a lower triangular matrix


def truncate(
    model: nn.Module,
    layers: Layers,
    keep: float,
    right: Root | None = None,
    left: Root | None = None,
    *,
    ranks: Mapping[str, int] | None = None,
) -> Counts:
    """Replace every layer by the pair of the same share of its parameters: uniform ranks. Or give
    each layer in `ranks` its rank, and leave the others dense.

    The pair is the matrix of its rank nearest to W by `||L^T (W - B) R||`: with R R^T = X^T X, its
    outputs on X are nearest to the layer's; with L L^T = G^T G of the gradients too, the model's
    loss changes least as far as K-FAC tells. Without both it is the nearest to W.
    """
    params = 0
    for name, layer in layers.items():
        w = layer.weight.detach().double()  # (out_features, in_features)
        if ranks is not None and name not in ranks:
            params += w.numel()
            continue
        rank = max(1, int(keep * w.numel() / sum(w.shape))) if ranks is None else ranks[name]
        r, l = (None if root is None else root(name) for root in (right, left))
        w = w if r is None else w @ r
        w = w if l is None else l.mT @ w
        u, v = cut_rank(w, rank)
        if r is not None:
            v = torch.linalg.solve_triangular(r, v, upper=False, left=False)  # v R^-1
        if l is not None:
            u = torch.linalg.solve_triangular(l.mT, u, upper=True)  # L^-T u
        dtype = layer.weight.dtype
        pair = Pair(u.to(dtype), v.to(dtype), layer.bias)
        model.set_submodule(name, pair)
        params += pair.u.numel() + pair.v.numel()
    return {"params": params, "bytes": 4 * params, "flops": 2 * params}


def cut_rank(w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U `(out, rank)` and V `(rank, in)`: U V is nearest to `w`, in float64.

    By the eigenvectors of the smaller gram matrix, which costs a few times less than the SVD.
    """
    if len(w) > w.shape[1]:
        v, u = cut_rank(w.mT, rank)
        return u.mT, v.mT
    vectors = torch.linalg.eigh(w @ w.mT).eigenvectors[:, -rank:]  # of ascending eigenvalues
    return vectors, vectors.mT @ w


def svd(model: nn.Module, layers: Layers, keep: float, seen: Seen) -> Counts:
    """The nearest pair to each weight."""
    return truncate(model, layers, keep)


def asvd(model: nn.Module, layers: Layers, keep: float, seen: Seen) -> Counts:
    """ASVD: each input feature weighs as much as the root of its mean |x|."""
    weights = {name: (x / x.mean()).clamp_min(RIDGE).sqrt() for name, x in seen.sizes.items()}
    return truncate(model, layers, keep, lambda name: weights[name].diag())


def asvd_searched(model: nn.Module, layers: Layers, keep: float, seen: Seen) -> Counts:
    """ASVD with a share of its own for each layer, by the search of its authors' code.

    They order pairs of a layer and a share by how sensitive the layer is at that share, and cut
    the least sensitive ones until `keep` is reached. Here the sensitivity is `-s * share^0.1`, s
    the root of the layer's stable rank: their choice "stable_rank", which runs no model. Their
    other one needs a perplexity for each pair.
    """
    weights = {name: (x / x.mean()).clamp_min(RIDGE).sqrt() for name, x in seen.sizes.items()}
    sensitivity = {
        (name, share): -(measure_stable_rank(layer.weight) ** 0.5) * share**0.1
        for name, layer in layers.items()
        for share in SEARCHED_SHARES
    }
    sizes = {name: layer.weight.numel() for name, layer in layers.items()}
    shares = choose_shares(sensitivity, sizes, keep)
    ranks = {}
    for name, share in shares.items():
        weight = layers[name].weight
        ranks[name] = max(1, int(share * weight.numel() / sum(weight.shape)))
    return truncate(model, layers, keep, lambda name: weights[name].diag(), ranks=ranks)


def measure_stable_rank(weight: Tensor) -> float:
    """The squared Frobenius norm over the squared spectral norm."""
    w = weight.detach().double()
    gram = w @ w.mT if len(w) < w.shape[1] else w.mT @ w
    return float(gram.trace() / torch.linalg.eigvalsh(gram)[-1])


def choose_shares(
    sensitivity: Mapping[tuple[str, float], float], sizes: Mapping[str, int], keep: float
) -> dict[str, float]:
    """The share of each layer that is cut; the others stay dense.

    From the least sensitive pair on, each layer takes the least share of its pairs, until no more
    than `keep` of all `sizes` is left.

    >>> pairs = {("a", 0.5): 3.0, ("a", 0.9): 1.0, ("b", 0.5): 2.0, ("b", 0.9): 0.0}
    >>> choose_shares(pairs, {"a": 10, "b": 10}, 0.75)
    {'b': 0.5, 'a': 0.9}
    """
    shares: dict[str, float] = {}
    for name, share in sorted(sensitivity, key=lambda pair: sensitivity[pair]):
        shares[name] = min(share, shares.get(name, 1.0))
        left = sum(size * shares.get(layer, 1.0) for layer, size in sizes.items())
        if left <= keep * sum(sizes.values()):
            break
    return shares


def svd_llm(model: nn.Module, layers: Layers, keep: float, seen: Seen) -> Counts:
    """SVD-LLM: data whitened by the Cholesky factor of X^T X, one pass, no update afterwards."""
    grams = seen.grams
    return truncate(model, layers, keep, lambda name: take_root(grams[name]))


def kfac_svd(model: nn.Module, layers: Layers, keep: float, seen: Seen) -> Counts:
    """SVD-LLM's whitening of the inputs, and that of the loss's gradients for the outputs."""
    inputs, outputs = seen.grams, seen.gradients
    return truncate(
        model,
        layers,
        keep,
        lambda name: take_root(inputs[name]),
        lambda name: take_root(outputs[name], DAMPING),
    )


# ---- fewer numbers, fewer bits -------------------------------------------------------------------


def prune(model: nn.Module, layers: Layers, keep: float, seen: Seen) -> Counts:
    """Set the smallest entries of all weights together to zero.

    The bytes are those of the nonzero values alone, without their places; the FLOPs are dense's.
    """
    weights = [layer.weight.detach() for layer in layers.values()]
    everything = torch.cat([weight.abs().flatten() for weight in weights])
    threshold = everything.kthvalue(len(everything) - int(keep * len(everything))).values
    for weight in weights:
        weight[weight.abs() <= threshold] = 0
    return _count_nonzero(layers)


def wanda(model: nn.Module, layers: Layers, keep: float, seen: Seen) -> Counts:
    """Set to zero, in each row, the entries of the least |w| times the norm of their input.

    Counted as `prune` counts.
    """
    for name, layer in layers.items():
        weight = layer.weight.detach()
        scores = weight.abs() * seen.grams[name].diagonal().sqrt().to(weight)
        lost = weight.shape[1] - int(keep * weight.shape[1])
        if lost:
            weight[scores <= scores.kthvalue(lost, dim=1, keepdim=True).values] = 0
    return _count_nonzero(layers)


def _count_nonzero(layers: Layers) -> Counts:
    params = sum(int(layer.weight.count_nonzero()) for layer in layers.values())
    flops = 2 * sum(layer.weight.numel() for layer in layers.values())
    return {"params": params, "bytes": 4 * params, "flops": flops}


def int8(model: nn.Module, layers: Layers, keep: float, seen: Seen) -> Counts:
    """Weights in eight bits by torchao, a scale for each output."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    chosen = set(layers.values())
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: module in chosen)
    weights: list[Any] = [layer.weight for layer in layers.values()]
    params = sum(weight.numel() for weight in weights)
    size = sum(w.qdata.nbytes + w.scale.nbytes for w in weights)
    return {"params": params, "bytes": size, "flops": 2 * params}


Peer = Callable[[nn.Module, Layers, float, Seen], Counts]
PEERS: dict[str, Peer] = {
    "SVD": svd,
    "ASVD": asvd,
    "SVD-LLM": svd_llm,
    "K-FAC SVD": kfac_svd,
    "pruning": prune,
    "Wanda": wanda,
    "int8": int8,
}
SEARCHED: dict[str, Peer] = {"ASVD, its search": asvd_searched}  # where shares are searched too
