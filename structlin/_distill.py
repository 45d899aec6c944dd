"""Healing: a converted model learns, for a few hundred steps, to answer as the dense one does."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ._model.outputs import find_tensors
from ._model.survey import eval_mode, run
from ._progress import Bar
from ._projection.padding import find_masks, select_rows
from .duality import promote
from .optim import param_groups

WARMUP = 0.1  # of the steps, in which the rate rises; a cosine leads to zero afterwards


def distill(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int,
    lr: float,
    temperature: float = 1.0,
    logits: bool | None = None,
    weight_decay: float = 0.0,
    progress: bool | None = None,
) -> list[float]:
    """Train `model`, in place, to give what `teacher` gives: a converted model after its dense one.

    No labels are needed. The loss is a sum over all floating tensors that both models return,
    whether alone, in a tuple or under a name, as transformers does. Of logits it is the divergence
    of the two distributions over the last axis, at temperature T, in nats, the mean over tokens:

        T^2 KL(softmax(t / T) || softmax(s / T))

    and of everything else `||s - t||^2 / ||t||^2`, over the whole batch (dimensionless). Padding
    does not count: tokens that the model's `attention_mask` or `decoder_attention_mask`
    (transformers) or `src_key_padding_mask` (torch) leaves out, in outputs that begin with the
    shape of the mask, `(batch, tokens)`.

    AdamW takes the steps, with `param_groups(model, lr)`: rates rise over the first tenth of the
    steps and fall as a cosine to zero. Both models run in eval mode, so without dropout and with
    the batch norms' statistics as they are; every module's mode is restored. Parameters that do not
    require gradients stay as they are; gradients are None afterwards.

    Args:
        model: the student, in float32 or float64 (small steps are lost in lower precision).
        teacher: the dense original; it shares no trained parameter with `model`, so convert a copy.
        batches: inputs of both models: a mapping is passed as keywords, a tuple or list as
            positions, anything else as the one argument. What can be read again, as a list or a
            DataLoader can, is read as often as needed; an iterator must hold `steps` batches.
        steps: of the optimizer, a batch each.
        lr: as for the dense model; cores have rates of their own, see `param_groups`.
        temperature: T; above 1, small probabilities count more.
        logits: whether all outputs are logits; None: those whose name ends with "logits".
        weight_decay: of matrices, see `param_groups`.
        progress: whether to show a bar with the loss; None: on a terminal.

    Returns:
        The loss of every step, before it is taken.

    Raises:
        ValueError: outputs of different shapes, or none in common; no batch, or an iterator with
            fewer than `steps`; a number out of range; teacher and student are one or share trained
            parameters; parameters without values (meta); inference mode.
        TypeError: a model is no module; `batches` is a single batch.
        FloatingPointError: the loss is not finite. After this error, as after any other,
            parameters are what they were.
    Source: Hinton et al. 2015 (arXiv:1503.02531), section 2.

    >>> import copy
    >>> from structlin import LowRank, convert
    >>> _ = torch.manual_seed(0)
    >>> dense = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    >>> small = convert(copy.deepcopy(dense), LowRank(rank=6), init="project")
    >>> batches = [torch.randn(256, 16) for _ in range(8)]
    >>> losses = distill(small, dense, batches, steps=40, lr=0.01, progress=False)
    >>> round(losses[0], 1), round(losses[-1], 1)
    (0.7, 0.4)
    """
    _check_models(model, teacher)
    _check_batches(batches)
    _check_numbers(steps, temperature)
    groups = param_groups(model, lr, weight_decay=weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _scale_rate(step, steps))
    trained = [parameter for group in groups for parameter in group["params"]]
    losses: list[float] = []
    with (
        eval_mode(model),
        eval_mode(teacher),
        torch.enable_grad(),
        _restore_on_error(trained),
        Bar("distill", steps, progress) as bar,
    ):
        for batch in _repeat(batches, steps):
            optimizer.zero_grad()
            loss = _loss_of(model, teacher, batch, temperature, logits)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"the loss of step {len(losses)} is {losses[-1]}: lr={lr} is too large, or the "
                    "outputs on this batch are not finite"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            bar.show(f"loss {losses[-1]:.4g}")
            bar.advance()
    return losses


# ---- arguments -----------------------------------------------------------------------------------


def _check_models(model: nn.Module, teacher: nn.Module) -> None:
    for name, given in (("model", model), ("teacher", teacher)):
        if not isinstance(given, nn.Module):
            raise TypeError(f"{name}={type(given).__name__} must be a torch.nn.Module")
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


def _check_batches(batches: Iterable[Any]) -> None:
    single = isinstance(batches, Tensor | Mapping | str)
    if single or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches={type(batches).__name__} must be an iterable of batches, for example [batch]"
        )


def _check_numbers(steps: int, temperature: float) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a positive integer")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} must be positive and finite")


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


def _repeat(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """A batch for each step; after the last one from the beginning again."""
    done = 0
    while done < steps:
        before = done
        for batch in batches:
            yield batch
            done += 1
            if done == steps:
                return
        if done == 0:
            raise ValueError("batches has no batch; a generator can be read only once")
        if done == before:
            raise ValueError(
                f"batches ended after {done} of steps={steps} and cannot be read again: "
                "give a list, or as many batches as steps"
            )


@contextmanager
def _restore_on_error(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Give the parameters their values back on an error or Ctrl-C; in any case leave no
    gradients."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        raise
    finally:
        for parameter in parameters:
            parameter.grad = None


# ---- the loss ------------------------------------------------------------------------------------


def _loss_of(
    model: nn.Module, teacher: nn.Module, batch: Any, temperature: float, logits: bool | None
) -> Tensor:
    """The sum over the outputs that both models have."""
    with torch.no_grad():
        wanted = _find_compared(run(teacher, batch))
    found = _find_compared(run(model, batch))
    pairs = {name: (found[name], wanted[name]) for name in found if name in wanted}
    if not pairs:
        raise ValueError(
            f"model returns {_list_names(found)} and teacher {_list_names(wanted)}: there is "
            "nothing to compare"
        )
    masks = _find_masks(model, batch)
    total = torch.zeros((), device=next(iter(found.values())).device)
    for name, (s, t) in pairs.items():
        if s.shape != t.shape:
            raise ValueError(
                f"{name or 'output'} is {tuple(s.shape)} from the model and {tuple(t.shape)} from "
                "the teacher: they must be alike"
            )
        s, t = select_rows(s, masks), select_rows(t, masks)  # (..., features) -> (rows, features)
        if name.endswith("logits") if logits is None else logits:
            total = total + _divergence(s, t, temperature)
        else:
            total = total + _relative_square(s, t)
    return total


def _find_compared(output: Any) -> dict[str, Tensor]:
    """By name, what the loss compares: all floating tensors but single numbers (losses)."""
    return {name: tensor for name, tensor in find_tensors(output) if tensor.ndim}


def _list_names(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(name or "output" for name in tensors) or "no floating tensor"


def _find_masks(model: nn.Module, batch: Any) -> list[Tensor]:
    """The masks, `(batch, tokens)`, that `run` gives to the model."""
    if isinstance(batch, Mapping):
        return find_masks(model, (), batch)
    return find_masks(model, batch if isinstance(batch, tuple | list) else (batch,), {})


def _divergence(s: Tensor, t: Tensor, temperature: float) -> Tensor:
    """`T^2 KL(softmax(t / T) || softmax(s / T))`, the mean over all axes but the last.

    Its gradient is softmax(s) - softmax(t), and exactly zero where s is t: Adam would take what is
    left by rounding for a direction.
    """
    s, t = (promote(logits) / temperature for logits in (s, t))  # (..., classes)
    sum_s, sum_t = (logits.logsumexp(-1, keepdim=True) for logits in (s, t))  # (..., 1)
    p = (t - sum_t).exp()
    kl = (p * (t - s)).sum(-1) - (sum_t - sum_s).squeeze(-1)  # (...)
    return temperature**2 * kl.mean()


def _relative_square(s: Tensor, t: Tensor) -> Tensor:
    """`||s - t||^2 / ||t||^2`."""
    s, t = promote(s), promote(t)
    size = t.square().sum()
    return (s - t).square().sum() / size.clamp_min(torch.finfo(size.dtype).tiny)
