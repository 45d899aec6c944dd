"""What a layer computes with beside its tensors, written beside the tensors of a state dict.

A state dict of torch carries metadata: an attribute, no entry, so its entries are parameters alone.
The metadata survives torch.save, deepcopy and load_state_dict. Files of tensors alone
(safetensors), distributed checkpoints and a plain `dict` lose it, and then only names and shapes
are compared.
"""

from typing import Any

from torch import nn

KEY = "structlin"


class DescribedModule(nn.Module):
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
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        said = local_metadata.get(KEY)
        if said is not None and (difference := tell_difference(self.computes_with(), said)):
            error_msgs.append(f"{prefix[:-1]!r}: {difference} in the state")
        dense = state_dict.get(f"{prefix}weight")
        if dense is not None and dense.ndim == 2:
            error_msgs.append(
                f"'{prefix}weight': a dense weight of shape {tuple(dense.shape)} for a structured "
                "layer: load it into the dense model and convert that, or use "
                "layer.from_dense_(weight)"
            )
        told = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *told)


def tell_difference(own: dict[str, Any], said: Any) -> str:
    """The first entry that differs; empty if all are equal.

    >>> tell_difference({"in_features": 4, "sigma": None}, {"in_features": 4, "sigma": [0.5]})
    'sigma=None in the model, [0.5]'
    """
    if not isinstance(said, dict):
        return f"{own} in the model, {said!r}"
    for name in dict.fromkeys([*own, *said]):
        if own.get(name) != said.get(name):
            return f"{name}={own.get(name)} in the model, {said.get(name)}"
    return ""
