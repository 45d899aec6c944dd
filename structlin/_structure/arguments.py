"""The checks of arguments: each refuses one by its name and value, before anything is computed.

The signature of a function says of which types its arguments are, and `checked` holds callers to
it. Integers go from 1 to `LARGEST` but for those in `_RANGES`, and other numbers are not negative.
"""

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from functools import cache, wraps
from inspect import signature
from itertools import islice
from math import inf
from numbers import Integral, Real
from os import fspath
from types import NoneType, UnionType
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .structure import Structure

Checked = TypeVar("Checked", bound=Callable[..., Any])

LARGEST = 2**40  # a count: nobody has so much memory or time
_ALL = -(2**63), 2**63 - 1
MAX_STEPS = 10**6  # of refinement, distillation and sweeps, which take hundreds
_MOST_NUMBERS = 10_000  # of one argument, such as widths, rates or seeds
_RANGES = {  # of the integers that do not go from 1 to `LARGEST`
    "bias": (0, 1),
    "cores": (1, 52),  # each has an axis of its own, and torch.einsum so many letters
    "dim": (-64, 63),  # torch's
    "ignore_index": _ALL,
    "n": (1, 10_000),
    "padding": (0, LARGEST),
    "refine": (0, MAX_STEPS),
    "seed": _ALL,
    "seeds": _ALL,
    "steps": (1, MAX_STEPS),
    "sweeps": (0, MAX_STEPS),
    "tokens": (0, LARGEST),
}
_SAY_MORE = {"keep", "method"}  # where they are refused
_WORDS = {  # beside the names of types
    Callable: "a function",
    Iterable: "an iterable",
    Mapping: "a mapping",
    Sequence: "a list",
    NoneType: "None",
    float: "a number",
    str: "a text",
    nn.Module: "a torch.nn.Module",
    torch.dtype: "a torch.dtype of floating point, as torch.float32",
    torch.optim.Optimizer: "a torch optimizer",
    "Family": "a family such as BTT(rank=1)",
}


# ---- what a signature says -----------------------------------------------------------------------


def checked(function: Checked) -> Checked:
    """Let a function, or the making of a dataclass, refuse arguments that are not of the types of
    its signature. NumPy's numbers become Python's.

    >>> @checked
    ... def scale(width: int, factor: float | None = None) -> None: ...
    >>> scale(8, factor=[2])
    Traceback (most recent call last):
    TypeError: factor=[2] must be a number, or None
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    parameters = signature(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **options)
        try:
            bound = parameters.bind(*args, **options)
        except TypeError:  # Python tells of it by the function's name
            return function(*args, **options)
        bound.arguments.update(fit(function, bound.arguments))
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def fit(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are arguments of `function`, checked."""
    kinds, given = _read_kinds(function), values.items()
    return {name: _fit(name, value, kinds[name], name) for name, value in given if name in kinds}


@cache
def _read_kinds(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The types that each argument may have."""
    try:
        hints = get_type_hints(function)
    except Exception:  # of a user's own family, which only a type checker understands
        return {}
    return {name: _list_kinds(hint) for name, hint in hints.items()}


def _list_kinds(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, NewType):
        return _list_kinds(hint.__supertype__)
    if isinstance(hint, TypeVar):
        return _list_kinds(hint.__bound__ if isinstance(hint.__bound__, type) else Any)
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _list_kinds(part))
    kind: Any = get_origin(hint) or hint
    asked = isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
    return (hint if asked else Any,)  # a value can not be asked whether it is of other hints


def _fit(name: str, value: Any, kinds: tuple[Any, ...], argument: str) -> Any:
    """`value`, which messages call `name`, for `argument` or an entry of it."""
    origins = [get_origin(kind) or kind for kind in kinds]
    options = str in kinds and (Callable in origins or {*kinds} <= {str, NoneType})
    if Any in kinds or options or argument in _SAY_MORE:  # who reads a pattern knows what fits
        return value
    if argument == "device":
        return require_device(value)
    if isinstance(value, Tensor) and {float, Tensor} <= {*kinds}:
        return require_one_number(name, value)
    for kind, origin in zip(kinds, origins, strict=True):
        if _is_of(value, origin):
            return _fit_inside(name, value, kind, argument)
    if bool in kinds:  # "False" would be true
        if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
            return bool(value)
        kind = "a text" if isinstance(value, str) else f"of type {type(value).__name__}"
        raise ValueError(f"{name}={show(value)} is {kind}; take True or False")
    if isinstance(value, str) and float in kinds:
        raise TypeError(f"{name}={value!r} is text, as YAML reads 1e-3; it must be a number")
    shown = type(value).__name__ if {*kinds} <= {nn.Module, NoneType} else show(value)
    words = ", or ".join(dict.fromkeys(_describe(origin, argument) for origin in origins))
    number = {*origins} <= {int, tuple, NoneType}
    raise (ValueError if number else TypeError)(f"{name}={shown} must be {words}")


def _is_of(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is torch.dtype:
        return isinstance(value, torch.dtype) and value.is_floating_point
    if kind is tuple:
        return isinstance(value, tuple | list)
    if isinstance(value, str | bytes) or (isinstance(value, Tensor) and not value.ndim):
        return kind in (str, Tensor) and isinstance(value, kind)
    return isinstance(value, kind)


def _fit_inside(name: str, value: Any, kind: Any, argument: str) -> Any:
    """`value`, which is of this kind: its range, or the types of its entries."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is int:
        return require_positive(name, value, *_RANGES.get(argument, (1, LARGEST)))
    if kind is float:
        return require_number(name, value, argument == "tolerance")
    if argument == "path" and value is not None and not fspath(value):
        raise ValueError(f"{name}={value!r} is empty")
    if isinstance(value, Mapping) and len(inner) == 2:
        for key in value:
            if inner[0] in (int, str) and not _is_of(key, inner[0]):
                raise TypeError(f"{name}={show(value)} has a key {key!r}; take {inner[0].__name__}")
        kinds = _list_kinds(inner[1])
        return {key: _fit(f"{name}[{key!r}]", value[key], kinds, argument) for key in value}
    numbers = inner[:1] in ((int,), (float,)) and isinstance(value, Iterable)
    if not inner or not (numbers or isinstance(value, tuple | list)):
        return value
    if origin is tuple and inner[-1] is not ... and len(value) != len(inner):
        raise ValueError(f"{name}={show(value)} must be {len(inner)} numbers")
    kinds, given = _list_kinds(inner[0]), value
    if numbers:  # which may come from a generator without an end
        given = value.tolist() if isinstance(value, Tensor) and not value.is_meta else value
        given = list(islice(given, _MOST_NUMBERS + 1))
        if len(given) > _MOST_NUMBERS:
            raise ValueError(f"{name}={show(value)} has more than {_MOST_NUMBERS} entries")
    entries = [_fit(f"{name}[{n}]", each, kinds, argument) for n, each in enumerate(given)]
    if origin is Iterable and numbers:
        return list(dict.fromkeys(entries))
    return tuple(entries) if origin is tuple else value


def _describe(kind: Any, argument: str) -> str:
    if kind is int:
        return f"an integer of at least {_RANGES.get(argument, (1,))[0]}"
    name = kind.__name__
    return _WORDS.get(kind) or _WORDS.get(name) or f"a{'n' * (name[0] in 'AEIOU')} {name}"


def show(value: object) -> str:
    """A value in a message: what a tensor or a module is; the text of all else, up to a length."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    text = type(value).__name__ if isinstance(value, nn.Module) else repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


# ---- options and numbers -------------------------------------------------------------------------


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={show(value)} is unknown; there are {', '.join(choices)}")


def require_positive(name: str, value: Any, least: int = 1, most: int = LARGEST) -> int:
    """`value` as an integer of Python."""
    if not _is_of(value, int):
        raise ValueError(f"{name}={show(value)} must be an integer of at least {least}")
    if not least <= value <= most:
        bound = f"least {least}" if value < least else f"most {most}"
        raise ValueError(f"{name}={value} must be at {bound}")
    return int(value)


def require_number(name: str, value: Any, positive: bool) -> float:
    """`value` as a number of Python. A positive one may be infinite."""
    if not (value > 0 if positive else 0 <= value <= sys.float_info.max):
        bound = "positive" if positive else "finite and not negative"
        raise ValueError(f"{name}={value!r} must be {bound}")
    plain = type(value) is float or (type(value) is int and value < LARGEST)
    return value if plain else float(value)  # torch takes no int of more than 64 bits


def require_one_number(name: str, value: Tensor) -> Tensor:
    require_real(name, value)
    if value.numel() != 1:
        raise ValueError(f"{name}={value!r}: a Tensor {name} must be 1-element")
    if not 0 <= value < inf:
        raise ValueError(f"{name}={value!r} must be finite and not negative")
    return value


def require_device(value: Any) -> Any:
    if value is not None and not isinstance(value, torch.device):
        try:
            torch.empty(0, device=value)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            says = str(error).partition("\n")[0]
            raise ValueError(f"device={show(value)} cannot be used: {says}") from None
    return value


def require_real(name: str, value: Any, dimensions: int = 0) -> None:
    """Raises TypeError if `value` is no tensor of real floating point, ValueError if it has fewer
    dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}={show(value)} is no tensor; take torch.as_tensor")
    if not value.is_floating_point():
        raise TypeError(f"{name} has dtype {value.dtype}; it must be real floating point")
    if value.ndim < dimensions:
        shape = tuple(value.shape)
        raise ValueError(f"{name} has shape {shape}; it needs at least {dimensions} dimensions")


def require_finite(name: str, value: Tensor) -> None:
    """Raises TypeError for other than real floating point, ValueError for what is not finite."""
    require_real(name, value)
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device: it has no values, load them first")
    if unfit := int((~value.isfinite()).sum()):
        raise ValueError(f"{name} has {unfit} values that are not finite")


def require_keys(name: str, value: Any, *keys: str) -> None:
    if not isinstance(value, Mapping) or not all(key in value for key in keys):
        raise TypeError(f"{name}={show(value)} must be a dict with {' and '.join(keys)}")


def require_bounded(name: str, value: int, bound: int, formula: str) -> None:
    if value > bound:
        raise ValueError(
            f"{name}={value} is over the useful bound {formula} = {bound}: "
            f"pass {name}={bound} or less"
        )


# ---- models --------------------------------------------------------------------------------------


def require_values(model: nn.Module) -> None:
    """Raises ValueError if a parameter's values are not here."""
    for name, parameter in model.named_parameters():
        why = "is on meta; materialise it first (to_empty)" if parameter.is_meta else ""
        if hasattr(parameter, "full_tensor"):
            why = "is sharded (DTensor), which is not supported"
        if why:
            raise ValueError(f"model={type(model).__name__}: {name} {why}")


# ---- what a product is given ---------------------------------------------------------------------


def check_cores(structure: Structure, cores: Sequence[Tensor]) -> None:
    if not isinstance(structure, Structure):
        raise TypeError(f"structure={show(structure)} must be a Structure, such as layer.structure")
    if not isinstance(cores, Sized) or (isinstance(cores, Tensor) and not cores.ndim):
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
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"x has dtype {x.dtype}, the cores have {dtype}; cast one of them or use autocast"
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


def check_dense(
    weight: Tensor, bias: Tensor | None, shape: tuple[int, int], has_bias: bool
) -> None:
    """What a structured layer is to take over from a dense one, `(out_features, in_features)`."""
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; "
            f"it must be (out_features, in_features) = {shape}"
        )
    if bias is not None:
        if not has_bias:
            raise ValueError("bias is given, but the layer has none: make it with bias=True")
        check_bias(bias, shape[0], bias.device)
        require_finite("bias", bias)


def warn(text: str) -> None:
    """Warn, as of the line outside of structlin and torch that led here."""
    level, frame, ours = 1, sys._getframe(), ("structlin", "torch")
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
