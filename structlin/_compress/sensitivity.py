"""What an error in each layer does to the model's outputs, and what the layers' inputs are like.

Both are measured on the dense model. They say where `compress` keeps most.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._model.calls import find_tensors
from .._model.linears import Layer
from .moments import Moments, measure_inputs
from .padding import select_rows
from .progress import Bar
from .replay import Call, CheckNumbers, Replay


class Inputs(NamedTuple):
    """What the inputs of a layer are like. Without any that varies it has no covariance."""

    layer: Layer
    mean: Tensor | None  #: (features,); None: no input reaches it
    covariance: Tensor | None  #: (features, features)


# "divergence", "outputs", or a number of what the model returns; None: see `compress`
Loss = str | Callable[[Any], Tensor] | None
LOSSES = "divergence", "outputs"
# By trial: SmolLM2-135M at 0.6, 8192 tokens: a hundredth of the mean gives a lower perplexity than
# a tenth, and much lower than half of it. All of G in place of its diagonal gives 14 % more there,
# and 4 % less at 0.8.
PRIOR_TOKENS = 100
ROWS = 256  # of logits that are worked on at once
MEASURED_ROWS = 2048  # of the logits of a call; more tell hardly more of a change

_REFUSED = "allocation='error' is needed: 'sensitivity' takes gradients, but the model"


@torch.no_grad()
def list_inputs(
    replay: Replay, layers: Sequence[Layer], *, progress: bool | None = None
) -> Generator[Inputs, None, None]:
    """The inputs of each layer in a few of the calls of the dense model, in the model's order. One
    covariance is held at a time, but of the layers that a call calls twice."""
    layer_of = {layer.module: layer for layer in layers}
    repeated = [layer_of[module] for module in layer_of if module in replay.repeated]
    moments_of_repeated = measure_inputs(replay, repeated, replay.few)
    called_once = [
        module
        for module in replay.order
        if module in layer_of and module not in moments_of_repeated
    ]
    measured: set[nn.Module] = set()
    with Bar("measure", len(layers), progress) as bar:

        def show(module: nn.Module, moments: Moments | None) -> Inputs:
            bar.show(layer_of[module].name)
            bar.advance()
            measured.add(module)
            mean = moments.mean_z if moments is not None and moments.count else None
            return Inputs(layer_of[module], mean, _take_covariance(moments))

        for module, moments in moments_of_repeated.items():
            yield show(module, moments)
        with closing(replay.walk(called_once, replay.few)) as visits:
            for visit in visits:
                moments = Moments(centred=visit.module in replay.biases)
                for wait in visit.waits:
                    assert wait.dense is not None  # there are no other runs
                    with visit.memory.lend(wait.dense.input):
                        moments.add(select_rows(wait.dense.input, wait.call.masks))
                moments.require_finite(layer_of[visit.module].name)
                yield show(visit.module, moments)
                if visit.module is called_once[-1]:
                    break  # what the model does after it is not needed
        for module in layer_of:
            if module not in measured:
                yield show(module, None)


def _take_covariance(moments: Moments | None) -> Tensor | None:
    """C_zz; with fewer rows than features C_zz + lam I, or errors would be free that the rows do
    not show."""
    if moments is None or not moments.count or not moments.ridge:
        return None
    covariance = moments.zz
    if moments.count < len(covariance):
        covariance.diagonal().add_(moments.ridge)
    return covariance


def measure_sensitivities(
    replay: Replay, layers: Sequence[Layer], loss: Loss = None, progress: bool | None = False
) -> dict[nn.Module, Tensor]:
    """What a small error e in a layer's output, alike for all tokens, does to the loss: to second
    order sum(G e^2), with a G for each output, `(out_features,)` in float64.

    G is the sum of g^2 over tokens, with g the loss's gradient at that output; the mean over a few
    of the calls. Padding does not count. Few tokens tell more of a layer than of each output: G is
    drawn to its mean, by as much as `PRIOR_TOKENS` tokens would. A call takes the memory of
    training.

    - The divergence of logits, from what they are: g is of log p at labels that are drawn from p.
      Their mean g g^T is the Fisher information, and half of sum(G e^2) the divergence in nats.
    - The squared relative change of outputs: g is of a sum with random signs.
    - A loss of the user's own: g is its gradient.

    Raises:
        ValueError: the model turns gradients off; none of its outputs has one, they are not finite
            or all zero; no call has a row.
        TypeError: the loss returns no single number.

    Source: Martens & Grosse 2015 (arXiv:1503.05671).

    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    >>> for layer, scale in zip(model, (1.0, 3.0)):
    ...     _ = layer.weight.data.copy_(scale * torch.eye(4))
    >>> from structlin._compress.replay import observe
    >>> from structlin._model.linears import linear_layers
    >>> replay = observe(model, [*model], [torch.eye(4)])
    >>> first, second = measure_sensitivities(replay, linear_layers(model)).values()
    >>> (first / second).round(decimals=4)  # an error of the first is multiplied by 3
    tensor([9., 9., 9., 9.], dtype=torch.float64)
    """
    totals = {
        layer.module: layer.matrix.new_zeros(layer.out_features, dtype=torch.float64)
        for layer in layers
    }
    tokens: Counter[nn.Module] = Counter()
    generator = torch.Generator().manual_seed(0)
    calls = replay.few
    with Bar("gradients", len(calls), progress) as bar:
        for call in calls:
            for module, gradients in _take_gradients(replay, layers, call, loss, generator):
                squares = gradients.float().square().sum(0, dtype=torch.float64)
                totals[module] += squares.to(totals[module]) / len(calls)
                tokens[module] += len(gradients)
            bar.advance()
    sums = [total.sum().item() for total in totals.values()]
    if not all(map(math.isfinite, sums)):
        raise ValueError(f"{_REFUSED} has gradients that are not finite")
    if tokens and not any(tokens.values()):
        raise ValueError("batches: no row of them reaches the layers to convert")
    if not any(sums):
        raise ValueError(
            f"{_REFUSED} has only gradients of zero; another loss may have some (loss='outputs')"
        )
    sensitivities = {}
    for module, total in totals.items():
        share_of_mean = PRIOR_TOKENS / (PRIOR_TOKENS + tokens[module])
        sensitivities[module] = total.lerp(total.mean(), share_of_mean)
    return sensitivities


def _take_gradients(
    replay: Replay, layers: Sequence[Layer], call: Call, loss: Loss, generator: torch.Generator
) -> list[tuple[nn.Module, Tensor]]:
    """The gradients at each of the layers' outputs in this call, `(tokens, out_features)`."""
    outputs: list[tuple[nn.Module, Tensor]] = []
    runs_again = False

    def keep(module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise _GradientsOff
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        if not runs_again:
            outputs.append((module, output))
        return _pass_on(output)

    modules = [layer.module for layer in layers]
    try:
        result = replay.run(call, modules, keep, grad=True)
    except _GradientsOff:
        return _take_gradients_on_the_way_back(replay, layers, call, loss, generator)
    runs_again = True  # a model that checkpoints activations calls its layers once more
    with torch.enable_grad(), CheckNumbers(replay.model):
        value = _take_loss(result, loss, call.masks, generator)
    del result  # whose logits are large
    tensors = [output for _, output in outputs]
    gradients = torch.autograd.grad(value, tensors, allow_unused=True)
    _require_finite(value, loss, replay, layers, call)
    taken = [
        (module, select_rows(gradient, call.masks))
        for (module, _), gradient in zip(outputs, gradients, strict=True)
        if gradient is not None
    ]
    outputs.clear()  # `keep` lives on in the run's modules until Python looks for cycles
    return taken


def _take_gradients_on_the_way_back(
    replay: Replay, layers: Sequence[Layer], call: Call, loss: Loss, generator: torch.Generator
) -> list[tuple[nn.Module, Tensor]]:
    """The same for a model that runs layers without gradients, and on the way back once more with
    them: `torch.utils.checkpoint` with use_reentrant=True."""
    gradients: list[tuple[nn.Module, Tensor]] = []
    without_gradients: set[nn.Module] = set()

    def keep(module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        def note(gradient: Tensor) -> None:
            gradients.append((module, select_rows(gradient, call.masks)))

        if not torch.is_grad_enabled():
            without_gradients.add(module)
            return output
        without_gradients.discard(module)  # it is called once more, on the way back
        output = output if output.requires_grad else output.detach().requires_grad_()
        output.register_hook(note)  # type: ignore[no-untyped-call]
        return _pass_on(output)

    result = replay.run(call, [layer.module for layer in layers], keep, grad=True, backward=True)
    has_gradients = any(tensor.requires_grad for _, tensor in find_tensors(result))
    if not callable(loss) and not has_gradients:
        raise ValueError(f"{_REFUSED} turns gradients off (no_grad or inference_mode)")
    with torch.enable_grad(), CheckNumbers(replay.model):
        value = _take_loss(result, loss, call.masks, generator)
    del result  # whose logits are large
    value.backward()  # type: ignore[no-untyped-call]
    _require_finite(value, loss, replay, layers, call)
    if without_gradients:  # nobody knows their harm: it is not zero
        names = [layer.name for layer in layers if layer.module in without_gradients]
        raise ValueError(
            f"{_REFUSED} turns gradients off (no_grad or inference_mode) around these layers: "
            f"{', '.join(names)}; or exclude them"
        )
    taken = gradients.copy()
    gradients.clear()  # `keep` lives on in the run's modules until Python looks for cycles
    return taken


class _PassOn(torch.autograd.Function):
    """The same numbers in the same memory, one step later in the graph."""

    @staticmethod
    def forward(output: Tensor) -> Tensor:
        return output.data  # no view: writing into one would pass by this step

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing is needed on the way back. torch.func asks for this method."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _pass_on(output: Tensor) -> Tensor:
    """What the model gets of a layer's output: what it writes into that, as `nn.ReLU(inplace=True)`
    does, comes after the output whose gradient is taken."""
    passed: Tensor = _PassOn.apply(output)  # type: ignore[no-untyped-call]
    return passed


class _GradientsOff(BaseException):
    """A layer is called without gradients. No `except Exception` of the model catches it."""


def _require_finite(
    value: Tensor, loss: Loss, replay: Replay, layers: Sequence[Layer], call: Call
) -> None:
    if math.isfinite(value.item()):
        return
    measure_inputs(replay, layers, [call])  # which names the layer, if it is its input
    if callable(loss):
        raise ValueError(
            f"loss returned {value.item()}, of what the model returns; it must be finite for every "
            "batch"
        )
    raise ValueError(f"{_REFUSED} returns values that are not finite")


def _take_loss(result: Any, loss: Loss, masks: list[Tensor], generator: torch.Generator) -> Tensor:
    """The number whose gradients are taken, of what the model returns."""
    if callable(loss):
        value = loss(result)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            shape = tuple(getattr(value, "shape", ()))
            requires_grad = getattr(value, "requires_grad", False)
            raise TypeError(
                "loss must return a tensor of one number that has a gradient, of what the model "
                f"returns; it returned {type(value).__name__} of shape {shape}, "
                f"requires_grad={requires_grad}"
            )
        return value.float().sum()
    tensors = {name: t for name, t in find_tensors(result) if t.requires_grad}
    if not tensors:
        raise ValueError(f"{_REFUSED} returns no floating tensor that has a gradient")
    logits = [t for name, t in tensors.items() if _are_logits(name, t, loss)]
    if loss == "divergence" and not logits:
        raise ValueError("loss='divergence': the model returns numbers alone, no logits")
    if logits:
        terms = [_surprise(select_rows(tensor, masks), generator) for tensor in logits]
    else:
        terms = [_probe(_rows_of(tensor, masks), generator) for tensor in tensors.values()]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def measure_change(before: Any, after: Any, loss: Loss, masks: list[Tensor]) -> float:
    """How far apart are what the model returns before and after a change of its layers, in the
    measure that `measure_sensitivities` predicts as sum(G e^2): twice the divergence in nats,
    summed over rows, or the squared relative change of each output.

    A token that is impossible before, with a logit of -inf, counts nothing. Of more than
    `MEASURED_ROWS` rows of logits some are measured, evenly spread, for all. Where an output is
    gone, or has another shape, the change is infinite.
    """
    old = dict(find_tensors(before))
    new = dict(find_tensors(after))
    if any(name not in new or new[name].shape != tensor.shape for name, tensor in old.items()):
        return math.inf
    logits = [name for name, tensor in old.items() if _are_logits(name, tensor, loss)]
    change = 0.0
    if logits:
        # 2 KL(p || q) = 2 sum of p (log p - log q), over rows and classes
        for name in logits:
            old_rows = select_rows(old[name], masks)  # (rows, classes)
            new_rows = select_rows(new[name], masks)
            if not len(old_rows):
                continue
            step = max(1, math.ceil(len(old_rows) / MEASURED_ROWS))
            divergence = _find_divergence(old_rows[::step], new_rows[::step])
            change += 2 * divergence * (len(old_rows) / len(old_rows[::step]))
        return change
    for name, tensor in old.items():
        old_rows = _rows_of(tensor, masks).float()
        new_rows = _rows_of(new[name], masks).float()
        squared_size = old_rows.square().sum().clamp(min=1e-30)
        change += ((new_rows - old_rows).square().sum() / squared_size).item()
    return change


def _find_divergence(old: Tensor, new: Tensor) -> float:
    """KL(softmax(old) || softmax(new)) in nats, summed over the rows, some at a time."""
    divergence = 0.0
    for old_rows, new_rows in zip(torch.split(old, ROWS), torch.split(new, ROWS), strict=True):
        log_p = old_rows.float().log_softmax(-1)  # (rows, classes)
        log_q = new_rows.float().log_softmax(-1)
        terms = log_p.exp() * (log_p - log_q)
        divergence += terms.where(log_p > -math.inf, 0.0).sum().item()
    return divergence


def count_rows(result: Any, masks: list[Tensor]) -> int:
    """The most rows that an output has, without padding."""
    tensors = [tensor for _, tensor in find_tensors(result) if tensor.ndim]
    return max((len(_rows_of(tensor, masks)) for tensor in tensors), default=0)


def _rows_of(tensor: Tensor, masks: list[Tensor]) -> Tensor:
    return select_rows(tensor, masks) if tensor.ndim > 1 else tensor[None]


def _are_logits(name: str, tensor: Tensor, loss: Loss) -> bool:
    is_taken_for_logits = name.endswith("logits") if loss is None else loss == "divergence"
    return is_taken_for_logits and tensor.ndim > 0


def _surprise(logits: Tensor, generator: torch.Generator) -> Tensor:
    """- log p of labels drawn from p, summed over rows; `(rows, classes)`."""
    logs = logits.float().log_softmax(-1).flatten(0, -2)  # (rows, classes)
    labels = []  # the same as if all rows were drawn at once
    for rows in torch.split(logs.detach(), ROWS):
        p = rows.exp().cpu()
        if not p.isfinite().all():
            return logs.sum()  # not finite
        labels.append(torch.multinomial(p, 1, generator=generator))
    return -logs.gather(-1, torch.cat(labels).to(logs.device)).sum()  # labels: (rows, 1)


def _probe(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The rows with random signs and by their inverse size, summed."""
    signs = torch.randint(2, rows.shape, generator=generator).mul(2).sub(1).to(rows)
    size = rows.detach().float().norm().item()
    return (signs * rows).float().sum() / (size or 1.0)
