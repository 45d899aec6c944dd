"""The methods that `benchmarks.comparison.layers` compares: every file here has a list `METHODS`.

To add yours, write such a file. `structlin` is no part of it:

    import torch
    from benchmarks.comparison.methods import Method, replace_layers


    class Circulant(torch.nn.Module):
        def __init__(self, in_features, out_features): ...

        def forward(self, x): ...


    METHODS = [Method("circulant", replace_layers(Circulant))]

A file whose package is not installed is left out, and the program says so.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

import structlin
from structlin._model.decide import list_targets

Build = Callable[[int, int], nn.Module]


def one_rate(model: nn.Module, lr: float) -> Iterable[Any]:
    """All parameters at the same rate."""
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


@dataclass(frozen=True)
class Method:
    """A linear layer, and how a model is made of it.

    Args:
        name: in the table.
        convert: changes a dense model in place. What does not fit it is a ValueError.
        package: what computes the layer.
        groups: (model, rate) -> the parameter groups of AdamW.
    """

    name: str
    convert: Callable[[nn.Module], Any]
    package: str = "torch"
    groups: Callable[[nn.Module, float], Iterable[Any]] = one_rate


def replace_layers(build: Build) -> Callable[[nn.Module], None]:
    """What puts `build(in_features, out_features)` in the place of every linear layer that
    `structlin.convert` would replace: all but the head and what has a bias."""

    def convert(model: nn.Module) -> None:
        decisions = structlin.plan(model, structlin.Dense()).decisions
        for layer, _ in list_targets(decisions):
            model.set_submodule(layer.name, build(layer.in_features, layer.out_features))

    return convert


class Methods(NamedTuple):
    """All methods of this folder."""

    by_name: dict[str, Method]
    left_out: list[str]  #: files, each with the reason


def find_methods() -> Methods:
    """Import every file of this folder.

    Raises:
        ValueError: two methods of one name.
    """
    by_name: dict[str, Method] = {}
    left_out = []
    for name in _list_files():
        try:
            methods = importlib.import_module(f"{__name__}.{name}").METHODS
        except ImportError as error:
            left_out.append(f"{name}: {error}")
            continue
        for method in methods:
            if method.name in by_name:
                raise ValueError(f"methods/{name}.py: there is another method {method.name!r}")
            by_name[method.name] = method
    return Methods(by_name, left_out)


def _list_files() -> Iterator[str]:
    return (module.name for module in pkgutil.iter_modules(__path__))
