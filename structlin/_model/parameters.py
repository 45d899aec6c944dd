"""What each parameter of a model is, read from the module that owns it: the only walk that asks.

`param_groups`, the optimizers, the masses, `stability` and `summary` read it, so that they agree.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .._hosts.transformers import is_conv1d
from .._layer.experts import StructuredExperts
from .._layer.linear import StructuredLinear
from .experts import Layout, layouts_of, read_sides

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _BatchNorm)


@dataclass(frozen=True)
class Weight:
    """What a tensor of a layer is, and how it lies.

    "matrix" is one or several matrices `(fan_out, fan_in)`, "embedding" vectors of `fan_out`
    entries, "gain" the factors of a structured layer's cores, "other" all the rest.

    `stored` is an einops text of the dimensions of a matrix or an embedding: m is `fan_out`, n
    `fan_in`, every other axis counts matrices or vectors.

        "m n"           nn.Linear              "n m"           transformers' Conv1D
        "g m n"         a core                 "g m"           an embedding
        "(g m) n"       q, k and v in one      "e (f m) n"     experts, gate and up in one
        "(g m) n k1"    a convolution          "(g n) m k1"    a transposed one
    """

    kind: str = "other"
    fan_out: int = 1
    fan_in: int = 1
    stored: str = "m n"
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)  #: of axes of `stored`
    core: int | None = None  #: the number of a core in its structured layer; None for the others
    matrices: str = field(init=False, compare=False, repr=False)  #: the text of `(batch, m, n)`

    def __post_init__(self) -> None:
        axes = re.findall(r"\w+", self.stored)
        batch = [axis for axis in axes if axis not in ("m", "n")]
        sides = [side for side in ("m", "n") if side in axes]
        together = f"({' '.join(batch)})" if len(batch) > 1 else "".join(batch) or "1"
        object.__setattr__(self, "matrices", " ".join([together, *sides]))

    @property
    def groups(self) -> int:
        """Of a convolution; 3 where queries, keys and values are one weight."""
        return self.sizes.get("g", 1)

    @property
    def positions(self) -> int:
        """In a convolution's kernel: each has a matrix of its own."""
        return prod(size for axis, size in self.sizes.items() if axis.startswith("k"))

    @property
    def fused(self) -> int:
        """Matrices of each expert, such as gate and up."""
        return self.sizes.get("f", 1)

    @property
    def is_in_blocks(self) -> bool:
        """Whether dimension 0 counts whole matrices, or vectors, so that its parts are whole."""
        return self.stored.split()[0] in ("g", "e")


@dataclass(frozen=True, eq=False)
class ParameterInfo:
    """One parameter of a model."""

    parameter: nn.Parameter
    name: str  #: in the model, without what wrappers (torch.compile, DDP, checkpointing) add
    dense_name: str  #: the name before `convert`: of a core that of the dense weight
    layer: str  #: name of the module that owns it
    owner: nn.Module
    weight: Weight
    decays: bool  #: whether weight decay is for it: for matrices, if nobody declares otherwise


def parameters_of(model: nn.Module) -> Iterator[ParameterInfo]:
    """Every parameter of `model`, once; a tied one is what it is first.

    A parametrised or pruned weight is what the layer takes it for. A parameter does not decay if
    `no_weight_decay()` of the model, or of a module in it, gives its name or its `dense_name`.

    >>> from structlin import BTT, convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64)), BTT())
    >>> for info in parameters_of(model):
    ...     print(info.name, info.dense_name, info.weight.kind, info.weight.core, info.decays)
    0.cores.0 0.weight matrix 0 True
    0.cores.1 0.weight matrix 1 True
    0.bias 0.bias other None False
    """
    undecayed = _undecayed(model)
    seen = set[nn.Parameter]()
    for layer, module in named_modules(model):
        weights = weights_of(module)
        is_norm = isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")
        for attribute, stored_as, parameter in _list_parameters(module):
            if parameter in seen:
                continue
            seen.add(parameter)
            weight = weights.get(attribute, Weight())
            name = join(layer, stored_as)
            dense_name = join(layer, "weight" if weight.core is not None else attribute)
            if isinstance(module, StructuredExperts):  # whose name is that of the parameter
                dense_name = layer
            # a bias of any shape: one per expert is 2-D, MultiheadAttention's bias_k is 3-D
            is_vector = parameter.ndim < 2 or is_norm or "bias" in attribute.split("_")
            decays = weight.kind in ("matrix", "embedding") or not is_vector
            decays = decays and undecayed.isdisjoint((name, dense_name))
            yield ParameterInfo(parameter, name, dense_name, layer, module, weight, decays)


def weights_of(module: nn.Module) -> dict[str, Weight]:
    """The weights that a layer multiplies by, parametrised or not: attribute name -> `Weight`."""
    if isinstance(module, StructuredLinear | StructuredExperts):
        weights = {"gains": Weight("gain")}
        for n, core in enumerate(module.structure.cores):
            name = f"cores.{module.core_names[n]}"
            weights[name] = Weight("matrix", core.fan_out, core.fan_in, "g m n", core=n)
        return weights
    if isinstance(module, nn.Linear):
        return {"weight": Weight("matrix", module.out_features, module.in_features)}
    if is_conv1d(module):
        assert isinstance(module.weight, Tensor)
        in_features, out_features = module.weight.shape
        return {"weight": Weight("matrix", out_features, in_features, "n m")}
    if isinstance(module, _ConvNd):
        fan_out = module.out_channels // module.groups
        fan_in = module.in_channels // module.groups
        sides = "(g n) m" if isinstance(module, _ConvTransposeNd) else "(g m) n"
        kernel = {f"k{n}": size for n, size in enumerate(module.kernel_size, 1)}
        axes = " ".join([sides, *kernel])
        return {"weight": Weight("matrix", fan_out, fan_in, axes, {"g": module.groups, **kernel})}
    if isinstance(module, nn.MultiheadAttention):
        width = module.embed_dim
        if module.in_proj_weight is not None:
            return {"in_proj_weight": Weight("matrix", width, width, "(g m) n", {"g": 3})}
        fans_in = {"q": width, "k": module.kdim, "v": module.vdim}
        return {f"{x}_proj_weight": Weight("matrix", width, fan) for x, fan in fans_in.items()}
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return {"weight": Weight("embedding", module.embedding_dim, stored="g m")}
    layouts = layouts_of(module)
    return {name: _read_weight(getattr(module, name), layout) for name, layout in layouts.items()}


def _read_weight(tensor: Tensor, layout: Layout) -> Weight:
    sides = read_sides(layout, tuple(tensor.shape))
    sizes = {"f": layout.fused} if "f" in layout.stored else {}
    return Weight("matrix", sides.fan_out, sides.fan_in, layout.stored, sizes)


# what a name or a class says: experts together (`experts.3` is one alone), and no matrices of them
_EXPERTS = re.compile(r"(^|[._])experts?(?!\.\d)([._]|$)", re.IGNORECASE)
_NO_MATRICES = re.compile(r"bias|embed|token|prompt|cls|(^|[ _])(pos|scale)", re.IGNORECASE)


def is_undeclared(info: ParameterInfo) -> bool:
    """Whether it is experts, as its name or its module's class says, and nobody knows how they
    lie. An entry of a dimension of one, as of a class token, is no expert."""
    if info.weight.kind != "other" or info.parameter.ndim < 3 or min(info.parameter.shape) < 2:
        return False
    attribute = info.name.rpartition(".")[2]
    layer = info.layer.rpartition(".")[2]
    kind = type(info.owner).__name__
    says_so = _EXPERTS.search(info.name) or "Expert" in kind
    return bool(says_so) and not _NO_MATRICES.search(f"{attribute} {layer} {kind}")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model`, named as without wrappers; a wrapper has the name of its module."""
    names = dict[str, str]()
    wrapped = set[str]()
    for full, module in model.named_modules():
        parent, _, child = full.rpartition(".")
        names[full] = join(names.get(parent, ""), "" if full in wrapped else child)
        wrapped.update(join(full, child) for child in _WRAPPED if _wraps(module, child))
        yield names[full], module


def join(module: str, child: str) -> str:
    """Their dotted name."""
    return f"{module}.{child}" if module and child else module or child


# Attributes in which a wrapper keeps its module.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")


def _wraps(module: nn.Module, child: str) -> bool:
    if child == "module" and not isinstance(module, DataParallel | DistributedDataParallel):
        return False  # an ordinary attribute of that name
    return list(module._modules) == [child]


def _undecayed(model: nn.Module) -> set[str]:
    """The names that the modules of `model` declare by `no_weight_decay()`, as timm's models do."""
    undecayed = set[str]()
    for name, module in named_modules(model):
        declared = getattr(module, "no_weight_decay", None)
        if callable(declared):
            undecayed.update(join(name, parameter) for parameter in declared())
    return undecayed


class _StoredParameter(NamedTuple):
    """A parameter that a module holds itself."""

    attribute: str  #: by which the module reads it
    stored_as: str  #: its name among the module's parameters
    parameter: nn.Parameter


def _list_parameters(module: nn.Module) -> Iterator[_StoredParameter]:
    """The parameters that a module holds itself, those of its cores included."""
    if isinstance(module, StructuredLinear | StructuredExperts):
        for attribute, stored_as, parameter in _list_parameters(module.cores):
            yield _StoredParameter(f"cores.{attribute}", f"cores.{stored_as}", parameter)
    for stored_as, parameter in module.named_parameters(recurse=False):
        # torch.nn.utils.prune stores "weight" as "weight_orig"
        yield _StoredParameter(stored_as.removesuffix("_orig"), stored_as, parameter)
    parametrizations = module._modules.get("parametrizations")
    if isinstance(parametrizations, nn.ModuleDict):
        for attribute, chain in parametrizations.items():
            original = chain._parameters.get("original")
            if original is not None:
                stored_as = f"parametrizations.{attribute}.original"
                yield _StoredParameter(attribute, stored_as, original)
