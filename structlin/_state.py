"""What a structured layer computes with, as an entry of its state that other layers refuse.

The state dict of a `StructuredLinear` has an entry `weight` beside its parameters: one line of text
as bytes (uint8). A layer that computes with something else refuses it, and so does a dense layer,
which finds a row of bytes where its matrix should be: a size mismatch, which neither `strict=False`
nor transformers passes over in silence.
"""

import torch
from torch import Tensor, nn

ENTRY = "weight"
_WRAPPERS = {"module", "_orig_mod"}  # what DDP and torch.compile add to the names of a state


def write_entry(text: str) -> Tensor:
    """The bytes of `text`, `(length,)` of uint8, on the CPU."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def carries_entry(layer: nn.Module, prefix: str) -> bool:
    """Whether the state of `layer` gets an entry.

    A layer without values (meta) has no numbers to protect. A layer inside DDP or a compiled module
    has none either: torch.distributed.checkpoint takes the wrapper's name from every entry and
    gives it back to parameters only.
    """
    wrapped = not _WRAPPERS.isdisjoint(prefix.split("."))
    return not wrapped and not any(parameter.is_meta for parameter in layer.parameters())


def find_difference(entry: Tensor | None, text: str) -> str:
    """What is wrong with `entry` for a layer that says `text` of itself; empty if nothing is.

    Nothing is wrong where nothing is said: states of 0.1.0 have no entry, or an empty one.

    >>> find_difference(write_entry("4 -> 4 by o i"), "4 -> 4 by o i")
    ''
    >>> find_difference(write_entry("4 -> 4 by r i"), "4 -> 4 by o i")
    "this layer computes with '4 -> 4 by o i', the state is that of '4 -> 4 by r i'"
    """
    if entry is None or entry.numel() == 0 or entry.is_meta:
        return ""
    if entry.ndim != 1:
        shape = tuple(entry.shape)
        return (
            f"a dense weight of shape {shape} for a structured layer ({text}): load it into the "
            "dense model and convert that, or use layer.from_dense_(weight)"
        )
    values = [round(value) for value in entry.tolist()]  # whole again where states were averaged
    said = bytes(value % 256 for value in values).decode(errors="replace")
    return "" if said == text else f"this layer computes with {text!r}, the state is that of {said!r}"
