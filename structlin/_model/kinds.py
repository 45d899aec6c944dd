"""What a linear layer is: its widths, and the role that its name tells."""

import re
from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn

from .._hosts import registry
from .._hosts.transformers import is_conv1d
from .._layer.linear import StructuredLinear

PROTECTED = ("head", "embedding", "router")  # roles that are only touched when they are named
ROLES = ("ffn", "attention", "other", *PROTECTED)

# Searched after those of other libraries, in this order, case ignored, in a layer's dotted name:
# what contains a layer tells more than its own name.
_ROLE_PATTERNS = (
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


class Widths(NamedTuple):
    """The widths of a linear layer."""

    in_features: int
    out_features: int


def widths(module: nn.Module) -> Widths | None:
    """The widths of a linear layer of any kind; None for another module."""
    if isinstance(module, nn.Linear | StructuredLinear):
        return Widths(module.in_features, module.out_features)
    if is_conv1d(module):
        weight = module.weight  # no parameter of its own where it is pruned
        assert isinstance(weight, Tensor)
        return Widths(*weight.shape)
    return None


def role_of(name: str) -> str:
    """The role that a layer's dotted name tells.

    >>> [role_of(name) for name in ("h.0.attn.c_proj", "h.0.mlp.c_proj", "lm_head", "h.3.mlp.gate")]
    ['attention', 'ffn', 'head', 'router']
    """
    for role, pattern in chain(registry.role_patterns(), _ROLE_PATTERNS):
        if re.search(pattern, name, re.IGNORECASE):
            return role
    return "other"
