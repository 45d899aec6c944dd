"""The theorems of the two papers, as tests of `structlin.modular`. All in float64.

`scalar_nets` attain every bound at once: widths are 1, weights and activations 1, all signs
positive, so that first and second derivatives *equal* norm, sensitivity and sharpness. `nets` are
what the theorems speak of: matrices of any size, where the derivatives must not exceed them.
"""

from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, jacrev, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.papers.networks import residual
from structlin import BTT, Kronecker, LowRank
from structlin.modular import (
    GELU,
    Abs,
    Bond,
    Composite,
    Conv2D,
    Embed,
    FunctionalAttention,
    Identity,
    Linear,
    MeanSubtract,
    Module,
    ReLU,
    RMSDivide,
    Structured,
)
from structlin.modular.module import Attributes, Tuple

MASSES = st.sampled_from([0.5, 1.0, 2.0, 3.0])
WIDTHS = st.sampled_from([2, 4, 6])
PART = st.floats(0.2, 0.8)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Parabola(Bond):
    """x -> 1 + mu (x - 1) + gamma (x - 1)^2 / 2: at 1 its value is 1, its derivatives are its
    sensitivity and gamma."""

    def __init__(self, sensitivity: float, gamma: float) -> None:
        super().__init__()
        self.own_sensitivity, self.gamma = sensitivity, gamma

    def forward(self, x: Tensor) -> Tensor:
        return 1 + self.own_sensitivity * (x - 1) + self.gamma * (x - 1) ** 2 / 2


@st.composite
def scalar_nets(draw, depth: int = 3) -> Module:
    """1 -> 1, with value 1 at 1."""
    kind = draw(st.sampled_from(["linear", "chain", "sum", "bond", "power"])) if depth else "linear"
    if kind == "linear":
        net = Linear(1, 1, mass=draw(MASSES))
        with torch.no_grad():
            net.linear.weight.fill_(1)
        return net
    inner = draw(scalar_nets(depth - 1))
    if kind == "bond":
        return Parabola(draw(st.floats(0.3, 3)), draw(st.floats(0, 2))) @ inner
    if kind == "chain":
        return draw(scalar_nets(depth - 1)) @ inner
    if kind == "sum":
        part = draw(PART)
        return part * inner + (1 - part) * draw(scalar_nets(depth - 1))
    return ones(inner ** draw(st.integers(1, 3)))


def ones(net: Module) -> Module:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1)
    return net


@st.composite
def nets(draw, in_features: int = 0, out_features: int = 0, depth: int = 3) -> Module:
    """A compound that maps the unit ball into itself, of bonds whose sensitivities are bounds."""
    n, m = in_features or draw(WIDTHS), out_features or draw(WIDTHS)
    kinds = ["atom", "chain", "sum", "scale", "power", "residual"]
    kind = draw(st.sampled_from(kinds)) if depth else "atom"
    if kind in ("power", "residual") and n != m:
        kind = "chain"
    if kind == "atom":
        structure = draw(st.sampled_from([None, Kronecker(), LowRank(rank=2), BTT(rank=1)]))
        mass = draw(MASSES)
        return (
            Linear(n, m, mass=mass) if structure is None else Structured(n, m, structure, mass=mass)
        )
    if kind == "chain":
        middle, bond = draw(WIDTHS), draw(st.sampled_from([Identity, Abs, MeanSubtract]))
        return draw(nets(middle, m, depth - 1)) @ bond() @ draw(nets(n, middle, depth - 1))
    if kind == "sum":
        part = draw(PART)
        return part * draw(nets(n, m, depth - 1)) + (part - 1) * draw(nets(n, m, depth - 1))
    inner = draw(nets(n, m, depth - 1))
    if kind == "scale":
        return draw(st.sampled_from([-1.0, -0.5, 0.3, 1.0])) * inner
    return inner**2 if kind == "power" else residual(inner, 2) ** 2


def weights(net: Module) -> dict[str, Tensor]:
    """Those of the net, some shrunk: inside of the unit ball of each."""
    return {
        name: p.detach() * (1 if n % 2 else 0.7)
        for n, (name, p) in enumerate(net.named_parameters())
    }


def direction(net: Module, seed: int) -> dict[str, Tensor]:
    """A random update of modular norm 1: random matrices, or those that all singular directions
    share."""
    seeded = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(p.shape, generator=seeded) for name, p in net.named_parameters()}
    update = noise if seed % 2 else {name: p.detach().clone() for name, p in net.named_parameters()}
    norm = net.norm(update)
    return {name: tensor / norm for name, tensor in update.items()}


def ball(batch: int, features: int, seed: int) -> Tensor:
    """Inputs of RMS 1."""
    x = torch.randn(batch, features, generator=torch.Generator().manual_seed(seed))
    return x / rms(x)[:, None]


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def size(y: Tensor | tuple[Tensor, ...]) -> float:
    """RMS of the features, the largest over everything else; of a tuple the sum."""
    return sum(map(size, y)) if isinstance(y, tuple) else rms(y).max().item()


def forward(net: Module):
    return lambda w, x: functional_call(net, w, (x,))


def first(
    net: Module, w: dict[str, Tensor], x: Tensor, dw: dict[str, Tensor], dx: Tensor
) -> Tensor:
    return jvp(forward(net), (w, x), (dw, dx))[1]


def second(net: Module, w, x, along, across) -> Tensor:
    """The second derivative in two directions, each (dw, dx)."""
    return jvp(lambda w, x: jvp(forward(net), (w, x), along)[1], (w, x), across)[1]


def still(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in w.items()}


def recursive_norm(module: Module, update: dict[int, Tensor]) -> float:
    """The papers' recursion, with numpy's singular values; `update` by the id of the parameter."""
    if isinstance(module, Linear):
        cores = [p for p in module.linear.parameters()]
        norms = []
        for parameter in cores:
            rows, columns = parameter.shape[-2:]
            spectrum = np.linalg.svd(update[id(parameter)].numpy(), compute_uv=False)
            norms.append((columns / rows) ** 0.5 * spectrum.max())
        return len(cores) * max(norms)  # a composite of cores of equal mass
    parts = [
        (part.mass, part.sensitivity, recursive_norm(part, update))
        for part in module.parts.values()
    ]
    if not parts:
        return 0.0

    def composite(one, two):
        (m1, mu1, norm1), (m2, mu2, norm2) = one, two
        total = m1 + m2
        terms = [mu2 * total / m1 * norm1 if m1 else 0.0, total / m2 * norm2 if m2 else 0.0]
        return total, mu1 * mu2, max(terms)

    def beside(one, two):
        (m1, mu1, norm1), (m2, mu2, norm2) = one, two
        total = m1 + m2
        return (
            total,
            mu1 + mu2,
            max(total / m1 * norm1 if m1 else 0.0, total / m2 * norm2 if m2 else 0.0),
        )

    return reduce(beside if isinstance(module, Tuple) else composite, parts)[2]


# Proposition 1: associativity


numbers = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.floats(0.1, 5),
    st.floats(0, 5),
    st.floats(0, 5),
    st.floats(0, 5),
)


@given(numbers, numbers, numbers)
def test_composition_and_tuples_of_attributes_are_associative(one, two, three):
    a, b, c = Attributes(*one), Attributes(*two), Attributes(*three)
    assert c.after(b).after(a) == pytest.approx(c.after(b.after(a)))
    assert a.beside(b).beside(c) == pytest.approx(a.beside(b.beside(c)))


@given(nets(4, 2, 2), nets(2, 6, 2), nets(6, 4, 2))
def test_brackets_of_a_composite_change_nothing(a, b, c):
    agree(Composite(Composite(a, b), c), Composite(a, Composite(b, c)), c @ b @ a)


@given(nets(4, 2, 2), nets(4, 6, 2), nets(4, 4, 2))
def test_brackets_of_a_tuple_change_nothing(a, b, c):
    agree(Tuple(Tuple(a, b), c), Tuple(a, Tuple(b, c)), Tuple(a, b, c))


def agree(*same: Module) -> None:
    updates = {id(p): torch.randn_like(p) for p in same[0].parameters()}
    found = []
    for module in same:
        own = {name: updates[id(p)] for name, p in module.named_parameters()}
        dual = module.dualize(own)
        duals = {id(p): dual[name] for name, p in module.named_parameters()}
        found.append((module.attributes, module.norm(own), duals))
    for attributes, norm, duals in found[1:]:
        assert attributes == pytest.approx(found[0][0])
        torch.testing.assert_close(norm, found[0][1])
        assert all(torch.allclose(duals[key], found[0][2][key]) for key in updates)


@given(nets())
def test_the_norm_is_that_of_the_papers_recursion(net):
    update = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    by_id = {id(p): update[name] for name, p in net.named_parameters()}
    assert net.norm(update).item() == pytest.approx(recursive_norm(net, by_id))


# Proposition 2: well-normed, with the sensitivity that it says


@given(nets(), st.floats(0.5, 3), st.integers(0, 99))
def test_derivatives_exceed_neither_norm_nor_sensitivity(net, factor, seed):
    net = factor * net
    w, n = weights(net), in_features(net)
    x, dx = ball(5, n, seed), ball(5, n, seed + 1)
    assert size(first(net, w, x, direction(net, seed), torch.zeros_like(x))) <= 1 + 1e-6
    assert size(first(net, w, x, still(w), dx)) <= net.sensitivity * (1 + 1e-6)


def in_features(net: Module) -> int:
    return next(module.in_features for module in net.modules() if hasattr(module, "in_features"))


@given(scalar_nets(), st.floats(0.3, 3))
def test_scalar_nets_attain_the_norm_and_the_sensitivity(net, factor):
    net = factor * net
    w, x = {name: p.detach() for name, p in net.named_parameters()}, torch.ones(1, 1)
    steps = direction_of_all_terms(net)
    assert net.norm(steps).item() == pytest.approx(1)
    assert first(net, w, x, steps, torch.zeros_like(x)).item() == pytest.approx(1)
    assert first(net, w, x, still(w), torch.ones_like(x)).item() == pytest.approx(net.sensitivity)


def direction_of_all_terms(net: Module) -> dict[str, Tensor]:
    """Norm 1, and every term of the norm is 1."""
    return net.dualize(
        {name: torch.ones_like(p) for name, p in net.named_parameters()}, method="svd"
    )


# Sharpness, and proposition 4


@given(nets(), st.integers(0, 99))
def test_second_derivatives_do_not_exceed_the_sharpness(net, seed):
    w, n = weights(net), in_features(net)
    x, zero = ball(5, n, seed), torch.zeros(5, n)
    dw, dx = direction(net, seed), ball(5, n, seed + 1)
    other = direction(net, seed + 1)
    alpha, beta, gamma = net.sharpness
    assert size(second(net, w, x, (dw, zero), (other, zero))) <= alpha + 1e-6
    assert size(second(net, w, x, (dw, zero), (dw, zero))) <= alpha + 1e-6
    assert size(second(net, w, x, (dw, zero), (still(w), dx))) <= beta + 1e-6
    assert gamma == 0
    assert size(second(net, w, x, (still(w), dx), (still(w), dx))) <= 1e-9


@given(scalar_nets(), st.floats(0.3, 3))
def test_scalar_nets_attain_the_sharpness(net, factor):
    net = factor * net
    w, x = {name: p.detach() for name, p in net.named_parameters()}, torch.ones(1, 1)
    in_weights, in_input = (
        (direction_of_all_terms(net), torch.zeros_like(x)),
        (still(w), torch.ones_like(x)),
    )
    found = [
        second(net, w, x, in_weights, in_weights).item(),
        second(net, w, x, in_weights, in_input).item(),
        second(net, w, x, in_input, in_input).item(),
    ]
    assert found == pytest.approx(list(net.sharpness))


@given(numbers, st.integers(1, 60))
def test_the_sharpness_of_residual_blocks_does_not_grow_with_depth(values, depth):
    """It tends to (alpha + beta + gamma / 3, beta + gamma / 2, gamma) from below; here are the sums
    for L blocks."""

    class Given(Bond):
        attributes = Attributes(values[0] or 1.0, 1.0, *values[2:])

    net, (_, _, alpha, beta, gamma), L = residual(Given(), depth) ** depth, Given.attributes, depth
    assert net.sensitivity == pytest.approx(1)
    between = 1 - 1 / L
    expected = (
        alpha + between * beta + between * (2 - 1 / L) / 6 * gamma,
        beta + between / 2 * gamma,
        gamma,
    )
    assert net.sharpness == pytest.approx(expected)
    bounds = (alpha + beta + gamma / 3, beta + gamma / 2, gamma)
    assert all(
        found <= bound * (1 + 1e-9) for found, bound in zip(net.sharpness, bounds, strict=True)
    )


# Bonds


BONDS = {
    "Identity": Identity(),
    "Abs": Abs(),
    "MeanSubtract": MeanSubtract(),
    "RMSDivide": RMSDivide(),
}


@pytest.mark.parametrize("name", BONDS)
def test_the_jacobian_and_the_curvature_of_a_bond_are_bounded_by_what_it_says(name):
    bond = BONDS[name]
    for seed in range(5):
        x = ball(1, 6, seed)[0]
        assert torch.linalg.matrix_norm(jacrev(bond)(x), 2) <= bond.sensitivity + 1e-9
        curvature = jacrev(jacrev(bond))(x)
        for _ in range(10):
            u, v = ball(2, 6, int(torch.randint(10**6, ())))
            for a, b in ((u, u), (u, v), (u, x)):
                assert size(torch.einsum("oij,i,j->o", curvature, a, b)) <= bond.gamma + 1e-9


def test_the_curvature_of_rms_division_is_attained():
    x = ball(1, 6, 0)[0]
    across = ball(1, 6, 1)[0]
    across = across - (across @ x) / 6 * x
    u = (1 / 3) ** 0.5 * x + (2 / 3) ** 0.5 * across / rms(across)
    curved = jvp(lambda x: jvp(RMSDivide(), (x,), (u,))[1], (x,), (u,))[1]
    assert size(curved) == pytest.approx(RMSDivide.gamma)


@pytest.mark.parametrize(("bond", "expected"), [(ReLU(), 0.5), (GELU(), 0.456)])
def test_on_inputs_of_either_sign_relu_passes_half_of_the_squares_and_gelu_a_little_less(
    bond, expected
):
    x, dx = torch.randn(2, 10**5)
    gain = jvp(bond, (x,), (dx,))[1].square().mean()
    assert gain == pytest.approx(expected, abs=0.01)
    assert gain <= bond.sensitivity**2 + 0.01


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_one_head_has_sensitivity_1_and_gamma_3(causal):
    bond, worst = FunctionalAttention(causal=causal), [0.0, 0.0]
    with sdpa_kernel(SDPBackend.MATH):
        for seed in range(60):
            x, u, v = (
                tuple(ball(5, 4, 100 * seed + 10 * k + n) for n in range(3)) for k in range(3)
            )
            # aligned: queries that look away from the key whose value is opposite
            if seed % 3 == 0:
                x = (x[0], x[0].flip(0), x[2])
                u = v = (x[1] - x[0], x[0], -x[2])
            wide = [sum(map(size, each)) for each in (u, v)]
            one = jvp(bond, (x,), (u,))[1]
            two = jvp(lambda x: jvp(bond, (x,), (u,))[1], (x,), (v,))[1]  # noqa: B023
            worst = [
                max(worst[0], size(one) / wide[0]),
                max(worst[1], size(two) / wide[0] / wide[1]),
            ]
    assert 0.2 < worst[0] <= 1
    assert 0.02 < worst[1] <= 3


# Proposition 3: mass apportions feature learning


def alone(net: Module, part: Module, steps: dict[str, Tensor]) -> dict[str, Tensor]:
    """The steps of the part's own weights; the others stay."""
    owned = {id(p) for p in part.parameters()}
    return {name: steps[name] * (id(p) in owned) for name, p in net.named_parameters()}


@given(nets(4, 2, 2), nets(2, 6, 2), nets(6, 4, 2), st.integers(0, 99))
def test_a_part_changes_the_output_by_its_share_of_the_mass_at_most(a, b, c, seed):
    net = c @ Abs() @ b @ a
    w, x, dw = weights(net), ball(5, 4, seed), direction(net, seed)
    for part in (a, b, c):
        change = first(net, w, x, alone(net, part, dw), torch.zeros_like(x))
        assert size(change) <= part.mass / net.mass + 1e-6


@given(scalar_nets(2), scalar_nets(2), PART)
def test_a_part_can_change_the_output_by_all_of_its_share_of_the_mass(a, b, part):
    net = b @ Parabola(2.0, 0.0) @ a
    w, x = {n: p.detach() for n, p in net.named_parameters()}, torch.ones(1, 1)
    steps = alone(net, a, direction_of_all_terms(net))
    assert first(net, w, x, steps, torch.zeros_like(x)).item() == pytest.approx(a.mass / net.mass)


# Proposition 5: the loss is smooth in the modular norm


@given(nets(), st.integers(0, 99))
def test_the_loss_is_as_smooth_as_sharpness_says(net, seed):
    """Of |y - t|^2 / 2 in RMS, which is 1-smooth and |y - t|-Lipschitz: |H[u, v]| <= 1 + alpha |y -
    t|."""
    w, x = weights(net), ball(1, in_features(net), seed)
    y = forward(net)(w, x)
    target = y + torch.randn_like(y)
    slope = size(y - target)

    def loss(w: dict[str, Tensor]) -> Tensor:
        return (forward(net)(w, x) - target).square().mean() / 2

    u, v = direction(net, seed), direction(net, seed + 1)
    for along, across in ((u, v), (u, u), (v, v)):
        curvature = jvp(lambda w: jvp(loss, (w,), (along,))[1], (w,), (across,))[1]  # noqa: B023
        assert abs(curvature.item()) <= 1 + net.sharpness.alpha * slope + 1e-6


# Duality


def inner(g: dict[str, Tensor], t: dict[str, Tensor]) -> float:
    return sum((g[name] * t[name]).sum() for name in g).item()


@given(nets(), st.integers(0, 99))
def test_dualize_has_norm_1_and_no_update_of_norm_1_a_larger_product(net, seed):
    net = 1.7 * net
    g = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    dual = net.dualize(g, method="svd")
    assert net.norm(dual).item() == pytest.approx(1)
    best = inner(g, dual)
    for n in range(10):
        assert inner(g, direction(net, seed + n)) <= best + 1e-9
        near = {name: dual[name] + 0.1 * torch.randn_like(tensor) for name, tensor in g.items()}
        norm = net.norm(near)
        assert inner(g, near) / norm.item() <= best + 1e-9


def recursive_dual_norm(module: Module, gradient: dict[int, Tensor]) -> float:
    """The papers' recursion of the dual norm, with numpy's singular values: each part's share."""
    if isinstance(module, Linear):
        cores = list(module.linear.parameters())
        return sum(
            (p.shape[-2] / p.shape[-1]) ** 0.5
            * np.linalg.svd(gradient[id(p)].numpy(), compute_uv=False).sum()
            / len(cores)
            for p in cores
        )
    found, later = 0.0, 1.0
    for part in reversed(module.parts.values()):
        if part.mass:
            share = part.mass / module.mass
            found += share / later * recursive_dual_norm(part, gradient)
        later *= 1.0 if isinstance(module, Tuple) else part.sensitivity
    return found


@given(nets())
def test_the_dual_norm_is_the_sum_of_the_shares_of_its_parts(net):
    net = 1.7 * net
    g = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    by_id = {id(p): g[name] for name, p in net.named_parameters()}
    assert net.dual_norm(g).item() == pytest.approx(recursive_dual_norm(net, by_id))


SOLVED = {
    "chain": lambda: Linear(3, 2, mass=2) @ Abs() @ (3 * Linear(4, 3)),
    "tuple": lambda: (
        2
        * Linear(2, 2)
        @ (Linear(3, 2, mass=0.5) + 0.5 * Structured(3, 2, LowRank(rank=1), mass=3))
    ),
    "blocks": lambda: Linear(6, 2) @ Structured(4, 6, BTT(rank=1), masses=(1, 3)),
    "conv": lambda: Conv2D(2, 2, 2, mass=2) @ Conv2D(2, 2, 1),
    "embed": lambda: Linear(3, 4) @ (1 / 2 * Embed(5, 3) + 1 / 2 * Embed(5, 3)),
}


@pytest.mark.parametrize("name", SOLVED)
def test_a_solver_finds_no_larger_product_than_dualize_and_nearly_as_large_a_one(name):
    """Gradient ascent of <g, t> / |t|, which is quasi-concave."""
    net = SOLVED[name]()
    g = {key: torch.randn_like(p) for key, p in net.named_parameters()}
    best = inner(g, net.dualize(g, method="svd"))
    t = {key: tensor.clone().requires_grad_() for key, tensor in g.items()}
    optimizer = torch.optim.Adam(t.values(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(600):
        ratio = sum((g[key] * t[key]).sum() for key in g) / net.norm(t)
        optimizer.zero_grad()
        (-ratio).backward()
        optimizer.step()
        schedule.step()
    assert 0.97 * best <= ratio.item() <= best * (1 + 1e-9)
