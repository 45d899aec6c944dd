"""Muon for batched cores: steepest descent under each parameter's own norm, block by block.

Sources: Bernstein & Newhouse 2024, "Modular Duality in Deep Learning" (arXiv:2410.21265); Jordan et
al. 2024, "Muon"; Large et al. 2024, "Scalable Optimization in the Modular Norm" (arXiv:2405.14813)
for masses.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from .._structure.arguments import checked
from .._tensors import Dtype, Rate
from ..duality import Method
from ._block import BlockOptimizer
from ._depth import Depth
from ._roster import Masses
from ._stacks import PolarFactor
from ._transfer import Base


class Muon(BlockOptimizer):
    """One optimizer for a whole model, converted or not.

    What a parameter is, is read from its module and from the layer's name:

    - hidden matrices, which are cores of a `StructuredLinear`, block by block; weights of
      nn.Linear, transformers' Conv1D, convolutions (each slice of the kernel),
      nn.MultiheadAttention (q, k and v apart), and each expert in the experts of transformers,
      torchtitan and what `declare_weights` declares (gate and up apart):
      W <- W - lr * mass * sqrt(fan_out / fan_in) * polar(momentum), a step of norm lr * mass in the
      RMS->RMS operator norm. A layer's mass is split over its cores;
    - everything else (embeddings, heads, routers, biases, norms, gains, complex weights): AdamW at
      the rates of `param_groups(model, other_lr, base=base, depth=depth, masses=masses)`. AdamW
      also steps the weights of nn.LSTM, nn.GRU and nn.RNN.

    `print(optimizer)` shows what steps how. Parameters that are frozen when the optimizer is made
    train once `requires_grad` is set. A warning lists wide layers, if they are a good part of the
    model, that get AdamW by their name though other layers take in what they give out. Another
    lists parameters of three or more dimensions whose name or class says experts, and of which
    nobody has said how the experts lie.

    With `matrices="all"` heads and routers step as hidden matrices, and each vector of an
    nn.Embedding by RMS lr * mass, or not at all where it has no gradient, as in MD.

    Every group's "lr" is the rate of hidden matrices, and a step multiplies it by the group's
    `lr_mult`: a scheduler, or a loop that sets one rate for every group, scales everything else's
    rate with it.

    The momentum is Nesterov's: B <- momentum B + (1 - momentum) G, and the step is that of
    (1 - momentum) G + momentum B. Under FSDP2 cores need no communication and other matrices are
    gathered, see `shard_placement_fn`. Make the optimizer after `convert`, `fully_shard` and moving
    to a device.

    Args:
        params: a module, or what torch optimizers take (parameters, or dicts with options of their
            own) and `model=`.
        lr: of hidden matrices, in units of operator norm per step; a number or a 0-D tensor, which
            torch.compile sees change. All groups share it, and ReduceLROnPlateau changes it once
            for each of them, so give that a number.
        model: the module that owns the parameters, where `params` is not it.
        momentum: of the average of gradients.
        weight_decay: decoupled: W <- (1 - rate * weight_decay) W first; matrices and embeddings
            only, without those that `no_weight_decay()` names, see `param_groups`.
        matrices: which of them step by polar factors: "hidden", or "all", with heads, routers and
            embeddings.
        method, dtype: of `polar_factor`. None: 5 steps of "fast", singular values above 3e-3 of
            the norm within 1 % of 1; in bfloat16 where `choose_polar` finds it faster.
            "svd" is exact.
        adjust_lr_fn: "rms"; "original" (sqrt(max(1, fan_out / fan_in))) and "match_rms_adamw"
            (0.2 sqrt(max(fan_out, fan_in))) are those of torch.optim.Muon. With its schedule,
            method=5 * [(3.4445, -4.7750, 2.0315)], dtype=torch.bfloat16 and
            adjust_lr_fn="original" the step of an nn.Linear equals torch.optim.Muon's bit for bit.
        masses: glob over layer names -> step length relative to the others; a tuple: of a layer's
            cores, one each.
        base: as of `param_groups` with weight_decay_scaling="constant"; AdamW's eps follows the
            width. The rate of hidden matrices does not depend on it.
        depth: of a residual network, relative to that where `lr` was tuned, see `Depth`.
        other_lr: of everything else, where the matrices have the rate `lr`.
        betas, eps: AdamW's.
        nonfinite: gradients with inf or NaN: "raise" (before anything has changed) or "ignore" (no
            check, and no wait for the device). "raise" also checks the norm of every polar factor,
            and holds all of them for it. Each process checks its own part of sharded parameters.

    Raises:
        TypeError: `masses` is no mapping, a number none, `dtype` no torch.dtype.
        ValueError: an option out of range, also in a group; a name in a group that is no option; a
            parameter that no module of the model owns, is in two groups or on meta; what
            `param_groups` raises of `base` and `depth`.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), BTT())
    >>> optimizer = Muon(model, lr=0.02, other_lr=1e-3)
    >>> [(group["kind"], group["lr"], group["lr_mult"]) for group in optimizer.param_groups]
    [('matrix', 0.02, 1.0), ('other', 0.02, 0.05)]
    >>> print(optimizer)
    Muon
    kind     layer                               x   params   step              lr
    ──────────────────────────────────────────────────────────────────────────────
    matrix   *                                   2    2,048   polar factor    0.02
    other    (biases, norms and other vectors)   2      128   AdamW          0.001
    """

    direction = PolarFactor

    @checked
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: Rate = 0.02,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        matrices: str = "hidden",
        method: Method = None,
        dtype: Dtype = None,
        adjust_lr_fn: str = "rms",
        masses: Masses | None = None,
        base: Base = None,
        depth: Depth | None = None,
        other_lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        nonfinite: str = "raise",
    ) -> None:
        super().__init__(
            params, lr, model=model, momentum=momentum, weight_decay=weight_decay,
            matrices=matrices, method=method, dtype=dtype, adjust_lr_fn=adjust_lr_fn,
            masses=masses, base=base, depth=depth, other_lr=other_lr, betas=betas, eps=eps,
            nonfinite=nonfinite,
        )  # fmt: skip
