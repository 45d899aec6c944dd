"""The model's runs on the calibration data: everything for which `compress` runs a model.

`observe` finds the order in which the model calls its layers. The `Replay` that it returns makes
the calls again: whole (`run`), or layer by layer (`walk`), where all calls wait at one layer before
they go on to the next, each once as the model is and perhaps once as it is compressed so far.

To capture a block's input and run block after block needs no threads, but has to know what that
input is made of. Users have models where it is more than the output of the block before:

- encoder-decoders (T5, BART, Whisper): each decoder block reads the encoder's last output;
- skip connections past blocks (U-Net, U-ViT): a late block reads the outputs of early ones;
- layers between blocks, or none in blocks (Swin's patch merging, an nn.Sequential);
- experts and skipped layers: what a layer gets depends on a router that runs on the data.

So the model itself brings each layer its input (a model of each kind stands in
tests/compress/test_compressed_models.py). A run has a thread of its own, but exactly one thread
works at any time: whoever resumes a run waits until it stops again or ends. So nothing races, and
the caller orders all steps. A run also has a `Replica` of the model, so that the model itself stays
as it is.
"""

import contextvars
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._hosts.registry import call_options
from .._model.calls import split_batch
from .._model.transaction import Step, completed_at_end
from .._projection.matrices import limit_threads
from .._torch import is_in_vmap, is_transformed, tree_map
from .memory import Activations, Memory
from .padding import find_masks, name_arguments
from .replica import Copier, NoCopyError, Replica

MAX_PICKED_CALLS = 8  # of the model, where not all of them need be run
MAX_WORKERS = 2048  # of OpenMP in all runs: each thread that computes keeps its own


# ---- the calls of the model ----------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One call of the whole model, that can be made again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    masks: list[Tensor]  #: see `find_masks`
    seed: int = 0  #: of the random numbers that the model draws in it
    has_loss: bool = False  #: whether the model formed a loss of labels when it was made last

    def make(self, model: nn.Module, *, input_gradients: bool = False) -> Any:
        """Make it again; the model gets a copy of the batch, and may change it.

        `input_gradients`: the floating tensors of the batch have a gradient.
        """
        args, kwargs = copy_batch(self.args, self.kwargs)
        if input_gradients:
            args, kwargs = tree_map(_require_gradient, (args, kwargs))
        options = call_options(model, name_arguments(model, args, kwargs))
        with CheckNumbers(model) as check:
            output = model(*args, **kwargs, **options)
        self.has_loss = check.has_loss
        return output

    def forget_batch(self) -> None:
        """It is not made again; its masks stay."""
        self.args = ()
        self.kwargs = {}

    @property
    def layout(self) -> tuple[Any, ...]:
        """How many positions and which keywords the batch has."""
        return (len(self.args), *sorted(self.kwargs))


def _require_gradient(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.requires_grad_().clone()  # no leaf, so that the model may write into it
    return value


class Stream:
    """The calls on batches that are read anew each time, so that none of them is held.

    Raises:
        ValueError: a later reading has another number of batches than the first, or one with
            other keys than any of those.
    """

    def __init__(self, model: nn.Module, read: Callable[[], Iterable[Any]]) -> None:
        self._model = model
        self._read = read
        self._few: list[Call] = []
        self._layouts = [call.layout for call in self._prepare()]

    def __len__(self) -> int:
        return len(self._layouts)

    def __iter__(self) -> Iterator[Call]:
        count = 0
        for call in self._prepare():
            count += 1
            if call.layout not in self._layouts:
                raise ValueError(
                    f"batches: batch {count} of a later reading has {_show_layout(call.layout)}, "
                    f"and none of the first reading had; batch 1 had "
                    f"{_show_layout(self._layouts[0])}"
                )
            if count <= len(self):
                yield call
        if count != len(self):
            raise ValueError(
                f"batches gave {len(self)} batches, and {count} when they were read again: give a "
                "list, or a function that returns a new iterator each time"
            )

    @property
    def few(self) -> list[Call]:
        """See `Replay.few`."""
        if not self._few:
            places = set(_pick_places(len(self)))
            self._few = [call for place, call in enumerate(self) if place in places]
        return self._few

    def _prepare(self) -> Iterator[Call]:
        batches = self._read()
        check_batches("what batches() returns", batches)
        for place, batch in enumerate(batches):
            yield prepare_call(self._model, batch, seed=place)


def _show_layout(layout: tuple[Any, ...]) -> str:
    positions, *keys = layout
    return f"{positions} positions and the keys {keys}"


def _pick_places(count: int) -> list[int]:
    """Where at most `MAX_PICKED_CALLS` of so many calls stand, evenly spread."""
    picked = min(count, MAX_PICKED_CALLS)
    return [n * count // picked for n in range(picked)]


def read_batches(model: nn.Module, batches: Any, memory: float | None) -> list[Call] | Stream:
    """The calls. What can be read again is not held if there is a bound of memory; what a function
    returns never is.

    Raises:
        TypeError: it is a single batch, or no iterable of batches.
    """
    if callable(batches) and not isinstance(batches, Iterable):
        _require_no_arguments(batches)
        return Stream(model, batches)
    check_batches("batches", batches)
    if memory is not None and not isinstance(batches, Iterator):
        return Stream(model, lambda: batches)
    return [prepare_call(model, batch, seed=place) for place, batch in enumerate(batches)]


def _require_no_arguments(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TypeError(
            f"batches={function!r} must be an iterable of batches, or a function without arguments "
            f"that returns one: {error}"
        ) from None
    except ValueError:  # a function of C, which does not say
        return


def check_batches(name: str, batches: object) -> None:
    """Raises: TypeError: it is a single batch, or no iterable of batches."""
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"{name}={type(batches).__name__} must be an iterable of batches, for example [batch]"
        )


def prepare_call(model: nn.Module, batch: Any, seed: int = 0) -> Call:
    """The call of the model with this batch, see `split_batch`.

    Raises:
        TypeError: the model's `forward` does not take what the batch was split into, or something
            in that has no copy.
    """
    args, kwargs = split_batch(batch)
    _require_arguments(model, args, kwargs)
    return Call(*copy_batch(args, kwargs), find_masks(model, args, kwargs), seed)


def _require_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if model._forward_pre_hooks:
        return  # they may change the arguments
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # it is of no Python function
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = "; of pairs (input, label) give the inputs alone" if len(args) > 1 else ""
        raise TypeError(
            f"batches: {type(model).__name__}.forward does not take a batch: {error}. A tuple or "
            f"list is its positional arguments, a mapping its keywords{hint}"
        ) from None


def copy_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with all that they hold, for one run alone.

    Raises: TypeError: something in a batch cannot be copied.
    """
    copier = Copier()
    try:
        return copier.copy(args), copier.copy(kwargs)
    except NoCopyError as refused:
        raise TypeError(
            f"batches: {refused}, which a batch has at {refused.path}: each run of the model gets "
            "a copy of the batch, so give what can be copied"
        ) from refused


# ---- the calls made again ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Replay:
    """The calls of a model on the batches, and the order in which they arrive at its layers."""

    model: nn.Module
    calls: Sequence[Call] | Stream
    order: Sequence[nn.Module] = ()  #: the layers that a call reaches, as the model arrives at them
    #: layers that one call calls more than once, or to which calls come in orders that contradict
    #: each other: a walk may come to them again
    repeated: Collection[nn.Module] = ()
    biases: Mapping[nn.Module, nn.Parameter] = field(default_factory=dict)  #: of one layer alone
    has_loss: bool = False  #: whether the model forms a loss of labels
    original: Replica = None  # type: ignore[assignment]  #: of the model before all runs, which have replicas of this one
    memory: float | None = None  #: gigabytes of runs that wait, see `Memory`

    def __post_init__(self) -> None:
        if self.original is None:
            object.__setattr__(self, "original", Replica(self.model))

    @property
    def few(self) -> list[Call]:
        """At most `MAX_PICKED_CALLS` of the calls, evenly spread."""
        if isinstance(self.calls, Stream):
            return self.calls.few
        return [self.calls[place] for place in _pick_places(len(self.calls))]

    def run(
        self,
        call: Call,
        layers: Iterable[nn.Module] = (),
        hook: Callable[[nn.Module, Tensor, Tensor], Tensor | None] = lambda *_: None,
        *,
        grad: bool = False,
        backward: bool = False,
    ) -> Any:
        """What the model returns in this call. On the way `hook` sees each of the layers, its input
        and its output, and may return another output.

        `grad`: with gradients. `backward`: so that `backward` of what is returned leaves nothing in
        the model, and reaches layers that have no parameter with a gradient before them.
        """
        replica = self.original.replicate(own_gradients=backward)
        for layer in layers:
            copied = replica[layer]
            vars(copied)["forward"] = partial(_see, layer, copied.forward, hook)
        with torch.set_grad_enabled(grad), RandomNumbers(call.seed).draw():
            return call.make(replica.model, input_gradients=backward)

    def walk(
        self,
        layers: Collection[nn.Module],
        calls: Sequence[Call] | Stream,
        *,
        both: bool = False,
        to_end: bool = True,
        blocks: Mapping[nn.Module, Collection[nn.Module]] | None = None,
    ) -> Generator["Visit", None, None]:
        """Take calls through the model side by side, from layer to layer in the model's order.

        Of all places where runs wait the earliest is visited, when no other run can still come to
        it. When the caller takes the next visit, the runs that wait at this one go on, with the
        answers that the caller has given.

        Args:
            layers: where the runs stop. A layer that a call calls twice is visited twice.
            both: each call is made twice, side by side: densely, and with the caller's answers.
            to_end: whether a run goes on after it has been at each of the layers and blocks. A
                dense one always does if the model forms a loss: it finds a wrong label only then.
            blocks: modules at whose end the runs stop, after the last of these layers.
        """
        blocks = blocks or {}
        rank: dict[nn.Module, float] = {module: n for n, module in enumerate(self.order)}
        last = len(rank)  # of what the order does not tell
        for block, layers_within in blocks.items():
            # after its last layer, and before the layer that follows
            rank[block] = max(rank.get(layer, last) for layer in layers_within) + 0.5
        memory = Memory(self.memory)
        ends: list[Step] = [memory.close]  # after all runs
        with completed_at_end(ends):
            memory.leave_uncompiled(ends)
            # each call has a lane: its dense run, and beside it the compressed one
            lanes: list[tuple[Call, list[Run]]] = []
            count = len(calls) * (1 + both)
            for call in calls:
                lane: list[Run] = []
                lanes.append((call, lane))
                for is_compressed in (False, True)[: 1 + both]:
                    replica = self.original.replicate()
                    activations = Activations(memory)
                    workers = max(1, MAX_WORKERS // count)
                    goes_on = to_end or (self.has_loss and not is_compressed)
                    run = Run(call, replica, layers, blocks, workers, activations, goes_on)
                    del replica  # the run alone keeps it, until its end
                    ends.append(run.cancel)  # before its thread starts
                    lane.append(run)
                    run.resume()
                if isinstance(calls, Stream):
                    call.forget_batch()
            while stops := [run.stop for _, lane in lanes for run in lane if run.stop is not None]:
                # all other runs wait later in the order, so none of them comes here any more
                module = min(stops, key=lambda stop: rank.get(stop.module, last)).module
                del stops  # which hold tensors
                waits = [Wait(call, *(run.stop_at(module) for run in lane)) for call, lane in lanes]
                waits = [wait for wait in waits if wait.dense or wait.compressed]
                visit = Visit(module, waits, memory)
                del waits
                try:
                    yield visit
                finally:
                    visit.waits.clear()  # so that runs which go on, or end, free their tensors
                for run in [run for _, lane in lanes for run in lane if run.stop_at(module)]:
                    run.resume()  # one by one: the others wait


@dataclass(eq=False)
class Stop:
    """Where a run waits: before a layer, or at the end of a block."""

    run: "Run"
    module: nn.Module  #: of the model
    args: tuple[Any, ...]  #: that it is called with
    kwargs: Mapping[str, Any]
    forward: Callable[..., Any]  #: the replica's own
    output: Any = None  #: with which it leaves a block
    answer: Callable[..., Any] | None = None  #: what is called in place of a layer's `forward`

    @property
    def input(self) -> Tensor:
        """The one input, of a linear layer."""
        return take_input(self.args, self.kwargs)


@dataclass
class Wait:
    """A call whose dense or compressed run, or both, wait at one module."""

    call: Call
    dense: Stop | None
    compressed: Stop | None = None


@dataclass
class Visit:
    """All runs that wait at one module."""

    module: nn.Module
    waits: list[Wait]
    memory: Memory  #: of all runs; a tensor of a run that waits is read within `memory.lend`


def _see(
    layer: nn.Module,
    forward: Callable[..., Tensor],
    hook: Callable[[nn.Module, Tensor, Tensor], Tensor | None],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Called in place of a layer's `forward`, which a model may call without its hooks."""
    y = forward(*args, **kwargs)
    new = hook(layer, take_input(args, kwargs), y)
    return y if new is None else new


def take_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The one input with which a linear layer is called."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


@torch.no_grad()
def observe(
    model: nn.Module,
    layers: Collection[nn.Module],
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    original: Replica | None = None,
    *,
    memory: float | None = None,
) -> Replay:
    """Run the model over batches, in eval mode and without gradients, to find its order.

    A few batches are enough where the model comes through its layers in one order for all of
    those; otherwise all are run.

    Args:
        original: the replica of which runs have replicas; None: of the model as it is.
        memory: gigabytes of waiting runs, see `Memory`; what can be read again is then not held.

    Raises:
        TypeError: `batches` is a single batch, or neither iterable nor a function.
        ValueError: there is no batch, or other ones at another reading; no layer saw an input; an
            id is outside of an embedding; a label is of no class; padding without a mask, see
            `find_masks`; a layer is called within torch.vmap.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> replay = observe(model, [model[2], model[0]], [torch.ones(1, 2)])
    >>> replay.order == [model[0], model[2]]
    True
    """
    calls = read_batches(model, batches, memory)
    if not len(calls):
        raise ValueError("batches has no batch; a generator can be read only once")
    replay = Replay(model, calls, original=original, memory=memory)  # type: ignore[arg-type]

    names = {module: name for name, module in model.named_modules()}

    def find_order(call: Call) -> list[nn.Module]:
        order: list[nn.Module] = []

        def note(layer: nn.Module, x: Tensor, _: Tensor) -> None:
            if is_in_vmap(x):
                raise ValueError(
                    f"layer {names[layer]!r} is called within torch.vmap, where its inputs cannot "
                    "be collected: exclude it"
                )
            order.append(layer)

        replay.run(call, layers, note)
        return order

    orders = [find_order(call) for call in replay.few]
    # a router that chose otherwise in one of them may do so in any
    if orders != orders[:1] * len(orders):
        picked = _pick_places(len(calls))
        orders += [find_order(call) for place, call in enumerate(calls) if place not in picked]
    if not any(orders):
        raise ValueError(
            "batches: none of the layers to convert saw an input; the model does not call them"
        )
    merged, contradicted = _merge_orders(orders)
    repeated = {layer for order in orders for layer in order if order.count(layer) > 1}
    # a bias that several layers have cannot carry the change of one layer's mean
    shared = find_shared(model)
    biases = {}
    for layer in layers:
        bias = layer._parameters.get("bias")
        if bias is not None and id(bias) not in shared:
            biases[layer] = bias
    return replace(
        replay,
        order=merged,
        repeated=repeated | contradicted,
        biases=biases,
        has_loss=any(call.has_loss for call in replay.few),
    )


def find_shared(model: nn.Module) -> set[int]:
    """The `id` of each parameter that several modules of the model have."""
    owners: Counter[int] = Counter()  # how many modules have the parameter of this id
    for module in model.modules():
        owners.update(id(parameter) for parameter in module._parameters.values())
    return {identity for identity, count in owners.items() if count > 1}


def _merge_orders(
    orders: Iterable[Sequence[nn.Module]],
) -> tuple[list[nn.Module], set[nn.Module]]:
    """One order that agrees with those of all calls, and no module. If there is none, the order of
    first arrival, and the modules for which the calls contradict each other."""
    first = list(dict.fromkeys(module for order in orders for module in order))
    before: dict[nn.Module, set[nn.Module]] = {module: set() for module in first}
    for order in orders:
        once = list(dict.fromkeys(order))
        for earlier, later in pairwise(once):  # each step of the call
            before[later].add(earlier)
    try:
        return list(TopologicalSorter(before).static_order()), set()
    except CycleError:
        return first, {module for module in first if module in _find_all_before(module, before)}


def _find_all_before(
    module: nn.Module, before: Mapping[nn.Module, Collection[nn.Module]]
) -> set[nn.Module]:
    """What comes before a module, directly or not; itself, if it is in a circle."""
    found: set[nn.Module] = set()
    left = [*before[module]]
    while left:
        earlier = left.pop()
        if earlier not in found:
            found.add(earlier)
            left += before[earlier]
    return found


# ---- one run -------------------------------------------------------------------------------------


class Cancelled(BaseException):
    """Ends the thread of a run that nobody resumes any more."""


class Run:
    """A call made again. `stop` says where it waits; None before its start and after its end."""

    def __init__(
        self,
        call: Call,
        replica: Replica,
        layers: Iterable[nn.Module],
        blocks: Iterable[nn.Module],
        workers: int,
        activations: Activations,
        to_end: bool,
    ) -> None:
        self.call = call
        self.replica: Replica | None = replica  #: None after its end
        self.activations = activations
        self._to_end = to_end
        self._awaited = {*layers, *blocks}  # where it has not been yet
        self.stop: Stop | None = None
        self._contexts = _capture_state()
        self._random_numbers = RandomNumbers(call.seed)
        self._workers = workers
        self._cancelled = False
        self._turn: SimpleQueue[None] = SimpleQueue()  # the caller says "go on"
        self._back: SimpleQueue[None] = SimpleQueue()  # the run says "I wait" or "I have ended"
        self._error: BaseException | None = None
        self._held: list[nn.Module] = []  # modules of the replica that have a `Hold`
        for layer in layers:
            self._hold_at(replica[layer], layer)
        for block in blocks:
            self._hold_at(replica[block], block, after=True)
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=lambda: context.run(self._work), daemon=True)

    def stop_at(self, module: nn.Module) -> Stop | None:
        """Where it waits, if that is at this module."""
        return self.stop if self.stop is not None and self.stop.module is module else None

    def resume(self) -> None:
        """Go on to the next stop, or to the end.

        Raises: what the model raised; a RuntimeError: no thread could be started.
        """
        self.stop = None
        self.activations.fetch()
        with limit_threads(self._workers), self._random_numbers.draw():
            if self.thread.ident is not None:
                self._turn.put(None)
            else:
                try:
                    self.thread.start()
                except RuntimeError as error:
                    raise RuntimeError(
                        "no thread could be started for a run of the model, of which each batch "
                        "has two: give fewer batches, and larger ones"
                    ) from error
            self._back.get()
        if self.stop is not None:
            self.activations.settle()
            return
        self.thread.join()
        if self._error is not None:
            raise self._error
        self._free_model()
        self.activations.finish()

    def cancel(self) -> None:
        """End the run where it waits, or at its next stop.

        Whether it waits cannot be known: Ctrl-C may have ended `resume`. So it is always told to go
        on; a run that works finds that when it stops.
        """
        self._cancelled = True
        if self.thread.ident is not None:
            self._turn.put(None)
            self.thread.join()
        self._free_model()
        self.activations.finish()

    def _free_model(self) -> None:
        """Free what the replica alone holds, now that its thread has ended, so that nobody reads it
        from the file."""
        for module in self._held:
            vars(module).pop("forward", None)  # a module and its `Hold` have each other
        self._held.clear()
        self.replica = None

    def leave(self, module: nn.Module) -> None:
        """It has been at this layer or block, and ends if that was the last one."""
        self._awaited.discard(module)
        if not self._awaited and not self._to_end and threading.current_thread() is self.thread:
            raise Cancelled

    def _hold_at(self, copied: nn.Module, module: nn.Module, after: bool = False) -> None:
        """Wait before the copy of a module is called, or `after` that with its output."""
        vars(copied)["forward"] = Hold(self, module, copied.forward, after)
        self._held.append(copied)

    def wait(self, stop: Stop) -> Stop:
        """Stop here until the caller has answered; not in a thread that the model has started."""
        if threading.current_thread() is not self.thread:
            return stop
        # the caller works from `_back.put` to the end of `_turn.get`, this thread before and after
        if not self._cancelled:
            self.activations.free_buffers()
            self.stop = stop
            self._back.put(None)
            self._turn.get()
        if self._cancelled:
            raise Cancelled
        return stop

    def _work(self) -> None:
        try:
            with ExitStack() as stack:
                for context in self._contexts:
                    stack.enter_context(context)
                stack.enter_context(self.activations.watch())
                assert self.replica is not None
                self.call.make(self.replica.model)
        except Cancelled:
            pass
        except BaseException as error:  # the caller's thread raises it
            self._error = error
        finally:
            self.activations.free_buffers()
            self.stop = None
            self._back.put(None)


@dataclass(frozen=True, eq=False)
class Hold:
    """Called in place of a module's `forward`, in the replica of a run."""

    run: Run
    module: nn.Module  #: of the model
    forward: Callable[..., Any]  #: the replica's own
    after: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.after:
            # a copy, since the block may write into its input
            stop = Stop(self.run, self.module, *_copy_if_possible(args, kwargs), self.forward)
            stop.output = self.forward(*args, **kwargs)
            output = self.run.wait(stop).output
        else:
            stop = Stop(self.run, self.module, args, kwargs, self.forward)
            answer = self.run.wait(stop).answer or self.forward
            output = answer(*args, **kwargs)
        self.run.leave(self.module)
        return output

    def __deepcopy__(self, memo: Any) -> "Hold":
        return self  # it is the run's: a replica of the run's replica does not stop here


def _copy_if_possible(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        copied: tuple[tuple[Any, ...], dict[str, Any]] = Copier().copy((args, kwargs))
    except NoCopyError:
        return args, kwargs
    return copied


class RandomNumbers:
    """The random numbers of one run: all runs of a call draw the same ones.

    A model may draw some in eval mode, say by `F.dropout(x)`, which drops always. With others in
    the dense model than in the compressed one, x and z would seem to have little in common.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: list[Tensor] = []  # where the run stopped last

    @contextmanager
    def draw(self) -> Iterator[None]:
        """Within it torch goes on with these numbers, and at its end with its own."""
        own_states = _get_random_states()
        with completed_at_end([partial(_set_random_states, own_states)]):
            if self._states:
                _set_random_states(self._states)
            else:
                torch.default_generator.manual_seed(self._seed)
                if len(own_states) > 1:
                    torch.cuda.manual_seed_all(self._seed)
            yield
            self._states = _get_random_states()


def _get_random_states() -> list[Tensor]:
    """Those of torch's generators: of the CPU, and of the GPUs if they are used."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _capture_state() -> list[AbstractContextManager[Any]]:
    """The contexts in which another thread has what torch keeps for this one: autocast, the default
    device, and the current device and stream of CUDA. Runs have no gradients."""
    contexts: list[AbstractContextManager[Any]] = [torch.no_grad()]
    cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.get_default_device().type != "cpu":  # a new thread has that one
        contexts.append(torch.get_default_device())
    for kind in ["cpu", "cuda"] if cuda else ["cpu"]:
        if torch.is_autocast_enabled(kind):
            contexts.append(torch.autocast(kind, dtype=torch.get_autocast_dtype(kind)))
    if cuda:
        contexts.append(torch.cuda.stream(torch.cuda.current_stream()))  # its device too
    return contexts


class CheckNumbers(TorchFunctionMode):
    """Within it embeddings refuse ids which they have no row for, and losses labels of no class.

    As long as such a mode is on, torch's encoder calls its layers one by one, not a fused kernel.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.has_loss = False  # whether one was formed
        self._names: dict[int, str] = {}  # of embeddings, by the id of their weight
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                self._names[id(module.weight)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or is_transformed():
            return func(*args, **kwargs)  # numbers cannot be looked at
        if func is F.embedding:
            ids, weight = args[:2]  # (...), (rows, features)
            of = f"embedding {self._names.get(id(weight), '')!r}, which has {len(weight):,} rows"
            why = "the batches come from another tokenizer, or are too long"
            _require_below(len(weight), ids, f"id {{}} is outside of the {of}: {why}")
        elif func in (F.cross_entropy, F.nll_loss):
            self.has_loss = True
            logits, labels = args[:2]  # (classes,) or (rows, classes, ...)
            classes = logits.shape[min(1, logits.ndim - 1)]
            ignored = kwargs.get("ignore_index", -100)
            why = f"which has {classes:,} classes; {ignored} says that a label does not count"
            if not labels.is_floating_point():
                counted_labels = labels[labels != ignored]
                _require_below(classes, counted_labels, f"label {{}} is outside of the loss, {why}")
        return func(*args, **kwargs)


def _require_below(end: int, numbers: Tensor, message: str) -> None:
    wrong = numbers[(numbers < 0) | (numbers >= end)]
    if wrong.numel():
        raise ValueError(f"batches: the {message.format(wrong[0].item())}")
