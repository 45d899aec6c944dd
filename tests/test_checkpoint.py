"""Files of converted models: bit-equal, strict, whole or refused."""

import json

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")

from structlin import BTT, TT, Kronecker, LowRank, Monarch, Structure, StructuredLinear, convert, load, plan, save
from structlin._checkpoint import MANIFEST, WEIGHTS
from tests.models import GPT, snapshot

TOKENS = torch.arange(24).reshape(2, 12)


def mixed(**options) -> GPT:
    overrides = {
        "h.0.mlp.c_fc": Kronecker(),
        "h.0.mlp.c_proj": TT(rank=2),
        "h.1.mlp.c_fc": Structure("i -> o", "r i", "o r", i=64, o=256, r=3),
        "h.1.mlp.c_proj": LowRank(rank=5),
        "h.1.attn.c_attn": None,
    }
    model = convert(GPT(**options), BTT(rank=2), overrides=overrides, weight_norm=True)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def saved(tmp_path):
    model = mixed()
    save(model, tmp_path / "m")
    return model, tmp_path / "m"


def test_a_model_comes_back_bit_equal_into_a_dense_one(saved):
    model, path = saved
    fresh = GPT()
    assert load(fresh, path) is fresh
    assert torch.equal(fresh(TOKENS), model(TOKENS))
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear):
            other = fresh.get_submodule(name)
            assert (other.structure, other.label, other.stds) == (layer.structure, layer.label, layer.stds)
    save(fresh, path / "again")
    assert (path / "again" / WEIGHTS).read_bytes() == (path / WEIGHTS).read_bytes()


def test_how_a_layer_multiplies_comes_back_with_it(tmp_path):
    model = convert(nn.Sequential(nn.Linear(8, 8)), BTT())
    model[0].mode = "structured"
    save(model, tmp_path / "m")
    layer = load(nn.Sequential(nn.Linear(8, 8)), tmp_path / "m")[0]
    assert layer.mode == "structured"


def test_a_model_comes_back_into_one_that_is_converted_already(saved):
    model, path = saved
    other = mixed()
    cores = other.h[0].mlp.c_fc.cores
    load(other, path)
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert other.h[0].mlp.c_fc.cores is cores


def test_a_model_comes_back_into_one_on_the_meta_device(saved):
    model, path = saved
    with torch.device("meta"):
        fresh = GPT()
    assert torch.equal(load(fresh, path)(TOKENS), model(TOKENS))


def test_loading_draws_no_random_number(saved):
    _, path = saved
    fresh, state = GPT(), torch.get_rng_state()
    load(fresh, path)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_that_of_the_file(dtype, tmp_path):
    model = mixed().to(dtype)
    save(model, tmp_path)
    fresh = load(GPT(), tmp_path)
    assert {p.dtype for p in fresh.parameters()} == {dtype}
    assert torch.equal(fresh(TOKENS), model(TOKENS))


def test_frozen_parameters_and_training_mode_are_the_models_own(saved):
    _, path = saved
    fresh = GPT().eval()
    fresh.h[0].mlp.c_fc.requires_grad_(False)
    load(fresh, path)
    assert not any(p.requires_grad for p in fresh.h[0].mlp.c_fc.cores)
    assert all(p.requires_grad for p in fresh.h[1].mlp.c_fc.parameters())
    assert not any(module.training for module in fresh.modules())


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model = mixed(tied=True)
    save(model, tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["aliases"] == {"lm_head.weight": "wte.weight"}
    fresh = load(GPT(tied=True), tmp_path)
    assert fresh.lm_head.weight is fresh.wte.weight
    assert torch.equal(fresh(TOKENS), model(TOKENS))
    untied = load(GPT(), tmp_path)
    assert torch.equal(untied(TOKENS), model(TOKENS))


def test_a_model_with_a_tie_does_not_take_two_weights_that_differ(saved):
    _, path = saved
    with pytest.raises(ValueError, match=r"'wte\.weight' and 'lm_head\.weight' are tied in the model and differ"):
        load(GPT(tied=True), path)


def test_shared_layers_stay_shared(tmp_path):
    def shared() -> nn.Module:
        layer = nn.Linear(16, 16)
        return nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})

    model = convert(shared(), BTT())
    save(model, tmp_path)
    fresh = load(shared(), tmp_path)
    assert fresh["a"] is fresh["b"][0]
    assert torch.equal(fresh["a"].to_dense(), model["a"].to_dense())


def test_views_into_one_storage_are_stored_as_what_they_are(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    base = torch.randn(8, 4)
    model[0].weight, model[1].weight = nn.Parameter(base[:4]), nn.Parameter(base[4:].mT)
    save(model, tmp_path)
    fresh = load(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


def test_the_root_layer_comes_back_as_a_new_layer(tmp_path):
    layer = convert(nn.Linear(16, 16), Monarch(blocks=4))
    save(layer, tmp_path)
    loaded = load(nn.Linear(16, 16), tmp_path)
    assert torch.equal(loaded.to_dense(), layer.to_dense())


def test_a_dense_model_and_a_batchnorm_are_stored_as_well(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(8, 4))
    save(model, tmp_path)
    fresh = load(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), tmp_path)
    assert torch.equal(fresh.eval()(torch.ones(2, 4)), model.eval()(torch.ones(2, 4)))


def test_the_manifest_names_modules_exactly_and_holds_no_pattern(saved):
    model, path = saved
    manifest = json.loads((path / MANIFEST).read_text())
    structured = {name for name, module in model.named_modules() if isinstance(module, StructuredLinear)}
    assert set(manifest["modules"]) == structured
    assert manifest["modules"]["h.0.attn.c_proj"]["structure"] == BTT(rank=2).structure(64, 64).to_dict()
    assert sorted(file.name for file in path.iterdir()) == [WEIGHTS, MANIFEST]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: GPT(depth=1), r"'h\.1\.attn\.c_proj': the model has no such linear layer"),
        (lambda: GPT(depth=3), r"'h\.2\.ln_1\.weight' is in the model, not in the file"),
        (lambda: GPT(width=32), r"'h\.0\.attn\.c_attn': 32 -> 96 in the model, 64 -> 192 in the file"),
        (lambda: GPT(vocabulary=51), r"'wte\.weight' has shape \(51, 64\) in the model, \(50, 64\) in the file"),
        (lambda: convert(GPT(), BTT(rank=3)), r"is BTT\(rank=3\) in the model, BTT\(rank=2\) in the file"),
        (lambda: convert(GPT(), BTT(rank=2), include="*c_attn"), r"'h\.1\.attn\.c_attn' is structured in the model"),
        (lambda: nn.Linear(64, 64), "the model has no such linear layer"),
    ],
)
def test_another_model_is_refused_and_stays_as_it_was(saved, model, message):
    _, path = saved
    other = model()
    before = snapshot(other)
    with pytest.raises(ValueError, match=f"differs from what was saved.*{message}"):
        load(other, path)
    assert snapshot(other) == before


def _edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / MANIFEST).unlink(), "has no structlin.json"),
        (lambda p: (p / WEIGHTS).unlink(), "has no model.safetensors"),
        (lambda p: (p / MANIFEST).write_text((p / MANIFEST).read_text()[:500]), "is truncated"),
        (lambda p: (p / MANIFEST).write_text("[]"), "no manifest of structlin"),
        (lambda p: (p / MANIFEST).write_text("{}"), "no manifest of structlin"),
        (lambda p: (p / MANIFEST).write_bytes(b"\xff\xfe\x00"), "no manifest of structlin"),
        (lambda p: _edit(p / MANIFEST, lambda d: d["modules"].pop("h.0.mlp.c_fc")), "was edited"),
        (lambda p: _edit(p / MANIFEST, lambda d: d.update(version=99)), "has version 99; upgrade structlin"),
        (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-8]), "truncated or edited"),
        (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-1] + b"\x07"), "truncated or edited"),
        (lambda p: torch.save({}, p / WEIGHTS), "truncated or edited"),
    ],
)
def test_a_truncated_or_edited_file_is_an_error(saved, damage, message):
    _, path = saved
    damage(path)
    model = GPT()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load(model, path)
    assert snapshot(model) == before


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_interrupted_save_leaves_the_old_model_or_one_that_is_refused(saved, monkeypatch, fails_at):
    import os

    model, path = saved
    expected, replace, calls = model(TOKENS), os.replace, []

    def interrupted(source, target):
        calls.append(target)
        if len(calls) > fails_at:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(OSError, match="disk full"):
        save(mixed(), path)
    assert sorted(file.name for file in path.iterdir()) == [WEIGHTS, MANIFEST]
    if fails_at == 0:
        assert torch.equal(load(GPT(), path)(TOKENS), expected)
    else:
        with pytest.raises(ValueError, match="truncated or edited"):
            load(GPT(), path)


def test_what_has_no_values_or_is_no_tensor_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        save(nn.Linear(3, 3, device="meta"), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        save(nn.Linear(3, 3), tmp_path / "file")
    with pytest.raises(ValueError, match="no plain tensor"):
        save(nn.ParameterDict({"a": nn.Parameter(torch.eye(3).to_sparse())}), tmp_path / "b")


def test_a_buffer_that_no_file_has_is_not_left_on_meta(tmp_path):
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 16)
            self.register_buffer("freq", torch.ones(3), persistent=False)

    model = Rotary()
    plan(model, BTT()).apply()
    save(model, tmp_path)
    with torch.device("meta"):
        fresh = Rotary()
    with pytest.raises(ValueError, match="freq: on the meta device and in no file"):
        load(fresh, tmp_path)
    assert torch.equal(load(Rotary(), tmp_path).proj.to_dense(), model.proj.to_dense())
