"""Peers of `benchmarks.compression.minilm`: other ways to make an encoder's linear layers smaller.

Each is a function `(model, budget, calibration) -> counts`, which changes the layers of `encoder.*`
in place: to `budget` of their parameters, or, for int8, to a quarter of their bytes.

Sources: SVD-LLM, Wang et al. 2024 (arXiv:2403.07378), section 3.2; global magnitude pruning, Han et
al. 2015 (arXiv:1506.02626); torchao (github.com/pytorch/ao), `Int8WeightOnlyConfig`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import structlin

Batch = dict[str, Tensor]
Counts = dict[str, int]


def encoder_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith("encoder.") and isinstance(module, nn.Linear)
    }


class Pair(nn.Module):
    """Two dense layers in place of one: `y = U (V x) + bias`."""

    def __init__(self, u: Tensor, v: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.u, self.v, self.bias = nn.Parameter(u), nn.Parameter(v), bias

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features)
        return nn.functional.linear(x @ self.v.mT, self.u, self.bias)  # (..., out_features)


def truncate(model: nn.Module, budget: float, whitening: dict[str, Tensor]) -> Counts:
    """Replace every layer by the pair of the same share of its parameters: uniform ranks.

    With S of `whitening`, `S S^T = X^T X`, the truncated SVD is that of W S: the pair's outputs on
    X are then nearest to the layer's. Without, it is that of W.
    """
    params = 0
    for name, layer in encoder_layers(model).items():
        w = layer.weight.detach().double()  # (out_features, in_features)
        rank = int(budget * w.numel() / sum(w.shape))
        s = whitening.get(name)
        left, values, right = torch.linalg.svd(w if s is None else w @ s, full_matrices=False)
        u, v = left[:, :rank] * values[:rank], right[:rank]  # (out, rank), (rank, in)
        if s is not None:
            v = torch.linalg.solve_triangular(s, v, upper=False, left=False)  # v S^-1
        pair = Pair(u.float(), v.float(), layer.bias)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, pair)
        params += pair.u.numel() + pair.v.numel()
    return {"params": params, "bytes": 4 * params, "flops": 2 * params}


def svd(model: nn.Module, budget: float, calibration: list[Batch]) -> Counts:
    """The nearest pair to each weight."""
    return truncate(model, budget, {})


def svd_llm(model: nn.Module, budget: float, calibration: list[Batch]) -> Counts:
    """SVD-LLM: data whitened by the Cholesky factor of X^T X, one pass, no update afterwards.

    Padding does not count. The factor needs a positive definite matrix: 1e-6 of the mean of the
    diagonal is added to it.
    """
    grams = {name: torch.zeros(0) for name in encoder_layers(model)}
    real = torch.zeros(0)

    def collect(name: str) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple[Tensor]) -> None:
            x = args[0][real].double()  # (batch, tokens, in_features) -> (tokens that count, ...)
            gram = x.mT @ x
            grams[name] = gram if not grams[name].numel() else grams[name] + gram

        return add

    hooks = [
        layer.register_forward_pre_hook(collect(name))
        for name, layer in encoder_layers(model).items()
    ]
    with torch.no_grad():
        for batch in calibration:
            real = batch["attention_mask"].bool()
            model(**batch)
    for hook in hooks:
        hook.remove()
    whitening = {}
    for name, gram in grams.items():
        ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        whitening[name] = torch.linalg.cholesky(gram + ridge)
    return truncate(model, budget, whitening)


def prune(model: nn.Module, budget: float, calibration: list[Batch]) -> Counts:
    """Set the smallest entries of all weights together to zero.

    The bytes are those of the nonzero values alone, without their places; the FLOPs are dense's.
    """
    weights = [layer.weight.detach() for layer in encoder_layers(model).values()]
    everything = torch.cat([weight.abs().flatten() for weight in weights])
    threshold = everything.kthvalue(len(everything) - int(budget * len(everything))).values
    for weight in weights:
        weight[weight.abs() <= threshold] = 0
    params = sum(int(weight.count_nonzero()) for weight in weights)
    return {"params": params, "bytes": 4 * params, "flops": 2 * len(everything)}


def int8(model: nn.Module, budget: float, calibration: list[Batch]) -> Counts:
    """Weights in eight bits by torchao, a scale for each output."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layers = encoder_layers(model)
    quantize_(
        model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: module in layers.values()
    )
    weights: list[Any] = [layer.weight for layer in layers.values()]
    params = sum(weight.numel() for weight in weights)
    size = sum(w.qdata.nbytes + w.scale.nbytes for w in weights)
    return {"params": params, "bytes": size, "flops": 2 * params}


PEERS: dict[str, Callable[[nn.Module, float, list[Batch]], Counts]] = {
    "SVD": svd,
    "SVD-LLM": svd_llm,
    "pruning": prune,
    "int8": int8,
}


@torch.no_grad()
def round_weights(model: nn.Module) -> int:
    """Round the encoder's weights and cores to int8, a scale for each row; their bytes.

    It is the rule of torchao's int8 weights, which takes nn.Linear alone: symmetric, the largest
    entry of what makes an output (`(batch, fan_out)` of a core) becomes 127. Values stay in
    float32: what is measured is what a file of int8 weights would give.
    """
    layers = [m for m in model.modules() if isinstance(m, structlin.StructuredLinear)]
    cores = [core for layer in layers for core in layer.cores]  # (batch, fan_out, fan_in)
    size = 0
    for matrix in (*cores, *(layer.weight for layer in encoder_layers(model).values())):
        scale = (matrix.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
        matrix.copy_((matrix / scale).round() * scale)
        size += matrix.numel() + scale.nbytes
    return size
