"""structlin: structured matrices as better linear layers. The structure is the only thing anybody
writes."""

from . import duality, modular, optim, scaling, search, stability
from ._checkpoint import load, save
from ._cola import to_cola
from ._convert import Plan, convert, merge, plan, to_dense_
from ._distill import Distilled, distill
from ._families import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Family,
    Kronecker,
    LowRank,
    Monarch,
    Split,
    family,
)
from ._kernels.engine import show_config
from ._linear import StructuredLinear
from ._mixture import Mixture, load_balancing_loss
from ._product import apply, to_dense
from ._projection import project, relative_error
from ._report import Summary, summary
from ._structure import Core, Structure
from ._widen import Cost, Widened, cost, widen
from ._widths import divide, factorise
from .duality import dualize
from .optim import keep_ratios, param_groups
from .scaling import init_std, lr_mult

__version__ = "0.2.0"
__all__ = [
    "BTT",
    "TT",
    "BlockDiagonal",
    "Core",
    "Cost",
    "Dense",
    "Distilled",
    "Family",
    "Kronecker",
    "LowRank",
    "Mixture",
    "Monarch",
    "Plan",
    "Split",
    "Structure",
    "StructuredLinear",
    "Summary",
    "Widened",
    "apply",
    "convert",
    "cost",
    "distill",
    "divide",
    "duality",
    "dualize",
    "factorise",
    "family",
    "init_std",
    "keep_ratios",
    "load",
    "load_balancing_loss",
    "lr_mult",
    "merge",
    "modular",
    "optim",
    "param_groups",
    "plan",
    "project",
    "relative_error",
    "save",
    "scaling",
    "search",
    "show_config",
    "stability",
    "summary",
    "to_cola",
    "to_dense",
    "to_dense_",
    "widen",
]
