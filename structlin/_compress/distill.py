"""Healing: a converted model learns, for a few hundred steps, to answer as the dense one does."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from .._model.calls import find_tensors
from .._model.transaction import Step, as_it_was_on_error, completed_at_end
from .._structure.arguments import MAX_STEPS, Range, checked, warn
from ..duality import promote
from ..optim._groups import param_groups
from .memory import storages_in
from .padding import select_rows
from .progress import Bar
from .replay import check_batches, prepare_call

WARMUP = 0.1  # of the steps, in which the rate rises; a cosine leads to zero afterwards
JUDGEMENTS = 10  # passes over the held-out batches during the steps, evenly spread
BATCHES_PER_JUDGE, STEPS_PER_JUDGE = 10, 40  # a judge is a held-out batch; so judging stays cheap
BACKTRACK = 4.0  # the rates are divided by it where the held-out loss has not fallen


@dataclass(frozen=True)
class Distilled:
    """What `distill` has done to the model; losses as it computes them (dimensionless)."""

    losses: list[float] = field(repr=False)  #: of every step on its batch, before it is taken
    before: float  #: mean loss of the held-out batches
    after: float  #: the same, of the model as it is left; never above `before`
    kept: int  #: steps that the model as it is left has taken; 0: it is unchanged


@checked
def distill(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    steps: Annotated[int, Range(1, MAX_STEPS)],
    lr: float = 1e-4,
    held_out: Iterable[Any] | None = None,
    logits: bool | None = None,
    progress: bool | None = None,
) -> Distilled:
    """Train `model`, in place, to give what `teacher` gives: a converted model after its dense one.

    No labels are needed. The loss is a sum over all floating tensors that both models return. For
    logits it is `KL(softmax(t) || softmax(s))` over the last axis, in nats, the mean over tokens,
    and for everything else `||s - t||^2 / ||t||^2` over the whole batch (dimensionless). Padding
    does not count, see `compress`.

    Held-out batches judge the model before the first step and ten times on the way. Where their
    loss has not fallen, the model goes back to its best state and the rates become a quarter. If no
    state beats the first, a warning says so and the model stays bit for bit what it was.

    AdamW takes the steps, with `param_groups(model, lr, weight_decay=0)`: rates rise over the first
    tenth of the steps and fall as a cosine to zero. Both models run in eval mode; every module's
    mode is restored. What does not require gradients stays as it is; gradients are None afterwards.

    Args:
        model: the student, in float32 or float64 (small steps are lost in lower precision).
        teacher: the dense original; it shares no trained parameter with `model`, so convert a copy.
        batches: inputs of both models, see `compress`. What can be read again, as a list or a
            DataLoader can, is read as often as needed; an iterator must hold `steps` batches.
        steps: of the optimizer, a batch each.
        lr: the highest, as for fine-tuning the dense model.
        held_out: batches that judge and do not train; all are run eleven times. None: a tenth of
            a list of batches, at least one and at most a batch for 40 steps, evenly spread. One
            batch alone trains and judges.
        logits: whether all outputs are logits; None: those whose name ends with "logits".
        progress: whether to show a bar with the loss; None: on a terminal.

    Raises:
        ValueError: outputs of different shapes, or none in common; no batch, or an iterator with
            fewer than `steps`; no list and no `held_out`; a number out of range; teacher and
            student share trained parameters; parameters without values (meta); inference mode.
        TypeError: a model is no module; `batches` or `held_out` is a single batch.
        FloatingPointError: the loss or its gradients are not finite. After this error, as after any
            other, both models are what they were, with the gradients that they had.
    Source: Hinton et al. 2015 (arXiv:1503.02531), section 2.

    >>> import copy
    >>> from structlin import LowRank, convert
    >>> _ = torch.manual_seed(0)
    >>> dense = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    >>> small = convert(copy.deepcopy(dense), LowRank(rank=6), init="project")
    >>> batches = [torch.randn(256, 16) for _ in range(8)]
    >>> healed = distill(small, dense, batches, steps=40, lr=0.01, progress=False)
    >>> round(healed.before, 1), round(healed.after, 1), healed.kept
    (0.7, 0.4, 40)
    """
    _check_models(model, teacher)
    check_batches("batches", batches)
    groups = param_groups(model, lr, weight_decay=0.0)
    trained = _parameters_of(groups)
    judges, places = _hold_out(batches, held_out, steps)
    loss_of = partial(_find_loss, model, teacher, logits)
    with _healed_or_as_they_were(model, teacher, trained), torch.enable_grad():
        model.eval()
        teacher.eval()
        with Bar("distill", steps, progress) as bar:
            training_batches = islice(_repeat(batches, places), steps)
            outcome = _train(groups, loss_of, training_batches, judges, steps, lr, bar)
    if outcome.kept == 0 and outcome.before > 0:
        warn(
            "distill: no state on the way had a lower held-out loss than the "
            f"{outcome.before:.4g} at the start, so the model is as it was: try a lower lr than "
            f"{lr:g}, or more batches"
        )
    return outcome


@contextmanager
def _healed_or_as_they_were(
    model: nn.Module, teacher: nn.Module, trained: Sequence[nn.Parameter]
) -> Iterator[None]:
    """At its end the modules of both models have the modes that they had, and no gradients are
    left. After an error, and after Ctrl-C anywhere, all is what it was: gradients, buffers and
    attributes too."""
    modes = {module: module.training for module in [*model.modules(), *teacher.modules()]}
    gradients = [parameter.grad for parameter in trained]
    buffers = [_Buffer(buffer) for buffer in [*model.buffers(), *teacher.buffers()]]
    steps_back: list[Step] = [
        partial(_put_back, trained, _copy(trained)),
        partial(_set_gradients, trained, gradients),
        *(buffer.put_back for buffer in buffers),
    ]
    at_end: list[Step] = [
        partial(_set_modes, modes),
        partial(_set_gradients, trained, [None] * len(trained)),
    ]
    with as_it_was_on_error(teacher), as_it_was_on_error(model) as undo, completed_at_end(at_end):
        undo += steps_back
        yield


class _Buffer:
    """A buffer, and what it had: a model may write into it while it runs."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._values = tensor.detach().clone()
        self._version = _version_of(tensor)

    def put_back(self) -> None:
        if _version_of(self._tensor) != self._version:
            self._tensor.data.copy_(self._values)


def _version_of(tensor: Tensor) -> int:
    """How often somebody has written into it; torch does not count that in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _check_models(model: nn.Module, teacher: nn.Module) -> None:
    for argument, module in (("model", model), ("teacher", teacher)):
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    f"{argument}: {name!r} has no values (meta); load the weights first"
                )
    if torch.is_inference_mode_enabled():
        raise ValueError("nothing can be trained under torch.inference_mode: leave that mode first")
    # also of another parameter in the same memory: load_state_dict(..., assign=True) makes such
    storages_of_teacher = {*storages_in([*teacher.parameters()])}
    for name, parameter in model.named_parameters():
        is_shared = not storages_of_teacher.isdisjoint(storages_in(parameter))
        if teacher is model or (parameter.requires_grad and is_shared):
            raise ValueError(
                f"teacher shares {name!r} with the model, so that it would change: convert a copy, "
                "copy.deepcopy(teacher)"
            )


# ---- the course of training ----------------------------------------------------------------------


def _train(
    groups: list[dict[str, Any]],
    loss_of: Callable[[Any], Tensor],
    batches: Iterable[Any],
    judges: Sequence[Any],
    steps: int,
    lr: float,
    bar: Bar,
) -> Distilled:
    """Take the steps; the parameters are left as they were judged best."""
    trained = _parameters_of(groups)
    scale = 1.0  # of the rates; smaller after a step back
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: scale * _scale_rate(step, steps)
    )
    judged_steps = {steps * n // JUDGEMENTS for n in range(1, JUDGEMENTS + 1)}
    losses: list[float] = []
    first_loss = _judge(loss_of, judges)
    _require_finite(first_loss, "the loss of the held-out batches", "outputs are not finite")
    best_step = 0
    best_loss = first_loss
    best_values = _copy(trained)
    hint = f"lr={lr} is too large, or the outputs on this batch are not finite"

    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = loss_of(batch)
        training_loss = loss.item()
        _require_finite(training_loss, f"the loss of step {step}", hint)
        losses.append(training_loss)
        if not loss.requires_grad:
            raise ValueError(
                "model: what it returns has no gradient; it turns gradients off (no_grad or "
                "inference_mode), or no parameter that is trained takes part"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm(p.grad for p in trained if p.grad is not None)
        _require_finite(norm.item(), f"the norm of the gradients of step {step}", hint)
        optimizer.step()

        if step in judged_steps:
            held_out_loss = _judge(loss_of, judges)
            if held_out_loss < best_loss:
                best_step = step
                best_loss = held_out_loss
                best_values = _copy(trained)
            else:  # the next step begins from the best state, with smaller rates
                scale /= BACKTRACK
                optimizer.state.clear()
                _put_back(trained, best_values)

        schedule.step()
        bar.show(f"loss {losses[-1]:.4g}")
        bar.advance()
    if len(losses) < steps:
        raise ValueError(
            f"batches ended after {len(losses)} of steps={steps} and cannot be read again: give a "
            "list, or as many batches as steps"
        )
    return Distilled(losses, before=first_loss, after=best_loss, kept=best_step)


def _require_finite(number: float, what: str, hint: str) -> None:
    if not math.isfinite(number):
        raise FloatingPointError(f"{what} is {number}: {hint}")


def _scale_rate(step: int, steps: int) -> float:
    """The rate of step 0, 1, ... relative to the highest.

    >>> [round(_scale_rate(step, 20), 3) for step in (0, 1, 2, 11, 20)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warmup_steps = max(1, round(WARMUP * steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))) / 2


def _hold_out(
    batches: Iterable[Any], held_out: Iterable[Any] | None, steps: int
) -> tuple[list[Any], range]:
    """The batches that judge the model, and where in `batches` they stand.

    >>> _hold_out(list("abcdefghijklmnopqrstuvwxyz"), None, steps=80)
    (['g', 't'], range(6, 26, 13))
    """
    if held_out is not None:
        check_batches("held_out", held_out)
        judges = list(held_out)
        places = range(0)
    elif isinstance(batches, Sequence):
        count = max(1, min(len(batches) // BATCHES_PER_JUDGE, steps // STEPS_PER_JUDGE))
        stride = max(1, len(batches) // count)
        places = range(stride // 2, stride * count, stride)
        judges = [batches[n] for n in places if n < len(batches)]
        if len(batches) == 1:  # it trains and judges
            places = range(0)
    else:
        raise ValueError(
            f"batches={type(batches).__name__} is no list, of which some could be held out: give "
            "a list, or held_out=[batch, ...]"
        )
    if not judges:
        raise ValueError(f"{'batches' if held_out is None else 'held_out'} has no batch")
    return judges, places


def _repeat(batches: Iterable[Any], held_out: range) -> Iterator[Any]:
    """The batches but those held out, again and again, until there is none any more.

    >>> [*islice(_repeat("abc", range(1, 2)), 5)], [*_repeat(iter("ab"), range(0))]
    (['a', 'c', 'a', 'c', 'a'], ['a', 'b'])
    """
    has_batches = True
    while has_batches:
        has_batches = False
        for position, batch in enumerate(batches):
            if position not in held_out:
                has_batches = True
                yield batch


def _parameters_of(groups: Sequence[dict[str, Any]]) -> list[nn.Parameter]:
    parameters: list[nn.Parameter] = []
    for group in groups:
        parameters += group["params"]
    return parameters


def _judge(loss_of: Callable[[Any], Tensor], held_out: Sequence[Any]) -> float:
    with torch.no_grad():
        return sum(loss_of(batch).item() for batch in held_out) / len(held_out)


def _copy(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _put_back(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


# ---- the loss ------------------------------------------------------------------------------------


def _find_loss(model: nn.Module, teacher: nn.Module, logits: bool | None, batch: Any) -> Tensor:
    """The sum over the outputs that both models have."""
    call = prepare_call(model, batch)  # which gives each model copies of the tensors
    with torch.no_grad():
        teacher_outputs = dict(find_tensors(call.make(teacher)))
    outputs = {name: s for name, s in find_tensors(call.make(model)) if s.ndim}  # no losses
    losses = []
    for name, s in outputs.items():
        if name not in teacher_outputs:
            continue
        t = teacher_outputs[name]
        if s.shape != t.shape:
            raise ValueError(
                f"{name or 'output'} is {tuple(s.shape)} from the model and {tuple(t.shape)} from "
                "the teacher: they must be alike"
            )
        s_rows = promote(select_rows(s, call.masks))  # (rows, features)
        t_rows = promote(select_rows(t, call.masks))
        are_logits = name.endswith("logits") if logits is None else logits
        find_difference = _divergence if are_logits else _relative_square
        losses.append(find_difference(s_rows, t_rows))
    if not losses:
        raise ValueError(
            f"the model returns {[*outputs] or 'no floating tensor'} and the teacher "
            f"{[*teacher_outputs] or 'no floating tensor'}: there is nothing to compare"
        )
    return sum(losses, torch.zeros((), device=losses[0].device))


def _divergence(s: Tensor, t: Tensor) -> Tensor:
    """`KL(softmax(t) || softmax(s))`, the mean over rows; `(rows, classes)`.

    Its gradient is softmax(s) - softmax(t), and exactly zero where s is t: Adam would take what is
    left by rounding for a direction.
    """
    # p = softmax(t), with log p = t - logsumexp(t): (rows, classes). So
    # KL = sum over classes of p (log p - log q) = sum of p (t - s), minus the difference of the
    # logsumexps, as p sums to 1: (rows,)
    logsumexp_s = s.logsumexp(-1, keepdim=True)  # (rows, 1)
    logsumexp_t = t.logsumexp(-1, keepdim=True)
    p = (t - logsumexp_t).exp()
    kl = (p * (t - s)).sum(-1) - (logsumexp_t - logsumexp_s).squeeze(-1)  # (rows,)
    return kl.mean()


def _relative_square(s: Tensor, t: Tensor) -> Tensor:
    size = t.square().sum()
    return (s - t).square().sum() / size.clamp_min(torch.finfo(size.dtype).tiny)
