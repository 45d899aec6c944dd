"""What Muon and SOAP say of who steps how: the table they print, and the warning of names."""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

from structlin import BTT, LowRank, StructuredLinear, convert
from structlin.optim import SOAP, Muon
from tests.models import GPT


def linear(m, n):
    return nn.Linear(m, n, bias=False)


class SwiGLU(nn.Module):
    def __init__(self, layer=linear):
        super().__init__()
        self.gate, self.up, self.down = layer(16, 32), layer(16, 32), layer(32, 16)


class MoE(nn.Module):
    def __init__(self, experts=8):
        super().__init__()
        self.gate = linear(16, experts)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": linear(16, 32), "down": linear(32, 16)}) for _ in range(experts)
        )


class LanguageModel(nn.Module):
    """As transformers' RoBERTa: its head has two layers, and the model declares the second."""

    def __init__(self):
        super().__init__()
        self.wte, self.body = nn.Embedding(50, 16), linear(16, 16)
        self.lm_head = nn.ModuleDict({"dense": linear(16, 16), "decoder": linear(16, 50)})

    def get_output_embeddings(self):
        return self.lm_head["decoder"]


def blocks(count=1):
    return nn.ModuleList(
        nn.ModuleDict({"attn": linear(16, 16), "mlp": stacked(16, 64, 16)}) for _ in range(count)
    )


def stacked(*sizes):
    return nn.Sequential(*(linear(m, n) for m, n in pairwise(sizes)))


# A model, and the layers that the warning names.
MISNAMED = {
    "a stack called classifier": ({"classifier": stacked(32, 64, 64, 10)}, "classifier.*"),
    "a gated unit": ({"layers": nn.ModuleList([SwiGLU(), SwiGLU()])}, "layers.*.gate"),
    "a structured gated unit": (
        {"mlp": SwiGLU(lambda m, n: StructuredLinear(m, n, LowRank(rank=4)))},
        "mlp.gate",
    ),
    "fc before out": ({"fc": linear(32, 64), "out": linear(64, 10)}, "fc"),
    "a whole model": ({"embedder": nn.ModuleDict({"h": blocks()})}, "embedder.h.*.attn, embedder"),
}
RIGHTLY_NAMED = {
    "a head": {"h": blocks(), "lm_head": linear(16, 50)},
    "a head as wide as the model": {"h": blocks(), "head": linear(16, 16)},
    "a last fc": {"h": blocks(), "fc": linear(16, 10)},
    "a head of two layers": {"h": blocks(4), "classifier": stacked(16, 16, 10)},
    "heads side by side": {"h": blocks(), "heads": nn.ModuleList([linear(16, 12), linear(16, 20)])},
    "a router": {"mlp": MoE()},
    "a router of as many experts as features": {"mlp": MoE(16)},
    "a noisy router": {
        "router": nn.ModuleDict({"a": linear(16, 8), "noise": linear(16, 8)}),
        "h": blocks(),
    },
    "a projection of embeddings": {"embed_proj": linear(16, 16), "h": blocks()},
    "an embedding of time": {"time_embed": stacked(16, 32, 32), "h": blocks(4)},
    "narrow layers": {"classifier": stacked(4, 4, 4, 2)},
}


@pytest.mark.parametrize("make", [Muon, SOAP])
@pytest.mark.parametrize("name", MISNAMED)
def test_hidden_layers_that_adamw_steps_for_their_names_sake_are_listed_once(name, make):
    layers, named = MISNAMED[name]
    model = copy.deepcopy(nn.ModuleDict(layers))
    with pytest.warns(UserWarning, match="because of names that heads") as said:
        optimizer = make(model)
    assert len(said) == 1
    assert str(said[0].message).startswith(f"{make.__name__} steps {named}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        make(model, matrices="all")
        model.requires_grad_(False)
        make(model)


@pytest.mark.parametrize("name", RIGHTLY_NAMED)
def test_heads_routers_and_embeddings_that_are_ones_are_not(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon(nn.ModuleDict(RIGHTLY_NAMED[name]))


def test_what_stands_beside_a_declared_head_is_part_of_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon(LanguageModel())


def test_an_optimizer_prints_what_steps_how():
    model = convert(GPT(width=64, depth=2), BTT(), include="ffn")
    model.h[0].attn.requires_grad_(False)
    count = sum(p.numel() for p in model.parameters())
    muon = str(Muon(model, lr=0.02, other_lr=1e-3, matrices="all")).splitlines()
    assert muon[0] == "Muon"
    rows = [row.split("   ") for row in muon[3:]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    cores = sum(core.numel() for core in model.h[0].mlp.c_fc.cores)
    assert ["matrix", "h.*.mlp.c_fc", "2", f"{2 * cores:,}", "polar factor", "0.02"] in cells
    assert ["matrix", "h.*.attn.c_proj", "1", "4,096", "polar factor, frozen", "0.02"] in cells
    assert ["embedding", "wte", "1", "3,200", "unit RMS", "0.02"] in cells
    vectors = [row for row in cells if row[1] == "(biases, norms and other vectors)"]
    assert [row[-2:] for row in vectors] == [["AdamW", "0.001"], ["AdamW, frozen", "0.001"]]
    assert sum(int(row[3].replace(",", "")) for row in cells) == count
    soap = str(SOAP(model, lr=0.03, max_precond_dim=100))
    assert "SOAP, short side" in soap  # attention's, of 64 x 192
    assert "polar factor" not in soap
    assert "polar factor" in str(SOAP(model, max_precond_dim=32))
    assert str(Muon(nn.Linear(4, 4))).splitlines()[3].split()[:2] == ["matrix", "Linear"]
