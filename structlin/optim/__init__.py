"""Training: rates for any torch optimizer (`param_groups`), the duality-based `Muon`, `Normed`."""

from .distributed import shard_placement_fn
from .groups import param_groups
from .muon import Muon
from .normed import Normed

__all__ = ["Muon", "Normed", "param_groups", "shard_placement_fn"]
