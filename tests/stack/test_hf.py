"""transformers: save_pretrained and from_pretrained of converted models."""

import copy
import json
import pickle
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
from torch.nn.utils import prune
from transformers import AutoModel

from benchmarks.zoo import MODELS, logits
from structlin import (
    BTT,
    LowRank,
    StructuredLinear,
    convert,
    densify,
    load,
    plan,
    quantize,
    save,
    summary,
)
from structlin._layer.quantized import QuantizedLinear
from structlin._model.kinds import widths
from structlin.hf import declare


def converted(name: str, **options):
    model = MODELS[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "left dense|these layers grow")
        return convert(model, BTT(rank=2), **options)


def prune_half(layer) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


def structures(model) -> dict[str, object]:
    return {
        name: m.structure for name, m in model.named_modules() if isinstance(m, StructuredLinear)
    }


@pytest.mark.parametrize("change", [None, quantize])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_bit_equal_after_saving_and_loading_twice(name, change, tmp_path):
    model = converted(name)
    model = change(model) if change else model
    before, kept = logits(model, name), structures(model)
    assert kept
    for generation in ("first", "second"):
        model.save_pretrained(tmp_path / generation)
        model = type(model).from_pretrained(tmp_path / generation)
        assert structures(model) == kept
        assert torch.equal(logits(model, name), before)
    if change:
        int8 = {type(x) for x in model.modules() if isinstance(x, StructuredLinear)}
        assert int8 == {QuantizedLinear}
        torch.testing.assert_close(logits(densify(model), name), before, atol=1e-4, rtol=1e-4)


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
def test_to_dense_gives_back_the_keys_and_the_function_of_the_dense_model(name, tmp_path):
    dense_keys = {key: value.shape for key, value in MODELS[name]().state_dict().items()}
    model = converted(name)
    before = logits(model, name)
    densify(model)
    assert {key: value.shape for key, value in model.state_dict().items()} == dense_keys
    torch.testing.assert_close(logits(model, name), before, atol=1e-4, rtol=1e-4)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), name), logits(model, name))


def test_what_is_saved_is_what_the_layers_are_and_not_what_they_were(tmp_path):
    model = converted("llama", include="ffn")
    convert(model.model, LowRank(rank=4), include="attention", weight_norm=True)
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
    "body": ("llama", lambda model: convert(model.model, BTT())),
    "assigned": ("llama", put_in),
    "assigned Conv1D": ("gpt2", put_in),
    "activation": ("gpt2", lambda model: convert(model.transformer, BTT().activate())),
    "encoder": ("bert", lambda model: convert(model.bert, BTT(), include="*encoder*")),
}


def converted_in_part(case: str):
    name, change = PARTS[case]
    model = MODELS[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these layers grow")
        change(model)
    if change is put_in:
        declare(model)
    return name, model


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
    model, fresh = MODELS["gpt2"](), MODELS["gpt2"]()
    shapes = {name: value.shape for name, value in fresh.state_dict().items()}
    put_in(model)
    save(model, tmp_path)
    back = densify(load(fresh, tmp_path))
    assert {name: value.shape for name, value in back.state_dict().items()} == shapes


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
    page = (Path(__file__).parents[2] / "docs/convert.md").read_text(encoding="utf-8")
    assert all("Unknown quantization type, got structlin" in text for text in (done.stderr, page))


# ---- other models than the one that was saved ----------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_body_of_a_converted_model_loads_on_its_own_and_into_a_model_with_a_head(
    name, tmp_path
):
    model = converted(name, **({"include": "*"} if name == "llama" else {}))
    body = getattr(model, model.base_model_prefix)
    model.save_pretrained(tmp_path / "whole")
    alone = AutoModel.from_pretrained(tmp_path / "whole")
    assert structures(alone) == structures(body) != {}
    assert all(torch.equal(alone.get_parameter(x), value) for x, value in body.named_parameters())
    body.save_pretrained(tmp_path / "body")
    again = type(model).from_pretrained(tmp_path / "body")
    assert structures(again) == structures(model)
    own = getattr(again, again.base_model_prefix)
    assert all(torch.equal(own.get_parameter(x), value) for x, value in body.named_parameters())


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
    loaded = type(whole).from_pretrained(tmp_path, **options)
    part = getattr(loaded, loaded.base_model_prefix)
    kept = {layer: s for layer, s in structures(body).items() if lacks not in layer}
    assert structures(part) == kept != {}
    assert all(torch.equal(body.get_parameter(x), p) for x, p in part.named_parameters())
    again = type(whole).from_pretrained(None, config=loaded.config, state_dict=loaded.state_dict())
    assert structures(again) == structures(loaded)


def test_a_model_that_lacks_all_structured_layers_or_has_other_widths_is_refused(tmp_path):
    model = convert(MODELS["llama"](), BTT(), include="lm_head")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"LlamaModel lacks .* all of them: lm_head; load"):
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'lm_head': 32 -> 9 in the model, 32 -> \d+ in the file"):
        type(model).from_pretrained(tmp_path, vocab_size=9)


@pytest.mark.parametrize("in_part", [False, True])
def test_a_state_and_the_config_of_a_converted_model_make_it_again(in_part):
    model = converted_in_part("encoder")[1] if in_part else converted("bert")
    again = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(logits(again, "bert"), logits(model, "bert"))


@pytest.mark.parametrize("first", [True, False])
def test_a_dense_model_of_the_same_config_is_saved_as_dense(first, tmp_path):
    model = MODELS["llama"]()
    dense = type(model)(model.config)
    convert(model, BTT())
    if not first:
        dense = type(model)(model.config)  # which says what is structured
        declare(dense)
    model.save_pretrained(tmp_path / "structured")
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    loaded = type(model).from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(loaded, "llama"), logits(dense, "llama"))
    assert structures(type(model).from_pretrained(tmp_path / "structured")) == structures(model)
    assert model.config is model.model.config  # which stays one config


@pytest.mark.parametrize("by_position", [True, False])
def test_a_state_that_is_given_is_what_is_saved(by_position, tmp_path):
    model = converted("llama")
    before = logits(model, "llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    given = ((True, state), {}) if by_position else ((), {"state_dict": state})
    model.save_pretrained(tmp_path, *given[0], **given[1])
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), "llama"), before)
    model.save_pretrained(tmp_path)  # its own
    assert not logits(type(model).from_pretrained(tmp_path), "llama").any()


class Renaming(transformers.LlamaForCausalLM):
    """Its save_pretrained gives a state of its own making to that of transformers."""

    def save_pretrained(self, folder, **options):
        ones = {name: torch.ones_like(value) for name, value in self.state_dict().items()}
        super().save_pretrained(folder, state_dict=ones, **options)


def wrap(model, folder, state):
    def save(*given, **options):
        return model.save_pretrained(*given, **options)

    save(folder, state_dict=state)


def replace_the_method(model, folder, state):
    before = model.save_pretrained
    model.save_pretrained = lambda *given, **options: before(*given, **options)
    convert(model, LowRank(rank=2), include="lm_head", init="project")  # which declares it again
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)


def gather(model, folder, state):
    """As a trainer does that gathers parameters by their names, without hooks of the state dict."""
    names = [name for name, _ in model.named_parameters()]
    model.save_pretrained(folder, True, {name: state[name] for name in names})


def copy_and_pickle(model, folder, state):
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    copied.load_state_dict(state)
    copied.save_pretrained(folder)


WAYS = {  # how a state of ones comes to save_pretrained
    "wrapper": wrap,
    "replaced method": replace_the_method,
    "gathered": gather,
    "copy": copy_and_pickle,
    "class of its own": lambda model, folder, state: model.save_pretrained(folder),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_state_comes_to_the_file_whatever_functions_lie_between(way, tmp_path):
    model = converted("llama")
    if way == "class of its own":
        model = convert(Renaming(MODELS["llama"]().config), BTT(rank=2))
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    WAYS[way](model, tmp_path, state)
    saved = load_file(tmp_path / "model.safetensors")
    guards = {f"{name}.weight" for name in structures(model)}
    assert guards <= set(saved)
    assert all((saved[name] == 1).all() for name in saved if name not in guards)
    assert all(saved[name].ndim == 1 for name in guards)
    assert not any(name in model.state_dict() for name in guards)  # only the file has them


def test_a_call_around_the_models_own_method_is_refused_and_writes_no_weights(tmp_path):
    model = converted("llama")
    with pytest.raises(RuntimeError, match=r"own method: model\.save_pretrained\(folder"):
        transformers.PreTrainedModel.save_pretrained(model, tmp_path, state_dict={})
    assert not list(tmp_path.iterdir())


def test_a_body_is_converted_saved_and_loaded_alone_and_its_dense_state_is_as_ever(tmp_path):
    body = MODELS["llama"]().model
    before = set(body.state_dict())
    convert(body, BTT(rank=2))
    assert not any(name.endswith("proj.weight") for name in body.state_dict())
    body.save_pretrained(tmp_path)
    loaded = type(body).from_pretrained(tmp_path)
    assert structures(loaded) == structures(body) != {}
    assert set(densify(body).state_dict()) == before
    assert not hasattr(body.config, "quantization_config")
    assert "save_pretrained" not in vars(body)


class Holder(torch.nn.Module):
    """A class of the user's own, with a part of a transformers model."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers


def test_a_part_of_transformers_classes_is_refused_and_a_class_of_ones_own_is_guarded():
    model = MODELS["llama"]()
    for part in (model.model.layers, model.model.layers[0], model.model.layers[0].mlp):
        with pytest.raises(ValueError, match=r"is a part of a .*convert\(model, include"):
            convert(part, BTT())
    assert not structures(model)
    holder = Holder(model.model.layers)
    with pytest.warns(UserWarning, match=r"Holder has modules of .* structlin\.hf\.declare"):
        convert(holder, BTT(rank=2))
    assert not any(name.endswith("proj.weight") for name in holder.state_dict())
    inside = torch.nn.Sequential(holder).state_dict()  # as in a model that is not declared
    assert all(inside[f"0.{name}.weight"].ndim == 1 for name in structures(holder))
    torch.nn.Sequential(holder).load_state_dict(inside)  # structured layers do not mind
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\..*proj\.weight"):
        torch.nn.Sequential(Holder(MODELS["llama"]().model.layers)).load_state_dict(inside)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_loaded_model_takes_dtypes_and_dequantize_as_the_one_that_was_saved(quantized, tmp_path):
    model = converted("llama")
    model = quantize(model) if quantized else model
    expected = logits(model, "llama")
    model.save_pretrained(tmp_path)
    for dtype in ("half", "float", "double", "bfloat16"):
        changed = getattr(type(model).from_pretrained(tmp_path), dtype)()
        assert changed.model.embed_tokens.weight.dtype == getattr(torch, dtype)
    dense = type(model).from_pretrained(tmp_path).dequantize()
    assert not structures(dense)
    torch.testing.assert_close(logits(dense, "llama"), expected, atol=1e-4, rtol=1e-4)
    dense.save_pretrained(tmp_path / "dense")
    again = type(model).from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(again, "llama"), logits(dense, "llama"))
    with pytest.raises(ValueError, match="first quantize"):
        dense.dequantize()


def test_dequantize_refuses_what_would_lose_a_hook_as_densify_does():
    model = converted("gpt2")
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_: None)
    before = structures(model)
    with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc' has hooks, which would be lost"):
        model.dequantize()
    assert structures(model) == before


@pytest.mark.parametrize("normalise", [prune_half, torch.nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_conv1d_without_a_weight_of_its_own_stays_dense_with_a_reason(normalise):
    model = MODELS["gpt2"]()
    normalise(model.transformer.h[0].mlp.c_fc)
    planned = plan(model, BTT(rank=2), exclude="head")
    reasons = {d.layer.name: d.reason for d in planned.decisions if d.reason}
    reasons.pop("lm_head")
    assert list(reasons) == ["transformer.h.0.mlp.c_fc"]
    assert "has no weight parameter of its own" in reasons["transformer.h.0.mlp.c_fc"]
    assert summary(planned.apply()).rows


def test_an_attribute_of_a_layer_is_there_after_from_pretrained(tmp_path):
    class Scaled(transformers.GPT2LMHeadModel):
        def __init__(self, config):
            super().__init__(config)
            self.transformer.h[0].mlp.c_fc.scale = 2.0

    model = convert(Scaled(MODELS["gpt2"]().config), BTT(rank=2))
    model.save_pretrained(tmp_path)
    layer = Scaled.from_pretrained(tmp_path).transformer.h[0].mlp.c_fc
    assert type(layer) is StructuredLinear
    assert layer.scale == 2.0


# ---- what the file lacks -------------------------------------------------------------------------


LOST = {  # what the file lacks of a layer, and how the model was made
    "0.mlp.c_fc.bias": lambda: converted("gpt2", weight_norm=True),
    "0.mlp.c_fc.gains": lambda: converted("gpt2", weight_norm=True),
    "0.mlp.up_proj.cores.0": lambda: converted("llama"),
    "0.mlp.up_proj.scales.1": lambda: quantize(converted("llama")),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_checkpoint_that_lacks_a_part_of_a_layer_is_an_error(lost, tmp_path):
    model = LOST[lost]()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(lost)}
    save_file(state, file, {"format": "pt"})
    text = rf"lacks parameters of structured layers: \S*{re.escape(lost)}"
    with pytest.raises(ValueError, match=text):
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
