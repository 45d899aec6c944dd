"""Masses for `optim.Muon` and `optim.Normed`, of a module of the algebra.

Source: Large et al. 2024 (arXiv:2405.14813), section 3.
"""

from collections import defaultdict
from typing import Any

from .._model.parameters import parameters_of
from .._structure.arguments import checked
from .module import Module


@checked
def masses(model: Module) -> dict[str, Any]:
    """The `masses` of an optimizer: layer name -> length of its step at lr = 1; a tuple, of each of
    its cores. That is mass / (M * later sensitivities).

    Without momentum `Muon(net, masses=masses(net))` then makes the steps of `net.dualize()`.

    Raises:
        ValueError: a trainable weight with mass zero.

    >>> from structlin.modular import Linear, ReLU
    >>> net = Linear(64, 8) @ ReLU() @ Linear(64, 64, mass=2)
    >>> {name: round(length, 3) for name, length in masses(net).items()}
    {'0.linear': 0.943, '2.linear': 0.333}
    """
    layers = {info.name: info.layer for info in parameters_of(model)}
    lengths = defaultdict[str, list[float]](list)
    for name, length in model.lengths().items():
        if length:
            lengths[layers[name]].append(length)
        elif model.get_parameter(name).requires_grad:
            raise ValueError(
                f"{name!r} has mass 0: optimizers take no such; "
                "freeze it with requires_grad_(False)"
            )
    return {
        layer: cores[0] if len(cores) == 1 else tuple(cores) for layer, cores in lengths.items()
    }
