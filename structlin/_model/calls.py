"""A call of a model: how it is run, and the tensors in what it returns."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn


class NamedTensor(NamedTuple):
    """A tensor in what a model returns, and the keys that lead to it, joined by dots."""

    name: str
    tensor: Tensor


def find_tensors(output: Any, name: str = "") -> Iterator[NamedTensor]:
    """Each floating tensor in mappings, sequences and dataclasses, in order; a tensor alone has the
    empty name.

    >>> import torch
    >>> [name for name, _ in find_tensors({"logits": torch.ones(2), "states": (torch.ones(2),)})]
    ['logits', 'states.0']
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield NamedTensor(name, output)
        return
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        entries = output.items()
    elif isinstance(output, tuple | list):
        entries = enumerate(output)
    elif is_dataclass(output) and not isinstance(output, type):
        entries = ((each.name, getattr(output, each.name)) for each in fields(output))
    for key, entry in entries:
        yield from find_tensors(entry, f"{name}.{key}" if name else str(key))


def first_tensor(output: Any) -> Tensor | None:
    """The first floating tensor of `find_tensors`: the hidden states, or the logits; None without
    one."""
    return next((tensor for _, tensor in find_tensors(output)), None)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module of `model` in eval mode; afterwards, also on an error, each in its own mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class Arguments(NamedTuple):
    """What a model is called with."""

    positional: tuple[Any, ...]
    keyword: dict[str, Any]


def split_batch(batch: Any) -> Arguments:
    """A call's arguments: a mapping is keywords, a tuple or list positions, else one argument."""
    if isinstance(batch, Mapping):
        return Arguments((), {**batch})
    positional = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return Arguments(positional, {})
