"""The mixture of examples/moe.py is the loop over tokens and experts of its formula."""

import subprocess
import sys
from math import exp, log

import moe
import pytest
import torch

from structlin import BTT, param_groups


@pytest.mark.parametrize("shape", [(50,), (2, 3), (1, 0)])
def test_output_and_balance_are_sums_over_tokens_and_experts(shape):
    layer = moe.Mixture(12, 20, BTT(), experts=4, top_k=2).double()
    x, y = torch.randn(*shape, 12).double(), torch.zeros(*shape, 20).double()
    share, probability, sizes = [0.0] * 4, [0.0] * 4, []
    tokens = x.view(-1, 12)
    for token, row in zip(tokens, y.view(-1, 20), strict=True):
        logits = [float(row @ token) for row in layer.router.weight.detach()]
        total = sum(map(exp, logits))
        sizes.append(log(total) ** 2)
        chosen = sorted(range(4), key=lambda e: -logits[e])[:2]
        for e in range(4):
            probability[e] += exp(logits[e]) / total / len(tokens)
        for e in chosen:
            share[e] += 1 / 2 / len(tokens)
            weight = exp(logits[e]) / sum(exp(logits[each]) for each in chosen)
            row += weight * layer.experts[e].to_dense().detach() @ token
    torch.testing.assert_close(layer(x).detach(), y, rtol=1e-5, atol=1e-6)
    if sizes:
        first = 4 * sum(p * f for p, f in zip(probability, share, strict=True))
        wanted = first + 0.1 * sum(sizes) / len(sizes)
        assert layer.balance.item() == pytest.approx(wanted, rel=1e-5)


def test_experts_have_the_rate_of_one_layer_and_the_router_that_of_a_dense_one():
    layer = moe.Mixture(64, 64, BTT(), experts=4, top_k=2)
    rates = {n: g["lr"] for g in param_groups(layer, 0.5) for n in g["param_names"]}
    (core,) = {rates.pop(f"experts.{e}.cores.{n}") for e in range(4) for n in (0, 1)}
    assert (core, rates) == (param_groups(layer.experts[0], 0.5)[0]["lr"], {"router.weight": 0.5})


def test_the_program_runs():
    command = [sys.executable, moe.__file__, "--smoke"]
    assert "relative error" in subprocess.run(command, capture_output=True, text=True).stdout
