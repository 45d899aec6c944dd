"""Sequential projection: layer by layer in the model's own order, each against the dense model.

With x a layer's input in the dense model and z its input in the model compressed so far, the
structured B that minimises E |W x - B z|^2 is the one nearest to the regression W C_xz C_zz^-1 in
the covariance of z, for any structure. The same holds where the outputs' errors have weights G:

    B = project(W (C_xz + mu I) (C_zz + mu I)^-1, covariance=C_zz + lam I, output=G)
    bias: b + W E[x] - B E[z], and the covariances are centred

lam, see `Moments.ridge`, and mu, `DRAW` times lam, draw B towards W where the tokens say little.
A layer without a bias has nothing to carry the mean: its covariances are around zero.

The model runs once densely and once compressed, side by side (`Replay.walk`): both stop at every
layer to convert, the layer is projected, and they go on, one with the layer's own output, the other
with that of the projection. So only the live activations of one place are held, and one layer's
covariance; layers that get the same tensor (query, key and value) share it.
"""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import nan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._convert.plan import Projection, Refined, build_layer, project_by_weight
from .._layer.linear import StructuredLinear
from .._model.blocks import blocks_of_layers
from .._model.calls import first_tensor
from .._model.decide import Target
from .._model.stacks import ExpertMatrix
from .._projection.matrices import divide_norms
from .._projection.solve import project, relative_error
from .._structure.arguments import warn
from ..duality import promote
from .memory import Memory
from .moments import Moments, measure_inputs
from .padding import select_rows
from .progress import Bar
from .refine import Example, NotRefinedError, refine
from .replay import Replay, Visit, Wait, find_shared, take_input
from .sizes import Weights

# mu / lam. By trial: SmolLM2-135M at 0.6 with 8192 tokens has, with 10 in place of 1, 26 % less
# perplexity on another kind of text and 4 % less on the same; all-MiniLM-L6-v2 at half of the
# parameters a mean cosine of 0.917 in place of 0.919. 3 lies between.
DRAW = 3.0
FEW = 0.1  # tokens per feature, below which a warning says that batches are few


@torch.no_grad()
def project_in_order(
    replay: Replay,
    targets: Sequence[Target],
    outputs: Weights,
    refine_steps: int,
    progress: bool | None,
) -> tuple[dict[str, Projection], dict[str, Refined]]:
    """Project these layers in the order in which the model runs, and refine its blocks.

    Layers to which a walk may come again (`Replay.repeated`) are projected for the inputs that they
    have in the dense model.

    Returns:
        By their names, the projections of the layers, and what became of the refined blocks.
    """
    repeated = [target.layer for target in targets if target.layer.module in replay.repeated]
    with Bar("project", len(targets), progress) as bar:
        compressed = _Compressed(replay, targets, outputs, bar, refine_steps)
        moments_of_repeated = measure_inputs(replay, repeated, replay.calls)
        if moments_of_repeated:
            reached = [layer.name for layer in repeated if layer.module in moments_of_repeated]
            warn(
                "compress: one pass calls these layers more than once, or passes call them in "
                "orders that contradict each other, so they are projected for the dense model's "
                f"inputs, not for the compressed one's: {', '.join(reached)}"
            )
        for module, moments in moments_of_repeated.items():
            compressed.project(module, moments)
        if targets:
            compressed.go_through()
        for module, target in compressed.targets.items():
            if module not in compressed.projections:
                bar.show(target.layer.name)
                compressed.projections[module] = project_by_weight(*target)
                bar.advance()
    projections = {
        target.layer.name: compressed.conclude(target.layer.module) for target in targets
    }
    _warn_of_few_tokens(targets, projections)
    return projections, compressed.refined


def _warn_of_few_tokens(targets: Sequence[Target], projections: Mapping[str, Projection]) -> None:
    targets = [target for target in targets if not isinstance(target.layer, ExpertMatrix)]
    layers = [target.layer.name for target in targets]
    unseen = [name for name in layers if projections[name].tokens is None]
    if unseen:
        names = ", ".join(unseen)
        warn(f"compress: no input that varies reached {names}: projected by weight alone")
    seldom_seen = []
    for layer, _ in targets:
        tokens = projections[layer.name].tokens
        if tokens and tokens < FEW * layer.in_features:
            seldom_seen.append(f"{layer.name} ({tokens} of {layer.in_features})")
    if seldom_seen:
        warn(
            "compress: these layers got far fewer tokens than they have input features, and are "
            f"mostly projected by weight: {', '.join(seldom_seen)}; give more batches"
        )


# ---- one layer ---------------------------------------------------------------------------------


@torch.no_grad()
def solve(
    target: Target, moments: Moments, own_bias: Tensor | None, output: Tensor | None = None
) -> Projection:
    """The projection of one layer for its inputs; by its weight if they never vary.

    Its error is not known for pairs x and z that vary: `_Gap` measures it.

    Args:
        own_bias: of the layer, which carries the change of the mean; None: nothing carries it.
        output: what squared errors of the outputs weigh; None: all alike.
    """
    layer, structure = target
    weight = layer.matrix
    regression, covariance = find_target(weight, moments)  # (out, in), (in, in)
    precise_cores = project(regression, structure, covariance=covariance, output=output)
    cores = [core.to(weight.dtype) for core in precise_cores]

    error = nan
    if covariance is None:  # z never varies: the weight's own error
        error = relative_error(weight, structure, cores)
    elif not moments.paired:
        error = relative_error(weight, structure, cores, covariance=moments.zz)

    bias = None
    if own_bias is not None and moments.centred:
        # b + W E[x] - B E[z]
        matrix = build_layer(layer, structure, cores).to_dense().double()  # B: (out, in)
        change = moments.mean_output(weight) - matrix @ moments.mean_z  # (out,)
        bias = (own_bias.double() + change).to(own_bias.dtype)

    tokens = None if covariance is None else moments.count
    return Projection(cores, error, bias, tokens)


def find_target(weight: Tensor, moments: Moments) -> tuple[Tensor, Tensor | None]:
    """W (C_xz + mu I) (C_zz + mu I)^-1 in float32 or better, and C_zz + lam I in float64.

    Where x and z are the same, W itself; where they never vary, without covariance.
    """
    precise = promote(weight)
    zz = moments.zz  # C_zz: (in, in)
    ridge = moments.ridge  # lam
    if not ridge:
        return precise, None
    eye = torch.eye(len(zz), dtype=zz.dtype, device=zz.device)
    covariance = zz + ridge * eye
    if not moments.paired:
        return precise, covariance
    root, failed = torch.linalg.cholesky_ex(zz + DRAW * ridge * eye)
    while failed:  # rounding in float32 can outweigh the smallest variances
        ridge = 10 * ridge
        covariance = zz + ridge * eye
        root, failed = torch.linalg.cholesky_ex(zz + DRAW * ridge * eye)
    right = moments.cross(weight) + DRAW * ridge * weight.double()  # (out, in)
    # C is symmetric, so R = right C^-1 is solved as C R^T = right^T
    return torch.cholesky_solve(right.mT, root).mT.to(precise.dtype), covariance


# ---- all layers, in the model's order ----------------------------------------------------------


class _Reference(NamedTuple):
    """A tensor as it was: what it becomes later has another version."""

    tensor: "weakref.ref[Tensor]"
    version: int  #: -1 where torch keeps none


@dataclass
class _Gap:
    """Sums over a layer's outputs, token by token: |W x - B z|^2 and |W x|^2, both with the means
    carried by the bias where there is one."""

    mean: Tensor | None  #: of the dense outputs, `(out_features,)`
    above: float = 0.0
    below: float = 0.0

    def add(self, y: Tensor, new: Tensor) -> None:
        """Add rows `(tokens, out_features)`: the dense layer's outputs, and the new one's."""
        y = promote(y)
        self.above += _sum_squares(y - new)
        centred = y if self.mean is None else y - self.mean.to(y)
        self.below += _sum_squares(centred)

    @property
    def error(self) -> float:
        return divide_norms(sqrt(self.above), sqrt(self.below))


def _sum_squares(rows: Tensor) -> float:
    flat = rows.flatten()
    return torch.dot(flat, flat).item()


class _Compressed:
    """The model compressed so far: what its layers and blocks have become."""

    def __init__(
        self,
        replay: Replay,
        targets: Sequence[Target],
        outputs: Weights,
        bar: Bar,
        refine_steps: int,
    ) -> None:
        self.replay = replay
        self.outputs = outputs
        self.bar = bar
        self.targets = {target.layer.module: target for target in targets}
        self.projections: dict[nn.Module, Projection] = {}
        self.structured: dict[nn.Module, StructuredLinear] = {}  # what the compressed runs call
        self.gaps: dict[nn.Module, _Gap] = {}
        self._inputs: list[_Reference] = []  # that the moments are of
        self._moments: Moments | None = None
        self.refine_steps = refine_steps
        self.refined: dict[str, Refined] = {}
        self.blocks = self._list_blocks() if refine_steps else {}

    def _list_blocks(self) -> dict[nn.Module, "_Block"]:
        """The blocks to refine. A block that a layer is called twice in may itself be called twice:
        it is none of them."""
        layers = [target.layer for target in self.targets.values()]
        blocks = {}
        for block, (name, layers_within) in blocks_of_layers(self.replay.model, layers).items():
            modules = [layer.module for layer in layers_within]
            if not any(module in self.replay.repeated for module in modules):
                blocks[block] = _Block(name, modules)
        return blocks

    def go_through(self) -> None:
        """Project the layers that the calls reach, and refine the blocks, in the model's order."""
        layers_of = {module: block.layers for module, block in self.blocks.items()}
        # what a model does after its last layer, such as a head over a vocabulary, is not needed;
        # where a layer is not in the order, nobody knows which is the last
        to_end = not all(module in self.replay.order for module in self.targets)
        walk = self.replay.walk(
            self.targets, self.replay.calls, both=True, to_end=to_end, blocks=layers_of
        )
        with closing(walk) as visits:
            for visit in visits:
                with visit.memory.guard():
                    self._take(visit)

    def _take(self, visit: Visit) -> None:
        if visit.module in self.blocks:
            self._refine(visit)
            return
        if visit.module not in self.structured:
            self.project(visit.module, self._measure(visit))
        for wait in visit.waits:
            self._answer(visit.module, wait)

    def project(self, module: nn.Module, moments: Moments) -> None:
        """Project a layer for these inputs; the compressed runs have it from now on."""
        target = self.targets[module]
        dense_bias = self.replay.biases.get(module)
        self.bar.show(target.layer.name)
        if moments.count:
            projection = solve(target, moments, dense_bias, self.outputs.get(module))
        else:  # called, but with no row that is a token
            projection = project_by_weight(*target)

        if projection.tokens is not None and moments.paired:
            mean = None
            if moments.centred:  # the new bias carries the mean of the dense outputs: W E[x] + b
                bias_or_zero = 0.0 if dense_bias is None else dense_bias.double()
                mean = moments.mean_output(target.layer.matrix) + bias_or_zero
            self.gaps[module] = _Gap(mean)

        structured = build_layer(*target, projection.cores).eval().requires_grad_(False)
        bias = projection.bias
        if bias is None:
            bias = module._parameters.get("bias")
        if bias is not None:  # a copy: refinement moves it
            structured.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.projections[module] = projection
        self.structured[module] = structured
        self.bar.advance()

    def conclude(self, module: nn.Module) -> Projection:
        """The projection of a layer, with the error on all calls and as refinement left it."""
        projection = self.projections[module]
        structured = self.structured.get(module)
        if structured is None:  # no call reached it
            return projection
        error = self.gaps[module].error if module in self.gaps else projection.error
        cores = [core.detach() for core in structured.cores]
        bias = None
        if module in self.replay.biases and structured.bias is not None:
            bias = structured.bias.detach()
        return replace(projection, cores=cores, error=error, bias=bias)

    def _measure(self, visit: Visit) -> Moments:
        """The moments of the inputs with which the runs wait at this layer.

        Where a call brings other rows in the dense model than in the compressed one (a router chose
        otherwise), x and z are no pairs: both are then the compressed model's input.
        """
        layer = self.targets[visit.module].layer
        centred = visit.module in self.replay.biases
        # query, key and value get the same tensors: their moments are measured once
        inputs: list[_Reference] = []
        for wait in visit.waits:
            for stop in (wait.dense, wait.compressed):
                if stop is not None:
                    inputs.append(_refer_to(stop.input))
        moments = self._moments
        is_alike = moments is not None and moments.centred == centred and moments.weight is None
        if moments is not None and is_alike and _are_same(inputs, self._inputs):
            return moments

        narrows = layer.out_features < layer.in_features
        moments = Moments(centred=centred, weight=layer.matrix if narrows else None)
        self._inputs = inputs
        self._moments = moments
        pairs = _pair_inputs(visit.waits, are_tokens_same=not isinstance(layer, ExpertMatrix))
        # up to the first projected layer both runs agree, and one covariance is enough
        are_equal = all(_are_equal(pair, visit.memory) for pair in pairs)
        for pair in pairs:
            with visit.memory.lend(pair.x, pair.z):
                if are_equal:
                    moments.add(select_rows(pair.x, pair.masks))
                else:
                    moments.add(select_rows(pair.x, pair.masks), select_rows(pair.z, pair.masks))
        moments.require_finite(layer.name)
        return moments

    def _answer(self, module: nn.Module, wait: Wait) -> None:
        """Let the compressed run of this call go on with the new layer's output, and measure that
        beside the dense layer's, in the dense run, which goes on first."""
        structured = self.structured[module]
        gap = self.gaps.get(module)
        masks = wait.call.masks
        dense = wait.dense
        compressed = wait.compressed
        if compressed is None:
            return
        compressed.answer = lambda *args, **kwargs: structured(take_input(args, kwargs))
        z = compressed.input
        if gap is None or dense is None or dense.input.shape != z.shape:
            return
        forward = dense.forward  # not the stop, which would hold itself
        outputs: list[Tensor] = []  # B z, from the dense run to the compressed one

        # B z is computed in the dense run, so that y need not be kept until the other goes on
        def compare(*args: Any, **kwargs: Any) -> Any:
            y = forward(*args, **kwargs)
            outputs.append(structured(z))
            gap.add(select_rows(y, masks), select_rows(outputs[0], masks))
            return y

        dense.answer = compare
        compressed.answer = lambda *args, **kwargs: outputs.pop()

    def _refine(self, visit: Visit) -> None:
        """Refine a block that the runs are about to leave; they leave it with its new outputs."""
        block = self.blocks[visit.module]
        examples = []
        for wait in visit.waits:
            if wait.dense is None or wait.compressed is None:
                continue
            goal = first_tensor(wait.dense.output)
            output = first_tensor(wait.compressed.output)
            if goal is not None and output is not None and goal.shape == output.shape:
                examples.append(Example(wait.call, wait.compressed, output, goal, visit.memory))
        if not examples or any(layer not in self.structured for layer in block.layers):
            return
        self.bar.show(f"refine {block.name}")
        structured = {layer: self.structured[layer] for layer in block.layers}
        shared = find_shared(self.replay.model)
        try:
            refined, outputs = refine(
                visit.module, structured, examples, steps=self.refine_steps, shared=shared
            )
        except NotRefinedError as reason:
            warn(f"compress: block {block.name!r} is not refined: {reason}")
            return
        self.refined[block.name] = refined
        for example, new_output in zip(examples, outputs, strict=True):
            example.stop.output = new_output


class _Block(NamedTuple):
    """A block to refine: its name, and its layers that are projected."""

    name: str
    layers: Sequence[nn.Module]


class _Pair(NamedTuple):
    """The inputs of a layer in one call of the dense and of the compressed model:
    `(..., in_features)`."""

    x: Tensor
    z: Tensor
    masks: list[Tensor]


def _pair_inputs(waits: Sequence[Wait], *, are_tokens_same: bool) -> list[_Pair]:
    """The inputs with which the runs wait. If they do not fit in all calls, the compressed model's
    alone, with themselves; the dense model's where no compressed run is there.

    `are_tokens_same`: whether inputs of one shape are of the same tokens. To an expert a router may
    send as many others.
    """
    pairs: list[_Pair] = []
    of_dense: list[_Pair] = []
    of_compressed: list[_Pair] = []
    for wait in waits:
        masks = wait.call.masks
        x = None if wait.dense is None else wait.dense.input
        z = None if wait.compressed is None else wait.compressed.input
        if x is not None and z is not None and x.shape == z.shape:
            pairs.append(_Pair(x, z, masks))
        if x is not None:
            of_dense.append(_Pair(x, x, masks))
        if z is not None:
            of_compressed.append(_Pair(z, z, masks))
    if are_tokens_same and len(pairs) == len(waits):
        return pairs
    return of_compressed or of_dense


def _are_equal(pair: _Pair, memory: Memory) -> bool:
    if pair.x is pair.z:
        return True
    with memory.lend(pair.x, pair.z):
        return torch.equal(pair.x, pair.z)


def _refer_to(tensor: Tensor) -> _Reference:
    """A reference that does not keep the tensor, and says whether somebody has written into it."""
    return _Reference(weakref.ref(tensor), -1 if tensor.is_inference() else tensor._version)


def _are_same(inputs: Sequence[_Reference], others: Sequence[_Reference]) -> bool:
    """Whether they are the same tensors, and surely nobody has written into them."""
    if len(inputs) != len(others):
        return False
    for reference, other in zip(inputs, others, strict=True):
        tensor = reference.tensor()
        if tensor is None or tensor is not other.tensor():
            return False
        if reference.version < 0 or reference.version != other.version:
            return False
    return True
