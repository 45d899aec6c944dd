"""How rate, decay and eps of each parameter go with width, structure and depth.

Sources: Yang et al. 2022 (arXiv:2203.03466), table 8; Qiu et al. 2024 (arXiv:2406.06248), section
3.2; Dey et al. 2025 (arXiv:2505.01618), table 1 and equation 40.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import nn

from .._layer.experts import StructuredExperts
from .._layer.linear import StructuredLinear
from .._model.parameters import (
    ParameterInfo,
    Weight,
    join,
    named_modules,
    parameters_of,
    weights_of,
)
from .._structure.arguments import require_choice
from .._structure.structure import Core
from ..scaling import lr_mult
from ._depth import Depth

Base = nn.Module | Mapping[int, int] | None
Size = TypeVar("Size")
DECAYS = ("1/width", "constant")  # what rate times decay does over widths


class _Widths(NamedTuple):
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Factors:
    """Factors of one parameter, relative to a dense one at the base width and depth."""

    width: float  #: of the rate, by width and structure
    depth: float  #: of the rate, by depth
    decay: float  #: of the weight decay, where a step decays by rate * decay

    @property
    def lr(self) -> float:
        return self.width * self.depth


class Transfer:
    """The factors of every parameter of a model, whose rate was tuned in another.

    Raises ValueError for widths of `base` that no parameter has, and what `Depth` raises; `of` for
    a parameter that `base` lacks.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Base,
        *,
        optimizer: str = "adam",
        structure_aware: bool = True,
        weight_decay_scaling: str = "1/width",
        depth: Depth | None = None,
    ) -> None:
        require_choice("weight_decay_scaling", weight_decay_scaling, DECAYS)
        _check_base(base, list(parameters_of(model)))
        self.optimizer = optimizer
        self.structure_aware = structure_aware
        self.decay_falls = weight_decay_scaling == "1/width"
        self.base_widths = base if isinstance(base, Mapping) else {}
        self._read_depth(model, depth)
        self.base_layers: dict[str, _Widths] | None = None
        self.base_sizes: dict[str, int] = {}  # of the last dimension of vectors and embeddings
        if isinstance(base, nn.Module):
            self._read_base(base, depth)

    def of(self, info: ParameterInfo) -> Factors:
        width = self._width(info)
        depth = self.rate_inside if info.name in self.inside else 1.0
        decay = 1.0 if self.decay_falls else width**-1.0
        storage = self._storage_factor(info)
        return Factors(width=width, depth=depth * storage, decay=decay / storage)

    def eps_mult(self, info: ParameterInfo) -> float:
        """Factor of Adam's eps, which follows the gradient's size.

        A change of the loss of order 1 is spread over the numbers that a core makes, batch * repeat
        * fan_out for each token, and an entry of the core meets `repeat` of them: its gradient is
        of order 1 / (batch * fan_out), that of a dense weight 1 / out_features (equation 40).
        """
        if info.weight.kind == "matrix":
            widths = _widths(info.owner, info.weight)
            base = self._base_widths(info, widths)
            factor = _ratio(base.out_features, widths.out_features)
            if info.weight.core is not None and self.structure_aware:
                core, _ = _core(info)
                factor *= widths.out_features / (core.batch * core.fan_out)
        else:
            factor = 1 / self._growth(info)
        inside = self.multiplier if info.name in self.inside else 1.0
        return factor * inside / self._storage_factor(info)

    def _storage_factor(self, info: ParameterInfo) -> float:
        """Factor of the rate of a parameter that is stored `multiplier` times as large."""
        if info.name not in self.ends:
            return 1.0
        return self.multiplier ** (2 if self.optimizer == "sgd" else 1)

    def _read_depth(self, model: nn.Module, depth: Depth | None) -> None:
        self.inside: Mapping[str, str] = {}  # parameter name -> its block
        self.ends: Collection[str] = ()
        if depth is None:
            return
        self.inside = depth.find_blocks(model)
        self.ends = depth.find_ends(model)
        self.multiplier = depth.multiplier(model)
        exponent = 2 * depth.alpha - 1 if self.optimizer == "sgd" else depth.alpha - 1
        self.rate_inside = depth.ratio(model) ** exponent

    def _read_base(self, base: nn.Module, depth: Depth | None) -> None:
        self.base_layers = {}
        for name, module in named_modules(base):
            for attribute, weight in weights_of(module).items():
                if weight.kind == "matrix":
                    dense = join(name, "weight" if weight.core is not None else attribute)
                    self.base_layers[dense] = _widths(module, weight)
            for attribute, parameter in module.named_parameters(recurse=False):
                size = parameter.shape[-1] if parameter.ndim else 1
                self.base_sizes[join(name, attribute)] = size
        if depth is not None:  # the base has fewer blocks: a layer is any block's
            blocks = set(depth.find_blocks(base).values())
            for name in list(self.base_layers):
                self.base_layers.setdefault(_in_any(blocks, name), self.base_layers[name])
            for name in list(self.base_sizes):
                self.base_sizes.setdefault(_in_any(blocks, name), self.base_sizes[name])

    def _find(self, table: Mapping[str, Size], info: ParameterInfo, what: str, name: str) -> Size:
        for key in (info.dense_name, _in_any(self.inside.values(), info.dense_name)):
            if key in table:
                return table[key]
        raise ValueError(f"base has no {what} {name!r}: it must be the same model at another width")

    def _width(self, info: ParameterInfo) -> float:
        sgd = self.optimizer == "sgd"
        if info.weight.kind != "matrix":
            return self._growth(info) if sgd else 1.0
        widths = _widths(info.owner, info.weight)
        base = self._base_widths(info, widths)
        factor = _ratio(base.in_features, widths.in_features)
        if sgd:
            factor *= _ratio(widths.out_features, base.out_features)
        if info.weight.core is None or not self.structure_aware:
            return factor
        core, cores = _core(info)
        return factor * lr_mult(
            core,
            widths.in_features,
            cores,
            optimizer=self.optimizer,
            out_features=widths.out_features,
        )

    def _growth(self, info: ParameterInfo) -> float:
        """Growth of the last dimension of a vector or an embedding."""
        if info.weight.kind == "gain" or info.parameter.ndim == 0:
            return 1.0
        width = info.parameter.shape[-1]
        if self.base_layers is None:
            return _ratio(width, self.base_widths.get(width, width))
        return _ratio(width, self._find(self.base_sizes, info, "parameter", info.dense_name))

    def _base_widths(self, info: ParameterInfo, widths: _Widths) -> _Widths:
        """The widths that the layer of a matrix has in the base, where it has `widths` here."""
        if self.base_layers is not None:
            return self._find(self.base_layers, info, "linear layer", info.layer)
        return _Widths(*(self.base_widths.get(width, width) for width in widths))


def _ratio(size: int, other: int) -> float:
    if size == other:  # an empty layer has no width
        return 1.0
    if min(size, other) < 1:
        raise ValueError(
            f"base: a layer has the widths {size} and {other} in the two models; both must be at "
            "least 1"
        )
    return size / other


def _core(info: ParameterInfo) -> tuple[Core, int]:
    assert isinstance(info.owner, StructuredLinear | StructuredExperts)
    assert info.weight.core is not None
    cores = info.owner.structure.cores
    return cores[info.weight.core], len(cores)


def _in_any(blocks: Iterable[str], name: str) -> str:
    """`name` with the number of its block left open."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return f"{block.rpartition('.')[0]}.*{name[len(block) :]}"
    return name


def _widths(owner: nn.Module, weight: Weight) -> _Widths:
    """The features that a layer reads for one that it makes, and those that it makes."""
    if isinstance(owner, StructuredLinear | StructuredExperts):
        return _Widths(owner.in_features, owner.out_features)
    return _Widths(weight.fan_in * weight.positions, weight.fan_out * weight.groups)


def _check_base(base: Base, infos: list[ParameterInfo]) -> None:
    widths = {width for info in infos for width in info.parameter.shape}
    matrices = [info for info in infos if info.weight.kind == "matrix"]
    widths.update(width for info in matrices for width in _widths(info.owner, info.weight))
    for width in base if isinstance(base, Mapping) else ():
        if width not in widths:
            raise ValueError(f"base={base!r}: no parameter of the model has the width {width}")
