"""Cross entropy over a layer, chunk by chunk of tokens: the logits of all tokens never exist at one
time, and no logit is computed twice."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils import parametrize

from ._arguments import checked, require_choice
from ._model.survey import find_loss

# Those of a chunk's logits. The trial: one step of head and loss, 768 -> 50257, on one thread
# of an Intel Xeon with 2 MiB of second cache, against all logits at once. With 6, 12, 25 and 50 MB
# BTT(rank=1) was 1.5, 1.7, 1.7 and 1.4 times as fast, LowRank(rank=96) 1.2, 1.5, 1.4 and 1.4 times.
# A dense head reads and writes the gradient of its weight, 154 MB, once per chunk: .85, 1.1, 1.14
# and 1.15 with 13, 26, 51 and 103 MB.
CHUNK_BYTES = 2**24
# On a GPU a chunk has to outlast the host, which launches some 40 kernels for it: a chunk of 64
# tokens would take as long as one of thousands.
GPU_CHUNK_BYTES = 2**30
TOKENS_STEP = 32  # of a chunk that was not chosen by hand: rows of whole tiles
FLOAT16_SCALE = 2.0**-4  # of a logit's gradient, so that sums over a chunk stay below 65,504
REDUCTIONS = ("mean", "sum")
INSTEAD = "F.cross_entropy(layer(input).flatten(0, -2), target.flatten())"


@checked
def linear_cross_entropy(
    input: Tensor,
    layer: nn.Module,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """`F.cross_entropy(layer(input).flatten(0, -2), target.flatten(), ...)`, without all logits.

    The layer takes a chunk of tokens at a time. The chunk's loss and gradients are computed at once
    and the logits are freed, so that nothing is computed twice; `backward` multiplies the gradients
    by the one that comes in. Sums over chunks are in float32 at least. Without gradients (no_grad,
    or nothing requires one) only the loss is computed. Hooks of the layer run once per chunk, and
    see gradients of the chunk's sum of losses; hooks of parameters run once. A program that
    torch.compile makes stops here and goes on behind (fullgraph=True refuses).

    Args:
        input: `(..., in_features)`, floating point.
        layer: any module that maps each token on its own to `(..., classes)`: nn.Linear, a
            `StructuredLinear`, one with an adapter; its weight may be an embedding's.
        target: labels from 0 to classes - 1, `(...)`, int64.
        weight, ignore_index, label_smoothing: as of `F.cross_entropy`.
        reduction: "mean" or "sum".
        chunk: tokens per chunk. None: as many as have 16 MiB of logits in float32, 1 GiB on a GPU,
            or as many logits as the layer has parameters, whichever is more.

    Returns:
        The loss, a scalar of the dtype that `F.cross_entropy` gives; NaN as there, where the mean
        is over no label.

    Raises:
        ValueError: a label outside the vocabulary; shapes, devices or options that do not fit; a
            sharded layer (FSDP2): call this in the forward of the module that `fully_shard` got; a
            layer that computes with a parameter that is not its own.
        TypeError: an argument of another type or dtype.
        RuntimeError: a second derivative, fullgraph=True, or a transform of torch.func.

    >>> import torch.nn.functional as F
    >>> from structlin import BTT, StructuredLinear
    >>> head, hidden = StructuredLinear(64, 1000, BTT(rank=1)), torch.randn(8, 32, 64)
    >>> labels = torch.randint(1000, (8, 32))
    >>> loss = linear_cross_entropy(hidden, head, labels)
    >>> torch.allclose(loss, F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten()))
    True
    """
    _check(input, layer, target, weight, ignore_index, label_smoothing, reduction, chunk)
    if torch.compiler.is_compiling():  # a literal, or fullgraph=True does not print it
        torch._dynamo.graph_break(
            "structlin: linear_cross_entropy computes gradients in its forward pass, which "
            "torch.compile cannot trace: leave fullgraph=True out"
        )
    return _run(input, layer, target, weight, ignore_index, label_smoothing, reduction, chunk)


@_disable_dynamo  # torch.compiler.disable would load the compiler now
def _run(
    input: Tensor,
    layer: nn.Module,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    chunk: int | None,
) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    classes = _count_classes(layer, rows)
    _check_labels(target, classes, ignore_index)
    _check_weight(weight, classes, target.device)
    wide = torch.promote_types(rows.dtype, torch.float32)
    labels = _Labels.of(target, ignore_index, weight, label_smoothing, classes, wide)
    head = (_Linear if _is_plain(layer, rows) else _Head)(layer, rows, wide)
    size = chunk or _choose_chunk(classes, layer, rows.device)
    space = rows.new_empty((min(size, len(rows)), classes), dtype=wide, requires_grad=False)
    loss, dtype = labels.own.new_zeros(()), wide
    # the hooks of a checkpoint outside are not for what is used up here
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with hooks, parametrize.cached() if head.shares else nullcontext():
        for start in range(0, max(len(rows), 1), size):
            found, dtype = _take_chunk(head, labels, slice(start, start + size), space)
            loss += found
    factor = loss.new_ones(())
    if reduction == "mean":
        factor = 1 / labels.own.sum()
        loss = loss * factor
        factor = factor.where(labels.kept.any(), 0)  # torch: NaN has a gradient of 0 then
    if _autocast(rows) and dtype != torch.float64:
        dtype = torch.float32  # as F.cross_entropy
    loss = loss.to(dtype)
    if not head.trains:
        return loss
    gradients = [head.drows, *(head.sums.get(name) for name in head.leaves)]
    return _attach(loss, factor / head.scale, gradients, [rows, *head.leaves.values()])


def _take_chunk(
    head: "_Head", labels: "_Labels", part: slice, space: Tensor
) -> tuple[Tensor, torch.dtype]:
    """The sum of the losses of a part of the tokens, whose gradients `head` adds up; the dtype of
    the logits. `space` is for logits of a chunk, as fresh memory takes longer to write."""
    x = head.rows[part].detach()
    space = space[: len(x)]  # (tokens, classes)
    with torch.set_grad_enabled(head.trains):
        x.requires_grad_(head.trains and head.rows.requires_grad)
        logits = head.multiply(x, space)
    _check_logits(head.layer, x, logits, space.shape[1])
    with torch.no_grad(), _without_autocast(x):
        loss, error = labels.take(logits.detach(), part, head.trains, space)
        if error is not None:
            head.learn(part, x, logits, error)
    return loss, logits.dtype


# ---- the labels ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Labels:
    """What the loss asks of each token.

    A token's loss is `total * log(sum(exp(z))) - own * z[label] - rest @ z` of its logits z.
    """

    index: Tensor  #: of the label, 0 where it is ignored: (tokens, 1)
    kept: Tensor  #: whether it is not ignored: (tokens, 1)
    own: Tensor  #: weight of the label's class, 0 where it is ignored: (tokens, 1)
    rest: Tensor | None  #: what each class has by label smoothing: (classes,)
    smoothing: float

    @staticmethod
    def of(
        target: Tensor,
        ignore_index: int,
        weight: Tensor | None,
        smoothing: float,
        classes: int,
        dtype: torch.dtype,
    ) -> "_Labels":
        target = target.reshape(-1, 1)
        kept = target != ignore_index
        index = target.where(kept, 0).long()
        own = kept.to(dtype)
        rest = own.new_full((classes,), smoothing / classes) if smoothing else None
        if weight is not None:
            weight = weight.to(dtype)
            own = weight[index].where(kept, 0)
            rest = None if rest is None else rest * weight
        return _Labels(index, kept, own, rest, smoothing)

    def take(
        self, logits: Tensor, part: slice, trains: bool, space: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of the losses of a part of the tokens, and its derivative by the logits, if it is
        wanted: in `space`, `(tokens, classes)`."""
        index, kept = self.index[part], self.kept[part]
        own = total = (1 - self.smoothing) * self.own[part]
        largest = logits.amax(-1, keepdim=True)
        same = logits.dtype == space.dtype
        z = torch.sub(logits, largest, out=space) if same else space.copy_(logits).sub_(largest)
        loss = -own * z.gather(1, index)
        if self.rest is not None:
            total = (own + self.rest.sum()).where(kept, 0)
            loss -= (z @ self.rest)[:, None]
        size = z.exp_().sum(-1, keepdim=True)
        loss = (loss + total * size.log()).where(kept, 0).sum()
        if not trains:
            return loss, None
        error = z.mul_(total / size)
        if self.rest is not None:
            error.addr_(kept.squeeze(1).to(z.dtype), self.rest, alpha=-1)
        return loss, error.scatter_(1, index, error.gather(1, index) - own)


# ---- the layer -----------------------------------------------------------------------------------


class _Head:
    """A layer, its inputs, and the sums of their gradients over the chunks so far.

    Other threads may run the layer meanwhile, so nothing in it changes. Where a parameter has
    hooks, a twin of the layer multiplies by a copy of it, and no hook sees a part of its gradient.
    """

    def __init__(self, layer: nn.Module, rows: Tensor, wide: torch.dtype) -> None:
        self.layer, self.rows, self.wide = layer, rows, wide
        enabled = torch.is_grad_enabled()
        named = layer.named_parameters()
        self.leaves = {name: each for name, each in named if each.requires_grad and enabled}
        hooked: dict[Tensor, Tensor] = {
            each: each.detach().requires_grad_()
            for each in self.leaves.values()
            if each._backward_hooks
        }
        self.own = {name: hooked.get(each, each) for name, each in self.leaves.items()}
        self.multiplies = _make_twin(layer, hooked) if hooked else layer
        self.learns_rows = rows.requires_grad and enabled
        self.trains = self.learns_rows or bool(self.leaves)
        self.sums: dict[str, Tensor] = {}
        self.drows = torch.zeros_like(rows.detach()) if self.learns_rows else None
        # a graph of all chunks: what is parametrised is computed once
        self.shares = any(map(parametrize.is_parametrized, layer.modules()))
        self.scale = 1.0

    def multiply(self, x: Tensor, space: Tensor) -> Any:
        return self.multiplies(x)

    def learn(self, part: slice, x: Tensor, logits: Tensor, error: Tensor) -> None:
        """Add what a part of the tokens gives, by the derivative of its loss by the logits."""
        wanted = {**self.own, **({"": x} if self.learns_rows else {})}
        if part.start == 0:
            _check_leaves(self.layer, logits, list(wanted.values()))
        if not logits.requires_grad:
            return
        if logits.dtype == torch.float16:
            self.scale = FLOAT16_SCALE
            error *= self.scale
        options = {"retain_graph": self.shares, "allow_unused": True}
        error = error.to(logits.dtype)
        found = torch.autograd.grad(logits, list(wanted.values()), error, **options)
        for name, each in zip(wanted, found, strict=True):
            if each is None:
                continue
            if self.drows is not None and not name:
                self.drows[part] = each
            elif name in self.sums:
                self.sums[name] += each
            else:
                dtype = torch.promote_types(each.dtype, self.wide)
                self.sums[name] = each.to(dtype, copy=True)


def _make_twin(module: nn.Module, copies: dict[Tensor, Tensor]) -> nn.Module:
    """`module` with other parameters. It has hooks, buffers and all else in common with it."""
    twin: nn.Module = object.__new__(type(module))
    own = {
        name: each if each is None else copies.get(each, each)
        for name, each in module._parameters.items()
    }
    parts = {
        name: part if part is None else _make_twin(part, copies)
        for name, part in module._modules.items()
    }
    vars(twin).update(vars(module), _parameters=own, _modules=parts)
    return twin


class _Linear(_Head):
    """An nn.Linear without hooks: BLAS adds each chunk to the gradient of its weight."""

    layer: nn.Linear

    def multiply(self, x: Tensor, space: Tensor) -> Tensor:
        with torch.no_grad():
            logits = torch.mm(x, self.layer.weight.mT, out=space)
            return logits if self.layer.bias is None else logits.add_(self.layer.bias)

    def learn(self, part: slice, x: Tensor, logits: Tensor, error: Tensor) -> None:
        if self.drows is not None:
            torch.mm(error, self.layer.weight, out=self.drows[part])
        if "bias" in self.leaves:
            self.sums["bias"] = self.sums.get("bias", 0) + error.sum(0)
        if "weight" in self.sums:
            self.sums["weight"].addmm_(error.mT, x)
        elif "weight" in self.leaves:
            self.sums["weight"] = error.mT @ x


def _is_plain(layer: nn.Module, rows: Tensor) -> bool:
    """Whether the layer is an nn.Linear that does nothing but multiply by what it holds, in the
    dtype of the sums."""
    if type(layer) is not nn.Linear or _autocast(rows) or find_loss(layer):
        return False
    weight = layer.weight
    return type(weight) is nn.Parameter and weight.dtype in (torch.float32, torch.float64)


def _count_classes(layer: nn.Module, rows: Tensor) -> int:
    classes = getattr(layer, "out_features", None)
    if isinstance(classes, int):
        return classes
    x = rows[:1]
    cast = torch.autocast(x.device.type, cache_enabled=False) if _autocast(x) else nullcontext()
    with torch.no_grad(), cast:  # torch 2.10 would keep the weights cast here, without gradients
        logits = layer(x)
    _check_logits(layer, x, logits)
    return int(logits.shape[1])


def _choose_chunk(classes: int, layer: nn.Module, device: torch.device) -> int:
    read = sum(each.numel() for each in layer.parameters())  # once per chunk
    least = CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    tokens = max(least // 4, read) // max(classes, 1)
    return max(1, tokens - tokens % TOKENS_STEP if tokens > TOKENS_STEP else tokens)


def _autocast(x: Tensor) -> bool:
    device = x.device.type
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if _autocast(x) else nullcontext()


# ---- the gradients -------------------------------------------------------------------------------


def _attach(
    loss: Tensor, factor: Tensor, gradients: list[Tensor | None], tensors: list[Tensor]
) -> Tensor:
    """The loss as a function of `tensors`; its gradients are `factor` times those given."""
    known: Tensor = _Known.apply((loss, factor, gradients), *tensors)  # type: ignore[no-untyped-call]
    return known


class _Known(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, found: tuple[Tensor, Tensor, list[Tensor | None]], *tensors: Tensor
    ) -> Tensor:
        loss, factor, gradients = found
        ctx.save_for_backward(factor, *gradients)
        ctx.dtypes = [each.dtype for each in tensors]
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy keeps gradients and no logits, so that it has no second "
                f"derivative (create_graph=True): take {INSTEAD}"
            )
        factor, *gradients = ctx.saved_tensors
        factor = factor * scale
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        made: list[Tensor | None] = [None]
        for each, dtype in zip(gradients, ctx.dtypes, strict=True):
            if each is None:
                made.append(None)
            elif kept or each.dtype != dtype:
                made.append((each.to(factor.dtype) * factor).to(dtype))
            else:
                made.append(each.mul_(factor))
        return tuple(made)


# ---- the checks ----------------------------------------------------------------------------------


def _check(
    input: Tensor,
    layer: nn.Module,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    chunk: int | None,
) -> None:
    if not input.is_floating_point():
        raise TypeError(f"input has dtype {input.dtype}; it must be floating point")
    if input.ndim == 0:
        raise ValueError("input has no dimension; it must be (..., in_features)")
    if target.dtype != torch.int64:
        soft = f" (class probabilities: {INSTEAD})" if target.is_floating_point() else ""
        raise TypeError(f"target has dtype {target.dtype}; labels are torch.int64{soft}")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}; input of shape {tuple(input.shape)} needs "
            f"{tuple(input.shape[:-1])}, one label per token"
        )
    if target.device != input.device:
        raise ValueError(f"target is on {target.device}, input is on {input.device}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} must be from 0 to 1")
    if str(reduction) == "none":
        raise ValueError(
            "reduction='none' has no single gradient that the forward pass could compute; take "
            f"'mean' or 'sum', or {INSTEAD[:-1]}, reduction='none')"
        )
    require_choice("reduction", reduction, REDUCTIONS)
    _check_layer(layer)


def _check_layer(layer: nn.Module) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"linear_cross_entropy cannot run under torch.func: take {INSTEAD}")
    for name, parameter in layer.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise ValueError(
                f"layer={type(layer).__name__}: {name} is sharded (DTensor); do not wrap the layer "
                "by itself, and call linear_cross_entropy in the forward of what is wrapped"
            )


def _check_logits(layer: nn.Module, x: Tensor, logits: Any, classes: int | None = None) -> None:
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    if len(shape) != 2 or shape[0] != len(x) or classes not in (None, shape[1]):
        raise ValueError(
            f"layer={type(layer).__name__} maps {tuple(x.shape)} to "
            f"{shape or type(logits).__name__}; it must map (tokens, in_features) to "
            f"(tokens, {classes or 'classes'})"
        )


def _check_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Refuse a label outside the vocabulary; on other devices the kernels do."""
    if target.device.type != "cpu":
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"target{list(place)} = {int(target[place])}: labels of this layer are from 0 to "
            f"{classes - 1}, or ignore_index={ignore_index}"
        )


def _check_weight(weight: Tensor | None, classes: int, device: torch.device) -> None:
    if weight is None:
        return
    if weight.shape != (classes,) or weight.device != device or not weight.is_floating_point():
        raise ValueError(
            f"weight is {weight.dtype} of shape {tuple(weight.shape)} on {weight.device}; it must "
            f"be floating point of shape (classes,) = ({classes},) on {device}"
        )
    if weight.requires_grad:
        raise ValueError("weight requires a gradient, which cross entropy does not have")


def _check_leaves(layer: nn.Module, logits: Tensor, own: Sequence[Tensor]) -> None:
    """Refuse a layer whose logits have gradients that nobody would take."""
    todo, seen = [logits.grad_fn], {each.grad_fn for each in own}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not each for each in own):
            raise ValueError(
                f"layer={type(layer).__name__} computes with a tensor of shape "
                f"{tuple(leaf.shape)} that requires a gradient and is not in layer.parameters(); "
                f"make it a parameter of the layer, or take {INSTEAD}"
            )
        todo += [each for each, _ in node.next_functions]
