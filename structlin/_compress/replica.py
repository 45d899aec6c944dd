"""A copy of a model to run: it computes by the model's own parameters, and leaves nothing in it."""

from collections import deque
from collections.abc import Collection
from copy import copy
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

SMALL = 2**12  # numbers of a tensor that is always copied: no version tells of a write to `.data`


class Replica:
    """A copy of a model in eval mode, that shares the parameters alone.

    Its attributes, buffers and hooks are its own, and so are lists, dicts and objects of the
    model's own code in them: what a run leaves there (a skip connection in an attribute, a scale in
    a buffer, a mask for the last length, a list of features) no other run sees. Modules that
    `module.compile()` has compiled are run by their Python.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> replica = Replica(model)
    >>> replica[model[0]].weight is model[0].weight, replica[model[1]].training
    (True, False)
    """

    def __init__(self, model: nn.Module, written: Collection[int] | None = None) -> None:
        """`written`: the `id` of large tensors that runs write into; others are shared. None: it is
        not known, so that all are copied."""
        modules = [*model.modules()]
        self._written, self._files = written, {type(module).__module__ for module in modules}
        self._tensors: list[tuple[int, Tensor, int]] = []  # original, copy, version
        # first the modules, empty: functions and lists that hold one are to find its copy
        self._copies: dict[int, Any] = {id(each): _make_empty(each) for each in modules}
        for module in modules:
            self._fill(module)
        self.model: nn.Module = self._copies[id(model)]

    def __getitem__(self, module: nn.Module) -> nn.Module:
        """The copy of a module of the model."""
        found: nn.Module = self._copies[id(module)]
        return found

    def copy(self, value: Any) -> Any:
        """The copy of what a module of the model has, or the value itself if it holds nothing that
        a run could change."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        made: Any = value
        if isinstance(value, Tensor):
            made = self._copies[id(value)] = self._copy_tensor(value)
        elif isinstance(value, dict):
            made = self._copies[id(value)] = copy(value)
            for key, each in value.items():
                made[key] = self.copy(each)
        elif isinstance(value, list | deque):
            made = self._copies[id(value)] = copy(value)
            made.clear()
            made.extend(map(self.copy, value))
        elif type(value) is tuple:
            made = tuple(map(self.copy, value))
        elif isinstance(value, MethodType):
            made = MethodType(value.__func__, self.copy(value.__self__))
        elif isinstance(value, partial):
            made = partial(self.copy(value.func), *map(self.copy, value.args), **value.keywords)
        elif isinstance(value, FunctionType):
            made = self._copy_function(value)
        elif isinstance(value, nn.Module) or self._is_of_the_model(value):
            made = self._copies[id(value)] = _make_empty(value)
            self._fill(value)
        return made

    def find_written(self) -> set[int]:
        """The `id` of the tensors whose copies have been written into."""
        return {key for key, tensor, version in self._tensors if tensor._version != version}

    def _fill(self, value: Any) -> None:
        own = vars(self._copies[id(value)])
        own.update((name, self.copy(each)) for name, each in vars(value).items())
        if isinstance(value, nn.Module):
            own |= {"training": False, "_compiled_call_impl": None}

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        shared = self._written is not None and id(tensor) not in self._written
        if isinstance(tensor, nn.Parameter) or is_lazy(tensor):
            return tensor
        if shared and tensor.numel() > SMALL:
            return tensor
        with torch.no_grad():
            made = tensor.detach().clone()
        self._tensors.append((id(tensor), made, made._version))
        return made

    def _copy_function(self, function: FunctionType) -> FunctionType:
        """The same function, or one that holds copies of the modules that it holds."""
        cells = tuple(map(self._copy_cell, function.__closure__ or ()))
        if all(map(is_, cells, function.__closure__ or ())):
            return function
        code, name, defaults = function.__code__, function.__name__, function.__defaults__
        made = FunctionType(code, function.__globals__, name, defaults, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def _copy_cell(self, cell: CellType) -> CellType:
        try:
            held = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        known = isinstance(held, nn.Module) and id(held) in self._copies
        return CellType(self._copies[id(held)]) if known else cell

    def _is_of_the_model(self, value: Any) -> bool:
        """Whether it is an object of the model's own code, that has attributes."""
        kind = type(value)
        plain = object.__dict__["__new__"] is kind.__new__  # not one of an Enum's, which are single
        return kind is SimpleNamespace or (plain and kind.__module__ in self._files)


def _make_empty(value: Any) -> Any:
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace()
    return object.__new__(type(value))
