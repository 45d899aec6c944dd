"""The cost model: it chooses what the numbers say, and a layer does what it chooses."""

import time

import pytest
import torch
from torch import nn

from benchmarks import calibrate
from structlin import BTT, TT, Dense, LowRank, Monarch, StructuredLinear, convert, summary
from structlin import _product as contract
from structlin._kernels import cost
from structlin._kernels.layout import stages as stages_of

DTYPES = [torch.float32, torch.bfloat16]


def test_flops_bytes_and_calls_add_up_to_the_formula(monkeypatch):
    structure = BTT(rank=2).structure(64, 64)  # cores (8, 16, 8) and (8, 8, 16): 2 x 1024 parameters
    at, kind = stages_of(structure), ("cpu", torch.float32)

    def seconds(**constants):
        machine = {name: float("inf") for name in cost.Machine._fields} | {"call": 0.0} | constants
        monkeypatch.setitem(cost.MACHINES, kind, cost.Machine(**machine))
        own = cost.structured(at, torch.float32, "cpu", columns=False, backward=False)
        return own, cost.dense(structure, torch.float32, "cpu", backward=False, formed=False)

    own, dense = seconds(rate=1.0)
    assert (own.at(3), dense.at(3)) == (3 * 2 * 2048, 3 * 2 * 64 * 64)
    own, dense = seconds(rows=1.0)  # each product reads its input and its core, and writes its output
    assert own.at(3) == 4 * (3 * (64 + 128 + 128 + 64) + 2048)
    assert dense.at(3) == 4 * (3 * (64 + 64) + 64 * 64)
    own, _ = seconds(permute=1.0)  # the middle, read and written
    assert own.at(3) == 2 * 4 * 3 * 128
    own, dense = seconds(call=1.0)
    assert (own.fixed, dense.at(3)) == (cost.calls(2, backward=False), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [False, True])
def test_the_range_of_tokens_is_where_the_structure_is_predicted_to_be_faster(dtype, backward):
    for family in (BTT(), BTT(rank=8), TT(rank=16), Monarch(), LowRank(rank=600), Dense()):
        structure = family.structure(1024, 1024)
        own = cost.best(structure, dtype, "cpu", backward=backward)
        dense = cost.dense(structure, dtype, "cpu", backward=backward)
        least, most = cost.tokens_for(structure.text, dtype, "cpu", backward)
        for tokens in (0, 1, 16, 100, 300, 1000, 4096, 10**6):
            assert (least <= tokens <= most) == (own.at(tokens) <= dense.at(tokens)), (family, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hopeless_structures_run_dense_and_cheap_ones_never_do(dtype):
    def way(family, width, tokens):
        return StructuredLinear(width, width, family, dtype=dtype, device="meta", mode="auto"), tokens

    layer, tokens = way(TT(rank=16), 1024, 4096)
    assert contract.choose("auto", layer.structure, tokens, dtype, "cpu", backward=True) == "dense"
    assert contract.choose("auto", layer.structure, 4, dtype, "cpu", backward=False) == "structured"
    for family in (BTT(), BTT(rank=2), Monarch(blocks=16), LowRank(rank=128)):
        for tokens in (1, 16, 4096, 10**6):
            layer, _ = way(family, 1024, tokens)
            assert contract.choose("auto", layer.structure, tokens, dtype, "cpu", backward=True) == "structured"


def test_forming_the_matrix_costs_less_than_a_tenth_of_a_dense_step():
    for family in (TT(rank=16), BTT(rank=8), TT(rank=8)):
        structure = family.structure(1024, 1024)
        alone = cost.dense(structure, torch.float32, "cpu", backward=True, formed=False)
        formed = cost.dense(structure, torch.float32, "cpu", backward=True)
        assert formed.at(4096) < 1.1 * alone.at(4096)


def test_a_layer_does_what_it_chooses(monkeypatch):
    formed = []
    original = contract.to_dense
    monkeypatch.setattr(contract, "to_dense", lambda *args: formed.append(1) or original(*args))
    layer, x = StructuredLinear(64, 64, TT(rank=16), bias=False), torch.randn(4096, 64)
    assert (layer.way(4096), layer.way(1)) == ("dense", "structured")
    y = layer(x)
    assert formed == [1]
    torch.testing.assert_close(y[:1], layer(x[:1]), atol=1e-5, rtol=1e-4)
    assert formed == [1]
    layer.mode = "structured"
    torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-4)
    assert formed == [1]


def test_forming_the_matrix_trains_as_the_structure_does():
    layers = [StructuredLinear(36, 16, BTT(rank=2, cores=3), weight_norm=True, mode=m) for m in ("structured", "dense")]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(7, 36, requires_grad=True)
    grads = [torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]) for layer in layers]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_convert_passes_the_mode_on_and_the_summary_shows_the_choice():
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(512, 512)), TT(rank=16), overrides={"1": BTT()})
    assert [row.way for row in summary(model, tokens=4096).rows] == ["dense", "structured"]
    assert "runs as" in str(summary(model, tokens=4096))
    assert "runs as" not in str(summary(model))
    model = convert(nn.Sequential(nn.Linear(64, 64)), BTT())
    model[0].mode, model[0].recompute = "dense", True
    assert (model[0].mode, model[0].recompute, model[0].way(1)) == ("dense", True, "dense")
    assert "mode='dense', recompute=True" in repr(model)
    with pytest.raises(ValueError, match="tokens=-1 is negative"):
        summary(model, tokens=-1)


def test_other_dtypes_and_devices_have_constants_too():
    structure = BTT().structure(64, 64)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        for device in ("cpu", "cuda", "mps", "meta"):
            assert cost.best(structure, dtype, device, backward=True).at(100) > 0


def test_calibration_prints_a_table_that_can_be_pasted(capsys, monkeypatch):
    monkeypatch.setattr(cost, "MACHINES", dict(cost.MACHINES))
    start = time.perf_counter()
    calibrate.main(["--smoke"])
    assert time.perf_counter() - start < 60
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    table = eval("{" + " ".join(lines).replace("): Machine", "): cost.Machine") + "}", {"torch": torch, "cost": cost})
    assert {("cpu", dtype) for dtype in DTYPES} <= set(table)
    assert all(value > 0 for machine in table.values() for value in machine)
