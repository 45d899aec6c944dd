"""`widen`: the width at which a structured model costs what the dense one does. `cost` counts."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from ._arguments import checked, require_choice, require_positive
from ._convert import convert, plan
from ._families import DEFAULT, label
from ._model.decide import Spec
from ._model.survey import eval_mode, run
from ._report import Table, percent, summary

MATCHES = ("flops", "params")
MAX_WIDTH = 1 << 20
MAX_NEIGHBOURS = 128  # wider widths that are tried once the search has halved
MAX_MISFITS = 32  # widths in a row that do not fit, after which the search looks elsewhere
REFUSALS = (ValueError, AssertionError)  # how a model says that a width does not fit it


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
        dense = self.dense
        name = label(self.structure)
        for text, width, cost in (("dense", "", dense), (name, f"{self.width}", self.structured)):
            cells = [f"{cost.params:,}", percent(cost.params, dense.params)]
            cells += [f"{cost.flops:,}", percent(cost.flops, dense.flops)]
            table.row(text, width, *cells)
        return str(table)


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
    params = sum(each.numel() for each in model.parameters())
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
        run(model, _move(example, device))
    return Cost(params, counter.get_total_flops())


@checked
def widen(
    build: Callable[[int], nn.Module],
    structure: Spec = DEFAULT,
    *,
    dense: int | nn.Module,
    match: str = "flops",
    example: Any = None,
    multiple: int = 16,
    **options: Any,
) -> Widened:
    """The largest width at which `build(width)`, converted, costs no more than the dense model.

    That is what structure is for: fewer FLOPs a feature, spent on more features. What else grows
    with the width is `build`'s to say. Attention costs the same in both models if each head keeps
    its features and their number is fixed, as in CBS G.2; if it grows with the width, attention
    takes a part of what the linear layers save:

        lambda width: GPT(width, heads=6, head_size=64)           # fixed
        lambda width: GPT(width, heads=width // 64, head_size=64) # scaled

    Models are built on the meta device, where they cost nothing, if they can be built and run
    there. The search doubles and halves, and then looks at up to 128 widths up to 8/5 as wide, for
    BTT costs least where a width's factors differ most: half as much as where they are equal.

    Args:
        build: your function, from one number, the width, to a dense model. A width that does not
            fit it says so by a ValueError or an assertion, and is passed over.
        structure: a family or a `Structure`.
        dense: the model whose cost is met: a width, for `build(width)`, or the model itself.
        match: "flops" of a forward pass, or "params".
        example: a batch, see `cost`; without one FLOPs are those of the linear layers for one
            token.
        multiple: of which the width is one: the size of a head, or 64 for a GPU.
        options: of `convert`, such as include, zero_init, weight_norm.

    Raises:
        ValueError: no width meets the budget; `build` makes models that cost the same for different
            widths; an unknown `match`.
        TypeError: `build` is no function, or returns no module; `dense` is neither one integer nor
            a module; an option that `convert` does not have.
    Source: Qiu et al. 2024 (arXiv:2406.06248), sections 4, 5 and appendix G.2.

    >>> from structlin import BTT
    >>> print(widen(lambda width: nn.Linear(width, width), BTT(rank=1), dense=1024, multiple=64))
    model         width      params   /dense       FLOPs   /dense
    ─────────────────────────────────────────────────────────────
    dense                 1,049,600   100.0%   2,097,152   100.0%
    BTT(rank=1)    8192   1,056,768   100.7%   2,097,152   100.0%
    """
    _check_arguments(build, dense, match)
    search = _Search(build, structure, match, example, multiple, options)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that small layers grow: the model that is made says so
        budget = search.weigh_dense(dense)
        best = search.find_widest(budget)
    return Widened(best, search.costs[best], search.dense, match, structure, build, options)


class _Search:
    """The search for the widest model within the dense one's cost; it keeps every width's cost."""

    def __init__(
        self,
        build: Callable[[int], nn.Module],
        structure: Spec,
        match: str,
        example: Any,
        multiple: int,
        options: dict[str, Any],
    ) -> None:
        self.build, self.structure, self.options = build, structure, options
        self.match, self.example, self.multiple = match, example, multiple
        self.costs: dict[int, Cost] = {}  # of the widths that fit
        self.refusal: Exception | None = None  # the last reason of one that does not
        self.dense = Cost(0, 0)

    def weigh_dense(self, dense: int | nn.Module) -> int:
        if isinstance(dense, nn.Module):
            self.dense = cost(dense, self.example)
        else:
            self.dense = self._count(lambda: _build_dense(self.build, dense))
        return self._weight(self.dense)

    def find_widest(self, budget: int) -> int:
        low, high = self._bracket(budget)  # in multiples: within the budget, and over it
        while high - low > 1:
            middle = (low + high) // 2
            n = self._find_possible(middle, high)
            if n is not None and self._weigh(n) <= budget:
                low = n
            else:
                high = middle
        step = 1 + 3 * low // 5 // MAX_NEIGHBOURS
        for n in range(low + step * (3 * low // 5 // step + 1), low, -step):
            if self._is_possible(n) and self._weigh(n) <= budget:
                return n * self.multiple
        return low * self.multiple

    def _bracket(self, budget: int) -> tuple[int, int]:
        """The largest of the numbers tried that is within the budget, and one that is over it."""
        low, start = 0, 1
        while start * self.multiple <= MAX_WIDTH:
            n = self._find_possible(start, 2 * start)
            start *= 2
            if n is None:
                continue
            if self._weigh(n) > budget:
                if low == 0:
                    break
                return low, n
            self._require_growth(low, n)
            low = n
        raise ValueError(self._explain(budget, low))

    def _require_growth(self, low: int, high: int) -> None:
        before, after = (self.costs.get(n * self.multiple) for n in (low, high))
        if before is not None and after is not None and before.params == after.params:
            one, other = low * self.multiple, high * self.multiple
            raise ValueError(
                f"build({one}) and build({other}) have {after.params:,} parameters each, "
                "converted: build must make a wider model of a larger number"
            )

    def _explain(self, budget: int, low: int) -> str:
        what = f"match={self.match!r}, dense's {_describe(self.match, budget)}"
        if not self.costs:
            return (
                f"{what}: {label(self.structure)} fits no width that is a multiple of "
                f"{self.multiple}; the last refusal was: {self.refusal}"
            )
        if low:
            return f"{what}: a model of width {low * self.multiple} still costs less"
        smallest = min(self.costs)
        least = _describe(self.match, self._weight(self.costs[smallest]))
        return (
            f"{what}: no width, a multiple of {self.multiple}, costs so little: "
            f"{label(self.structure)} at {smallest} has {least}"
        )

    def _find_possible(self, start: int, stop: int) -> int | None:
        """The first number from `start` whose width fits, if it is found soon."""
        tries = range(start, min(stop, start + MAX_MISFITS))
        return next((n for n in tries if self._is_possible(n)), None)

    def _is_possible(self, n: int) -> bool:
        width = n * self.multiple
        if width not in self.costs:
            try:
                self.costs[width] = self._cost(width)
            except REFUSALS as error:
                self.refusal = error
        return width in self.costs

    def _weigh(self, n: int) -> int:
        return self._weight(self.costs[n * self.multiple])

    def _weight(self, cost: Cost) -> int:
        found: int = getattr(cost, self.match)
        return found

    def _cost(self, width: int) -> Cost:
        def make() -> nn.Module:
            return plan(_build_dense(self.build, width), self.structure, **self.options).apply()

        return self._count(make)

    def _count(self, make: Callable[[], nn.Module]) -> Cost:
        try:
            with torch.device("meta"):
                return cost(make(), self.example)
        except REFUSALS:
            raise
        except Exception:  # whatever it is that the meta device cannot do
            return cost(make(), self.example)


def _check_arguments(build: Any, dense: Any, match: str) -> None:
    if isinstance(build, nn.Module):
        raise TypeError(f"build={build!r} must be a function from a width to a model")
    if isinstance(dense, bool) or not isinstance(dense, int | nn.Module):
        raise TypeError(
            f"dense={dense!r} must be one number, the width, or a model; where a model has several "
            "widths, let build make all of them from one"
        )
    if not isinstance(dense, nn.Module):
        require_positive("dense", dense)
    require_choice("match", match, MATCHES)


def _build_dense(build: Callable[[int], nn.Module], width: int) -> nn.Module:
    model: Any = build(width)
    if not isinstance(model, nn.Module):
        raise TypeError(f"build({width}) returned {model!r}: it must return a torch.nn.Module")
    return model


def _describe(match: str, amount: int) -> str:
    return f"{amount:,} {'FLOPs' if match == 'flops' else 'parameters'}"


def _move(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
