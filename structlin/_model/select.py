"""Patterns: which of a model's linear layers an argument of `convert` means.

A pattern is a role ("ffn"), "branch-end", a glob over the whole dotted name ("*mlp*"), "re:" and a
regular expression that must match the whole name, or a function `(module, name) -> bool`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

from .blocks import find_ends
from .kinds import PROTECTED, ROLES
from .linears import Layer, find_loose_matrices

BRANCH_END = "branch-end"  # the last layer of a residual branch, as its name tells
Pattern = str | Callable[[nn.Module, str], bool]
Patterns = Pattern | Iterable[Pattern]


@dataclass(frozen=True)
class Rule:
    """One pattern of one argument, and the indices of the layers that it matches and means.

    A pattern of `include` or `overrides` that matches both heads, embeddings or routers and other
    layers means only the other layers. Everywhere else a rule means what it matches.
    """

    argument: str
    pattern: Pattern
    matches: frozenset[int]
    means: frozenset[int]

    def __str__(self) -> str:
        return f"{self.argument}: {describe_pattern(self.pattern)}"


def find_rules(
    argument: str, patterns: Patterns, layers: Sequence[Layer], model: nn.Module
) -> list[Rule]:
    """A rule for each pattern.

    Raises:
        TypeError: one is no pattern.
        ValueError: one matches no layer (the message says what would), or is no regular
            expression.
    """
    rules = []
    for pattern in list_patterns(argument, patterns):
        matches = _find_matches(pattern, layers)
        if not matches:
            hint = _suggest(pattern, layers, model)
            described = describe_pattern(pattern)
            raise ValueError(f"{argument}: {described} matches no linear layer{hint}")
        means = matches
        if argument in ("include", "overrides"):
            means = frozenset(n for n in matches if layers[n].role not in PROTECTED) or matches
        rules.append(Rule(argument, pattern, matches, means))
    return rules


def find_first(rules: Iterable[Rule], layer: int) -> Rule | None:
    """The first rule that means the layer of that index."""
    return next((rule for rule in rules if layer in rule.means), None)


def describe_pattern(pattern: Pattern) -> str:
    """Name a pattern in messages.

    >>> describe_pattern("*mlp*"), describe_pattern(lambda module, name: True)
    ("'*mlp*'", 'the function <lambda>')
    """
    if isinstance(pattern, str):
        return repr(pattern)
    return f"the function {getattr(pattern, '__name__', repr(pattern))}"


def list_patterns(argument: str, patterns: Patterns) -> list[Pattern]:
    is_one = isinstance(patterns, str | Tensor) or not isinstance(patterns, Iterable)
    is_one = is_one or callable(patterns)
    as_list: list[Pattern] = [patterns] if is_one else list(patterns)  # type: ignore
    for pattern in as_list:
        is_text = isinstance(pattern, str) and pattern != ""
        is_function = callable(pattern) and not isinstance(pattern, type | nn.Module)
        if not is_text and not is_function:
            raise TypeError(
                f"{argument}: {pattern!r} is no pattern: give a name, glob or role as text, "
                "or a function (module, name) -> bool"
            )
        if isinstance(pattern, str) and pattern.startswith("re:"):
            _check_expression(argument, pattern)
    return as_list


def _check_expression(argument: str, pattern: str) -> None:
    try:
        re.compile(pattern[3:])
    except re.error as error:
        raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from None


def _find_matches(pattern: Pattern, layers: Sequence[Layer]) -> frozenset[int]:
    if pattern == BRANCH_END:
        ends = {layer.names for layer in find_ends(layers)}
        return frozenset(n for n, layer in enumerate(layers) if layer.names in ends)
    return frozenset(n for n, layer in enumerate(layers) if _matches(pattern, layer))


def _matches(pattern: Pattern, layer: Layer) -> bool:
    if not isinstance(pattern, str):
        return any(pattern(layer.module, name) for name in layer.names)
    if pattern in ROLES:
        return layer.role == pattern
    return any(_matches_name(pattern, name) for name in layer.names)


def _matches_name(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return bool(re.fullmatch(pattern[3:], name))
    return fnmatchcase(name, pattern)


def _suggest(pattern: Pattern, layers: Sequence[Layer], model: nn.Module) -> str:
    """The end of the message about a pattern that matches nothing: why, or what would match."""
    names = [name for layer in layers for name in layer.names]
    if not isinstance(pattern, str):
        return f"; it was asked about {', '.join(map(repr, names[:3]))} and so on"
    if pattern == BRANCH_END:
        return ": ends are found by names such as c_proj, o_proj, fc2; name yours by a glob"
    loose = find_loose_matrices(model)
    if pattern in ROLES:
        roles = ", ".join(sorted({layer.role for layer in layers}))
        shown = ", ".join(map(str, loose[:3]))
        stays = f"; these parameters are no linear layers: {shown}" if loose else ""
        return f"; the roles in this model are {roles}{stays}"
    if any(_matches_name(pattern, matrices.name) for matrices in loose):
        shown = ", ".join(map(str, loose[:3]))
        return f": these are parameters, no linear layers, and stay dense: {shown}"
    if any(pattern == name for name, _ in model.named_modules(remove_duplicate=False)):
        return f": it is a container; its layers are {pattern + '.*'!r}"
    wider = f"*{pattern.strip('*')}*"
    if any(fnmatchcase(name, wider) for name in names):
        return f": a glob must match the whole name; did you mean {wider!r}?"
    meant = get_close_matches(pattern, [*ROLES, BRANCH_END], n=1)
    if meant:
        return f"; did you mean {meant[0]!r}?"
    return suggest_names(pattern, names)


def suggest_names(pattern: str, names: Sequence[str]) -> str:
    """The end of a message: which of `names` resemble a pattern that matches none.

    >>> suggest_names("*c_fx", ["h.0.mlp.c_fc", "lm_head"])
    "; the model has, for example, 'h.0.mlp.c_fc'"
    """
    close = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3) or names[:3]
    return f"; the model has, for example, {', '.join(map(repr, close))}"
