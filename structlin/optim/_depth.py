"""`Depth`: how a residual network's branches and their rates change with the number of blocks.

Sources: Dey et al. 2025, "CompleteP" (arXiv:2505.01618), table 1; Yang et al. 2023, depth-muP
(arXiv:2310.02244); Large et al. 2024, "Scalable Optimization in the Modular Norm"
(arXiv:2405.14813), proposition 4.
"""

from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import nn

from .._layer.linear import StructuredLinear
from .._model.blocks import blocks_of_parameters
from .._model.linears import linear_layers
from .._model.parameters import parameters_of
from .._model.select import Patterns, find_rules, list_patterns
from .._structure.arguments import checked

_SCALED_LAYERS = WeakSet[nn.Module]()  # by `Depth.scale_`


@checked
@dataclass(frozen=True, kw_only=True)
class Depth:
    """Residual blocks `x + m * branch(x)` with m = D^-alpha, for a model of D times the blocks of
    that where the learning rate was tuned.

    `param_groups(..., depth=)` and `Muon(..., depth=)` give what is inside of the blocks (matrices,
    biases and norms alike) the rates that belong to it; embeddings, the head and the last norm keep
    theirs:

        Adam's and Muon's rate   D^(alpha - 1)
        SGD's rate               D^(2 alpha - 1)
        Adam's eps               D^-alpha         a branch's gradient has the factor m
        lr * weight decay        as the rate: the decay itself is left alone

    alpha = 1 is CompleteP, and the modular norm's: no rate changes. alpha = 1/2 is depth-muP.

    Either the model multiplies, with `m = Depth(base=2).multiplier(model)`; or, for a model whose
    code is not yours, `ends` names the last linear layers of the branches, and `scale_(model)`
    multiplies their weights once, before training. Under Adam these then have m times the rate, 1 /
    m of eps and decay, and under Muon steps of m times the length: the same network at every step.

    Args:
        base: number of blocks where the rate was tuned. The blocks of a model are the modules of
            its one nn.ModuleList (or alike ones of an nn.Sequential) that are no layers.
        alpha: from 1/2 to 1.
        ends: patterns of linear layers as of `convert` ("*c_proj"), whose weights hold m; None: the
            model multiplies.

    Raises:
        ValueError: `base` or `alpha` is out of range. Where a model is read: no block is found, or
            blocks in several places; a layer of `ends` is in no block, or is weight-normalised
            or parametrised.

    >>> block = lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    >>> model = nn.ModuleList(block() for _ in range(8))
    >>> Depth(base=2).multiplier(model), Depth(base=2, alpha=0.5).multiplier(model)
    (0.25, 0.5)
    """

    base: int
    alpha: float = 1.0
    ends: Patterns | None = None

    def __post_init__(self) -> None:
        list_patterns("ends", () if self.ends is None else self.ends)
        if not 0.5 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r} must be from 0.5 (depth-muP) to 1 (CompleteP)")

    @checked
    def multiplier(self, model: nn.Module) -> float:
        """m, of the branches of `model`."""
        return float(self.ratio(model) ** -self.alpha)

    @checked
    @torch.no_grad()
    def scale_(self, model: nn.Module) -> nn.Module:
        """Multiply the weights and biases of the layers at the `ends` by m, in place; of a
        structured layer the last core. Returns the model.

        Raises:
            ValueError: `ends` is None.
            RuntimeError: one of the layers was scaled before. Nothing has changed.
        """
        m = self.multiplier(model)
        ends = self.find_ends(model)
        if not ends:
            raise ValueError("ends=None: name the last layers of the branches, such as '*c_proj'")
        infos = [info for info in parameters_of(model) if info.name in ends]
        scaled = [info.layer for info in infos if info.owner in _SCALED_LAYERS]
        if scaled:
            raise RuntimeError(
                f"{scaled[0]!r} was scaled by Depth.scale_ before, and would have the multiplier "
                f"{m:.4g} twice: call scale_ once, before training, on a model that is built anew"
            )
        for info in infos:
            info.parameter.mul_(m)
        _SCALED_LAYERS.update(info.owner for info in infos)
        return model

    def ratio(self, model: nn.Module) -> float:
        """D."""
        return len(set(self.find_blocks(model).values())) / self.base

    def find_blocks(self, model: nn.Module) -> dict[str, str]:
        """Parameter name -> name of its block, for those that are in one."""
        blocks = blocks_of_parameters(model)
        places = sorted({block.rpartition(".")[0] for block in blocks.values()})
        if len(places) != 1:
            seen = f"blocks in {', '.join(map(repr, places))}" if places else "no nn.ModuleList"
            raise ValueError(
                f"depth={self}: the depth of {type(model).__name__} cannot be read, it has {seen}; "
                "its residual blocks must be the modules of one nn.ModuleList"
            )
        return blocks

    def find_ends(self, model: nn.Module) -> set[str]:
        """Names of the parameters that hold m."""
        if self.ends is None:
            return set()
        layers = linear_layers(model)
        modules = {}
        for rule in find_rules("ends", self.ends, layers, model):
            for n in rule.means:
                modules[layers[n].module] = layers[n].name
        blocks = self.find_blocks(model)
        for module, name in modules.items():
            if not _has_plain_weight(module):
                raise ValueError(
                    f"ends={self.ends!r}: the weight of {name!r} is made of parameters whose size "
                    "may say nothing (weight_norm or another parametrization): multiply the branch "
                    "in the model's forward"
                )
        ends = set()
        for info in parameters_of(model):
            if info.owner not in modules:
                continue
            name = modules[info.owner]
            if info.name not in blocks:
                raise ValueError(f"ends={self.ends!r}: {name!r} is in no residual block")
            if isinstance(info.owner, StructuredLinear):
                if info.owner.gains is not None:
                    raise ValueError(
                        f"ends={self.ends!r}: {name!r} is weight-normalised, its cores' size says "
                        "nothing: multiply the branch in the model's forward"
                    )
                if info.weight.core not in (None, len(info.owner.structure.cores) - 1):
                    continue
            ends.add(info.name)
        return ends


def _has_plain_weight(layer: nn.Module) -> bool:
    """Whether the weight, or every core, is a parameter by itself, or one that is pruned. Then a
    multiple of the parameter is a multiple of the weight."""
    holder = layer
    names = ["weight"]
    if isinstance(layer, StructuredLinear):
        holder, names = layer.cores, layer.core_names
    held = holder._parameters.keys()
    return all(name in held or f"{name}_orig" in held for name in names)
