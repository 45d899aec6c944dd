"""Two candidates of `benchmarks.training.gpt_seconds` that change what happens between the factors
of a layer: latents handed on from block to block, and factors that are made anew on the way."""

from collections import defaultdict
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structlin import Structure, StructuredLinear
from structlin._product import SILU_RMS, run
from structlin._projection import project


class Crossed(StructuredLinear):
    """A layer of two cores whose latent is added to that of the layer of the same name in the next
    block, at the scale of one: y_i = B_i (A_i x_i + A_(i-1) x_(i-1)) / sqrt(2).

    Source: LaX, latent crossing without a gate (arXiv:2505.21732), which does not divide.
    """

    halves: tuple[Structure, Structure]  # of one core each
    before: tuple["Crossed", ...]  # the layer of the block before; a tuple, or it were a submodule
    latent: Tensor

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.effective_cores()
        self.latent = run(self.halves[0], [first], x)
        h = self.latent
        for layer in self.before:
            h = (h + layer.latent) / sqrt(2)
        if self.structure.between:
            h = F.silu(h) / SILU_RMS
        return run(self.halves[1], [second], h, self.bias)


def cross(model: nn.Module) -> nn.Module:
    """Hand the latents of a converted model on, in place. The parameters stay.

    Raises:
        ValueError: a layer pads its features, which a crossed one does not do.
    """
    chains: dict[tuple[str, Structure], list[Crossed]] = defaultdict(list)
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear) and len(layer.cores) == 2:
            padded = layer.structure.in_features, layer.structure.out_features
            if padded != (layer.in_features, layer.out_features):
                raise ValueError(f"layer {name!r} pads its features to {padded}: no crossing there")
            layer.__class__ = Crossed
            layer.halves = split(layer.structure)
            chain = chains[name.rpartition(".")[2], layer.structure]
            layer.before = (*chain[-1:],)
            chain.append(layer)
    return model


def split(structure: Structure) -> tuple[Structure, Structure]:
    """A structure of two cores as two of one core, without what is between them."""
    first, second = structure.subscripts
    core, sizes = structure.cores[0], structure.sizes
    x, y = " ".join(structure.inputs), " ".join(structure.outputs)
    latent = " ".join((*core.batch_axes, *core.repeat_axes, *core.fan_out_axes))

    def one(signature: str, core: str) -> Structure:
        named = {*signature.split(), *core.split()}
        return Structure(signature, core, **{name: sizes[name] for name in sizes if name in named})

    return one(f"{x} -> {latent}", first), one(f"{latent} -> {y}", second)


def refactorise(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
    """Make the cores of each layer anew from its matrix, as `project` does, after so many steps
    again and again; the optimizer's moments of the layer begin at zero then.

    Source: 2505.22922, weight refactorisation with momentum reset, for low-rank layers.
    """
    steps = 0

    def renew(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps % every:
            return
        for layer in model.modules():
            if isinstance(layer, StructuredLinear):
                with torch.no_grad():
                    layer.set_cores_(project(layer.to_dense(), layer.structure))
                for parameter in layer.parameters():
                    optimizer.state.pop(parameter, None)

    optimizer.register_step_post_hook(renew)
