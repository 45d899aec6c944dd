"""What a product is given: tensors that fit the structure and each other, or an error."""

from collections.abc import Sequence, Sized

import torch
from torch import Tensor
from torch.fx import Proxy

from .._structure.arguments import show
from .._structure.structure import Structure
from .._tensors import require_real


def check_cores(structure: Structure, cores: Sequence[Tensor]) -> None:
    """Refuse cores that are not one tensor per core, of its shape, all of a dtype and device."""
    if not isinstance(structure, Structure):
        raise TypeError(f"structure={show(structure)} must be a Structure, such as layer.structure")
    has_length = isinstance(cores, Sized) and not (isinstance(cores, Tensor) and cores.ndim == 0)
    if not has_length:
        raise TypeError(f"cores={show(cores)} must be a list of tensors")
    if len(cores) != len(structure.cores):
        raise ValueError(
            f"{len(cores)} cores given; the structure has {len(structure.cores)}: {structure!r}"
        )
    for n, (core, tensor) in enumerate(zip(structure.cores, cores, strict=True)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"cores[{n}]={show(tensor)} must be a tensor")
        if tuple(tensor.shape) != core.shape:
            raise ValueError(
                f"cores[{n}] has shape {tuple(tensor.shape)}; the structure needs {core.shape}"
            )
        if tensor.dtype != cores[0].dtype or tensor.device != cores[0].device:
            raise ValueError(
                f"cores[{n}] is {tensor.dtype} on {tensor.device}, "
                f"cores[0] is {cores[0].dtype} on {cores[0].device}"
            )


def check_input(
    x: Tensor, in_features: int, core: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Refuse what the layer cannot take; `dtype` is that of x, the core's if it is None."""
    dtype = dtype or core.dtype
    if not isinstance(x, Tensor):
        way = "torch.as_tensor(x)"
        if isinstance(x, Proxy):
            way = "nn.Sequential(layer): torch.fx traces a model, which has the layer as one node"
        raise TypeError(f"x is a {type(x).__name__}, no tensor; take {way}")
    if x.is_nested and x.layout == torch.strided:
        raise TypeError("x is a nested tensor of layout=torch.strided; take layout=torch.jagged")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: its last dimension must be in_features={in_features}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}; a structured product needs a floating-point input")
    if x.device != core.device:
        raise ValueError(f"x is on {x.device}, the cores are on {core.device}")
    if x.dtype == dtype:
        return
    if not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"x has dtype {x.dtype}, the cores have {dtype}; cast one of them or use autocast"
        )
    if x.dtype == torch.float64:
        raise TypeError(
            f"x has dtype {x.dtype}, which autocast leaves as it is, the cores have {dtype}; cast "
            "one of them"
        )


def check_bias(bias: Tensor | None, out_features: int, device: torch.device) -> None:
    if bias is None:
        return
    require_real("bias", bias)
    if bias.shape != (out_features,) or bias.device != device:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} on {bias.device}; it must be (out_features,) = "
            f"({out_features},) on {device}"
        )
