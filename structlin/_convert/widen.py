"""`widen`: the width at which a structured model costs what the dense one does. `cost` counts."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Annotated, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .._model.calls import eval_mode, split_batch
from .._model.decide import Spec
from .._model.select import Patterns
from .._structure.arguments import Range, checked, require_choice, show
from .._structure.families import DEFAULT, label
from .._tables import Table, percent
from .._torch import tree_map
from .convert import STARTS, convert, plan
from .summary import summary

MAX_WIDTH = 1 << 20
FINE = 128  # up to so many times `multiple` every width is tried, beyond every second and so on
REACH = 8 / 5  # the search ends at so many times the widest width within the budget
# how a model says that a width does not fit it: width // 32 heads may be no heads, to divide by
REFUSALS = (ValueError, AssertionError, ZeroDivisionError)


@dataclass(frozen=True)
class Cost:
    """What a model costs."""

    params: int  #: a shared one counts once
    flops: int  #: forward, on the example; of the linear layers for one token if there is none


@dataclass(frozen=True)
class Widened:
    """What `widen` found. Print it; `build()` makes the model."""

    width: int
    structured: Cost
    dense: Cost
    match: str
    structure: Spec
    _build: Callable[[int], nn.Module] = field(repr=False)
    _options: dict[str, Any] = field(repr=False)

    def build(self) -> nn.Module:
        """A new model of that width, converted; on the devices on which your function makes it."""
        return convert(_build_dense(self._build, self.width), self.structure, **self._options)

    def __str__(self) -> str:
        table = Table("model", "width", "params", "/dense", "FLOPs", "/dense")
        table.row("dense", "", *self._count_cells(self.dense))
        table.row(label(self.structure), f"{self.width}", *self._count_cells(self.structured))
        return str(table)

    def _count_cells(self, cost: Cost) -> list[str]:
        """The cells from "params" on."""
        cells = [f"{cost.params:,}", percent(cost.params, self.dense.params)]
        return [*cells, f"{cost.flops:,}", percent(cost.flops, self.dense.flops)]


@checked
def cost(model: nn.Module, example: Any = None) -> Cost:
    """Parameters of `model`, and the FLOPs of its forward pass over `example`, 2 per multiply-add.

    All products that torch's FlopCounterMode knows are counted, attention and convolutions
    included; of causal attention also the half that a fused kernel may skip. A training step has
    three times as many. On the meta device nothing is computed.

    Args:
        example: a batch: a mapping is keywords, a tuple or list positions, else one argument; it is
            moved to the model's device. None: the linear layers alone, for one token.

    Raises:
        ValueError: the model has no parameter; no linear layer, and there is no example.

    >>> with torch.device("meta"):
    ...     layer = nn.TransformerEncoderLayer(64, nhead=4, batch_first=True)
    >>> cost(layer, torch.empty(1, 10, 64)).flops // 10, cost(layer).flops
    (559616, 532480)
    """
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError(f"model={type(model).__name__} has no parameter")
    params = sum(p.numel() for p in model.parameters())
    if example is None:
        return Cost(params, summary(model).flops)
    device = parameter.device
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),  # a fused kernel on a CPU is not counted
        torch.no_grad(),
        eval_mode(model),
        device,
    ):
        batch = tree_map(lambda x: x.to(device) if torch.is_tensor(x) else x, example)
        arguments = split_batch(batch)
        model(*arguments.positional, **arguments.keyword)
    return Cost(params, counter.get_total_flops())


@checked
def widen(
    build: Callable[[int], nn.Module],
    structure: Spec = DEFAULT,
    *,
    dense: int | nn.Module,
    match: str = "flops",
    example: Any = None,
    multiple: Annotated[int, Range(1, MAX_WIDTH)] = 16,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[Any, Spec | None] | None = None,
    init: str = "match",
    weight_norm: bool = False,
    zero_init: Patterns = (),
    untie: bool = False,
) -> Widened:
    """The largest width at which `build(width)`, converted, costs no more than the dense model.

    A structured layer needs fewer FLOPs per feature, so the same budget buys more features.
    `build` says what else grows with the width. Attention costs the same in both models if the
    number of heads and the features of each are fixed, as in CBS G.2. If the number of heads grows
    with the width, attention takes a part of what the linear layers save:

        lambda width: GPT(width, heads=6, head_size=64)           # fixed
        lambda width: GPT(width, heads=width // 64, head_size=64) # scaled

    Models are built on the meta device, where they cost nothing, if they can be built and run
    there. Beyond 128 times `multiple` not every width is tried.

    Args:
        build: your function, from one number, the width, to a dense model. A width that does not
            fit it says so by a ValueError, an assertion or a division by zero, and is passed over.
            Any other error is yours, with a note of the width.
        structure: a family or a `Structure`.
        dense: the model whose cost is met: a width, for `build(width)`, or the model itself.
        match: "flops" of a forward pass, or "params".
        example: a batch, see `cost`; without one FLOPs are those of the linear layers for one
            token.
        multiple: widths that are tried are multiples of it: the size of a head, or 64 for a GPU.
        include, exclude, overrides, init, weight_norm, zero_init, untie: as of `convert`, for the
            model of each width.

    Raises:
        ValueError: no width meets the budget, or all do; an unknown `match` or `init`.
        TypeError: `build` is no function, or returns no module; `dense` is neither one integer nor
            a module.
    Source: Qiu et al. 2024 (arXiv:2406.06248), sections 4, 5 and appendix G.2.

    >>> from structlin import BTT
    >>> print(widen(lambda width: nn.Linear(width, width), BTT(rank=1), dense=1024, multiple=64))
    model         width      params   /dense       FLOPs   /dense
    ─────────────────────────────────────────────────────────────
    dense                 1,049,600   100.0%   2,097,152   100.0%
    BTT(rank=1)    8192   1,056,768   100.7%   2,097,152   100.0%
    """
    require_choice("match", match, ("flops", "params"))
    require_choice("init", init, STARTS)
    options: dict[str, Any] = {
        "include": include, "exclude": exclude, "overrides": overrides, "init": init,
        "weight_norm": weight_norm, "zero_init": zero_init, "untie": untie,
    }  # fmt: skip
    if isinstance(build, nn.Module):
        raise TypeError(f"build={show(build)} must be a function from a width to a model")
    costs: dict[int, Cost] = {}  # of the widths that fit
    refusals: dict[int, Exception] = {}  # of the widths that do not

    def build_structured(width: int) -> nn.Module:
        return plan(_build_dense(build, width), structure, **options).apply()

    def price(n: int) -> float:
        """The FLOPs or parameters at n times `multiple`; infinity if that width does not fit."""
        width = n * multiple
        if width not in costs and width not in refusals:
            try:
                costs[width] = _count(partial(build_structured, width), example)
            except REFUSALS as error:
                refusals[width] = error
        return getattr(costs[width], match) if width in costs else inf

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that small layers grow: the model that is made says so
        if isinstance(dense, nn.Module):
            goal = cost(dense, example)
        else:
            goal = _count(partial(_build_dense, build, dense), example)
        budget = getattr(goal, match)
        width = multiple * _find_widest(price, budget, MAX_WIDTH // multiple)
    prices = {tried: getattr(counted, match) for tried, counted in costs.items()}
    # if no width costs more than the budget, the widest that was tried says nothing
    if width and max(prices.values()) > budget:
        return Widened(width, costs[width], goal, match, structure, build, options)
    unit = "FLOPs" if match == "flops" else "parameters"
    raise ValueError(
        f"match={match!r}, dense's {budget:,} {unit}: no multiple of {multiple} will do: "
        f"{label(structure)} {_explain(width, prices, refusals)}"
    )


def _find_widest(price: Callable[[int], float], budget: int, largest: int) -> int:
    """The largest number found whose price is at most the budget; 0: none.

    A larger number may have a lower price: BTT costs least where a width's factors differ most,
    half as much as where they are equal. So numbers are doubled first, and then scanned beyond
    `REACH` times the largest within the budget.
    """
    best = 0
    for exponent in range(largest.bit_length()):
        n = 2**exponent
        if budget < price(n) < inf:
            break
        if price(n) <= budget:
            best = n
    n = best + 1 + best // FINE
    while n <= largest:
        if price(n) <= budget:
            best = n
        elif price(n) < inf and n > REACH * best:
            break
        n += 1 + n // FINE
    return best


def _explain(width: int, prices: Mapping[int, int], refusals: Mapping[int, Exception]) -> str:
    """Why no width meets the budget, after the structure's name.

    Args:
        width: the widest within the budget, where no width exceeds it; 0: all exceed it.
        prices: of the widths that fit.
        refusals: of the widths that do not.
    """
    if not prices:
        refused_width, error = list(refusals.items())[-1]
        text = f"{type(error).__name__}: {error}"
        return f"fits none; the last refusal, at width {refused_width}, was: {text}"
    if width:
        widest = max(prices)
        advice = "build must make a wider model of a larger number"
        return f"at {widest} has {prices[widest]:,} still; {advice}"
    narrowest = min(prices)
    return f"at {narrowest} has {prices[narrowest]:,} already"


def _build_dense(build: Callable[[int], nn.Module], width: int) -> nn.Module:
    """The model that the user's function makes."""
    with _name_width(width):
        model: Any = build(width)
    if not isinstance(model, nn.Module):
        raise TypeError(f"build({width}) returned {show(model)}: it must return a torch.nn.Module")
    return model


@contextmanager
def _name_width(width: int) -> Iterator[None]:
    """Note the width in an error of the user's function, which says what failed and not where."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"structlin.widen called your function with width={width}")
        raise


def _count(build: Callable[[], nn.Module], example: Any) -> Cost:
    """The cost of a model that is built on the meta device, if it can be built and run there."""
    try:
        with torch.device("meta"):
            return cost(build(), example)
    except REFUSALS:
        raise
    except Exception:  # whatever it is that the meta device cannot do
        return cost(build(), example)
