"""What the walk says of each parameter, against integers written by hand."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize, prune

from structlin import BTT, LowRank, StructuredLinear, convert
from structlin._model.parameters import Weight, parameters_of, weights_of
from tests.models import GPT

LOWRANK = StructuredLinear(16, 64, LowRank(rank=3))
SPATIAL = {"g": 4, "k1": 3, "k2": 3}


def described(model):
    return {info.name: info for info in parameters_of(model)}


@pytest.mark.parametrize(
    ("module", "name", "weight"),
    [
        (nn.Linear(6, 10), "weight", Weight("matrix", 10, 6)),
        (nn.Linear(6, 10), "bias", Weight()),
        (
            nn.Conv2d(8, 12, 3, groups=4),
            "weight",
            Weight("matrix", 3, 2, "(g m) n k1 k2", SPATIAL),
        ),
        (
            nn.ConvTranspose1d(8, 12, 5, groups=2),
            "weight",
            Weight("matrix", 6, 4, "(g n) m k1", {"g": 2, "k1": 5}),
        ),
        (
            nn.MultiheadAttention(8, 2),
            "in_proj_weight",
            Weight("matrix", 8, 8, "(g m) n", {"g": 3}),
        ),
        (nn.MultiheadAttention(8, 2), "out_proj.weight", Weight("matrix", 8, 8)),
        (nn.MultiheadAttention(8, 2, kdim=4), "k_proj_weight", Weight("matrix", 8, 4)),
        (nn.Embedding(50, 16), "weight", Weight("embedding", 16, stored="g m")),
        (nn.LayerNorm(8), "weight", Weight()),
        (
            StructuredLinear(16, 64, LowRank(rank=3)),
            "cores.0",
            Weight("matrix", 3, 16, "g m n", core=0),
        ),
        (
            StructuredLinear(16, 64, LowRank(rank=3)),
            "cores.1",
            Weight("matrix", 64, 3, "g m n", core=1),
        ),
        (StructuredLinear(16, 64, weight_norm=True), "gains", Weight("gain")),
        (nn.ParameterList([torch.ones(3, 3)]), "0", Weight()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_parameter_is_what_its_module_multiplies_by(module, name, weight):
    assert described(module)[name].weight == weight


@pytest.mark.parametrize(
    ("module", "name", "whole"),
    [
        (LOWRANK, "cores.0", True),
        (nn.Embedding(50, 16), "weight", True),
        (nn.Linear(6, 10), "weight", False),
        (nn.Conv2d(8, 12, 3, groups=4), "weight", False),
        (nn.MultiheadAttention(8, 2), "in_proj_weight", False),
    ],
    ids=["core", "embedding", "linear", "convolution", "attention"],
)
def test_parts_of_dimension_0_are_whole_matrices_of_cores_and_vectors_alone(module, name, whole):
    assert described(module)[name].weight.is_in_blocks == whole


def test_conv1d_of_transformers_is_stored_transposed():
    owner = pytest.importorskip("transformers.pytorch_utils")
    found = described(owner.Conv1D(24, 6))["weight"].weight  # 6 -> 24
    assert found == Weight("matrix", 24, 6, "n m")


def test_every_parameter_comes_once_and_a_tied_one_is_what_it_is_first():
    model = convert(GPT(tied=True), BTT(), include="ffn", weight_norm=True)
    infos = list(parameters_of(model))
    assert {info.parameter for info in infos} == set(model.parameters())
    assert len(infos) == len(list(model.parameters()))
    assert described(model)["wte.weight"].weight.kind == "embedding"
    assert "lm_head.weight" not in described(model)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        nn.DataParallel,
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
        checkpoint_wrapper,
    ],
    ids=["compile", "DataParallel", "both", "checkpoint"],
)
def test_wrappers_leave_no_trace_in_names_and_declarations(wrap):
    model = convert(GPT(depth=1), BTT(), include="ffn")
    model.no_weight_decay = lambda: {"wte.weight"}
    plain = {name: (info.layer, info.decays) for name, info in described(model).items()}
    model.h[0].mlp = wrap(model.h[0].mlp)
    wrapped = {name: (info.layer, info.decays) for name, info in described(wrap(model)).items()}
    assert wrapped == plain
    assert not plain["wte.weight"][1]


def test_an_ordinary_child_called_module_keeps_its_name():
    assert set(described(nn.ModuleDict({"module": nn.Linear(3, 3, bias=False)}))) == {
        "module.weight"
    }


def test_a_parametrised_or_pruned_weight_is_what_the_layer_takes_it_for():
    model = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 6), StructuredLinear(16, 16)])
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    prune.l1_unstructured(model[1], "weight", 0.5)
    parametrize.register_parametrization(model[2].cores, "1", nn.Identity())
    found = described(model)
    assert found["0.parametrizations.weight.original"].weight == Weight("matrix", 6, 4)
    assert found["1.weight_orig"].weight == Weight("matrix", 6, 4)
    assert found["2.cores.parametrizations.1.original"].weight.core == 1
    assert found["2.cores.parametrizations.1.original"].dense_name == "2.weight"
    assert {info.parameter for info in found.values()} == set(model.parameters())


def test_a_layer_whose_weight_is_no_parameter_still_says_what_it_multiplies_by():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    assert weights_of(layer) == {"weight": Weight("matrix", 6, 4)}
    assert {info.weight.kind for info in parameters_of(layer)} == {"other"}


def test_matrices_and_embeddings_decay_and_what_any_module_declares_does_not():
    model = nn.ModuleDict(
        {"a": convert(GPT(depth=1), BTT(), include="ffn"), "norm": nn.LayerNorm((2, 2))}
    )
    model["a"].position = nn.Parameter(torch.ones(4, 64))
    model["a"].no_weight_decay = lambda: {
        "position",
        "h.0.mlp.c_fc.weight",
        "h.0.mlp.c_proj.cores.1",
    }
    decays = {name for name, info in described(model).items() if info.decays}
    assert decays == {
        "a.wte.weight",
        "a.h.0.attn.c_attn.weight",
        "a.h.0.attn.c_proj.weight",
        "a.h.0.mlp.c_proj.cores.0",
        "a.lm_head.weight",
    }


def test_biases_of_more_than_one_dimension_do_not_decay():
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    assert attention.bias_k.ndim == 3
    layer = nn.Module()
    layer.bias = nn.Parameter(torch.ones(2, 2))
    layer.gate_up_proj_bias = nn.Parameter(torch.ones(4, 6))  # transformers' GptOssExperts
    layer.mlp1_bias_EG = nn.Parameter(torch.ones(4, 6))  # torchtitan's
    found = described(nn.ModuleDict({"a": attention, "b": layer}))
    assert {name for name, info in found.items() if info.decays} == {
        "a.in_proj_weight",
        "a.out_proj.weight",
    }
