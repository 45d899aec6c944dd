"""transformers: save_pretrained and from_pretrained of converted models."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from benchmarks.zoo import MODELS, logits
from structlin import (
    BTT,
    LowRank,
    StructuredLinear,
    convert,
    densify,
    load,
    quantize,
    save,
)
from structlin._model.survey import widths
from structlin._quantize import QuantizedLinear
from structlin.hf import declare


def converted(name: str, **options):
    model = MODELS[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "left dense|these layers grow")
        return convert(model, BTT(rank=2), **options)


def structures(model) -> dict[str, object]:
    return {
        name: m.structure for name, m in model.named_modules() if isinstance(m, StructuredLinear)
    }


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


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_int8_cores_come_back_bit_equal_and_lead_back_to_a_dense_model(name, tmp_path):
    model = quantize(converted(name))
    before = logits(model, name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    kinds = [type(module) for module in loaded.modules() if isinstance(module, StructuredLinear)]
    assert set(kinds) == {QuantizedLinear}
    assert torch.equal(logits(loaded, name), before)
    torch.testing.assert_close(logits(densify(loaded), name), before, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_without_a_scale_is_refused(tmp_path):
    model = quantize(converted("llama"))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    del state[next(name for name in state if name.endswith("scales.1"))]
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks parameters of structured layers: .*scales\.1"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_to_dense_gives_back_the_keys_and_the_function_of_the_dense_model(name):
    dense_keys = {key: value.shape for key, value in MODELS[name]().state_dict().items()}
    model = converted(name)
    before = logits(model, name)
    densify(model)
    assert {key: value.shape for key, value in model.state_dict().items()} == dense_keys
    torch.testing.assert_close(logits(model, name), before, atol=1e-4, rtol=1e-4)
    assert not hasattr(model.config, "quantization_config")


def test_a_dense_model_saved_after_to_dense_loads_as_any_other(tmp_path):
    model = densify(converted("llama"))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


def test_what_is_saved_is_what_the_layers_are_and_not_what_they_were(tmp_path):
    model = converted("llama", include="ffn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # a part, on its own
        convert(model.model.layers, LowRank(rank=4), include="attention", weight_norm=True)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert structures(loaded) == structures(model)
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


# ---- a part that was converted -------------------------------------------------------------------


def put_in(model) -> None:
    """Put a layer by hand in the place of the first wide one of the MLP."""
    name = next(name for name, _ in model.named_modules() if re.search(r"up_proj|c_fc", name))
    parent = model.get_submodule(name.rpartition(".")[0])
    in_features, out_features = widths(model.get_submodule(name))
    bias = "c_fc" in name
    new = StructuredLinear(in_features, out_features, BTT(), bias=bias)
    setattr(parent, name.rpartition(".")[2], new)


PARTS = {  # name of the model, what is done to a part of it
    "layers": ("llama", lambda model: convert(model.model.layers, BTT())),
    "one mlp": ("llama", lambda model: convert(model.model.layers[0].mlp, BTT())),
    "body": ("llama", lambda model: convert(model.model, BTT())),
    "assigned": ("llama", put_in),
    "assigned Conv1D": ("gpt2", put_in),
    "blocks": ("gpt2", lambda model: convert(model.transformer.h, BTT())),
    "activation": ("gpt2", lambda model: convert(model.transformer.h, BTT().activate())),
    "encoder": ("bert", lambda model: convert(model.bert.encoder, BTT())),
}


def converted_in_part(case: str):
    name, change = PARTS[case]
    model = MODELS[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these layers grow|.*is a part of a model")
        change(model)
    declare(model)
    return name, model


def test_a_part_that_is_converted_asks_for_declare_once():
    model = MODELS["llama"]()
    with pytest.warns(UserWarning, match=r"is a part of .* call structlin\.hf\.declare\(model\)"):
        convert(model.model.layers, LowRank(rank=4))


@pytest.mark.parametrize("case", PARTS)
def test_a_model_of_which_a_part_was_converted_is_loaded_as_it_was_saved(case, tmp_path):
    name, model = converted_in_part(case)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert structures(loaded) == structures(model) != {}
    assert torch.equal(logits(loaded, name), logits(model, name))
    assert structures(AutoModel.from_pretrained(tmp_path))
    save(model, tmp_path)
    assert torch.equal(logits(load(MODELS[name](), tmp_path), name), logits(model, name))


def test_a_layer_put_into_gpt2_by_hand_is_dense_as_a_conv1d_once_it_is_loaded(tmp_path):
    model = MODELS["gpt2"]()
    put_in(model)
    save(model, tmp_path)
    back = densify(load(MODELS["gpt2"](), tmp_path))
    assert {key: value.shape for key, value in back.state_dict().items()} == {
        key: value.shape for key, value in MODELS["gpt2"]().state_dict().items()
    }


# peft of transformers 5
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_that_was_merged_into_a_converted_model_leaves_it_one_that_loads(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        MODELS["llama"](), peft.LoraConfig(target_modules=["q_proj"], r=2)
    )
    model = convert(adapted, BTT(), include="*mlp*").merge_and_unload()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert structures(loaded) == structures(model) != {}
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


# Loads each folder without structlin.hf: the model that its config names, and the body alone.
WITHOUT = """
import json, sys, transformers
for folder in sys.argv[1:]:
    kind = json.load(open(f"{folder}/config.json"))["architectures"][0]
    for kind in (kind, "AutoModel"):
        try:
            getattr(transformers, kind).from_pretrained(folder)
        except RuntimeError as error:
            print("refused:", error)
"""


@pytest.mark.parametrize(("imported", "parts"), [("", PARTS), ("import structlin", ["assigned"])])
def test_loading_without_structlin_hf_is_an_error_and_not_random_weights(imported, parts, tmp_path):
    folders = []
    for name in ("gpt2", "vit"):
        folders.append(tmp_path / name)
        converted(name).save_pretrained(folders[-1])
    for case in parts:
        folders.append(tmp_path / case)
        converted_in_part(case)[1].save_pretrained(folders[-1])
    command = [sys.executable, "-c", imported + WITHOUT, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(refused) == 2 * len(folders)
    assert all("mismatch" in line for line in refused)
    warning = "Unknown quantization type, got structlin"
    assert warning in done.stderr
    assert warning in (Path(__file__).parents[2] / "docs/convert.md").read_text(encoding="utf-8")


# ---- other models than the one that was saved ----------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_body_of_a_converted_model_loads_on_its_own_and_into_a_model_with_a_head(
    name, tmp_path
):
    model = converted(name)
    body = getattr(model, model.base_model_prefix)
    model.save_pretrained(tmp_path / "whole")
    alone = AutoModel.from_pretrained(tmp_path / "whole")
    assert structures(alone) == structures(body) != {}
    assert all(
        torch.equal(alone.get_parameter(key), value) for key, value in body.named_parameters()
    )
    body.save_pretrained(tmp_path / "body")
    again = type(model).from_pretrained(tmp_path / "body")
    assert structures(again) == structures(model)
    own = getattr(again, again.base_model_prefix)
    assert all(torch.equal(own.get_parameter(key), value) for key, value in body.named_parameters())


def test_a_converted_head_does_not_keep_the_body_from_loading(tmp_path):
    model = converted("llama", include=["*mlp*", "lm_head"])
    model.save_pretrained(tmp_path)
    alone = AutoModel.from_pretrained(tmp_path)
    assert structures(alone) == structures(model.model) != {}


LACKING = {  # saved model, what is structured, options of loading, what the loaded one lacks
    "pooler": ("vit", ["ffn", "*pooler*"], {}, "pooler.dense"),
    "layers": ("llama", "*mlp*", {"num_hidden_layers": 1}, "layers.1.mlp"),
}


@pytest.mark.parametrize("case", LACKING)
def test_structured_layers_that_a_model_lacks_are_left_out_as_dense_ones_are(case, tmp_path):
    name, include, options, lacks = LACKING[case]
    whole = MODELS[name]()
    body = type(getattr(whole, whole.base_model_prefix))(whole.config)
    convert(body, BTT(), include=include).save_pretrained(tmp_path)
    assert any(lacks in layer for layer in structures(body))
    with pytest.warns(UserWarning, match=f"lacks structured layers .* left out: {lacks}"):
        loaded = type(whole).from_pretrained(tmp_path, **options)
    part = getattr(loaded, loaded.base_model_prefix)
    kept = {layer: s for layer, s in structures(body).items() if lacks not in layer}
    assert structures(part) == kept != {}
    assert all(torch.equal(body.get_parameter(x), p) for x, p in part.named_parameters())
    again = type(whole).from_pretrained(None, config=loaded.config, state_dict=loaded.state_dict())
    assert structures(again) == structures(loaded)


def test_a_model_that_lacks_all_structured_layers_is_refused(tmp_path):
    convert(MODELS["llama"](), BTT(), include="lm_head").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"LlamaModel lacks .* all of them: lm_head; load"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.skipif(transformers.__version__ < "5", reason="structlin.hf refuses, with flag too")
def test_layers_of_other_widths_need_ignore_mismatched_sizes_and_stay_dense(tmp_path):
    model = converted("llama", include="*")
    model.save_pretrained(tmp_path)
    options = {"intermediate_size": 2 * model.config.intermediate_size}
    text = r"other widths .* dense ones: model\.layers\.0\.mlp"
    with pytest.warns(UserWarning, match=text), pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path, **options)
    options |= {"ignore_mismatched_sizes": True}
    with pytest.warns(UserWarning, match=text):
        loaded = type(model).from_pretrained(tmp_path, **options)
    kept = {name: s for name, s in structures(model).items() if "mlp" not in name}
    assert structures(loaded) == kept != {}
    assert logits(loaded, "llama").isfinite().all()
    loaded.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, "llama"), logits(loaded, "llama"))


@pytest.mark.parametrize("in_part", [False, True])
def test_a_state_and_the_config_of_a_converted_model_make_it_again(in_part):
    model = converted_in_part("encoder")[1] if in_part else converted("bert")
    again = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(logits(again, "bert"), logits(model, "bert"))


def test_a_dense_model_of_the_config_of_a_converted_one_is_saved_as_dense(tmp_path):
    model = converted("llama")
    dense = type(model)(model.config)
    declare(dense)
    dense.save_pretrained(tmp_path)
    assert not structures(type(model).from_pretrained(tmp_path))
    assert hasattr(model.config, "quantization_config")


def test_a_dense_model_that_shares_the_config_is_saved_as_dense(tmp_path):
    model = MODELS["llama"]()
    dense = type(model)(model.config)
    convert(model, BTT())
    model.save_pretrained(tmp_path / "structured")
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    loaded = type(model).from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(loaded, "llama"), logits(dense, "llama"))
    assert structures(type(model).from_pretrained(tmp_path / "structured")) == structures(model)
    assert model.config is model.model.config  # which stays one config


def test_structlin_save_and_save_pretrained_share_a_folder(tmp_path):
    model = converted("llama")
    model.save_pretrained(tmp_path)
    save(model, tmp_path)
    assert torch.equal(
        logits(type(model).from_pretrained(tmp_path), "llama"), logits(model, "llama")
    )
    assert torch.equal(logits(load(MODELS["llama"](), tmp_path), "llama"), logits(model, "llama"))


@pytest.mark.parametrize("by_position", [True, False])
def test_a_state_that_is_given_is_what_is_saved(by_position, tmp_path):
    model = converted("llama")
    before = logits(model, "llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if by_position:
        model.save_pretrained(tmp_path, True, state)
    else:
        model.save_pretrained(tmp_path, state_dict=state)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), "llama"), before)
    model.save_pretrained(tmp_path)  # its own
    assert not logits(type(model).from_pretrained(tmp_path), "llama").any()


def test_dequantize_of_transformers_is_to_dense():
    model = converted("gpt2")
    before = logits(model, "gpt2")
    model.dequantize()
    assert not structures(model)
    torch.testing.assert_close(logits(model, "gpt2"), before, atol=1e-4, rtol=1e-4)


# ---- what the file lacks -------------------------------------------------------------------------


def test_a_checkpoint_that_lacks_cores_is_an_error(tmp_path):
    model = converted("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {key: value for key, value in tensors.items() if "0.mlp.up_proj.cores" not in key},
        file,
        {"format": "pt"},
    )
    with pytest.raises(
        ValueError,
        match=r"lacks parameters of structured layers: model\.layers\.0\.mlp\.up_proj\.cores\.0",
    ):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("lost", ["bias", "gains"])
def test_a_checkpoint_that_lacks_a_bias_or_gains_is_an_error(lost, tmp_path):
    model = converted("gpt2", weight_norm=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {x: t for x, t in load_file(file).items() if not x.endswith(f"h.0.mlp.c_fc.{lost}")}
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks parameters .*: transformer\.h\.0.*\.{lost}"):
        type(model).from_pretrained(tmp_path)


def check_new(layer) -> None:
    """That the layer has the numbers of one that has just been made."""
    for core, std in zip(layer.cores, layer.stds, strict=True):
        assert 0.8 * std < core.std() < 1.25 * std
    assert not layer.bias.any()
    assert layer.gains is None or bool((layer.gains == 1).all())


def test_a_class_that_converts_starts_what_a_dense_checkpoint_lacks_as_a_new_layer(tmp_path):
    class Converting(type(MODELS["gpt2"]())):
        def __init__(self, config):
            super().__init__(config)
            with warnings.catch_warnings(action="ignore"):
                convert(self, BTT(), include="*c_fc", weight_norm=True)

    MODELS["gpt2"]().save_pretrained(tmp_path)
    check_new(Converting.from_pretrained(tmp_path).transformer.h[0].mlp.c_fc)


def test_a_structured_head_starts_anew_or_as_init_weights_says_on_a_structured_body(tmp_path):
    class Headed(type(MODELS["llama"]().model)):
        def __init__(self, config):
            super().__init__(config)
            widths = config.hidden_size, config.hidden_size
            self.top, self.own = StructuredLinear(*widths, BTT()), StructuredLinear(*widths, BTT())
            self.post_init()

        def _init_weights(self, module):
            super()._init_weights(module)
            if module is getattr(self, "own", None):
                torch.nn.init.constant_(module.cores[0], 3)

    body = converted("llama").model
    body.save_pretrained(tmp_path)
    headed = Headed.from_pretrained(tmp_path)
    check_new(headed.top)
    assert (headed.own.cores[0] == 3).all()
    found = structures(headed)
    assert {name: found[name] for name in found if name not in ("top", "own")} == structures(body)
    assert all(torch.equal(headed.get_parameter(x), p) for x, p in body.named_parameters())


@pytest.mark.parametrize("quantized", [False, True])
def test_an_init_weights_that_calls_reset_parameters_leaves_what_was_read(quantized, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"conv_dim": (32,), "conv_stride": (5,), "conv_kernel": (10,), "codevector_dim": 64}
    sizes |= {"num_conv_pos_embeddings": 16, "proj_codevector_dim": 64}
    model = transformers.Wav2Vec2ForPreTraining(transformers.Wav2Vec2Config(**sizes))
    convert(model, BTT(), include="project_*", weight_norm=True)
    if quantized:
        quantize(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    saved, read = model.project_q.state_dict(), loaded.project_q.state_dict()
    assert all(torch.equal(saved[name], read[name]) for name in saved | read)
    if not quantized:  # afterwards it draws
        before = read["cores.0"].clone()
        loaded.project_q.reset_parameters()
        assert not torch.equal(loaded.project_q.cores[0], before)


def offload_layers(model, folder):
    """Which part of a llama lies where: its layers on the disk."""
    places = {name: "cpu" for name, _ in model.named_children()} | {"model": "disk"}
    return {"device_map": places, "offload_folder": folder}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_offloaded_layers_are_saved_whole_and_refused_where_they_would_stay_offloaded(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = converted("llama")
    expected, places = logits(model, "llama"), offload_layers(model, tmp_path / "offloaded")
    accelerate.dispatch_model(
        model, places["device_map"], main_device="cpu", offload_dir=tmp_path / "offloaded"
    )
    assert model.model.layers[0].mlp.up_proj.cores[0].is_meta
    model.save_pretrained(tmp_path / "m")
    saved = load_file(tmp_path / "m" / "model.safetensors")
    assert all(f"{name}.weight" in saved for name in structures(model))  # what dense layers refuse
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "m"), "llama"), expected)
    with pytest.raises(ValueError, match=r"device_map offloads cores .* give them a device"):
        type(model).from_pretrained(tmp_path / "m", **places)


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
