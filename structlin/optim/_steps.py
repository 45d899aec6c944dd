"""What the optimizers share: what parameters are, how long a step is, when none is made."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import inf, sqrt

import torch
from torch import Tensor, nn

from .._linear import StructuredLinear
from .._model.parameters import ParameterInfo, Weight, parameters_of
from .._model.select import suggest_names
from ._sharding import agree, local_part

Masses = Mapping[str, float | tuple[float, ...]]
SCALES = ("rms", "original", "match_rms_adamw")
NONFINITE = ("raise", "skip", "ignore")


class Roster:
    """The parameters of a model: what each of them is, its name, and its mass."""

    def __init__(
        self, model: nn.Module, masses: Masses | None, split: Mapping[str, int] | None = None
    ) -> None:
        self.model, self.masses, self.split = model, masses, split
        self.names = dict[Tensor, str]()  # also of parameters that the model has lost since
        self.read()

    def read(self) -> None:
        """Read the model, which may have grown since.

        Raises:
            ValueError: `masses` or `split` that do not fit, see `share_masses` and `divide_layers`.
        """
        infos = list(parameters_of(self.model))
        self.shares = share_masses(infos, self.masses or {})
        self.weights = divide_layers(infos, self.split or {})
        self.undecayed = {info.parameter for info in infos if not info.decays}
        self.names.update((info.parameter, info.name) for info in infos)

    def require_owned(self, params: Iterable[Tensor]) -> None:
        """Raises ValueError if one of `params` belongs to no module of the model."""
        for parameter in params:
            if parameter not in self.weights:
                shape, model = tuple(parameter.shape), type(self.model).__name__
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

    def may_step(self, params: list[Tensor], nonfinite: str) -> bool:
        """Whether to make the step: all gradients of `params` are finite, or nobody asked.

        Raises:
            FloatingPointError: they are not, and `nonfinite` is "raise".
        """
        if nonfinite == "ignore" or not params:
            return True
        gradients = [_gradient_values(p) for p in params]
        norms = torch._foreach_norm(gradients)
        # One number for all, and one wait for the device. A norm may overflow where no entry does.
        total = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).sum()
        bad = list[int]()
        if not bool(total.isfinite()):
            bad = [n for n, values in enumerate(gradients) if not bool(values.isfinite().all())]
        if nonfinite == "skip":
            return agree(not bad, params)
        if bad:
            names = ", ".join(self.names[params[n]] for n in bad[:5])
            raise FloatingPointError(f"gradients of {names} are not finite; nothing was changed")
        return True

    def step_length(self, parameter: Tensor, adjust_lr_fn: str = "rms") -> float:
        """Factor of the polar factor in a step at lr = 1."""
        return self.shares[parameter] * _scale(self.weights[parameter], adjust_lr_fn)


def share_masses(infos: Iterable[ParameterInfo], masses: Masses) -> dict[Tensor, float]:
    """Each parameter's mass: the length of its step, before `adjust_lr_fn`.

    A matrix or embedding has the mass of its layer, or 1; the cores of a structured layer share it
    equally, or as a tuple says; so do the positions of a convolution's kernel. All the rest has 1.

    Raises:
        ValueError: a pattern that matches no layer, a mass that is not positive and finite, a tuple
            that does not fit the layer.
    """
    found: dict[Tensor, float] = {}
    by_layer: dict[str, float | tuple[float, ...]] = {}
    unused = set(masses)
    for info in infos:
        if info.layer not in by_layer:
            matching = [pattern for pattern in masses if fnmatchcase(info.layer, pattern)]
            unused.difference_update(matching)
            by_layer[info.layer] = masses[matching[0]] if matching else 1.0
            _require_mass(info, by_layer[info.layer])
        found[info.parameter] = _share(info, by_layer[info.layer])
    if unused:
        pattern = sorted(unused)[0]
        hint = suggest_names(pattern, [*by_layer])
        raise ValueError(f"masses: {pattern!r} matches no layer{hint}")
    return found


def divide_layers(infos: list[ParameterInfo], split: Mapping[str, int]) -> dict[Tensor, Weight]:
    """What each parameter is, where `split` (glob over layer names -> number) has been applied.

    Raises:
        ValueError: a pattern that matches no matrix, one of a structured layer or a convolution, or
            a number that does not divide what the layer makes.
    """
    weights: dict[Tensor, Weight] = {info.parameter: info.weight for info in infos}
    for pattern, number in split.items():
        found = [
            info
            for info in infos
            if info.weight.kind == "matrix" and fnmatchcase(info.layer, pattern)
        ]
        if not found:
            hint = suggest_names(pattern, [i.layer for i in infos if i.weight.kind == "matrix"])
            raise ValueError(f"split: {pattern!r} matches no layer with a matrix{hint}")
        for info in found:
            weight, layer = info.weight, info.layer
            if weight.core is not None or weight.kernel > 1:
                raise ValueError(
                    f"split: {layer!r} is a {type(info.owner).__name__}, whose blocks or kernel "
                    "positions are apart already; parts are of nn.Linear, Conv1D, "
                    "MultiheadAttention"
                )
            rows = weight.groups * weight.fan_out
            if number < 1 or rows % number or number % weight.groups:
                raise ValueError(
                    f"split: {layer!r} makes {rows} features in {weight.groups} groups, which do "
                    f"not divide into {number!r} parts"
                )
            weights[info.parameter] = replace(
                weight, fan_out=rows // number, parts=number // weight.groups
            )
    return weights


def _share(info: ParameterInfo, mass: float | tuple[float, ...]) -> float:
    if info.weight.kind not in ("matrix", "embedding"):
        return 1.0
    if isinstance(mass, tuple):
        return mass[info.weight.core or 0]
    cores = len(info.owner.structure.cores) if isinstance(info.owner, StructuredLinear) else 1
    return mass / cores / info.weight.kernel


def _require_mass(info: ParameterInfo, mass: float | tuple[float, ...]) -> None:
    layer, owner = info.layer, info.owner
    values = mass if isinstance(mass, tuple) else (mass,)
    if isinstance(mass, tuple) and not isinstance(owner, StructuredLinear):
        raise ValueError(f"masses: {layer!r} is no structured layer, it has one mass, not {mass!r}")
    if isinstance(mass, tuple) and isinstance(owner, StructuredLinear):
        cores = len(owner.structure.cores)
        if len(mass) != cores:
            raise ValueError(
                f"masses: {layer!r} has {cores} cores, {mass!r} has {len(mass)} masses"
            )
    if not all(0 < value < inf for value in values):
        raise ValueError(
            f"masses: {layer!r} has {mass!r}; masses are positive and finite (freeze a layer with "
            "requires_grad_(False))"
        )


def _scale(weight: Weight, adjust_lr_fn: str) -> float:
    m, n = weight.fan_out, max(weight.fan_in, 1)
    if weight.kind != "matrix":
        return 1.0
    if adjust_lr_fn == "original":
        return sqrt(max(1, m / n))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * sqrt(max(m, n))
    return sqrt(m / n)


def _gradient_values(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient._values() if gradient.is_sparse else local_part(gradient)
