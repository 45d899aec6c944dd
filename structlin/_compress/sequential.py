"""Sequential projection: layer by layer in the model's own order, each against the dense model.

With x a layer's input in the dense model and z its input in the model compressed so far, the
structured B that minimises E |W x - B z|^2 is the one nearest to the regression W C_xz C_zz^-1 in
the covariance of z, for any structure. The same holds where the outputs' errors have weights G:

    B = project(W (C_xz + mu I) (C_zz + mu I)^-1, covariance=C_zz + lam I, output=G)
    bias: b + W E[x] - B E[z], and the covariances are centred

lam, see `Moments.ridge`, and mu, `DRAW` times lam, draw B towards W where the tokens say little.
A layer without a bias has
nothing to carry the mean: its covariances are around zero.

The model runs once densely and once compressed, in lockstep (`streams`): both stop at every layer
to convert, the layer is projected, and they go on, one with the layer's own output, the other with
that of the projection. So only the live activations of one place are held, and one layer's
covariance; layers that get the same tensor (query, key and value) share it.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from .._interrupts import hold_interrupts
from .._linear import StructuredLinear
from .._model.decide import Target
from .._plan import Projection, Refined, build_layer, project_by_weight
from .._progress import Bar
from .._projection import project, relative_error
from .._projection.matrices import divide_norms
from .._warnings import warn
from ..duality import promote
from .allocation import Weights
from .calibration import Call, Observed, find_shared, measure_again, ready
from .moments import Moments
from .padding import select_rows
from .refine import Example, find_blocks, refine, take_tensor
from .streams import Place, Stream, Streams, find_next, take_input

# mu / lam. By trial: SmolLM2-135M at 0.6 with 8192 tokens has, with 10 in place of 1, 26 % less
# perplexity on another kind of text and 4 % less on the same; all-MiniLM-L6-v2 at half of the
# parameters a mean cosine of 0.917 in place of 0.919. 3 lies between.
DRAW = 3.0
FEW = 0.1  # tokens per feature, below which a warning says that batches are few


@dataclass(frozen=True)
class Projected:
    """What is left of the layers of a model, and of its blocks."""

    layers: Mapping[str, Projection]  #: by name
    blocks: Mapping[str, Refined] = field(default_factory=dict)  #: by name, if refined


@torch.no_grad()
def project_in_order(
    model: nn.Module,
    targets: Sequence[Target],
    seen: Observed,
    outputs: Weights,
    *,
    refine_steps: int = 0,
    progress: bool | None = None,
) -> Projected:
    """Project these layers in the order in which the model runs.

    Layers that a call of the model calls more than once, and all layers where the calls cannot be
    made again, are projected for the inputs that they have in the dense model.

    Args:
        seen: what `observe` returned for these layers.
        outputs: what `weigh_outputs` returned for them.
        refine_steps: of each block once all of its layers are projected, see `refine`.
        progress: whether to show a bar; None: on a terminal.

    Raises:
        ValueError: an input of a layer is not finite.

    Warns:
        UserWarning: layers that are projected for the dense model's inputs, by weight alone, or for
            few tokens.
    """
    by_module = {target.layer.module: target for target in targets}
    blocks: Mapping[str, Refined] = {}
    with hold_interrupts(), Bar("project", len(targets), progress) as bar:
        apart = _measure_apart(model, targets, seen)
        _warn_of_dense_inputs([by_module[module].layer.name for module in apart], seen)
        found: dict[nn.Module, Projection] = {}
        for module, moments in apart.items():
            bar.show(by_module[module].layer.name)
            own = seen.biases.get(module), outputs.get(module)
            found[module] = solve(by_module[module], moments, *own)
            bar.advance()
        if seen.calls is not None and targets:
            found, blocks = _Lockstep(
                model, by_module, found, seen, outputs, seen.calls, bar, refine_steps
            ).run()
        elif refine_steps and targets:
            _warn("without calls that can be made again no block is refined")
        for module, target in by_module.items():
            if module not in found:
                bar.show(target.layer.name)
                found[module] = project_by_weight(*target)
                bar.advance()
    named = {target.layer.name: found[module] for module, target in by_module.items()}
    _warn_of_few_tokens(targets, named)
    return Projected(named, blocks)


def _measure_apart(
    model: nn.Module, targets: Sequence[Target], seen: Observed
) -> Mapping[nn.Module, Moments]:
    """The dense model's moments of the layers that lockstep cannot do."""
    if seen.calls is None:
        return seen.moments
    repeated = [target.layer for target in targets if target.layer.module in seen.repeated]
    known = {layer.module: seen.moments.get(layer.module) for layer in repeated}
    missing = [layer for layer in repeated if known[layer.module] is None]
    known |= measure_again(model, missing, seen.calls)
    return {module: moments for module, moments in known.items() if moments is not None}


def _warn_of_dense_inputs(names: Sequence[str], seen: Observed) -> None:
    if names:
        why = "one pass calls these layers more than once, so they"
        if seen.calls is None:
            why = "the function's calls of the model cannot be made again, so these layers"
        _warn(
            f"{why} are projected for the dense model's inputs, not for the compressed one's: "
            f"{', '.join(names)}"
        )


def _warn_of_few_tokens(targets: Sequence[Target], found: Mapping[str, Projection]) -> None:
    if unseen := [name for name, projection in found.items() if projection.tokens is None]:
        _warn(f"no input that varies reached {', '.join(unseen)}: projected by weight alone")
    counts = [(layer, found[layer.name].tokens or layer.in_features) for layer, _ in targets]
    if few := [
        f"{layer.name} ({tokens} of {layer.in_features})"
        for layer, tokens in counts
        if tokens < FEW * layer.in_features
    ]:
        _warn(
            "these layers got far fewer tokens than they have input features, and are mostly "
            f"projected by weight: {', '.join(few)}; give more batches"
        )


def _warn(text: str) -> None:
    warn(f"compress: {text}")


# ---- one layer ---------------------------------------------------------------------------------


@torch.no_grad()
def solve(
    target: Target, moments: Moments, own_bias: Tensor | None, output: Tensor | None = None
) -> Projection:
    """The projection of one layer for its inputs; by its weight if they never vary.

    Its error is not known for pairs x and z that vary: `_Lockstep` measures it.

    Args:
        own_bias: of the layer, which carries the change of the mean; None: nothing carries it.
        output: what squared errors of the outputs weigh; None: all alike.
    """
    layer, structure = target
    weight = layer.matrix
    regression, covariance = find_target(weight, moments)
    found = project(regression, structure, covariance=covariance, output=output)
    cores = [core.to(weight.dtype) for core in found]
    error, bias = nan, None
    if covariance is None:
        error = relative_error(weight, structure, cores)
    elif not moments.paired:
        error = relative_error(weight, structure, cores, covariance=moments.zz)
    if own_bias is not None and moments.centred:
        new = build_layer(layer, structure, cores).to_dense().double()
        change = moments.mean_output(weight) - new @ moments.mean_z
        bias = (own_bias.double() + change).to(own_bias.dtype)
    return Projection(cores, error, bias, None if covariance is None else moments.count)


def find_target(weight: Tensor, moments: Moments) -> tuple[Tensor, Tensor | None]:
    """W (C_xz + mu I) (C_zz + mu I)^-1 in float32 or better, and C_zz + lam I in float64.

    Where x and z are the same, W itself; where they never vary, without covariance.
    """
    precise = promote(weight)
    zz, ridge = moments.zz, moments.ridge
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
    return torch.cholesky_solve(right.mT, root).mT.to(precise.dtype), covariance


# ---- all layers, in lockstep -------------------------------------------------------------------


# tensors that nobody is to hold, and their versions: -1 where torch keeps none
_Inputs = list[tuple["weakref.ref[Tensor]", int]]


@dataclass(frozen=True)
class _Pair:
    """The two runs of one call: of the dense model, and of the one compressed so far."""

    dense: Stream
    compressed: Stream
    call: Call

    def find_inputs(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """x and z with which they wait at this layer; None for one that waits elsewhere."""
        stops = (stream.stop_at(module) for stream in (self.dense, self.compressed))
        x, z = (None if stop is None else stop.input for stop in stops)
        return x, z


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


class _Lockstep:
    """All calls, dense and compressed, taken from layer to layer together."""

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[nn.Module, Target],
        found: Mapping[nn.Module, Projection],
        seen: Observed,
        outputs: Weights,
        calls: Sequence[Call],
        bar: Bar,
        refine_steps: int,
    ) -> None:
        """`found`: projections of layers that are not to be measured here."""
        self.model, self.targets, self.calls, self.bar = model, targets, calls, bar
        self.rank = {module: n for n, module in enumerate(seen.order)}
        self.found, self.biases, self.outputs = dict(found), seen.biases, outputs
        self.new: dict[nn.Module, StructuredLinear] = {}  # what the compressed streams run
        self.pairs: list[_Pair] = []
        self.gaps: dict[nn.Module, _Gap] = {}
        self._inputs: _Inputs = []  # that the moments are of
        self._moments: Moments | None = None
        self.steps, self.refined = refine_steps, dict[str, Refined]()
        layers = [target.layer for target in targets.values()]
        # a block that a layer is called twice in may itself be called twice
        self.blocks = {
            block: (name, [layer.module for layer in held])
            for block, (name, held) in (find_blocks(model, layers) if refine_steps else {}).items()
            if not any(layer.module in seen.repeated for layer in held)
        }
        last = len(self.rank)  # of layers that the dense model never called
        for block, (_, held) in self.blocks.items():
            self.rank[block] = max(self.rank.get(layer, last) for layer in held)

    def run(self) -> tuple[dict[nn.Module, Projection], dict[str, Refined]]:
        """The projections of the layers that the calls reach, and what refinement made."""
        for apart in self.found:
            self._put_in(apart)
        places = [Place(module) for module in self.targets]
        places += [Place(block, leaving=True) for block in self.blocks]
        with ready(self.model), Streams(self.model, places, 2 * len(self.calls)) as streams:
            for call in self.calls:
                again = partial(call.run, self.model)
                dense, compressed = (streams.start(again, call.state) for _ in range(2))
                self.pairs.append(_Pair(dense, compressed, call))
            both = [stream for pair in self.pairs for stream in (pair.dense, pair.compressed)]
            while (module := find_next(both, self.rank)) is not None:
                if module in self.blocks:
                    self._refine(module)
                    continue
                if module not in self.new:
                    self._project(module)
                for pair in self.pairs:
                    self._go_on(pair, module)
        return {module: self._conclude(module) for module in self.found}, self.refined

    def _project(self, module: nn.Module) -> None:
        target, bias = self.targets[module], self.biases.get(module)
        self.bar.show(target.layer.name)
        moments = self._measure(target, centred=bias is not None)
        if moments.count:
            self.found[module] = solve(target, moments, bias, self.outputs.get(module))
        else:  # called, but with no row that is a token
            self.found[module] = project_by_weight(*target)
        if self.found[module].tokens is not None and moments.paired:
            own = 0.0 if bias is None else bias.double()
            mean = moments.mean_output(target.layer.matrix) + own if moments.centred else None
            self.gaps[module] = _Gap(mean)
        self._put_in(module)
        self.bar.advance()

    def _put_in(self, module: nn.Module) -> None:
        """Let the compressed streams have the projected layer from now on."""
        found = self.found[module]
        new = self.new[module] = build_layer(*self.targets[module], found.cores).eval()
        new.requires_grad_(False)
        bias = module._parameters.get("bias") if found.bias is None else found.bias
        if bias is not None:  # a copy: refinement moves it
            new.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)

    def _conclude(self, module: nn.Module) -> Projection:
        """The projection of a layer, with the error on all streams and as refinement left it."""
        found, new = self.found[module], self.new[module]
        return replace(
            found,
            cores=[core.detach() for core in new.cores],
            error=self.gaps[module].error if module in self.gaps else found.error,
            bias=new.bias.detach() if new.bias is not None and module in self.biases else None,
        )

    def _measure(self, target: Target, centred: bool) -> Moments:
        """The moments of the layer's inputs, from all streams that wait there.

        Where a call brings other rows in the dense model than in the compressed one (a router chose
        otherwise), x and z are no pairs: both are then the compressed model's input.
        """
        layer, last = target.layer, self._moments
        found = [(*pair.find_inputs(layer.module), pair.call.masks) for pair in self.pairs]
        present = [x for *both, _ in found for x in both if x is not None]
        inputs = [(weakref.ref(x), -1 if x.is_inference() else x._version) for x in present]
        shared = last is not None and last.centred == centred and last.weight is None
        if last is not None and shared and _are_same(inputs, self._inputs):
            return last
        last = None  # no longer held
        narrows = layer.out_features < layer.in_features
        moments = Moments(centred=centred, weight=layer.matrix if narrows else None)
        self._inputs, self._moments = inputs, moments
        _add_pairs(moments, found)
        moments.require_finite(layer.name)
        return moments

    def _go_on(self, pair: _Pair, module: nn.Module) -> None:
        """Resume the streams of this call that wait at the layer, with their outputs."""
        stop, new, gap = pair.dense.stop_at(module), self.new[module], self.gaps.get(module)
        x, z = pair.find_inputs(module)
        if gap is None or stop is None or x is None or z is None or x.shape != z.shape:
            if x is not None:
                pair.dense.resume()
            if z is not None:
                pair.compressed.resume(lambda *args, **kwargs: new(take_input(args, kwargs)))
            return
        outputs: list[Tensor] = []
        dense_forward, masks = stop.forward, pair.call.masks

        def compare(*args: Any, **kwargs: Any) -> Any:
            """The dense layer's output, beside which the new one's is formed and kept."""
            y = dense_forward(*args, **kwargs)
            outputs.append(new(z))
            gap.add(select_rows(y, masks), select_rows(outputs[0], masks))
            return y

        pair.dense.resume(compare)
        pair.compressed.resume(lambda *args, **kwargs: outputs.pop())

    def _refine(self, block: nn.Module) -> None:
        """Refine a block that streams are about to leave, and let them leave it with its output."""
        examples: dict[int, Example] = {}  # of the pairs
        for n, pair in enumerate(self.pairs):
            dense, compressed = pair.dense.stop_at(block), pair.compressed.stop_at(block)
            if dense is None or compressed is None:
                continue
            goal, made = take_tensor(dense.output), take_tensor(compressed.output)
            if goal is not None and made is not None and goal.shape == made.shape:
                inputs, output = (compressed.args, compressed.kwargs), compressed.output
                state = pair.call.masks, pair.compressed.enter
                examples[n] = Example(*inputs, *state, output, made, goal)
        outputs = dict(zip(examples, self._fit(block, [*examples.values()]), strict=False))
        for n, pair in enumerate(self.pairs):
            if pair.dense.stop_at(block) is not None:
                pair.dense.resume()
            if (stop := pair.compressed.stop_at(block)) is not None:
                pair.compressed.resume(partial(_give, outputs.get(n, stop.output)))

    def _fit(self, block: nn.Module, examples: Sequence[Example]) -> Sequence[Any]:
        """Refine the block; its new outputs, none if it stays as it is."""
        name, held = self.blocks[block]
        stops = (pair.compressed.stop_at(block) for pair in self.pairs)
        forward = next((stop.forward for stop in stops if stop is not None), None)
        if not examples or forward is None or any(layer not in self.new for layer in held):
            return []
        self.bar.show(f"refine {name}")
        own = {layer: self.new[layer] for layer in held}
        shared = find_shared(self.model)
        done = refine(block, forward, own, examples, steps=self.steps, shared=shared)
        if done is None:
            _warn(f"block {name!r} does not give the same output again: it is not refined")
            return []
        self.refined[name], outputs = done
        return outputs


def _give(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output


def _are_same(inputs: _Inputs, others: _Inputs) -> bool:
    """Whether they are the same tensors, and surely nobody has written into them."""
    return len(inputs) == len(others) and all(
        x() is not None and x() is other() and version == other_version >= 0
        for (x, version), (other, other_version) in zip(inputs, others, strict=True)
    )


def _add_pairs(
    moments: Moments, found: Sequence[tuple[Tensor | None, Tensor | None, list[Tensor]]]
) -> None:
    """Add each call's inputs x and z, without padding; see `_Lockstep._measure`."""
    present = [each for each in found if each[0] is not None or each[1] is not None]
    pairs = [(x, z, masks) for x, z, masks in present if x is not None and z is not None]
    if len(pairs) == len(present) and all(x.shape == z.shape for x, z, _ in pairs):
        same = all(torch.equal(x, z) for x, z, _ in pairs)
        for x, z, masks in pairs:
            moments.add(select_rows(x, masks), None if same else select_rows(z, masks))
        return
    compressed = [(z, masks) for _, z, masks in present if z is not None]
    dense = [(x, masks) for x, _, masks in present if x is not None]
    for rows, masks in compressed or dense:
        moments.add(select_rows(rows, masks))
