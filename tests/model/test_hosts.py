"""Other libraries: each is one file, and everything that reads a model asks the registry."""

import pytest
import torch
from torch import nn

from structlin import BTT, LowRank, convert, plan
from structlin._compress.padding import find_masks
from structlin._hosts import registry
from structlin._hosts.host import Host
from structlin._model.kinds import role_of
from structlin._model.linears import find_declared_heads
from structlin._model.parameters import parameters_of


class LoudLinear(nn.Linear):
    """A library's own linear layer."""


class Bank(nn.Module):
    """A library's own experts."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 8, 16))  # 16 -> 8

    def forward(self, x):
        return x


class Settings:
    structured = False


class Model(nn.Module):
    """A model of that library."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.winding = LoudLinear(16, 16)
        self.spout = nn.Linear(16, 16)
        self.bank = Bank()

    def get_spout(self):
        return self.spout

    def forward(self, x, keep_mask=None, fast=True):
        return self.spout(self.bank(self.winding(x)))


class SmallHost(Host):
    roles = (("attention", r"winding"),)
    plain_linears = (f"{__name__}.LoudLinear",)
    head_methods = ("get_spout",)
    padding_masks = {"keep_mask": True}  # noqa: RUF012

    def layouts_of(self, module):
        return {"stack": "e m n"} if isinstance(module, Bank) else {}

    def configs_of(self, module):
        return [module.settings] if isinstance(module, Model) else []

    def source_of(self, model):
        return "a file" if isinstance(model, Model) else ""

    def find_declare(self, model, load):
        return self.declare if isinstance(model, Model) else None

    def declare(self, model):
        model.settings.structured = True

    def find_options(self, model, arguments):
        return {} if "fast" in arguments else {"fast": False}


@pytest.fixture
def small_host(monkeypatch):
    monkeypatch.setattr(registry, "HOSTS", (*registry.HOSTS, SmallHost()))


def decision_of(model, name):
    (found,) = [each for each in plan(model, BTT()).decisions if each.layer.name == name]
    return found


def test_without_its_host_a_librarys_own_linear_layer_stays_as_it_is():
    assert decision_of(Model(), "winding").reason.startswith("is a LoudLinear")


def test_one_class_in_the_registry_is_all_that_a_library_needs(small_host):
    model = Model()
    assert role_of("winding") == "attention"
    assert find_declared_heads(model) == {model.spout}
    assert decision_of(model, "winding").reason == ""
    assert decision_of(model, "spout").reason.startswith("head")
    stack = next(info for info in parameters_of(model) if info.name == "bank.stack")
    assert (stack.weight.kind, stack.weight.fan_out, stack.weight.fan_in) == ("matrix", 8, 16)
    mask = torch.tensor([[True, False]])
    (found,) = find_masks(model, (torch.randn(1, 2, 16),), {"keep_mask": mask})
    assert torch.equal(found, mask)
    assert registry.call_options(model, ["x"]) == {"fast": False}
    assert registry.call_options(model, ["x", "fast"]) == {}


def test_a_host_is_told_what_is_structured_and_its_config_comes_back_after_an_error(small_host):
    model = Model()
    told = pytest.warns(UserWarning, match="loaded from 'a file'")
    with pytest.warns(UserWarning, match="left dense"), told:
        convert(model, LowRank(rank=2))
    assert model.settings.structured

    class Refusing(Model):
        def get_spout(self):
            return None

    def refuse(changed):
        changed.settings.structured = True
        raise RuntimeError("no")

    model = Refusing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry.HOSTS[-1], "declare", refuse, raising=False)
        with pytest.raises(RuntimeError, match="no"):
            plan(model, LowRank(rank=2)).apply()
    assert not model.settings.structured
    assert isinstance(model.winding, LoudLinear)


class FluxBlock(nn.Module):
    """The names and relative sizes of diffusers' FluxSingleTransformerBlock."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_mlp = nn.Linear(16, 64)
        self.proj_out = nn.Linear(80, 16)


class Flux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single_transformer_blocks = nn.ModuleList([FluxBlock()])
        self.proj_out = nn.Linear(16, 4)


def test_the_largest_layer_of_flux_is_no_head_and_the_layer_that_ends_the_model_is():
    model = Flux()
    large = decision_of(model, "single_transformer_blocks.0.proj_out")
    assert (large.layer.role, large.reason) == ("ffn", "")
    assert decision_of(model, "proj_out").layer.role == "head"
    assert role_of("transformer_blocks.3.ff.net.0.proj") == "ffn"
    assert role_of("transformer_blocks.3.ff_context.net.2") == "ffn"
