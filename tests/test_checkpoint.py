"""Files of converted models: bit-equal, strict, whole or refused."""

import copy
import errno
import json
import os
import stat
import warnings

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
    Structure,
    StructuredLinear,
    convert,
    load,
    plan,
    save,
)
from structlin._model.files import FILE
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
    with safetensors.safe_open(folder / FILE, "pt") as file:
        return json.loads(file.metadata()["structlin"])


@pytest.fixture
def saved(tmp_path):
    model = mixed()
    save(model, tmp_path / "m")
    return model, tmp_path / "m"


def test_a_model_comes_back_bit_equal_into_a_dense_one(saved):
    model, path = saved
    fresh, random = GPT(), torch.get_rng_state()
    kept = {id(value) for name, value in fresh.named_parameters() if ".c_" not in name}
    assert load(fresh, path) is fresh
    assert kept <= {id(parameter) for parameter in fresh.parameters()}
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(fresh(TOKENS), model(TOKENS))
    with torch.device("meta"):
        empty = GPT()
    assert torch.equal(load(empty, path)(TOKENS), model(TOKENS))
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear):
            other = fresh.get_submodule(name)
            kept = layer.structure, layer.label, layer.stds
            assert (other.structure, other.label, other.stds) == kept
    again = path / "on" / "the" / "way"
    for _ in range(2):  # into a folder that is not there, and into one that is
        save(fresh, again)
        assert (again / FILE).read_bytes() == (path / FILE).read_bytes()
    assert [file.name for file in again.iterdir()] == [FILE]
    assert description(path)["modules"].keys() == {
        name for name, module in model.named_modules() if isinstance(module, StructuredLinear)
    }
    (path / FILE).write_bytes(b"")
    assert torch.equal(fresh(TOKENS), model(TOKENS))


def test_attributes_that_somebody_has_set_on_a_layer_are_there_after_loading(tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 16)
            self.up.scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x) * self.up.scale

    model = convert(Scaled(), LowRank(rank=2))
    save(model, tmp_path)
    x = torch.randn(3, 16)
    assert torch.equal(load(Scaled(), tmp_path)(x), model(x))


def test_frozen_parameters_and_training_mode_are_the_models_own(saved):
    _, path = saved
    fresh = GPT().eval()
    fresh.h[0].mlp.c_fc.requires_grad_(False)
    load(fresh, path)
    assert not any(p.requires_grad for p in fresh.h[0].mlp.c_fc.cores)
    assert all(p.requires_grad for p in fresh.h[1].mlp.c_fc.parameters())
    assert not any(module.training for module in fresh.modules())


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    tied = mixed(tied=True)
    for model in (tied, copy.deepcopy(tied).bfloat16(), copy.deepcopy(tied).double()):
        save(model, tmp_path)
        assert description(tmp_path)["aliases"] == {"lm_head.weight": "wte.weight"}
        fresh = load(GPT(tied=True), tmp_path)
        assert fresh.lm_head.weight is fresh.wte.weight
        assert {x.dtype for x in fresh.parameters()} == {model.wte.weight.dtype}
        assert torch.equal(fresh(TOKENS), model(TOKENS))
        untied = load(GPT(), tmp_path)
        assert torch.equal(untied(TOKENS), model(TOKENS))


def test_a_model_that_is_one_layer_comes_back_as_a_new_layer(tmp_path):
    layer = convert(nn.Linear(16, 16), Kronecker())
    save(layer, tmp_path)
    assert torch.equal(load(nn.Linear(16, 16), tmp_path).to_dense(), layer.to_dense())


def test_views_into_one_storage_are_stored_as_what_they_are(tmp_path):
    def build():
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))

    model, base = build(), torch.randn(8, 4)
    alone = torch.randn(4, 4).mT  # in its storage, and turned
    for layer, view in zip(model, (base[:4], base[4:].mT, alone), strict=True):
        layer.weight = nn.Parameter(view)
    save(model, tmp_path)
    fresh = load(build(), tmp_path)
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: GPT(depth=1), r"'h\.1\.attn\.c_proj': the model has no such linear layer"),
        (lambda: GPT(depth=3), r"path=.*Missing key\(s\) in state_dict: \"h\.2\.ln_1\.weight\""),
        (lambda: GPT(width=32), r"'h\.0\.attn\.c_attn': 32 -> 96 in the model, 64 -> 192 in the"),
        (
            lambda: GPT(vocabulary=51),
            r"path=.*size mismatch for wte\.weight: .*\[50, 64\]\) .*\[51, 64\]\)",
        ),
        (lambda: convert(GPT(), BTT(rank=3)), r"is BTT\(rank=3\) in the model, BTT\(rank=2\) in "),
        (
            lambda: convert(GPT(), BTT(rank=2), include="*c_attn"),
            r"'h\.1\.attn\.c_attn' is structured in the model",
        ),
        (lambda: nn.Linear(64, 64), "the model has no such linear layer"),
        (lambda: GPT(tied=True), r"'wte\.weight' and 'lm_head\.weight' are tied .* and differ"),
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
        (lambda p: p.write_bytes(p.read_bytes().replace(rb"n\":1", rb"n\":2")), "has version 2; t"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"aliases", b"aliased")), "no file of st"),
        (lambda p: (p.unlink(), p.symlink_to("/dev/zero")), "has no structlin.safetensors"),
        (lambda p: (p.unlink(), os.mkfifo(p)), "has no structlin.safetensors"),
        (lambda p: (p.unlink(), p.mkdir()), "has no structlin.safetensors"),
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
    works, done = getattr(owner, fails), []

    def fail(*arguments, **options):
        if fails == "save_file":
            works(*arguments, **options)  # what was written until then lies there
        assert fails != "replace" or done  # it is on the disk before it is renamed
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", done.append)
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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 3, device="meta"), "'weight' is on the meta device"),
        (nn.ParameterDict({"a": nn.Parameter(torch.eye(3).to_sparse())}), "no plain tensor"),
        (nn.Linear(3, 3), "is a file"),
    ],
)
def test_what_cannot_be_saved_writes_nothing(model, message, tmp_path):
    if "file" in message:
        (tmp_path / "m").touch()
    with pytest.raises(ValueError, match=message):
        save(model, tmp_path / "m")
    assert not (tmp_path / "m").is_dir()


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
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert [id(parameter) for parameter in other.parameters()] == before
    other(TOKENS).sum().backward()
    optimizer.step()
    assert seen
    assert not torch.equal(other(TOKENS), model(TOKENS))


class Shared(nn.Module):
    """A buffer and a module under two names, and a hook of the user's that may lose a key."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.loses = nn.Linear(8, 8), nn.BatchNorm1d(8), False
        self.same, self.again = self.a, self.norm
        self.register_buffer("mask", torch.zeros(3))
        self.register_buffer("same_mask", self.mask)
        self.register_load_state_dict_pre_hook(self._lose)

    @staticmethod
    def _lose(module, state, *_) -> None:
        if module.loses:
            state.pop("mask")


def test_what_has_two_names_is_loaded_and_stays_one(tmp_path):
    model = convert(Shared(), BTT())
    model.mask.copy_(torch.arange(3.0))
    model.norm(torch.randn(4, 8))
    save(model, tmp_path)
    fresh = load(Shared(), tmp_path)
    assert fresh.mask is fresh.same_mask
    assert fresh.again is fresh.norm
    assert fresh.same is fresh.a
    assert torch.equal(fresh.a.to_dense(), model.a.to_dense())
    assert torch.equal(fresh.mask, model.mask)
    assert torch.equal(fresh.norm.running_mean, model.norm.running_mean)


def look(model: nn.Module) -> list[tuple[str, int, object]]:
    state = model.state_dict(keep_vars=True)
    return [(x, id(t), None if t.is_meta else t.tolist()) for x, t in state.items()]


@pytest.mark.parametrize("change", [nn.Module.float, nn.Module.double, lambda m: m.to("meta")])
@pytest.mark.parametrize("prepare", [lambda m: m, lambda m: convert(m, BTT())])
def test_an_error_in_the_models_own_hook_leaves_it_as_it_was(prepare, change, tmp_path):
    save(convert(Shared(), BTT()), tmp_path)
    other = change(prepare(Shared()))
    other.loses = True
    before = look(other)
    with pytest.raises(ValueError, match=r'Missing key.*"mask"'):
        load(other, tmp_path)
    assert look(other) == before


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
        with pytest.raises(RuntimeError, match=r"'0': .*=.* in the model, .* in the state"):
            other.load_state_dict(model.state_dict(), strict=strict)


@pytest.mark.parametrize("strict", [True, False])
def test_a_structured_layer_refuses_a_dense_state(strict):
    dense, structured = nn.Linear(16, 16), StructuredLinear(16, 16, BTT())
    text = r"'weight': a dense weight of shape \(16, 16\) for a structured layer"
    with pytest.raises(RuntimeError, match=text):
        structured.load_state_dict(dense.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match="Missing key"):
        dense.load_state_dict(structured.state_dict())


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
            message = r"'0': structure\.\w+=.* in the model, .* in the state"
            with pytest.raises(RuntimeError, match=message):
                other.load_state_dict(state, strict=strict)
    else:
        other.load_state_dict(state)  # names and shapes are all that is left
        assert snapshot(other) != before


def test_wrappers_of_torch_keep_what_a_state_dict_says():
    first, other = build_pair()
    for wrap in (torch.compile, torch.optim.swa_utils.AveragedModel, nn.DataParallel):
        wrap(build_pair()[0]).load_state_dict(wrap(first).state_dict())
        with pytest.raises(RuntimeError, match=r"0': structure\.\w+=.* in the model"):
            wrap(other).load_state_dict(wrap(first).state_dict())


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


def test_load_takes_the_file_for_its_folder_and_says_when_neither_exists(saved):
    model, path = saved
    assert torch.equal(load(GPT(), path / FILE)(TOKENS), model(TOKENS))
    with pytest.raises(ValueError, match="path='no_folder' does not exist"):
        load(GPT(), "no_folder")
