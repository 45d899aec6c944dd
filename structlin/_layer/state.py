"""What a layer computes with beside its tensors, written beside the tensors of a state dict.

A state dict of torch carries metadata: an attribute, no entry, so its entries are parameters alone.
The metadata survives torch.save, deepcopy and load_state_dict. Files of tensors alone
(safetensors), distributed checkpoints and a plain `dict` lose it, and then only names and shapes
are compared. `BTT(rank=1)` and `Monarch(blocks=8)` of 64 -> 64 have cores of the same shapes, so
the state of one loads into the other. An entry that says what the layer is would refuse that. It
would be no parameter: a distributed checkpoint without the entry could not be read any more, and
the mean of two states would change it. `structlin.save` writes a description beside the tensors
instead, and transformers' files have a row of their own (hf.py).
"""

from typing import Any

from .._hosts.transformers import InitialisedModule

KEY = "structlin"
# An entry of a state that dense layers refuse, for its shape: structlin.hf writes a row of bytes.
GUARD = "weight"


class DescribedModule(InitialisedModule):
    """A module whose state dict says what it computes with, and which refuses another's."""

    def computes_with(self) -> dict[str, Any]:
        """Everything but tensors that decides what the module computes, as plain data."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {})
        if prefix[:-1] in metadata:
            metadata[prefix[:-1]][KEY] = self.computes_with()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *arguments: Any
    ) -> None:
        error_msgs = arguments[-1]
        description = local_metadata.get(KEY)
        if description is not None:
            difference = tell_difference(self.computes_with(), description)
            if difference:
                error_msgs.append(f"{prefix[:-1]!r}: {difference} in the state")
        dense = state_dict.get(f"{prefix}{GUARD}")
        if dense is not None and dense.ndim == 1:
            del state_dict[f"{prefix}{GUARD}"]
        if dense is not None and dense.ndim == 2:
            error_msgs.append(
                f"'{prefix}{GUARD}': a dense weight of shape {tuple(dense.shape)} for a structured "
                "layer: load it into the dense model and convert that, or use "
                "layer.from_dense_(weight)"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        if local_metadata.get("assign_to_params_buffers"):
            self._undrawn = False


def tell_difference(in_model: dict[str, Any], in_state: Any, path: str = "") -> str:
    """The first entry that differs; empty if all are equal.

    >>> tell_difference({"in_features": 4, "sigma": None}, {"in_features": 4, "sigma": [0.5]})
    'sigma=None in the model, [0.5]'
    >>> tell_difference({"sizes": {"b": 4, "r": 1}}, {"sizes": {"b": 4, "r": 2}})
    'sizes.r=1 in the model, 2'
    """
    for name in dict.fromkeys([*in_model, *in_state]):
        ours = in_model.get(name)
        theirs = in_state.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict) and ours != theirs:
            return tell_difference(ours, theirs, f"{path}{name}.")
        if ours != theirs:
            return f"{path}{name}={ours} in the model, {theirs}"
    return ""
