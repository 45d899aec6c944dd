"""transformers: `save_pretrained` and `from_pretrained` of a converted model, as a quantiser.

Importing this module registers the quantiser "structlin" with transformers, and nothing else.
`convert` imports it where transformers is in use, and declares what it changed, see `declare`.
Where you put layers into a model by hand, call `declare(model)` before `save_pretrained`.

To load, **import structlin.hf before from_pretrained**. Without it from_pretrained fails with a
size mismatch of every structured layer's `weight`, a row of bytes that `save_pretrained` writes.
With `ignore_mismatched_sizes` alone it goes on, with random weights.
"""

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, __version__
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._convert.densify import densify
from ._hosts.transformers import holds_parts
from ._layer.experts import StructuredExperts
from ._layer.linear import StructuredLinear
from ._layer.state import GUARD
from ._model.files import describe, restructure
from ._model.linears import replace_layers
from ._model.stacks import structured_experts

__all__ = ["declare"]
METHOD = "structlin"
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
    layer_names: Collection[str] = ()  #: the checkpoint's layers, as the model names them

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **options: Any
    ) -> PreTrainedModel:
        described = self.quantization_config.modules
        modules = _match_names(model, described)
        replace_layers(model, restructure(model, describe(model) | modules))
        self.layer_names = set(modules)
        ignored = list(model._keys_to_ignore_on_load_unexpected or ())
        for name, data in {**described, **modules}.items():
            row = _name_guard(name, has_experts="experts" in data)
            ignored.append(rf"(^|\.){re.escape(row)}$")
        container: type[Any] = list if __version__.startswith("4.") else set
        model._keys_to_ignore_on_load_unexpected = container(ignored)
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **options: Any
    ) -> PreTrainedModel:
        """transformers 5 only logs what it does not find in the file, and leaves it as it is."""
        parameters = dict(model.named_parameters())
        offloaded = [name for name, parameter in parameters.items() if parameter.is_meta]
        cores = [name for name in offloaded if re.search(r"\.(cores|scales)\.\d+$", name)]
        if cores and len(offloaded) < len(parameters):
            raise ValueError(
                f"device_map offloads cores of structured layers: {', '.join(cores[:5])}; "
                "accelerate does not bring them back when their layer is called: give them a device"
            )
        missing = [n for n, p in parameters.items() if not hasattr(p, "_is_hf_initialized")]
        # where transformers marks no parameter, it calls `update_missing_keys`
        if len(missing) < len(parameters):
            self._refuse_missing(missing)
        # from here on it is as a model that `convert` has just changed: .half() and .float() work
        model.is_quantized = False  # type: ignore[assignment]
        for module in model.modules():
            vars(getattr(module, "config", module)).pop("_is_quantized", None)
        declare(model)
        return model

    def update_missing_keys(
        self, model: PreTrainedModel, missing_keys: list[str], prefix: str
    ) -> list[str]:
        """transformers 4 calls this with what it does not find in the file."""
        self._refuse_missing(missing_keys)
        return missing_keys

    def _refuse_missing(self, parameters: Iterable[str]) -> None:
        prefixes = tuple(f"{name}." for name in self.layer_names)
        missing = [name for name in parameters if name.startswith(prefixes)]
        if missing:
            raise ValueError(
                f"the checkpoint lacks parameters of structured layers: {', '.join(missing[:5])}; "
                "if it is a dense model's, take a config without quantization_config"
            )

    def dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        """`densify`, and a dtype; transformers' `model.dequantize()` calls this.

        Raises:
            ValueError: what `densify` raises. The model is then as it was.
        """
        densify(model)
        return model if dtype is None else model.to(dtype)

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel, *args: Any, **options: Any
    ) -> Any:
        """transformers calls this in place of taking the `state_dict` that it was given, if any.

        `_save_pretrained`, the model's own method, hides the quantiser, so only a call around that
        method ends here.

        Raises:
            RuntimeError: always, since a given `state_dict` would be lost.
        """
        raise RuntimeError(
            f"{type(model).__name__}: save_pretrained of the class was called with the model, and "
            "would drop a state_dict= that it was given; nothing was saved. Call the model's own "
            "method: model.save_pretrained(folder, state_dict=...)"
        )

    def is_serializable(self, *args: Any, **options: Any) -> bool:
        return True


def declare(model: nn.Module) -> None:
    """Tell each model of transformers in `model`, itself included, which layers are structured.

    `convert`, `densify`, `from_pretrained` and `save_pretrained` call it. Call it before
    `save_pretrained` where you put layers into a model by hand.

    Three things then say so: the config, for `from_pretrained(None, config=model.config,
    state_dict=...)`; the method `save_pretrained` of each of these models, which writes the state
    that it is given or the model's own, and a row of bytes beside each structured layer's cores;
    and, where `model` may be a part of another one, that row in the other one's state dict.

    >>> from transformers import GPT2Config, GPT2Model
    >>> from structlin import BTT, StructuredLinear
    >>> model = GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2))
    >>> model.h[0].mlp.c_fc = StructuredLinear(16, 64, BTT())
    >>> declare(model)
    >>> list(model.config.quantization_config.modules)
    ['h.0.mlp.c_fc']
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    inner_modules = set[nn.Module]()
    for pretrained in models:
        inner_modules |= {*pretrained.modules()} - {pretrained}
    for pretrained in models:
        layers = describe(pretrained)
        config = StructlinConfig(layers) if layers else None
        _set_saving(pretrained, config)
        if pretrained in inner_modules:
            continue
        if _is_body(pretrained):
            _declare_in_shared_config(pretrained, layers)
        else:
            _write_config(pretrained, config)
    if holds_parts(model) or (model in models and _is_body(model)):
        _guard_within_others(model)


def _is_body(model: Any) -> bool:
    """Whether `model` is of a class that other models hold, and share their config with."""
    return model.base_model is model and model.get_output_embeddings() is None


def _declare_in_shared_config(body: PreTrainedModel, modules: dict[str, dict[str, Any]]) -> None:
    """Say in the body's config, which a model around it may share, what is structured.

    What the config says of layers outside the body stays.
    """
    config: Any = body.config
    earlier = vars(config).get("quantization_config")
    outside: dict[str, dict[str, Any]] = {}
    if isinstance(earlier, StructlinConfig):
        names = {name for name, _ in body.named_modules(remove_duplicate=False)}
        prefix = f"{body.base_model_prefix}."
        for name, data in earlier.modules.items():
            if not name.startswith(prefix) and name not in names:
                outside[name] = data
    if modules or outside:
        config.quantization_config = StructlinConfig(modules | outside)
    elif isinstance(earlier, StructlinConfig):
        del config.quantization_config


def _write_config(model: PreTrainedModel, structured: StructlinConfig | None) -> None:
    """Give `model` a config that says what is structured: other models may share the old one."""
    shared: Any = model.config
    earlier = vars(shared).get("quantization_config")
    if structured is None and not isinstance(earlier, StructlinConfig):
        return
    config = copy.copy(shared)
    config.quantization_config = structured
    if structured is None:
        del config.quantization_config
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = config


# ---- saving --------------------------------------------------------------------------------------


def _set_saving(model: PreTrainedModel, structured: StructlinConfig | None) -> None:
    """Give `model` the method that saves structured layers; without such layers take it away."""
    attributes: dict[str, Any] = vars(model)
    method = attributes.get("save_pretrained")
    is_ours = isinstance(method, partial) and method.func is _save_pretrained
    if structured is not None:
        model.hf_quantizer = StructlinQuantizer(structured)  # type: ignore[assignment]
        if not is_ours:
            attributes["save_pretrained"] = partial(_save_pretrained, model, method)
        return
    if isinstance(attributes.get("hf_quantizer"), StructlinQuantizer):
        del attributes["hf_quantizer"]
    if isinstance(method, partial) and is_ours:
        _, earlier_method = method.args
        del attributes["save_pretrained"]
        if earlier_method is not None:
            attributes["save_pretrained"] = earlier_method


def _save_pretrained(
    model: Any, earlier_method: Callable[..., Any] | None, *args: Any, **options: Any
) -> Any:
    """`save_pretrained` of a model with structured layers; the method of its class does the work.

    The method of the class drops a given `state_dict` where the model has a quantiser. So the
    quantiser is hidden from it, and the state that it is given, or takes from the model, is the
    state that it writes, whatever functions lie between.

    Args:
        earlier_method: what somebody had given to this one model before; None: the class's.
        args: the arguments of `PreTrainedModel.save_pretrained`.
    """
    declare(model)
    call = inspect.signature(PreTrainedModel.save_pretrained).bind(model, *args, **options)
    state = call.arguments.get("state_dict")
    if state is not None:
        call.arguments["state_dict"] = dict(state)
        _add_guards(model, call.arguments["state_dict"], "")
    quantizer = vars(model).pop("hf_quantizer", None)
    if structured_experts(model) and "save_original_format" in call.signature.parameters:
        # it would take each core apart, as if it were the weight of the experts
        call.arguments["save_original_format"] = False
    hook = model.register_state_dict_post_hook(_add_guards)
    save = earlier_method or partial(type(model).save_pretrained, model)
    try:
        return save(*call.args[1:], **call.kwargs)
    finally:
        hook.remove()
        if quantizer is not None:
            model.hf_quantizer = quantizer


def _add_guards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Beside the cores of each structured layer, write what a dense layer refuses for its shape."""
    for name, layer in module.named_modules(remove_duplicate=False):
        has_experts = isinstance(layer, StructuredExperts)
        if has_experts or isinstance(layer, StructuredLinear):  # also where cores are offloaded
            guard = torch.tensor(list(GUARD_TEXT), dtype=torch.uint8)
            state[_name_guard(f"{prefix}{name}", has_experts)] = guard


def _name_guard(name: str, has_experts: bool) -> str:
    """The name of the row of bytes that stands where a dense model has the weight."""
    return name if has_experts else f"{name}.{GUARD}"


def _guard_within_others(part: Any) -> None:
    """Let the state dict of whatever holds `part` have the guards, which its config may not."""
    if not vars(part).get("_guards_structured_layers", False):
        part._guards_structured_layers = True
        part.register_state_dict_post_hook(_add_guards_within_others)


def _add_guards_within_others(part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix:
        _add_guards(part, state, prefix)


# ---- loading -------------------------------------------------------------------------------------


def _match_names(
    model: PreTrainedModel, modules: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`modules` by their names in `model`, which may be the saved model's body, or have it as such.

    Layers that `model` lacks are left out, as weights are by transformers, which reports them. If
    it lacks them all, it is another model: ValueError.
    """
    prefix = f"{model.base_model_prefix}."
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}  # experts
    matched = {}
    for name, data in modules.items():
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in names:
                matched[candidate] = data
                break
    if modules and not matched:
        raise ValueError(
            f"{type(model).__name__} lacks structured layers of the checkpoint, all of them: "
            f"{', '.join([*modules][:5])}; load what was saved"
        )
    return matched
