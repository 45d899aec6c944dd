"""A structure that a user declares works everywhere with nothing to register."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from structlin import (
    Family,
    LowRank,
    Structure,
    StructuredLinear,
    compress,
    convert,
    load,
    param_groups,
    save,
    summary,
)
from structlin.optim import Muon
from tests.models import GPT, perplexed


@dataclass(frozen=True, kw_only=True)
class Grid(Family):
    """Blocks between shared bases: block (i, j) of `W` is `U_i S_ij V_j`, with S_ij `(r, r)`."""

    blocks: int
    rank: int

    def structure(self, in_features: int, out_features: int) -> Structure:
        sizes = {"i": self.blocks, "j": self.blocks, "r": self.rank, "s": self.rank}
        q, p = in_features // self.blocks, out_features // self.blocks
        return Structure("j q -> i p", "j r q", "i s j r", "i p s", q=q, p=p, **sizes)


def test_a_declared_family_is_the_matrix_of_its_formula():
    layer = StructuredLinear(12, 20, Grid(blocks=4, rank=3), dtype=torch.float64)
    v, s, u = (core.detach() for core in layer.cores)  # (j, r, q), (1, i s, j r), (i, p, s)
    s = s.view(4, 3, 4, 3)
    blocks = [[u[i] @ s[i, :, j] @ v[j] for j in range(4)] for i in range(4)]
    expected = torch.cat([torch.cat(row, dim=1) for row in blocks])
    torch.testing.assert_close(layer.to_dense(), expected)


def test_a_declared_family_is_converted_to_trained_and_counted():
    torch.manual_seed(0)
    model = convert(GPT(width=64), Grid(blocks=4, rank=8), include="ffn")
    groups = param_groups(model, 3e-3)
    multipliers = {name: group["lr_mult"] for group in groups for name in group["param_names"]}
    found = [multipliers[f"h.0.mlp.c_fc.cores.{n}"] for n in range(3)]
    assert found == [64 / 16 / 3, 64 / 32 / 3, 64 / 8 / 3]
    losses = perplexed(model, 20, torch.optim.AdamW(groups))
    assert losses[-1] < 0.7 * losses[0]
    row = next(row for row in summary(model).rows if row.name == "h.*.mlp.c_fc")
    with FlopCounterMode(display=False) as counter:
        model.h[0].mlp.c_fc(torch.randn(1, 64))
    assert row.structure == "Grid(blocks=4, rank=8)"
    assert row.flops == 2 * counter.get_total_flops() == 2 * 2 * (4 * 8 * 16 + 32 * 32 + 4 * 64 * 8)


@dataclass(frozen=True)
class Narrow(Family):
    """Two matrices around `width` numbers: no field has a name that structlin could know."""

    width: int

    def structure(self, in_features: int, out_features: int) -> Structure:
        return Structure("i -> o", "w i", "o w", i=in_features, o=out_features, w=self.width)

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        return [replace(self, width=width) for width in (1, 2, 4, 8, 16, 32)]


def test_compress_chooses_among_the_sizes_that_a_declared_family_names():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(32, 1) @ torch.randn(1, 32))  # width 1 holds it
    compress(model, Narrow(1), [torch.randn(256, 32)], keep=0.3, allocation="error")
    widths = [layer.structure.sizes["w"] for layer in model]
    params = [sum(core.numel() for core in layer.cores) for layer in model]
    assert widths == [8, 1]
    assert sum(params) <= 0.3 * 2 * 32 * 32


def test_a_declared_family_without_sizes_is_told_what_would_work():
    model = nn.Sequential(nn.Linear(64, 64))
    message = r"keep: Grid\(blocks=4, rank=8\) has no sizes .*keep=None .* method `sizes` .* Grid"
    with pytest.raises(ValueError, match=message):
        compress(model, Grid(blocks=4, rank=8), [torch.randn(8, 64)], keep=0.5)


def test_sizes_that_are_no_families_are_refused():
    class Ranks(Narrow):
        def sizes(self, in_features, out_features):
            return [1, 2]

    with pytest.raises(TypeError, match=r"Ranks.sizes gives 1; it must give families, such as"):
        compress(nn.Sequential(nn.Linear(8, 8)), Ranks(1), [torch.randn(8, 8)], keep=0.5)


class Circulant(nn.Module):
    """y_i = sum_j c_((i - j) mod n) x_j, by the Fourier transform: no structure is this matrix."""

    def __init__(self, width):
        super().__init__()
        self.column = nn.Parameter(torch.randn(width) / width)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.column), len(self.column))


class Sum(nn.Module):
    """A circulant matrix plus a linear layer of no bias."""

    def __init__(self, dense):
        super().__init__()
        self.circulant = Circulant(dense.in_features)
        self.low_rank = nn.Linear(dense.in_features, dense.out_features, bias=False)

    def forward(self, x):
        return self.circulant(x) + self.low_rank(x)


def build_sums():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 16)))
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, Sum(layer))
    return convert(model, overrides={"*.low_rank": LowRank(rank=2)})


def test_a_sum_is_a_module_of_two_layers_in_the_place_of_each_dense_layer(tmp_path):
    torch.manual_seed(0)
    model = build_sums()
    sums = [model[0], model[2][0]]
    x = torch.randn(5, 16)
    for layer in sums:
        column = layer.circulant.column.detach()
        matrix = torch.stack([column.roll(n) for n in range(16)], dim=1)
        v, u = (core[0].detach() for core in layer.low_rank.cores)
        torch.testing.assert_close(layer(x), x @ (matrix + u @ v).T)
    save(model, tmp_path)
    torch.testing.assert_close(load(build_sums(), tmp_path)(x), model(x))


def test_the_parts_of_a_sum_have_their_own_rates_and_steps():
    model = build_sums()
    groups = param_groups(model, 1e-3)
    multipliers = {name: group["lr_mult"] for group in groups for name in group["param_names"]}
    assert multipliers["0.low_rank.cores.0"] == 16 / 16 / 2
    assert multipliers["0.low_rank.cores.1"] == 16 / 2 / 2
    assert multipliers["0.circulant.column"] == 1
    kinds = {name: g["kind"] for g in Muon(model).param_groups for name in g["param_names"]}
    assert kinds["2.0.low_rank.cores.0"] == "matrix"
    assert kinds["2.0.circulant.column"] == "other"
