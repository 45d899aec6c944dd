"""transformers: Conv1D, experts, configs, attention masks, caches and its initialisation.

`structlin.hf` saves and loads its models; it stands above, since it needs the layers.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .host import COLUMNS, ROWS, Host, find_by_class_name

# modules without the decorator `use_experts_implementation`
_EXPERTS = {
    "Llama4TextExperts": {"gate_up_proj": "e n (f m)", "down_proj": COLUMNS},
    "LongcatFlashExperts": {"gate_up_proj": "e (f m) n", "down_proj": ROWS},
    "Step3p7Experts": {"gate_up_proj": "e (f m) n", "down_proj": ROWS},
    "InklingSharedExperts": {"gate_proj": ROWS, "up_proj": ROWS, "down_proj": ROWS},
    "JetMoeParallelExperts": {"weight": ROWS},
}
# attributes that the decorator sets on an instance
_DECORATED = {"has_gate", "is_transposed", "is_concatenated"}


class Transformers(Host):
    """Its models, by the names and attributes that they have since transformers 4.57."""

    roles = (("head", r"(^|\.)(lm_head|embed_out|classifier|score|qa_outputs|proj_out|cls)(\.|$)"),)
    plain_linears = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
    head_methods = ("get_output_embeddings",)
    bookkeeping = ("_is_hf_initialized",)
    padding_masks = MappingProxyType({"attention_mask": True, "decoder_attention_mask": True})

    def layouts_of(self, module: nn.Module) -> Mapping[str, str]:
        flags = vars(module)
        if not flags.keys() >= _DECORATED:
            return find_by_class_name(module, _EXPERTS)
        one_matrix = COLUMNS if flags["is_transposed"] else ROWS
        if not flags["has_gate"]:
            return {"up_proj": one_matrix, "down_proj": one_matrix}
        # rows of the gate and of the matrix beside it: one after the other, or in turn
        rows = "(f m)" if flags["is_concatenated"] else "(m f)"
        two_matrices = f"e n {rows}" if flags["is_transposed"] else f"e {rows} n"
        return {"gate_up_proj": two_matrices, "down_proj": one_matrix}

    def configs_of(self, module: nn.Module) -> Iterable[Any]:
        config = vars(module).get("config")
        configs = [config, getattr(config, "text_config", None), getattr(config, "decoder", None)]
        return [config for config in configs if config is not None]

    def source_of(self, model: nn.Module) -> str:
        return getattr(getattr(model, "config", None), "_name_or_path", "") or ""

    def explain_part(self, model: nn.Module) -> str:
        # a module of the user's own class may be the whole
        owner = type(model).__module__
        if not owner.startswith(("torch.", "transformers.models.")) or not holds_parts(model):
            return ""
        return (
            f"model={type(model).__name__} is a part of a transformers model, whose "
            "save_pretrained would not know of its structured layers: take the whole model, and "
            "choose these layers by the names that they have there, as in "
            "convert(model, include='*layers.*')"
        )

    def warn_of_part(self, model: nn.Module) -> str:
        if not holds_parts(model):
            return ""
        return (
            f"{type(model).__name__} has modules of transformers: if it is a part of a model with "
            "save_pretrained, call structlin.hf.declare on that model before"
        )

    def find_declare(
        self, model: nn.Module, load: Callable[[str], Any]
    ) -> Callable[[nn.Module], None] | None:
        owner = sys.modules.get("transformers.modeling_utils")
        if owner is None:
            return None
        try:
            declare: Callable[[nn.Module], None] = load("structlin.hf").declare
        except ImportError:
            # one that cannot be used stops nobody who converts another model
            if any(isinstance(module, owner.PreTrainedModel) for module in model.modules()):
                raise
            return None
        return declare

    def declare_untied(self, model: nn.Module) -> None:
        # the next load would tie them otherwise
        for module in model.modules():
            for config in self.configs_of(module):
                if getattr(config, "tie_word_embeddings", False):
                    config.tie_word_embeddings = False

    def find_options(self, model: nn.Module, arguments: Iterable[str]) -> dict[str, Any]:
        # no cache: it would keep the keys and values of all layers
        owner = sys.modules.get("transformers.modeling_utils")
        if owner is None or not isinstance(model, owner.PreTrainedModel):
            return {}
        takes_cache = "use_cache" in signature(model.forward).parameters
        return {"use_cache": False} if takes_cache and "use_cache" not in arguments else {}


def holds_parts(model: nn.Module) -> bool:
    """Whether `model` has modules of transformers, and no whole model of it."""
    modules = list(model.modules())
    if any(hasattr(module, "save_pretrained") for module in modules):
        return False
    return any(type(module).__module__.startswith("transformers.models.") for module in modules)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is Conv1D (GPT-2), whose weight is `(in_features, out_features)`."""
    owner = sys.modules.get("transformers.pytorch_utils")  # a model that has one has imported it
    return owner is not None and type(module) is owner.Conv1D


def build_conv1d(in_features: int, out_features: int) -> nn.Module:
    """A new Conv1D; who asks has had one, so that transformers is there."""
    layer: nn.Module = import_module("transformers.pytorch_utils").Conv1D(out_features, in_features)
    return layer


# ---- its initialisation --------------------------------------------------------------------------


class InitialisedModule(nn.Module):
    """A module that is drawn anew where transformers has given it memory, but no values.

    transformers sets `_is_hf_initialized` once its `_init_weights`, which knows no structured
    layers, has seen a module. By then what the file lacks has memory: it is drawn here.
    """

    _undrawn: bool  #: made on the meta device, where nothing could be drawn

    @property
    def _is_hf_initialized(self) -> bool:
        return bool(vars(self).get("_is_hf_initialized", False))

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        vars(self)["_is_hf_initialized"] = value
        if value and getattr(self, "_undrawn", False):
            self._draw(_has_values)

    @_is_hf_initialized.deleter
    def _is_hf_initialized(self) -> None:
        vars(self).pop("_is_hf_initialized", None)

    def _draw(self, keeps: Callable[[Tensor], bool]) -> None:
        """Draw all parameters anew but those that `keeps` is true of, and set `_undrawn`."""
        raise NotImplementedError


def was_read(parameter: Tensor) -> bool:
    """Whether transformers has filled `parameter` from a file: it marks it for good."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def is_guarded(parameter: Tensor) -> bool:
    """Whether the functions of torch.nn.init leave `parameter` as it is.

    While transformers initialises a model, they leave all that it has read from a file. It marks
    these parameters for good, and stops the functions only for that time.
    """
    if not was_read(parameter):
        return False
    probe: Any = torch.ones((), device="cpu")
    probe._is_hf_initialized = True
    nn.init.zeros_(probe)
    return bool(probe)


def _has_values(parameter: Tensor) -> bool:
    return was_read(parameter) or (not parameter.is_inference() and parameter._version > 0)
