"""The checks of arguments: each refuses one by its name and value, before anything is computed. No
torch here.

The signature of a function says of which types its arguments are, and `checked` holds callers to
it: a wrong type is a TypeError, a wrong value a ValueError. An int is a count, from 1 to `LARGEST`;
a float is finite and not negative. An argument of another range says so where it stands,

    cores: Annotated[int, Range(2, 52)]

and one that needs a check of its own names a function of the argument's name and value, which
returns the value or raises:

    lr: Annotated[float | Tensor, CheckedBy(check_rate)]
"""

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from inspect import Parameter, signature
from itertools import chain, islice
from numbers import Integral, Real
from types import FrameType, NoneType, UnionType
from typing import Annotated, Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

Checked = TypeVar("Checked", bound=Callable[..., Any])

LARGEST = 2**40  # a count: nobody has so much memory or time
MAX_STEPS = 10**6  # of refinement, distillation and sweeps, which take hundreds
MOST_NUMBERS = 10_000  # of one argument, such as widths, rates or seeds
_WORDS = {  # for the names of types
    "Callable": "a function",
    "Iterable": "an iterable",
    "Mapping": "a mapping",
    "Sequence": "a list",
    "NoneType": "None",
    "str": "a text",
    "Module": "a torch.nn.Module",
    "Optimizer": "a torch optimizer",
    "Family": "a family such as BTT(rank=1)",
}


@dataclass(frozen=True)
class Range:
    """The integers from `least` to `most`, both included."""

    least: int
    most: int


@dataclass(frozen=True)
class CheckedBy:
    """What alone checks an argument: a function of its name and value."""

    check: "Check"

    def __repr__(self) -> str:  # for `help`
        return f"CheckedBy({self.check.__name__})"


Check = Callable[[str, Any], Any]  # of an argument's name and value: the value, or an error
COUNT = Range(1, LARGEST)
ANY_INTEGER = Range(-(2**63), 2**63 - 1)


# ---- a function is held to its signature ---------------------------------------------------------


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
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in by_position]

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if _is_compiling():
            return function(*args, **options)
        checks = read_checks(function)
        arguments = list(args)
        for n, name in enumerate(names[: len(args)]):
            if name in checks:
                arguments[n] = checks[name](name, args[n])
        for name, value in options.items():
            if name in checks:
                options[name] = checks[name](name, value)
        return function(*arguments, **options)

    return call  # type: ignore[return-value]


def _is_compiling() -> bool:
    """Whether torch.compile traces this call: a graph needs no checks."""
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and compiler.is_compiling()


def fit(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are arguments of `function`, checked."""
    checks = read_checks(function)
    return {name: checks[name](name, values[name]) for name in values if name in checks}


@cache
def read_checks(function: Callable[..., Any]) -> dict[str, Check]:
    """The check of each argument that has a hint. It is read at the first call: by then the classes
    that the hints name are there."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # of a user's own family, which only a type checker understands
        return {}
    return {name: read_check(hint) for name, hint in hints.items() if name != "return"}


def read_check(hint: Any) -> Check:
    """What a type hint asks of a value."""
    note = hint.__metadata__[0] if get_origin(hint) is Annotated else None
    if isinstance(note, CheckedBy):
        return note.check
    kinds = list_kinds(hint)
    types = {kind.type for kind in kinds}
    # A text is one of a few choices, or a pattern. The function itself says which there are.
    is_choice = str in types and (types <= {str, NoneType} or Callable in types)
    if is_choice or object in types:
        return _take
    return OneOf(kinds)


def _take(name: str, value: Any) -> Any:
    """The check of an argument that may have any value."""
    return value


# ---- the types that a value may have -------------------------------------------------------------


class OneOf:
    """A value of one of these types."""

    def __init__(self, kinds: Sequence["Kind"]) -> None:
        self.kinds = kinds
        # a value of one of these is right as it is
        self.plain = tuple(kind.type for kind in kinds if type(kind) in (Kind, Flag))

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, self.plain):
            return value
        for kind in self.kinds:
            if kind.holds(value):
                return kind.check(name, value)
        raise TypeError(f"{name}={show(value)} {self._refuse(value)}")

    def _refuse(self, value: Any) -> str:
        types = [kind.type for kind in self.kinds]
        if bool in types:  # "False" would be true
            what = "a text" if isinstance(value, str) else f"of type {type(value).__name__}"
            return f"is {what}; take True or False"
        if float in types and isinstance(value, str):
            return "is text, as YAML reads 1e-3; it must be a number"
        words = dict.fromkeys(kind.words for kind in self.kinds)
        return f"must be {', or '.join(words)}"


@dataclass(frozen=True)
class Kind:
    """A type whose values are right as they are."""

    type: Any

    @property
    def words(self) -> str:
        """The type, in a message."""
        name = self.type.__name__
        article = "an" if name[0] in "AEIOU" else "a"
        return _WORDS.get(name, f"{article} {name}")

    def holds(self, value: Any) -> bool:
        """Whether `value` is of this type."""
        return isinstance(value, self.type)

    def check(self, name: str, value: Any) -> Any:
        """`value`, which is of this type; raises ValueError if it is out of range."""
        return value


class Flag(Kind):
    """True or False, of NumPy too."""

    def holds(self, value: Any) -> bool:
        return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")

    def check(self, name: str, value: Any) -> bool:
        return bool(value)


@dataclass(frozen=True)
class Integer(Kind):
    """An integer, of NumPy too."""

    bounds: Range

    @property
    def words(self) -> str:
        return f"an integer of at least {self.bounds.least}"

    def holds(self, value: Any) -> bool:
        return _is_integer(value)

    def check(self, name: str, value: Any) -> int:
        return require_integer(name, value, self.bounds)


class Number(Kind):
    """A number that is finite and not negative."""

    words = "a number"

    def holds(self, value: Any) -> bool:
        is_real = type(value) is float or isinstance(value, Real)  # the first is fast
        return is_real and not isinstance(value, bool)

    def check(self, name: str, value: Any) -> float:
        if type(value) not in (float, int):  # such as NumPy's, which may overflow in a comparison
            value = float(value)
        if not 0 <= value <= sys.float_info.max:
            raise ValueError(f"{name}={value!r} must be finite and not negative")
        is_plain = type(value) is float or (type(value) is int and value < LARGEST)
        return value if is_plain else float(value)  # torch takes no int of more than 64 bits


class Container(Kind):
    """A collection whose entries nobody looks at. Neither a text is one, nor what has no dimension,
    such as a 0-D tensor."""

    def holds(self, value: Any) -> bool:
        if isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0:
            return False
        types = (tuple, list) if self.type is tuple else self.type
        return isinstance(value, types)


@dataclass(frozen=True)
class Entries(Container):
    """A collection of checked entries: numbers of any iterable, others of a tuple or list."""

    check_entry: Check
    are_numbers: bool
    length: int | None  #: None: any

    def check(self, name: str, value: Any) -> Any:
        if not self.are_numbers and not isinstance(value, tuple | list):
            return value
        entries = _read_numbers(name, value) if self.are_numbers else value
        if self.length not in (None, len(entries)):
            raise ValueError(f"{name}={show(value)} must be {self.length} numbers")
        checked_entries = [self.check_entry(f"{name}[{n}]", x) for n, x in enumerate(entries)]
        return tuple(checked_entries) if self.type is tuple else checked_entries


@dataclass(frozen=True)
class Pairs(Container):
    """A mapping whose keys and values are checked."""

    key: Any
    check_value: Check

    def check(self, name: str, value: Any) -> dict[Any, Any]:
        for key in value:
            is_right = _is_integer(key) if self.key is int else isinstance(key, self.key)
            if not is_right:
                take = self.key.__name__
                raise TypeError(f"{name}={show(value)} has a key {key!r}; take {take}")
        return {key: self.check_value(f"{name}[{key!r}]", value[key]) for key in value}


def list_kinds(hint: Any) -> list[Kind]:
    """The types of a hint, `object` where a value cannot be asked whether it is of one."""
    if isinstance(hint, NewType):
        return list_kinds(hint.__supertype__)
    if isinstance(hint, TypeVar):
        return list_kinds(hint.__bound__ if isinstance(hint.__bound__, type) else object)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [*chain.from_iterable(map(list_kinds, get_args(hint)))]
    if origin is Annotated and isinstance(hint.__metadata__[0], Range):
        return [Integer(int, hint.__metadata__[0])]
    if origin is Annotated:
        return list_kinds(hint.__origin__)
    kind = origin or hint
    if hint is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return [Kind(object)]
    if kind is int:
        return [Integer(int, COUNT)]
    if kind is float:
        return [Number(float)]
    if kind is bool:
        return [Flag(bool)]
    if kind.__module__ == "collections.abc" or kind is tuple:
        return [_read_container(kind, get_args(hint))]
    return [Kind(kind)]


def _read_container(kind: Any, inner: Sequence[Any]) -> Kind:
    """A collection, from the type and what stands in its brackets."""
    if not inner or kind is Callable:
        return Container(kind)
    if issubclass(kind, Mapping):
        key, value = inner
        return Pairs(kind, object if key is Any else key, read_check(value))
    check = read_check(inner[0])
    if check is _take:
        return Container(kind)
    are_numbers = list_kinds(inner[0])[0].type in (int, float)
    has_length = kind is tuple and inner[-1] is not ...
    return Entries(kind, check, are_numbers, len(inner) if has_length else None)


def _is_integer(value: Any) -> bool:
    # the first question is the fast one, of Python's own type
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _read_numbers(name: str, values: Any) -> list[Any]:
    """The entries of a sequence, array or generator, which may have no end."""
    if hasattr(values, "tolist") and not getattr(values, "is_meta", False):
        values = values.tolist()
    numbers = list(islice(values, MOST_NUMBERS + 1))
    if len(numbers) > MOST_NUMBERS:
        raise ValueError(f"{name}={show(values)} has more than {MOST_NUMBERS} entries")
    return numbers


def show(value: object) -> str:
    """A value in a message: what an array or tensor is; the text of all else, up to a length, or
    its type where that text has several lines."""
    if getattr(value, "ndim", 0) and hasattr(value, "dtype"):
        kind = type(value).__name__.lower()
        shape = tuple(value.shape)  # type: ignore[attr-defined]
        return f"a {kind} of {value.dtype} and shape {shape}"
    text = repr(value)
    if "\n" in text:
        return type(value).__name__
    return text if len(text) < 200 else f"{text[:200]}..."


# ---- one argument --------------------------------------------------------------------------------


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raises TypeError if `value` is no text, ValueError if it is none of the choices."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={show(value)} must be a text: {', '.join(choices)}")
    if value not in choices:
        raise ValueError(f"{name}={show(value)} is unknown; there are {', '.join(choices)}")


def require_integer(name: str, value: Any, bounds: Range = COUNT) -> int:
    """`value` as an integer of Python."""
    if not _is_integer(value):
        raise TypeError(f"{name}={show(value)} must be an integer of at least {bounds.least}")
    if value < bounds.least:
        raise ValueError(f"{name}={value} must be at least {bounds.least}")
    if value > bounds.most:
        raise ValueError(f"{name}={value} must be at most {bounds.most}")
    return int(value)


def require_keys(name: str, value: Any, *keys: str) -> None:
    if not isinstance(value, Mapping) or not all(key in value for key in keys):
        raise TypeError(f"{name}={show(value)} must be a dict with {' and '.join(keys)}")


def require_bounded(name: str, value: int, bound: int, formula: str) -> None:
    if value > bound:
        raise ValueError(
            f"{name}={value} is over the useful bound {formula} = {bound}: "
            f"pass {name}={bound} or less"
        )


def warn(text: str) -> None:
    """Warn, as of the line outside of structlin and torch that led here."""
    level = 1
    frame = sys._getframe()
    while frame.f_back and _is_inside(frame):
        frame = frame.f_back
        level += 1
    warnings.warn(text, UserWarning, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in ("structlin", "torch")
