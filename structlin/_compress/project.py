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
from typing import Any

import torch
from torch import Tensor, nn

from .._convert.plan import Projection, Refined, build_layer, project_by_weight
from .._layer.linear import StructuredLinear
from .._model.blocks import blocks_of_layers
from .._model.calls import first_tensor
from .._model.decide import Target
from .._projection.matrices import divide_norms
from .._projection.solve import project, relative_error
from .._structure.arguments import warn
from ..duality import promote
from .moments import Moments, measure_inputs
from .padding import select_rows
from .progress import Bar
from .refine import Example, refine
from .replay import Replay, Visit, Wait, find_shared, take_input
from .sizes import Weights

# mu / lam. By trial: SmolLM2-135M at 0.6 with 8192 tokens has, with 10 in place of 1, 26 % less
# perplexity on another kind of text and 4 % less on the same; all-MiniLM-L6-v2 at half of the
# parameters a mean cosine of 0.917 in place of 0.919. 3 lies between.
DRAW = 3.0
_Reference = tuple["weakref.ref[Tensor]", int]  # with the version; -1 where torch keeps none
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

    Layers that a call of the model calls more than once are projected for the inputs that they have
    in the dense model.

    Returns:
        By their names, the projections of the layers, and what became of the refined blocks.
    """
    repeated = [target.layer for target in targets if target.layer.module in replay.repeated]
    with Bar("project", len(targets), progress) as bar:
        compressed = _Compressed(replay, targets, outputs, bar, refine_steps)
        apart = measure_inputs(replay, repeated, replay.calls)
        if apart:
            names = ", ".join(layer.name for layer in repeated if layer.module in apart)
            warn(
                "compress: one pass calls these layers more than once, so they are projected for "
                f"the dense model's inputs, not for the compressed one's: {names}"
            )
        for module, moments in apart.items():
            compressed.project(module, moments)
        if targets:
            compressed.go_through()
        for module, target in compressed.targets.items():
            if module not in compressed.found:
                bar.show(target.layer.name)
                compressed.found[module] = project_by_weight(*target)
                bar.advance()
    named = {target.layer.name: compressed.conclude(target.layer.module) for target in targets}
    _warn_of_few_tokens(targets, named)
    return named, compressed.refined


def _warn_of_few_tokens(targets: Sequence[Target], found: Mapping[str, Projection]) -> None:
    if unseen := [name for name, projection in found.items() if projection.tokens is None]:
        names = ", ".join(unseen)
        warn(f"compress: no input that varies reached {names}: projected by weight alone")
    if few := [
        f"{layer.name} ({tokens} of {layer.in_features})"
        for layer, _ in targets
        if (tokens := found[layer.name].tokens) and tokens < FEW * layer.in_features
    ]:
        warn(
            "compress: these layers got far fewer tokens than they have input features, and are "
            f"mostly projected by weight: {', '.join(few)}; give more batches"
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
    found = project(regression, structure, covariance=covariance, output=output)
    cores = [core.to(weight.dtype) for core in found]
    error, bias = nan, None
    if covariance is None:  # z never varies: the weight's own error
        error = relative_error(weight, structure, cores)
    elif not moments.paired:
        error = relative_error(weight, structure, cores, covariance=moments.zz)
    if own_bias is not None and moments.centred:
        new = build_layer(layer, structure, cores).to_dense().double()
        change = moments.mean_output(weight) - new @ moments.mean_z  # (out,)
        bias = (own_bias.double() + change).to(own_bias.dtype)
    return Projection(cores, error, bias, None if covariance is None else moments.count)


def find_target(weight: Tensor, moments: Moments) -> tuple[Tensor, Tensor | None]:
    """W (C_xz + mu I) (C_zz + mu I)^-1 in float32 or better, and C_zz + lam I in float64.

    Where x and z are the same, W itself; where they never vary, without covariance.
    """
    precise = promote(weight)
    zz, ridge = moments.zz, moments.ridge  # C_zz: (in, in); lam
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
        around = y if self.mean is None else y - self.mean.to(y)
        self.above += _sum_squares(y - new)
        self.below += _sum_squares(around)

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
        self.replay, self.outputs, self.bar = replay, outputs, bar
        self.targets = {target.layer.module: target for target in targets}
        self.found: dict[nn.Module, Projection] = {}
        self.new: dict[nn.Module, StructuredLinear] = {}  # what the compressed runs call
        self.gaps: dict[nn.Module, _Gap] = {}
        self._inputs: list[_Reference] = []  # that the moments are of
        self._moments: Moments | None = None
        self.steps, self.refined = refine_steps, dict[str, Refined]()
        layers = [target.layer for target in targets]
        # a block that a layer is called twice in may itself be called twice
        self.blocks = {
            block: (name, [layer.module for layer in held])
            for block, (name, held) in blocks_of_layers(replay.model, layers).items()
            if refine_steps and not any(layer.module in replay.repeated for layer in held)
        }

    def go_through(self) -> None:
        """Project the layers that the calls reach, and refine the blocks, in the model's order."""
        calls, blocks = self.replay.calls, {block: held for block, (_, held) in self.blocks.items()}
        with closing(self.replay.walk(self.targets, calls, both=True, blocks=blocks)) as visits:
            for visit in visits:
                if visit.module in self.blocks:
                    self._refine(visit)
                    continue
                if visit.module not in self.new:
                    self.project(visit.module, self._measure(visit))
                for wait in visit.waits:
                    self._answer(visit.module, wait)

    def project(self, module: nn.Module, moments: Moments) -> None:
        """Project a layer for these inputs; the compressed runs have it from now on."""
        target, bias = self.targets[module], self.replay.biases.get(module)
        self.bar.show(target.layer.name)
        if moments.count:
            found = solve(target, moments, bias, self.outputs.get(module))
        else:  # called, but with no row that is a token
            found = project_by_weight(*target)
        if found.tokens is not None and moments.paired:
            own = 0.0 if bias is None else bias.double()
            # of the dense outputs, which the new bias carries: W E[x] + b
            mean = moments.mean_output(target.layer.matrix) + own if moments.centred else None
            self.gaps[module] = _Gap(mean)
        new = build_layer(*target, found.cores).eval().requires_grad_(False)
        kept = module._parameters.get("bias") if found.bias is None else found.bias
        if kept is not None:  # a copy: refinement moves it
            new.bias = nn.Parameter(kept.detach().clone(), requires_grad=False)
        self.found[module], self.new[module] = found, new
        self.bar.advance()

    def conclude(self, module: nn.Module) -> Projection:
        """The projection of a layer, with the error on all calls and as refinement left it."""
        found, new = self.found[module], self.new.get(module)
        if new is None:  # no call reached it
            return found
        error = self.gaps[module].error if module in self.gaps else found.error
        own = new.bias if module in self.replay.biases else None
        bias = None if own is None else own.detach()
        return replace(found, cores=[core.detach() for core in new.cores], error=error, bias=bias)

    def _measure(self, visit: Visit) -> Moments:
        """The moments of the inputs with which the runs wait at this layer.

        Where a call brings other rows in the dense model than in the compressed one (a router chose
        otherwise), x and z are no pairs: both are then the compressed model's input.
        """
        layer, last = self.targets[visit.module].layer, self._moments
        pairs: list[tuple[Any, Any, list[Tensor]]] = []  # x and z: (..., in_features)
        for wait in visit.waits:
            x, z = (None if stop is None else stop.input for stop in (wait.dense, wait.compressed))
            pairs.append((x, z, wait.call.masks))
        # query, key and value get the same tensors: their moments are measured once
        inputs: list[_Reference] = [
            (weakref.ref(each), -1 if each.is_inference() else each._version)
            for x, z, _ in pairs
            for each in (x, z)
            if each is not None
        ]
        centred = visit.module in self.replay.biases
        shared = last is not None and last.centred == centred and last.weight is None
        if last is not None and shared and _are_same(inputs, self._inputs):
            return last
        last = None  # no longer held
        narrows = layer.out_features < layer.in_features
        moments = Moments(centred=centred, weight=layer.matrix if narrows else None)
        self._inputs, self._moments = inputs, moments
        if not all(x is not None and z is not None and x.shape == z.shape for x, z, _ in pairs):
            compressed = [(z, z, masks) for _, z, masks in pairs if z is not None]
            pairs = compressed or [(x, x, masks) for x, _, masks in pairs]
        # up to the first projected layer both runs agree, and one covariance is enough
        same = all(x is z or torch.equal(x, z) for x, z, _ in pairs)
        for x, z, masks in pairs:
            moments.add(select_rows(x, masks), None if same else select_rows(z, masks))
        moments.require_finite(layer.name)
        return moments

    def _answer(self, module: nn.Module, wait: Wait) -> None:
        """Let the compressed run of this call go on with the new layer's output, and measure that
        beside the dense layer's, in the dense run, which goes on first."""
        new, gap, masks = self.new[module], self.gaps.get(module), wait.call.masks
        dense, compressed = wait.dense, wait.compressed
        if compressed is None:
            return
        compressed.answer = lambda *args, **kwargs: new(take_input(args, kwargs))
        z, outputs = compressed.input, list[Tensor]()
        if gap is None or dense is None or dense.input.shape != z.shape:
            return
        forward = dense.forward  # not the stop, which would hold itself

        # new(z) is computed in the dense run, so that y need not be kept until the other goes on
        def compare(*args: Any, **kwargs: Any) -> Any:
            y = forward(*args, **kwargs)
            outputs.append(new(z))
            gap.add(select_rows(y, masks), select_rows(outputs[0], masks))
            return y

        dense.answer = compare
        compressed.answer = lambda *args, **kwargs: outputs.pop()

    def _refine(self, visit: Visit) -> None:
        """Refine a block that the runs are about to leave; they leave it with its new outputs."""
        name, held = self.blocks[visit.module]
        examples = []
        for wait in visit.waits:
            if wait.dense is None or wait.compressed is None:
                continue
            goal, made = first_tensor(wait.dense.output), first_tensor(wait.compressed.output)
            if goal is not None and made is not None and goal.shape == made.shape:
                examples.append(Example(wait.call, wait.compressed, made, goal))
        if not examples or any(layer not in self.new for layer in held):
            return
        self.bar.show(f"refine {name}")
        own = {layer: self.new[layer] for layer in held}
        shared = find_shared(self.replay.model)
        done = refine(visit.module, own, examples, steps=self.steps, shared=shared)
        if done is None:
            what = "does not give the same output again: it is not refined"
            warn(f"compress: block {name!r} {what}")
            return
        self.refined[name], outputs = done
        for example, output in zip(examples, outputs, strict=True):
            example.stop.output = output


def _are_same(inputs: Sequence[_Reference], others: Sequence[_Reference]) -> bool:
    """Whether they are the same tensors, and surely nobody has written into them."""
    return len(inputs) == len(others) and all(
        x() is not None and x() is other() and version == other_version >= 0
        for (x, version), (other, other_version) in zip(inputs, others, strict=True)
    )
