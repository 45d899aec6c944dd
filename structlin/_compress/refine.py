"""Refinement: the layers of a block, projected one by one, are fitted together to what the dense
block makes.

A few steps of Adam on the mean square error of the block's output, token by token and without
padding, given the inputs that the block has in the model compressed so far. What moves: the cores,
the biases of the projected layers, and the vectors of the block's other modules (norms, layer
scales). Source: AA-SVD (arXiv:2604.02119), where it is the part that gains most.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._convert.plan import NewVector, Refined
from .._layer.linear import StructuredLinear
from .._model.calls import first_tensor
from .._projection.matrices import divide_norms
from ..duality import promote
from ..scaling import lr_mult
from .memory import Memory
from .padding import select_rows
from .replay import Call, CheckNumbers, Stop
from .replica import Copier, NoCopyError

# A dense weight's; each core has its own (`lr_mult`). By trial: 32 steps on the first low-rank
# block of all-MiniLM-L6-v2 lower its error from 0.161 to 0.155 at 5e-4, and raise it at 2e-3.
LR = 5e-4
BETAS = 0.9, 0.99

ANOTHER_OUTPUT = "it does not give the same output again"


class NotRefinedError(Exception):
    """Why a block cannot be refined, as the end of a sentence."""


Vectors = Sequence[tuple[nn.Module, str, nn.Parameter]]  # of modules in the block: name, copy


@dataclass(frozen=True)
class Example:
    """A call that is about to leave a block, and what the dense block made of its own inputs."""

    call: Call
    stop: Stop  #: of the compressed run, with the output of the block whose layers are projected
    made: Tensor  #: the first tensor of that output
    goal: Tensor  #: that of the dense block's
    memory: Memory  #: of all runs

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within it the example is in memory."""
        activations = self.stop.run.activations
        activations.fetch()
        with self.memory.lend(self.goal):
            yield
        activations.settle()

    def output(self, new: Mapping[nn.Module, StructuredLinear], vectors: Vectors = ()) -> Any:
        """The block's output again, with these layers and vectors.

        It gets a copy of its inputs: it may write into them, and others may read them later.
        """
        replica_of_run = self.stop.run.replica
        assert replica_of_run is not None  # the run waits
        replica = replica_of_run.replicate(self.stop.module)
        for layer, structured in new.items():
            vars(replica[layer])["forward"] = structured.forward
        for module, name, vector in vectors:
            replica[module]._parameters[name] = vector
        args, kwargs = Copier().copy((self.stop.args, self.stop.kwargs))
        with CheckNumbers(replica.model):
            return replica.copy(self.stop.forward)(*args, **kwargs)


def refine(
    block: nn.Module,
    new: Mapping[nn.Module, StructuredLinear],
    examples: Sequence[Example],
    *,
    steps: int,
    shared: Collection[int] = (),
) -> tuple[Refined, Sequence[Any]]:
    """Fit the new layers of a block, in place, and copies of vectors of its other modules.

    One step for each example in turn, in random order, with a rate that falls to zero as a cosine.
    If the error is not less at the end, once more with a quarter of the rate; if it is not then,
    everything is as it was.

    Args:
        new: dense layer in the block -> the structured one that takes its place.
        shared: `id` of the parameters that several modules of the model have: they stay.

    Returns:
        What was made of the block, and its outputs for the examples.

    Raises:
        NotRefinedError: its outputs have no token; its inputs have no copy, or it does not make the
            same output of them again; torch cannot take its gradient.
    """
    _require_gradients(not examples[0].made.is_inference(), steps)
    examples_with_tokens = [example for example in examples if example.goal.numel()]
    if not examples_with_tokens:
        raise NotRefinedError("its outputs have no token")
    with examples_with_tokens[0].present():
        _require_same_output(examples_with_tokens[0], new)
    vectors = _copy_vectors(block, new, shared)
    parameters = _list_parameters(new, vectors, shared)
    values_before = [parameter.detach().clone() for parameter in parameters]
    outputs_before = [example.stop.output for example in examples]
    error_before = _measure(examples, outputs_before)
    for rate in (LR, LR / 4):
        try:
            _descend(new, vectors, parameters, examples_with_tokens, steps, rate)
        except NotRefinedError:
            _set_values(parameters, values_before)
            raise
        outputs = [_run_again(example, new, vectors) for example in examples]
        error = _measure(examples, outputs)
        if error < error_before:
            changed = [NewVector(module, name, vector.detach()) for module, name, vector in vectors]
            return Refined(error_before, error, changed), outputs
        _set_values(parameters, values_before)
    return Refined(error_before, error_before), outputs_before


def _run_again(
    example: Example, new: Mapping[nn.Module, StructuredLinear], vectors: Vectors
) -> Any:
    """The block's new output, which counts as its run's."""
    with example.present(), example.stop.run.activations.watch():
        return example.output(new, vectors)


def _list_parameters(
    new: Mapping[nn.Module, StructuredLinear], vectors: Vectors, shared: Collection[int]
) -> list[nn.Parameter]:
    """What moves: the cores, the biases that no other module has, and the vectors."""
    cores: list[nn.Parameter] = []
    biases: list[nn.Parameter] = []
    for dense, layer in new.items():
        cores += layer.cores
        if layer.bias is not None and id(dense._parameters.get("bias")) not in shared:
            biases.append(layer.bias)
    return [*cores, *biases, *(vector for _, _, vector in vectors)]


def _copy_vectors(
    block: nn.Module, new: Mapping[nn.Module, StructuredLinear], shared: Collection[int]
) -> Vectors:
    """Copies of the vectors of the block's other modules, of those that have nothing else."""
    vectors = []
    for module in block.modules():
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        if module in new or any(parameter.ndim != 1 for parameter in parameters.values()):
            continue
        for name, parameter in parameters.items():
            if id(parameter) not in shared:
                vectors.append((module, name, nn.Parameter(parameter.detach().clone())))
    return vectors


def _require_gradients(has_gradients: bool, steps: int) -> None:
    if not has_gradients:
        raise ValueError(
            f"refine={steps} takes gradients, but the model turns them off (no_grad or "
            "inference_mode): take refine=0, or such a decorator off its forward"
        )


def _descend(
    new: Mapping[nn.Module, StructuredLinear],
    vectors: Vectors,
    parameters: Sequence[nn.Parameter],
    examples: Sequence[Example],
    steps: int,
    rate: float,
) -> None:
    """Adam, on copies in float32 or better; `rate` is a dense weight's."""
    lr_mults: dict[nn.Parameter, float] = {}
    for layer in new.values():
        for parameter, core in zip(layer.cores, layer.structure.cores, strict=True):
            lr_mults[parameter] = lr_mult(core, layer.in_features, len(layer.cores))
    masters = [promote(parameter.detach()).clone() for parameter in parameters]
    groups = [
        {"params": [master], "lr": rate * lr_mults.get(parameter, 1.0)}
        for parameter, master in zip(parameters, masters, strict=True)
    ]
    optimizer = torch.optim.Adam(groups, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
    )
    generator = torch.Generator().manual_seed(0)
    order: list[int] = []  # of the examples that this pass has left
    for step in range(steps):
        if not order:
            order = torch.randperm(len(examples), generator=generator).tolist()
        example = examples[order.pop()]
        with example.present(), _with_gradients(parameters):
            loss = _gap(example, example.output(new, vectors)).square().mean()
            _require_gradients(loss.requires_grad, steps)
            gradients = _differentiate(loss, parameters)
        if step == 0 and not all(g.isfinite().all() for g in gradients if g is not None):
            raise ValueError(f"refine={steps}: a block has gradients that are not finite")
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype)
        optimizer.step()
        schedule.step()
        _set_values(parameters, masters)


def _set_values(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, own_values in zip(parameters, values, strict=True):
        parameter.data.copy_(own_values)


@contextmanager
def _with_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within it torch keeps what the gradients of these need."""
    for parameter in parameters:
        parameter.requires_grad_()
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _differentiate(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a tensor that it needs was written into, say
        raise NotRefinedError(f"its gradient cannot be taken ({error})") from error


def _require_same_output(example: Example, new: Mapping[nn.Module, StructuredLinear]) -> None:
    """Raises: NotRefinedError: the block makes of its inputs something else than in the run."""
    try:
        output = first_tensor(example.output(new))
    except NoCopyError as refused:
        raise NotRefinedError(f"{refused}, which is in its inputs") from refused
    if output is None or output.shape != example.made.shape:
        raise NotRefinedError(ANOTHER_OUTPUT)
    first, again = (select_rows(made, example.call.masks) for made in (example.made, output))
    scale = first.abs().amax().item() if first.numel() else 0.0
    if not math.isfinite(scale) or not torch.allclose(first, again, rtol=1e-2, atol=1e-3 * scale):
        raise NotRefinedError(ANOTHER_OUTPUT)


def _gap(example: Example, output: Any) -> Tensor:
    """What an output of the block is off the goal at each token: `(tokens, features)`, in float32
    or better."""
    tensor = first_tensor(output)
    assert tensor is not None  # as in the run
    rows = promote(select_rows(tensor, example.call.masks))
    goal = select_rows(example.goal, example.call.masks)
    return rows - goal.to(rows.dtype)


def _measure(examples: Sequence[Example], outputs: Sequence[Any]) -> float:
    """|output - goal| / |goal|, over the tokens of all examples."""
    squared_gap = 0.0
    squared_goal = 0.0
    for example, output in zip(examples, outputs, strict=True):
        tensor = first_tensor(output)
        assert tensor is not None  # as in the run
        with example.memory.lend(tensor, example.goal):
            squared_gap += _gap(example, output).square().sum(dtype=torch.float64).item()
            goal = select_rows(example.goal, example.call.masks)
            squared_goal += goal.double().square().sum().item()
    return math.sqrt(divide_norms(squared_gap, squared_goal))
