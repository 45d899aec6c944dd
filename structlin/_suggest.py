"""`suggest`: structures in the user's own model, timed on the user's machine, dense among them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ._arguments import checked, require_choice
from ._convert import plan
from ._families import BTT, Dense, Family, LowRank, Monarch, label
from ._model.decide import list_targets
from ._model.outputs import find_tensors
from ._model.survey import run
from ._report import Table, percent
from ._structure import Structure
from ._timing import sample_in_turn
from ._widen import cost

GOALS = ("seconds", "params", "flops")
ROUNDS = 3, 15  # of each candidate and dense in turn, at least and at most


@dataclass(frozen=True)
class Candidate:
    """The model with one structure in its linear layers; without one it is the dense model."""

    structure: Family | Structure | None
    params: int = 0
    flops: int = 0  #: of a forward pass over the batch
    seconds: float = 0.0  #: of a step, the median
    ratio: float = 1.0  #: of a step's seconds to dense's in the same round, the median
    low: float = 1.0  #: the 20th percentile of these ratios
    high: float = 1.0  #: the 80th
    refusal: str = ""  #: why it cannot be had, or ""

    @property
    def label(self) -> str:
        return "dense" if self.structure is None else label(self.structure)


@dataclass(frozen=True)
class Suggestion:
    """What `suggest` measured, and what it takes. Print it.

    `structure` goes into `convert`; None means that the dense model should stay.
    """

    candidates: tuple[Candidate, ...]  #: dense first
    goal: str
    chosen: Candidate
    reason: str

    @property
    def structure(self) -> Family | Structure | None:
        return self.chosen.structure

    def __str__(self) -> str:
        ours = ("params", "/dense", "FLOPs", "/dense", "ms", "ms/dense", "20 to 80 %")
        table, dense = Table("structure", *ours), self.candidates[0]
        refused = []
        for each in self.candidates:
            if each.refusal:
                refused.append(f"{each.label} does not fit: {each.refusal}")
                continue
            sizes = [f"{each.params:,}", percent(each.params, dense.params)]
            sizes += [f"{each.flops:,}", percent(each.flops, dense.flops)]
            times = f"{1e3 * each.seconds:.2f}", f"{each.ratio:.2f}"
            table.row(each.label, *sizes, *times, f"{each.low:.2f} to {each.high:.2f}")
        return "\n".join([str(table), "", *refused, f"Take {self.chosen.label}: {self.reason}"])


@checked
def suggest(
    model: nn.Module,
    batch: Any,
    goal: str = "seconds",
    *,
    structures: Sequence[Family | Structure] | None = None,
    training: bool = True,
    seconds: float = 60.0,
    **options: Any,
) -> Suggestion:
    """Measure structures in copies of `model` on this machine, and say which one to take.

    Each structure takes the place of the linear layers that `convert` would replace. Its model and
    the dense one then make steps in turn. A step is a forward and a backward pass, without an
    optimizer. The model's loss is not measured: a structure of fewer parameters learns less where
    nothing is widened, so train briefly with what this takes.

    "seconds" takes the fastest; of those that are as fast within the spread, the one with the most
    parameters. "params" and "flops" take the one with the fewest that is no slower than dense.
    Where none is faster, dense stays.

    Args:
        model: it is not changed. There are two copies of it while this runs.
        batch: as large as those that you train with: a mapping is keywords, a tuple or list
            positions, else one argument. It is moved to the model's device.
        goal: "seconds" of a step, "params", or "flops" of a forward pass.
        structures: what to try; None: BTT of ranks 1, 2 and 4, Monarch of 4 and 16 blocks, and
            low-rank of an eighth of the narrowest layer, as far as they fit.
        training: False: forward passes alone, without gradients.
        seconds: that all of it may take, about: at least 3 rounds of each structure are made.
        options: of `convert`: include, exclude, overrides and so on.

    Raises:
        ValueError: an unknown goal; no structures; `seconds` that are not positive; what `convert`
            raises where no layer can be converted; outputs without a gradient.
        TypeError: `model` is no module; an option that `convert` does not have.

    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> found = suggest(model, torch.randn(32, 64), "params", structures=[BTT(rank=1)], seconds=1)
    >>> [(each.label, each.params) for each in found.candidates]
    [('dense', 33088), ('BTT(rank=1)', 6464)]
    """
    require_choice("goal", goal, GOALS)
    targets = list_targets(plan(model, Dense(), **options).decisions)
    narrow = min(min(layer.in_features, layer.out_features) for layer, _ in targets)
    tried = _list_usual(narrow) if structures is None else [*structures]
    if not tried:
        raise ValueError(f"structures={structures!r} must hold at least one")
    device = next(model.parameters()).device
    batch = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
    dense = copy.deepcopy(model)
    call = _make_call(dense, batch, training)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        counted, (taken,) = cost(dense, batch), sample_in_turn([call], device, ROUNDS[0])
        found = [Candidate(None, counted.params, counted.flops, median(taken))]
        for structure in tried:
            try:
                other = plan(copy.deepcopy(dense), structure, **options).apply()
            except ValueError as error:  # of this structure: `options` fit the model
                if structures is not None:
                    found.append(Candidate(structure, refusal=str(error)))
                continue
            calls = [call, _make_call(other, batch, training)]
            warm = sum(map(min, sample_in_turn(calls, device, 1)))
            rounds = min(max(round(seconds / len(tried) / warm), ROUNDS[0]), ROUNDS[1])
            samples = sample_in_turn(calls, device, rounds)
            found.append(_describe(structure, other, batch, samples))
    return Suggestion(tuple(found), goal, *_choose(found, goal))


def _list_usual(narrow: int) -> list[Family | Structure]:
    low = LowRank(rank=max(1, narrow // 8))
    return [*(BTT(rank=r) for r in (1, 2, 4)), Monarch(blocks=4), Monarch(blocks=16), low]


def _make_call(model: nn.Module, batch: Any, training: bool) -> Callable[[], Any]:
    """A step, which leaves no gradients behind."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    @torch.enable_grad()
    def step() -> None:
        tensors = dict(find_tensors(run(model, batch)))
        loss = tensors.get("loss", sum(each.square().mean() for each in tensors.values()))
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(
                f"model={type(model).__name__} returns nothing that has a gradient: let it train, "
                "or pass training=False"
            )
        torch.autograd.grad(loss.sum(), trained, allow_unused=True)

    return step if training else torch.no_grad()(partial(run, model, batch))


def _describe(
    structure: Family | Structure,
    model: nn.Module,
    batch: Any,
    samples: Sequence[Sequence[float]],
) -> Candidate:
    """By the seconds of the dense model's steps and of its own."""
    ratios = [own / dense for dense, own in zip(*samples, strict=True)]
    low, *_, high = quantiles(ratios, n=5, method="inclusive")
    counted = cost(model, batch)
    seconds, ratio = median(samples[1]), median(ratios)
    return Candidate(structure, counted.params, counted.flops, seconds, ratio, low, high)


def _choose(candidates: Sequence[Candidate], goal: str) -> tuple[Candidate, str]:
    """The one to take, and why."""
    dense, *others = [each for each in candidates if not each.refusal]
    if goal != "seconds":
        what = "parameters" if goal == "params" else "FLOPs"
        level = [dense, *(each for each in others if each.low <= 1)]
        best = min(level, key=lambda each: getattr(each, goal))
        if best is dense:
            return dense, f"nothing with fewer {what} is as fast."
        return best, f"it has the fewest {what} of those that are no slower than dense."
    faster = [each for each in others if each.high < 1]
    if not faster:
        return dense, "nothing is faster by more than the spread."
    fastest = min(faster, key=lambda each: each.ratio)
    level = [each for each in faster if each.ratio <= fastest.high]
    best = max(level, key=lambda each: each.params)
    if best is fastest:
        return best, f"it is the fastest, {best.ratio:.2f} of dense's seconds."
    return best, (
        f"within the spread it is as fast as {fastest.label}, and of those it has the most "
        f"parameters: {best.ratio:.2f} of dense's seconds."
    )
