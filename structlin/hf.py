"""transformers: `save_pretrained` and `from_pretrained` of a converted model, as a quantiser.

`convert` imports this module where transformers is in use. From then on every `save_pretrained`
writes into the config which layers are structured. To load, **import structlin.hf before
from_pretrained**: it registers the quantiser "structlin". Without that import from_pretrained fails
with a size mismatch of every structured layer's `weight`, because `save_pretrained` writes a row of
bytes of that name. from_pretrained cannot go on with random weights, unless it is told to with
`ignore_mismatched_sizes`.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, __version__
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._checkpoint import describe, restructure
from ._linear import StructuredLinear
from ._model.survey import build_dense_layer, linear_layers, swap

__all__ = ["declare"]
METHOD = "structlin"
GUARD = "weight"  # an entry of a checkpoint that a dense layer refuses, for its shape
GUARD_TEXT = b"import structlin.hf before from_pretrained"


@register_quantization_config(METHOD)
class StructlinConfig(QuantizationConfigMixin):
    """What config.json says: module names -> structure and widths, see `_checkpoint.describe`."""

    def __init__(self, modules: dict[str, dict[str, Any]] | None = None, **options: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.modules = modules or {}


@register_quantizer(METHOD)
class StructlinQuantizer(HfQuantizer):
    """Turns the dense skeleton into the structured one before the weights are read."""

    quantization_config: StructlinConfig
    state: Mapping[str, Any] | None = None  #: to save in place of the model's own

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **options: Any
    ) -> PreTrainedModel:
        modules = _match_names(model, self.quantization_config.modules)
        swap(model, restructure(model, modules))
        guards = [rf"(^|\.){re.escape(name)}\.{GUARD}$" for name in modules]
        kind: type[Any] = list if __version__.startswith("4.") else set
        model._keys_to_ignore_on_load_unexpected = kind(
            [*(model._keys_to_ignore_on_load_unexpected or ()), *guards]
        )
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **options: Any
    ) -> PreTrainedModel:
        """transformers 5 only logs what it does not find in the file, and leaves it as it is."""
        parameters = dict(model.named_parameters())
        offloaded = [name for name, parameter in parameters.items() if parameter.is_meta]
        if len(offloaded) < len(parameters):
            _refuse_offloaded(offloaded)
        loaded = {
            name: hasattr(parameter, "_is_hf_initialized") for name, parameter in parameters.items()
        }
        if any(loaded.values()):
            _refuse_lost(name for name in loaded if not loaded[name])
        return model

    def update_missing_keys(
        self, model: PreTrainedModel, missing_keys: list[str], prefix: str
    ) -> list[str]:
        """transformers 4 calls this with what it does not find in the file."""
        _refuse_lost(missing_keys)
        return missing_keys

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel, *args: Any, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """`save_pretrained` calls this before it writes the config."""
        _write_config(model)
        given, self.state = self.state, None
        state = dict(model.state_dict() if given is None else given)
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, StructuredLinear):
                # also where its cores are offloaded
                state[f"{name}.{GUARD}"] = torch.frombuffer(
                    bytearray(GUARD_TEXT), dtype=torch.uint8
                )
        return state, {}

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> nn.Module:
        layers = [
            layer for layer in linear_layers(model) if isinstance(layer.module, StructuredLinear)
        ]
        return swap(model, [(layer.names, build_dense_layer(layer.module)) for layer in layers])  # type: ignore[arg-type]

    def is_serializable(self, *args: Any, **options: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def declare(model: nn.Module) -> None:
    """Tell each model of transformers in `model`, itself included, which layers are structured.

    `convert`, `densify` and every `save_pretrained` call it.

    >>> from transformers import GPT2Config, GPT2Model
    >>> from structlin import BTT, convert
    >>> model = GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2))
    >>> _ = convert(model.h, BTT(), include="*c_fc")
    >>> declare(model)
    >>> list(model.hf_quantizer.quantization_config.modules)
    ['h.0.mlp.c_fc']
    """
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        modules = describe(part)
        own = getattr(part, "hf_quantizer", None)
        if modules:
            part.hf_quantizer = StructlinQuantizer(StructlinConfig(modules))  # type: ignore[assignment]
        elif isinstance(own, StructlinQuantizer):
            del part.hf_quantizer
            _write_config(part)


_save_pretrained = PreTrainedModel.save_pretrained


@wraps(_save_pretrained)
def _declare_and_save(
    self: PreTrainedModel,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    declare(self)  # also layers of which only a part of the model knows so far
    quantizer = getattr(self, "hf_quantizer", None)
    if isinstance(quantizer, StructlinQuantizer):
        quantizer.state = state_dict  # transformers itself would leave it
    given: Any = save_directory, is_main_process, state_dict
    return _save_pretrained(self, *given, *args, **options)


PreTrainedModel.save_pretrained = _declare_and_save  # type: ignore[method-assign]


def _write_config(model: PreTrainedModel) -> None:
    """Give `model` a config of its own that says what its quantiser says: others may share its."""
    shared: Any = model.config
    own = copy.copy(shared)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        own.quantization_config = quantizer.quantization_config
    elif hasattr(own, "quantization_config"):
        del own.quantization_config
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own


def _match_names(
    model: PreTrainedModel, modules: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`modules` by their names in `model`, which may be the saved model's body, or have it as such.

    As transformers does with weights, layers of another head are left out.
    """
    prefix = f"{model.base_model_prefix}."
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    has_head = any(name.startswith(prefix) for name in modules)
    found = {}
    for name, data in modules.items():
        own = next(
            (own for own in (name, name.removeprefix(prefix), prefix + name) if own in names), name
        )
        if own in names or name.startswith(prefix) or not has_head:
            found[own] = data
    return found


def _find_cores(parameters: Iterable[str]) -> list[str]:
    return [name for name in parameters if re.search(r"\.(cores|scales)\.\d+$", name)]


def _refuse_offloaded(parameters: Iterable[str]) -> None:
    if cores := _find_cores(parameters):
        raise ValueError(
            f"device_map offloads cores of structured layers: {', '.join(cores[:5])}; accelerate "
            "does not bring them back when their layer is called: give them a device"
        )


def _refuse_lost(parameters: Iterable[str]) -> None:
    lost = _find_cores(parameters)
    if lost:
        raise ValueError(f"the checkpoint lacks cores of structured layers: {', '.join(lost[:5])}")
