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

Build = Callable[[], nn.Module]
TOKENS = torch.arange(3, 15).reshape(2, 6)


def of(kind: str, *shared: dict[str, Any], **options: Any) -> Build:
    """What builds a model of that class of transformers, by its config's options."""
    config: dict[str, Any] = {}
    for option_set in (*shared, options):
        config |= option_set

    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, kind)
        return model(model.config_class(**config))

    return build


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": 96, **SMALL}
TEXT = {**WORDS, "intermediate_size": 64}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 8}
NO_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PLACES = {"max_position_embeddings": 32}
FEW_KEYS = {**PLACES, "num_key_value_heads": 2}
STATES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
ENCODER = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
DECODER = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
MODELS: dict[str, Build] = {
    "gpt2": of(
        "GPT2LMHeadModel", NO_TOKENS, n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=32
    ),
    "llama": of("LlamaForCausalLM", TEXT, FEW_KEYS, NO_TOKENS),
    "qwen2": of("Qwen2ForCausalLM", TEXT, FEW_KEYS, NO_TOKENS, tie_word_embeddings=True),
    "phi3": of("Phi3ForCausalLM", TEXT, FEW_KEYS, NO_TOKENS),
    "falcon": of("FalconForCausalLM", WORDS, NO_TOKENS),
    "opt": of("OPTForCausalLM", WORDS, PLACES, NO_TOKENS, ffn_dim=64, word_embed_proj_dim=32),
    "mixtral": of("MixtralForCausalLM", TEXT, FEW_KEYS, NO_TOKENS, num_local_experts=4),
    "mamba": of("MambaForCausalLM", NO_TOKENS, STATES),
    "bert": of("BertForMaskedLM", TEXT, PLACES, pad_token_id=0),
    "modernbert": of(
        "ModernBertForMaskedLM", TEXT, PLACES, NO_TOKENS, cls_token_id=1, sep_token_id=2
    ),
    "t5": of(
        "T5ForConditionalGeneration",
        {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        {"vocab_size": 96, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4},
    ),
    "whisper": of(
        "WhisperForConditionalGeneration",
        {"vocab_size": 96, "d_model": 32, "num_mel_bins": 8, "decoder_start_token_id": 3},
        {"max_source_positions": 16, "max_target_positions": 32, "suppress_tokens": None},
        ENCODER | DECODER | NO_TOKENS,
    ),
    "vit": of("ViTForImageClassification", IMAGE, intermediate_size=64, num_labels=5),
    "dinov2": of("Dinov2ForImageClassification", IMAGE, mlp_ratio=2, num_labels=5),
    "swin": of(
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]},
        {"num_heads": [2, 2], "window_size": 4, "num_labels": 5},
    ),
    "siglip": of(
        "SiglipForImageClassification",
        {"vision_config": {**IMAGE, "intermediate_size": 64}, "num_labels": 5},
    ),
}
llama = MODELS["llama"]
mamba = MODELS["mamba"]
IMAGES = ("vit", "dinov2", "swin", "siglip")


def inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    if name in IMAGES:
        return {"pixel_values": ramp(2, 3, 16, 16).to(dtype)}
    if name == "t5":
        return {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    if name == "whisper":
        return {"input_features": ramp(2, 8, 32).to(dtype), "decoder_input_ids": TOKENS}
    return {"input_ids": TOKENS}


def ramp(*shape: int) -> torch.Tensor:
    """Numbers from -1 to 1."""
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


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
        ours = name.partition(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> None:
    """Make `import timm` work where there is no torchvision, with an empty one in its place.

    timm names transforms and datasets of torchvision when it is imported, and its models use none.
    The empty torchvision is gone afterwards.
    """
    if find_spec("timm") is None or find_spec("torchvision") is not None:
        return
    stand_in = _Torchvision()
    sys.meta_path.append(stand_in)
    try:
        import timm  # noqa: F401
    finally:
        sys.meta_path.remove(stand_in)
        for name in [*sys.modules]:
            if name.partition(".")[0] == "torchvision":
                del sys.modules[name]


TIMM = {  # name -> the side of its images
    "vit_tiny_patch16_224": 32,
    "beit_base_patch16_224": 32,
    "eva02_tiny_patch14_224": 28,
    "swinv2_tiny_window8_256": 64,
}


def timm_model(name: str) -> nn.Module:
    import_timm()
    import timm

    small: dict[str, Any] = {"embed_dim": 48, "depth": 1, "num_heads": 2}
    if "swin" in name:
        small = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2)}
    return timm.create_model(name, img_size=TIMM[name], num_classes=5, **small)
