"""What a model keeps outside of what it returns: attributes and buffers that a run of it changes.

Examples are a skip connection in an attribute, a scale in a buffer, a mask for the last length and
a list of features. Runs that take turns must not see each other's.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

SMALL = 2**12  # numbers of a tensor that are compared: torch's version tells no write to `.data`
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module


class Changes(NamedTuple):
    """What a run has changed."""

    stores: list[tuple[Any, Any]]  #: each with its content
    tensors: list[tuple[int, Tensor]]  #: which one, and its values


class Kept:
    """The attributes and buffers of a model's modules, and lists, dicts and objects of the model's
    own code in them, as they are when it is made.

    Tensors among them are copied, since a run can write into them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._stores: list[tuple[Any, Any]] = []  # each with its content
        self._tensors: list[Tensor] = []
        self._find(model)
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._versions = [tensor._version for tensor in self._tensors]

    def _find(self, model: nn.Module) -> None:
        todo: list[Any] = [*model.modules()]
        files, seen = {type(module).__module__ for module in todo}, set[int]()
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                self._tensors += [value] * _can_be_copied(value)
            elif isinstance(value, nn.Module):
                self._add(vars(value))
                todo += [each for name, each in vars(value).items() if name not in _OF_TORCH]
                todo.append(value._buffers)
            elif isinstance(value, dict | list | deque):
                self._add(value)
                todo += value.values() if isinstance(value, dict) else value
            elif isinstance(value, tuple):
                todo += value
            elif isinstance(value, SimpleNamespace) or type(value).__module__ in files:
                todo.append(getattr(value, "__dict__", None))

    def _add(self, store: Any) -> None:
        self._stores.append((store, _copy(store)))

    @torch.no_grad()
    def take(self) -> Changes:
        """What is no longer as it was; it is put back."""
        stores = [pair for pair in self._stores if _differ(*pair)]
        changed = [
            n
            for n, (x, version) in enumerate(zip(self._tensors, self._versions, strict=True))
            if x._version != version or (x.numel() <= SMALL and not torch.equal(x, self._values[n]))
        ]
        found = Changes(
            [(store, _copy(store)) for store, _ in stores],
            [(n, self._tensors[n].detach().clone()) for n in changed],
        )
        self.put(Changes(stores, [(n, self._values[n]) for n in changed]))
        for n in changed:
            self._versions[n] = self._tensors[n]._version
        return found

    @torch.no_grad()
    def put(self, changes: Changes) -> None:
        """Change what a run has changed."""
        for store, content in changes.stores:
            store.clear()
            if isinstance(store, dict):
                for key, value in content.items():  # some dicts refuse `update`
                    store[key] = value
            else:
                store.extend(content)
        for n, values in changes.tensors:
            self._tensors[n].copy_(values)


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Afterwards the model keeps what it kept before."""
    kept = Kept(model)
    try:
        yield
    finally:
        kept.take()


def _copy(store: Any) -> Any:
    return dict(store) if isinstance(store, dict) else list(store)


def _differ(store: Any, content: Any) -> bool:
    if len(store) != len(content) or not all(map(is_, store, content)):
        return True
    return isinstance(store, dict) and not all(map(is_, store.values(), content.values()))


def _can_be_copied(tensor: Tensor) -> bool:
    """Whether a run can write into it, which torch then tells, and its values can be put back."""
    if isinstance(tensor, nn.Parameter) or is_lazy(tensor) or tensor.is_inference():
        return False
    if tensor.layout is not torch.strided:
        return False
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return not any(step == 0 and size > 1 for step, size in axes)  # expanded
