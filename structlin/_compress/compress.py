"""A trained model -> a smaller one that keeps its function, in place.

The phases, each of which returns what it found: `decide` which layers; `observe` the model on the
batches; `measure_sensitivities` by the loss's gradients; `measure_curves`, what each size would
lose. That is `Measured`. Then `choose_sizes` for what is to be kept, and `project_in_order` the
layers. The plan holds it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from .._convert.plan import Plan, Projection, Refined, check_values, project_by_weight, warn_of
from .._model.decide import Decision, Spec, Target, decide, list_targets, require_matrices
from .._model.linears import Layer
from .._model.select import Patterns
from .._model.transaction import completed_at_end
from .._structure.arguments import MAX_STEPS, CheckedBy, Range, checked, require_choice, warn
from .experts import (
    drop_unreached,
    fold,
    join_curves,
    list_members,
    list_offers_one_by_one,
    list_targets_one_by_one,
    unfold,
    warn_of_rare_experts,
)
from .project import project_in_order
from .replay import Replay, observe
from .sensitivity import LOSSES, Loss, measure_sensitivities
from .sizes import (
    Curves,
    Share,
    Weights,
    check_keep,
    choose_sizes,
    list_offers,
    measure_curves,
)


def compress(
    model: nn.Module,
    structure: Spec,
    batches: Iterable[Any] | Callable[[], Iterable[Any]] | None,
    *,
    keep: Annotated[float | None, CheckedBy(check_keep)] = 0.5,
    count: str = "params",
    allocation: str = "sensitivity",
    loss: Loss = None,
    refine: Annotated[int, Range(0, MAX_STEPS)] = 0,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[Any, Spec | None] | None = None,
    untie: bool = False,
    progress: bool | None = None,
    memory: float | None = None,
) -> nn.Module:
    """Replace linear layers of a trained model by smaller structured ones, in place.

    The layers are projected in the order in which the model runs, each for its inputs in the model
    compressed so far and towards its outputs in the dense one. Biases carry the change of the mean.
    The model runs in eval mode. Device, dtype, `requires_grad`, training mode and attributes that
    somebody has set on a layer stay. `convert` is for a model that starts afresh.

    A parameter that holds the matrices of all experts of a mixture is a layer too: each matrix is
    projected for the tokens that reach its expert, in the model compressed so far, and all of them
    get the same structure. How they lie is read from transformers, or declared (`declare_weights`).

    Args:
        model: any module; it is changed.
        structure: a family such as `LowRank(rank=1)`, whose rank or number of blocks is chosen for
            each layer; with `keep=None` a family or a `Structure`, which is taken as it is.
        batches: what the model's function should stay right for: a mapping is passed as keywords, a
            tuple or list as positions, anything else as the one argument. They may come from a
            function, which is called up to four times and returns a new iterator of the same
            batches each time: then no batch is held. Each batch is run at two
            places, by two threads of which one works at a time. Each of these runs has a copy of
            the batch, and of all that the model keeps in attributes, buffers, hooks and closures;
            parameters are shared. What a model keeps in globals or on its classes is not copied.
            What `attention_mask` or `decoder_attention_mask` (transformers) or
            `src_key_padding_mask` (torch) hides does not count, in layers whose input begins with
            the mask's shape, or is that flattened; other layers count all rows. A mask that is
            added to the scores has 0 for a token, and -100 or less for padding.
            Layers that one pass calls more than once, or that passes call in orders which
            contradict each other, are projected for the dense model's inputs, with a warning.
            None: by the weights alone, each layer by itself; the plain baseline, with
            `allocation="error"`.
        keep: fraction of what the layers cost that `structure` is meant for (those with an override
            are not counted). No layer gets a size that costs as much as dense: it may stay dense,
            which is exact, and its weight is counted. To keep more never makes worse what
            `allocation` minimises. None: every layer gets `structure` as it is.
        count: what is counted: "params", or "flops" per token.
        allocation: how `keep` is shared out. "sensitivity": least harm to `loss`, by what a small
            error of each output of each layer does to it (gradients of a few batches, with the
            memory of training); the projections weigh outputs by it too. The harm of the
            first blocks is measured, unless `loss` is a function. "error": least sum of the
            layers' squared relative errors, without gradients: all outputs of a layer count alike.
        loss: what should not change. "divergence": all outputs of the model are logits, and it is
            the divergence of the distributions over their last axis. "outputs": the squared
            relative change of each floating output. None: the divergence of the outputs whose name
            ends with "logits" (transformers); without one, "outputs". Or a function of what the
            model returns to a tensor of one number: `lambda output: output.loss`, say, for batches
            with labels.
        refine: steps of Adam for each block of the model (what is repeated in it, or the model
            itself), once its layers are projected: its cores, biases and norms are fitted to the
            dense block's output. A block that does not get nearer stays as it was. 0: none.
        include, exclude, overrides, untie: as of `convert`.
        progress: whether to show a bar while layers are measured and projected. None: a bar on a
            terminal, and elsewhere a line every half minute. False: neither.
        memory: gigabytes (1e9 bytes) of activations of waiting runs that are held in memory,
            whatever the number of tokens. What is over it lies in a temporary file, and results are
            the same to the bit; functions that torch.compile has made then run as they are written.
            What can be read again, as a DataLoader, is read again instead of held. It bounds
            neither the model, nor the run of one batch (for `allocation="sensitivity"` with the
            memory of training), nor a list of batches. A model must not share a tensor by
            `torch.utils.dlpack.to_dlpack`, nor read one that it makes for a global by TorchScript
            or by an extension of torch: that is not seen, and may crash. None: no bound.

    Returns:
        `model`; the new layer if `model` is itself a linear layer.

    Raises:
        ValueError: what `convert` raises; `keep` is no fraction, too small, or for a structure
            without a size to choose; `loss` is unknown, or given where it has no say; no batch, or
            other batches when a function is called again, or inputs that are not finite; a model
            without gradients, or with some that are not finite or all zero, for
            `allocation="sensitivity"` or `refine`. The model is then as it was, and after Ctrl-C
            too.
        TypeError: what `convert` raises; `batches` is a single batch; `loss` returns no number; the
            model or a batch holds something that cannot be copied, say a generator or an open file.
        OSError: the temporary file that `memory` needs cannot be written, or read. The model is as
            it was.

    Warns:
        UserWarning: what `convert` warns of; layers that no input reached, one and the same alone,
            or few; layers that are projected for the dense model's inputs; layers that get the
            smallest sizes, as no gradient reached them.

    >>> import torch
    >>> from structlin import BTT, summary
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> model = compress(model, BTT(), [torch.randn(100, 64)], keep=0.5)
    >>> summary(model).params <= 0.5 * 2 * 64 * 256
    True
    """
    planned = plan_compression(
        model,
        structure,
        batches,
        keep=keep,
        count=count,
        allocation=allocation,
        loss=loss,
        refine=refine,
        include=include,
        exclude=exclude,
        overrides=overrides,
        untie=untie,
        progress=progress,
        memory=memory,
    )
    warn_of(planned)
    return planned.apply()


@checked
def plan_compression(
    model: nn.Module,
    structure: Spec,
    batches: Iterable[Any] | Callable[[], Iterable[Any]] | None,
    *,
    keep: Annotated[float | None, CheckedBy(check_keep)] = 0.5,
    count: str = "params",
    allocation: str = "sensitivity",
    loss: Loss = None,
    refine: Annotated[int, Range(0, MAX_STEPS)] = 0,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[Any, Spec | None] | None = None,
    untie: bool = False,
    progress: bool | None = None,
    memory: float | None = None,
) -> Plan:
    """What `compress` with the same arguments would do, without doing it.

    All is found now: the plan has the sizes, the cores, each layer's error and each block's. The
    model stays as it is while it runs, and after any error and Ctrl-C. `apply` refuses if the
    weights have changed by then, or their dtype or device. For a model on the meta device the plan
    has the sizes alone, with `batches=None`: of `keep` every layer then gets the same share.

    Raises:
        ValueError, TypeError: what `compress` raises.

    >>> import torch
    >>> from structlin import LowRank
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> planned = plan_compression(model, LowRank(rank=1), [torch.randn(100, 64)], keep=0.5)
    >>> sorted(planned.errors), max(planned.errors.values()) < 1
    (['0', '2'], True)
    """
    share = Share(keep, count, allocation)
    if refine and batches is None:
        raise ValueError(f"refine={refine} needs batches on which the model runs")
    selection: dict[str, Any] = {"include": include, "exclude": exclude, "overrides": overrides}
    # Ctrl-C within torch's own contexts of gradients may leave their mode as it is there
    with completed_at_end([partial(torch.set_grad_enabled, torch.is_grad_enabled())]):
        measured = measure(
            model, structure, batches, share, loss, progress, memory, untie=untie, **selection
        )
        return measured.plan(share, refine, progress)


@dataclass(frozen=True)
class Measured:
    """A model before sizes are chosen: what is the same for every `keep` and `refine`."""

    model: nn.Module
    decisions: Sequence[Decision]
    curves: Curves
    untie: bool
    replay: Replay | None = None  #: on the batches; None: without
    outputs: Weights = field(default_factory=dict)  #: see `measure_sensitivities`; by gradients

    def plan(self, share: Share, refine: int = 0, progress: bool | None = None) -> Plan:
        """Choose the sizes, and project the layers unless they have no values."""
        decisions = choose_sizes(self.decisions, share, self.curves)
        targets = list_targets(decisions)
        layers, blocks = dict[str, Projection](), dict[str, Refined]()
        alone = list_targets_one_by_one(targets)
        if self.replay is not None:
            layers, blocks = project_in_order(self.replay, alone, self.outputs, refine, progress)
            layers = fold(targets, layers, by_data=True)
            warn_of_rare_experts(targets, layers)
            if share.keep is not None:
                _warn_of_no_gradients(targets, layers, self.outputs)
        elif not all(target.layer.matrix.is_meta for target in targets):
            layers = {target.layer.name: project_by_weight(*target) for target in alone}
            layers = fold(targets, layers, by_data=False)
        return Plan(self.model, decisions, layers, blocks, untie=self.untie)


def measure(
    model: nn.Module,
    structure: Spec,
    batches: Iterable[Any] | Callable[[], Iterable[Any]] | None,
    share: Share,
    loss: Loss,
    progress: bool | None,
    memory: float | None = None,
    **selection: Any,
) -> Measured:
    """What the sizes that layers could have would lose, see `plan_compression`."""
    _check_share(share, batches, loss)
    decisions = decide(
        model, structure, sizes_open=share.keep is not None, experts=True, **selection
    )
    require_matrices(decisions, "compress")
    if share.count == "flops":
        _refuse_experts(decisions)
    layers = [decision.layer for decision in decisions if decision.structure is not None]
    if batches is not None or not all(layer.matrix.is_meta for layer in layers):
        check_values(layers)
    if batches is not None:
        _check_biases(layers)
    replay = None
    outputs: Weights = {}
    offers = list_offers(decisions, share)
    members = list_members(layers)
    if batches is not None:
        original = unfold(model, layers)
        modules = [member.module for member in members]
        replay = observe(model, modules, batches, original, memory=memory)
        if share.allocation == "sensitivity":
            outputs = measure_sensitivities(replay, members, loss, progress)
            outputs = drop_unreached(outputs, layers)
    alone = list_offers_one_by_one(offers, outputs)
    curves = measure_curves(replay, alone, outputs, loss, progress)
    curves = join_curves(offers, curves, by_harm=bool(outputs))
    return Measured(model, decisions, curves, selection["untie"], replay, outputs)


def _check_biases(layers: Iterable[Layer]) -> None:
    """Raises: ValueError: a bias is not finite, and cannot carry a change of the mean."""
    for layer in layers:
        bias = layer.module._parameters.get("bias")
        if bias is not None and not bias.isfinite().all():
            raise ValueError(f"the bias of layer {layer.name!r} is not finite")


def _warn_of_no_gradients(
    targets: Iterable[Target], projections: Mapping[str, Projection], outputs: Weights
) -> None:
    """Warn of layers that have inputs, and seem to do nothing to the loss."""
    names = []
    for layer, _ in targets:
        output = outputs.get(layer.module)
        is_reached = projections[layer.name].tokens is not None
        if output is not None and is_reached and not output.any():
            names.append(layer.name)
    if names:
        warn(
            f"compress: no gradient of the loss reached {', '.join(names)}: their errors count as "
            "harmless, and they get the smallest sizes; if the loss depends on them, take "
            "allocation='error', or exclude them"
        )


def _refuse_experts(decisions: Iterable[Decision]) -> None:
    """Raises: ValueError: how many of a parameter's experts a token takes is not known."""
    for decision in decisions:
        layer = decision.layer
        if decision.structure is not None and layer.count > 1:
            raise ValueError(
                f"count='flops': how many of the experts of {layer.name!r} a token takes is not "
                f"known; take count='params', or exclude={[layer.name]}"
            )


def _check_share(share: Share, batches: object, loss: Loss) -> None:
    by_gradients = share.allocation == "sensitivity"
    if batches is None and share.keep is not None and by_gradients:
        raise ValueError(
            "allocation='sensitivity' needs batches on which the model runs; without them take "
            "allocation='error'"
        )
    if loss is not None and not callable(loss):
        require_choice("loss", loss, LOSSES)
    if loss is not None and (batches is None or not by_gradients):
        raise ValueError(
            f"loss={loss!r} goes with batches and allocation='sensitivity', which takes its "
            "gradients"
        )
