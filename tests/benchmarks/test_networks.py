"""benchmarks.papers.networks: the networks of MN are the formulas of the paper."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.papers.networks import GPT, ResMLP, ResNet

NETS = {
    "ResMLP": lambda: ResMLP(12, 5, width=8, blocks=3, block_depth=2),
    "ResNet": lambda: ResNet(3, 5, width=4, blocks=2, blocks_mass=3),
    "GPT": lambda: GPT(11, context=6, width=8, heads=2, blocks=2),
}


@pytest.mark.parametrize("name", NETS)
def test_the_papers_networks_have_unit_sensitivity_and_the_mass_that_was_tared(name):
    net = NETS[name]()
    assert net.sensitivity == pytest.approx(1)
    assert net.blocks.mass == pytest.approx({"ResMLP": 1, "ResNet": 3, "GPT": 5}[name])
    assert net.mass == pytest.approx(2 + net.blocks.mass)
    first = net.blocks.parts["0"].mass
    assert all(part.mass == pytest.approx(first) for part in net.blocks.parts.values())


def test_gpt_is_the_papers_formula():
    net, tokens = NETS["GPT"]().double(), torch.randint(11, (2, 6))
    tok, pos, *rest, head = [p.detach() for p in net.parameters()]

    def norm(x):
        x = x - x.mean(-1, keepdim=True)
        return x / x.square().mean(-1, keepdim=True).sqrt()

    x = tok[tokens] / 2 + pos[:6] / 2
    mask = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)
    for n in range(2):
        q, k, v, out, up, down = rest[6 * n : 6 * n + 6]
        heads = []
        for rows in (slice(0, 4), slice(4, 8)):
            query, key, value = (norm(x) @ matrix[rows].T for matrix in (q, k, v))
            heads.append(torch.softmax(query @ key.mT / 4 + mask, -1) @ value)
        x = 3 / 4 * x + 1 / 4 * (torch.cat(heads, -1) / 3 @ out.T)
        x = 3 / 4 * x + 1 / 4 * (2**0.5 * F.gelu(norm(x) @ up.T) @ down.T)
    torch.testing.assert_close(net(tokens), norm(x) @ head.T)


def test_resnet_is_the_papers_formula():
    net, x = NETS["ResNet"]().double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    kernels = [p.detach() for p in net.parameters()]
    h = F.conv2d(x, kernels[0], padding=1)
    for n in range(2):
        y = h
        for kernel in kernels[1 + 2 * n : 3 + 2 * n]:
            y = F.conv2d(
                y / y.square().mean((1, 2, 3), keepdim=True).sqrt(), kernel, padding=1
            ).abs()
            y = y - y.mean((1, 2, 3), keepdim=True)
        h = h / 2 + y / 2
    torch.testing.assert_close(net(x), h.mean((2, 3)) @ kernels[-1].T)
