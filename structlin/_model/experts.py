"""How the weights of modules that are no layers of torch lie: fused experts, and a user's own.

A weight holds several matrices, and one einops text says how: `e` experts of `m` rows (fan_out) and
`n` columns (fan_in); `f` counts what is fused, such as gate and up.
"""

import re
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._hosts import registry
from .._layer.experts import ExpertStack, Lay
from .._layer.linear import StructuredLinear
from .._structure.arguments import checked, show

_LAYERS = (
    StructuredLinear, nn.Linear, _ConvNd, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag,
)  # fmt: skip
_EXAMPLES = "'e m n', 'e n m', 'e (f m) n', 'e n (m f)' or 'm n'"
_TOKEN = re.compile(r"\([^()]*\)|[^\s()]+")  # of one dimension


@dataclass(frozen=True)
class Layout:
    """How one weight lies."""

    stored: str  #: the einops text, one token for each dimension
    fused: int = 2  #: the size of `f`
    declared: bool = False  #: by the user, who is told where it does not fit


@dataclass(frozen=True)
class Sides:
    """The sizes of each matrix of a weight."""

    fan_out: int
    fan_in: int


_DECLARED = dict[type[nn.Module], dict[str, Layout]]()


@checked
def declare_weights(module_class: type, *, fused: int = 2, **weights: str) -> None:
    """Say how the weights of your own module lie, so that optimizers step each matrix by itself.

    A text names the dimensions of one parameter, as in einops: `e` experts, `m` outputs, `n` inputs
    of each matrix, and `f` where several are fused, such as gate and up. `(f m)` is one dimension,
    of gate's outputs and then up's; in `(m f)` they take turns.

        "e m n"      torch.einsum("emn,en->em", weight, x)
        "e n m"      torch.bmm(x, weight)
        "e (f m) n"  gate, up = torch.einsum("emn,en->em", weight, x).chunk(2, dim=-1)
        "e n (m f)"  gate, up = y[..., ::2], y[..., 1::2] of y = torch.bmm(x, weight)

    `Muon` and `SOAP` then step these weights as hidden matrices, and `param_groups` gives them
    muP's rates. Experts of transformers and torchtitan say by themselves how they lie. The
    declaration holds for subclasses too. Make it before the optimizer.

    Args:
        module_class: the class that owns the parameters.
        fused: the number of matrices in `f`.
        weights: parameter name -> text.

    Raises:
        TypeError: `module_class` is no class of modules.
        ValueError: a text has other axes, or m or n not once; no weights; a layer of torch or
            structlin, which says it by itself. Where a model is read: a parameter that its module
            does not have, or whose shape the text does not fit.

    >>> import torch
    >>> from structlin.optim import Muon, declare_weights
    >>> class Experts(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up = nn.Parameter(torch.randn(4, 32, 16))  # 16 -> 32
    ...         self.down = nn.Parameter(torch.randn(4, 16, 32))
    >>> declare_weights(Experts, up="e m n", down="e m n")
    >>> [group["kind"] for group in Muon(Experts()).param_groups]
    ['matrix']
    """
    if not issubclass(module_class, nn.Module):
        raise TypeError(
            f"module_class={module_class.__name__} must be a class of modules, such as "
            "type(model.layers[0].experts)"
        )
    name = module_class.__name__
    if issubclass(module_class, _LAYERS):
        raise ValueError(f"module_class={name} is a layer that says by itself how its weights lie")
    if not weights:
        raise ValueError(f"weights: none of {name} is declared, say weight='e m n'")
    for own, stored in weights.items():
        _require_readable(own, stored)
    known = _DECLARED.get(module_class, {})
    new = {own: Layout(stored, fused, declared=True) for own, stored in weights.items()}
    _DECLARED[module_class] = known | new


def layouts_of(module: nn.Module) -> dict[str, Layout]:
    """How each weight of a module lies, by its attribute's name; none of a module that nobody
    declared, and none that is not there."""
    layouts = {name: Layout(stored) for name, stored in registry.layouts_of(module).items()}
    for kind in reversed(type(module).__mro__):
        layouts |= _DECLARED.get(kind, {})
    return {name: layout for name, layout in layouts.items() if _fits(module, name, layout)}


def read_sides(layout: Layout, shape: tuple[int, ...]) -> Sides:
    """The sizes of each matrix of a weight of that shape, which fits."""
    sizes = {}
    for token, size in zip(_TOKEN.findall(layout.stored), shape, strict=True):
        axes = token.strip("()").split()
        axis = next((axis for axis in axes if axis in ("m", "n")), token)
        sizes[axis] = size // layout.fused if len(axes) > 1 else size
    return Sides(sizes["m"], sizes["n"])


def find_lay(layout: Layout, shape: tuple[int, ...]) -> Lay | None:
    """How the matrices of a parameter of that shape lie, which the text fits; None where it is not
    `(experts, ., .)`, with what is fused among the outputs."""
    tokens = [token.strip("()").split() for token in _TOKEN.findall(layout.stored)]
    if len(tokens) != 3 or tokens[0] != ["e"]:
        return None
    sides = read_sides(layout, shape)
    first, last = tokens[1:]
    outputs = first if "m" in first else last
    fused = layout.fused if "f" in outputs else 1
    if "f" in layout.stored and "f" not in outputs:
        return None
    return Lay(
        experts=shape[0],
        fused=fused,
        fan_out=sides.fan_out,
        fan_in=sides.fan_in,
        takes_turns=outputs == ["m", "f"],
        transposed="m" in last,
    )


def _fits(module: nn.Module, own: str, layout: Layout) -> bool:
    """Whether the module has such a weight. Raises ValueError where the user said so and it has
    not; elsewhere another class has the same name, or its weights are quantised."""
    weight = getattr(module, own, None)
    tokens = _TOKEN.findall(layout.stored)
    name = type(module).__name__
    if isinstance(weight, ExpertStack):  # its cores say it
        return False
    if not isinstance(weight, Tensor):
        if layout.declared:
            raise ValueError(f"declare_weights: {name} has no parameter {own!r}")
        return False
    if not weight.numel():  # kept elsewhere, as DeepSpeed's ZeRO-3 does
        return False
    shape = tuple(weight.shape)
    sizes = dict(zip(tokens, shape, strict=False))
    divisible = [sizes.get(token, 0) % layout.fused == 0 for token in tokens if "(" in token]
    alone = sizes.get("f", layout.fused) == layout.fused
    fits = len(shape) == len(tokens) and all(divisible) and alone
    if layout.declared and not fits:
        where = f", and f is {layout.fused}" if "f" in layout.stored else ""
        raise ValueError(
            f"declare_weights: {own}={layout.stored!r} does not fit {name}.{own} of shape {shape}: "
            f"the text has {len(tokens)} dimensions{where}"
        )
    return fits


def _require_readable(own: str, stored: str) -> None:
    """Raises ValueError for a text that does not say where each matrix is."""
    if not isinstance(stored, str):
        raise TypeError(f"{own}={show(stored)} must be a text, such as {_EXAMPLES}")
    tokens = _TOKEN.findall(stored)
    axes = re.findall(r"[^\s()]+", stored)
    reason = ""
    unknown = [axis for axis in axes if axis not in ("e", "f", "m", "n")]
    twice = [axis for axis in dict.fromkeys(axes) if axes.count(axis) > 1]
    missing = [axis for axis in ("m", "n") if axis not in axes]
    pairs = [set(token.strip("()").split()) for token in tokens if "(" in token]
    if unknown:
        reason = f"has the axis {unknown[0]!r}, and there are e, f, m and n"
    elif twice:
        reason = f"has {twice[0]!r} more than once"
    elif missing:
        reason = f"has no {missing[0]!r}"
    elif " ".join(tokens) != " ".join(stored.split()):
        reason = "has parentheses that are not closed, or no space between its dimensions"
    elif any(pair not in ({"f", "m"}, {"f", "n"}) for pair in pairs):
        reason = "has parentheses around other axes than f with m, or f with n"
    if reason:
        raise ValueError(f"{own}={stored!r} {reason}; take a text such as {_EXAMPLES}")
