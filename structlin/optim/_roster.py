"""The roster of a model: what its parameters are, their masses, whether they may step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, sqrt

import torch
from torch import Tensor, nn

from .._layer.experts import StructuredExperts
from .._layer.linear import StructuredLinear
from .._layer.quantized import QuantizedLinear
from .._model.kinds import PROTECTED, role_of, widths
from .._model.linears import find_declared_heads
from .._model.parameters import (
    ParameterInfo,
    Weight,
    is_undeclared,
    named_modules,
    parameters_of,
)
from .._model.select import suggest_names
from .._structure.arguments import warn
from .._tables import hide_numbers
from .._torch import foreach_norm
from ._sharding import find_misplaced

Masses = Mapping[str, float | tuple[float, ...]]
SCALES = ("rms", "original", "match_rms_adamw")
NONFINITE = ("raise", "ignore")
WIDE = 8  # features from which on a side is no count of classes or experts


class Roster:
    """The parameters of a model: what each of them is, its name, and its mass."""

    def __init__(self, model: nn.Module, masses: Masses | None) -> None:
        self.model = model
        self.masses = masses
        # also of parameters that the model has lost since
        self.names = dict[Tensor, str]()
        self.layers = dict[Tensor, str]()
        self.read()

    def read(self) -> None:
        """Read the model, which may have grown since. Raises what `share_masses` raises."""
        infos = list(parameters_of(self.model))
        self.shares = share_masses(infos, self.masses or {})
        self.weights: dict[Tensor, Weight] = {info.parameter: info.weight for info in infos}
        self.names.update((info.parameter, info.name) for info in infos)
        self.layers.update((info.parameter, info.layer) for info in infos)

    def require_owned(self, params: Iterable[Tensor]) -> None:
        """Raises ValueError if one of `params` belongs to no module of the model."""
        for parameter in params:
            if parameter not in self.weights:
                shape = tuple(parameter.shape)
                model = type(self.model).__name__
                raise ValueError(f"a parameter of shape {shape} belongs to no module of {model}")

    def require_current(self, groups: Iterable[Mapping[str, list[Tensor]]]) -> None:
        """Raises RuntimeError if the model has lost a parameter since: `convert` replaced it."""
        modules = self.model.modules()
        current = {id(p) for module in modules for p in module._parameters.values()}
        params = (parameter for group in groups for parameter in group["params"])
        gone = [self.names[parameter] for parameter in params if id(parameter) not in current]
        if gone:
            raise RuntimeError(
                f"{', '.join(sorted(gone)[:5])} no longer belong to the model, which was converted "
                "(or sharded) after this optimizer was made: convert first, then make the optimizer"
            )

    def require_placed(self, params: Iterable[Tensor]) -> None:
        """Raises RuntimeError, on every process, if a gradient is placed so that a process cannot
        have its part of it."""
        for parameter in params:
            reason = find_misplaced(parameter)
            if reason:
                name = self.names[parameter]
                raise RuntimeError(f"{name} {reason}; nothing was changed")

    def require_finite(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        """Raises FloatingPointError if one of `gradients`, those of `params`, is not finite."""
        if not params:
            return
        norms = foreach_norm(gradients)
        # One number for all, and one wait for the device. A norm may overflow where no entry does.
        total = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).sum()
        if bool(total.isfinite()):
            return
        pairs = zip(params, gradients, strict=True)
        bad = [self.names[p] for p, values in pairs if not bool(values.isfinite().all())]
        if bad:
            names = ", ".join(bad[:5])
            raise FloatingPointError(f"gradients of {names} are not finite; nothing was changed")

    def step_length(self, parameter: Tensor, adjust_lr_fn: str = "rms") -> float:
        """Factor of the polar factor in a step at lr = 1."""
        return self.shares[parameter] * _scale(self.weights[parameter], adjust_lr_fn)


def warn_of_int8(model: nn.Module) -> None:
    """Warn of layers that look as if they trained."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            names.append(name or "the model")
    if names:
        shown = ", ".join(names[:5])
        warn(f"int8 layers do not train, their biases may: {shown}; quantize at the end")


def share_masses(infos: Iterable[ParameterInfo], masses: Masses) -> dict[Tensor, float]:
    """Each parameter's mass: the length of its step, before `adjust_lr_fn`.

    A matrix or embedding has the mass of its layer, or 1; the cores of a structured layer share it
    equally, or as a tuple says; so do the positions of a convolution's kernel. All the rest has 1.
    Raises ValueError for a pattern that matches no layer, and a mass that does not fit it."""
    parameter_masses: dict[Tensor, float] = {}
    masses_of_cores: dict[str, tuple[float, ...]] = {}  # by layer
    unused = set(masses)
    for info in infos:
        if info.layer not in masses_of_cores:
            matching = [pattern for pattern in masses if fnmatchcase(info.layer, pattern)]
            unused.difference_update(matching)
            mass_of_layer = masses[matching[0]] if matching else 1.0
            masses_of_cores[info.layer] = _share(info, mass_of_layer)
        weight = info.weight
        mass = 1.0
        if weight.kind in ("matrix", "embedding"):
            core = weight.core or 0  # a dense weight is the only one of its layer
            mass = masses_of_cores[info.layer][core] / weight.positions
        parameter_masses[info.parameter] = mass
    if unused:
        pattern = sorted(unused)[0]
        hint = suggest_names(pattern, [*masses_of_cores])
        raise ValueError(f"masses: {pattern!r} matches no layer{hint}")
    return parameter_masses


def find_hidden(model: nn.Module, infos: Iterable[ParameterInfo]) -> set[Tensor]:
    """The matrices of layers that are neither head nor embedding nor router, as the model itself or
    a layer's name tells."""
    heads = find_declared_heads(model)
    return {
        info.parameter
        for info in infos
        if info.weight.kind == "matrix"
        and role_of(info.layer) not in PROTECTED
        and info.owner not in heads
    }


def find_undeclared(infos: Iterable[ParameterInfo]) -> str:
    """The trainable experts whose layout nobody knows, and what would declare the first of them;
    empty if there are none."""
    undeclared = [info for info in infos if info.parameter.requires_grad and is_undeclared(info)]
    if not undeclared:
        return ""
    names: list[str] = []
    for info in undeclared:
        name = f"{hide_numbers(info.name)} {tuple(info.parameter.shape)}"
        if name not in names:
            names.append(name)
    remainder = f" and {len(names) - 5} more" if len(names) > 5 else ""
    kind = type(undeclared[0].owner).__name__
    attribute = undeclared[0].name.rpartition(".")[2]
    return (
        f"{', '.join(names[:5])}{remainder} by AdamW, because nothing says how experts lie in "
        f"them: structlin.optim.declare_weights({kind}, {attribute}='e m n') or another text "
        "before this optimizer lets each expert step as a matrix"
    )


@dataclass(frozen=True)
class _Linear:
    """A linear layer of a model."""

    name: str
    in_features: int
    out_features: int
    is_declared_head: bool

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def named_part(self) -> str:
        """The outermost module whose name makes this layer a head, an embedding or a router."""
        parts = self.name.split(".")
        prefixes = (".".join(parts[: n + 1]) for n in range(len(parts)))
        return next((prefix for prefix in prefixes if role_of(prefix) in PROTECTED), "")


def find_misnamed(model: nn.Module) -> list[str]:
    """The linear layers whose name alone keeps them from the hidden matrices, though their place in
    the model is a hidden layer's: both sides are wide, and

    - the name of a head, but a later layer takes in as many features as this one gives out;
    - the name of a router, but it is the gate of a gated unit: under the same module stand a layer
      of the same widths and one that takes in as many features as it gives out;
    - a name below that of an embedding, which holds at least half of all linear layers' weights.

    What the model declares to be its head is one, with all that stands beside it there.
    """
    heads = find_declared_heads(model)
    layers = []
    for name, module in named_modules(model):
        sizes = widths(module)
        if sizes is not None:
            layers.append(_Linear(name, *sizes, module in heads))
    declared = {layer.named_part for layer in layers if layer.is_declared_head}
    evidence = {"head": _feeds_a_later_one, "router": _gates, "embedding": _is_in_a_whole_model}
    misnamed = []
    for layer in layers:
        role = role_of(layer.name)
        is_wide = min(layer.in_features, layer.out_features) >= WIDE
        is_candidate = is_wide and role in PROTECTED and layer.named_part not in declared
        if is_candidate and evidence[role](layer, layers):
            misnamed.append(layer.name)
    return misnamed


def _feeds_a_later_one(layer: _Linear, layers: list[_Linear]) -> bool:
    later = layers[layers.index(layer) + 1 :]
    return any(later_layer.in_features == layer.out_features for later_layer in later)


def _gates(layer: _Linear, layers: list[_Linear]) -> bool:
    at_parent = [candidate for candidate in layers if candidate.parent == layer.parent]
    siblings = [candidate for candidate in at_parent if candidate != layer]
    sizes = [(sibling.in_features, sibling.out_features) for sibling in siblings]
    takes_in = any(sibling.in_features == layer.out_features for sibling in siblings)
    return takes_in and (layer.in_features, layer.out_features) in sizes


def _is_in_a_whole_model(layer: _Linear, layers: list[_Linear]) -> bool:
    if role_of(layer.name.rpartition(".")[2]) == "embedding":
        return False
    numbers_inside = 0
    all_numbers = 0
    for linear in layers:
        numbers = linear.in_features * linear.out_features
        all_numbers += numbers
        if linear.name.startswith(f"{layer.named_part}."):
            numbers_inside += numbers
    return 2 * numbers_inside >= all_numbers


def _share(info: ParameterInfo, mass: float | tuple[float, ...]) -> tuple[float, ...]:
    """The mass of each core of a layer, or of its one matrix."""
    cores: int | None = None
    reason = "is no structured layer, it has one mass"
    if isinstance(info.owner, StructuredLinear | StructuredExperts):
        cores = len(info.owner.structure.cores)
        reason = f"has {cores} cores"
    if isinstance(mass, tuple):
        if len(mass) != cores:
            raise ValueError(f"masses: {info.layer!r} {reason}, not {mass!r}")
        shares = mass
    else:
        matrices = cores or 1
        shares = (mass / matrices,) * matrices
    if not all(0 < share < inf for share in shares):
        advice = "masses are positive and finite (requires_grad_(False) freezes a layer)"
        raise ValueError(f"masses: {info.layer!r} has {mass!r}; {advice}")
    return shares


def _scale(weight: Weight, adjust_lr_fn: str) -> float:
    if weight.kind != "matrix":
        return 1.0
    m = weight.fan_out
    n = max(weight.fan_in, 1)
    scales = (sqrt(m / n), sqrt(max(1, m / n)), 0.2 * sqrt(max(m, n)))
    return scales[SCALES.index(adjust_lr_fn)]
