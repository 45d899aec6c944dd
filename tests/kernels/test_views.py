"""Batched products of views: right for every structure, without copies, on any input."""

from functools import partial
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from structlin import BLAST, BTT, Kronecker, Monarch, StructuredLinear, show_config
from structlin._engine import OF_BIAS, OF_CORES, OF_X, devices, operators
from structlin._engine.cpu import library
from structlin._engine.product import define
from tests.catalogue import (
    NARROW,
    NARROW_IDS,
    every_program,
    one_einsum,
    random_cores,
    tokens,
)

TWO_CORES = [BTT(), BTT(rank=3), Monarch(blocks=4), BTT(rank=2).activate()]
IDS = [str(family) for family in TWO_CORES]


@pytest.fixture
def no_engine(monkeypatch):
    """As on a device that the compiled engine does not serve."""
    monkeypatch.setattr(operators, "available", lambda x: False)


def run(structure, cores, x, bias=None):
    return operators.multiply_views(define, structure.program, cores, bias, x)


def compare(structure, cores, x, dy):
    """y and all gradients against one einsum and its autograd."""
    leaves = [leaf.detach().requires_grad_() for leaf in (x, *cores)]
    bias = torch.linspace(-1, 1, structure.out_features, dtype=x.dtype).requires_grad_()
    y = run(structure, leaves[1:], leaves[0], bias)
    found = [y, *torch.autograd.grad(y, [*leaves, bias], dy)]
    flat = leaves[0].reshape(-1, structure.in_features)
    wanted = one_einsum(structure, leaves[1:], flat).reshape(y.shape) + bias
    right = [wanted, *torch.autograd.grad(wanted, [*leaves, bias], dy)]
    torch.testing.assert_close(found, right)
    with torch.no_grad():
        torch.testing.assert_close(run(structure, cores, x, bias), wanted)


@every_program
def test_y_and_all_gradients_are_those_of_one_einsum(structure):
    x = tokens(3, structure.in_features)
    compare(structure, random_cores(structure), x, tokens(3, structure.out_features))


@pytest.mark.parametrize(("structure", "columns", "rows"), NARROW, ids=NARROW_IDS)
def test_a_narrower_layer_pads_x_and_drops_rows(structure, columns, rows):
    program, cores, x = (
        structure.program.fit(columns, rows),
        random_cores(structure),
        tokens(4, columns),
    )
    leaves = [leaf.requires_grad_() for leaf in (x, *cores)]
    y = operators.multiply_views(define, program, leaves[1:], None, x)
    wide = torch.nn.functional.pad(x, (0, structure.in_features - columns))
    wanted = one_einsum(structure, leaves[1:], wide)[:, :rows]
    dy = tokens(4, rows)
    found, right = (torch.autograd.grad(out, leaves, dy) for out in (y, wanted))
    torch.testing.assert_close((y, *found), (wanted, *right))


@pytest.mark.parametrize("family", TWO_CORES, ids=IDS)
@pytest.mark.parametrize(
    "lying", ["turned", "strided", "expanded", "no tokens", "one token", "3-D"]
)
def test_x_and_dy_may_lie_in_any_way(family, lying):
    structure = family.structure(16, 16)
    make = {
        "turned": lambda: tokens(16, 5).mT,
        "strided": lambda: tokens(5, 32)[:, ::2],
        "expanded": lambda: torch.ones((), dtype=torch.float64).expand(5, 16),
        "no tokens": lambda: tokens(0, 16),
        "one token": lambda: tokens(16),
        "3-D": lambda: tokens(2, 16, 3).mT,
    }[lying]
    compare(structure, random_cores(structure), make(), make())


def count_events(family):
    """torch.bmm, and copies of as many numbers as an activation has."""
    structure, count = family.structure(64, 64), 700
    cores = [core.float().requires_grad_() for core in random_cores(structure)]
    x, dy = tokens(count, 64).float().requires_grad_(), tokens(count, 64).float()

    def work():
        torch.autograd.grad(run(structure, cores, x), [x, *cores], dy)

    work()  # which asks the device once
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        work()
    events = profile.events()
    copies = [event.input_shapes[0] for event in events if event.name == "aten::copy_"]
    products = sum(event.name == "aten::bmm" for event in events)
    return products, sum(prod(shape) >= 64 * count for shape in copies)


@pytest.mark.parametrize("family", [BTT(), BTT(rank=4), BTT().activate(), BTT(rank=2).activate()])
def test_two_cores_are_six_products_and_no_copy_of_an_activation(family):
    assert count_events(family) == (6, 0)


def test_an_end_that_interleaves_blocks_is_copied_once_each_way():
    assert count_events(Monarch(blocks=4)) == (6, 2)


def test_three_cores_copy_one_of_two_activations_between_them_each_way():
    assert count_events(BTT(cores=3)) == (9, 2)


@pytest.mark.parametrize("frozen", ["x", "cores", "first core"])
def test_what_needs_no_gradient_gets_none(frozen):
    structure = BTT().structure(16, 16)
    x, *cores = (leaf.requires_grad_() for leaf in (tokens(5, 16), *random_cores(structure)))
    for leaf in {"x": [x], "cores": cores, "first core": cores[:1]}[frozen]:
        leaf.requires_grad_(False)
    run(structure, cores, x).sum().backward()
    assert [leaf.grad is not None for leaf in (x, *cores)] == [
        leaf.requires_grad for leaf in (x, *cores)
    ]


@pytest.mark.parametrize("family", TWO_CORES, ids=IDS)
def test_derivatives_of_derivatives_are_right(family):
    structure = family.structure(16, 16)
    leaves = [leaf.requires_grad_() for leaf in (tokens(3, 16), *random_cores(structure))]
    assert torch.autograd.gradgradcheck(lambda x, *cores: run(structure, cores, x), leaves)


@pytest.mark.usefixtures("no_engine")
def test_many_tokens_take_the_views_and_few_or_shared_cores_the_loop():
    def way(family, count):
        layer = StructuredLinear(64, 64, family)
        return type(layer(torch.randn(count, 64)).grad_fn).__name__

    assert "Product" in way(BTT(), 64)
    assert "Product" in way(BLAST(blocks=4, rank=4), 64)
    assert "Product" in way(BTT(cores=3), 64)
    assert "Product" not in way(BTT(rank=2, cores=3), 64)
    assert "Product" not in way(BTT(), 63)
    assert "Product" not in way(Kronecker(), 64)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("weight_norm", [False, True])
def test_a_layer_is_the_same_compiled_vectorised_and_in_inference_mode(weight_norm):
    layer = StructuredLinear(16, 16, BTT(rank=2).activate(), weight_norm=weight_norm)
    x = torch.randn(3, 32, 16)
    wanted = layer(x)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = [compiled(x), torch.vmap(layer)(x)]
    with torch.inference_mode():
        found += [layer(x).clone()]
    torch.testing.assert_close(found, [wanted] * 3)
    parameters = list(layer.parameters())
    both = [torch.autograd.grad(f(x).square().sum(), parameters) for f in (layer, compiled)]
    torch.testing.assert_close(*both)


@pytest.mark.usefixtures("no_engine")
def test_autocast_gives_its_dtype_and_float32_gradients():
    layer = StructuredLinear(16, 16, BTT())
    x = torch.randn(32, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert {leaf.grad.dtype for leaf in (x, *layer.parameters())} == {torch.float32}
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("no_engine")
def test_float16_that_overflows_is_infinite_as_in_the_loop():
    layer = StructuredLinear(16, 16, BTT(), dtype=torch.float16, bias=False)
    with torch.no_grad():
        for core in layer.cores:
            core.fill_(1.0)
        assert (layer(torch.full((16, 16), 3e4, dtype=torch.float16)) == torch.inf).all()


@pytest.mark.usefixtures("no_engine")
def test_complex_numbers_are_refused_with_the_dtypes_that_work():
    with pytest.raises(TypeError, match="complex64"):
        StructuredLinear(16, 16, BTT())(torch.ones(16, 16, dtype=torch.complex64))


@pytest.mark.usefixtures("no_engine")
def test_meta_and_fake_tensors_have_the_shape_alone_even_past_32_bits():
    layer = StructuredLinear(1024, 1000, BTT(), device="meta")
    x = torch.empty(2**22, 1024, device="meta")
    assert layer(x).shape == (2**22, 1000)
    with torch._subclasses.FakeTensorMode():
        fake = StructuredLinear(1024, 1000, BTT())
        assert fake(torch.empty(2**22, 1024)).shape == (2**22, 1000)


def refuse(bmm, *tensors, out=None):
    if out is not None and not out.is_contiguous():
        raise RuntimeError("a contiguous result is needed")
    return bmm(*tensors) if out is None else bmm(*tensors, out=out)


def forget(bmm, *tensors, out=None):
    """A backend that writes a strided result somewhere else."""
    if out is not None and not out.is_contiguous():
        return out
    return bmm(*tensors) if out is None else bmm(*tensors, out=out)


@pytest.mark.parametrize("backend", [refuse, forget])
def test_a_device_that_writes_no_view_gets_a_copy_and_show_config_says_so(
    backend, monkeypatch, capsys
):
    devices.writes_views.cache_clear()
    monkeypatch.setattr(torch, "bmm", partial(backend, torch.bmm))
    monkeypatch.setattr(library, "_state", library.State(False, "off"))
    try:
        structure = BTT(rank=2).structure(16, 16)
        compare(structure, random_cores(structure), tokens(5, 16), tokens(5, 16))
        show_config()
        assert "results copied, as torch.bmm writes no view there" in capsys.readouterr().out
    finally:
        devices.writes_views.cache_clear()


@pytest.mark.parametrize("family", [BTT(rank=2), Monarch(blocks=4).activate(), BTT(cores=3)])
def test_the_operators_are_what_torch_asks_of_operators(family):
    structure = family.structure(27, 27) if family == BTT(cores=3) else family.structure(16, 16)
    program = structure.program.fit(structure.in_features - 1, structure.out_features - 1)
    cores, bias = random_cores(structure), tokens(program.out_features)
    x, dy = tokens(2, 3, program.in_features), tokens(2, 3, program.out_features)
    ops = torch.ops.structlin
    check = torch.library.opcheck
    check(ops.multiply.views, (x, cores, bias, True, program.numbers))
    _, between = ops.multiply.views(x, cores, bias, True, program.numbers)
    check(ops.gradients.views, (dy, x, between, cores, program.numbers, OF_X | OF_CORES | OF_BIAS))
    x, *cores, bias = (leaf.clone().requires_grad_() for leaf in (x, *cores, bias))
    check(ops.layer.views, (x, cores, bias, True, program.numbers))


@pytest.mark.usefixtures("no_engine")
def test_flops_are_counted_as_two_products_forward_and_four_backward():
    layer = StructuredLinear(64, 64, BTT(), bias=False)
    x = torch.randn(64, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 3 * 64 * layer.structure.flops
