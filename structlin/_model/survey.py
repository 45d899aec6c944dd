"""What the layers of a user's model are: widths, role, and why one cannot be converted."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._linear import StructuredLinear

PROTECTED = ("head", "embedding", "router")  # roles that are only touched when they are named
ROLES = ("ffn", "attention", "other", *PROTECTED)

# Searched in this order, case ignored, in a layer's dotted name: what contains a layer tells more than its own name.
_ROLE_PATTERNS = (
    ("head", r"(^|\.)(lm_head|embed_out|head_dist|classifier|score|qa_outputs|proj_out|cls)(\.|$)"),
    ("head", r"^([^.]+\.)?heads?(\.|$)|^(fc|out|output|output_projection|logits|readout|unembed)$"),
    ("embedding", r"(^|\.)[^.]*embed[^.]*(\.|$)"),
    ("router", r"(^|\.)(router|gate|gating|switch|shared_expert_gate)(\.|$)"),
    ("attention", r"attn|attention"),
    ("ffn", r"mlp|ffn|feed_?forward|densereludense|(^|\.)experts?(\.|$)"),
    ("attention", r"(^|\.)([qkvo]|qkv|query|key|value|query_key_value|w[qkvo]|([qkvo]|out|in|qkv)_proj)(\.|$)"),
    (
        "ffn",
        r"(^|\.)(fc\d*|c_fc|linear[12]|lin[12]|w[123i]|wi_\d|intermediate|output|(up|down|gate|gate_up)_proj)(\.|$)",
    ),
)
# Subclasses of nn.Linear that multiply by their weight and do nothing else.
_PLAIN = ("transformers.models.falcon.modeling_falcon.FalconLinear", "timm.layers.linear.Linear")
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
        tied = {name.rpartition(".")[0] for name in owners[id(module._parameters.get("weight"))]} - set(found)
        parents = [model.get_submodule(name.rpartition(".")[0]) for name in found if name]
        obstacle = _obstacle(module, found, parents)
        layers.append(Layer(tuple(found), module, in_features, out_features, role, obstacle, tuple(sorted(tied))))
    return layers


def no_layers(model: nn.Module) -> list[str]:
    """Large matrices of a model that no linear layer holds, so that nothing here converts them: the experts of a
    mixture as one 3-D parameter, the input projection of nn.MultiheadAttention."""
    found = []
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        attention = own == "in_proj_weight" and isinstance(model.get_submodule(owner), nn.MultiheadAttention)
        experts = parameter.ndim == 3 and re.search(r"experts?(\.|_|$)", name) and ".cores." not in name
        if attention or experts:
            found.append(f"{name} {tuple(parameter.shape)}")
    return found


def role_of(name: str) -> str:
    """The role that a layer's dotted name tells.

    >>> role_of("h.0.attn.c_proj"), role_of("h.0.mlp.c_proj"), role_of("lm_head"), role_of("layers.3.mlp.gate")
    ('attention', 'ffn', 'head', 'router')
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


def _obstacle(module: nn.Module, names: list[str], parents: list[nn.Module]) -> str:
    kind = type(module)
    if isinstance(module, StructuredLinear):
        return "is structured already"
    if any(isinstance(parent, nn.MultiheadAttention) for parent in parents):
        return "belongs to nn.MultiheadAttention, which reads its weight without calling it"
    if hasattr(module._parameters.get("weight"), "full_tensor"):
        return "has a sharded weight (DTensor): convert before fully_shard"
    if kind is not nn.Linear and not is_conv1d(module) and f"{kind.__module__}.{kind.__name__}" not in _PLAIN:
        return f"is a {kind.__name__}, not a plain nn.Linear: its own behaviour would be lost"
    if any(_ADAPTER.search(name) for name in names):
        return "belongs to an adapter: merge it first, or convert before it is added"
    weight = module._parameters.get("weight")
    if weight is None:
        return "has no weight parameter of its own (pruned, weight-normalised or quantised by a hook)"
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        return f"has a weight of type {type(weight).__name__} and dtype {weight.dtype}"
    if hasattr(weight, "infshape"):
        return "carries a width of the mup package (infshape): train it with structlin's param_groups(base=) instead"
    if 0 in weight.shape:
        return f"has a weight of shape {tuple(weight.shape)}"
    if more := _more(module):
        return f"has more than a weight and a bias, which would be lost: {', '.join(more)}"
    if has_hooks(module):
        return "has hooks, which would be lost"
    if "forward" in vars(module):
        return "has a forward of its own (offloaded or patched), which would be lost"
    return ""


def _more(module: nn.Module) -> list[str]:
    """Parameters, buffers and submodules that somebody has added to a linear layer."""
    own = ("_parameters", "_buffers", "_modules")
    return [name for kind in own for name in getattr(module, kind) if name not in ("weight", "bias")]


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre"))


def swap(model: nn.Module, replacements: Iterable[tuple[Iterable[str], nn.Module]]) -> nn.Module:
    """Put each module under its names into `model`; the module itself where the name is the root's."""
    root = model
    for names, new in replacements:
        for name in names:
            if not name:
                root = new
                continue
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
    return root


@torch.no_grad()
def dense_layer(layer: StructuredLinear) -> nn.Module:
    """The layer of the user's kind (nn.Linear or Conv1D) that `layer` stands for; with the same bias."""
    trains, weight = any(core.requires_grad for core in layer.cores), layer.to_dense()
    with torch.device("meta"):
        if layer.conv1d:
            from transformers.pytorch_utils import Conv1D

            new: Any = Conv1D(layer.out_features, layer.in_features)  # type: ignore[no-untyped-call]
        else:
            new = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    new.weight = nn.Parameter((weight.mT if layer.conv1d else weight).contiguous(), requires_grad=trains)
    new.bias = layer.bias
    dense: nn.Module = new.train(layer.training)
    return dense
