"""Files of converted models: bit-equal, strict, whole or refused."""

import errno
import json
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

pytest.importorskip("safetensors")

import safetensors.torch
from safetensors.torch import save_file

from structlin import (
    BTT,
    TT,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
    convert,
    load,
    plan,
    save,
)
from structlin._files import FILE
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


def description(folder) -> dict:
    data = (folder / FILE).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["structlin"])


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
            assert (other.structure, other.label, other.stds) == (
                layer.structure,
                layer.label,
                layer.stds,
            )
    save(fresh, path / "again")
    assert (path / "again" / FILE).read_bytes() == (path / FILE).read_bytes()


def test_folders_on_the_way_are_made_and_one_that_is_there_is_used(tmp_path):
    for bias in (1.0, 2.0):
        model = nn.Linear(3, 3)
        nn.init.constant_(model.bias, bias)
        save(model, tmp_path / "of" / "a" / "run")
        assert load(nn.Linear(3, 3), tmp_path / "of" / "a" / "run").bias.tolist() == 3 * [bias]


def test_how_a_layer_multiplies_comes_back_with_it(tmp_path):
    model = convert(nn.Sequential(nn.Linear(8, 8)), BTT())
    model[0].mode = "structured"
    save(model, tmp_path / "m")
    assert load(nn.Sequential(nn.Linear(8, 8)), tmp_path / "m")[0].mode == "structured"


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
    assert description(tmp_path)["aliases"] == {"lm_head.weight": "wte.weight"}
    fresh = load(GPT(tied=True), tmp_path)
    assert fresh.lm_head.weight is fresh.wte.weight
    assert torch.equal(fresh(TOKENS), model(TOKENS))
    untied = load(GPT(), tmp_path)
    assert torch.equal(untied(TOKENS), model(TOKENS))


def test_a_model_with_a_tie_does_not_take_two_weights_that_differ(saved):
    _, path = saved
    with pytest.raises(
        ValueError, match=r"'wte\.weight' and 'lm_head\.weight' are tied in the model and differ"
    ):
        load(GPT(tied=True), path)


def test_tied_weights_stay_tied_when_they_take_the_files_dtype(tmp_path):
    save(mixed(tied=True).bfloat16(), tmp_path)
    fresh = load(GPT(tied=True), tmp_path)
    assert fresh.lm_head.weight is fresh.wte.weight
    assert fresh.wte.weight.dtype == torch.bfloat16


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
    def build():
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))

    model, base = build(), torch.randn(8, 4)
    alone = torch.randn(4, 4).mT  # in its storage, and turned
    for layer, view in zip(model, (base[:4], base[4:].mT, alone), strict=True):
        layer.weight = nn.Parameter(view)
    save(model, tmp_path)
    fresh = load(build(), tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True)
    )


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


def test_the_file_names_modules_exactly_and_holds_no_pattern(saved):
    model, path = saved
    modules = description(path)["modules"]
    structured = {
        name for name, module in model.named_modules() if isinstance(module, StructuredLinear)
    }
    assert set(modules) == structured
    assert modules["h.0.attn.c_proj"]["structure"] == BTT(rank=2).structure(64, 64).to_dict()
    assert [file.name for file in path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: GPT(depth=1), r"'h\.1\.attn\.c_proj': the model has no such linear layer"),
        (lambda: GPT(depth=3), r"'h\.2\.ln_1\.weight' is in the model, not in the file"),
        (
            lambda: GPT(width=32),
            r"'h\.0\.attn\.c_attn': 32 -> 96 in the model, 64 -> 192 in the file",
        ),
        (
            lambda: GPT(vocabulary=51),
            r"'wte\.weight' has shape \(51, 64\) in the model, \(50, 64\) in the file",
        ),
        (
            lambda: convert(GPT(), BTT(rank=3)),
            r"is BTT\(rank=3\) in the model, BTT\(rank=2\) in the file",
        ),
        (
            lambda: convert(GPT(), BTT(rank=2), include="*c_attn"),
            r"'h\.1\.attn\.c_attn' is structured in the model",
        ),
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


@pytest.mark.parametrize("wrap", [torch.compile, torch.optim.swa_utils.AveragedModel])
def test_a_model_saved_in_its_wrapper_is_named_as_such(wrap, tmp_path):
    save(wrap(convert(nn.Sequential(nn.Linear(16, 16)), BTT())), tmp_path)
    with pytest.raises(ValueError, match=r"layer but '0': .* such as a wrapper"):
        load(nn.Sequential(nn.Linear(16, 16)), tmp_path)


def _rewrite(path, change):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    own = json.loads(header["__metadata__"]["structlin"])
    change(own)
    header["__metadata__"]["structlin"] = json.dumps(own, separators=(",", ":"))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _link_to_zeros(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def _make_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), "has no structlin.safetensors; was it written by structlin.save"),
        (lambda p: p.write_bytes(p.read_bytes()[:500]), "truncated or edited"),
        (lambda p: p.write_bytes(b""), "no file of structlin.save"),
        (lambda p: p.write_bytes(b"[]"), "no file of structlin.save"),
        (lambda p: p.write_bytes(b"\xff" * 99), "no file of structlin.save"),
        (lambda p: save_file({"a": torch.ones(2)}, p), "no file of structlin.save"),
        (lambda p: torch.save({}, p), "no file of structlin.save"),
        (
            lambda p: _rewrite(p, lambda d: d["modules"].pop("h.0.mlp.c_fc")),
            "edited: its checksum is another",
        ),
        (lambda p: _rewrite(p, lambda d: d.pop("checksum")), "no file of structlin.save"),
        (
            lambda p: _rewrite(p, lambda d: d.update(version=99)),
            "has version 99; upgrade structlin",
        ),
        *(
            (lambda p, v=v: _rewrite(p, lambda d: d.update(version=v)), f"has version {v!r}; vers")
            for v in (0, -5, True, "2", None)
        ),
        (_link_to_zeros, "no regular file"),
        (_make_pipe, "no regular file"),
        (lambda p: (p.unlink(), p.mkdir()), "no regular file"),
        (lambda p: p.write_bytes(p.read_bytes()[:-8]), "truncated or edited"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\x07"), "truncated or edited"),
    ],
)
def test_a_truncated_or_edited_file_is_an_error(saved, damage, message):
    _, path = saved
    damage(path / FILE)
    model = GPT()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load(model, path)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("owner", "fails"),
    [(tempfile, "mkdtemp"), (safetensors.torch, "save_file"), (os, "fsync"), (os, "replace")],
    ids=["the folder", "the numbers", "flushing", "renaming"],
)
def test_a_save_that_fails_leaves_the_old_model_and_nothing_else(saved, monkeypatch, owner, fails):
    model, path = saved
    expected = model(TOKENS)
    works = getattr(owner, fails)

    def fail(*arguments, **options):
        if fails == "save_file":
            works(*arguments, **options)  # what was written until then lies there
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, fails, fail)
        with pytest.raises(OSError, match="No space left on device"):
            save(mixed(), path)
    assert [file.name for file in path.iterdir()] == [FILE]
    assert torch.equal(load(GPT(), path)(TOKENS), expected)


@pytest.mark.skipif(os.name == "nt", reason="files have no such modes there")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_others_may_read_the_file_as_they_may_one_of_torch_save(umask, tmp_path):
    before = os.umask(umask)
    try:
        save(nn.Linear(3, 3), tmp_path)
        torch.save({}, tmp_path / "theirs.pt")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {0o666 & ~umask}


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be flushed there")
def test_the_file_is_on_the_disk_before_it_is_renamed_and_the_folder_after(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def flush(handle):
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def rename(source, target):
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    save(nn.Linear(3, 3), tmp_path)
    assert done == ["file", "rename", "folder"]


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


# ---- in place, or not at all ---------------------------------------------------------------------


def test_an_optimizer_and_hooks_made_before_loading_keep_hold_of_the_parameters(saved):
    model, path = saved
    other = mixed()
    optimizer, seen = torch.optim.SGD(other.parameters(), lr=0.1), []
    other.ln_f.weight.register_hook(seen.append)
    before = [id(parameter) for parameter in other.parameters()]
    load(other, path)
    assert [id(parameter) for parameter in other.parameters()] == before
    other(TOKENS).sum().backward()
    optimizer.step()
    assert seen
    assert not torch.equal(other(TOKENS), model(TOKENS))


def test_what_stays_dense_is_filled_in_place_also_when_other_layers_become_structured(saved):
    _, path = saved
    fresh = GPT()
    kept = {
        id(parameter)
        for name, parameter in fresh.named_parameters()
        if ".c_" not in name or "bias" in name
    }
    load(fresh, path)
    assert kept <= {id(parameter) for parameter in fresh.parameters()}


def test_a_loaded_model_does_not_depend_on_the_file(saved):
    model, path = saved
    fresh, expected = load(GPT(), path), model(TOKENS)
    (path / FILE).write_bytes(b"")
    assert torch.equal(fresh(TOKENS), expected)


class Shared(nn.Module):
    """A buffer and a module under two names, and a hook of the user's that may lose a key."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.loses = nn.Linear(8, 8), nn.BatchNorm1d(8), False
        self.again = self.norm
        self.register_buffer("mask", torch.zeros(3))
        self.register_buffer("same_mask", self.mask)
        self.register_load_state_dict_pre_hook(self._lose)

    @staticmethod
    def _lose(module, state, *_) -> None:
        if module.loses:
            state.pop("mask")


def test_a_buffer_under_two_names_is_loaded_and_stays_one(tmp_path):
    model = convert(Shared(), BTT())
    model.mask.copy_(torch.arange(3.0))
    model.norm(torch.randn(4, 8))
    save(model, tmp_path)
    fresh = load(Shared(), tmp_path)
    assert fresh.mask is fresh.same_mask
    assert fresh.again is fresh.norm
    assert torch.equal(fresh.mask, model.mask)
    assert torch.equal(fresh.norm.running_mean, model.norm.running_mean)


def test_an_error_in_the_models_own_hook_leaves_it_as_it_was(tmp_path):
    save(convert(Shared(), BTT()), tmp_path)
    for other in (
        Shared(),
        convert(Shared(), BTT()),
        convert(Shared(), BTT()).double(),
        Shared().to("meta"),
    ):
        other.loses = True
        before = (
            snapshot(other.to("cpu")) if not other.mask.is_meta else list(map(id, other.modules()))
        )
        with pytest.raises(ValueError, match=r'Missing key.*"mask"'):
            load(other, tmp_path)
        assert before == (
            snapshot(other) if not other.mask.is_meta else list(map(id, other.modules()))
        )


def test_a_model_loaded_under_inference_mode_can_be_trained(saved):
    _, path = saved
    converted = mixed()  # which cannot be done under inference mode
    with torch.inference_mode():
        models = [load(GPT(), path), load(converted, path)]
    for model in models:
        model(TOKENS).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


# ---- what a layer computes with ------------------------------------------------------------------

FIRST = {"weight_norm": True, "init": "mup"}
OTHERS = {
    "sigma of init": (BTT(rank=2), {"weight_norm": True, "init": "spectral"}),
    "weight_norm": (BTT(rank=2), {}),
    "the order of axes": (
        Structure("g d -> a b", "g s b d", "b a g s", g=4, d=4, s=2, b=4, a=4),
        FIRST,
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_layer_that_computes_with_something_else_refuses_the_numbers(case, tmp_path):
    structure, options = OTHERS[case]
    model = convert(nn.Sequential(nn.Linear(16, 16)), BTT(rank=2), **FIRST)
    other = convert(nn.Sequential(nn.Linear(16, 16)), structure, **options)
    save(model, tmp_path)
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"in the model, .* in the file"):
        load(other, tmp_path)
    assert snapshot(other) == before
    for strict in (True, False):
        with pytest.raises(
            RuntimeError,
            match=r"'0\.weight': this layer computes with '16 -> 16 by .* the state is that",
        ):
            other.load_state_dict(model.state_dict(), strict=strict)


def test_the_sigma_of_a_layer_that_started_as_zero_is_compared(tmp_path):
    def low_rank(**options):
        return convert(
            nn.Sequential(nn.Linear(16, 16)),
            LowRank(rank=2),
            weight_norm=True,
            init="spectral",
            **options,
        )

    model = low_rank()
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"computes with '16 -> 16 by i -> o; .*sigma="):
        load(low_rank(zero_init="0"), tmp_path)
    with pytest.raises(RuntimeError, match="this layer computes with"):
        low_rank(zero_init="0").load_state_dict(model.state_dict())


def test_a_low_rank_layer_of_an_earlier_version_keeps_its_sigma(tmp_path):
    model = convert(nn.Sequential(nn.Linear(16, 16)), LowRank(rank=2), weight_norm=True)
    assert model[0].stds[0] == 1 / 4
    model[0].stds[0] = 2**0.5 / 16  # as it was: sqrt(fan_out) / fan_in
    save(model, tmp_path)
    loaded = load(nn.Sequential(nn.Linear(16, 16)), tmp_path)
    x = torch.randn(3, 16)
    assert torch.equal(loaded(x), model(x))
    model[0].stds[0] = 1 / 5
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"sigma=\[0.25.*\] in this version, \[0.2,"):
        load(nn.Sequential(nn.Linear(16, 16)), tmp_path)


@pytest.mark.parametrize("strict", [True, False])
def test_dense_and_structured_layers_refuse_each_others_state(strict):
    dense, structured = nn.Linear(16, 16), StructuredLinear(16, 16, BTT())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        dense.load_state_dict(structured.state_dict(), strict=strict)
    with pytest.raises(
        RuntimeError, match=r"'weight': a dense weight of shape \(16, 16\) for a structured layer"
    ):
        structured.load_state_dict(dense.state_dict(), strict=strict)


def test_padding_is_part_of_what_is_compared():
    big, small = (
        StructuredLinear(97, width, BTT().structure(97, 101), bias=False) for width in (101, 100)
    )
    with pytest.raises(RuntimeError, match=r"97 -> 100 by .* the state is that of '97 -> 101 by"):
        small.load_state_dict(big.state_dict())


def test_a_state_without_the_entry_is_taken_and_an_average_of_states_too():
    first, second = (StructuredLinear(16, 16, BTT(), weight_norm=True) for _ in range(2))
    state = first.state_dict()
    parameters = dict(first.named_parameters())
    assert state.keys() - parameters.keys() == {"weight"}
    assert (
        second.load_state_dict(
            {name: value for name, value in state.items() if name != "weight"}
        ).missing_keys
        == []
    )
    average = {name: (state[name].double() + second.state_dict()[name]) / 2 for name in state}
    second.load_state_dict(average)
    torch.testing.assert_close(second.to_dense(), first.to_dense())


# ---- files of 0.1.0 ------------------------------------------------------------------------------

OLD = Path(__file__).parent / "data" / "saved_by_0.1.0"


def dense_model() -> nn.Module:
    layers = (
        nn.Embedding(6, 16),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.Linear(16, 16),
        nn.Linear(16, 6, bias=False),
    )
    layers[4].weight = layers[0].weight
    return nn.Sequential(*layers).eval()


def test_files_of_the_first_version_are_loaded():
    model = load(dense_model(), OLD)
    assert [type(layer) for layer in model[1:4:2]] == [StructuredLinear] * 2
    assert model[4].weight is model[0].weight
    torch.testing.assert_close(
        model(torch.arange(6)), torch.tensor(json.loads((OLD / "outputs.json").read_text()))
    )


def test_what_the_first_version_did_not_compare_is_compared():
    other = convert(dense_model(), BTT(), include="1", weight_norm=True)
    convert(other, LowRank(rank=3), include="3", weight_norm=True, zero_init="3")
    before = snapshot(other)
    with pytest.raises(ValueError, match="'1': computes with"):
        load(other, OLD)
    assert snapshot(other) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: (p / "model.safetensors").unlink(),
            "has no model.safetensors, which structlin.json tells of",
        ),
        (lambda p: (p / "structlin.json").write_text("{}"), "no manifest of structlin"),
        (lambda p: (p / "structlin.json").write_bytes(b"\xff\xfe\x00"), "no manifest of structlin"),
        (
            lambda p: (p / "structlin.json").write_text((OLD / "structlin.json").read_text()[:500]),
            "is truncated",
        ),
        (
            lambda p: (p / "structlin.json").write_text(
                '{"a' + (OLD / "structlin.json").read_text()[2:]
            ),
            "no manifest",
        ),
        (lambda p: (p / "model.safetensors").write_bytes(b"abc"), "truncated or edited"),
    ],
)
def test_a_damaged_file_of_the_first_version_is_an_error(tmp_path, damage, message):
    folder = tmp_path / "m"
    shutil.copytree(OLD, folder)
    damage(folder)
    model = dense_model()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load(model, folder)
    assert snapshot(model) == before


def test_saving_over_a_file_of_the_first_version_replaces_what_is_loaded(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(OLD, folder)
    model = load(dense_model(), folder)
    with torch.no_grad():
        model[1].bias.add_(1)
    save(model, folder)
    assert torch.equal(load(dense_model(), folder)[1].bias, model[1].bias)


# ---- the entry and torch's own ways of saving ----------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda model: model, torch.compile, torch.optim.swa_utils.AveragedModel]
)
def test_distributed_checkpoints_name_what_they_can_set_again(wrap):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler and its sharded tensors
        model = wrap(convert(nn.Sequential(nn.Linear(16, 16)), BTT()))
        state = get_model_state_dict(model)
        assert not set_model_state_dict(model, dict(state)).unexpected_keys
    model.load_state_dict(model.state_dict())


def test_a_layer_without_values_has_parameters_alone_in_its_state():
    with torch.device("meta"):
        layer = StructuredLinear(16, 16, BTT())
    assert set(layer.state_dict()) == {name for name, _ in layer.named_parameters()}
    full = StructuredLinear(16, 16, BTT())
    layer.load_state_dict(full.state_dict(), assign=True)
    assert torch.equal(layer.to_dense(), full.to_dense())
