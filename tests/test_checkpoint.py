"""Files of converted models: bit-equal, strict, whole or refused."""

import copy
import errno
import importlib.util
import json
import os
import stat
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
        "h.1.mlp.c_proj": LowRank(rank=5).activate(),
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
        (lambda: GPT(depth=3), r"path=.*Missing key\(s\) in state_dict: \"h\.2\.ln_1\.weight\""),
        (
            lambda: GPT(width=32),
            r"'h\.0\.attn\.c_attn': 32 -> 96 in the model, 64 -> 192 in the file",
        ),
        (
            lambda: GPT(vocabulary=51),
            r"path=.*size mismatch for wte\.weight: .*\[50, 64\]\) .*\[51, 64\]\)",
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
    with pytest.raises(ValueError, match=f"(?s){message}"):
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
        (lambda p: p.write_bytes(p.read_bytes()[:500]), "is truncated"),
        (lambda p: p.write_bytes(b""), "no file of structlin.save"),
        (lambda p: p.write_bytes(b"[]"), "no file of structlin.save"),
        (lambda p: p.write_bytes(b"\xff" * 99), "no file of structlin.save"),
        (lambda p: save_file({"a": torch.ones(2)}, p), "no file of structlin.save"),
        (lambda p: torch.save({}, p), "no file of structlin.save"),
        *(
            (lambda p, v=v: _rewrite(p, lambda d: d.update(version=v)), f"has version {v!r}; this")
            for v in (0, 99, -5, "1", None)
        ),
        *(
            (lambda p, k=k: _rewrite(p, lambda d: d.pop(k)), "no file of structlin.save")
            for k in ("version", "modules", "aliases")
        ),
        (_link_to_zeros, "no regular file"),
        (_make_pipe, "no regular file"),
        (lambda p: (p.unlink(), p.mkdir()), "no regular file"),
        (lambda p: p.write_bytes(p.read_bytes()[:-8]), "is truncated"),
    ],
)
def test_a_truncated_or_malformed_file_is_an_error(saved, damage, message):
    _, path = saved
    damage(path / FILE)
    model = GPT()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load(model, path)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("owner", "fails"),
    [(safetensors.torch, "save_file"), (os, "fsync"), (os, "replace")],
    ids=["the numbers", "flushing", "renaming"],
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


def test_a_save_removes_what_killed_savers_left_and_not_what_others_are_writing(tmp_path):
    old, young = (tmp_path / f".{FILE}-{name}" for name in ("old", "young"))
    for file in (old, young):
        file.write_bytes(b"begun")
    os.utime(old, (0, 0))
    save(nn.Linear(3, 3), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {FILE, young.name}


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


def test_the_file_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("file"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), replace(*names)))
    save(nn.Linear(3, 3), tmp_path)
    assert done == ["file", "rename"]


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
    "the activation": (BTT(rank=2).activate(), FIRST),
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
            match=r"'0': .*=.* in the model, .* in the state",
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
    with pytest.raises(ValueError, match=r"sigma=.* in the model, .* in the file"):
        load(low_rank(zero_init="0"), tmp_path)
    with pytest.raises(RuntimeError, match=r"sigma=.* in the model, .* in the state"):
        low_rank(zero_init="0").load_state_dict(model.state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_a_structured_layer_refuses_a_dense_state(strict):
    dense, structured = nn.Linear(16, 16), StructuredLinear(16, 16, BTT())
    with pytest.raises(
        RuntimeError, match=r"'weight': a dense weight of shape \(16, 16\) for a structured layer"
    ):
        structured.load_state_dict(dense.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match="Missing key"):
        dense.load_state_dict(structured.state_dict())


def test_padding_is_part_of_what_is_compared():
    big, small = (
        StructuredLinear(97, width, BTT().structure(97, 101), bias=False) for width in (101, 100)
    )
    with pytest.raises(RuntimeError, match=r"out_features=100 in the model, 101 in the state"):
        small.load_state_dict(big.state_dict())


# ---- the state dict and torch's own tools --------------------------------------------------------

STRUCTURES = (  # of the same core shapes
    Structure("g d -> b a", "g s b d", "b a g s", g=4, d=4, s=2, b=4, a=4),
    Structure("g d -> a b", "g s b d", "b a g s", g=4, d=4, s=2, b=4, a=4),
)


def build_pair(**options) -> list[nn.Module]:
    return [
        convert(nn.Sequential(nn.Linear(16, 16)), structure, **options) for structure in STRUCTURES
    ]


def through_a_file(state, path):
    torch.save(state, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True)


WAYS = {  # that a state dict goes, and whether it still says what its layers compute with
    "as it is": (lambda state, path: state, True),
    "deepcopy": (lambda state, path: copy.deepcopy(state), True),
    "torch.save": (through_a_file, True),
    "dict": (lambda state, path: dict(state), False),
}


@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_dict_has_parameters_alone_and_says_what_its_layers_compute_with(
    way, weight_norm, tmp_path
):
    first, other = build_pair(weight_norm=weight_norm)
    assert first.state_dict().keys() == dict(first.named_parameters()).keys()
    go, says = WAYS[way]
    state = go(first.state_dict(), tmp_path)
    twin = build_pair(weight_norm=weight_norm)[0]
    twin.load_state_dict(state)
    assert torch.equal(twin[0].to_dense(), first[0].to_dense())
    before = snapshot(other)
    if says:
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=r"'0': structure=.* in the model, .* in the st"):
                other.load_state_dict(state, strict=strict)
    else:
        other.load_state_dict(state)  # names and shapes are all that is left
        assert snapshot(other) != before


def test_wrappers_of_torch_keep_what_a_state_dict_says():
    first, other = build_pair()
    wraps = (torch.compile, torch.optim.swa_utils.AveragedModel, nn.DataParallel)
    for wrap in wraps:
        wrap(build_pair()[0]).load_state_dict(wrap(first).state_dict())
        with pytest.raises(RuntimeError, match=r"0': structure=.* in the model"):
            wrap(other).load_state_dict(wrap(first).state_dict())


def test_a_state_dict_is_what_functional_call_takes():
    first = build_pair(weight_norm=True)[0]
    x, state = torch.randn(3, 16), first.state_dict()
    assert torch.equal(torch.func.functional_call(first, state, x), first(x))
    doubled = {name: 2 * value for name, value in state.items()}
    assert not torch.equal(torch.func.functional_call(first, doubled, x), first(x))


def test_averages_of_states_are_states():
    first, second = (build_pair(weight_norm=True)[0] for _ in range(2))
    one, two = first.state_dict(), second.state_dict()
    average = {name: (one[name] + two[name]) / 2 for name in one}
    mean = build_pair(weight_norm=True)[0]
    mean.load_state_dict(average)
    torch.testing.assert_close(mean[0].cores[0], (first[0].cores[0] + second[0].cores[0]) / 2)


@pytest.mark.parametrize("kind", ["ModelEmaV2", "ModelEmaV3"])
def test_timms_average_follows_the_model_and_gives_its_state_back(kind):
    spec = importlib.util.find_spec("timm")
    if spec is None:
        pytest.skip("timm is not installed")
    file = Path(spec.submodule_search_locations[0]) / "utils" / "model_ema.py"
    spec = importlib.util.spec_from_file_location("model_ema", file)  # without torchvision
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    model = build_pair(weight_norm=True)[0]
    average = getattr(utils, kind)(model, decay=0.5)
    start = model[0].cores[0].detach().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    average.update(model)
    torch.testing.assert_close(average.module[0].cores[0], start + 0.5)
    model.load_state_dict(average.module.state_dict())
    torch.testing.assert_close(model[0].cores[0].detach(), start + 0.5)


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
