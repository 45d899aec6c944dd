"""Cross entropy over a layer, chunk by chunk of tokens: the logits of all tokens never exist at one
time, and no logit is computed twice."""

from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from .._structure.arguments import ANY_INTEGER, checked, require_choice, show
from .._torch import is_autocast_enabled, keeps_graph, leave_uncompiled
from .obstacles import find_what_is_lost

# Those of a chunk's logits. One step of head and loss, 768 -> 50257, on one thread of a Xeon: with
# 6, 12, 25 and 50 MB BTT(rank=1) was 1.5, 1.7, 1.7 and 1.4 times as fast as all logits at once.
CHUNK_BYTES = 2**24
GPU_CHUNK_BYTES = 2**30  # there a chunk has to outlast the host, which launches some 40 kernels
TOKENS_STEP = 32  # of a chunk that was not chosen by hand: rows of whole tiles
SCALE = 2.0**-4  # of the gradients until `backward`: float16 sums over a chunk stay below 65,504


@leave_uncompiled
@checked
def linear_cross_entropy(
    input: Tensor,
    layer: nn.Module,
    target: Tensor,
    *,
    ignore_index: Annotated[int, ANY_INTEGER] = -100,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy(layer(input).flatten(0, -2), target.flatten(), ...)`, without all logits.

    The layer takes a chunk of tokens at a time: as many as have 16 MiB of logits in float32, 1 GiB
    on a GPU, or as many logits as the layer has parameters, whichever is more. The chunk's loss and
    gradients are computed at once and the logits are freed, so that nothing is computed twice;
    `backward` multiplies the gradients by the one that comes in. Sums over chunks are in float32 at
    least. Hooks of the layer run once per chunk, hooks of parameters once. torch.compile leaves the
    function out (fullgraph=True refuses). From 2.13 on torch's own `F.linear_cross_entropy` takes a
    plain nn.Linear.

    Args:
        input: `(..., in_features)`, floating point.
        layer: any module that maps each token on its own to `(..., classes)`: nn.Linear, a
            `StructuredLinear`, one with an adapter; its weight may be an embedding's.
        target: labels from 0 to classes - 1, `(...)`, int64.
        ignore_index: the label of tokens that do not count, as of `F.cross_entropy`.
        reduction: "mean" or "sum".

    Raises:
        ValueError: a label outside the vocabulary; arguments that do not fit each other; a layer
            that computes with a parameter that is not its own, as one that is sharded by itself.
        RuntimeError: a second derivative, or a transform of torch.func.

    >>> import torch.nn.functional as F
    >>> from structlin import BTT, StructuredLinear
    >>> head, hidden = StructuredLinear(64, 1000, BTT(rank=1)), torch.randn(8, 32, 64)
    >>> labels = torch.randint(1000, (8, 32))
    >>> loss = linear_cross_entropy(hidden, head, labels)
    >>> torch.allclose(loss, F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten()))
    True
    """
    require_choice("reduction", reduction, ("mean", "sum"))
    _check_shapes(input, target)
    rows = input.reshape(-1, input.shape[-1])
    labels = target.flatten()
    classes, chunk = _choose_sizes(layer, rows)
    counts = _check_labels(labels, classes, ignore_index)
    if _is_dense(layer, rows) and counts.any():  # or torch's gradient is NaN
        sizes = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, allow_retain_graph=True)
        options: dict[str, Any] = {"linear_bias": layer.bias, "options": sizes}
        options |= {"ignore_index": ignore_index, "reduction": reduction}
        return F.linear_cross_entropy(rows, layer.weight, labels, **options)  # type: ignore[arg-type]
    head = _Head(layer, rows)
    loss = head.sum_up(labels.where(counts, 0)[:, None], counts[:, None], classes, chunk)
    factor = loss.new_ones(())
    if reduction == "mean":
        loss = loss / counts.sum()
        factor = factor / counts.sum()
        factor = factor.where(counts.any(), 0)  # torch: NaN has a gradient of 0 then
    leaves = [head.leaves[name] for name in head.sums]
    results = (loss.to(head.dtype), factor / SCALE, *head.sums.values())
    differentiable: Tensor = _LossWithGradients.apply(results, *leaves)  # type: ignore
    return differentiable


def _is_dense(layer: nn.Module, rows: Tensor) -> bool:
    """Whether torch has a function for it: an nn.Linear alone, in the dtype of the sums."""
    if type(layer) is not nn.Linear or not hasattr(F, "linear_cross_entropy") or rows.is_meta:
        return False
    wide = type(layer.weight) is nn.Parameter and layer.weight.dtype.itemsize >= 4
    return wide and not _autocast(rows) and not find_what_is_lost(layer)


class _Sizes(NamedTuple):
    """The sizes of a chunk's logits."""

    classes: int
    tokens: int


def _choose_sizes(layer: nn.Module, rows: Tensor) -> _Sizes:
    """As many tokens as the comment at `CHUNK_BYTES` and the parameters of the layer ask for."""
    classes = getattr(layer, "out_features", None)
    if not isinstance(classes, int):
        cast = partial(torch.autocast, rows.device.type, cache_enabled=False)
        with torch.no_grad(), cast() if _autocast(rows) else nullcontext():  # or 2.10 keeps weights
            classes = _check_logits(layer, rows[:1], layer(rows[:1]))
    params = sum(parameter.numel() for parameter in layer.parameters())  # read once per chunk
    least_bytes = CHUNK_BYTES if rows.device.type == "cpu" else GPU_CHUNK_BYTES
    tokens = max(least_bytes // 4, params) // max(classes, 1)
    if tokens > TOKENS_STEP:
        tokens -= tokens % TOKENS_STEP
    return _Sizes(classes, max(1, tokens))


def _autocast(x: Tensor) -> bool:
    return is_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


class _ChunkLoss(NamedTuple):
    """What a chunk of tokens gives."""

    total: Tensor  #: the sum of its losses
    error: Tensor  #: `SCALE` times the derivative of that by the logits, `(tokens, classes)`


def _lose(logits: Tensor, labels: Tensor, counts: Tensor, space: Tensor) -> _ChunkLoss:
    """The loss of a chunk, written into `space`, as fresh memory takes longer to write.

    Args:
        logits: `(tokens, classes)`.
        labels: `(tokens, 1)`.
        counts: which labels count, `(tokens, 1)`.
        space: `(tokens, classes)`, in the dtype of the sums.
    """
    # loss = -sum_t log p(t, label_t); its derivative by the logits is p(t, c) - [c = label_t]
    logs = torch.log_softmax(logits.to(space.dtype), -1, out=space)
    total = -logs.gather(1, labels).where(counts, 0).sum()
    scale = SCALE * counts.to(logs.dtype)
    error = logs.exp_().mul_(scale)
    error.scatter_(1, labels, error.gather(1, labels) - scale)
    return _ChunkLoss(total, error)


class _Head:
    """A layer, its inputs, and the sums of their gradients over the chunks so far.

    Where a parameter has hooks, the layer multiplies by a copy: no hook sees a part of a gradient.
    """

    def __init__(self, layer: nn.Module, rows: Tensor) -> None:
        self.layer = layer
        self.rows = rows
        self.leaves: dict[str, Tensor] = {}  # what gets a gradient; the inputs have the empty name
        self.copies: dict[str, Tensor] = {}  # of the parameters that have hooks
        trains = torch.is_grad_enabled()
        for name, tensor in [("", rows), *layer.named_parameters()]:
            if not trains or not tensor.requires_grad:
                continue
            self.leaves[name] = tensor
            if name and tensor._backward_hooks:
                self.copies[name] = tensor.detach().requires_grad_()
        self.multiply = partial(functional_call, layer, self.copies) if self.copies else layer
        zeros = torch.zeros_like(rows.detach())
        self.sums: dict[str, Tensor] = {"": zeros} if "" in self.leaves else {}
        # a graph of all chunks: what is parametrised is computed once
        self.shares = any(map(parametrize.is_parametrized, layer.modules()))

    def sum_up(self, labels: Tensor, counts: Tensor, classes: int, chunk: int) -> Tensor:
        """The sum of all losses, `chunk` tokens at a time; `sums` then has the gradients.

        `labels` and which of them count are `(tokens, 1)`.
        """
        rows = self.rows.detach()
        wide = torch.promote_types(self.rows.dtype, torch.float32)
        space = rows.new_empty((min(chunk, len(rows)), classes), dtype=wide)
        loss = space.new_zeros(())
        no_autocast = partial(torch.autocast, rows.device.type, enabled=False)
        # the hooks of a checkpoint outside are not for what is used up here
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with hooks, parametrize.cached() if self.shares else nullcontext():
            for start in range(0, max(len(rows), 1), chunk):
                tokens = slice(start, start + chunk)
                with torch.set_grad_enabled(bool(self.leaves)):
                    x = rows[tokens].detach().requires_grad_("" in self.leaves)
                    logits = self.multiply(x)
                _check_logits(self.layer, x, logits, classes)
                with torch.no_grad(), no_autocast() if _autocast(x) else nullcontext():
                    total, error = _lose(
                        logits.detach(), labels[tokens], counts[tokens], space[: len(x)]
                    )
                    self._learn(tokens, x, logits, error)
                loss = loss + total
                self.dtype = wide if _autocast(rows) else logits.dtype
                del logits, error  # before the next chunk's exist
        return loss

    def _learn(self, tokens: slice, x: Tensor, logits: Tensor, error: Tensor) -> None:
        """Add the gradients of a chunk, by the derivative `error` of its loss by the logits."""
        if not logits.requires_grad:
            return
        variables = {**self.leaves, **self.copies}
        if "" in self.leaves:
            variables[""] = x
        if tokens.start == 0:
            _check_leaves(self.layer, logits, variables.values())
        gradients = torch.autograd.grad(
            logits,
            [*variables.values()],
            error.to(logits.dtype),
            retain_graph=self.shares,
            allow_unused=True,
        )
        for name, gradient in zip(variables, gradients, strict=True):
            if not name:
                self.sums[name][tokens] = gradient
            elif name in self.sums:
                self.sums[name] += gradient
            elif gradient is not None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self.sums[name] = gradient.to(wide, copy=True)


class _LossWithGradients(torch.autograd.Function):
    """A loss whose gradients are known: they are multiplied by a factor, no more."""

    @staticmethod
    def forward(ctx: Any, results: tuple[Tensor, ...], *tensors: Tensor) -> Tensor:
        loss, *factor_and_gradients = results
        ctx.save_for_backward(*factor_and_gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("linear_cross_entropy has no second derivative (create_graph=True)")
        copy = keeps_graph()
        factor, *gradients = ctx.saved_tensors
        scaled = []
        for gradient in gradients:  # autograd casts to the tensors' own dtypes
            scaled.append(gradient.to(factor.dtype, copy=copy).mul_(factor * scale))
        return None, *scaled


def _check_shapes(input: Tensor, target: Tensor) -> None:
    fits = input.ndim and target.shape == input.shape[:-1] and target.device == input.device
    if not fits or not input.is_floating_point() or target.dtype != torch.int64:
        raise ValueError(
            f"input={show(input)} on {input.device}, target={show(target)} on {target.device}; "
            "they must be (..., in_features), floating point, and labels (...), torch.int64"
        )


def _check_labels(labels: Tensor, classes: int, ignore_index: int) -> Tensor:
    """Which labels are not ignored; on other devices than a CPU the kernels find wrong ones."""
    counts = labels != ignore_index
    wrong = ((labels < 0) | (labels >= classes)) & counts
    if labels.device.type == "cpu" and wrong.any():
        raise ValueError(
            f"target has the label {labels[wrong][0]}; labels of this layer are from 0 to "
            f"{classes - 1}, or ignore_index={ignore_index}"
        )
    return counts


def _check_logits(layer: nn.Module, x: Tensor, logits: Any, classes: int | None = None) -> int:
    """The number of classes."""
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    if len(shape) != 2 or shape[0] != len(x) or classes not in (None, shape[1]):
        raise ValueError(
            f"layer={type(layer).__name__} maps {tuple(x.shape)} to "
            f"{shape or type(logits).__name__}; it must map (tokens, in_features) to "
            f"(tokens, {classes or 'classes'})"
        )
    return shape[1]


def _check_leaves(layer: nn.Module, logits: Tensor, variables: Collection[Tensor]) -> None:
    """Refuse a layer whose logits have gradients that nobody would take."""
    nodes: list[Any] = [logits.grad_fn]
    seen = {None, *(variable.grad_fn for variable in variables)}
    for node in nodes:  # which grows on the way
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not variable for variable in variables):
            raise ValueError(
                f"layer={type(layer).__name__} computes with a tensor of shape "
                f"{tuple(leaf.shape)} that requires a gradient and is not in layer.parameters(); "
                "make it one, or call this in the forward of the module that fully_shard got"
            )
        nodes += {function for function, _ in node.next_functions} - seen
        seen.update(nodes)
