"""int8 cores in the compiled engine: their numbers against einsum in float64, and which calls read
the integers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    StructuredLinear,
    quantize,
)
from structlin._engine import operators
from structlin._engine.cpu import library
from structlin._layer.quantized import QuantizedLinear
from tests.catalogue import every_program, one_einsum, tokens
from tests.kernels.test_engine import DTYPES, OWN, assert_near, poisoned

pytestmark = pytest.mark.skipif(not library.load(), reason="there is no engine here")
FAMILIES = [
    BTT(),
    BTT(rank=4),
    BTT(rank=2, cores=3),
    Monarch(blocks=4),
    Monarch(blocks=32),
    BlockDiagonal(blocks=4),
    Kronecker(),
    TT(rank=4),
    LowRank(rank=100),
    Dense(),
]


def random_int8(structure, dtype=torch.float64):
    """Cores of int8, also the largest, and scales that differ from row to row."""
    cores, scales = [], []
    for core in structure.cores:
        shape = core.batch, core.fan_out, core.fan_in
        cores.append(torch.randint(-128, 128, shape, dtype=torch.int8))
        cores[-1][0, 0, 0] = -128
        size = 1 / (75 * core.fan_in**0.5)
        wide = torch.promote_types(dtype, torch.float32)
        scales.append((size * (0.5 + torch.rand(*shape[:2], 1))).to(wide))
    return cores, scales


def multiply(structure, cores, scales, x, bias=None):
    return operators._multiply_int8(x, cores, scales, bias, structure.program.numbers)


def exact(structure, cores, scales, x, bias):
    wide = [core.double() * scale.double() for core, scale in zip(cores, scales, strict=True)]
    return one_einsum(structure, wide, x.double()) + bias.double()


def assert_right(structure, dtype, counts):
    cores, scales = random_int8(structure, dtype)
    bias = tokens(structure.out_features, dtype=dtype)
    for n in counts:
        x = tokens(n, structure.in_features, dtype=dtype)
        y = multiply(structure, cores, scales, x, bias)
        assert_near([y], [exact(structure, cores, scales, x, bias)], dtype)
        assert torch.equal(y, multiply(structure, cores, scales, x, bias))


# ---- numbers -------------------------------------------------------------------------------------


@every_program
def test_values_are_those_of_einsum_for_every_dtype_and_number_of_tokens(structure):
    many = (1, 3, 7, 16, 17, 64) if structure.out_features < 10_000 else (1, 17)
    for dtype in DTYPES:
        assert_right(structure, dtype, many)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("family", [*FAMILIES, BTT(rank=4).activate()], ids=repr)
def test_wide_layers_on_several_threads(family, threads, set_threads):
    set_threads(threads)
    for dtype in DTYPES:
        assert_right(family.structure(512, 768), dtype, (1, 2, 3, 5, 16, 17, 64))


@pytest.mark.parametrize("fan_out", [1, 7, 8, 17])  # around the rows that are taken together
@pytest.mark.parametrize("fan_in", [1, 15, 16, 17, 31, 33, 70])  # and the lanes of a vector
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_length(fan_in, fan_out, dtype):
    assert_right(BlockDiagonal(blocks=3).structure(3 * fan_in, 3 * fan_out), dtype, (1, 3, 4, 40))


@pytest.mark.parametrize("family", [BTT(rank=2, cores=3), Monarch(blocks=4), TT(rank=3)], ids=repr)
@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_the_tensors_is_read_or_written(family, n, dtype):
    structure = family.structure(64, 64)
    cores, scales = random_int8(structure, dtype)
    x, bias = tokens(n, 64, dtype=dtype), tokens(64, dtype=dtype)
    expected = multiply(structure, cores, scales, x, bias)
    (x, bias, *scales), intact = zip(*map(poisoned, (x, bias, *scales)), strict=True)
    shifted = []  # unaligned, between numbers that would change every sum
    for core in cores:
        memory = torch.full((core.numel() + 65,), -128, dtype=torch.int8)
        shifted.append(memory[1 : 1 + core.numel()].view(core.shape).copy_(core))
    assert torch.equal(multiply(structure, shifted, scales, x, bias), expected)
    assert all(check() for check in intact)


@pytest.mark.parametrize(
    "broken",
    [
        lambda x, cores, scales: (x[:, :11], cores, scales),
        lambda x, cores, scales: (x, cores, []),
        lambda x, cores, scales: (x, cores, scales[:1]),
        lambda x, cores, scales: (x, cores, [scales[0], scales[1][:, :1]]),
        lambda x, cores, scales: (x, cores, [scales[0], scales[1].float()]),
        lambda x, cores, scales: (x, cores, [scales[0], torch.cat([scales[1]] * 2, -1)[..., :1]]),
        lambda x, cores, scales: (x, [cores[0], cores[1].short()], scales),
        lambda x, cores, scales: (x, [core.double() for core in cores], scales),
        lambda x, cores, scales: (x, [cores[0], cores[1][:1]], scales),
        lambda x, cores, scales: (x.int(), cores, [scale.int() for scale in scales]),
    ],
)
def test_the_operator_itself_refuses_what_does_not_fit(broken):
    structure = BTT(rank=2).structure(12, 30)
    x, cores, scales = broken(tokens(5, 12), *random_int8(structure))
    with pytest.raises(RuntimeError, match="structlin:"):
        multiply(structure, cores, scales, x)


# ---- layers --------------------------------------------------------------------------------------


def forbid(monkeypatch):
    """Let no call form `core * scale`."""

    def refuse(self):
        raise AssertionError("the cores were made wide")

    monkeypatch.setattr(QuantizedLinear, "effective_cores", refuse)


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_few_tokens_read_the_integers(family, dtype, n, monkeypatch):
    layer = quantize(StructuredLinear(512, 512, family, dtype=dtype))
    x = tokens(n, 512, dtype=dtype)
    expected = x.double() @ layer.to_dense().double().T + layer.bias.double()
    if operators.choose(layer.structure.program.numbers, dtype, n, False) != operators.Path.BLAS:
        forbid(monkeypatch)
    assert_near([layer(x)], [expected], dtype)


@torch.no_grad()
def test_one_token_reads_the_integers_in_grad_mode_too_where_nothing_asks_for_a_gradient(
    monkeypatch,
):
    layer = quantize(StructuredLinear(64, 64, LowRank(rank=8), bias=False))
    forbid(monkeypatch)
    with torch.enable_grad():
        assert not layer(tokens(1, 64).float()).requires_grad


@OWN
def test_a_compiled_layer_calls_the_operator_for_every_number_of_tokens(monkeypatch):
    torch._dynamo.reset()
    layer = quantize(StructuredLinear(64, 64, LowRank(rank=8), dtype=torch.float64))
    x = tokens(40, 64)
    expected = x @ layer.to_dense().T + layer.bias
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    forbid(monkeypatch)
    for n in (3, 5, 40):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x[:n]), expected[:n])


def test_flops_are_those_of_the_float_layer():
    layer = StructuredLinear(64, 64, BTT(rank=2), bias=False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        quantize(layer)(torch.randn(7, 64))
    assert counter.get_total_flops() == 7 * layer.structure.flops
