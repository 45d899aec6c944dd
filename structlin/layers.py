"""What the layers of a user's model are: widths, role, and why one cannot be converted."""

import re
import sys
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor, nn

from .linear import StructuredLinear

PROTECTED = ("head", "embedding", "router")  # roles that are only touched when they are named
ROLES = ("ffn", "attention", "other", *PROTECTED)

# Searched in this order, case ignored, in a layer's dotted name.
_ROLE_PATTERNS = {
    "head": r"(^|\.)(lm_head|embed_out|heads?|head_dist|classifier|score|qa_outputs|proj_out|cls)(\.|$)"
    r"|^(fc|out|output|output_projection|logits|readout|unembed)$",
    "embedding": r"(^|\.)[^.]*embed[^.]*(\.|$)",
    "router": r"(^|\.)(router|gate|gating|switch|shared_expert_gate)(\.|$)",
    "attention": r"attn|attention|(^|\.)([qkvo]|qkv|query|key|value|query_key_value)(\.|$)"
    r"|(^|\.)(w[qkvo]|([qkvo]|out|in|qkv)_proj)(\.|$)",
    "ffn": r"mlp|ffn|feed_?forward|densereludense|(^|\.)(fc\d*|c_fc|linear[12]|lin[12]|w[123i]|wi_\d|experts?)(\.|$)"
    r"|(^|\.)(intermediate|output|(up|down|gate|gate_up)_proj)(\.|$)",
}


@dataclass
class Layer:
    """One linear layer of a model, under all the names that it has there."""

    names: tuple[str, ...]
    module: nn.Module
    in_features: int
    out_features: int
    role: str
    obstacle: str = ""  #: why it cannot be converted; empty if it can

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
        layers.append(Layer(tuple(found), module, in_features, out_features, role, _obstacle(module, found, owners)))
    return layers


def role_of(name: str) -> str:
    """The role that a layer's dotted name tells.

    >>> role_of("h.0.attn.c_proj"), role_of("h.0.mlp.c_proj"), role_of("lm_head"), role_of("layers.3.mlp.gate")
    ('attention', 'ffn', 'head', 'router')
    """
    for role, pattern in _ROLE_PATTERNS.items():
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


def _obstacle(module: nn.Module, names: list[str], owners: dict[int, list[str]]) -> str:
    kind = type(module)
    if isinstance(module, StructuredLinear):
        return "is structured already"
    if kind is not nn.Linear and not is_conv1d(module):
        return f"is a {kind.__name__}, not a plain nn.Linear: its own behaviour would be lost"
    if module._parameters.get("weight") is None:
        return "has no weight parameter of its own (pruned, weight-normalised or quantised by a hook)"
    weight = module.weight
    if type(weight) is not nn.Parameter or not isinstance(weight, Tensor) or not weight.is_floating_point():
        return f"has a weight of type {type(weight).__name__} and dtype {weight.dtype}"
    tied = sorted({name.rpartition(".")[0] for name in owners[id(weight)]} - set(names))
    if tied:
        return f"shares its weight with {', '.join(tied)}"
    if any(getattr(module, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")):
        return "has hooks, which would be lost"
    return ""
