"""A user's model: its linear layers, why one cannot be converted, how to run and change it."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._linear import StructuredLinear

PROTECTED = ("head", "embedding", "router")  # roles that are only touched when they are named
ROLES = ("ffn", "attention", "other", *PROTECTED)

# Searched in this order, case ignored, in a layer's dotted name: what contains a layer tells more
# than its own name.
_ROLE_PATTERNS = (
    ("head", r"(^|\.)(lm_head|embed_out|head_dist|classifier|score|qa_outputs|proj_out|cls)(\.|$)"),
    ("head", r"^([^.]+\.)?heads?(\.|$)|^(fc|out|output|output_projection|logits|readout|unembed)$"),
    ("embedding", r"(^|\.)[^.]*embed[^.]*(\.|$)"),
    ("router", r"(^|\.)(router|gate|gating|switch|shared_expert_gate)(\.|$)"),
    ("attention", r"attn|attention"),
    ("ffn", r"mlp|ffn|feed_?forward|densereludense|(^|\.)experts?(\.|$)"),
    (
        "attention",
        r"(^|\.)([qkvo]|qkv|query|key|value|query_key_value|w[qkvo]"
        r"|([qkvo]|out|in|qkv)_proj)(\.|$)",
    ),
    (
        "ffn",
        r"(^|\.)(fc\d*|c_fc|linear[12]|lin[12]|w[123i]|wi_\d|intermediate|output"
        r"|(up|down|gate|gate_up)_proj)(\.|$)",
    ),
)
# Subclasses of nn.Linear that multiply by their weight and do nothing else.
_PLAIN = ("transformers.models.falcon.modeling_falcon.FalconLinear", "timm.layers.linear.Linear")
# Modules of torch that hold on to the parameters of the model inside, and do not see them replaced.
_WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
}
_STORES = ("_parameters", "_buffers", "_modules")
_SMALLEST: dict[type[nn.Module], nn.Module] = {}
_ADAPTER = re.compile(r"(^|\.)(base_layer|lora_[A-Za-z_]+|original_module|modules_to_save)(\.|$)")


@dataclass
class Layer:
    """One linear layer of a model, under all the names that it has there."""

    names: tuple[str, ...]
    module: nn.Module
    in_features: int
    out_features: int
    role: str
    obstacle: str = ""  #: why it cannot be converted; empty if it can
    tied: tuple[str, ...] = ()  #: other modules that hold the same weight

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def matrix(self) -> Tensor:
        """The dense weight, without its gradient: `(out_features, in_features)`."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight.detach().mT if is_conv1d(self.module) else weight.detach()


def widths(module: nn.Module) -> tuple[int, int] | None:
    """`(in_features, out_features)` of a linear layer of any kind; None for another module."""
    if isinstance(module, nn.Linear | StructuredLinear):
        return module.in_features, module.out_features
    if is_conv1d(module):
        weight = module._parameters["weight"]
        assert weight is not None
        return weight.shape[0], weight.shape[1]
    return None


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D (GPT-2), whose weight is `(in_features, out_features)`."""
    owner = sys.modules.get("transformers.pytorch_utils")  # a model that has one has imported it
    return owner is not None and type(module) is owner.Conv1D


def require_replaceable(model: nn.Module) -> None:
    """Refuse a model none of whose layers can be replaced now.

    Raises:
        TypeError: `model` is not a module.
        ValueError: inference mode is on; the model, or a part of it, is wrapped by torch.compile,
            DataParallel, DistributedDataParallel or FullyShardedDataParallel.
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={kind} must be a torch.nn.Module")
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"model={kind}: parameters made under torch.inference_mode can never be trained; "
            "leave that mode first (torch.no_grad is fine)"
        )
    for name, module in model.named_modules():
        wrapper = _find_wrapper(module)
        if wrapper:
            raise ValueError(
                f"model={kind}: {name or 'the model itself'} is wrapped by {wrapper}, which would "
                "go on with the old parameters: unwrap the model, change its layers, wrap it anew"
            )


def require_unchanged(model: nn.Module, layers: Iterable[Layer]) -> None:
    """Refuse layers that are no longer in `model`, or would by now lose something."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for layer in layers:
        replaced = any(modules.get(name) is not layer.module for name in layer.names)
        reason = "was replaced" if replaced else find_loss(layer.module)
        if reason:
            raise ValueError(f"layer {layer.name!r} {reason} after this plan; make a new one")


def linear_layers(model: nn.Module) -> list[Layer]:
    """Every linear layer of `model`, each once, in the order of `named_modules`."""
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if widths(module) is not None:
            names[module].append(name)
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)].append(name)
    heads = _declared_heads(model)
    layers = []
    for module, found in names.items():
        in_features, out_features = widths(module) or (0, 0)
        role = "head" if module in heads else role_of(found[0])
        sharing = owners[id(module._parameters.get("weight"))]
        tied = {name.rpartition(".")[0] for name in sharing} - set(found)
        parents = [model.get_submodule(name.rpartition(".")[0]) for name in found if name]
        layer = Layer(tuple(found), module, in_features, out_features, role)
        layer.obstacle, layer.tied = _find_obstacle(layer, parents), tuple(sorted(tied))
        layers.append(layer)
    return layers


def find_loose_matrices(model: nn.Module) -> list[str]:
    """Name and shape of the large matrices that no linear layer holds: nothing converts them.

    They are the experts of a mixture as one 3-D parameter, and the input projection of
    nn.MultiheadAttention.
    """
    found = []
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        attention = own == "in_proj_weight" and isinstance(module, nn.MultiheadAttention)
        named = re.search(r"experts?(\.|_|$)", name) and ".cores." not in name
        experts = named and parameter.ndim == 3
        if attention or experts:
            found.append(f"{name} {tuple(parameter.shape)}")
    return found


def role_of(name: str) -> str:
    """The role that a layer's dotted name tells.

    >>> [role_of(name) for name in ("h.0.attn.c_proj", "h.0.mlp.c_proj", "lm_head", "h.3.mlp.gate")]
    ['attention', 'ffn', 'head', 'router']
    """
    for role, pattern in _ROLE_PATTERNS:
        if re.search(pattern, name, re.IGNORECASE):
            return role
    return "other"


def _declared_heads(model: nn.Module) -> set[nn.Module]:
    """Modules below what the model itself calls its head (transformers, timm)."""
    heads = set[nn.Module]()
    for method in ("get_output_embeddings", "get_classifier"):
        declared = getattr(model, method, None)
        try:
            found = declared() if callable(declared) else None
        except (AttributeError, NotImplementedError):
            continue
        heads_found = list(found) if isinstance(found, tuple | list | nn.ModuleList) else [found]
        for head in heads_found:
            if isinstance(head, nn.Module):
                heads.update(head.modules())
    return heads


def _find_wrapper(module: nn.Module) -> str:
    """The name of torch's wrapper that the module is; empty if it is none."""
    for base in type(module).__mro__:
        if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
            return _WRAPPERS[base.__name__]
    return ""


def _find_obstacle(layer: Layer, parents: list[nn.Module]) -> str:
    """Why the layer cannot be converted; empty if it can."""
    module = layer.module
    kind = type(module)
    if isinstance(module, StructuredLinear):
        return "is structured already"
    if any(isinstance(parent, nn.MultiheadAttention) for parent in parents):
        return "belongs to nn.MultiheadAttention, which reads its weight without calling it"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if hasattr(weight, "full_tensor"):
        return "has a sharded weight (DTensor): convert before fully_shard"
    qualified = f"{kind.__module__}.{kind.__name__}"
    if kind is not nn.Linear and not is_conv1d(module) and qualified not in _PLAIN:
        return f"is a {kind.__name__}, not a plain nn.Linear: its own behaviour would be lost"
    if any(_ADAPTER.search(name) for name in layer.names):
        return "belongs to an adapter: merge it first, or convert before it is added"
    if weight is None:
        return (
            "has no weight parameter of its own (pruned, weight-normalised or quantised by a hook)"
        )
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        return f"has a weight of type {type(weight).__name__} and dtype {weight.dtype}"
    if hasattr(weight, "infshape"):
        return "carries a width of the mup package (infshape): train it with param_groups(base=)"
    if 0 in weight.shape:
        return f"has a weight of shape {tuple(weight.shape)}"
    wanted = (layer.out_features, layer.in_features)
    if tuple(weight.shape) != (wanted[::-1] if is_conv1d(module) else wanted):
        return f"has a weight of shape {tuple(weight.shape)}, no longer that of the layer: {wanted}"
    if bias is not None and tuple(bias.shape) != wanted[:1]:
        return f"has a bias of shape {tuple(bias.shape)}, not (out_features,) = {wanted[:1]}"
    names = dir(_build_smallest(StructuredLinear))
    used = [x for x in _find_attributes(module) if x in names and not _is_bookkeeping(x)]
    if used:
        return f"has an attribute {used[0]!r}, a name that StructuredLinear needs for itself"
    return find_loss(module)


def find_loss(module: nn.Module) -> str:
    """What would be lost if another layer took the place of this linear one; empty if nothing."""
    if more := _find_additions(module):
        return f"has more than a layer of its kind has, which would be lost: {', '.join(more)}"
    for part in module.modules():
        hooks = [
            name for name, held in vars(part).items() if name.endswith("_hooks") and _remain(held)
        ]
        if hooks:
            return f"has hooks, which would be lost: {', '.join(hooks)}"
        patched = [
            name
            for name in vars(part)
            if hasattr(type(part), name) and name != "__module__" and not _is_bookkeeping(name)
        ]
        if patched:
            return (
                f"has methods of its own, offloaded or patched, which would be lost: {patched[0]}"
            )
    bias = module._parameters.get("bias")  # which stays the same parameter
    for name, parameter in module.named_parameters():
        if parameter is bias:
            continue
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"has hooks on its {name}, which would be lost"
        attributes = [key for key in vars(parameter) if not _is_bookkeeping(key)]
        if attributes:
            return f"has attributes on its {name}, which would be lost: {', '.join(attributes)}"
    return ""


def find_reason_to_keep(layer: StructuredLinear, *kinds: type[StructuredLinear]) -> str:
    """Why no layer of another kind can take the place of this one, which may be a subclass of
    `kinds`; empty if one can."""
    if type(layer) not in (StructuredLinear, *kinds):
        return f"is a {type(layer).__name__}: its own behaviour would be lost"
    return find_sharding(layer) or find_loss(layer)


def find_sharding(layer: StructuredLinear) -> str:
    sharded = any(hasattr(parameter, "full_tensor") for parameter in layer.parameters())
    return "is sharded: gather it first" if sharded else ""


def _remain(held: Any) -> list[Any]:
    """The hooks without those that torch's weight_norm leaves behind.

    `remove_parametrizations` does not remove them. They read states from before torch 2.0. A
    parametrisation that is still there is found as a module.
    """
    hooks = list(held.values()) if isinstance(held, Mapping) else [held] * bool(held)
    functions = [getattr(hook, "hook", hook) for hook in hooks]  # torch wraps some
    left = "torch.nn.utils.parametrizations"
    return [function for function in functions if getattr(function, "__module__", "") != left]


def _is_bookkeeping(attribute: str) -> bool:
    """Whether torch.compile or transformers' loading left it on a layer, for themselves."""
    return attribute.startswith("_dynamo") or attribute == "_is_hf_initialized"


def _find_additions(module: nn.Module) -> list[str]:
    """Parameters, buffers and submodules that somebody has added to a linear layer."""
    new = _build_smallest(type(module))
    found = [
        name
        for store in _STORES
        for name in getattr(module, store)
        if name not in getattr(new, store)
    ]
    if isinstance(module, StructuredLinear):  # whose cores are numbered
        names = [name for store in _STORES for name in getattr(module.cores, store)]
        found += [f"cores.{name}" for name in names if not name.isdigit()]
    return found


def _find_attributes(module: nn.Module) -> list[str]:
    """The attributes that somebody has set on a linear layer."""
    own = dir(_build_smallest(type(module)))
    return [name for name in vars(module) if name not in own or _is_bookkeeping(name)]


def _build_smallest(kind: type[nn.Module]) -> nn.Module:
    """A new linear layer of that kind, 1 -> 1 and without values, to compare others with."""
    if kind not in _SMALLEST:
        with torch.device("meta"):
            _SMALLEST[kind] = kind(1, 1)
    return _SMALLEST[kind]


def carry_attributes(old: nn.Module, new: nn.Module) -> None:
    """Set on the linear layer `new` what somebody has set on `old`, whose place it takes."""
    vars(new).update({name: vars(old)[name] for name in _find_attributes(old)})


def swap(model: nn.Module, replacements: Iterable[tuple[Iterable[str], nn.Module]]) -> nn.Module:
    """Put each module under its names into `model`; return the model, or what took its place."""
    root = model
    for names, new in replacements:
        for name in names:
            if not name:
                root = new
                continue
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
    return root


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module of `model` in eval mode; afterwards, also on an error, each in its own mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def run(model: nn.Module, batch: Any) -> Any:
    """`model` on a batch: a mapping is keywords, a tuple or list positions, else one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


@torch.no_grad()
def build_dense_layer(layer: StructuredLinear) -> nn.Module:
    """The layer of the user's kind (nn.Linear or Conv1D) that `layer` stands for, with its bias."""
    weight = layer.to_dense()  # (out_features, in_features)
    with torch.device("meta"):
        if layer.conv1d:
            from transformers.pytorch_utils import Conv1D

            new: Any = Conv1D(layer.out_features, layer.in_features)  # type: ignore[no-untyped-call]
        else:
            new = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    trains = any(core.requires_grad for core in layer.cores)
    values = (weight.mT if layer.conv1d else weight).contiguous()
    new.weight = nn.Parameter(values, requires_grad=trains)
    new.bias = layer.bias
    carry_attributes(layer, new)
    dense: nn.Module = new.train(layer.training)
    return dense
