"""`watch`: how stable the layers of a live model are.

A layer `y = W x`, from d_in to d_out features, is stable if three numbers stay of order 1 over
training, at every width:

    forward     RMS(y) / RMS(x)             measured on the live batch, bias included
    dependency  sqrt(d_in / d_out) |W|_2    the most that RMS(y) can be, or change by, at unit RMS
    update      sqrt(d_in / d_out) |dW|_2   the most that a step changes RMS(y), x of unit RMS

(Over all x of unit RMS the first is the second; on one batch it shows how well inputs and weights
are aligned.) Sources: "Beyond MuP 2" (2026, kexue.fm/archives/11605) for the three numbers;
spectral norms by randomised block Krylov iteration: Musco & Musco 2015 (arXiv:1504.05477).
"""

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.operator_norms import Operator, operators
from structlin._structure.arguments import checked
from structlin._tables import Table
from structlin.stability._outputs import format_number, rms_of, rms_over_calls, watch_outputs


@dataclass(frozen=True)
class Reading:
    """One module at one step; None where it does not apply: dependency is of linear maps alone."""

    step: int  #: training forward passes before this one
    layer: str
    rms: float | None  #: of the output
    forward: float | None
    dependency: float | None
    update: float | None


@dataclass
class Log:
    """Readings of a model. Print it: the table of them."""

    rows: list[Reading] = field(default_factory=list)

    @property
    def growth(self) -> dict[str, float]:
        """RMS of each layer's output at the last reading, relative to the first; inf from zero."""
        rms_of_layers = defaultdict[str, list[float]](list)
        for row in self.rows:
            if row.rms is not None:
                rms_of_layers[row.layer].append(row.rms)
        growth = {}
        for layer, rms in rms_of_layers.items():
            if rms[0]:
                growth[layer] = rms[-1] / rms[0]
            else:
                growth[layer] = math.inf if rms[-1] else 1.0
        return growth

    def table(self) -> Table:
        """The last reading of each layer, and by how much its output has grown since the first."""
        table = Table("layer", "step", "RMS", "x first", "forward", "dependency", "update")
        newest = defaultdict[str, dict[str, Any]](dict)  # layer -> number -> its last reading
        for row in self.rows:
            newest[row.layer] |= {name: v for name, v in vars(row).items() if v is not None}
        for layer, growth in self.growth.items():
            newest[layer]["growth"] = growth
        for layer, numbers in newest.items():
            cells = [layer, str(numbers["step"])]
            for name in ("rms", "growth", "forward", "dependency", "update"):
                cells.append(format_number(numbers[name]) if name in numbers else "")
            table.row(*cells)
        return table

    def __str__(self) -> str:
        return str(self.table())


@checked
@contextmanager
def watch(model: nn.Module, *, every: int = 10) -> Iterator[Log]:
    """Fills a `Log` while the model trains inside of the block: a reading at each `every`-th step.

    A step is one forward pass of `model` with gradients enabled; evaluation under `no_grad` does
    not count. Outputs are those of training, in whatever mode it runs. The update is that of the
    first step that changes the weights after the reading, so that it does not depend on `every`;
    the reading is in the log once that step is made. Until then there is a second copy of the
    weights. The random numbers of training stay what they are.

    Hooks are on the modules inside only during the forward pass of a reading, and all are gone when
    the block ends, also by an error. A compiled model is passed as what torch.compile returned, and
    the forward passes that are read run uncompiled; the others run the compiled code, which is not
    compiled anew.

    Raises:
        ValueError: `every` is below 1; a parameter is on meta or sharded; the model was compiled by
            `model.compile()`.
        TypeError: `model` is not a module.

    Warns:
        UserWarning: the block ended without an error and without one forward pass with gradients.

    >>> model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, every=2) as log:
    ...     for _ in range(4):
    ...         model(torch.randn(32, 8)).square().mean().backward()
    ...         optimizer.step()
    >>> [(row.step, row.layer, row.update is not None) for row in log.rows]
    [(0, '0', True), (0, '1', False), (2, '0', True), (2, '1', False)]
    """
    _require_values(model)
    if model._compiled_call_impl is not None:
        raise ValueError(
            "model was compiled by model.compile(): pass what torch.compile(model) returns instead"
        )
    log = Log()
    reader = _Reader(model)
    steps = 0
    reading = ExitStack()  # what is undone when the forward pass that is read has ended

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal steps
        reading.close()  # of a pass that ended in an error
        if not torch.is_grad_enabled():
            return
        if reader.changed():
            log.rows += reader.finish()
        if steps % every == 0 and not reader.rows:
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                reading.enter_context(torch.compiler.set_stance("force_eager"))
            reading.enter_context(reader.listen())
            reading.callback(model.register_forward_hook(leave).remove)
        steps += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        reading.close()
        reader.measure(steps - 1)
        reader.remember()

    entering = model.register_forward_pre_hook(enter)
    try:
        yield log
    finally:
        reading.close()
        entering.remove()
    log.rows += reader.finish()
    if not steps:
        warnings.warn(
            "watch: no forward pass of the model with gradients enabled was seen", stacklevel=3
        )


def _require_values(model: nn.Module) -> None:
    """Raises ValueError if a parameter's values are not here."""
    for name, parameter in model.named_parameters():
        reason = "is on meta; materialise it first (to_empty)" if parameter.is_meta else ""
        if hasattr(parameter, "full_tensor"):
            reason = "is sharded (DTensor), which is not supported"
        if reason:
            raise ValueError(f"model={type(model).__name__}: {name} {reason}")


class _Reader:
    """One reading after the other: what modules see, the norms, the update once weights change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rows: list[Reading] = []  #: of the reading that waits for its update
        self.operators: dict[str, Operator] = {}  #: of the layers that were read
        self.before: dict[str, list[Tensor]] = {}  #: their weights at the reading
        # where the searches for norms of weights, and of updates (True), ended
        self._starts: dict[tuple[str, bool], Tensor | None] = {}

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Listen to one forward pass."""
        self._inputs: dict[str, list[Tensor]] = defaultdict(list)
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._shapes: dict[str, torch.Size] = {}

        def see(name: str, x: Tensor | None, y: Tensor) -> None:
            self._outputs[name].append(rms_of(y))
            if x is not None:
                self._inputs[name].append(rms_of(x))
                self._shapes[name] = x.shape

        with watch_outputs(self.model, see):
            yield

    def measure(self, step: int) -> None:
        """The rows of the pass that was listened to, without the update."""
        self.rows = []
        self.operators = operators(self.model, self._shapes)
        for name in dict.fromkeys([*self._outputs, *self.operators]):
            rms = rms_over_calls(self._outputs[name]) if name in self._outputs else None
            forward = None
            if rms is not None and name in self._inputs:
                input_rms = rms_over_calls(self._inputs[name])
                forward = rms / input_rms if input_rms else None
            elif name in self.operators and not self.operators[name].shape:
                forward = rms  # of an embedding, whose inputs are tokens
            dependency = self._norm(name) if name in self.operators else None
            self.rows.append(Reading(step, name, rms, forward, dependency, None))

    def remember(self) -> None:
        """The weights as they are now are what the update is counted from."""
        for name, operator in self.operators.items():
            self.before[name] = [weight.detach().clone() for weight in operator.weights()]

    def changed(self) -> bool:
        """Whether a step has been made since `remember`."""
        for name, before in self.before.items():
            if not all(map(torch.equal, self.operators[name].weights(), before)):
                return True
        return False

    def finish(self) -> list[Reading]:
        """The rows of the reading, with the update if there is one."""
        rows = self.rows
        self.rows = []
        if self.changed():
            updates = {name: self._norm(name, before) for name, before in self.before.items()}
            rows = [replace(row, update=updates.get(row.layer)) for row in rows]
        self.before = {}
        return rows

    def _norm(self, name: str, before: Sequence[Tensor] | None = None) -> float:
        key = (name, before is not None)
        norm, self._starts[key] = self.operators[name].norm(before, self._starts.get(key))
        return norm
