"""Sequential projection: layer by layer in the model's own order, each against the dense model.

With x a layer's input in the dense model and z its input in the model compressed so far, the
structured B that minimises E |W x - B z|^2 is the one nearest to the regression W C_xz C_zz^-1 in
the covariance of z, for any structure:

    B = project(W (C_xz + lam I) (C_zz + lam I)^-1, covariance=C_zz + lam I)
    bias: b + W E[x] - B E[z], and the covariances are centred

lam, see `choose_ridge`, draws B towards W where the tokens say little. A layer without a bias has
nothing to carry the mean: its covariances are around zero.

The model runs once densely and once compressed, in lockstep (`streams`): both stop at every layer
to convert, the layer is projected, and they go on, one with the layer's own output, the other with
that of the projection. So only the live activations of one place are held, and one layer's
covariance; layers that get the same tensor (query, key and value) share it.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from .._linear import StructuredLinear, uninitialised
from .._model.decide import Decision
from .._model.survey import eval_mode
from .._progress import Bar
from .._projection.solve import project, relative_error
from ..duality import promote
from .calibration import (
    Observed,
    check_finite,
    check_ids,
    has_own_bias,
    observe,
    plain_calls,
    take_input,
)
from .moments import Moments
from .padding import select_rows
from .refine import Example, Refined, find_blocks, refine, take_tensor
from .streams import Place, Stop, Stream, Streams

RIDGE = 0.3  # lam at as many tokens as features, in mean variances


def choose_ridge(tokens: int, features: int) -> float:
    """lam in units of the mean diagonal of C_zz: it grows as tokens get few.

    By trial: all-MiniLM-L6-v2, low-rank of half the parameters, `RIDGE` from 0.0001 to 1. The mean
    cosine of held-out sentence vectors is best at 0.1 to 0.3, with 8, 32 and 256 sentences.
    """
    return RIDGE * features / tokens


@torch.no_grad()
def project_in_order(
    model: nn.Module,
    decisions: Sequence[Decision],
    seen: Observed,
    *,
    refine_steps: int = 0,
    progress: bool | None = None,
) -> dict[str, Refined]:
    """Give each of these decisions, whose sizes are known, its cores, bias and error.

    Layers that a call of the model calls more than once, and all layers where the calls cannot be
    made again, are projected for the inputs that they have in the dense model.

    Args:
        seen: what `observe` returned for the layers of these decisions.
        refine_steps: of each block once all of its layers are projected, see `refine`.
        progress: whether to show a bar; None: on a terminal.

    Returns:
        What refinement made of each block, by the block's name.

    Raises:
        ValueError: an input of a layer is not finite.

    Warns:
        UserWarning: layers that are projected for the dense model's inputs, or by weight alone.
    """
    by_module = {decision.layer.module: decision for decision in decisions}
    with Bar("project", len(decisions), progress) as bar:
        apart = _measure_apart(model, decisions, seen)
        names = ", ".join(by_module[module].layer.name for module in apart)
        if apart and seen.calls is None:
            _warn(
                "the function's calls of the model cannot be made again, so these layers are "
                f"projected for the dense model's inputs, not for the compressed one's: {names}"
            )
        elif apart:
            _warn(
                "one pass calls these layers more than once, so they are projected for the dense "
                f"model's inputs, not for the compressed one's: {names}"
            )
        for module, moments in apart.items():
            bar.show(by_module[module].layer.name)
            solve(by_module[module], moments)
            bar.advance()
        refined: dict[str, Refined] = {}
        unseen: list[Decision] = []
        if seen.calls is not None and decisions:
            lockstep = _Lockstep(model, by_module, seen, bar, refine_steps)
            refined, unseen = lockstep.run(), lockstep.unseen
        elif refine_steps and decisions:
            _warn("without calls that can be made again no block is refined")
        for decision in decisions:
            if decision.cores is None:
                bar.show(decision.layer.name)
                solve(decision, None)
                bar.advance()
                unseen.append(decision)
        if unseen:
            names = ", ".join(decision.layer.name for decision in unseen)
            _warn(f"no input reached {names}: projected by weight alone")
        return refined


def _measure_apart(
    model: nn.Module, decisions: Sequence[Decision], seen: Observed
) -> dict[nn.Module, Moments]:
    """The dense model's moments of the layers that lockstep cannot do."""
    if seen.calls is None:
        return seen.moments
    repeated = [decision.layer for decision in decisions if decision.layer.module in seen.repeated]
    missing = [layer for layer in repeated if layer.module not in seen.moments]
    calls = seen.calls

    def run_again(model: nn.Module) -> None:
        for call in calls:
            call.run(model)

    found = observe(model, missing, run_again, measured=missing).moments if missing else {}
    known = seen.moments | found  # not of those whose inputs have no row
    return {layer.module: known[layer.module] for layer in repeated if layer.module in known}


def _warn(text: str) -> None:
    warnings.warn(f"calibration: {text}", UserWarning, stacklevel=6)


# ---- one layer ---------------------------------------------------------------------------------


@torch.no_grad()
def solve(decision: Decision, moments: Moments | None) -> None:
    """Find the cores, the bias and the error of one layer; without moments, by its weight alone.

    The error is that of unpaired moments; `_Lockstep` measures it where x and z are pairs.
    """
    layer, structure = decision.layer, decision.resolved
    assert structure is not None
    weight = layer.matrix
    if moments is None:
        decision.cores = project(weight, structure)
        decision.error = relative_error(weight, structure, decision.cores)
        return
    decision.tokens = moments.count
    target, covariance = find_target(weight, moments)
    cores = project(target, structure, covariance=covariance)
    decision.cores = [core.to(weight.dtype) for core in cores]
    if not moments.paired:
        zz = moments.zz
        decision.error = relative_error(weight, structure, decision.cores, covariance=zz)
    if moments.centred:
        bias = layer.module._parameters["bias"]
        assert bias is not None
        new = _build(decision).to_dense().double()
        change = moments.mean_output(weight) - new @ moments.mean_z
        decision.bias = (bias.double() + change).to(bias.dtype)


def find_target(weight: Tensor, moments: Moments) -> tuple[Tensor, Tensor | None]:
    """W (C_xz + lam I) (C_zz + lam I)^-1 in float32 or better, and C_zz + lam I in float64.

    Where x and z are the same, W itself; where they never vary, without covariance.
    """
    precise = promote(weight)
    zz = moments.zz
    mean = zz.diagonal().mean()
    if mean <= 0:
        return precise, None
    ridge = mean * choose_ridge(moments.count, len(zz))
    eye = torch.eye(len(zz), dtype=zz.dtype, device=zz.device)
    covariance = zz + ridge * eye
    if not moments.paired:
        return precise, covariance
    root, failed = torch.linalg.cholesky_ex(covariance)
    while failed:  # rounding in float32 can outweigh the smallest variances
        ridge = 10 * ridge
        covariance = zz + ridge * eye
        root, failed = torch.linalg.cholesky_ex(covariance)
    right = moments.cross(weight) + ridge * weight.double()  # (out, in)
    return torch.cholesky_solve(right.mT, root).mT.to(precise.dtype), covariance


def _build(decision: Decision) -> StructuredLinear:
    """The layer that the decision's cores make, without bias."""
    layer, structure, cores = decision.layer, decision.resolved, decision.cores
    assert structure is not None
    assert cores is not None
    options: dict[str, Any] = {"bias": False, "device": cores[0].device, "dtype": cores[0].dtype}
    new = uninitialised(layer.in_features, layer.out_features, structure, **options)
    return new.set_cores_(cores).eval()


# ---- all layers, in lockstep -------------------------------------------------------------------


# tensors that nobody is to hold, and their versions: -1 where torch keeps none
_Inputs = list[tuple["weakref.ref[Tensor]", int]]


@dataclass
class _Pair:
    """The two runs of one call: of the dense model, and of the one compressed so far."""

    dense: Stream
    compressed: Stream
    masks: list[Tensor]

    def stops(self) -> Iterator[Stop]:
        for stream in (self.dense, self.compressed):
            if stream.stop is not None:
                yield stream.stop


@dataclass
class _Gap:
    """Of a layer's outputs, summed over tokens: |W x - B z|^2 and |W x|^2, both with the means
    carried by the bias where there is one."""

    mean: Tensor | None  #: of the dense outputs, `(out_features,)`
    above: float = 0.0
    below: float = 0.0

    def add(self, y: Tensor, new: Tensor) -> None:
        """Of rows `(tokens, out_features)`: the dense layer's outputs, and the new one's."""
        y = promote(y)
        around = y if self.mean is None else y - self.mean.to(y)
        self.above += _sum_squares(y - new)
        self.below += _sum_squares(around)

    @property
    def error(self) -> float:
        above, below = sqrt(self.above), sqrt(self.below)
        return above / below if below else float("inf") if above else 0.0


def _sum_squares(rows: Tensor) -> float:
    flat = rows.flatten()
    return torch.dot(flat, flat).item()


class _Lockstep:
    """All calls, dense and compressed, taken from layer to layer together."""

    def __init__(
        self,
        model: nn.Module,
        decisions: dict[nn.Module, Decision],
        seen: Observed,
        bar: Bar,
        refine_steps: int,
    ) -> None:
        assert seen.calls is not None
        self.model, self.decisions, self.calls, self.bar = model, decisions, seen.calls, bar
        self.order = {module: n for n, module in enumerate(seen.order)}
        self.new: dict[nn.Module, StructuredLinear] = {}
        self.pairs: list[_Pair] = []
        self.gaps: dict[nn.Module, _Gap] = {}
        self.unseen: list[Decision] = []  # called, but with no row that is a token
        self._inputs: _Inputs = []  # that the moments are of
        self._moments: Moments | None = None
        self.steps, self.refined = refine_steps, dict[str, Refined]()
        layers = [decision.layer for decision in decisions.values()]
        # a block that a layer is called twice in may itself be called twice
        self.blocks = {
            block: (name, [layer.module for layer in held])
            for block, (name, held) in (find_blocks(model, layers) if refine_steps else {}).items()
            if not any(layer.module in seen.repeated for layer in held)
        }
        for block, (_, held) in self.blocks.items():
            self.order[block] = max(self.order.get(layer, len(self.order)) for layer in held)

    def run(self) -> dict[str, Refined]:
        for layer, decision in self.decisions.items():
            if decision.cores is not None:
                self._put_in(layer)
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self.model))
            stack.enter_context(plain_calls(self.model))
            stack.enter_context(check_ids(self.model))
            places = [Place(module) for module in self.decisions]
            places += [Place(block, leaving=True) for block in self.blocks]
            streams = stack.enter_context(Streams(places, 2 * len(self.calls)))
            for call in self.calls:
                again = partial(call.run, self.model)
                dense, compressed = (streams.start(again, call.state) for _ in range(2))
                self.pairs.append(_Pair(dense, compressed, call.masks))
            while (module := self._find_next()) is not None:
                if module in self.blocks:
                    self._refine(module)
                    continue
                if module not in self.new:
                    self._project(module)
                for pair in self.pairs:
                    self._go_on(pair, module)
        for module, gap in self.gaps.items():
            self.decisions[module].error = gap.error
        return self.refined

    def _find_next(self) -> nn.Module | None:
        """Of the layers at which streams wait, the one that the model calls first; a block that
        they are about to leave comes after its last layer."""
        waiting = [stop.place for pair in self.pairs for stop in pair.stops()]
        last = len(self.order)  # layers that the dense model never called
        places = sorted(
            waiting, key=lambda place: (self.order.get(place.module, last), place.leaving)
        )
        return places[0].module if places else None

    def _project(self, module: nn.Module) -> None:
        decision = self.decisions[module]
        name = decision.layer.name
        self.bar.show(name)
        moments = self._measure(module, name)
        if not moments.count:
            self.unseen.append(decision)
        solve(decision, moments if moments.count else None)
        self._put_in(module)
        if moments.count and moments.paired:
            mean = None
            if moments.centred:
                bias = module._parameters["bias"]
                assert bias is not None
                mean = moments.mean_output(decision.layer.matrix) + bias.double()
            self.gaps[module] = _Gap(mean)
        self.bar.advance()

    def _put_in(self, module: nn.Module) -> None:
        """Let the compressed streams have the projected layer from now on."""
        decision = self.decisions[module]
        self.new[module] = new = _build(decision)
        decision.cores = [core.detach() for core in new.cores]  # held once
        bias = module._parameters.get("bias") if decision.bias is None else decision.bias
        # a copy: refinement moves it
        new.bias = (
            None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        )

    def _measure(self, module: nn.Module, name: str) -> Moments:
        """The moments of the layer's inputs, from all streams that wait there.

        Where a call brings other rows in the dense model than in the compressed one (a router chose
        otherwise), x and z are no pairs: both are then the compressed model's input.
        """
        found = [
            (_find_input(pair.dense, module), _find_input(pair.compressed, module), pair.masks)
            for pair in self.pairs
        ]
        centred = has_own_bias(self.model, module)
        present = [x for *both, _ in found for x in both if x is not None]
        inputs = [(weakref.ref(x), -1 if x.is_inference() else x._version) for x in present]
        last, layer = self._moments, self.decisions[module].layer
        shared = last is not None and last.centred == centred and last.weight is None
        if not shared or not _are_same(inputs, self._inputs):
            last, self._inputs, self._moments = None, inputs, None  # no longer held
            narrows = layer.out_features < layer.in_features
            self._moments = Moments(centred=centred, weight=layer.matrix if narrows else None)
            _add_pairs(self._moments, found)
            check_finite(name, self._moments)
        assert self._moments is not None
        return self._moments

    def _go_on(self, pair: _Pair, module: nn.Module) -> None:
        """Resume the streams of this call that wait at the layer, with their outputs."""
        dense, compressed, new = pair.dense, pair.compressed, self.new[module]
        x, z = _find_input(dense, module), _find_input(compressed, module)
        gap = self.gaps.get(module)
        if gap is None or x is None or z is None or x.shape != z.shape:
            if x is not None:
                dense.resume()
            if z is not None:
                compressed.resume(lambda *args, **kwargs: new(take_input(args, kwargs)))
            return
        outputs: list[Tensor] = []

        def compare(*args: Any, **kwargs: Any) -> Any:
            """The dense layer's output, beside which the new one's is formed and kept."""
            y = dense_forward(*args, **kwargs)
            outputs.append(new(z))
            gap.add(select_rows(y, pair.masks), select_rows(outputs[0], pair.masks))
            return y

        assert dense.stop is not None
        dense_forward = dense.stop.forward
        dense.resume(compare)
        compressed.resume(lambda *args, **kwargs: outputs.pop())

    def _refine(self, block: nn.Module) -> None:
        """Refine a block that streams are about to leave, and let them leave it with its output."""
        examples: dict[int, Example] = {}  # of the pairs
        for n, (pair, call) in enumerate(zip(self.pairs, self.calls, strict=True)):
            dense, compressed = (_find_stop(each, block) for each in (pair.dense, pair.compressed))
            if dense is None or compressed is None:
                continue
            goal, made = take_tensor(dense.output), take_tensor(compressed.output)
            if goal is not None and made is not None and goal.shape == made.shape:
                inputs, output = (compressed.args, compressed.kwargs), compressed.output
                examples[n] = Example(*inputs, pair.masks, call.state, output, goal)
        outputs = dict(zip(examples, self._fit(block, [*examples.values()]), strict=False))
        for n, pair in enumerate(self.pairs):
            if _find_stop(pair.dense, block) is not None:
                pair.dense.resume()
            stop = _find_stop(pair.compressed, block)
            if stop is not None:
                pair.compressed.resume(partial(_give, outputs.get(n, stop.output)))

    def _fit(self, block: nn.Module, examples: list[Example]) -> list[Any]:
        """Refine the block; its new outputs, none if it stays as it is."""
        name, held = self.blocks[block]
        stops = (_find_stop(pair.compressed, block) for pair in self.pairs)
        forward = next((stop.forward for stop in stops if stop is not None), None)
        if not examples or forward is None or any(layer not in self.new for layer in held):
            return []
        self.bar.show(f"refine {name}")
        own = {layer: self.new[layer] for layer in held}
        fixed = [layer for layer in held if not has_own_bias(self.model, layer)]
        shared = _find_shared(self.model)
        done = refine(block, forward, own, examples, steps=self.steps, fixed=fixed, shared=shared)
        if done is None:
            _warn(f"block {name!r} does not give the same output again: it is not refined")
            return []
        outputs, done.outputs = done.outputs, []
        self.refined[name] = done
        for layer, new in own.items():
            if new.bias is not None and layer not in fixed:
                self.decisions[layer].bias = new.bias.detach()
        return outputs


def _find_shared(model: nn.Module) -> set[int]:
    """The `id` of each parameter that several modules of the model have."""
    owned = [id(p) for module in model.modules() for p in module._parameters.values()]
    return {each for each, times in Counter(owned).items() if times > 1}


def _give(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output


def _find_stop(stream: Stream, module: nn.Module) -> Stop | None:
    """Where the stream waits, if that is at this module."""
    stop = stream.stop
    return stop if stop is not None and stop.place.module is module else None


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


def _find_input(stream: Stream, module: nn.Module) -> Tensor | None:
    """The input with which the stream waits at the layer; None if it waits elsewhere."""
    stop = _find_stop(stream, module)
    return None if stop is None else take_input(stop.args, stop.kwargs)
