"""structlin: structured matrices as better linear layers. The structure is the only thing anybody writes."""

from . import duality, modular, optim, scaling, stability
from .checkpoint import load, save
from .contract import apply, to_cola, to_dense
from .convert import convert, merge, plan, to_dense_
from .duality import dualize
from .families import BTT, TT, BlockDiagonal, Dense, Family, Kronecker, LowRank, Monarch, Split, family
from .linear import StructuredLinear
from .optim import param_groups
from .projection import project, relative_error
from .report import summary
from .scaling import init_std, lr_mult
from .structure import Core, Structure

__version__ = "0.1.0"
__all__ = [
    "BTT",
    "TT",
    "BlockDiagonal",
    "Core",
    "Dense",
    "Family",
    "Kronecker",
    "LowRank",
    "Monarch",
    "Split",
    "Structure",
    "StructuredLinear",
    "apply",
    "convert",
    "duality",
    "dualize",
    "family",
    "init_std",
    "load",
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
    "stability",
    "summary",
    "to_cola",
    "to_dense",
    "to_dense_",
]
