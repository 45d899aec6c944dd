"""Experts that lie in one parameter: each matrix is measured and projected as a layer of its own,
with the tokens that reach it, and all of them have one structure.

`unfold` gives the runs a copy of the model in which each matrix is a linear layer that shares the
parameter's memory (`DenseExperts`). So what measures and projects layers needs no word of experts:
a matrix is visited where the model calls it, and its moments are those of the tokens that the
router sends it. `join_curves` and `fold` put the matrices of a parameter together again.

A router may send an expert other tokens in the compressed model than in the dense one, so both are
never paired: a matrix is projected for its inputs in the compressed model.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import fsum, sqrt

import torch
from torch import nn

from .._convert.plan import ExpertsProjection, Projection
from .._model.decide import Target
from .._model.linears import Layer
from .._model.stacks import ExpertsLayer
from .._projection.curve import Curve, Size
from .._structure.arguments import warn
from .replica import Replica
from .sizes import Curves, Offer, Weights

FEW = 0.1  # tokens per input feature, below which a warning names the expert


def unfold(model: nn.Module, layers: Iterable[Layer]) -> Replica:
    """A replica of the model in which each matrix of these experts is a layer of its own."""
    replica = Replica(model)
    for layer in layers:
        if isinstance(layer, ExpertsLayer):
            owner = replica[layer.owner]
            del owner._parameters[layer.attribute]
            owner._modules[layer.attribute] = replica.copy(layer.module)
    return replica


def list_members(layers: Iterable[Layer]) -> list[Layer]:
    """These layers, with the matrices of experts one by one."""
    members: list[Layer] = []
    for layer in layers:
        members += layer.members if isinstance(layer, ExpertsLayer) else [layer]
    return members


def list_targets_one_by_one(targets: Iterable[Target]) -> list[Target]:
    """These targets, with the matrices of experts one by one, each of the same structure."""
    alone = []
    for layer, structure in targets:
        alone += [Target(member, structure) for member in list_members([layer])]
    return alone


def drop_unreached(outputs: Weights, layers: Iterable[Layer]) -> Weights:
    """The weights of outputs, without those of experts that no token reached: they say nothing."""
    unreached: set[nn.Module] = set()
    for layer in layers:
        if isinstance(layer, ExpertsLayer):
            modules = [member.module for member in layer.members]
            unreached.update(module for module in modules if not outputs[module].any())
    return {module: weight for module, weight in outputs.items() if module not in unreached}


def list_offers_one_by_one(offers: Sequence[Offer], outputs: Weights) -> list[Offer]:
    """These offers, with the matrices of experts one by one; not those that no token reached, where
    the harm is measured."""
    alone = []
    for offer in offers:
        if not isinstance(offer.layer, ExpertsLayer):
            alone.append(offer)
            continue
        # of one matrix
        sizes = [size._replace(cost=size.cost // offer.layer.count) for size in offer.sizes]
        for member in offer.layer.members:
            if not outputs or member.module in outputs:
                alone.append(Offer(member, sizes))
    return alone


def join_curves(offers: Sequence[Offer], curves: Curves, *, by_harm: bool) -> Curves:
    """A curve for each offer: that of experts is the sum of the curves of their matrices.

    Args:
        by_harm: whether the errors are harm to the loss, which adds up. Otherwise each matrix
            counts alike: the sum is that of the squared relative errors, and `whole` is 1.
    """
    joined: dict[nn.Module, Curve] = {}
    for layer, sizes in offers:
        if not isinstance(layer, ExpertsLayer):
            joined[layer.module] = curves[layer.module]
            continue
        modules = [member.module for member in layer.members]
        of_members = [curves[module] for module in modules if module in curves]
        joined[layer.module] = _add_curves(sizes, of_members, by_harm)
    return joined


def _add_curves(sizes: Sequence[Size], curves: Sequence[Curve], by_harm: bool) -> Curve:
    units = [1.0 if by_harm else curve.whole or 1.0 for curve in curves]
    errors = []
    for n in range(len(sizes)):
        terms = [curve.errors[n] / unit for curve, unit in zip(curves, units, strict=True)]
        errors.append(fsum(terms))
    whole = fsum(curve.whole for curve in curves) if by_harm else 1.0
    return Curve(sizes, errors, whole)


def fold(
    targets: Iterable[Target], alone: Mapping[str, Projection], *, by_data: bool
) -> dict[str, Projection]:
    """The projections of these targets, of those of their matrices one by one."""
    projections: dict[str, Projection] = {}
    for layer, _ in targets:
        if isinstance(layer, ExpertsLayer):
            members = [alone[member.name] for member in layer.members]
            projections[layer.name] = _fold_members(layer, members, by_data)
        else:
            projections[layer.name] = alone[layer.name]
    return projections


def _fold_members(
    layer: ExpertsLayer, members: Sequence[Projection], by_data: bool
) -> ExpertsProjection:
    # each core (count * batch, fan_out, fan_in), the experts outermost
    cores = [torch.cat(parts) for parts in zip(*(member.cores for member in members), strict=True)]
    error = sqrt(fsum(member.error**2 for member in members) / len(members))
    # gate and up get the same tokens
    tokens = [member.tokens or 0 for member in members[:: layer.lay.fused]]
    return ExpertsProjection(cores, error, tokens_of_experts=tokens if by_data else ())


def warn_of_rare_experts(targets: Iterable[Target], projections: Mapping[str, Projection]) -> None:
    """Warn of experts that no token reached, or few."""
    unreached = []
    rare = []
    for layer, _ in targets:
        projection = projections[layer.name]
        if not isinstance(projection, ExpertsProjection):
            continue
        for expert, tokens in enumerate(projection.tokens_of_experts):
            if not tokens:
                unreached.append(f"expert {expert} of {layer.name}")
            elif tokens < FEW * layer.in_features:
                rare.append(f"expert {expert} of {layer.name} ({tokens} of {layer.in_features})")
    if unreached:
        warn(
            f"compress: no token that varies reached {', '.join(unreached)}: projected by weight "
            "alone"
        )
    if rare:
        warn(
            "compress: these experts got far fewer tokens than they have input features, and are "
            f"mostly projected by weight: {', '.join(rare)}; give more batches"
        )
