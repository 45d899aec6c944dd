"""transformers: `save_pretrained` and `from_pretrained` of a converted model, by transformers' own quantiser interface.

`convert` announces the model's structured layers (`declare`). To load, **import structlin.hf before from_pretrained**:
it registers the quantiser "structlin". Without that import from_pretrained fails with a size mismatch of every
structured layer's `weight`, because the file holds an empty tensor of that name: it cannot go on with random weights.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel, __version__
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._checkpoint import describe, restructure
from ._convert import to_dense_
from ._linear import StructuredLinear
from ._model.survey import swap

METHOD = "structlin"


@register_quantization_config(METHOD)
class StructlinConfig(QuantizationConfigMixin):
    """What config.json says: module names -> structure and widths, see `checkpoint.describe`."""

    def __init__(self, modules: dict[str, dict[str, Any]] | None = None, **options: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.modules = modules or {}


@register_quantizer(METHOD)
class StructlinQuantizer(HfQuantizer):
    """Turns the dense skeleton into the structured one before the weights are read."""

    quantization_config: StructlinConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
        swap(model, restructure(model, self.quantization_config.modules))
        guards = [rf"^{re.escape(name)}\.weight$" for name in self.quantization_config.modules]
        kind: type[Any] = list if __version__.startswith("4.") else set
        model._keys_to_ignore_on_load_unexpected = kind([*(model._keys_to_ignore_on_load_unexpected or ()), *guards])
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
        """transformers 5 leaves what it does not find in the file without values, and only logs it."""
        loaded = {name: hasattr(parameter, "_is_hf_initialized") for name, parameter in model.named_parameters()}
        if any(loaded.values()):
            _refuse_lost(name for name in loaded if not loaded[name])
        return model

    def update_missing_keys(self, model: PreTrainedModel, missing_keys: list[str], prefix: str) -> list[str]:
        """transformers 4 calls this with what it does not find in the file."""
        _refuse_lost(missing_keys)
        return missing_keys

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel, *args: Any, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        declare(model)  # what the layers are now
        state = model.state_dict()
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, StructuredLinear):
                state[f"{name}.weight"] = module.cores[0].new_empty(0)
        return state, {}

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> nn.Module:
        return to_dense_(model)

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


def _refuse_lost(parameters: Iterable[str]) -> None:
    lost = [name for name in parameters if re.search(r"\.cores\.\d+$", name)]
    if lost:
        raise ValueError(f"the checkpoint lacks cores of structured layers: {', '.join(lost[:5])}")


def declare(model: PreTrainedModel) -> None:
    """Write the structured layers of `model` into its config, or take the entry away if there are none.

    `convert`, `to_dense_` and every save call it; call it on the outer model after converting a part of it.
    """
    modules = describe(model)
    if not modules:
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if getattr(owner, name, None) is not None:
                delattr(owner, name)
        return
    config = StructlinConfig(modules)
    model.config.quantization_config = config
    model.hf_quantizer = StructlinQuantizer(config)  # type: ignore[assignment]
