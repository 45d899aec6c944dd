"""The memory of runs that wait: what is over a bound lies in a temporary file.

The tensors of a waiting run stay where they are, in the frames and attributes of the model. Their
storages alone are emptied, and filled again before the run goes on. A storage that is empty must
not be read, so a tensor is fetched before any function of torch gets it: a model may have kept one
in a global, where other runs find it.

Two reads are not seen: they crash, or find other numbers.

- TorchScript or an extension of torch reads a global tensor that another run has made.
- Somebody reads what shares memory with a tensor since `torch.utils.dlpack.to_dlpack`;
  `torch.from_dlpack` is seen.

A `TorchDispatchMode` would see TorchScript on a CPU alone. With it a transformer layer of width 256
takes 15 % longer for 512 tokens.
"""

import ctypes
import errno
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import IO, Any
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._model.transaction import Step, complete
from .._torch import (
    find_freer_of_buffers,
    is_compiler_loaded,
    keep_stance,
    without_torch_functions,
)

SMALL = 2**16  # bytes of a storage that stays in memory always
GIGABYTE = 1e9
TRIM_BYTES = 2**28  # of runs that stop, until the allocator is asked again for what is free
# functions that hand out the memory of a tensor to others, who may read it at any time
LENDING = {"data_ptr", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__"}
# functions and attributes that tell of a tensor, and read none of its bytes
DESCRIBING = {
    *("shape", "dtype", "device", "ndim", "requires_grad", "_version"),
    *("size", "dim", "numel", "__len__", "is_inference", "is_floating_point"),
}


def _find_malloc_trim() -> Callable[[int], int] | None:
    """glibc's function; other libraries of C have none."""
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return function


MALLOC_TRIM = _find_malloc_trim()


@dataclass(eq=False)
class _Slot:
    """Where the bytes of a storage lie in the file: free for others when nobody has the slot."""

    offset: int
    nbytes: int
    is_away: bool = False  #: whether the file alone has them


class Memory:
    """The activations of all runs that wait, at most so many gigabytes of them in memory.

    Args:
        gigabytes: 1e9 bytes each; None: no bound, and nothing is written.
    """

    def __init__(self, gigabytes: float | None) -> None:
        self.gigabytes = gigabytes
        self.held = 0  # bytes in memory, of the runs that wait
        self._file: IO[bytes] | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}  # size -> offsets where no slot is
        self._slots: WeakKeyDictionary[torch.UntypedStorage, _Slot] = WeakKeyDictionary()
        self._untrimmed = 0  # bytes of runs that stopped since then

    @property
    def is_full(self) -> bool:
        return self.gigabytes is not None and self.held > self.gigabytes * GIGABYTE

    def leave_uncompiled(self, at_end: list[Step]) -> None:
        """Let what torch.compile has made run as it is written, until the last step of `at_end`:
        compiled code neither fetches what it reads, nor tells what it makes."""
        if self.gigabytes is not None and is_compiler_loaded():
            at_end.append(keep_stance())
            torch.compiler.set_stance("force_eager")

    def close(self) -> None:
        """Remove the file, and give back what is free."""
        if self._file is not None:
            self._file.close()
        self.note_use(TRIM_BYTES)

    def note_use(self, nbytes: int) -> None:
        """A run has stopped with so many bytes. Now and then what is free goes back to the system:
        glibc keeps what many threads have freed."""
        self._untrimmed += nbytes
        if self._untrimmed >= TRIM_BYTES and self.gigabytes is not None and MALLOC_TRIM is not None:
            MALLOC_TRIM(0)
            self._untrimmed = 0

    # ---- one storage -----------------------------------------------------------------------------

    def send_away(self, storage: torch.UntypedStorage) -> None:
        """Write a storage into the file, and empty it."""
        slot = self._slots.get(storage)
        if slot is None:
            slot = self._take_slot(storage.nbytes())
            self._slots[storage] = slot
        self._write(storage, slot)
        self._empty(storage, slot)

    def fetch(self, storage: torch.UntypedStorage) -> None:
        """Let a storage have its bytes again, if it is away, and forget those in the file."""
        slot = self._slots.get(storage)
        if slot is None:
            return
        self._fill(storage, slot)
        del self._slots[storage]

    def fetch_for(self, values: Any) -> None:
        """Fetch what is away of the tensors in these arguments of a function."""
        if not self._slots:
            return
        for storage in storages_in(values):
            slot = self._slots.get(storage)
            if slot is not None and slot.is_away:  # what is lent stays lent
                self.fetch(storage)

    def guard(self) -> AbstractContextManager[Any]:
        """Within it functions of torch find what they read in memory."""
        return nullcontext() if self.gigabytes is None else _Guard(self)

    @contextmanager
    def lend(self, *tensors: Tensor) -> Iterator[None]:
        """Within it these tensors are in memory, for somebody who reads them alone."""
        lent: dict[torch.UntypedStorage, _Slot] = {}
        for storage in storages_in(tensors):
            slot = self._slots.get(storage)
            if slot is not None and slot.is_away:
                lent[storage] = slot
        for storage, slot in lent.items():
            self._fill(storage, slot)
        yield
        for storage, slot in lent.items():
            if self._slots.get(storage) is slot:  # nobody has fetched it for good
                self._empty(storage, slot)

    @staticmethod
    def _empty(storage: torch.UntypedStorage, slot: _Slot) -> None:
        slot.is_away = True  # first: Ctrl-C may come between the two
        storage.resize_(0)

    def _fill(self, storage: torch.UntypedStorage, slot: _Slot) -> None:
        if slot.is_away:
            storage.resize_(slot.nbytes)
            self._read(storage, slot)
            slot.is_away = False

    # ---- the file --------------------------------------------------------------------------------

    def _take_slot(self, nbytes: int) -> _Slot:
        free = self._free.setdefault(nbytes, [])
        if free:
            offset = free.pop()
        else:
            offset = self._end
            self._end += nbytes
        slot = _Slot(offset, nbytes)
        # when its storage is fetched or dies, which may be in any thread
        finalize(slot, free.append, offset).atexit = False
        return slot

    def _write(self, storage: torch.UntypedStorage, slot: _Slot) -> None:
        host = storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
        left = _bytes_of(host)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # see `close`
            self._file.seek(slot.offset)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._explain(error, "written to", "a folder with more room") from error

    def _read(self, storage: torch.UntypedStorage, slot: _Slot) -> None:
        assert self._file is not None  # which has written it
        on_host = storage.device.type == "cpu"
        host = storage if on_host else torch.UntypedStorage(slot.nbytes)  # type: ignore[no-untyped-call]
        left = _bytes_of(host)
        try:
            self._file.seek(slot.offset)
            while left:
                count = self._file.readinto(left)  # type: ignore[attr-defined]
                if not count:
                    raise OSError(errno.EIO, "it is shorter than what was written")
                left = left[count:]
        except OSError as error:
            raise self._explain(error, "read from", "another disk") from error
        if not on_host:
            storage.copy_(host)

    def _explain(self, error: OSError, action: str, remedy: str) -> OSError:
        folder = tempfile.tempdir or "any folder"  # None: there is none that can be written to
        return OSError(
            error.errno,
            f"memory={self.gigabytes:g}: {self._end / GIGABYTE:.1f} GB of activations cannot be "
            f"{action} a temporary file in {folder} ({error.strerror}); set TMPDIR to {remedy}, or "
            "take a larger memory",
        )


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage in the host's memory; `Tensor.numpy` would keep it from resizing."""
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


def _is_large(storage: torch.UntypedStorage) -> bool:
    """Whether it is worth a place in the file, and can be emptied: what NumPy sees cannot."""
    on_meta = storage.device.type == "meta"
    return not on_meta and storage.nbytes() >= SMALL and storage.resizable()


def storages_in(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in the arguments or the result of a function."""
    if isinstance(value, Tensor):
        storage = None
        try:
            with without_torch_functions():  # a guard would fetch it
                storage = value.untyped_storage()
        except (NotImplementedError, RuntimeError):  # it has none: sparse, or within torch.vmap
            pass
        if type(value) not in (Tensor, nn.Parameter) and _is_hollow(storage):
            yield from storages_in([*vars(value).values()])  # a wrapper, as a DTensor
        elif storage is not None:
            yield storage
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from storages_in(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from storages_in(entry)


def _is_hollow(storage: torch.UntypedStorage | None) -> bool:
    """Whether it has a size but no memory: what is read are the attributes of its tensor."""
    try:
        return storage is None or (storage.nbytes() > 0 and storage.data_ptr() == 0)
    except RuntimeError:  # in place of 0
        return True


def _name_of(func: Any) -> str:
    """The name of a function; for the getter of an attribute, the attribute's."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = func.__self__.__name__
    return name


class _Guard(TorchFunctionMode):
    """Before a function of torch gets tensors that are away, they are fetched."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _name_of(func) not in DESCRIBING:
            self._memory.fetch_for((args, kwargs))
        return func(*args, **kwargs)


class Activations(_Guard):
    """The storages that a run has made since it began, by functions of torch that it called within
    `watch`.

    A result whose storage no argument has is new. So parameters, buffers and their views are none
    of these.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self._held = 0  # bytes, when the run stopped last

    def watch(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._memory.gigabytes is None else self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        if _name_of(func) in LENDING:
            for storage in storages_in((args, kwargs)):
                self._storages.discard(storage)
        elif isinstance(result, Tensor | tuple | list | Mapping):
            new = {*storages_in(result)} - {*storages_in((args, kwargs))}
            self._storages.update(storage for storage in new if _is_large(storage))
        return result

    def free_buffers(self) -> None:
        """Before the run's own thread waits or ends: free the megabytes that MKL keeps for its
        products."""
        free = None if self._memory.gigabytes is None else find_freer_of_buffers()
        if free is not None:
            free()

    def fetch(self) -> None:
        """Before the run goes on."""
        for storage in list(self._storages):
            self._memory.fetch(storage)

    def settle(self) -> None:
        """Now that the run waits, or has ended: if memory is full, its part goes to the file."""
        storages = [storage for storage in self._storages if _is_large(storage)]
        held = sum(storage.nbytes() for storage in storages)
        self._memory.held += held - self._held
        self._held = held
        if self._memory.is_full:
            for storage in storages:
                self._memory.send_away(storage)
            self._memory.held -= held
            self._held = 0
        self._memory.note_use(held)

    def finish(self) -> None:
        """The run has ended: what lives on, in somebody's cache, is in memory for good."""
        self._memory.held -= self._held
        self._held = 0
        complete([partial(self._memory.fetch, storage) for storage in self._storages])
        self._storages.clear()
