"""What stands on a command line: structures and numbers, as text. Nothing is evaluated."""

import argparse
import ast
import math
from dataclasses import MISSING, fields

from .._arguments import MAX_STEPS
from .._families import FAMILIES, Family, family

OPEN_SIZES = {"rank": 1, "blocks": 4}  # of a family whose size is chosen for each layer


def parse_structure(text: str, *, open_size: bool = False) -> Family:
    """The family that a text such as its repr names.

    Args:
        open_size: whether the size is chosen later, so that the name alone is enough.

    Raises:
        ValueError: it names no family, or not all that it needs.

    >>> parse_structure("BTT(rank=2)"), parse_structure("lowrank", open_size=True)
    (BTT(rank=2, cores=2), LowRank(rank=1))
    >>> parse_structure("Split(split=3, of=TT(rank=(4, 4), cores=3))").label
    '3 x TT(rank=(4, 4), cores=3)'
    """
    try:
        return _parse(ast.parse(text.strip(), mode="eval").body, open_size)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    except ValueError as error:
        raise ValueError(f"structure {text!r}: {error}") from None
    raise ValueError(f"structure {text!r} is not written like BTT(rank=1)")


def _parse(node: ast.expr, open_size: bool) -> Family:
    keywords = node.keywords if isinstance(node, ast.Call) else []
    name = node.func if isinstance(node, ast.Call) and not node.args else node
    if not isinstance(name, ast.Name) or any(each.arg is None for each in keywords):
        raise TypeError
    options = {str(each.arg): _parse_value(each.value, open_size) for each in keywords}
    cls = FAMILIES.get(name.id.lower())
    if open_size and cls is not None:
        needed = (f.name for f in fields(cls) if f.default is MISSING)
        options = {n: OPEN_SIZES[n] for n in needed if n in OPEN_SIZES} | options
    return family(name.id, **options)


def _parse_value(node: ast.expr, open_size: bool) -> object:
    if isinstance(node, ast.Call | ast.Name):
        return _parse(node, open_size)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise TypeError from None


def fraction(text: str) -> float:
    value = _to_float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction above 0 and at most 1")
    return value


def rate(text: str) -> float:
    value = _to_float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def steps(text: str) -> int:
    if natural(text) > MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_STEPS:,}")
    return int(text)


def natural(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 2^32 - 1")
    return int(text)
