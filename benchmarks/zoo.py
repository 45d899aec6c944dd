"""Tiny random models of transformers, torch.nn and timm, each with inputs: for the tests and for
docs/models.md."""

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IMAGE = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NO_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TOKENS = torch.arange(3, 15).reshape(2, 6)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=32, **NO_TOKENS)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(**TEXT, num_key_value_heads=2, max_position_embeddings=32, **NO_TOKENS)
    )


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    options = {"num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(**TEXT, **options, **NO_TOKENS))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    options = {"num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 32}
    return MixtralForCausalLM(MixtralConfig(**TEXT, **options, **NO_TOKENS))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**TEXT, max_position_embeddings=32, pad_token_id=0))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "vocab_size": 96,
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
    }
    return T5ForConditionalGeneration(
        T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDES}
    options = {
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 32,
        "decoder_start_token_id": 3,
    }
    config = WhisperConfig(
        vocab_size=96, d_model=32, **layers, **options, **NO_TOKENS, suppress_tokens=None
    )
    return WhisperForConditionalGeneration(config)


_SIDES = (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**IMAGE, intermediate_size=64, num_labels=5))


def dinov2() -> nn.Module:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    return Dinov2ForImageClassification(Dinov2Config(**IMAGE, mlp_ratio=2, num_labels=5))


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(
        Phi3Config(**TEXT, num_key_value_heads=2, max_position_embeddings=32, **NO_TOKENS)
    )


def falcon() -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**sizes, **NO_TOKENS))


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
    }
    return OPTForCausalLM(
        OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=32, **NO_TOKENS)
    )


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    return MambaForCausalLM(MambaConfig(**sizes, **NO_TOKENS))


def modernbert() -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    options = {"max_position_embeddings": 32, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(ModernBertConfig(**TEXT, **options, **NO_TOKENS))


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
    }
    return SwinForImageClassification(SwinConfig(**sizes, window_size=4, num_labels=5))


def siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipForImageClassification

    vision = {**IMAGE, "intermediate_size": 64}
    return SiglipForImageClassification(SiglipConfig(vision_config=vision, num_labels=5))


IMAGES = ("vit", "dinov2", "swin", "siglip")


def inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    if name in IMAGES:
        return {
            "pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16).to(dtype)
        }
    if name == "t5":
        return {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    if name == "whisper":
        features = torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)
        return {"input_features": features.to(dtype), "decoder_input_ids": TOKENS}
    return {"input_ids": TOKENS}


MODELS: dict[str, Callable[[], nn.Module]] = {
    model.__name__: model
    for model in (
        gpt2, llama, qwen2, phi3, falcon, opt, mixtral, mamba, bert, modernbert, t5, whisper, vit,
        dinov2, swin, siglip,
    )
}  # fmt: skip


def logits(model: nn.Module, name: str) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        return model.eval()(**inputs(name, dtype)).logits


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class _Torchvision(MetaPathFinder, Loader):
    """Empty modules under the name torchvision; whatever is asked of them is an empty class."""

    class Module(ModuleType):
        def __getattr__(self, name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type("Anything", (type,), {"__getattr__": lambda cls, name: name})(name, (), {})

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True)
            if name.partition(".")[0] == "torchvision"
            else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> None:
    """Import timm, if it is installed, also without torchvision: timm names transforms and datasets
    of it when it is imported, and its models use none. The empty torchvision is gone again when
    timm is there.

    torchvision's wheels need the very build of torch that they were made with; without one
    installed, `pip install --no-deps timm` is enough.
    """
    if find_spec("timm") is None or find_spec("torchvision") is not None:
        return
    stand_in = _Torchvision()
    sys.meta_path.append(stand_in)
    try:
        import timm  # noqa: F401
    finally:
        sys.meta_path.remove(stand_in)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def timm_model(name: str) -> nn.Module:
    import_timm()
    import timm

    small: dict[str, Any] = {"embed_dim": 48, "depth": 1, "num_heads": 2}
    if "swin" in name:
        small = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2)}
    return timm.create_model(name, img_size=timm_size(name), num_classes=5, **small)


def timm_size(name: str) -> int:
    return 64 if "swin" in name else 32 if "16" in name else 28


TIMM = (
    "vit_tiny_patch16_224",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "swinv2_tiny_window8_256",
)
