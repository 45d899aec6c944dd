"""Healing: a converted model learns, for a few hundred steps, to answer as the dense one does."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .._model.calls import eval_mode, find_tensors
from .._structure.arguments import checked, warn
from ..duality import promote
from ..optim._groups import param_groups
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
    steps: int,
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
            other, parameters are what they were.
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
    trained = [parameter for group in groups for parameter in group["params"]]
    judges, places = _hold_out(batches, held_out, steps)
    loss_of = partial(_find_loss, model, teacher, logits)
    before = _copy(trained)
    with eval_mode(model), eval_mode(teacher), torch.enable_grad():
        try:
            with Bar("distill", steps, progress) as bar:
                trains = islice(_repeat(batches, places), steps)
                done = _train(groups, loss_of, trains, judges, steps, lr, bar)
        except BaseException:  # Ctrl-C too
            _put_back(trained, before)
            raise
        finally:
            for parameter in trained:
                parameter.grad = None
    if done.kept == 0 and done.before > 0:
        warn(
            "distill: no state on the way had a lower held-out loss than the "
            f"{done.before:.4g} at the start, so the model is as it was: try a lower lr than "
            f"{lr:g}, or more batches"
        )
    return done


def _check_models(model: nn.Module, teacher: nn.Module) -> None:
    for name, given in (("model", model), ("teacher", teacher)):
        for key, parameter in given.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"{name}: {key!r} has no values (meta); load the weights first")
    if torch.is_inference_mode_enabled():
        raise ValueError("nothing can be trained under torch.inference_mode: leave that mode first")
    of_teacher = set(map(id, teacher.parameters()))
    for name, parameter in model.named_parameters():
        if teacher is model or (parameter.requires_grad and id(parameter) in of_teacher):
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
    trained = [parameter for group in groups for parameter in group["params"]]
    scale = 1.0  # of the rates; smaller after a step back
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: scale * _scale_rate(step, steps)
    )
    judged = {steps * n // JUDGEMENTS for n in range(1, JUDGEMENTS + 1)}
    losses, kept, best, before = list[float](), 0, _copy(trained), _judge(loss_of, judges)
    after = _require_finite(before, "the loss of the held-out batches", "outputs are not finite")
    hint = f"lr={lr} is too large, or the outputs on this batch are not finite"
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = loss_of(batch)
        losses.append(_require_finite(loss.item(), f"the loss of step {step}", hint))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm(p.grad for p in trained if p.grad is not None)
        _require_finite(norm.item(), f"the norm of the gradients of step {step}", hint)
        optimizer.step()
        if step in judged:
            found = _judge(loss_of, judges)
            if found < after:
                kept, after, best = step, found, _copy(trained)
            else:
                scale /= BACKTRACK
                optimizer.state.clear()
                _put_back(trained, best)
        schedule.step()
        bar.show(f"loss {losses[-1]:.4g}")
        bar.advance()
    if len(losses) < steps:
        raise ValueError(
            f"batches ended after {len(losses)} of steps={steps} and cannot be read again: give a "
            "list, or as many batches as steps"
        )
    return Distilled(losses, before, after, kept)


def _require_finite(number: float, what: str, hint: str) -> float:
    if not math.isfinite(number):
        raise FloatingPointError(f"{what} is {number}: {hint}")
    return number


def _scale_rate(step: int, steps: int) -> float:
    """The rate of step 0, 1, ... relative to the highest.

    >>> [round(_scale_rate(step, 20), 3) for step in (0, 1, 2, 11, 20)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rise = max(1, round(WARMUP * steps))
    if step < rise:
        return (step + 1) / rise
    return (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2


def _hold_out(
    batches: Iterable[Any], held_out: Iterable[Any] | None, steps: int
) -> tuple[list[Any], range]:
    """The batches that judge the model, and where in `batches` they stand.

    >>> _hold_out(list("abcdefghijklmnopqrstuvwxyz"), None, steps=80)
    (['g', 't'], range(6, 26, 13))
    """
    if held_out is not None:
        check_batches("held_out", held_out)
        judges, places = list(held_out), range(0)
    elif isinstance(batches, Sequence):
        count = max(1, min(len(batches) // BATCHES_PER_JUDGE, steps // STEPS_PER_JUDGE))
        stride = max(1, len(batches) // count)
        places = range(stride // 2, stride * count, stride)
        judges = [batches[n] for n in places if n < len(batches)]
        places = places if len(batches) > 1 else range(0)  # one alone trains and judges
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
    found = True
    while found:
        found = False
        for position, batch in enumerate(batches):
            if position not in held_out:
                found = True
                yield batch


def _judge(loss_of: Callable[[Any], Tensor], held_out: Sequence[Any]) -> float:
    with torch.no_grad():
        return sum(loss_of(batch).item() for batch in held_out) / len(held_out)


def _copy(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _put_back(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


# ---- the loss ------------------------------------------------------------------------------------


def _find_loss(model: nn.Module, teacher: nn.Module, logits: bool | None, batch: Any) -> Tensor:
    """The sum over the outputs that both models have."""
    call = prepare_call(model, batch)  # which gives each model copies of the tensors
    with torch.no_grad():
        wanted = dict(find_tensors(call.make(teacher)))
    found = {name: s for name, s in find_tensors(call.make(model)) if s.ndim}  # no losses
    losses = []
    for name, s in found.items():
        if name not in wanted:
            continue
        t = wanted[name]
        if s.shape != t.shape:
            raise ValueError(
                f"{name or 'output'} is {tuple(s.shape)} from the model and {tuple(t.shape)} from "
                "the teacher: they must be alike"
            )
        s, t = (promote(select_rows(each, call.masks)) for each in (s, t))  # (rows, features)
        divergent = name.endswith("logits") if logits is None else logits
        losses.append(_divergence(s, t) if divergent else _relative_square(s, t))
    if not losses:
        raise ValueError(
            f"the model returns {[*found] or 'no floating tensor'} and the teacher "
            f"{[*wanted] or 'no floating tensor'}: there is nothing to compare"
        )
    return sum(losses, torch.zeros((), device=losses[0].device))


def _divergence(s: Tensor, t: Tensor) -> Tensor:
    """`KL(softmax(t) || softmax(s))`, the mean over rows; `(rows, classes)`.

    Its gradient is softmax(s) - softmax(t), and exactly zero where s is t: Adam would take what is
    left by rounding for a direction.
    """
    sum_s, sum_t = (logits.logsumexp(-1, keepdim=True) for logits in (s, t))  # (rows, 1)
    p = (t - sum_t).exp()
    kl = (p * (t - s)).sum(-1) - (sum_t - sum_s).squeeze(-1)  # (rows,)
    return kl.mean()


def _relative_square(s: Tensor, t: Tensor) -> Tensor:
    size = t.square().sum()
    return (s - t).square().sum() / size.clamp_min(torch.finfo(size.dtype).tiny)
