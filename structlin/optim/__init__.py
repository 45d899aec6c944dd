"""Training: learning rates for any torch optimizer (`param_groups`), and the duality-based `Muon`."""

from .groups import param_groups
from .muon import Muon

__all__ = ["Muon", "param_groups"]
