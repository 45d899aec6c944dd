"""The algebra of modules: mass, sensitivity, sharpness and the modular norm follow the expression
that is a network.

The mass m of a module says how much of the learning is its own, the sensitivity mu by how much it
amplifies what it is given, and the sharpness (alpha, beta, gamma) bounds its second derivatives.
Activations are measured by the RMS of their features, the largest over all other dimensions; a
tuple of them by the sum.

Sources: Large et al. 2024, "Scalable Optimization in the Modular Norm" (arXiv:2405.14813), called
MN here; Bernstein & Newhouse 2024, "Modular Duality in Deep Learning" (arXiv:2410.21265), called
MD.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from .._model.parameters import parameters_of
from .._structure.arguments import Range, checked, require_integer, show
from .._tensors import Rate
from ..duality import promote

Width: TypeAlias = "int | tuple[Width, ...] | None"  #: number of features, where it is known
Weights = Mapping[str, Tensor]  #: one tensor per parameter, by its name in `named_parameters`
MOST_COPIES = 10_000
Self = TypeVar("Self", bound="Module")


class Sharpness(NamedTuple):
    """Bounds of the second derivatives: twice by weights, by weights and input, twice by input."""

    alpha: float
    beta: float
    gamma: float


class Attributes(NamedTuple):
    """Mass, sensitivity and sharpness, and how they compose (MN, section 3).

    >>> linear = Attributes(mass=1.0, sensitivity=1, beta=1)
    >>> double = Attributes(sensitivity=2)
    >>> double.after(linear).after(linear)
    Attributes(mass=2.0, sensitivity=2, alpha=0.25, beta=1.0, gamma=0.0)
    """

    mass: float = 0.0
    sensitivity: float = 1.0
    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0

    def after(self, inner: "Attributes") -> "Attributes":
        """Attributes of the composite M2 o M1, with `self` of M2 and `inner` of M1."""
        # mass m, sensitivity mu and sharpness (a, b, g) of both, and p their shares of the mass
        m1, mu1, a1, b1, g1 = inner
        m2, mu2, a2, b2, g2 = self
        p1 = _share(m1, m1 + m2)
        p2 = _share(m2, m1 + m2)
        return Attributes(
            mass=m1 + m2,
            sensitivity=mu1 * mu2,
            alpha=p1**2 * a1 / mu2 + p2**2 * a2 + 2 * p1 * p2 * b2 / mu2 + p1**2 * g2 / mu2**2,
            beta=p1 * b1 + mu1 * p2 * b2 + mu1 / mu2 * p1 * g2,
            gamma=mu2 * g1 + mu1**2 * g2,
        )

    def beside(self, neighbour: "Attributes") -> "Attributes":
        """Attributes of the tuple (M1, M2), two modules that see the same input."""
        m1, mu1, a1, b1, g1 = self
        m2, mu2, a2, b2, g2 = neighbour
        p1 = _share(m1, m1 + m2)
        p2 = _share(m2, m1 + m2)
        return Attributes(
            mass=m1 + m2,
            sensitivity=mu1 + mu2,
            alpha=p1**2 * a1 + p2**2 * a2,
            beta=p1 * b1 + p2 * b2,
            gamma=g1 + g2,
        )


def _share(mass: float, total: float) -> float:
    """The share of the mass; what has none is frozen, and its share is 0."""
    return mass / total if total else 0.0


def chain(attributes: Iterable[Attributes]) -> Attributes:
    """Attributes of modules applied one after the other, in that order."""
    return reduce(lambda inner, outer: outer.after(inner), attributes)


@dataclass(frozen=True)
class Term:
    """One weight's part in the modular norm, which is the largest of (M / mass) * sensitivity * |w|
    of all."""

    name: str
    mass: float
    sensitivity: float  #: the product of those of all that comes after the weight
    atom: "Atom"


class Update(NamedTuple):
    """What an update changes one weight by, or its gradient."""

    term: Term
    length: float  #: the weight's norm in an update of modular norm 1, see `Module.lengths`
    tensor: Tensor


class Module(nn.Module):
    """An ordinary nn.Module that also knows its modular norm. What is not an atom or a bond is an
    expression of those.

    `M2 @ M1` applies M1 first; `(M1, M2)`, where a module is expected, gives both the same input;
    `M1 + M2` adds what they give; `a * M` scales it; `M ** L` applies L independent copies of M,
    each with weights drawn anew.

    Raises:
        ValueError: widths that do not fit, where they are known; a factor of zero; a negative
            power; an expression in which a weight appears twice: its mass would count twice.
        TypeError: something in the expression that is no module of the algebra.

    >>> from structlin.modular import Linear, ReLU
    >>> net = Linear(256, 10) @ ReLU() @ Linear(784, 256)
    >>> net.mass, round(net.sensitivity, 3), net(torch.randn(32, 784)).shape
    (2.0, 0.707, torch.Size([32, 10]))
    >>> net(torch.randn(32, 784)).square().mean().backward()
    >>> net.descend_(0.1)  # W <- W - 0.1 * net.dualize()
    """

    @property
    def attributes(self) -> Attributes:
        raise NotImplementedError

    @property
    def mass(self) -> float:
        """Its share of a network's learning, relative to the masses of the others."""
        return self.attributes.mass

    @property
    def sensitivity(self) -> float:
        """|f(x + dx) - f(x)| <= sensitivity * |dx|, for weights of norm at most 1."""
        return self.attributes.sensitivity

    @property
    def sharpness(self) -> Sharpness:
        return Sharpness(*self.attributes[2:])

    @property
    def parts(self) -> dict[str, "Module"]:
        return {
            name: module for name, module in self._modules.items() if isinstance(module, Module)
        }

    def terms(self) -> list[Term]:
        """Every weight with its mass and what comes after it, in the order of
        `named_parameters`."""
        terms = []
        for name, module in self.parts.items():
            terms += [replace(term, name=f"{name}.{term.name}") for term in module.terms()]
        return terms

    def lengths(self) -> dict[str, float]:
        """The norm that each weight's part has in an update of modular norm 1: mass / (M * later
        sensitivities).

        Raises:
            ValueError: two weights are the same parameter: they were tied after they were composed.
        """
        check_weights_once(self)
        total = self.mass
        if not total:
            return {term.name: 0.0 for term in self.terms()}
        return {term.name: term.mass / (total * term.sensitivity) for term in self.terms()}

    def width(self, width: Width) -> Width:
        """Width of the output for an input of that width; None where it is not known.

        Raises:
            ValueError: it takes no such input.
        """
        raise NotImplementedError

    @checked
    def tare(self: Self, mass: float = 1.0) -> Self:
        """Scale the masses of all its atoms so that it has this one, in place. Zero freezes it.

        Raises:
            ValueError: a negative mass; a module without any, whose mass can not be scaled.
        """
        if not self.mass:
            raise ValueError(
                f"tare({mass}): {type(self).__name__} has mass 0, which no factor changes"
            )
        factor = mass / self.mass
        for module in self.modules():
            if isinstance(module, Atom):
                module._mass *= factor
        return self

    def reset_parameters(self) -> None:
        """Draw all weights anew, each of norm 1."""
        for module in self.parts.values():
            module.reset_parameters()

    @checked
    def norm(self, update: Weights) -> Tensor:
        """The modular norm of an update `{name: tensor}`, a 0-D tensor: the largest |w| / length of
        its weights.

        What is left out counts as zero. Hence for M2 o M1 max(mu2 (M/m1) |w1|, (M/m2) |w2|), and
        for a tuple max((M/m1) |w1|, (M/m2) |w2|). A weight of mass zero is frozen: its term is 0.
        """
        norms = []
        for term, length, tensor in self._updates(update):
            if length:
                norms.append(term.atom.weight_norm(tensor) / length)
        return torch.stack(norms).amax() if norms else torch.zeros(())

    @checked
    @torch.no_grad()
    def dualize(
        self, gradients: Weights | None = None, *, target: float = 1.0, method: str = "ns"
    ) -> dict[str, Tensor]:
        """Return, of all updates of modular norm `target`, the one with the largest inner product
        with `gradients`.

        Args:
            gradients: `{name: tensor}`; None: those of the parameters, where they have one. Zero
                maps to zero.
            method: of the polar factor, see `structlin.polar_factor`.

        Returns:
            What to subtract, by name, for the weights that have a gradient.

        Raises:
            ValueError: no gradient at all; a name that is no weight of the module, or a tensor of
                another shape.
        Source: MD, proposition 1 and section 4.3.
        """
        gradients = self._gradients() if gradients is None else gradients
        return {
            term.name: target * length * term.atom.weight_dual(gradient, method)
            for term, length, gradient in self._updates(gradients)
        }

    @checked
    @torch.no_grad()
    def dual_norm(self, gradients: Weights | None = None) -> Tensor:
        """The largest inner product of `gradients` with an update of modular norm 1, a 0-D tensor:
        what `dualize()` has.

        Where the loss is below `<g, w> + sharpness |w|^2 / 2`, as proposition 5 of MN has it, the
        update w that decreases this most is -(dual_norm / sharpness) times `dualize()`.

        Args:
            gradients: `{name: tensor}`; None: those of the parameters, where they have one.

        Raises:
            ValueError: no gradient at all; a name that is no weight of the module, or a tensor of
                another shape.
        Source: MD, definition 1 and proposition 1.

        >>> from structlin.modular import Linear
        >>> net, x, y = Linear(8, 4), torch.ones(1, 8), torch.randn(1, 4)
        >>> (net(x) - y).square().mean().div(2).backward()  # of sharpness 1: MN, section C.4
        >>> net.descend_(net.dual_norm() / 1)
        >>> bool((net(x) - y).abs().max() < 1e-3)
        True
        """
        gradients = self._gradients() if gradients is None else gradients
        steps = self.dualize(gradients, method="svd")
        products = []
        for name, step in steps.items():
            products.append((promote(gradients[name]) * promote(step)).sum())
        return torch.stack(products).sum() if products else torch.zeros(())

    def _gradients(self) -> dict[str, Tensor]:
        gradients = {}
        for term in self.terms():
            gradient = self.get_parameter(term.name).grad
            if gradient is not None:
                gradients[term.name] = gradient
        if not gradients:
            raise ValueError(
                f"no weight of {type(self).__name__} has a gradient: call backward() first"
            )
        return gradients

    @checked
    @torch.no_grad()
    def descend_(self, lr: Rate, update: Weights | None = None) -> None:
        """W <- W - lr * update, by default `dualize()`: a step of modular norm `lr`.

        Raises:
            ValueError: `lr` is negative or not finite; a name that is no weight of the module, or a
                tensor of another shape. Nothing has changed.
        """
        update = self.dualize() if update is None else update
        for term, _, step in self._updates(update):
            self.get_parameter(term.name).sub_(lr * step)

    def _updates(self, update: Weights) -> list[Update]:
        """The weights in `update`, in the order of `terms`."""
        lengths = self.lengths()
        for name, tensor in update.items():
            if name not in lengths:
                raise ValueError(
                    f"{name!r} is no weight of {type(self).__name__}; "
                    f"there are {', '.join(lengths)}"
                )
            shape = tuple(self.get_parameter(name).shape)
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(tensor.shape)}; the weight has {shape}"
                )
        return [
            Update(term, lengths[term.name], update[term.name])
            for term in self.terms()
            if term.name in update
        ]

    def __matmul__(self, inner: "Module | tuple[Any, ...]") -> "Composite":
        return Composite(*_list_factors(inner), *_list_factors(self))

    def __rmatmul__(self, outer: "Module | tuple[Any, ...]") -> "Composite":
        return Composite(*_list_factors(self), *_list_factors(outer))

    def __add__(self, summand: "Module | tuple[Any, ...]") -> "Composite":
        return Add() @ Tuple(self, as_module(summand))

    def __mul__(self, factor: float) -> "Composite":
        return Scale(factor) @ self

    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> "Module":
        return Power(self, exponent)


class Bond(Module):
    """A module without weights: its class says its sensitivity, and how sharp it is in its
    input.

    >>> class Half(Bond):
    ...     own_sensitivity = 0.5
    ...     def forward(self, x):
    ...         return 0.5 * x
    >>> (Half() @ Half()).sensitivity
    0.25
    """

    own_sensitivity: float = 1.0
    gamma: float = 0.0
    keeps_width: bool = True  #: whether the output has as many features; else nobody knows

    @property
    def attributes(self) -> Attributes:
        return Attributes(sensitivity=self.own_sensitivity, gamma=self.gamma)

    def width(self, width: Width) -> Width:
        features = single(self, width)
        return features if self.keeps_width else None


class Atom(Module):
    """A module with weights of its own, held in an ordinary layer, with a norm and a duality map
    for them.

    Linear in its weights and in its input, and well-normed: (0, 1, 0)-sharp.
    """

    @checked
    def __init__(self, mass: float) -> None:
        super().__init__()
        self._mass = float(mass)

    @property
    def attributes(self) -> Attributes:
        return Attributes(self._mass, 1.0, beta=1.0)

    def terms(self) -> list[Term]:
        return [Term(name, self._mass, 1.0, self) for name, _ in self.named_parameters()]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in self.parameters():
            weight.copy_(self.weight_dual(torch.randn_like(promote(weight)), "svd"))

    def weight_norm(self, weight: Tensor) -> Tensor:
        """The norm of a weight, 0-D."""
        raise NotImplementedError

    def weight_dual(self, gradient: Tensor, method: str) -> Tensor:
        """The weight of norm 1 that has the largest inner product with `gradient`; zero for
        zero."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"mass={self._mass:.6g}"


@checked
def masses(model: Module) -> dict[str, Any]:
    """The `masses` of `optim.Muon` or `optim.Normed`: layer name -> length of its step at lr = 1; a
    tuple, of each of its cores. That is mass / (M * later sensitivities).

    Without momentum `Muon(net, masses=masses(net), matrices="all")` then makes the steps of
    `net.dualize()`, and `Normed` those of MN's algorithm 1.

    Raises:
        ValueError: a trainable weight with mass zero.
    Source: MN, section 3.

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
    masses_of_layers: dict[str, Any] = {}
    for layer, cores in lengths.items():
        masses_of_layers[layer] = cores[0] if len(cores) == 1 else tuple(cores)
    return masses_of_layers


class Composite(Module):
    """`parts`, applied from the first to the last; those that are given names keep them and stay
    one part of `@`.

    >>> from structlin.modular import Linear
    >>> [name for name, _ in Composite(up=Linear(4, 8), down=Linear(8, 2)).named_parameters()]
    ['up.linear.weight', 'down.linear.weight']
    """

    def __init__(self, *parts: Module, **named: Module) -> None:
        super().__init__()
        numbered = {str(n): module for n, module in enumerate(parts)}
        for name, module in (numbered | named).items():
            self.add_module(name, as_module(module))
        check_weights_once(self)
        self.width(None)

    @property
    def attributes(self) -> Attributes:
        return chain(module.attributes for module in self.parts.values())

    def terms(self) -> list[Term]:
        terms: list[Term] = []
        later_sensitivity = 1.0  # the product over the modules after this one
        for name, module in reversed(self.parts.items()):
            earlier_terms = []
            for term in module.terms():
                sensitivity = term.sensitivity * later_sensitivity
                earlier_terms.append(
                    replace(term, name=f"{name}.{term.name}", sensitivity=sensitivity)
                )
            terms = earlier_terms + terms
            later_sensitivity *= module.sensitivity
        return terms

    def width(self, width: Width) -> Width:
        for module in self.parts.values():
            width = module.width(width)
        return width

    def forward(self, x: Any) -> Any:
        for module in self._modules.values():
            x = module(x)  # type: ignore[misc]
        return x


class Power(Composite):
    """`exponent` independent copies of a module, one after the other, their weights drawn anew;
    none: the identity."""

    def __init__(self, module: Module, exponent: int) -> None:
        require_integer("M ** n: n", exponent, Range(0, MOST_COPIES))
        copies = [copy.deepcopy(module) for _ in range(exponent)]
        for module_copy in copies:
            module_copy.reset_parameters()
        super().__init__(*copies or [Identity()])


class Tuple(Module):
    """Modules that see the same input; the output is the tuple of theirs, its norm the sum of their
    norms."""

    def __init__(self, *parts: "Module | tuple[Any, ...]") -> None:
        super().__init__()
        if not parts:
            raise ValueError("a tuple () of no modules: it needs at least one")
        for n, module in enumerate(parts):
            self.add_module(str(n), as_module(module))
        check_weights_once(self)
        self.width(None)

    @property
    def attributes(self) -> Attributes:
        return reduce(Attributes.beside, (module.attributes for module in self.parts.values()))

    def width(self, width: Width) -> Width:
        return tuple(module.width(width) for module in self.parts.values())

    def forward(self, x: Any) -> tuple[Any, ...]:
        return tuple(module(x) for module in self._modules.values())  # type: ignore[misc]


class Identity(Bond):
    """x -> x.

    >>> Identity().sensitivity
    1.0
    """

    def width(self, width: Width) -> Width:
        return width

    def forward(self, x: Any) -> Any:
        return x


class Add(Bond):
    """(x, y, ...) -> x + y + ...: of sensitivity 1, since the norm of a tuple is a sum."""

    def width(self, width: Width) -> Width:
        if width is not None and not isinstance(width, tuple):
            raise ValueError(
                f"Add takes a tuple of inputs, but it is given one of {width} features"
            )
        widths = [features for features in width or () if features is not None]
        if not widths:
            return None
        if any(features != widths[0] for features in widths):
            raise ValueError(
                f"M1 + M2: they give {' and '.join(map(str, widths))} features, "
                "which can not be added"
            )
        return widths[0]

    def forward(self, xs: tuple[Tensor, ...]) -> Tensor:
        return sum(xs[1:], start=xs[0])


class Scale(Bond):
    """x -> factor * x, of sensitivity |factor|."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TypeError(f"a * M: a={show(factor)} must be a number")
        if factor == 0 or not abs(factor) < inf:
            raise ValueError(
                f"a * M: a={factor!r} must be finite and not 0: the norm divides by sensitivities"
            )
        self.factor = float(factor)
        self.own_sensitivity = abs(self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    def extra_repr(self) -> str:
        return f"{self.factor:.6g}"


def as_module(value: Any) -> Module:
    """A module of the algebra, or the tuple of such; raises TypeError if it is neither."""
    if isinstance(value, tuple):
        return Tuple(*value)
    if not isinstance(value, Module):
        kind = type(value).__name__
        hint = f": there may be a modular.{kind}" if isinstance(value, nn.Module) else ""
        raise TypeError(f"{show(value)} is no module of structlin.modular{hint}")
    return value


def single(module: Module, width: Width) -> int | None:
    """`width`, of one input; raises ValueError if it is that of a tuple."""
    if isinstance(width, tuple):
        raise ValueError(
            f"{type(module).__name__} takes one input, but it is given a tuple of {len(width)}"
        )
    return width


def check_weights_once(module: Module) -> None:
    """Raises ValueError if a weight appears twice in the expression."""
    seen: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in seen:
            raise ValueError(
                f"{seen[parameter]!r} and {name!r} are the same weight, whose mass would count "
                "twice: use each module once in an expression (copy.deepcopy(M), or M ** 2, "
                "has weights of its own)"
            )
        seen[parameter] = name


def _list_factors(value: "Module | tuple[Any, ...]") -> list[Module]:
    """The modules that `@` has composed: A @ B @ C has three, however it is bracketed."""
    module = as_module(value)
    if type(module) is Composite and "0" in module.parts:
        return list(module.parts.values())
    return [module]
