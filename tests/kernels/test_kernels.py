"""What every way through a layer must give, with the compiled engine and by the loop that is the
definition."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from structlin import (
    BTT,
    TT,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
    apply,
    to_dense,
)
from structlin._engine import product as product_module
from structlin._engine.cpu import library
from tests.catalogue import random_cores, tokens
from tests.kernels.test_engine import OWN, assert_near, by_einsum

FEW = [
    BTT(rank=2),
    Monarch(blocks=2),
    Monarch(blocks=6),
    LowRank(rank=3),
    Kronecker(),
    TT(rank=2),
    BTT(rank=2, cores=3),
]
ACTIVE = [family.activate() for family in (BTT(rank=2, cores=3), LowRank(rank=3), Kronecker())]


@pytest.fixture(autouse=True, params=["engine", "loop"])
def _way(request, monkeypatch):
    if request.param == "loop":
        monkeypatch.setattr(library, "_state", library.State(False, "switched off by a test"))
    elif not library.load():
        pytest.skip(library._state.reason)


def small(family):
    return family.structure(12, 30)


WIDE = [family.structure(1024, 1056) for family in (Kronecker(), TT(rank=2))]


@pytest.mark.parametrize("structure", [*map(small, FEW + ACTIVE), *WIDE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(structure, dtype):
    cores, x = random_cores(structure, dtype), tokens(29, structure.in_features, dtype=dtype)
    bias, dy = (tokens(*n, structure.out_features, dtype=dtype) for n in ((), (29,)))
    leaves = [tensor.requires_grad_() for tensor in (x, *cores, bias)]
    y = apply(structure, cores, x, bias)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    assert_near(found, by_einsum(structure, cores, x, bias, dy), dtype)


def test_third_derivatives_are_those_of_the_dense_way():
    structure = BTT(rank=2).structure(6, 4)
    leaves = [tensor.requires_grad_() for tensor in (*random_cores(structure), tokens(3, 6))]

    def third(product):
        *cores, x = leaves
        value = product(structure, cores, x).sin().sum()
        for _ in range(3):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(grad.sin().sum() for grad in grads)
        return value

    dense = third(lambda structure, cores, x: x @ to_dense(structure, cores).mT)
    torch.testing.assert_close(third(apply), dense)


def test_a_layer_applied_twice_has_the_gradients_of_its_matrix_where_they_are_differentiable():
    """The second input depends on the cores."""
    structure = BTT(rank=2).structure(6, 6)
    cores, x = [core.requires_grad_() for core in random_cores(structure)], tokens(3, 6)
    way = partial(apply, structure, cores)
    w = to_dense(structure, cores)
    expected = torch.autograd.grad((x @ w.T @ w.T).sin().sum(), cores)
    for create_graph in (False, True):
        y = way(way(x))
        found = torch.autograd.grad(y.sin().sum(), cores, create_graph=create_graph)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.detach(), other)


@OWN
@pytest.mark.parametrize("family", [Monarch(blocks=2), ACTIVE[0]], ids=repr)
def test_an_exported_layer_needs_no_operator_of_ours(family):
    layer = StructuredLinear(12, 30, family)
    x = torch.randn(4, 12)
    exported = torch.export.export(layer, (x,))
    assert not [node for node in exported.graph.nodes if "structlin" in str(node.target)]
    torch.testing.assert_close(exported.module()(x), layer(x))


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("forms", [False, True], ids=["core by core", "by W"])
def test_whatever_alone_requires_a_gradient_gets_it(family, forms, monkeypatch):
    monkeypatch.setattr(product_module, "forms_matrix", lambda *of: forms)
    structure = small(family)
    cores, x, bias, dy = random_cores(structure), tokens(5, 12), tokens(30), tokens(5, 30)
    _, *wanted = by_einsum(structure, cores, x, bias, dy)
    for leaf, gradient in zip((x, *cores, bias), wanted, strict=True):
        leaf.requires_grad_(True)
        own = apply(structure, cores, x, bias)
        torch.testing.assert_close(torch.autograd.grad(own, leaf, dy)[0], gradient)
        leaf.requires_grad_(False)


@pytest.mark.parametrize("forms", [False, True], ids=["core by core", "by W"])
def test_a_bias_of_another_dtype_is_added_in_that_of_x(forms, monkeypatch):
    monkeypatch.setattr(product_module, "forms_matrix", lambda *of: forms)
    structure, bias = small(BTT()), tokens(30)
    cores, x = [core.bfloat16() for core in random_cores(structure)], tokens(5, 12).bfloat16()
    y = apply(structure, cores, x, bias)
    torch.testing.assert_close(y, apply(structure, cores, x, bias.bfloat16()))


def test_gains_of_16_bits_are_multiplied_in_more():
    (core,), gain = [torch.randn(1, 64, 64).bfloat16()], torch.tensor(0.7109375)
    (found,) = product_module.normalise([core], gain.bfloat16()[None], [0.3])
    exact = core.double() * gain.double() * 0.3 * 64 / core.double().norm()
    assert (found == exact.bfloat16()).double().mean() > 0.99


@pytest.mark.parametrize("family", FEW + ACTIVE)
def test_vmap_over_tokens_layers_and_gradients(family):
    structure = small(family)
    cores, x = random_cores(structure), tokens(3, 5, 12)
    bias = tokens(30)
    layers = [[core + n for core in cores] for n in range(3)]

    def run(x, *cores):
        return apply(structure, cores, x, bias)

    wanted = torch.stack([run(part, *cores) for part in x])
    torch.testing.assert_close(torch.func.vmap(lambda x: run(x, *cores))(x), wanted)
    torch.testing.assert_close(
        torch.func.vmap(lambda x: run(x, *cores), in_dims=1, out_dims=1)(x), wanted
    )
    stacked = [torch.stack(parts) for parts in zip(*layers, strict=True)]
    each = torch.stack([run(part, *own) for part, own in zip(x, layers, strict=True)])
    torch.testing.assert_close(torch.func.vmap(run)(x, *stacked), each)
    found = torch.func.jacrev(lambda x: run(x, *cores))(x[0, 0])
    jacobian = torch.autograd.functional.jacobian(lambda x: run(x, *cores), x[0, 0])
    torch.testing.assert_close(found, jacobian)
    leaves = [tensor.requires_grad_() for tensor in (x, *cores)]
    y, dys = run(*leaves), torch.stack([wanted, 2 * wanted])
    got = torch.func.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(dys)
    for n in range(2):
        once = torch.autograd.grad(y, leaves, dys[n], retain_graph=True)
        torch.testing.assert_close(tuple(part[n] for part in got), once)


@OWN
def test_forward_mode_derivatives_are_not_lost():
    layer, x, tangent = (
        StructuredLinear(12, 30, BTT(rank=2), bias=False),
        tokens(5, 12).float(),
        tokens(5, 12).float(),
    )
    for requires_grad in (True, False):
        layer.requires_grad_(requires_grad)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
        torch.testing.assert_close(found, layer(tangent))


@pytest.mark.parametrize("shape", [(0, 12), (2, 0, 12), (12,), (1, 1, 1, 12)])
def test_no_tokens_and_one_token_have_gradients(shape):
    layer, x = StructuredLinear(12, 30, BTT(rank=2)), torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 30)
    y.sum().backward()
    assert x.grad.shape == shape
    assert all(bool(p.grad.any()) == bool(x.numel()) for p in layer.parameters())


def test_a_structure_of_ones_alone_is_a_scalar():
    structure = Structure("i -> o", "r i", "o r", i=1, o=1, r=1)
    y = apply(structure, [torch.full((1, 1, 1), 2.0)] * 2, torch.tensor([[3.0]]))
    assert y.item() == 12
