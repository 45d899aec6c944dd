"""transformers: save_pretrained and from_pretrained of converted models."""

import json
import subprocess
import sys
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from benchmarks.zoo import MODELS, logits
from structlin import BTT, LowRank, StructuredLinear, convert, to_dense_

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # ModernBERT of transformers 4


def converted(name: str, **options):
    model = MODELS[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "left dense|these layers grow")
        return convert(model, BTT(rank=2), **options)


def structures(model) -> dict[str, object]:
    return {name: m.structure for name, m in model.named_modules() if isinstance(m, StructuredLinear)}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_bit_equal_after_saving_and_loading_twice(name, tmp_path):
    model = converted(name)
    before, kept = logits(model, name), structures(model)
    assert kept
    for generation in ("first", "second"):
        model.save_pretrained(tmp_path / generation)
        model = type(model).from_pretrained(tmp_path / generation)
        assert structures(model) == kept
        assert torch.equal(logits(model, name), before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_bfloat16_and_shards_come_back_bit_equal(name, tmp_path):
    converted(name).save_pretrained(tmp_path)
    model = type(MODELS[name]()).from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = logits(model, name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(logits(loaded, name), before)
    assert next(iter(loaded.parameters())).dtype == torch.bfloat16


@pytest.mark.parametrize("name", MODELS)
def test_to_dense_gives_back_the_keys_and_the_function_of_the_dense_model(name):
    dense_keys = {key: value.shape for key, value in MODELS[name]().state_dict().items()}
    model = converted(name)
    before = logits(model, name)
    to_dense_(model)
    assert {key: value.shape for key, value in model.state_dict().items()} == dense_keys
    torch.testing.assert_close(logits(model, name), before, atol=1e-4, rtol=1e-4)
    assert not hasattr(model.config, "quantization_config")


def test_a_dense_model_saved_after_to_dense_loads_as_any_other(tmp_path):
    model = to_dense_(converted("llama"))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


def test_what_is_saved_is_what_the_layers_are_and_not_what_they_were(tmp_path):
    model = converted("llama", include="ffn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(model.model.layers, LowRank(rank=4), include="attention", weight_norm=True)  # a part, on its own
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert structures(loaded) == structures(model)
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


WITHOUT = """
import sys, transformers
for kind, path in (("GPT2LMHeadModel", sys.argv[1]), ("ViTForImageClassification", sys.argv[2])):
    try:
        getattr(transformers, kind).from_pretrained(path)
    except RuntimeError as error:
        print(kind, "is refused:", error)
"""


@pytest.mark.parametrize("imported", ["", "import structlin"])
def test_loading_without_structlin_hf_is_an_error_and_not_random_weights(imported, tmp_path):
    for name in ("gpt2", "vit"):
        converted(name).save_pretrained(tmp_path / name)
    command = [sys.executable, "-c", imported + WITHOUT, str(tmp_path / "gpt2"), str(tmp_path / "vit")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for kind in ("GPT2LMHeadModel", "ViTForImageClassification"):
        assert f"{kind} is refused" in done.stdout
    assert "mismatch" in done.stdout
    assert "structlin" in done.stderr


def test_a_checkpoint_that_lacks_cores_is_an_error(tmp_path):
    model = converted("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {key: value for key, value in tensors.items() if "0.mlp.up_proj.cores" not in key}, file, {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"lacks cores of structured layers: model\.layers\.0\.mlp\.up_proj\.cores\.0"):
        type(model).from_pretrained(tmp_path)


def test_an_untied_head_stays_untied_when_it_is_loaded(tmp_path):
    model = MODELS["qwen2"]()
    convert(model, BTT(rank=2), include=["*", "lm_head"], untie=True)
    assert not model.config.tie_word_embeddings
    model.tie_weights()
    assert "lm_head.weight" not in dict(model.named_parameters())
    before = logits(model, "qwen2")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert isinstance(loaded.lm_head, StructuredLinear)
    assert torch.equal(logits(loaded, "qwen2"), before)
