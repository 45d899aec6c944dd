"""The compiled iteration for polar factors: its numbers against the loop that is the definition, in
float64, and when it is taken."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from structlin import duality, polar_factor
from structlin._engine.cpu import library, polar
from structlin.duality import SCHEDULES
from tests.kernels.test_engine import OWN

pytestmark = pytest.mark.skipif(not library.load(), reason="there is no engine here")
FAST, CUBIC = SCHEDULES["fast"], 30 * ((1.5, -0.5, 0.0),)
SHAPES = [(64, 16, 16), (40, 24, 32), (40, 32, 24), (3, 7, 50), (2, 70, 33), (1, 1, 300)]


def carry(stack, schedule=FAST):
    (factors,) = polar.polar([stack], schedule)
    return factors


def by_the_loop(stack, schedule=FAST):
    x = duality._of_unit_size(stack.double())
    return torch.stack([duality._iterate(matrix, schedule) for matrix in x])


@st.composite
def stacks(draw):
    """Normal, of some rank, with rows of many scales, and zero; of any size."""
    m, n = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    kinds = draw(st.lists(st.sampled_from(["normal", "rank", "rows", "zero"]), max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def matrix(kind):
        if kind == "rank":
            rank = draw(st.integers(1, min(m, n)))
            return normal(m, rank) @ normal(rank, n)
        scales = 10 ** -torch.arange(m).float()[:, None] if kind == "rows" else 1
        return normal(m, n) * scales * (kind != "zero")

    scale = draw(st.sampled_from([1.0, 2e-44, 1e-30, 1e-9, 1e9, 1e37]))
    found = [matrix(kind) * scale for kind in kinds]
    return torch.stack(found) if found else torch.empty(0, m, n)


@given(stacks(), st.sampled_from([FAST, SCHEDULES["ns"], CUBIC]), st.integers(1, 8))
def test_values_are_those_of_the_loop_in_float64(stack, schedule, steps):
    schedule = schedule[:steps]
    found = carry(stack, schedule)
    assert found.dtype == stack.dtype
    assert found.shape == stack.shape
    growth = prod(max(a, 1.0) for a, _, _ in schedule)  # of rounding, where a singular value is 0
    tolerance = 8 * torch.finfo(torch.float32).eps * growth
    if len(stack):
        assert_close(found.double(), by_the_loop(stack, schedule), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_of_matrices_of_full_rank_it_is_as_exact_as_float32(shape):
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = torch.linspace(0.2, 1, u.shape[-1], dtype=torch.float64)
    stack = ((u * values) @ vh).float()
    assert_close(carry(stack).double(), by_the_loop(stack), rtol=0, atol=3e-6)
    assert_close(carry(stack, SCHEDULES["ns"]).double(), u @ vh, rtol=0, atol=3e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_has_the_same_bits_on_any_number_of_threads_and_in_any_company(shape, set_threads):
    stack = torch.randn(shape)
    expected = carry(stack)
    assert torch.equal(carry(stack), expected)
    assert torch.equal(torch.cat([carry(matrix[None]) for matrix in stack]), expected)
    others = [torch.randn(5, 40, 40), stack, torch.randn(0, 3, 3), torch.randn(1, 2, 9)]
    assert torch.equal(polar.polar(others, FAST)[1], expected)
    set_threads(3)
    assert torch.equal(carry(stack), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("schedule", [FAST, CUBIC], ids=["quintic", "cubic"])
def test_nan_and_inf_fill_their_matrix_and_no_other(bad, schedule):
    stack = torch.randn(4, 20, 18)
    expected = carry(stack, schedule)
    stack[2, 7, 3] = bad
    found = carry(stack, schedule)
    assert found[2].isnan().all()
    assert by_the_loop(stack, schedule)[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("shape", SHAPES)
def test_views_of_any_strides_give_the_factors_of_their_copies(shape):
    stack = torch.randn(shape[0], 2 * shape[2], shape[1]).mT[:, :, ::2]
    before = stack.clone()
    assert not stack.is_contiguous() or shape[1] == 1
    assert torch.equal(carry(stack), carry(stack.contiguous()))
    assert torch.equal(stack, before)


@pytest.mark.parametrize("shape", [(2, 5, 17), (2, 17, 5), (3, 16, 16)])
def test_nothing_outside_the_factors_is_written(shape):
    stack = torch.randn(shape)
    stack[0] = 0
    memory = torch.full((3 * stack.numel(),), 7.0)
    middle = memory[stack.numel() : 2 * stack.numel()].view(shape)
    middle.copy_(stack)
    assert carry(middle)[0].eq(0).all()
    assert memory.eq(7.0).sum() == 2 * stack.numel()


@pytest.mark.parametrize(
    ("stack", "coefficients"),
    [
        (torch.randn(2, 3, 3).double(), [1.5, -0.5, 0.0]),
        (torch.randn(3, 3), [1.5, -0.5, 0.0]),
        (torch.randn(2, 3, 3), [1.5, -0.5]),
    ],
)
def test_the_operator_itself_refuses_what_does_not_fit(stack, coefficients):
    with pytest.raises(RuntimeError, match="structlin"):
        polar._polar([stack], coefficients)


def count_calls(monkeypatch):
    """The stacks of each call of the operator."""
    calls, carries = [], polar.polar

    def counted(stacks, schedule):
        calls.append([tuple(stack.shape) for stack in stacks])
        return carries(stacks, schedule)

    monkeypatch.setattr(polar, "polar", counted)
    return calls


@pytest.mark.parametrize("method", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_small_matrices_of_any_dtype_take_it_and_others_the_loop(method, dtype, monkeypatch):
    calls = count_calls(monkeypatch)
    matrix = torch.randn(2, 3, 8, 12).to(dtype)
    dual = polar_factor(matrix, method=method)
    assert (dual.shape, dual.dtype) == (matrix.shape, dtype)
    assert calls.pop() == [(6, 8, 12)]
    polar_factor(matrix.float(), method=method, dtype=torch.bfloat16)
    polar_factor(matrix.double(), method=method)
    polar_factor(torch.randn(128, 128), method=method)  # large
    assert not calls
    monkeypatch.setattr(polar, "has_engine", lambda: False)
    slack = 1e-4 + torch.finfo(dtype).eps  # of float32's rounding, and of the result's
    assert_close(polar_factor(matrix, method=method), dual, rtol=0, atol=slack)
    assert not calls


@OWN
def test_what_is_differentiated_or_transformed_takes_the_loop(monkeypatch):
    calls = count_calls(monkeypatch)
    matrix = torch.randn(4, 5, 6)
    expected, _ = polar_factor(matrix), calls.pop()
    leaf = matrix.clone().requires_grad_()
    assert_close(polar_factor(leaf), expected)
    (gradient,) = torch.autograd.grad(polar_factor(leaf).pow(3).sum(), leaf)
    wide = matrix.double().requires_grad_()
    (wanted,) = torch.autograd.grad(polar_factor(wide).pow(3).sum(), wide)
    assert_close(gradient.double(), wanted, rtol=1e-2, atol=1e-2)
    assert_close(torch.func.vmap(polar_factor)(matrix), expected, rtol=0, atol=1e-4)
    assert_close(torch.func.grad(lambda x: polar_factor(x).pow(3).sum())(matrix), gradient)
    _, tangent = torch.func.jvp(polar_factor, (matrix,), (matrix,))
    assert tangent.abs().max() < 1e-2  # it does not depend on the scale
    assert not calls
    with torch.no_grad():
        assert torch.equal(polar_factor(leaf), expected)
    assert len(calls) == 1


@OWN
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_it_gives_the_same_bits(backend):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: polar_factor(2 * x), fullgraph=True, backend=backend)
    for batch in (2, 5):
        matrix = torch.randn(batch, 8, 12)
        assert torch.equal(compiled(matrix), polar_factor(2 * matrix))


def test_flops_are_counted():
    with FlopCounterMode(display=False) as counter:
        polar.polar([torch.randn(3, 4, 6), torch.randn(2, 8, 5)], FAST)
    each = 3 * (2 * 6 * 4 * 4 + 4**3) + 2 * (2 * 8 * 5 * 5 + 5**3)  # multiply-adds of a step
    assert counter.get_total_flops() == 2 * each * len(FAST)


def test_an_engine_that_a_layer_builds_later_changes_no_polar_factor(monkeypatch):
    gradient = torch.randn(80, 64)
    by_engine = polar_factor(gradient)
    polar._has_engine.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(library, "load_if_built", lambda: False)
            before = polar_factor(gradient)
        after = polar_factor(gradient)
    finally:
        polar._has_engine.cache_clear()
    assert torch.equal(after, before)
    assert not torch.equal(before, by_engine)
