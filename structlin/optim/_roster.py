"""The roster of a model: what its parameters are, their masses, whether they may step."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import inf, sqrt

import torch
from torch import Tensor, nn

from .._layer.linear import StructuredLinear
from .._model.kinds import PROTECTED, role_of
from .._model.linears import find_declared_heads
from .._model.parameters import ParameterInfo, Weight, parameters_of
from .._model.select import suggest_names
from ._sharding import find_misplaced

Masses = Mapping[str, float | tuple[float, ...]]
SCALES = ("rms", "original", "match_rms_adamw")
NONFINITE = ("raise", "ignore")


class Roster:
    """The parameters of a model: what each of them is, its name, and its mass."""

    def __init__(self, model: nn.Module, masses: Masses | None) -> None:
        self.model, self.masses = model, masses
        self.names = dict[Tensor, str]()  # also of parameters that the model has lost since
        self.read()

    def read(self) -> None:
        """Read the model, which may have grown since. Raises what `share_masses` raises."""
        infos = list(parameters_of(self.model))
        self.shares = share_masses(infos, self.masses or {})
        self.weights: dict[Tensor, Weight] = {info.parameter: info.weight for info in infos}
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
        norms = torch._foreach_norm(gradients)
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


def share_masses(infos: Iterable[ParameterInfo], masses: Masses) -> dict[Tensor, float]:
    """Each parameter's mass: the length of its step, before `adjust_lr_fn`.

    A matrix or embedding has the mass of its layer, or 1; the cores of a structured layer share it
    equally, or as a tuple says; so do the positions of a convolution's kernel. All the rest has 1.
    Raises ValueError for a pattern that matches no layer, and a mass that does not fit it."""
    found: dict[Tensor, float] = {}
    by_layer: dict[str, tuple[float, ...]] = {}
    unused = set(masses)
    for info in infos:
        if info.layer not in by_layer:
            matching = [pattern for pattern in masses if fnmatchcase(info.layer, pattern)]
            unused.difference_update(matching)
            by_layer[info.layer] = _share(info, masses[matching[0]] if matching else 1.0)
        weight, shares = info.weight, by_layer[info.layer]
        dualized = weight.kind in ("matrix", "embedding")
        found[info.parameter] = shares[weight.core or 0] / weight.kernel if dualized else 1.0
    if unused:
        pattern = sorted(unused)[0]
        hint = suggest_names(pattern, [*by_layer])
        raise ValueError(f"masses: {pattern!r} matches no layer{hint}")
    return found


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


def _share(info: ParameterInfo, mass: float | tuple[float, ...]) -> tuple[float, ...]:
    """The mass of each core of a layer, or of its one matrix."""
    structured = isinstance(info.owner, StructuredLinear)
    cores = len(info.owner.structure.cores) if isinstance(info.owner, StructuredLinear) else 1
    if isinstance(mass, tuple) and not (structured and len(mass) == cores):
        what = f"has {cores} cores" if structured else "is no structured layer, it has one mass"
        raise ValueError(f"masses: {info.layer!r} {what}, not {mass!r}")
    shares = mass if isinstance(mass, tuple) else (mass / cores,) * cores
    if not all(0 < share < inf for share in shares):
        what = "masses are positive and finite (requires_grad_(False) freezes a layer)"
        raise ValueError(f"masses: {info.layer!r} has {mass!r}; {what}")
    return shares


def _scale(weight: Weight, adjust_lr_fn: str) -> float:
    if weight.kind != "matrix":
        return 1.0
    m, n = weight.fan_out, max(weight.fan_in, 1)
    scales = (sqrt(m / n), sqrt(max(1, m / n)), 0.2 * sqrt(max(m, n)))
    return scales[SCALES.index(adjust_lr_fn)]
