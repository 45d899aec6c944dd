"""The polar factor against numpy's SVD in float64, and the duality map against its definition."""

from collections.abc import Iterator
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from structlin import polar_factor
from structlin._engine.cpu.polar import has_engine
from structlin.duality import (
    SCHEDULES,
    choose_polar,
    dual_norm,
    dualize,
    dualize_convolution,
    dualize_embedding,
    has_bfloat16_products,
)

# Per method: the least singular value (of a matrix of Frobenius norm 1) that it takes to the band,
# and the band.
BANDS = {
    "svd": (1e-4, 1 - 1e-5, 1 + 1e-5),
    "ns": (1e-4, 1 - 1e-4, 1 + 1e-4),
    "fast": (3e-3, 1 - 1e-4, 1 + 1e-4),
    30 * ((1.5, -0.5, 0.0),): (1e-4, 1 - 1e-3, 1 + 1e-3),
    12 * ((2.0, -1.5, 0.5),): (1e-3, 1 - 1e-3, 1 + 1e-3),
    5 * ((3.4445, -4.7750, 2.0315),): (1e-2, 0.68, 1.14),  # Muon's
}
CUBIC, _, MUONS = (method for method in BANDS if not isinstance(method, str))
every_method = pytest.mark.parametrize("method", BANDS, ids=lambda method: str(method)[:24])


def factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    u, _, vh = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    return torch.from_numpy(u), torch.from_numpy(vh)


def spectrum(m: int, n: int, least: float) -> Tensor:
    """A matrix of Frobenius norm 1 whose singular values run from `least` up, all but the largest
    evenly in log."""
    k = min(m, n)
    values = torch.logspace(np.log10(least), np.log10(0.5 / sqrt(k)), k, dtype=torch.float64)
    values[-1] = sqrt(1 - values[:-1].square().sum())
    u, v = (torch.linalg.qr(torch.randn(size, k, dtype=torch.float64)).Q for size in (m, n))
    return (u * values) @ v.T


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(24, 24), (24, 40), (40, 24), (5, 1), (1, 1)])
def test_every_singular_value_lands_in_the_band_of_the_method_and_no_direction_turns(
    method, dtype, shape
):
    least, low, high = BANDS[method]
    matrix = spectrum(*shape, least).to(dtype)
    u, vh = factors(matrix)
    dual = polar_factor(matrix, method=method)
    assert dual.dtype == dtype
    seen = u.mT @ dual.double() @ vh.mT
    values = seen.diagonal()
    assert low <= values.min()
    assert values.max() <= high
    off = (dual.double() - (u * values) @ vh).abs().max()
    assert off < (2e-3 if dtype == torch.float32 else 1e-9)


@every_method
def test_the_band_holds_between_its_ends_too(method):
    least, low, high = BANDS[method]
    cosine = torch.logspace(np.log10(least), -1e-4, 40_000, dtype=torch.float64)
    sine = (1 - cosine**2).sqrt()
    values = torch.stack([cosine, sine], -1)[sine >= least]  # of matrices 2 x 2 of Frobenius norm 1

    def rotation(angle: float) -> Tensor:
        return torch.tensor([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])

    matrices = rotation(1.0) @ torch.diag_embed(values) @ rotation(2.0).T
    dual = rotation(1.0).T @ polar_factor(matrices, method=method) @ rotation(2.0)
    assert dual[:, [0, 1], [1, 0]].abs().max() < 1e-9
    reached = dual.diagonal(dim1=-2, dim2=-1)
    outside = values[(reached < low) | (reached > high)]
    assert not len(outside), (
        f"{len(outside)} values between {outside.min():.5f} and {outside.max():.5f}"
    )


def test_a_schedule_of_ones_own_is_followed_step_by_step():
    matrix = torch.randn(4, 6, dtype=torch.float64)
    schedule = (1.5, -0.5, 0.0), (1.1, 0.2, -0.3), (1.2, -0.3, 0.1)
    x = matrix / matrix.norm()
    for steps, (a, b, c) in enumerate(schedule, 1):
        gram = x @ x.T
        x = (a * torch.eye(4) + b * gram + c * gram @ gram) @ x
        assert_close(polar_factor(matrix, method=schedule[:steps]), x)


@pytest.mark.parametrize(
    "shape", [(3, 4, 9), (3, 9, 4), (1, 4, 9), (1, 9, 4), (2, 4, 8), (2, 5, 5)]
)
@pytest.mark.parametrize("method", [*SCHEDULES, CUBIC, MUONS], ids=lambda method: str(method)[:24])
def test_a_schedule_maps_singular_values_step_by_step(shape, method):
    matrix = torch.randn(shape, dtype=torch.float64)
    u, vh = factors(matrix)
    values = torch.linalg.svdvals(matrix)
    values /= values.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in SCHEDULES.get(method, method):
        values = a * values + b * values**3 + c * values**5
    expected = (u * values[:, None]) @ vh
    assert_close(polar_factor(matrix, method=method), expected, rtol=0, atol=1e-8)


MACHINES = {  # what a CPU says, and whether it has products of bfloat16
    "x86": ("x86_64", None, False),
    "AVX-512": ("x86_64", "_is_avx512_bf16_supported", True),
    "AMX": ("x86_64", "_is_amx_tile_supported", True),
    "x86, an older torch": ("x86_64", "not asked", False),
    "ARM": ("aarch64", "_is_avx512_bf16_supported", False),
    "ARM of bfloat16": ("arm64", "_is_mkldnn_bf16_supported", True),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_default_is_in_16_bits_where_the_cpu_has_their_products(name, monkeypatch):
    machine, instruction, has_products = MACHINES[name]
    monkeypatch.setattr("platform.machine", lambda: machine)
    for question in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, question, lambda question=question: question == instruction)
        if instruction == "not asked":
            monkeypatch.delattr(torch.cpu, question)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    answer = instruction == "_is_mkldnn_bf16_supported"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: answer)
    cpu, fast = torch.device("cpu"), torch.bfloat16 if has_products else torch.float32
    for m, n, dtype, expected in (
        (300, 63, torch.float32, torch.float32),
        (63, 64, torch.bfloat16, torch.float32),
        (80, 64, torch.float32, torch.float32 if has_engine() else fast),  # below 2^14 numbers
        (256, 64, torch.float32, fast),
        (80, 64, torch.bfloat16, fast),
        (256, 64, torch.float64, torch.float64),
    ):
        polar = choose_polar((m, n), dtype, cpu)
        assert polar.dtype == expected
        assert choose_polar((m, n), dtype, cpu, iterate_in=torch.float32).dtype == torch.float32
        assert polar.schedule == SCHEDULES["fast"][:5]


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_is_asked_for_its_capability(capability, fast, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert has_bfloat16_products(torch.device("cuda:0")) is fast
    assert has_bfloat16_products(torch.device("mps"))
    polar = choose_polar((256, 64), torch.float32, torch.device("cuda:0"))
    assert polar.dtype == (torch.bfloat16 if fast else torch.float32)
    assert not polar.one_by_one


@pytest.mark.parametrize("shape", [(24, 8), (8, 16), (8, 24)])
def test_small_matrices_in_16_bits_stay_within_a_twentieth_of_one(shape):
    matrices = torch.stack([spectrum(*shape, 1e-2) for _ in range(32)])
    u, vh = factors(matrices)
    dual = polar_factor(matrices.float(), method=SCHEDULES["fast"][:5], dtype=torch.bfloat16)
    values = (u.mT @ dual.double() @ vh.mT).diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.95
    assert values.max() < 1.05


def test_in_bfloat16_on_a_matrix_unit_large_matrices_are_a_batch(monkeypatch):
    batch, muon = torch.randn(3, 80, 210), {"method": MUONS, "dtype": torch.bfloat16}
    expected = polar_factor(batch, method="fast", dtype=torch.bfloat16)
    by_themselves = torch.stack([polar_factor(matrix, **muon) for matrix in batch])
    for unit, other in ((False, "torch.bmm"), (True, "torch.mm")):
        with monkeypatch.context() as patch:
            patch.setattr("structlin.duality.has_matrix_unit", lambda unit=unit: unit)
            patch.setattr(other, None)
            found = polar_factor(batch, method="fast", dtype=torch.bfloat16)
        assert_close(found, expected, rtol=0, atol=2e-2)
    monkeypatch.setattr("structlin.duality.has_matrix_unit", lambda: True)
    monkeypatch.setattr("torch.bmm", None)
    assert torch.equal(
        polar_factor(batch, **muon), by_themselves
    )  # as torch.optim.Muon, bit for bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["fast", MUONS], ids=["fast", "muons"])
def test_a_power_of_two_changes_no_bit_of_a_large_matrix(method, dtype):
    signs = torch.randn(2, 130, 140).mul(4).round().div(4)  # exact in every dtype
    expected = polar_factor(signs, method=method, dtype=dtype)
    for exponent in (-8, 8) if dtype == torch.float16 else (-100, -60, -20, 20, 60, 100):
        scaled = signs * 2.0**exponent
        assert torch.equal(polar_factor(scaled, method=method, dtype=dtype), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")
def test_a_large_matrix_is_asked_for_its_norm_where_it_has_one(monkeypatch):
    batch, other = torch.randn(2, 130, 140) / 1e3, torch.randn(2, 130, 140, dtype=torch.float16)
    expected = polar_factor(batch)
    assert_close(torch.func.vmap(polar_factor)(batch), expected)
    torch.compiler.reset()
    assert_close(torch.compile(polar_factor, fullgraph=True, backend="eager")(batch), expected)
    calls = []
    monkeypatch.setattr("structlin.duality._of_unit_size", lambda x: calls.append(x.dtype) or x)
    polar_factor(other, dtype=torch.float16)
    polar_factor(torch.stack([batch[0], 0 * batch[0]]), method="fast")
    polar_factor(batch, method="svd")
    assert calls == [torch.float16, torch.float32, torch.float32]
    assert torch.equal(polar_factor(batch), expected)
    assert len(calls) == 3


def test_what_is_below_the_numerical_rank_maps_to_zero():
    values = torch.logspace(0, -12, 25, dtype=torch.float64)
    u, v = (torch.linalg.qr(torch.randn(40, 25, dtype=torch.float64)).Q for _ in range(2))
    matrix = 20 * ((u * values) @ v.T).float()
    seen = torch.linalg.svdvals(polar_factor(matrix, method="svd").double())
    rank = torch.linalg.matrix_rank(matrix)  # values above 40 eps of the largest
    assert_close(seen, (torch.arange(40) < rank).double(), rtol=0, atol=1e-3)


def test_the_default_is_ns_and_the_dtype_of_the_iteration_is_not_that_of_the_result():
    matrix = torch.randn(4, 6)
    assert torch.equal(polar_factor(matrix), polar_factor(matrix, method="ns"))
    assert not torch.equal(polar_factor(matrix), polar_factor(matrix, method="svd"))
    coarse, fine = (polar_factor(matrix, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    assert coarse.dtype == fine.dtype == torch.float32
    assert torch.equal(coarse, coarse.bfloat16().float())
    assert_close(fine, polar_factor(matrix.double()).float())
    assert_close(coarse, fine, rtol=0, atol=0.05)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_matrix_of_any_dtype_comes_back_orthogonal_in_that_dtype(method, dtype):
    matrix = torch.randn(3, 8, 20).to(dtype)
    dual = polar_factor(matrix, method=method)
    u, vh = factors(matrix)
    values = (u.mT @ dual.double() @ vh.mT).diagonal(dim1=-2, dim2=-1)
    _, low, high = BANDS[method]
    slack = 4 * torch.finfo(dtype).eps
    assert dual.dtype == dtype
    assert low - slack <= values.min()
    assert values.max() <= high + slack


@every_method
@pytest.mark.parametrize("shape", [(5, 5), (3, 9), (9, 3), (4, 1), (1, 4)])
def test_the_blocks_of_a_batch_are_independent_matrices(method, shape):
    batch = torch.randn(2, 3, *shape)
    expected = torch.stack(
        [polar_factor(block, method=method) for block in batch.flatten(0, 1)]
    ).unflatten(0, (2, 3))
    assert_close(polar_factor(batch, method=method), expected, rtol=1e-4, atol=1e-5)
    assert_close(polar_factor(batch.mT, method=method), expected.mT, rtol=1e-4, atol=1e-5)


@every_method
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float32, (1e-30, 1e-9, 3.0, 1e9, 1e30)),
        (torch.bfloat16, (2.0**-100, 2.0**100)),
        (torch.float16, (2.0**-10, 2.0**10)),
        (torch.float64, (1e-30, 1e30, 1e-250, 1e250)),
    ],
)
def test_the_scale_of_a_matrix_does_not_matter_and_its_sign_does(method, dtype, scales):
    matrix = torch.randn(2, 6, 10).to(dtype)
    dual = polar_factor(matrix, method=method)
    tolerance = {"rtol": 1e-3, "atol": max(1e-5, torch.finfo(dtype).eps)}
    for scale in scales:
        assert_close(polar_factor(matrix * scale, method=method), dual, **tolerance)
        assert_close(polar_factor(matrix * -scale, method=method), -dual, **tolerance)
    apart = torch.tensor([scales[0], scales[-1]], dtype=dtype).view(2, 1, 1)
    assert_close(polar_factor(matrix * apart, method=method), dual, **tolerance)


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_zero_block_stays_zero_and_a_deficient_one_finite_and_the_others_do_not_notice(
    method, dtype
):
    _, low, high = BANDS.get(method, BANDS["svd"])
    good, half = torch.randn(6, 9), torch.randn(6, 9)
    half[3:] = 0
    rank_1 = torch.randn(6, 1).sign() @ torch.randn(1, 9).sign()  # exact in every dtype
    blocks = torch.stack([torch.zeros(6, 9), good, rank_1, half]).to(dtype)
    dual = polar_factor(blocks, method=method)
    assert torch.equal(dual[0], torch.zeros(6, 9, dtype=dtype))
    assert_close(dual[1], polar_factor(good.to(dtype), method=method))
    assert dual.isfinite().all()
    slack = 4 * torch.finfo(dtype).eps
    one, null = torch.linalg.svdvals(dual[2].double()).split([1, 5])
    assert low - slack <= one <= high + slack
    assert null.max() < 0.02
    assert torch.linalg.svdvals(dual[3].double())[3:].max() < 0.02


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_pushes_no_matrix_of_rank_1_out_of_the_band(method, dtype):
    column, row = torch.randn(500, 12, 1, dtype=dtype), torch.randn(500, 1, 17, dtype=dtype)
    dual = polar_factor(column @ row, method=method)
    values = (column.mT @ dual @ row.mT).flatten() / (
        column.flatten(1).norm(dim=1) * row.flatten(1).norm(dim=1)
    )
    _, low, high = BANDS.get(method, BANDS["svd"])
    assert low <= values.min()
    assert values.max() <= high


@every_method
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 5, 0), (0, 0), (3, 4, 5)])
def test_dualize_leaves_its_input_as_it_was_and_maps_nothing_to_nothing(method, shape):
    matrix = torch.randn(shape).bfloat16()
    before = matrix.clone()
    dual = polar_factor(matrix, method=method)
    assert (dual.shape, dual.dtype) == (torch.Size(shape), torch.bfloat16)
    dual.zero_()
    assert torch.equal(matrix, before)
    assert dual is not matrix


@pytest.mark.parametrize("function", [polar_factor, dualize])
def test_what_has_no_polar_factor_is_refused_by_name(function):
    with pytest.raises(
        ValueError, match=r"method='muon' is unknown; there are ns, fast, svd, or a schedule"
    ):
        function(torch.randn(2, 2), method="muon")
    for shape in ((3,), ()):
        with pytest.raises(
            ValueError, match=r"(matrix|gradient) has shape .*; it needs at least 2 dimensions"
        ):
            function(torch.randn(shape))
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=f"has dtype {dtype}; it must be real floating point"):
            function(torch.ones(2, 2, dtype=dtype))


# ---- the duality map -----------------------------------------------------------------------------


def norm(core: Tensor) -> float:
    """RMS->RMS operator norm of a core: the largest of its blocks'."""
    m, n = core.shape[-2:]
    return sqrt(n / m) * np.linalg.svd(core.numpy(), compute_uv=False)[..., 0].max()


@given(
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31), st.floats(-4, 2)
)
def test_the_dual_core_is_the_steepest_of_all_steps_of_unit_norm(batch, m, n, seed, log_noise):
    generator = torch.Generator().manual_seed(seed)
    gradient, noise = torch.randn(2, batch, m, n, generator=generator, dtype=torch.float64)
    dual = dualize(gradient, method="svd")
    assert norm(dual) == pytest.approx(1)
    steepest = (gradient * dual).sum()
    nuclear = np.linalg.svd(gradient.numpy(), compute_uv=False).sum()
    assert steepest.item() == pytest.approx(sqrt(m / n) * nuclear)
    assert dual_norm(gradient).item() == pytest.approx(sqrt(m / n) * nuclear)
    for other in (noise, dual + 10**log_noise * noise):
        assert (gradient * other).sum() / norm(other) <= steepest + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dual_embedding_has_vectors_of_unit_rms_in_their_own_direction(dtype):
    gradient = torch.randn(5, 7).to(dtype)
    gradient[1] = 0
    scales = torch.tensor([1, 1, -3, 2.0**-100, 2.0**100], dtype=dtype)[:, None]
    expected = (
        gradient.double() * scales.sign() * sqrt(7) / gradient.double().norm(dim=-1, keepdim=True)
    )
    expected[1] = 0
    dual = dualize_embedding(gradient * scales)
    assert dual.dtype == dtype
    assert_close(dual.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("kernel", [(3, 3), (5,), (2, 3, 2)])
def test_the_dual_convolution_is_the_dual_of_every_slice_over_their_number(kernel):
    gradient = torch.randn(4, 6, *kernel, dtype=torch.float64)
    dual = dualize_convolution(gradient, method="svd")
    assert dual.shape == gradient.shape
    for position in np.ndindex(*kernel):
        u, vh = factors(gradient[(..., *position)])
        assert_close(dual[(..., *position)], sqrt(4 / 6) / np.prod(kernel) * u @ vh)


# ---- no spectrum makes an iteration explode ------------------------------------------------------

KINDS = ("decaying", "clustered", "low rank", "one dominant", "graded", "equal")
ITERATIONS = {  # how a matrix in float32 is taken through the steps
    "engine": {},
    "float32": {"dtype": torch.float32},
    "float32 in products of bfloat16": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}


def singular_values(kind: str, k: int, generator: torch.Generator) -> Tensor:
    """`(k,)`, the largest 1: as gradients have them, and worse."""
    i, r = torch.arange(k), torch.rand((), generator=generator)
    if kind == "decaying":
        return (1.0 + i) ** -(0.3 + 3 * r)
    if kind == "clustered":
        return 10.0 ** -torch.randint(0, 4, (k,), generator=generator).sort().values
    if kind == "low rank":
        return (i <= r * k / 2).float()
    if kind == "one dominant":
        return torch.where(i == 0, 1.0, 10 ** (-1 - 4 * r))
    return 10 ** (-(1 + 6 * r) * i / k) if kind == "graded" else torch.ones(k)


def stacks_of_all_spectra() -> Iterator[Tensor]:
    """Over 5,000 matrices `(batch, m, n)` of 2 to 1,024 rows and columns."""
    generator = torch.Generator().manual_seed(0)
    for short in (2, 3, 5, 8, 16, 24, 33, 64, 96, 128, 200, 400, 1024):
        for aspect in (1, 1.5, 2.2, 3, 4, 8, 16):
            long = int(short * aspect)
            batch = max(1, min(125, 2**19 // (short * long)))
            if long > 1024:
                continue
            u, v = (
                torch.linalg.qr(torch.randn(batch, size, short, generator=generator)).Q
                for size in (short, long)
            )
            spectra = [singular_values(KINDS[n % 6], short, generator) for n in range(batch)]
            stack = (u * torch.stack(spectra)[:, None]) @ v.mT
            noise = torch.randn(batch, short, long, generator=generator) / sqrt(short * long)
            noisy = torch.arange(batch) // 6 % 2 * 0.3  # in every second matrix of a kind
            stack += noisy[:, None, None] * stack.norm(dim=(1, 2), keepdim=True) * noise
            wide = bool(torch.randint(2, (), generator=generator))
            yield stack.mT.contiguous() if wide else stack


@pytest.fixture(scope="module")
def spectra():
    found = list(stacks_of_all_spectra())
    assert sum(map(len, found)) > 5000
    return found


def largest_singular_values(stack: Tensor) -> Tensor:
    x = stack.double()
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    return torch.linalg.eigvalsh(gram)[..., -1].sqrt()


@pytest.mark.parametrize("method", ["ns", "fast"])
@pytest.mark.parametrize("way", ITERATIONS)
def test_no_singular_value_ends_above_one_tenth_beyond_one(way, method, spectra, monkeypatch):
    if way == "engine" and not has_engine():
        pytest.skip("there is no engine here")
    if way != "engine":
        monkeypatch.setattr("structlin._engine.cpu.polar.has_engine", lambda: False)
    precision = "medium" if "products" in way else "highest"
    torch.set_float32_matmul_precision(precision)
    try:
        for n, stack in enumerate(spectra):
            options = {"method": method, **ITERATIONS[way]}
            dual = polar_factor(stack, **options)
            assert dual.isfinite().all()
            assert largest_singular_values(dual).max() < 1.1, stack.shape
            alone = polar_factor(stack[n % len(stack)], **options)
            assert largest_singular_values(alone) < 1.1, stack.shape
    finally:
        torch.set_float32_matmul_precision("highest")


@every_method
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_matrix_that_is_not_finite_has_a_factor_of_nan_and_the_others_do_not_notice(
    method, value
):
    matrices = torch.randn(3, 5, 8)
    expected = polar_factor(matrices, method=method)
    matrices[1, 2, 3] = value
    factors = polar_factor(matrices, method=method)
    assert factors[1].isnan().all()
    torch.testing.assert_close(factors[::2], expected[::2], atol=1e-5, rtol=1e-5)
