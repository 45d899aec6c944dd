"""Which rows of a layer's input are tokens: what the model's own attention masks say."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._hosts.registry import padding_masks

HIDDEN = -100.0  # a mask that is added to the scores hides with this or less
# Arguments of torch.nn that tell padding, and whether a true entry is a token in them.
TORCH_MASKS = {"src_key_padding_mask": False, "tgt_key_padding_mask": False}


def name_arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of one call of the model by their names in its `forward`."""
    try:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):  # the model itself will say what is wrong
        return dict(kwargs)
    return {**bound.arguments, **kwargs}


def find_masks(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The masks of one call of the model that hide something: `(batch, length)`, True for a token.

    Masks of other shapes (one for each pair of tokens, say) tell no padding and are left out. A
    mask with negative numbers is one that is added to the scores: 0 keeps a token.

    Raises:
        ValueError: a mask without any token, or with numbers that tell nothing; no `attention_mask`
            though `input_ids` has tokens that the model's config names as padding and as nothing
            else.
    """
    named = name_arguments(model, args, kwargs)
    _check_ids(model, named)
    masks = []
    for name, true_is_token in {**padding_masks(), **TORCH_MASKS}.items():
        mask = named.get(name)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            continue
        if (mask < 0).any() or (mask.is_floating_point() and not true_is_token):
            tokens = mask == 0
            is_clear = tokens | (mask <= HIDDEN)
        else:
            tokens = mask.bool() == true_is_token
            is_clear = mask == mask.long()
        if not is_clear.all():
            raise ValueError(
                f"{name} of a batch has the number {mask[~is_clear][0].item():g}: give booleans, "
                f"or 0 and numbers up to {HIDDEN:g} if it is added to the scores"
            )
        if not tokens.any():
            raise ValueError(
                f"{name} of a batch has no token, only padding; if 0 keeps a token, leave it out"
            )
        if not true_is_token and _is_length_first(model):
            tokens = tokens.mT
        if not tokens.all():
            masks.append(tokens)
    return masks


def select_rows(x: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """The rows of `x`, `(..., features) -> (rows, features)`, that are tokens.

    A mask fits if its shape is that of the first dimensions of `x`, or its flattened length the
    first dimension of a matrix. Where several fit (encoder and decoder of one length), a row must
    be a token in all of them; where none does, all rows count.
    """
    leading = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    is_token = None  # (rows,)
    for mask in masks:
        if leading[:2] == mask.shape:
            inner_dimensions = [1] * (len(leading) - 2)
            mask_of_rows = mask.reshape(*mask.shape, *inner_dimensions).expand(leading).flatten()
        elif len(leading) == 1 and leading[0] == mask.numel():
            mask_of_rows = mask.flatten()
        else:
            continue
        is_token = mask_of_rows if is_token is None else is_token & mask_of_rows
    return rows if is_token is None else rows[is_token.to(rows.device)]


def _is_length_first(model: nn.Module) -> bool:
    """Whether torch's attention in it takes `(length, batch, features)`."""
    kinds = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    for module in model.modules():
        if isinstance(module, kinds):
            attention: Any = getattr(module, "self_attn", module)
            if not attention.batch_first:
                return True
    return False


def _check_ids(model: nn.Module, named: Mapping[str, Any]) -> None:
    """Refuse ids with padding but without a mask: padding would count as data."""
    config = getattr(model, "config", None)
    pad = getattr(config, "pad_token_id", None)
    ids = named.get("input_ids")
    if not isinstance(ids, Tensor) or pad is None or named.get("attention_mask") is not None:
        return
    ids_with_meaning: list[Any] = []
    for name in ("bos", "eos", "sep", "cls"):
        token_id = getattr(config, f"{name}_token_id", None)
        ids_with_meaning += token_id if isinstance(token_id, list) else [token_id]
    if pad in ids_with_meaning or not (ids == pad).any():
        return
    raise ValueError(
        f"input_ids has padding (pad_token_id={pad}), which would count as data: give batches "
        "with the attention_mask that the tokenizer returns, or with one of ones if these are "
        "tokens"
    )
