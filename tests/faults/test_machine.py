"""A model's life in any order: model, state dict, optimizer and file agree after each step."""

import copy
import shutil
import tempfile
from math import sqrt

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor, nn
from torch.nn.utils import parametrize

pytest.importorskip("safetensors")

import structlin
from structlin import BTT, BlockDiagonal, Kronecker, Monarch, StructuredLinear
from tests.catalogue import einsum_matrix
from tests.faults.common import FACTOR

NAMES = ("a", "b", "c")
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.3}
STRUCTURES = [BTT(), BTT(rank=2), Kronecker(), Monarch(blocks=2), BlockDiagonal(blocks=4)]
STEPS: dict[str, int] = {}


class Net(nn.Module):
    """Linear layers, one of them under two names, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.again = self.a
        self.norm = nn.BatchNorm1d(20)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.c(self.norm(self.b(self.a(x)))))


def tell_matrix(state: dict[str, Tensor], name: str, layer: nn.Module) -> Tensor:
    """The matrix of a layer from the state alone; with gains, cores are scaled as CBS 5.1 says."""
    if not isinstance(layer, StructuredLinear):
        return state[f"{name}.weight"].double()
    cores = []
    for n, core in enumerate(layer.structure.cores):
        value = state[f"{name}.cores.{n}"].double()
        if f"{name}.gains" in state:
            sigma = sqrt(min(core.fan_in, core.fan_out)) / core.fan_in
            rms = value.square().mean().sqrt()
            value = state[f"{name}.gains"][n].double() * min(1.0, sigma / rms.item()) * value
        cores.append(value)
    return einsum_matrix(layer.structure, cores)[: layer.out_features, : layer.in_features]


def tell_output(model: Net, x: Tensor) -> Tensor:
    state = model.state_dict()

    def apply(name: str, h: Tensor) -> Tensor:
        matrix = tell_matrix(state, name, model.get_submodule(name))
        return h @ matrix.mT + state[f"{name}.bias"].double()

    h = apply("b", apply("a", x))
    norm = {
        key: state[f"norm.{key}"].double()
        for key in ("running_mean", "running_var", "weight", "bias")
    }
    h = (h - norm["running_mean"]) / (norm["running_var"] + 1e-5).sqrt() * norm["weight"] + norm[
        "bias"
    ]
    return apply("again", apply("c", h))


def kinds(model: Net) -> dict[str, str]:
    """What each layer is: empty for a dense one."""
    layers = {name: model.get_submodule(name) for name in NAMES}
    return {
        name: str(layer.computes_with()) if isinstance(layer, StructuredLinear) else ""
        for name, layer in layers.items()
    }


def ids(model: nn.Module) -> list[int]:
    return [id(parameter) for parameter in model.parameters()]


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.folder = Net().double().eval(), tempfile.mkdtemp()
        self.optimizer: torch.optim.Optimizer | None = None
        self.saved: tuple[dict[str, Tensor], dict[str, str], torch.dtype] | None = None
        self.x = torch.randn(3, 12, dtype=torch.float64)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.a.bias.dtype

    def structured(self) -> bool:
        return any(kinds(self.model).values())

    @precondition(lambda self: not all(kinds(self.model).values()))
    @rule(
        structure=st.sampled_from(STRUCTURES),
        name=st.sampled_from(NAMES),
        init=st.sampled_from(["mup", "project"]),
        weight_norm=st.booleans(),
    )
    def convert(self, structure, name, init, weight_norm):
        dense = [own for own, kind in kinds(self.model).items() if not kind]
        name = name if name in dense else dense[0]
        structlin.convert(self.model, structure, include=name, init=init, weight_norm=weight_norm)
        assert kinds(self.model)[name]
        self.optimizer = None

    @precondition(lambda self: any(p.requires_grad for p in self.model.parameters()))
    @rule()
    def train(self):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer.zero_grad()
        self.model(self.x.to(self.dtype)).square().mean().backward()
        self.optimizer.step()
        for old, parameter in zip(before, self.model.parameters(), strict=True):
            moved = not torch.equal(old, parameter)
            assert not (moved and not parameter.requires_grad)
            if self.dtype == torch.float64 and parameter.requires_grad:
                assert moved == bool(parameter.grad.any())

    @rule()
    def save(self):
        structlin.save(self.model, self.folder)
        self.saved = copy.deepcopy(self.model.state_dict()), kinds(self.model), self.dtype

    @precondition(lambda self: self.saved)
    @rule()
    def load(self):
        state, saved, dtype = self.saved
        now, held = kinds(self.model), ids(self.model)
        same = (now, self.dtype) == (saved, dtype)
        if any(now[name] and now[name] != saved[name] for name in NAMES):
            before = copy.deepcopy(self.model.state_dict())
            with pytest.raises(ValueError, match="the model differs from what was saved"):
                structlin.load(self.model, self.folder)
            self.compare(self.model, before)
            assert ids(self.model) == held
            return
        structlin.load(self.model, self.folder)
        self.compare(self.model, state)
        if same:
            assert ids(self.model) == held
        if ids(self.model) != held:
            self.optimizer = None

    @precondition(lambda self: self.saved)
    @rule()
    def load_into_a_new_model(self):
        self.compare(structlin.load(Net(), self.folder), self.saved[0])

    @precondition(structured)
    @rule()
    def to_dense(self):
        structlin.densify(self.model)
        assert not self.structured()
        self.optimizer = None

    @precondition(structured)
    @rule(name=st.sampled_from(NAMES), first=st.booleans())
    def parametrise_and_remove(self, name, first):
        layer = self.model.get_submodule(name)
        if isinstance(layer, StructuredLinear):
            core = str(0 if first else len(layer.structure.cores) - 1)
            parametrize.register_parametrization(layer.cores, core, nn.Identity())
            parametrize.remove_parametrizations(layer.cores, core)
            self.optimizer = None

    @rule(dtype=st.sampled_from(list(BOUNDS)))
    def change_dtype(self, dtype):
        self.model.to(dtype)

    @rule()
    def move(self):
        state = copy.deepcopy(self.model.state_dict())
        self.model.to("meta").to_empty(device="cpu").load_state_dict(state)
        self.optimizer = None

    @rule(name=st.sampled_from(NAMES), trains=st.booleans())
    def freeze(self, name, trains):
        self.model.get_submodule(name).requires_grad_(trains)

    @rule()
    def copy(self):
        self.model, self.optimizer = copy.deepcopy(self.model), None

    @rule()
    def state_to_a_twin(self):
        twin = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        twin.load_state_dict(self.model.state_dict())
        self.compare(twin, self.model.state_dict())

    def compare(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        own = model.state_dict()
        assert own.keys() == state.keys()
        assert all(
            torch.equal(own[name], state[name]) and own[name].dtype == state[name].dtype
            for name in own
        )

    @invariant()
    def the_model_multiplies_by_what_its_state_tells(self):
        with torch.no_grad():
            y, told = self.model(self.x.to(self.dtype)).double(), tell_output(self.model, self.x)
        bound = BOUNDS[self.dtype]
        torch.testing.assert_close(
            y, told, atol=bound * max(1.0, told.abs().max().item()), rtol=bound
        )

    @invariant()
    def what_was_shared_is_shared(self):
        assert self.model.again is self.model.a

    @invariant()
    def the_optimizer_holds_the_models_parameters(self):
        STEPS["steps"] = STEPS.get("steps", 0) + 1
        if self.optimizer is not None:
            held = [
                id(parameter)
                for group in self.optimizer.param_groups
                for parameter in group["params"]
            ]
            assert held == ids(self.model)


Life.TestCase.settings = settings(max_examples=12 * FACTOR, stateful_step_count=20, deadline=None)


class TestLife(Life.TestCase):
    def teardown_method(self, method):
        print(f"{STEPS['steps']} steps")
