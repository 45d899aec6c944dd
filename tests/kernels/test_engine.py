"""The compiled CPU engine: its numbers against einsum in float64, its place in the stack, and which
way a call takes."""

import multiprocessing
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
)
from structlin._engine import operators, product
from structlin._engine.cpu import library
from structlin._engine.operators import OF_BIAS, OF_CORES, OF_GAINS, OF_X
from tests.catalogue import (
    every_program,
    one_einsum,
    random_cores,
    silu_rms,
    structures,
    tokens,
)

pytestmark = pytest.mark.skipif(not library.load(), reason="there is no engine here")
OWN = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALL = OF_X | OF_CORES | OF_BIAS


def forward(structure, cores, x, bias=None, gains=None, sigmas=()):
    return operators._multiply(x, cores, bias, gains, sigmas, structure.program.numbers)


def backward(structure, dy, x, cores, wants=ALL, gains=None, sigmas=()):
    """dx, dcores, dgains and dbias."""
    return operators._gradients(dy, x, cores, gains, sigmas, structure.program.numbers, wants)


def results(structure, cores, x, bias, dy):
    """y, dx, dcores and dbias."""
    dx, *dcores, _, dbias = backward(structure, dy, x, cores)
    return [forward(structure, cores, x, bias), dx, *dcores, dbias]


def by_einsum(structure, cores, x, bias, dy):
    """y, dx, dcores and dbias, in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, *cores, bias)]
    y = one_einsum(structure, leaves[1:-1], leaves[0]) + leaves[-1]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def assert_near(own, wanted, dtype):
    for value, expected in zip(own, wanted, strict=True):
        assert value.dtype == dtype
        assert value.shape == expected.shape
        size = expected.norm() + expected.numel() ** 0.5  # as numbers of order 1 may cancel
        assert (value.double() - expected).norm() <= 20 * torch.finfo(dtype).eps * size


# ---- numbers -------------------------------------------------------------------------------------


def assert_right(structure, dtype, counts):
    """The numbers are those of einsum, with a bias and without, and the same bits twice."""
    cores, bias = random_cores(structure, dtype), tokens(structure.out_features, dtype=dtype)
    for n in counts:
        x = tokens(n, structure.in_features, dtype=dtype)
        dy = tokens(n, structure.out_features, dtype=dtype).cos()
        own, again = (results(structure, cores, x, bias, dy) for _ in range(2))
        y, *rest = by_einsum(structure, cores, x, bias, dy)
        assert_near(own, [y, *rest], dtype)
        assert_near([forward(structure, cores, x)], [y - bias.double()], dtype)
        assert all(map(torch.equal, own, again))


@every_program
def test_values_and_gradients_are_those_of_einsum_for_every_dtype_and_number_of_tokens(structure):
    many = (1, 3, 7, 16, 37, 131) if structure.out_features < 10_000 else (1, 7)
    for dtype in DTYPES:
        assert_right(structure, dtype, many)


WIDE = [
    BTT(),
    BTT(rank=4),
    BTT(rank=2, cores=3),
    Monarch(blocks=4),
    Monarch(blocks=32),
    Kronecker(),
    TT(rank=4),
    LowRank(rank=300),
    LowRank(rank=40),
]
ACTIVE = [family.activate() for family in (*WIDE[1:3], WIDE[4], WIDE[5], WIDE[8])]
SQUARE = [BTT(), BTT(rank=2), BlockDiagonal(blocks=8)]  # tokens are read and written where they lie


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("family", "fan_out"),
    [(family, 1024 if "Monarch" in family.label else 1056) for family in WIDE + ACTIVE]
    + [(family, 1024) for family in SQUARE],
    ids=str,
)
def test_wide_layers_on_several_threads_and_the_same_bits_twice(
    family, fan_out, threads, set_threads
):
    set_threads(threads)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert_right(family.structure(1024, fan_out), dtype, (1, 4, 11, 16, 40, 101, 203))


# one below, at and above the sides of the tiles in which a CPU may multiply bfloat16
@pytest.mark.parametrize("fan_out", [15, 16, 31, 48, 70])
@pytest.mark.parametrize("fan_in", [9, 16, 24, 38, 64])
def test_blocks_of_any_size_in_bfloat16(fan_out, fan_in):
    structure = BlockDiagonal(blocks=3).structure(3 * fan_in, 3 * fan_out)
    assert_right(structure, torch.bfloat16, (16, 33, 64, 203))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", [Monarch(blocks=4), BTT(rank=4), TT(rank=16), Kronecker(), BTT(rank=4).activate()]
)
def test_threads_that_share_few_tokens_give_the_bits_of_one_thread(family, dtype, set_threads):
    structure = family.structure(1024, 512)
    cores = random_cores(structure, dtype)
    gains = torch.full((len(cores),), 0.5, dtype=torch.float64)  # which clip nothing
    x, dy = tokens(4, 1024, dtype=dtype), tokens(4, 512, dtype=dtype).cos()
    wants, sigmas = ALL | OF_GAINS, [1e3] * len(cores)
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        own = backward(structure, dy, x, cores, wants, gains, sigmas)
        found.append([*own, *(forward(structure, cores, x[:n]) for n in (1, 3, 4))])
    for shared in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], shared, strict=True))
    without = backward(structure, dy, x, [0.5 * core for core in cores])
    assert_near(found[1][:1], [without[0].double()], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shrink", [0.1, 10.0])
@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize("family", [BTT(rank=2), BTT(rank=2).activate()], ids=repr)
def test_weight_normalisation_inside_is_that_outside(dtype, shrink, n, family):
    structure = family.structure(64, 48)
    stored = [core * shrink for core in random_cores(structure)]
    sigmas = [0.3, 0.2]
    gains = torch.tensor([0.7, 1.6], dtype=torch.float64)
    given = [
        tensor.to(dtype).requires_grad_() for tensor in (tokens(n, 64), tokens(48), gains, *stored)
    ]
    affine = operators.Affine(structure.program, given[3:], *given[1:3], sigmas)
    own = operators.multiply(product.define, affine, given[0])
    assert "Product" in own.grad_fn.name()
    found = [own, *torch.autograd.grad(own, given, own.detach().sin())]

    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    scaled = [
        gain * torch.clamp(sigma / core.square().mean().sqrt(), max=1) * core
        for core, gain, sigma in zip(exact[3:], exact[2], sigmas, strict=True)
    ]
    y = one_einsum(structure, scaled, exact[0]) + exact[1]
    assert_near(found, [y, *torch.autograd.grad(y, exact, own.detach().double().sin())], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_tokens_times_large_blocks_with_gains_of_their_dtype(dtype):
    structure = LowRank(rank=512).structure(512, 520)
    cores, bias = random_cores(structure, dtype), tokens(520, dtype=dtype)
    gains = torch.full((2,), 0.5, dtype=dtype)
    for n in (1, 5, 16):
        x = tokens(n, 512, dtype=dtype)
        exact = one_einsum(structure, [core.double() for core in cores], x.double())
        y = forward(structure, cores, x, bias)
        scaled = forward(structure, cores, x, bias, gains, [100.0, 100.0])
        assert_near([y, scaled], [exact + bias.double(), exact / 4 + bias.double()], dtype)


def test_a_core_whose_squares_overflow_is_normalised():
    structure = BTT().structure(16, 16)
    cores = [core.float() * 1e30 for core in random_cores(structure)]
    y = forward(structure, cores, tokens(3, 16).float(), None, torch.ones(2).double(), [0.5, 0.5])
    assert y.isfinite().all()
    assert y.abs().max() > 1e-3


@given(structure=structures(max_width=64, activated=True), wants=st.integers(0, 15))
def test_only_the_gradients_that_are_asked_for_are_computed(structure, wants):
    cores, x, dy = (
        random_cores(structure),
        tokens(5, structure.in_features),
        tokens(5, structure.out_features),
    )
    gains, sigmas = tokens(len(cores)), [1.0] * len(cores)
    everything = backward(structure, dy, x, cores, 15, gains, sigmas)
    got = backward(structure, dy, x, cores, wants, gains, sigmas)
    asked = [
        wants & OF_X,
        *[wants & OF_CORES] * len(cores),
        wants & OF_GAINS,
        wants & OF_BIAS,
    ]
    for own, full, wanted in zip(got, everything, asked, strict=True):
        torch.testing.assert_close(own, full if wanted else own.new_empty(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 20])
def test_views_of_any_strides_give_the_numbers_of_their_copies(dtype, n):
    structure = BTT(rank=2).structure(64, 48)
    cores, bias = random_cores(structure, dtype), tokens(48, dtype=dtype)
    whole = tokens(n + 1, 3 * 64 + 5, dtype=dtype)
    views = [
        whole[:n, 1:65],  # unaligned rows
        whole[1:, 0:192:3],
        whole.flatten()[: n * 64].view(64, n).mT,
        whole[:1, :64].expand(n, 64),
        whole.flatten().as_strided((n, 64), (1, 1)),  # overlapping
        whole[:n, :64].flip(0),
        whole[:n, :64].unflatten(0, (n, 1)).unsqueeze(1),
    ]
    for x in views:
        own = forward(structure, cores, x, bias)
        assert torch.equal(
            own, forward(structure, cores, x.clone(memory_format=torch.contiguous_format), bias)
        )
    strided = [core.permute(2, 0, 1).contiguous().permute(1, 2, 0) for core in cores]
    shifted = [
        torch.empty(core.numel() + 1, dtype=dtype)[1:].view(core.shape).copy_(core)
        for core in cores
    ]
    for others in (strided, shifted):
        assert torch.equal(
            forward(structure, others, views[0], bias), forward(structure, cores, views[0], bias)
        )
    repeated = torch.ones(1, dtype=dtype).expand(48)
    ones = torch.ones(48, dtype=dtype)
    assert torch.equal(
        forward(structure, cores, views[0], repeated), forward(structure, cores, views[0], ones)
    )
    dy = torch.ones(1, 1, dtype=dtype).expand(n, 48)
    for a, b in zip(
        backward(structure, dy, views[0], cores),
        backward(structure, dy.clone(), views[0], cores),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_view_that_torch_keeps_negated_is_resolved():
    structure = BTT().structure(16, 16)
    cores = [core.float() for core in random_cores(structure)]
    x = torch.view_as_complex(torch.randn(3, 16, 2)).conj().imag
    assert x.is_neg()
    assert torch.equal(forward(structure, cores, x), forward(structure, cores, x.clone()))


def poisoned(values):
    """A copy with NaN all around it in memory, and a check that nothing was written there."""
    memory = torch.full((values.numel() + 256,), torch.nan, dtype=values.dtype)
    inside = memory[128 : 128 + values.numel()].view(values.shape).copy_(values)
    return inside, lambda: memory[:128].isnan().all() and memory[-128:].isnan().all()


@pytest.mark.parametrize("family", WIDE[2:7] + ACTIVE[1:4], ids=repr)
@pytest.mark.parametrize("n", [1, 3, 131])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_the_tensors_is_read_or_written(family, n, dtype):
    structure = family.structure(64, 64)
    given = [tokens(n, 64, dtype=dtype), tokens(n, 64, dtype=dtype), tokens(64, dtype=dtype)]
    given, intact = zip(
        *[poisoned(values) for values in [*given, *random_cores(structure, dtype)]], strict=True
    )
    x, dy, bias, *cores = given
    found = [forward(structure, cores, x, bias), *backward(structure, dy, x, cores)]
    assert all(tensor.isfinite().all() for tensor in found)
    assert all(check() for check in intact)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["a token", "a block of a core"])
@pytest.mark.parametrize("n", [1, 19])
@pytest.mark.parametrize("family", [BTT(rank=2), BTT(rank=2).activate()], ids=repr)
def test_nan_and_inf_go_where_the_formula_takes_them(bad, place, n, family):
    structure = family.structure(20, 30)
    cores, dy = [core.float() for core in random_cores(structure)], tokens(n, 30).float()
    x, bias = tokens(n, 20).float(), tokens(30).float()
    (x[n // 2] if place == "a token" else cores[0][1, 2])[3] = bad
    own = results(structure, cores, x, bias, dy)
    wanted = by_einsum(structure, cores, x, bias, dy)
    for found, expected in zip(own, wanted, strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())
    if place == "a token":
        assert own[0][torch.arange(n) != n // 2].isfinite().all()
    loop = product.multiply(structure.program, cores, x)
    assert torch.equal(own[0].isfinite(), loop.isfinite())
    assert own[-1].isfinite().all()


@pytest.mark.parametrize("n", [1, 19])
@pytest.mark.parametrize("place", [0, 1])
def test_a_nan_in_a_normalised_core_reaches_all_that_the_core_makes(place, n):
    structure, sigma = BTT(rank=2).structure(20, 30), 0.1
    cores, dy = [core.float() for core in random_cores(structure)], tokens(n, 30).float()
    x, gains = tokens(n, 20).float(), torch.tensor([0.7, 1.3], dtype=torch.float64)
    cores[place][1, 2, 3] = torch.nan
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, gains, *cores)]
    _, gain_leaves, *core_leaves = leaves
    one = torch.ones((), dtype=torch.float64)
    normalised = [
        core * gain * torch.minimum(one, sigma / core.square().mean().sqrt())
        for core, gain in zip(core_leaves, gain_leaves, strict=True)
    ]
    y = one_einsum(structure, normalised, leaves[0])
    wanted = [y, *torch.autograd.grad(y, leaves, dy.double())]
    sigmas = [sigma, sigma]
    dx, *dcores, dgains, _ = backward(structure, dy, x, cores, ALL | OF_GAINS, gains, sigmas=sigmas)
    y = forward(structure, cores, x, None, gains, sigmas)
    assert y.isnan().all()
    for found, expected in zip((y, dx, dgains, *dcores), wanted, strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_activation_and_its_slope_are_those_of_the_formula_for_every_number(dtype):
    structure, ones = LowRank(rank=1).activate().structure(1, 1), torch.ones(1, 1, 1, dtype=dtype)
    info = torch.finfo(dtype)
    flushed = 2000 * info.tiny  # where exp(x) is below the smallest number that is no denormal
    sizes = torch.logspace(-36, 38 if dtype == torch.float32 else 307, 5000, dtype=torch.float64)
    near = torch.linspace(-800, 800, 40_001, dtype=torch.float64)
    x = torch.cat([sizes, -sizes, near, near / 100, near.new_zeros(1)]).to(dtype)
    exact, rms = x.double(), silu_rms()
    small = torch.exp(-exact.abs())
    sigmoid = torch.where(exact < 0, small, torch.ones_like(small)) / (1 + small)
    other = torch.where(exact < 0, torch.ones_like(small), small) / (1 + small)  # 1 - sigmoid
    wanted, slopes = exact * sigmoid / rms, sigmoid * (1 + exact * other) / rms
    for part in (slice(None), slice(5_000, 5_001), slice(22_000, 22_003)):  # tiles, and GEMV
        y = forward(structure, [ones, ones], x[part, None])[:, 0]
        error = (y.double() - wanted[part]).abs()
        assert (error <= 3 * info.eps * wanted[part].abs() + flushed).all()
    dx, *_ = backward(structure, torch.ones_like(x)[:, None], x[:, None], [ones, ones], OF_X)
    error, far = (dx[:, 0].double() - slopes).abs(), exact.abs() > 3
    assert (error <= 8 * info.eps * slopes.abs().where(far, 1.0) + flushed).all()
    ends = x.new_tensor([[torch.inf], [-torch.inf], [torch.nan]]).repeat(20, 1)
    for some in (ends[:3], ends):
        y = forward(structure, [ones, ones], some)
        torch.testing.assert_close(y, F.silu(some), equal_nan=True)


@pytest.mark.parametrize("n", [1, 40])  # GEMV, and tiles
@pytest.mark.parametrize("family", [BTT(rank=2), Monarch(blocks=4)], ids=repr)
def test_numbers_near_the_smallest_of_a_dtype_are_as_right_as_others(family, n):
    structure = family.structure(64, 64)
    cores = [core.float() for core in random_cores(structure)]
    for size in (1e-35, 1e-39):  # in between, and inside, of float32's denormals
        x, dy = tokens(n, 64).float() * size, tokens(n, 64).cos().float() * size
        y = forward(structure, cores, x)
        dx, *dcores, _, _ = backward(structure, dy, x / size, cores)
        y_wanted, *_ = by_einsum(structure, cores, x, torch.zeros(64), dy)
        _, dx_wanted, *dcores_wanted, _ = by_einsum(structure, cores, x / size, torch.zeros(64), dy)
        for found, wanted in zip(
            (y, dx, *dcores), (y_wanted, dx_wanted, *dcores_wanted), strict=True
        ):
            assert (found.double() - wanted).norm() <= 2e-5 * wanted.norm()
            assert wanted.abs().max() < 1e4 * size


@pytest.mark.parametrize("flushes", [True, False])
def test_how_the_process_treats_denormals_is_left_as_it_is(flushes):
    structure = Kronecker().structure(64, 64)
    cores = [torch.ones(core.shape) for core in structure.cores]
    small = torch.full((40, 64), 1e-40)
    assert torch.set_flush_denormal(flushes)
    try:
        y = forward(structure, cores, small)
        assert bool(y.any()) is not flushes
        assert bool(small.mul(1.0).any()) is not flushes
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "broken",
    [
        lambda x, cores, numbers: (x[:, :11], cores, numbers),
        lambda x, cores, numbers: (x, cores[:1], numbers),
        lambda x, cores, numbers: (x, [cores[0], cores[1][:, :1]], numbers),
        lambda x, cores, numbers: (x, [cores[0], cores[1].float()], numbers),
        lambda x, cores, numbers: (x.int(), [core.int() for core in cores], numbers),
        lambda x, cores, numbers: (x, cores, (*numbers, 0)),
        lambda x, cores, numbers: (x, cores, numbers[:-1]),
        lambda x, cores, numbers: (x, cores, (*numbers[:-1], 2)),  # no activation
        lambda x, cores, numbers: (x, cores, (*numbers[:-1], -1)),
        lambda x, cores, numbers: (x, cores, (*numbers[:2], -1, *numbers[3:])),
        lambda x, cores, numbers: (x.repeat(1, 2), cores, (24, *numbers[1:])),  # wider than it
        lambda x, cores, numbers: (x, cores, (12, 2000, *numbers[2:])),
        lambda x, cores, numbers: (x, cores, (*numbers[:3], 2**62, *numbers[4:])),
    ],
)
def test_the_operator_itself_refuses_what_does_not_fit(broken):
    structure = BTT(rank=2).structure(12, 30)
    x, cores, numbers = broken(tokens(5, 12), random_cores(structure), structure.program.numbers)
    with pytest.raises(RuntimeError, match="structlin:"):
        operators._multiply(x, cores, None, None, (), numbers)


@pytest.mark.parametrize(
    "numbers",
    [
        (6, 8, 1, *(2, 1, 3, 4), 2, 2, 3, 1, 0, 0, 0),  # in the core that reads
        (8, 6, 1, *(2, 1, 4, 3), 0, 2, 3, 2, 1, 0, 0),  # in the core that writes
        (12, 12, 2, *(3, 1, 4, 4), *(2, 1, 6, 6), 0, 0, 0, 0),  # between two cores
    ],
    ids=str,
)
def test_a_program_that_moves_features_across_blocks_is_refused(numbers):
    with pytest.raises(RuntimeError, match="these numbers are no program"):
        operators.choose(numbers, torch.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s, cores, x: operators.choose(s.program.numbers, x.dtype, -1),
            "there are -1 tokens",
        ),
        (
            lambda s, cores, x: forward(s, cores, x, None, torch.ones(2).long(), [1.0, 1.0]),
            "the gains must be float32",
        ),
        *(
            (
                lambda s, cores, x, shape=shape: forward(
                    s, cores, x, None, torch.ones(shape), [1, 1]
                ),
                "a gain and a sigma are needed for every core",
            )
            for shape in ((3,), (1, 2), (2, 1), ())
        ),
        (
            lambda s, cores, x: backward(s, tokens(5, 30), x, cores, operators.OF_GAINS),
            "there must be some for their gradient",
        ),
    ],
)
def test_the_operators_name_the_argument_that_does_not_fit(call, message):
    structure = BTT(rank=2).structure(12, 30)
    with pytest.raises(RuntimeError, match=message):
        call(structure, random_cores(structure), tokens(5, 12))


# ---- the stack -----------------------------------------------------------------------------------


@OWN
@pytest.mark.parametrize("gains", [None, torch.tensor([1.5, 0.5], dtype=torch.float64)])
def test_the_operators_keep_the_contract_of_torch_library(gains):
    structure = Monarch(blocks=2).structure(12, 30)
    cores = [core.float() for core in random_cores(structure)]
    leaves = [core.clone().requires_grad_() for core in cores]
    x, bias, dy = tokens(5, 12).float(), tokens(30).float(), tokens(5, 30).float()
    numbers = gains, [] if gains is None else [0.1, 0.2], structure.program.numbers
    check = partial(torch.library.opcheck, test_utils=["test_schema", "test_faketensor"])
    for rows in (x, x[:0], x[None]):
        check(operators._multiply, (rows, cores, bias, *numbers))
        torch.library.opcheck(
            operators._layer, (rows.clone().requires_grad_(), leaves, bias, *numbers)
        )
    for wants in (15, 1, 2):
        check(operators._gradients, (dy, x, cores, *numbers, wants & (11 if gains is None else 15)))


@OWN
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("family", WIDE[:7] + ACTIVE[:1], ids=repr)
def test_compiled_it_takes_as_many_graphs_as_a_dense_layer(family, dynamic, train):
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    graphs = []
    for layer in (nn.Linear(256, 256), StructuredLinear(256, 256, family, weight_norm=True)):
        layer.double()
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=dynamic)
        for batch in (1, 2, 3, 5, 8, 16):
            x = torch.randn(batch, 256, dtype=torch.float64, requires_grad=train)
            with torch.set_grad_enabled(train):
                pair = compiled(x), layer(x)
                torch.testing.assert_close(*pair)
            if train:
                leaves = [x, *layer.parameters()]
                grads = [torch.autograd.grad(y.square().sum(), leaves) for y in pair]
                torch.testing.assert_close(*grads)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[0]
    assert any("structlin" in str(node.target) for node in counter.graphs[-1].graph.nodes)


@OWN
@pytest.mark.parametrize(
    "transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sin().sum())]
)
def test_transforms_of_torch_func_inside_a_compiled_program_take_the_loop(transform):
    torch._dynamo.reset()
    layer, x = StructuredLinear(64, 48, BTT(rank=2)).double(), tokens(3, 5, 64)
    compiled = torch.compile(
        lambda x: transform(lambda x: layer(x))(x), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), transform(lambda x: layer(x))(x))


@pytest.mark.parametrize("family", [BTT(rank=2), BTT(rank=2).activate()], ids=repr)
def test_flops_are_counted_forward_and_backward(family):
    layer = StructuredLinear(12, 30, family)
    first, last = (core.flops for core in layer.structure.cores)
    with FlopCounterMode(display=False) as counter:
        y = layer(torch.randn(2, 5, 12, requires_grad=True))
        assert counter.get_total_flops() == 10 * (first + last)
        y.sum().backward()
    assert counter.get_total_flops() == 10 * (3 * (first + last) + first)
    layer.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(2, 5, 12, requires_grad=True)).sum().backward()
    again = first if layer.structure.between else 0
    assert counter.get_total_flops() == 10 * (2 * (first + last) + again)


@pytest.mark.parametrize("family", [BTT(rank=2), BTT(rank=2).activate()], ids=repr)
def test_nothing_but_the_inputs_is_saved(family):
    layer, x, held = (
        StructuredLinear(64, 64, family, weight_norm=True),
        torch.randn(50, 64),
        [],
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        layer(x)
    wide = {t.data_ptr() for t in held if t.numel() > 2}  # the two gains are saved in float64
    assert wide <= {x.data_ptr(), *(p.data_ptr() for p in layer.parameters())}


LOSES = """
import os
from pathlib import Path
import torch
from structlin import BTT
from structlin._engine import operators
from structlin._engine.cpu import library
assert library.load()
structure, x = BTT(cores=4).structure(256, 256), torch.randn(1, 256)
cores, numbers = [torch.randn(core.shape) for core in structure.cores], structure.program.numbers
used = []
for _ in range(2):
    for _ in range(10_000):
        operators._multiply(x, cores, None, None, (), numbers)
        operators._gradients(x, x, cores, None, (), numbers, operators.OF_X)
    used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
assert used[1] - used[0] < 10_000 * 8 * len(numbers), used
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says how much is used")
def test_no_memory_is_lost_from_call_to_call():
    subprocess.run([sys.executable, "-c", LOSES], check=True)  # whose heap has no room left over


def test_a_saved_core_that_is_changed_in_place_is_an_error_in_the_backward_pass():
    layer = StructuredLinear(12, 30, BTT(rank=2))
    y = layer(torch.randn(5, 12))
    with torch.no_grad():
        layer.cores[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_eight_threads_go_through_one_layer():
    layer = StructuredLinear(64, 48, BTT(rank=2))
    inputs = [torch.randn(n, 64) for n in (1, 3, 16, 17, 40, 64, 100, 200)]
    wanted, wrong = [layer(x) for x in inputs], []

    def run(x, y):
        for _ in range(50):
            if not torch.equal(layer(x), y):
                wrong.append(x.shape)
            torch.autograd.grad(layer(x).sum(), list(layer.parameters()))

    running = [threading.Thread(target=run, args=pair) for pair in zip(inputs, wanted, strict=True)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


def _forked(layer, x, queue):
    queue.put(layer(x).detach().numpy())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of fork beside threads
def test_a_process_that_is_forked_after_use_goes_on():
    layer, x = StructuredLinear(64, 48, BTT(rank=2)), torch.randn(100, 64)
    y = layer(x)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_forked, args=(layer, x, queue))
    child.start()
    found = queue.get(timeout=600)
    child.join(600)
    assert torch.equal(torch.from_numpy(found), y.detach())


# ---- which way a call takes ----------------------------------------------------------------------

# and the engine is not built for a CPU without, as CI does
CPU = Path("/proc/cpuinfo")
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_UNIT = library.has_matrix_unit() and HAS_AVX512


@pytest.mark.parametrize(
    ("dtype", "blocks", "takes"),
    [
        (torch.float32, 4, True),  # blocks of 256 x 256
        (torch.bfloat16, 4, True),
        (torch.bfloat16, 2, HAS_UNIT),
        (torch.bfloat16, 1, False),
        (torch.float32, 2, False),  # blocks of 512 x 512
    ],
)
def test_blocks_that_blas_has_at_its_own_rate_are_left_to_it(dtype, blocks, takes):
    layer = StructuredLinear(1024, 1024, Monarch(blocks=blocks), dtype=dtype)
    y = layer(torch.randn(600, 1024).to(dtype).requires_grad_())
    assert (y.grad_fn.name() == "_ProductBackward") == takes


BLAS, GEMV, TILES = operators.Path


@pytest.mark.parametrize(
    ("family", "width", "tokens", "trains", "path"),
    [
        (BTT(), 1024, 1, False, GEMV),
        (BTT(), 1024, 4096, False, TILES),
        (BTT(), 1024, 4096, True, TILES),
        (BTT().activate(), 1024, 4096, True, TILES),
        (LowRank(rank=64).activate(), 1024, 4096, True, BLAS),
        (LowRank(rank=64), 1024, 1, False, GEMV),
        (LowRank(rank=64), 1024, 1, True, BLAS),  # a chain of matrices
        (LowRank(rank=64), 1024, 17, False, BLAS),
        (Monarch(blocks=2), 1024, 16, False, GEMV),  # blocks of 512 x 512
        (Monarch(blocks=2), 1024, 17, False, BLAS),
        (Monarch(blocks=2), 1024, 1, True, BLAS),
        (Kronecker(), 1024, 1, False, GEMV),
        (Kronecker(), 1024, 17, False, TILES),
        (BlockDiagonal(blocks=16), 4096, 256, False, BLAS),  # one core: of no more tokens than
        (BlockDiagonal(blocks=16), 4096, 257, False, TILES),  # its fan-in
    ],
)
def test_it_is_asked_which_way_a_call_takes(family, width, tokens, trains, path):
    numbers = family.structure(width, width).program.numbers
    assert operators.choose(numbers, torch.float32, tokens, trains) == path


@pytest.mark.parametrize(
    ("family", "dtype", "trains", "path"),
    [
        (BTT(), torch.float64, True, TILES),
        (Kronecker(), torch.float64, False, BLAS),  # blocks that a token uses 128 times
        (Kronecker(), torch.float32, True, BLAS),
        (BlockDiagonal(blocks=128), torch.float32, True, BLAS),  # one core
        (Monarch(blocks=128), torch.float32, True, TILES),
    ],
)
def test_one_vector_of_tokens_is_left_to_blas_where_it_is_faster(family, dtype, trains, path):
    numbers = family.structure(8192, 8192).program.numbers
    lanes = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
    tokens = lanes * 4 // dtype.itemsize
    assert operators.choose(numbers, dtype, tokens, trains) == path
    assert operators.choose(numbers, dtype, 64, trains) == TILES


@pytest.mark.skipif(not HAS_UNIT, reason="this CPU has no matrix unit")
@pytest.mark.parametrize(
    ("tokens", "trains", "path"), [(512, True, BLAS), (512, False, TILES), (513, True, TILES)]
)
def test_large_blocks_are_the_matrix_units_for_many_tokens_alone(tokens, trains, path):
    numbers = Monarch(blocks=4).structure(2048, 2048).program.numbers  # blocks of 512 x 512
    assert operators.choose(numbers, torch.bfloat16, tokens, trains) == path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_of_two_byte_numbers_is_left_to_blas_where_it_multiplies_them(dtype):
    if dtype == torch.bfloat16:
        native = HAS_AVX512 and torch.cpu._is_avx512_bf16_supported()
    else:
        native = CPU.exists() and "avx512_fp16" in CPU.read_text()
    for width, takes in ((8192, native), (1024, False)):
        numbers = BTT(rank=2).structure(width, width).program.numbers
        assert (operators.choose(numbers, dtype, 4, True) == BLAS) == takes
        assert operators.choose(numbers, dtype, 64, True) == TILES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [5, 16, 17, 40])
def test_a_core_may_read_its_features_in_another_order_than_x_has_them(dtype, count):
    structure = Structure("i k -> o", "o k i", i=8, k=4, o=16)  # fan-in runs as k, i
    core, x = torch.randn(1, 16, 32).to(dtype), torch.randn(count, 32).to(dtype)
    program = structure.program
    own = operators.multiply(product.define, operators.Affine(program, [core]), x)
    wide = x.double().view(count, 8, 4), core.double().view(16, 4, 8)
    exact = torch.einsum("tik,oki->to", *wide)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(own.double(), exact, rtol=tolerance, atol=tolerance)
