"""One pass of the model over the calibration data: the order of its layers, what can be run again,
and the moments of the layers' inputs where they are asked for."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._interrupts import hold_interrupts, let_interrupts_in
from .._model.survey import Layer, eval_mode
from .moments import Moments
from .padding import find_masks, name_arguments, select_rows
from .streams import State, capture_state, take_input

MAX_PICKED_CALLS = 8  # of the model, where not all of them need be run

Batches = Iterable[Any] | Callable[[nn.Module], Any]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the whole model, that can be made again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    masks: list[Tensor]  #: see `find_masks`
    state: State = field(repr=False)  #: of the thread that made it

    def run(self, model: nn.Module) -> Any:
        """Make it again; the model gets copies of the tensors, and may change them."""
        args, kwargs = copy_values(self.args), copy_values(self.kwargs)
        with _CheckLabels(), let_interrupts_in():
            return model(*args, **kwargs, **_leave_out_cache(model, args, kwargs))


def pick_calls(calls: Sequence[Call]) -> list[Call]:
    """At most `MAX_PICKED_CALLS` of them, evenly spread."""
    if len(calls) <= MAX_PICKED_CALLS:
        return [*calls]
    return [calls[n * len(calls) // MAX_PICKED_CALLS] for n in range(MAX_PICKED_CALLS)]


@dataclass(frozen=True)
class Observed:
    """What a pass over the batches, or over a part of them, has shown."""

    calls: list[Call] | None  #: None if they cannot be made again
    order: list[nn.Module]  #: the layers, as the model arrives at them
    repeated: list[nn.Module]  #: layers that one call of the model calls more than once
    moments: dict[nn.Module, Moments]  #: of the layers that were to be measured
    biases: dict[nn.Module, nn.Parameter]  #: of the layers that alone have it: it may be changed


@torch.no_grad()
def observe(
    model: nn.Module,
    layers: Sequence[Layer],
    batches: Batches,
    *,
    measured: Collection[Layer] = (),
) -> Observed:
    """Run the model over batches, in eval mode and without gradients.

    A few batches are enough where the model comes through its layers in one order for all of
    those and nothing is measured; otherwise all are run. Every module's mode is restored, and no
    hook stays, also on an error.

    Args:
        batches: an iterable of batches (a mapping is passed as keywords, a tuple or list as
            positions, anything else as the one argument), or a function that runs the model that
            it is given.
        measured: the layers whose inputs' moments are wanted. A function is run only once, so all
            layers are measured: perhaps its calls of the model cannot be made again.

    Raises:
        TypeError: `batches` is a single batch, or neither iterable nor callable.
        ValueError: there is no batch; no layer saw an input; an input of a measured layer is not
            finite (the message names the layer); an id is outside of an embedding; a label is of
            no class; padding without a mask, see `find_masks`.

    >>> model = nn.Linear(2, 3, bias=False)
    >>> layers = [Layer(("",), model, 2, 3, "other")]
    >>> batches = [torch.tensor([[1.0, 0.0], [1.0, 2.0]])]
    >>> observe(model, layers, batches, measured=layers).moments[model].zz
    tensor([[1., 1.],
            [1., 2.]], dtype=torch.float64)
    """
    check_batches("batches", batches, or_function=True)
    function = not isinstance(batches, Iterable)
    measured = layers if function else measured
    watch = _Watch(model, layers, measured)
    calls: list[Call] = []
    with ready(model), watch.hooks():
        if isinstance(batches, Iterable):
            with let_interrupts_in():
                calls = [prepare_call(model, batch) for batch in batches]
            picked = pick_calls(calls)
            for call in picked:
                call.run(model)
            if measured or watch.orders != watch.orders[:1] * len(picked):
                for call in calls:
                    if call not in picked:
                        call.run(model)
        else:
            with let_interrupts_in():
                batches(model)
            calls = watch.calls
    if not function and not calls:
        raise ValueError("batches has no batch; a generator can be read only once")
    if not watch.seen:
        raise ValueError(
            "batches: none of the layers to convert saw an input; the model does not call them"
        )
    for layer in measured:
        watch.moments[layer.module].require_finite(layer.name)
    replayable = not function or (watch.replayable and calls)
    return Observed(
        calls if replayable else None,
        _merge_orders(watch.orders),
        [layer.module for layer in layers if layer.module in watch.repeated],
        {module: moments for module, moments in watch.moments.items() if moments.count},
        watch.biases,
    )


def measure_again(
    model: nn.Module, layers: Sequence[Layer], calls: Sequence[Call]
) -> Mapping[nn.Module, Moments]:
    """The moments of the inputs that these layers have in these calls; not if they have no row."""

    def run(model: nn.Module) -> None:
        for call in calls:
            call.run(model)

    return observe(model, layers, run, measured=layers).moments if layers else {}


def find_shared(model: nn.Module) -> set[int]:
    """The `id` of each parameter that several modules of the model have."""
    owned = [id(p) for module in model.modules() for p in module._parameters.values()]
    return {each for each, times in Counter(owned).items() if times > 1}


@contextmanager
def ready(model: nn.Module) -> Iterator[None]:
    """Within it, the model runs as its layers are measured: in eval mode, by plain calls, with ids
    that its embeddings have and labels that its losses have."""
    with hold_interrupts(), eval_mode(model), plain_calls(model), check_ids(model), _CheckLabels():
        yield


class _Switch:
    """A setting of the whole process: whoever comes first changes it, whoever leaves last restores
    it, in any thread."""

    def __init__(self, change: Callable[[], Callable[[], object]]) -> None:
        self._change, self._lock, self._users = change, Lock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._restore = self._change()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()


def _leave_fast_path() -> Callable[[], object]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return partial(torch.backends.mha.set_fastpath_enabled, enabled)


def _force_eager() -> Callable[[], object]:
    return partial(torch.compiler.set_stance("force_eager").__exit__, None, None, None)


_NO_FAST_PATH, _EAGER = _Switch(_leave_fast_path), _Switch(_force_eager)


@contextmanager
def plain_calls(model: nn.Module) -> Iterator[None]:
    """Within it, modules call their layers one by one, in Python: not so the fused kernel of
    nn.TransformerEncoder, nor what `module.compile()` has made."""
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    with _NO_FAST_PATH(), _EAGER() if compiled else nullcontext():
        yield


class _Watch:
    """What hooks on the model, on its layers and on its embeddings see."""

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], measured: Collection[Layer]
    ) -> None:
        self.model, self.layers = model, [layer.module for layer in layers]
        self.calls: list[Call] = []
        self.orders: list[list[nn.Module]] = []  # of each call
        self.seen, self.repeated = set[nn.Module](), set[nn.Module]()
        self.replayable, self.inside = True, 0
        shared, found = find_shared(model), {x: x._parameters.get("bias") for x in self.layers}
        self.biases = {x: b for x, b in found.items() if b is not None and id(b) not in shared}
        self.moments = {
            layer.module: Moments(centred=layer.module in self.biases) for layer in measured
        }

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            model = self.model
            handles = [
                model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
                model.register_forward_hook(self._end, always_call=True),
            ]
            for layer in self.layers:
                handles.append(layer.register_forward_pre_hook(self._arrive, with_kwargs=True))
            for handle in handles:
                stack.callback(handle.remove)
            yield

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inside += 1
        if self.inside > 1:
            return
        self.replayable &= is_plain((args, kwargs))
        self.calls.append(_record_call(model, args, kwargs))
        self.orders.append([])

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self.inside -= 1

    def _arrive(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.add(layer)
        masks: list[Tensor] = []
        if self.inside:
            masks = self.calls[-1].masks
            self.orders[-1].append(layer)
            if self.orders[-1].count(layer) > 1:
                self.repeated.add(layer)
        else:
            self.replayable = False
        if layer in self.moments:
            self.moments[layer].add(select_rows(take_input(args, kwargs), masks))


def check_batches(name: str, batches: object, *, or_function: bool = False) -> None:
    """Raises: TypeError: it is a single batch, or no iterable of batches."""
    single = isinstance(batches, Tensor | Mapping | str)
    if single or not (isinstance(batches, Iterable) or (or_function and callable(batches))):
        also = ", or a function that runs the model" if or_function else ""
        raise TypeError(
            f"{name}={type(batches).__name__} must be an iterable of batches, for example "
            f"[batch]{also}"
        )


def prepare_call(model: nn.Module, batch: Any) -> Call:
    """The call of the model with this batch, as `run` would make it."""
    if isinstance(batch, Mapping):
        return _record_call(model, (), {**batch})
    return _record_call(model, tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})


def _record_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    masks = find_masks(model, args, kwargs)
    return Call(copy_values(args), copy_values(kwargs), masks, capture_state())


@contextmanager
def check_ids(model: nn.Module) -> Iterator[None]:
    """Within it, embeddings refuse ids which they have no row for.

    Raises:
        ValueError: then.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_pre_hook(_check_ids(name)).remove)
        yield


def _check_ids(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook of the embedding of that name, that refuses ids which it has no row for."""

    def check(module: Any, args: tuple[Any, ...]) -> None:
        ids, rows = args[0] if args else None, int(module.num_embeddings)
        if not isinstance(ids, Tensor) or not ids.numel():
            return
        least, most = ids.min().item(), ids.max().item()
        if least < 0 or most >= rows:
            wrong = least if least < 0 else most
            raise ValueError(
                f"batches: the id {wrong} is outside of the embedding {name!r}, which has "
                f"{rows:,} rows: the batches come from another tokenizer, or are too long"
            )

    return check


class _CheckLabels(TorchFunctionMode):
    """Within it, losses refuse labels for which they have no class.

    Raises:
        ValueError: then.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss) and not torch.compiler.is_compiling():
            _require_classes(args[0], args[1], (kwargs or {}).get("ignore_index", -100))
        return func(*args, **(kwargs or {}))


def _require_classes(logits: Tensor, labels: Tensor, ignored: int) -> None:
    """`logits`: `(classes,)` or `(rows, classes, ...)`."""
    classes = logits.shape[min(1, logits.ndim - 1)]
    if labels.is_floating_point() or not labels.numel():
        return
    known = labels[labels != ignored]
    wrong = known[(known < 0) | (known >= classes)]
    if wrong.numel():
        raise ValueError(
            f"batches: the label {wrong[0].item()} is outside of the loss, which has {classes:,} "
            f"classes; {ignored} says that a label does not count"
        )


def _merge_orders(orders: Iterable[Sequence[nn.Module]]) -> list[nn.Module]:
    """One order that agrees with those of all calls; if there is none, that of first arrival."""
    first = list(dict.fromkeys(module for order in orders for module in order))
    before: TopologicalSorter[nn.Module] = TopologicalSorter({module: () for module in first})
    for order in orders:
        once = list(dict.fromkeys(order))
        for earlier, later in pairwise(once):
            before.add(later, earlier)
    try:
        return list(before.static_order())
    except CycleError:
        return first


def is_plain(value: Any) -> bool:
    """Whether it is a tensor, a plain value or a container of such: nothing with a memory."""
    if isinstance(value, Mapping):
        return all(is_plain(each) for each in value.values())
    if isinstance(value, tuple | list):
        return all(is_plain(each) for each in value)
    kinds = Tensor | str | bytes | int | float | complex | torch.dtype | torch.device
    return value is None or isinstance(value, kinds)


def copy_values(value: Any) -> Any:
    """The same with tensors of its own; what is neither tensor nor plain container stays."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {name: copy_values(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(copy_values(each) for each in value)
    return value


def _leave_out_cache(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The keyword by which a model of transformers keeps no keys and values of all its layers."""
    owner = sys.modules.get("transformers.modeling_utils")
    if owner is None or not isinstance(model, owner.PreTrainedModel):
        return {}
    taken = "use_cache" in inspect.signature(model.forward).parameters
    return (
        {"use_cache": False}
        if taken and "use_cache" not in name_arguments(model, args, kwargs)
        else {}
    )
