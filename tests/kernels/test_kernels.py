"""What every way through a layer must give, with the compiled engine and by the loop that is the
definition."""

import warnings
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

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
from tests.catalogue import one_einsum, random_cores, tokens

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
OWN = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")


@pytest.fixture(autouse=True, params=["engine", "loop"])
def _way(request, monkeypatch):
    if request.param == "loop":
        monkeypatch.setattr(library, "_state", library.State(False, "switched off by a test"))
    elif not library.load():
        pytest.skip(library._state.says)


def small(family):
    return family.structure(12, 30)


def gradients_of(structure, cores, x, bias):
    """Of the einsum, by autograd: y and its gradients for a fixed dy."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, bias, *cores)]
    x, bias, *cores = leaves
    y = one_einsum(structure, cores, x) + bias
    dy = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)
    return y.detach(), dy, torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("family", [Kronecker(), TT(rank=2)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wide_layers_in_every_dtype(family, dtype):
    structure = family.structure(1024, 1056)
    cores = [core.to(dtype) for core in random_cores(structure)]
    x, bias = tokens(37, 1024).to(dtype), tokens(1056).to(dtype)
    y, dy, grads = gradients_of(
        structure, [core.double() for core in cores], x.double(), bias.double()
    )
    leaves = [tensor.requires_grad_() for tensor in (x, bias, *cores)]
    own = apply(structure, cores, x, bias)
    for got, wanted in zip(
        (own, *torch.autograd.grad(own, leaves, dy.to(dtype))), (y, *grads), strict=True
    ):
        assert got.dtype == dtype
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize("family", FEW + ACTIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(family, dtype):
    structure = small(family)
    cores = [core.to(dtype) for core in random_cores(structure)]
    x, bias = tokens(29, 12).to(dtype), tokens(30).to(dtype)
    y, dy, grads = gradients_of(
        structure, [core.double() for core in cores], x.double(), bias.double()
    )
    leaves = [tensor.requires_grad_() for tensor in (x, bias, *cores)]
    own = apply(structure, cores, x, bias)
    got = torch.autograd.grad(own, leaves, dy.to(dtype))
    for value, expected in zip((own, *got), (y, *grads), strict=True):
        assert value.dtype == dtype
        assert (value.double() - expected).norm() < 20 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("family", FEW + ACTIVE)
def test_gradients_and_their_gradients_are_those_of_finite_differences(family):
    structure = (
        family.structure(6, 4) if family != Monarch(blocks=6) else Monarch(blocks=2).structure(4, 8)
    )
    leaves = [
        *random_cores(structure),
        tokens(3, structure.in_features),
        tokens(structure.out_features),
    ]
    for leaf in leaves:
        leaf.requires_grad_()

    def run(*leaves):
        *cores, x, bias = leaves
        return apply(structure, cores, x, bias)

    assert gradcheck(run, leaves)
    assert gradgradcheck(run, leaves)


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
@pytest.mark.parametrize("family", [BTT(rank=1), BTT(rank=2), BTT(rank=2).activate()], ids=repr)
def test_a_compiled_layer_trains_as_an_eager_one_for_every_number_of_tokens(family):
    torch._dynamo.reset()
    layer = StructuredLinear(12, 30, family, weight_norm=True, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (5, 9, 33):
        x, grads = tokens(2, n, 12).requires_grad_(), []
        for run in (layer, compiled):
            grads.append(torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()]))
        torch.testing.assert_close(*grads)


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
    cores, x, bias = random_cores(structure), tokens(5, 12), tokens(30)
    _, dy, wanted = gradients_of(structure, cores, x, bias)
    for n, leaf in enumerate((x, bias, *cores)):
        leaf.requires_grad_(True)
        own = apply(structure, cores, x, bias)
        torch.testing.assert_close(torch.autograd.grad(own, leaf, dy)[0], wanted[n])
        leaf.requires_grad_(False)


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


def test_torch_func_sees_through_the_layer():
    structure = BTT(rank=2).structure(12, 30)
    cores, x = random_cores(structure), tokens(5, 12)
    jacobian = torch.func.jacrev(lambda x: apply(structure, cores, x))(x[0])
    torch.testing.assert_close(jacobian, apply(structure, cores, torch.eye(12, dtype=x.dtype)).mT)
    several = [torch.stack([core, 2 * core]) for core in cores]
    batched = torch.func.vmap(lambda *cores: apply(structure, cores, x))(*several)
    y = one_einsum(structure, cores, x)
    torch.testing.assert_close(batched, torch.stack([y, 4 * y]))


@pytest.mark.parametrize("family", [BTT(rank=2), BTT(rank=2).activate()], ids=repr)
@pytest.mark.parametrize("count", [4, 40])  # core by core; by W, where there is one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtypes_of_a_dense_layer(family, count, dtype):
    layer, dense = StructuredLinear(12, 30, family), torch.nn.Linear(12, 30)
    x = torch.randn(count, 12, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = layer(x)
        assert y.dtype == dense(x).dtype == dtype
    y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} | {x.grad.dtype} == {torch.float32}
    torch.testing.assert_close(y.float(), layer(x), atol=0.05, rtol=0.05)


def test_inputs_of_any_strides_and_unaligned_cores_give_the_same_numbers():
    structure = BTT(rank=2).structure(64, 64)
    cores = [core.float() for core in random_cores(structure)]
    x = tokens(40, 64).float()
    y = apply(structure, cores, x)
    for shift in (1, 2, 5):
        moved = []
        for core in cores:
            moved.append(torch.empty(core.numel() + shift)[shift:].view(core.shape).copy_(core))
        torch.testing.assert_close(apply(structure, moved, x), y)
    strided = [core.permute(2, 0, 1).contiguous().permute(1, 2, 0) for core in cores]
    torch.testing.assert_close(apply(structure, strided, x.mT.contiguous().mT), y)
    expanded = x[:1].expand(3, 64).requires_grad_()
    apply(structure, cores, expanded).sum().backward()


def bad(**changes):
    structure = Kronecker().structure(12, 30)
    first, last = (torch.randn(core.shape) for core in structure.cores)
    given = {"cores": [first, last], "x": torch.randn(4, 12), "bias": torch.randn(30)}
    given |= {key: change(given[key]) for key, change in changes.items()}
    return structure, given["cores"], given["x"], given["bias"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"cores": lambda c: [c[0], c[1].double()]},
            ValueError,
            r"cores\[1\] is torch.float64 on cpu, cores\[0\] is",
        ),
        (
            {"cores": lambda c: [c[0], c[1].to("meta")]},
            ValueError,
            r"cores\[1\] is torch.float32 on meta",
        ),
        (
            {"cores": lambda c: [c[0], c[1].mT]},
            ValueError,
            r"cores\[1\] has shape .*; the structure needs",
        ),
        ({"cores": lambda c: c[:1]}, ValueError, "1 cores given; the structure has 2"),
        ({"x": lambda x: x[:, :11]}, ValueError, "its last dimension must be in_features=12"),
        ({"x": lambda x: x.to("meta")}, ValueError, "x is on meta, the cores are on cpu"),
        (
            {"x": lambda x: x.double()},
            TypeError,
            "x has dtype torch.float64, the cores have torch.float32",
        ),
        ({"x": lambda x: x.int()}, TypeError, "needs a floating-point input"),
        (
            {"bias": lambda b: b[:12]},
            ValueError,
            r"bias has shape \(12,\).* \(out_features,\) = \(30,\)",
        ),
        ({"bias": lambda b: b.to("meta")}, ValueError, "bias has shape .* on meta"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        apply(*bad(**changes))


@pytest.mark.parametrize("shape", [(0, 12), (2, 0, 12), (12,)])
def test_no_tokens_and_one_token_have_gradients(shape):
    layer, x = StructuredLinear(12, 30, BTT(rank=2)), torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 30)
    y.sum().backward()
    assert x.grad.shape == shape
    assert all(p.grad is not None and (p.grad.any() or not x.numel()) for p in layer.parameters())


def test_a_structure_of_ones_alone_is_a_scalar():
    structure = Structure("i -> o", "r i", "o r", i=1, o=1, r=1)
    with warnings.catch_warnings():
        y = apply(structure, [torch.full((1, 1, 1), 2.0)] * 2, torch.tensor([[3.0]]))
    assert y.item() == 12
