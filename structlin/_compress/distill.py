"""Healing: a converted model learns, for a few hundred steps, to answer as the dense one does."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._model.outputs import find_tensors
from .._model.survey import eval_mode
from .._progress import Bar
from .._warnings import warn
from ..duality import promote
from ..optim import param_groups
from .replay import check_batches, prepare_call
from .padding import select_rows

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
    temperature: float = 1.0,
    logits: bool | None = None,
    weight_decay: float = 0.0,
    progress: bool | None = None,
) -> Distilled:
    """Train `model`, in place, to give what `teacher` gives: a converted model after its dense one.

    No labels are needed. The loss is a sum over all floating tensors that both models return,
    whether alone, in a tuple or under a name, as transformers does. For logits it is the divergence
    of the two distributions over the last axis, at temperature T, in nats, the mean over tokens:

        T^2 KL(softmax(t / T) || softmax(s / T))

    and for everything else `||s - t||^2 / ||t||^2`, over the whole batch (dimensionless). Padding
    does not count: tokens that the model's `attention_mask` or `decoder_attention_mask`
    (transformers) or `src_key_padding_mask` (torch) leaves out, in outputs that begin with the
    shape of the mask, `(batch, tokens)`.

    Held-out batches judge the model before the first step and ten times on the way. Where their
    loss has not fallen, the model goes back to its best state and the rates become a quarter: a
    rate is too large once the loss is small, since Adam's steps are as large as ever. So the model
    never ends worse on them than it came. If no state beats the first, a warning says so and the
    model stays bit for bit what it was.

    AdamW takes the steps, with `param_groups(model, lr)`: rates rise over the first tenth of the
    steps and fall as a cosine to zero. Both models run in eval mode, so without dropout and with
    the batch norms' statistics as they are; every module's mode is restored. Parameters that do not
    require gradients stay as they are; gradients are None afterwards. The models get copies of the
    batches' tensors.

    Args:
        model: the student, in float32 or float64 (small steps are lost in lower precision).
        teacher: the dense original; it shares no trained parameter with `model`, so convert a copy.
        batches: inputs of both models: a mapping is passed as keywords, a tuple or list as
            positions, anything else as the one argument. What can be read again, as a list or a
            DataLoader can, is read as often as needed; an iterator must hold `steps` batches.
        steps: of the optimizer, a batch each.
        lr: the highest, as for fine-tuning the dense model; cores have rates of their own, see
            `param_groups`.
        held_out: batches that judge and do not train; all are run eleven times. None: a tenth of
            `batches`, at least one and at most a batch for 40 steps: evenly spread over a list, the
            first ones of anything else (a loader that shuffles trains on them later). A single
            batch trains and judges. For an iterator `held_out` must be given.
        temperature: T; above 1, small probabilities count more.
        logits: whether all outputs are logits; None: those whose name ends with "logits".
        weight_decay: of matrices, see `param_groups`.
        progress: whether to show a bar with the loss; None: on a terminal.

    Returns:
        The loss of every step, the held-out loss before and after, and which state is kept.

    Raises:
        ValueError: outputs of different shapes, or none in common; no batch, or an iterator with
            fewer than `steps` or without `held_out`; a number out of range; teacher and student are
            one or share trained parameters; parameters without values (meta); inference mode.
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
    groups = param_groups(model, lr, weight_decay=weight_decay)
    judges, positions = _hold_out(batches, held_out, steps)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    scale = 1.0  # of the rates; smaller after a step back
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: scale * _scale_rate(step, steps)
    )
    trained = [parameter for group in groups for parameter in group["params"]]
    judged = {steps * n // JUDGEMENTS for n in range(1, JUDGEMENTS + 1)}
    losses: list[float] = []
    with (
        eval_mode(model),
        eval_mode(teacher),
        torch.enable_grad(),
        _restore_on_error(trained) as best,
        Bar("distill", steps, progress) as bar,
    ):

        def loss_of(batch: Any) -> Tensor:
            return _loss_of(model, teacher, batch, temperature, logits)

        kept, before = 0, _judge(loss_of, judges)
        if not math.isfinite(before):
            raise FloatingPointError(
                f"the loss of the held-out batches is {before}: the outputs are not finite"
            )
        after = before
        for step, batch in enumerate(_repeat(batches, steps, positions), 1):
            optimizer.zero_grad()
            loss = loss_of(batch)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"the loss of step {step} is {losses[-1]}: lr={lr} is too large, or the "
                    "outputs on this batch are not finite"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            _require_finite(trained, step)
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
    if kept == 0 and before > 0:
        warn(
            f"distill: no state on the way had a lower held-out loss than the {before:.4g} at the "
            f"start, so the model is as it was: try a lower lr than {lr:g}, or more batches"
        )
    return Distilled(losses, before, after, kept)


# ---- arguments -----------------------------------------------------------------------------------


def _check_models(model: nn.Module, teacher: nn.Module) -> None:
    for name, given in (("model", model), ("teacher", teacher)):
        without = [key for key, parameter in given.named_parameters() if parameter.is_meta]
        if without:
            raise ValueError(f"{name}: {without[0]!r} has no values (meta); load the weights first")
    if torch.is_inference_mode_enabled():
        raise ValueError("nothing can be trained under torch.inference_mode: leave that mode first")
    if teacher is model:
        raise ValueError("teacher is the model itself: convert a copy, copy.deepcopy(teacher)")
    of_teacher = set(teacher.parameters())
    shared = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter in of_teacher
    ]
    if shared:
        raise ValueError(
            f"teacher shares {shared[0]!r} with the model, so that it would change: convert a "
            "copy, copy.deepcopy(teacher)"
        )


# ---- the course of training ----------------------------------------------------------------------


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
        judges, positions = list(held_out), range(0)
    elif iter(batches) is batches:
        raise ValueError(
            f"batches={type(batches).__name__} can be read only once, so that nothing can be held "
            "out: give a list, or held_out=[batch, ...]"
        )
    else:
        size = length_hint(batches, 1)  # a loader may have no length
        count = max(1, min(size // BATCHES_PER_JUDGE, steps // STEPS_PER_JUDGE))
        stride = max(1, size // count) if isinstance(batches, Sequence) else 1
        positions = range(stride // 2, stride * count, stride)
        first = islice(batches, positions.stop)
        judges = [batch for n, batch in enumerate(first) if n in positions]
    if not judges:
        raise ValueError(f"{'batches' if held_out is None else 'held_out'} has no batch")
    return judges, positions


def _repeat(batches: Iterable[Any], steps: int, held_out: range) -> Iterator[Any]:
    """A batch for each step, but none that is held out, unless there is no other; after the last
    one from the beginning again.

    >>> [*_repeat("abc", 5, range(1, 2))], [*_repeat("a", 2, range(1))]
    (['a', 'c', 'a', 'c', 'a'], ['a', 'a'])
    """
    done = 0
    while done < steps:
        before = done
        for position, batch in enumerate(batches):
            if position in held_out:
                continue
            yield batch
            done += 1
            if done == steps:
                return
        if done == before and held_out:
            held_out = range(0)
        elif done == 0:
            raise ValueError("batches has no batch; a generator can be read only once")
        elif done == before:
            raise ValueError(
                f"batches ended after {done} of steps={steps} and cannot be read again: "
                "give a list, or as many batches as steps"
            )


@torch.no_grad()
def _judge(loss_of: Callable[[Any], Tensor], held_out: list[Any]) -> float:
    """The mean loss of the held-out batches."""
    return sum(loss_of(batch).item() for batch in held_out) / len(held_out)


def _require_finite(parameters: list[nn.Parameter], step: int) -> None:
    norm = nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
    if not norm.isfinite():
        raise FloatingPointError(f"the gradients of step {step} are not finite, and its loss is")


def _copy(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def _put_back(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@contextmanager
def _restore_on_error(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Give the parameters their values, which it yields, back on an error or Ctrl-C; in any case
    leave no gradients."""
    before = _copy(parameters)
    try:
        yield before
    except BaseException:
        _put_back(parameters, before)
        raise
    finally:
        for parameter in parameters:
            parameter.grad = None


# ---- the loss ------------------------------------------------------------------------------------


def _loss_of(
    model: nn.Module, teacher: nn.Module, batch: Any, temperature: float, logits: bool | None
) -> Tensor:
    """The sum over the outputs that both models have."""
    call = prepare_call(model, batch)  # which gives each model copies of the tensors
    with torch.no_grad():
        wanted = _find_compared(call.run(teacher))
    found = _find_compared(call.run(model))
    pairs = {name: (found[name], wanted[name]) for name in found if name in wanted}
    if not pairs:
        raise ValueError(
            f"model returns {_list_names(found)} and teacher {_list_names(wanted)}: there is "
            "nothing to compare"
        )
    total = torch.zeros((), device=next(iter(found.values())).device)
    for name, (s, t) in pairs.items():
        if s.shape != t.shape:
            raise ValueError(
                f"{name or 'output'} is {tuple(s.shape)} from the model and {tuple(t.shape)} from "
                "the teacher: they must be alike"
            )
        s, t = (
            select_rows(s, call.masks),
            select_rows(t, call.masks),
        )  # (..., features) -> (rows, features)
        if name.endswith("logits") if logits is None else logits:
            total = total + _divergence(s, t, temperature)
        else:
            total = total + _relative_square(s, t)
    return total


def _find_compared(output: Any) -> dict[str, Tensor]:
    """What the loss compares, by name: all floating tensors but single numbers (losses)."""
    return {name: tensor for name, tensor in find_tensors(output) if tensor.ndim}


def _list_names(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(name or "output" for name in tensors) or "no floating tensor"


def _divergence(s: Tensor, t: Tensor, temperature: float) -> Tensor:
    """`T^2 KL(softmax(t / T) || softmax(s / T))`, the mean over all axes but the last.

    Its gradient is softmax(s) - softmax(t), and exactly zero where s is t: Adam would take what is
    left by rounding for a direction.
    """
    s, t = promote(s), promote(t)  # (..., classes)
    if temperature != 1:
        s, t = s / temperature, t / temperature
    sum_s, sum_t = (logits.logsumexp(-1, keepdim=True) for logits in (s, t))  # (..., 1)
    p = (t - sum_t).exp()
    kl = (p * (t - s)).sum(-1) - (sum_t - sum_s).squeeze(-1)  # (...)
    return temperature**2 * kl.mean()


def _relative_square(s: Tensor, t: Tensor) -> Tensor:
    """`||s - t||^2 / ||t||^2`."""
    s, t = promote(s), promote(t)
    size = t.square().sum()
    return (s - t).square().sum() / size.clamp_min(torch.finfo(size.dtype).tiny)
