"""Runs of a model that stop where it calls chosen modules, so that many go through it in lockstep.

To capture a block's input and run block after block needs no threads, but has to know what that
input is made of. Users have models where it is more than the output of the block before:

- encoder-decoders (T5, BART, Whisper): each decoder block reads the encoder's last output;
- skip connections past blocks (U-Net, U-ViT): a late block reads the outputs of early ones;
- layers between blocks, or none in blocks (Swin's patch merging, an nn.Sequential);
- experts and skipped layers: what a layer gets depends on a router that runs on the data.

Here the model itself brings each layer its input (tests/compress/test_sequential_models.py has a
model of each kind).

Each run has a thread of its own, but exactly one thread works at any time: whoever resumes a stream
waits until it stops again or ends. So nothing races, and the order of all steps is the caller's.
What a run leaves in attributes and buffers of the model is put in before that run goes on, and
taken out when it stops: no stream sees another's.
A stream stops in the `forward` of a module, which is patched as long as `Streams` is open: before
it, where the caller may put another function in its place, or after it, where the caller may put
another output in place of the module's.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._interrupts import let_interrupts_in
from .._projection.matrices import limit_threads
from .kept import Changes, Kept, put_back

MAX_WORKERS = 2048  # of OpenMP in all streams: each thread that computes keeps its own

State = Callable[[], contextlib.AbstractContextManager[None]]


class Place(NamedTuple):
    """Where a stream can stop: before a module is called, or when it is left."""

    module: nn.Module
    leaving: bool = False


@dataclass
class Stop:
    """A stream that waits: where, and what the module was called with."""

    place: Place
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    forward: Callable[..., Any]  #: the module's own
    output: Any = None  #: of the module, if it is being left

    @property
    def input(self) -> Tensor:
        """The one input, of a linear layer."""
        return take_input(self.args, self.kwargs)


def take_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The one input with which a linear layer is called."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


class Cancelled(BaseException):
    """Ends the thread of a stream that nobody resumes any more."""


class Stream:
    """One run of the model. `stop` says where it waits; None before its start and after its end."""

    def __init__(self, run: Callable[[], object], state: State, workers: int, kept: Kept) -> None:
        self.stop: Stop | None = None
        self._run, self._state, self._workers = run, state, workers
        self._kept, self._own = kept, Changes([], [])
        self._turn, self._back = SimpleQueue[None](), SimpleQueue[None]()
        self._forward: Callable[..., Any] | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=lambda: context.run(self._work), daemon=True)

    def resume(self, forward: Callable[..., Any] | None = None) -> None:
        """Go on to the next stop, or to the end.

        Args:
            forward: called, in the stream, in place of the module's own `forward`. Where the module
                is being left, its result takes the place of the output.

        Raises: what the model raised.
        """
        self._forward, self.stop = forward, None
        self._kept.put(self._own)
        with limit_threads(self._workers):
            if self.thread.ident is None:
                self.thread.start()
            else:
                self._turn.put(None)
            with let_interrupts_in():
                self._back.get()
        self._own = self._kept.take()
        if self._error is not None:
            self.thread.join()
            raise self._error

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Within it this thread has torch's modes and what the model keeps as the stream has them,
        while the stream waits."""
        self._kept.put(self._own)
        try:
            with put_back(self._kept.model), self._state():
                yield
        finally:
            self._kept.take()

    def stop_at(self, module: nn.Module) -> Stop | None:
        """Where it waits, if that is at this module."""
        return self.stop if self.stop is not None and self.stop.place.module is module else None

    def cancel(self) -> None:
        """End the run where it waits, or at its next stop.

        Whether it waits cannot be known: Ctrl-C may have ended `resume`. So it is always told to go
        on; a stream that works finds that when it stops.
        """
        self._cancelled = True
        if self.thread.ident is None:
            return
        self._turn.put(None)
        self.thread.join()
        self.stop = None

    def wait(self, stop: Stop) -> Callable[..., Any] | None:
        """Stop here; for the stream's own thread. Returns what it was resumed with."""
        if not self._cancelled:
            self.stop = stop
            self._back.put(None)
            self._turn.get()
        if self._cancelled:
            raise Cancelled
        forward, self._forward = self._forward, None
        return forward

    def _work(self) -> None:
        try:
            with self._state():
                self._run()
        except Cancelled:
            pass
        except BaseException as error:  # the caller's thread raises it
            self._error = error
        finally:
            self.stop = None
            self._back.put(None)


def find_next(streams: Iterable[Stream], rank: Mapping[nn.Module, int]) -> nn.Module | None:
    """The module of the least rank at which a stream waits; None if all streams have ended.

    Of equal ranks, a module that streams are about to leave comes last. Modules without a rank come
    after all others.
    """
    places = [stream.stop.place for stream in streams if stream.stop is not None]
    first = min(
        places, key=lambda place: (rank.get(place.module, len(rank)), place.leaving), default=None
    )
    return None if first is None else first.module


class Streams:
    """While it is open, streams of the model stop at these places. On leaving it all streams end,
    the modules have their own `forward` again, and keep what they kept, and no thread is left.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with Streams(model, [Place(model[0])]) as streams:
    ...     stream = streams.start(lambda: print(model(torch.ones(2))))
    ...     stream.resume(lambda x: 3 * x)
    tensor([3., 3.])
    """

    def __init__(self, model: nn.Module, places: Iterable[Place], count: int = 1) -> None:
        """`count`: streams that there will be, for the number of threads that each computes with"""
        self._model, self._places = model, frozenset(places)
        self._count, self._most = count, max(1, MAX_WORKERS // count)
        self._streams: dict[threading.Thread, Stream] = {}
        self._patched: list[tuple[nn.Module, bool, Any]] = []

    def start(self, run: Callable[[], object], state: State | None = None) -> Stream:
        """A stream that runs `run` in `state`, at its first stop.

        `state` is what `capture_state` returns; None: that of this thread.
        """
        stream = Stream(run, state or capture_state(), self._most, self._kept)
        self._streams[stream.thread] = stream
        try:
            stream.resume()
        except RuntimeError as error:
            if stream.thread.ident is not None:
                raise
            raise RuntimeError(
                f"no thread could be started for stream {len(self._streams)} of {self._count}, two "
                "for each batch: give fewer batches, and larger ones"
            ) from error
        return stream

    def __enter__(self) -> "Streams":
        for module in {place.module: None for place in self._places}:
            self._patch(module)
        self._kept = Kept(self._model)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for stream in self._streams.values():
                stream.cancel()
            self._kept.take()
        finally:
            for module, had_own, forward in reversed(self._patched):
                if had_own:
                    vars(module)["forward"] = forward
                else:
                    del vars(module)["forward"]

    def _patch(self, module: nn.Module) -> None:
        own = module.forward
        self._patched.append((module, "forward" in vars(module), own))
        entry, exit_ = Place(module), Place(module, leaving=True)

        def forward(*args: Any, **kwargs: Any) -> Any:
            stream = self._streams.get(threading.current_thread())
            if stream is None:
                return own(*args, **kwargs)
            other = None
            if entry in self._places:
                other = stream.wait(Stop(entry, args, kwargs, own))
            output = (other or own)(*args, **kwargs)
            if exit_ in self._places:
                other = stream.wait(Stop(exit_, args, kwargs, own, output))
                output = output if other is None else other(*args, **kwargs)
            return output

        vars(module)["forward"] = forward


def capture_state() -> State:
    """What torch keeps for each thread, as it is now: a function that makes the context in which
    another thread has it too.

    It is the gradient mode, autocast, the default device, and the current device and stream of
    CUDA.
    """
    grad, device = torch.is_grad_enabled(), torch.get_default_device()
    cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    kinds = ["cpu", "cuda"] if cuda else ["cpu"]
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
    ]
    queue = torch.cuda.current_stream() if cuda else None

    @contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            if device != torch.get_default_device():
                stack.enter_context(device)
            for kind, dtype, enabled in autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
            if queue is not None:
                stack.enter_context(torch.cuda.stream(queue))  # its device too
            yield

    return enter
