"""Copies for a run of a model: of the model, which share its parameters alone, and of a batch.

`copy.deepcopy` would keep too little apart: for it a function is one thing, whatever its closure
holds; a weak proxy stands for the original; a lock, a tensor with a graph and many more it refuses.
So `Copier` walks as deepcopy does, by the same protocols (`__deepcopy__`, `__reduce_ex__`), and has
its own answer for these.
"""

import contextvars
import copyreg
import logging
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from .._torch import clone_lazily, is_of_c

SMALL = 2**14  # bytes of a tensor's memory that is copied at once, not only when it is written
_PLAIN_TYPES = {
    *(type(None), bool, int, float, complex, str, bytes, range, CodeType, type(...)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, re.Pattern),
}
# Code, handles of the process, and what is another one in each thread or context anyway.
_SHARED_KINDS = (
    *(type, ModuleType, property, staticmethod, classmethod),
    *(fx.Graph, torch.Stream, torch.Event),
    *(logging.Logger, contextvars.ContextVar, threading.local),
)
_CONTAINERS = (dict, OrderedDict, set)
# What every module has, such as its hooks. Most of these are empty, and no two modules share one.
_CONTAINERS_OF_MODULES = {
    name for name, value in vars(nn.Module()).items() if type(value) in _CONTAINERS
}
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class Copier:
    """Copies values with all that they hold, as `copy.deepcopy`; nothing that can change is shared.

    What one copier copies twice has one copy. Modules are copied without their parameters, which
    are shared, and their copies are in eval mode; `module.compile()` and torch.compile of a
    function are undone.

    Args:
        of_model: tensors that are views of one memory have copies that are views of one memory, so
            that all of it is copied, and parameters outside of modules are shared as well. Without
            it each tensor is copied by itself: a batch may be a small view of all data.
        lazily: whether large tensors have their memory in common with their copies until somebody
            writes into either (copy on write). The originals must be copies of a copier.
        own_gradients: whether parameters are others, with the same memory but gradients of their
            own.

    >>> scale = torch.ones(2)
    >>> batch = Copier().copy({"scale": scale, "again": [scale]})
    >>> batch["scale"] is scale, batch["scale"] is batch["again"][0]
    (False, True)
    """

    def __init__(
        self, *, of_model: bool = False, lazily: bool = False, own_gradients: bool = False
    ) -> None:
        self._of_model = of_model
        self._lazily = lazily
        self._own_gradients = own_gradients
        self._copies: dict[int, Any] = {}  # by the id of the original: what deepcopy calls its memo
        self._originals: list[Any] = []  # so that no other object gets one of these ids
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._weak_attributes: list[_WeakAttribute] = []

    def copy(self, value: Any) -> Any:
        """The copy of a value.

        Raises:
            NoCopyError: something in it has no copy.
        """
        copied = self._copy(value)
        self._copy_weak_attributes()
        return copied

    def copy_model(self, model: nn.Module) -> nn.Module:
        """The copy of a model, module by module: a path in `NoCopyError` is as one writes it."""
        modules = dict(model.named_modules())
        for module in modules.values():  # first empty, so that all that holds one finds its copy
            self._remember(module, object.__new__(type(module)))
        for name, module in modules.items():
            try:
                self._copy_module(module)
            except NoCopyError as refused:
                refused.add_step(f".{name}" if name else "")
                raise
        self._copy_weak_attributes()
        copied: nn.Module = self._copies[id(model)]
        return copied

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN_TYPES:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if kind in weakref.ProxyTypes or issubclass(kind, weakref.ref):
            return self._copy_weak(value)
        if issubclass(kind, _SHARED_KINDS) or _is_handle(kind):
            return value
        copied = self._copy_container(value, kind)
        if copied is None:
            copied = self._copy_of_torch(value)
        if copied is None:
            copied = self._copy_of_python(value, kind)
        if copied is None:
            copied = self._copy_object(value, kind)
        return self._remember(value, copied)

    def _remember(self, value: Any, copied: Any) -> Any:
        self._originals.append(value)
        return self._copies.setdefault(id(value), copied)

    # ---- containers and objects ------------------------------------------------------------------

    def _copy_container(self, value: Any, kind: type) -> Any:
        if kind is dict or kind is OrderedDict:
            copied: Any = self._remember(value, kind())
            self._copy_items(value.items(), copied)
        elif kind is list:
            copied = self._remember(value, [])
            copied += self._copy_each(value)
        elif kind is tuple:
            copied = tuple(self._copy_each(value))
            is_unchanged = all(new is old for new, old in zip(copied, value, strict=True))
            if is_unchanged:
                copied = value
        else:
            return None
        return copied

    def _copy_each(self, values: Iterable[Any]) -> Iterator[Any]:
        for place, value in enumerate(values):
            try:
                copied = self._copy(value)
            except NoCopyError as refused:
                refused.add_step(f"[{place}]")
                raise
            yield copied

    def _copy_items(self, items: Iterable[tuple[Any, Any]], copied: Any) -> None:
        for key, value in items:
            if type(value) in _PLAIN_TYPES and type(key) in _PLAIN_TYPES:
                copied[key] = value
                continue
            try:
                copied[self._copy(key)] = self._copy(value)
            except NoCopyError as refused:
                refused.add_step(f"[{key!r}]")
                raise

    def _copy_attributes(self, old: Mapping[str, Any], new: dict[str, Any]) -> None:
        for name, value in old.items():
            kind = type(value)
            if kind in _PLAIN_TYPES:
                new[name] = value
            elif kind in weakref.ProxyTypes or issubclass(kind, weakref.ref):
                self._weak_attributes.append(_WeakAttribute(new, name, value))
                new[name] = value  # until all else has its copy
            else:
                new[name] = self._copy_attribute(name, value)

    def _copy_attribute(self, name: str, value: Any) -> Any:
        try:
            return self._copy(value)
        except NoCopyError as refused:
            refused.add_step(f".{name}")
            raise

    def _copy_object(self, value: Any, kind: type) -> Any:
        """By the protocols of `copy.deepcopy`."""
        try:
            if hasattr(kind, "__deepcopy__"):
                return value.__deepcopy__(self._copies)
            reduce = copyreg.dispatch_table.get(kind)
            reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:
            raise NoCopyError(value, error) from error
        if isinstance(reduced, str):  # the name of something global
            return value
        self._originals.append(reduced)
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        try:
            copied = make(*self._copy_each(arguments))
        except NoCopyError:
            raise
        except Exception as error:
            raise NoCopyError(value, error) from error
        self._remember(value, copied)
        if state is not None:
            self._set_state(copied, state)
        if items is not None:
            for item in self._copy_each(items):
                copied.append(item)
        if pairs is not None:
            self._copy_items(pairs, copied)
        return copied

    def _set_state(self, copied: Any, state: Any) -> None:
        if hasattr(copied, "__setstate__"):
            copied.__setstate__(self._copy(state))
            return
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if attributes:
            self._copy_attributes(attributes, vars(copied))
        for name, value in (slots or {}).items():
            setattr(copied, name, self._copy_attribute(name, value))

    # ---- what deepcopy takes for one thing, or refuses -------------------------------------------

    def _copy_of_python(self, value: Any, kind: type) -> Any:
        if kind is MethodType:
            owner = self._copy(value.__self__)
            of_class = getattr(type(value.__self__), value.__name__, None) is value.__func__
            return MethodType(value.__func__ if of_class else self._copy(value.__func__), owner)
        if kind is FunctionType:
            return self._copy_function(value)
        if kind is CellType:
            cell = self._remember(value, CellType())
            try:
                contents = value.cell_contents
            except ValueError:  # it is empty
                return cell
            cell.cell_contents = self._copy(contents)
            return cell
        if kind is BuiltinFunctionType:
            if value.__self__ is None or isinstance(value.__self__, ModuleType):
                return value
            return getattr(self._copy(value.__self__), value.__name__)  # such as some_list.append
        if kind in _LOCKS:
            return _LOCKS[kind]()
        if kind.__name__ == "ndarray" and isinstance(value.base, Tensor):  # by tensor.numpy()
            array = self._copy(value.base).numpy()
            return array if array.shape == value.shape else None
        return None

    def _copy_function(self, function: Any) -> Any:
        """The same function, or one with a closure, defaults and attributes of its own."""
        if hasattr(function, "_torchdynamo_orig_callable"):
            return self._copy(function._torchdynamo_orig_callable)
        attributes = vars(function)
        values = (function.__closure__, function.__defaults__, function.__kwdefaults__, attributes)
        if not any(values) or _is_global(function):
            return function
        closure = function.__closure__
        if closure:
            closure = tuple(self._copy(cell) for cell in closure)
        copied = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, closure
        )
        self._remember(function, copied)
        copied.__defaults__ = self._copy(function.__defaults__)
        copied.__kwdefaults__ = self._copy(function.__kwdefaults__)
        copied.__qualname__ = function.__qualname__
        copied.__module__ = function.__module__
        self._copy_attributes(attributes, vars(copied))
        return copied

    def _copy_weak_attributes(self) -> None:
        """Last: who refers to something weakly does not own it, so what nobody else in the model
        holds is not copied."""
        while self._weak_attributes:
            attributes, name, reference = self._weak_attributes.pop()
            attributes[name] = self._copy_weak(reference)

    def _copy_weak(self, reference: Any) -> Any:
        """To the copy of what it refers to, if there is one by now."""
        if type(reference) in weakref.ProxyTypes:
            try:
                target = reference.__repr__.__self__  # what the proxy stands for
            except ReferenceError:  # it is dead
                return reference
            return weakref.proxy(self._copies[id(target)]) if self._has(target) else reference
        target = reference()
        if type(reference) is weakref.WeakMethod and self._has(getattr(target, "__self__", None)):
            return weakref.WeakMethod(self._copy(target))
        if type(reference) is weakref.ref and self._has(target):
            return weakref.ref(self._copies[id(target)])
        return reference

    def _has(self, value: Any) -> bool:
        return id(value) in self._copies

    # ---- tensors and modules ---------------------------------------------------------------------

    def _copy_of_torch(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if is_lazy(value):
                return value
            if self._of_model and isinstance(value, nn.Parameter):
                return self._share_parameter(value)
            return self._copy_tensor(value)
        if isinstance(value, nn.Module):
            copied = self._remember(value, object.__new__(type(value)))
            self._copy_module(value)
            return copied
        if isinstance(value, torch.Generator):
            return value.clone_state()
        return None

    def _copy_module(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                self._remember(parameter, self._share_parameter(parameter))
        attributes = vars(self._copies[id(module)])
        compiled = {"_compiled_call_impl": None}
        others = {}
        for name, value in {**vars(module), **compiled}.items():
            kind = type(value)
            if name in _CONTAINERS_OF_MODULES and kind in _CONTAINERS and not value:
                attributes[name] = kind()  # which nobody will look for: it is not remembered
            else:
                others[name] = value
        self._copy_attributes(others, attributes)
        attributes["training"] = False

    def _share_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if not self._own_gradients or is_lazy(parameter):
            return parameter
        return nn.Parameter(parameter.detach(), parameter.requires_grad)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor without a graph, with the attributes that somebody has set on it."""
        with torch.no_grad():
            if not self._of_model or not _is_plain(tensor):
                copied = tensor.detach().clone()
            else:
                storage = self._copy_storage(tensor.untyped_storage())
                copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                copied.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if attributes := vars(tensor):
            self._copy_attributes(attributes, vars(copied))
        return copied

    def _copy_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = storage._cdata
        if key not in self._storages:
            self._originals.append(storage)
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            large = storage.nbytes() > SMALL and storage.device.type in ("cpu", "cuda")
            copied = clone_lazily(whole) if large and self._lazily else whole.clone()
            self._storages[key] = copied.untyped_storage()
        return self._storages[key]


def _is_handle(kind: type) -> bool:
    """Whether it is a class of torch's C++, such as a group of processes: no copy of it works."""
    if issubclass(kind, Tensor | torch.Generator):
        return False
    return is_of_c(kind)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its shape, strides and dtype say all of how it reads its memory."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


class _WeakAttribute(NamedTuple):
    attributes: dict[str, Any]
    name: str
    reference: Any


class NoCopyError(TypeError):
    """Something that has no copy; `path` leads to it, from what was to be copied."""

    def __init__(self, value: Any, error: Exception) -> None:
        super().__init__(f"a {type(value).__name__} cannot be copied ({error})")
        self.path = ""

    def add_step(self, step: str) -> None:
        """The value is at this place of what holds it."""
        self.path = step + self.path


def _is_global(function: FunctionType) -> bool:
    """Whether it is found by its name: code, and no model's own."""
    value: Any = sys.modules.get(function.__module__ or "")
    for name in function.__qualname__.split("."):
        value = getattr(value, name, None)
    return value is function


class Replica:
    """A copy of a model in eval mode, that shares the parameters alone.

    Its attributes, buffers and hooks are its own, with all that they hold: what a run leaves there
    (a skip connection in an attribute, a scale in a buffer, a mask in an object or in a function's
    closure) no other run sees. What a model keeps in globals or on its classes is not copied.

    Raises:
        TypeError: something that the model holds cannot be copied; the message names its path.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> replica = Replica(model)
    >>> replica[model[0]].weight is model[0].weight, replica[model[1]].training
    (True, False)
    """

    def __init__(
        self, model: nn.Module, before: "Replica | None" = None, *, own_gradients: bool = False
    ) -> None:
        """`before`: the replica that has `model`. `own_gradients`: see `Copier`."""
        self._before = before
        lazily = before is not None
        self._copier = Copier(of_model=True, lazily=lazily, own_gradients=own_gradients)
        try:
            self.model: nn.Module = self._copier.copy_model(model)
        except NoCopyError as refused:
            raise _explain(refused) from refused

    def __getitem__(self, module: nn.Module) -> nn.Module:
        """The copy of a module of the model."""
        copied: nn.Module = self.copy(module if self._before is None else self._before[module])
        return copied

    def copy(self, value: Any) -> Any:
        """The copy of what a module that was copied has."""
        try:
            return self._copier.copy(value)
        except NoCopyError as refused:
            raise _explain(refused) from refused

    def replicate(
        self, module: nn.Module | None = None, *, own_gradients: bool = False
    ) -> "Replica":
        """A replica of this one as it is now, or of what it has for a module of the model.

        Both have the memory of large tensors in common until one of them writes.
        """
        model = self.model if module is None else self[module]
        return Replica(model, before=self, own_gradients=own_gradients)


def _explain(refused: NoCopyError) -> TypeError:
    return TypeError(
        f"model{refused.path}: {refused}, so that runs of the model on the batches would share it; "
        "set it to None until compress is done, or give its class a __deepcopy__"
    )
