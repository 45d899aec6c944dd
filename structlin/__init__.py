"""structlin: structured matrices as better linear layers. The structure is the only thing anybody
writes."""

from types import ModuleType
from typing import TYPE_CHECKING

from . import duality, modular, optim, scaling, stability
from ._compress.compress import compress, plan_compression
from ._compress.distill import distill
from ._convert.convert import convert, plan
from ._convert.densify import densify
from ._convert.quantize import quantize
from ._convert.summary import summary
from ._convert.widen import cost, widen
from ._engine.cpu.library import show_config
from ._engine.product import apply, to_dense
from ._layer.linear import StructuredLinear
from ._model.files import load, save
from ._model.loss import linear_cross_entropy
from ._projection.solve import project
from ._structure.families import (
    BLAST,
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
from ._structure.structure import Core, Structure
from .duality import polar_factor
from .optim import keep_ratios, param_groups

if TYPE_CHECKING:
    from . import parallel as parallel

__version__ = "0.2.0"
__all__ = [
    "BLAST",
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
    "compress",
    "convert",
    "cost",
    "densify",
    "distill",
    "duality",
    "family",
    "keep_ratios",
    "linear_cross_entropy",
    "load",
    "modular",
    "optim",
    "param_groups",
    "plan",
    "plan_compression",
    "polar_factor",
    "project",
    "quantize",
    "save",
    "scaling",
    "show_config",
    "stability",
    "summary",
    "to_dense",
    "widen",
]


def __getattr__(name: str) -> ModuleType:
    """`structlin.parallel` is imported when it is asked for: it needs torch.distributed."""
    if name == "parallel":
        from importlib import import_module

        return import_module(".parallel", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
