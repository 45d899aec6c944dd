"""transformers: `save_pretrained` and `from_pretrained` of a converted model, as a quantiser.

Importing this module registers the quantiser "structlin" with transformers, and nothing else.
`convert` imports it where transformers is in use, and gives the model that quantiser, which every
`save_pretrained` of the model asks. Where only a part was converted, call `declare(model)` before.

To load, **import structlin.hf before from_pretrained**. Without it from_pretrained fails with a
size mismatch of every structured layer's `weight`, a row of bytes that `save_pretrained` writes.
With `ignore_mismatched_sizes` alone it goes on, with random weights.
"""

import copy
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, __version__
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._layer.linear import StructuredLinear
from ._model.files import describe, restructure
from ._model.linears import swap

__all__ = ["declare"]
METHOD = "structlin"
GUARD = "weight"  # an entry of a checkpoint that a dense layer refuses, for its shape
GUARD_TEXT = b"import structlin.hf before from_pretrained"


@register_quantization_config(METHOD)
class StructlinConfig(QuantizationConfigMixin):
    """What config.json says: module names -> structure and widths, see `_model.files.describe`."""

    def __init__(self, modules: dict[str, dict[str, Any]] | None = None, **options: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.modules = modules or {}

    def get(self, name: str, default: Any = None) -> Any:
        """transformers reads the config that a model holds as it reads one of JSON."""
        return getattr(self, name, default)


@register_quantizer(METHOD)
class StructlinQuantizer(HfQuantizer):
    """Turns the dense skeleton into the structured one before the weights are read."""

    quantization_config: StructlinConfig
    is_trainable = is_qat_trainable = is_compileable = True
    found: Collection[str] = ()  #: layers of the checkpoint, by their names in the model

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **options: Any
    ) -> PreTrainedModel:
        described = self.quantization_config.modules
        modules = _match_names(model, described)
        swap(model, restructure(model, describe(model) | modules))
        self.found = set(modules)
        names = {*described, *modules}
        guards = [rf"(^|\.){re.escape(name)}\.{GUARD}$" for name in names]
        kind: type[Any] = list if __version__.startswith("4.") else set
        model._keys_to_ignore_on_load_unexpected = kind(
            [*(model._keys_to_ignore_on_load_unexpected or ()), *guards]
        )
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **options: Any
    ) -> PreTrainedModel:
        """transformers 5 only logs what it does not find in the file, and leaves it as it is."""
        own = dict(model.named_parameters())
        offloaded = [name for name, parameter in own.items() if parameter.is_meta]
        cores = [name for name in offloaded if re.search(r"\.(cores|scales)\.\d+$", name)]
        if cores and len(offloaded) < len(own):
            text = f"device_map offloads cores of structured layers: {', '.join(cores[:5])}"
            why = "accelerate does not bring them back when their layer is called"
            raise ValueError(f"{text}; {why}: give them a device")
        lost = [name for name, each in own.items() if not hasattr(each, "_is_hf_initialized")]
        if len(lost) < len(own):
            self._refuse_lost(lost)
        declare(model)
        return model

    def update_missing_keys(
        self, model: PreTrainedModel, missing_keys: list[str], prefix: str
    ) -> list[str]:
        """transformers 4 calls this with what it does not find in the file."""
        self._refuse_lost(missing_keys)
        return missing_keys

    def _refuse_lost(self, parameters: Iterable[str]) -> None:
        inside = tuple(f"{name}." for name in self.found)
        if lost := [name for name in parameters if name.startswith(inside)]:
            text = "the checkpoint lacks parameters of structured layers"
            way = "if it is a dense model's, take a config without quantization_config"
            raise ValueError(f"{text}: {', '.join(lost[:5])}; {way}")

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel, *args: Any, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `save_pretrained` writes; it calls this before it writes the config.

        It then drops the `state_dict` that it was given, for any quantiser: take it from there.
        """
        declare(model)
        given = sys._getframe(1).f_locals.get("state_dict")
        state = dict(model.state_dict() if given is None else given)
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, StructuredLinear):  # also where its cores are offloaded
                state[f"{name}.{GUARD}"] = torch.tensor(list(GUARD_TEXT), dtype=torch.uint8)
        return state, {}

    def is_serializable(self, *args: Any, **options: Any) -> bool:
        return True


def declare(model: nn.Module) -> None:
    """Tell each model of transformers in `model`, itself included, which layers are structured.

    `convert` and `densify` call it, and so does `save_pretrained` of a model that was told. Call it
    before `save_pretrained` where layers were put into a model by hand, or only a part of the model
    was converted. The config of each model that is in no other one says so too, for
    `from_pretrained(None, config=model.config, state_dict=...)`.

    >>> from transformers import GPT2Config, GPT2Model
    >>> from structlin import BTT, StructuredLinear
    >>> model = GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2))
    >>> model.h[0].mlp.c_fc = StructuredLinear(16, 64, BTT())
    >>> declare(model)
    >>> list(model.hf_quantizer.quantization_config.modules)
    ['h.0.mlp.c_fc']
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    inner = {module for part in parts for module in part.modules() if module is not part}
    for part in parts:
        modules = describe(part)
        if modules:
            part.hf_quantizer = StructlinQuantizer(StructlinConfig(modules))  # type: ignore[assignment]
        elif isinstance(getattr(part, "hf_quantizer", None), StructlinQuantizer):
            del part.hf_quantizer
        if part not in inner:
            _write_config(part, StructlinConfig(modules) if modules else None)


def _write_config(model: PreTrainedModel, said: StructlinConfig | None) -> None:
    """Give `model` a config of its own that says `said`: others may share its."""
    shared: Any = model.config
    if said is None and not isinstance(vars(shared).get("quantization_config"), StructlinConfig):
        return
    own = copy.copy(shared)
    own.quantization_config = said
    if said is None:
        del own.quantization_config
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own


def _match_names(
    model: PreTrainedModel, modules: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`modules` by their names in `model`, which may be the saved model's body, or have it as such.

    Layers that `model` lacks are left out, as weights are by transformers, which reports them. If
    it lacks them all, it is another model: ValueError.
    """
    prefix = f"{model.base_model_prefix}."
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    found = {}
    for name, data in modules.items():
        for own in (name, name.removeprefix(prefix), prefix + name):
            if own in names:
                found[own] = data
                break
    if modules and not found:
        text = f"{type(model).__name__} lacks structured layers of the checkpoint, all of them"
        raise ValueError(f"{text}: {', '.join([*modules][:5])}; load what was saved")
    return found
