"""Training: `AdamW`, `Muon`, `SOAP`, `Normed`; for any optimizer `param_groups`, `keep_ratios`."""

from .._model.experts import declare_weights
from ._adamw import AdamW
from ._depth import Depth
from ._groups import param_groups
from ._muon import Muon
from ._normed import Normed
from ._ratios import keep_ratios
from ._sharding import shard_placement_fn
from ._soap import SOAP

__all__ = [
    "SOAP",
    "AdamW",
    "Depth",
    "Muon",
    "Normed",
    "declare_weights",
    "keep_ratios",
    "param_groups",
    "shard_placement_fn",
]
