"""The contract of every family and every structure. This file names none: a row in
`catalogue.CASES` inherits it all.

The oracle is one `torch.einsum` over the whole expression, in float64.
"""

import copy
import io
import json
import pickle
import shutil
from math import sqrt

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from structlin import StructuredLinear, apply, family, to_dense
from structlin._engine import operators, product
from tests.catalogue import (
    ACTIVATED,
    ACTIVATED_IDS,
    CASES,
    IDS,
    NARROW,
    NARROW_IDS,
    SMALL,
    SMALL_IDS,
    einsum_matrix,
    every_program,
    every_structure,
    layer_of,
    one_einsum,
    random_cores,
    structures,
    tokens,
)

every_case = pytest.mark.parametrize("case", CASES, ids=IDS)
MUCH = pytest.mark.filterwarnings("ignore:.* is padded to")  # by more than a user should
every_narrow_case = pytest.mark.parametrize("case", NARROW, ids=NARROW_IDS)
every_small_case = pytest.mark.parametrize("case", SMALL, ids=SMALL_IDS)
every_layer = pytest.mark.parametrize("case", CASES + ACTIVATED, ids=IDS + ACTIVATED_IDS)
every_small_layer = pytest.mark.parametrize(
    "case", SMALL + ACTIVATED[:-2], ids=SMALL_IDS + ACTIVATED_IDS[:-2]
)
some_cases = pytest.mark.parametrize("case", SMALL[::4], ids=SMALL_IDS[::4])


# ---- apply, to_dense -----------------------------------------------------------------------------


@every_structure
def test_to_dense_is_the_matrix_of_that_einsum(structure):
    cores = random_cores(structure)
    dense = to_dense(structure, cores)
    assert dense.shape == (structure.out_features, structure.in_features)
    assert_close(dense, einsum_matrix(structure, cores))


@every_program
def test_flops_and_parameters_are_those_that_torch_counts(structure):
    cores, x = random_cores(structure), tokens(3, structure.in_features)
    with FlopCounterMode(display=False) as counter, pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "forms_matrix", lambda *of: False)
        apply(structure, cores, x)
    assert counter.get_total_flops() == 3 * structure.flops
    assert sum(core.numel() for core in cores) == structure.params


@every_program
def test_every_leading_shape_is_kept(structure):
    cores = random_cores(structure)
    for leading in ((), (1,), (2, 3), (2, 1, 2, 1), (0,), (2, 0, 3)):
        x = tokens(*leading, structure.in_features)
        expected = one_einsum(structure, cores, x.reshape(-1, structure.in_features))
        assert_close(apply(structure, cores, x), expected.reshape(*leading, structure.out_features))


@every_program
def test_strides_of_the_input_do_not_matter(structure):
    cores, n = random_cores(structure), structure.in_features
    inputs = {
        "features first": tokens(n, 4).mT,
        "expanded": tokens(1, n).expand(4, n),
        "every second feature": tokens(4, 2 * n)[:, ::2],
        "tokens swapped": tokens(2, 3, n).transpose(0, 1),
        "one token repeated, backwards": tokens(n).expand(2, n).flip(0),
    }
    for name, x in inputs.items():
        expected = one_einsum(structure, cores, x.reshape(-1, n)).reshape(
            *x.shape[:-1], structure.out_features
        )
        assert_close(
            apply(structure, cores, x), expected, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)],
)
@every_program
def test_every_floating_dtype_is_kept(dtype, tolerance, structure):
    cores, x = random_cores(structure), tokens(3, structure.in_features)
    y = apply(structure, [core.to(dtype) for core in cores], x.to(dtype))
    expected = one_einsum(structure, cores, x)
    assert y.dtype == dtype
    assert (y.double() - expected).norm() <= tolerance * _scale(structure, cores, x)


def _scale(structure, cores, x):
    """Norm of the output without cancellation: what rounding errors are relative to."""
    return one_einsum(structure, [core.abs() for core in cores], x.abs()).norm()


def _gradients_are_right(structure):
    cores = [core.requires_grad_() for core in random_cores(structure)]
    x = tokens(2, structure.in_features).requires_grad_()
    bias = tokens(structure.out_features).requires_grad_()

    def function(x, bias, *cores):
        return apply(structure, cores, x, bias)

    assert torch.autograd.gradcheck(function, (x, bias, *cores), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, bias, *cores), fast_mode=True)


@every_small_layer
def test_first_and_second_derivatives_are_right(case):
    family, in_features, out_features = case
    _gradients_are_right(family.structure(in_features, out_features))


@given(structures(max_width=32, activated=True))
@settings(max_examples=10)
def test_first_and_second_derivatives_of_drawn_structures_are_right(structure):
    _gradients_are_right(structure)


@every_structure
def test_wrong_arguments_are_refused_by_name(structure):
    cores, x = random_cores(structure), tokens(2, structure.in_features)
    first, n = cores[0], structure.in_features
    for bad in (
        x[..., : n - 1],
        tokens(2, n + 1),
        tokens(2, n, 1, n + 1),
        torch.tensor(1.0).double(),
    ):
        with pytest.raises(
            ValueError, match=f"x has shape .* its last dimension must be in_features={n}"
        ):
            apply(structure, cores, bad)
    for dtype in (torch.int64, torch.bool, torch.complex128):
        with pytest.raises(
            TypeError,
            match=f"x has dtype {dtype}; a structured product needs a floating-point input",
        ):
            apply(structure, cores, x.to(dtype))
    with pytest.raises(TypeError, match=r"x has dtype torch.float32, the cores have torch.float64"):
        apply(structure, cores, x.float())
    with pytest.raises(ValueError, match="x is on meta, the cores are on cpu"):
        apply(structure, cores, x.to("meta"))
    for operation in (to_dense, lambda s, c: apply(s, c, x)):
        with pytest.raises(
            ValueError, match=f"{len(cores) + 1} cores given; the structure has {len(cores)}"
        ):
            operation(structure, [*cores, first])
        for wrong in (first[0], torch.cat([first, first], -1), first[:0]):
            with pytest.raises(ValueError, match=r"cores\[0\] has shape .*; the structure needs"):
                operation(structure, [wrong, *cores[1:]])
        for other in (cores[-1].float(), cores[-1].to("meta")):
            if len(cores) > 1:
                with pytest.raises(
                    ValueError,
                    match=rf"cores\[{len(cores) - 1}\] is {other.dtype} on {other.device}",
                ):
                    operation(structure, [*cores[:-1], other])
    rows = structure.out_features
    for bias in (tokens(rows + 1), tokens(rows).to("meta")):
        with pytest.raises(ValueError, match=rf"bias has shape .* \(out_features,\) = \({rows},\)"):
            apply(structure, cores, x, bias)


# ---- the layer -----------------------------------------------------------------------------------


@every_case
def test_a_layer_is_the_dense_product_with_the_rows_and_columns_of_its_padding_cut(case):
    _, in_features, out_features = case
    layer = layer_of(case)
    x = tokens(2, 3, in_features)
    matrix = einsum_matrix(layer.structure, list(layer.cores))[:out_features, :in_features]
    assert (layer.in_features, layer.out_features) == (in_features, out_features)
    assert layer.padding == (
        layer.structure.in_features - in_features,
        layer.structure.out_features - out_features,
    )
    assert min(layer.padding) >= 0
    assert_close(layer.to_dense(), matrix)
    assert_close(layer(x), x @ matrix.T + layer.bias)
    assert_close(layer(x[0, 0]), layer(x)[0, 0])
    assert layer(x[:0]).shape == (0, 3, out_features)


# all ways to multiply: core by core in the engine and in torch, by the matrix, of few tokens and of
# many, with gradients and without
@MUCH
@every_narrow_case
@pytest.mark.parametrize(("formed", "engine"), [(False, True), (False, False), (True, True)])
def test_a_layer_narrower_than_its_structure_cuts_the_matrix(case, formed, engine, monkeypatch):
    if not engine:
        monkeypatch.setattr(operators, "available", lambda x: False)
    structure, in_features, out_features = case
    if formed and not structure.between:
        monkeypatch.setattr(product, "NEAR", 0.0)
        monkeypatch.setattr(product, "forms_matrix", lambda *of: True)
    layer = layer_of(case, bias=formed or not engine, weight_norm=True)
    leaves = list(layer.parameters())
    for count in (2, 40):
        x = tokens(count, in_features).requires_grad_()
        y = layer(x)
        padded = F.pad(x, (0, layer.padding[0]))
        wanted = one_einsum(layer.structure, layer.effective_cores(), padded)[:, :out_features]
        wanted = wanted if layer.bias is None else wanted + layer.bias
        assert_close(y, wanted)
        found = [torch.autograd.grad(each.square().sum(), [x, *leaves]) for each in (y, wanted)]
        assert_close(*found)
        with torch.no_grad():
            assert_close(layer(x), wanted)


@MUCH
@every_narrow_case
def test_a_layer_narrower_than_its_structure_keeps_its_width_under_autocast(case):
    layer = layer_of(case, dtype=torch.float32, bias=False)
    x = tokens(4, layer.in_features, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    padded, cores = F.pad(x, (0, layer.padding[0])), list(layer.cores)
    wanted = one_einsum(layer.structure, cores, padded)[:, : layer.out_features]
    assert_close(y.float(), wanted, rtol=0.1, atol=0.1)


@MUCH
@pytest.mark.slow
@pytest.mark.parametrize("case", NARROW[2::12], ids=NARROW_IDS[2::12])
def test_a_layer_narrower_than_its_structure_compiles(case):
    _compiles(case, "aot_eager", (5,), (2, 3))


@every_layer
def test_a_layer_is_refused_an_input_of_the_wrong_width_or_kind(case):
    _, in_features, _ = case
    layer = layer_of(case, bias=False)
    for bad in (
        tokens(2, in_features - 1),
        tokens(2, in_features + 1),
        tokens(in_features, 2),
        torch.tensor(1.0),
    ):
        with pytest.raises(
            ValueError, match=f"its last dimension must be in_features={in_features}"
        ):
            layer(bad)
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(TypeError, match=f"x has dtype {dtype}"):
            layer(torch.ones(2, in_features, dtype=dtype))


@every_layer
@pytest.mark.parametrize(
    "options", [{}, {"weight_norm": True, "bias": False}], ids=["bias", "weight_norm"]
)
def test_a_state_dict_has_the_cores_the_bias_and_the_gains_and_comes_back_strictly(case, options):
    layer, other = layer_of(case, **options), layer_of(case, **options)
    expected = {f"cores.{n}" for n in range(len(layer.structure.cores))}
    expected |= {"gains"} if "weight_norm" in options else {"bias"}
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert set(dict(layer.named_parameters())) == expected
    assert set(state) == expected
    assert all(parameter.ndim > 0 for parameter in layer.parameters()), (
        "FSDP2 refuses 0-D parameters"
    )
    x = tokens(2, layer.in_features)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(state, strict=True)
    assert torch.equal(layer(x), other(x))


@every_layer
def test_a_layer_survives_deepcopy_and_pickle(case):
    layer = layer_of(case, weight_norm=True)
    x = tokens(2, layer.in_features)
    expected = layer(x)
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    for other in copies:
        assert torch.equal(other(x), expected)
        assert (repr(other), other.structure) == (repr(layer), layer.structure)


@every_layer
def test_a_layer_made_on_meta_is_initialised_after_to_empty(case):
    layer = StructuredLinear(*case[1:], case[0], weight_norm=True, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert layer(torch.empty(4, layer.in_features, device="meta")).shape == (4, layer.out_features)
    assert layer.weight.is_meta
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    layer.reset_parameters()
    _is_initialised(layer, mup_stds(layer))
    assert torch.equal(layer.gains, torch.ones(len(layer.cores)))
    assert torch.equal(layer.bias, torch.zeros(layer.out_features))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@every_layer
def test_each_core_starts_with_the_standard_deviation_of_the_formula(case, dtype):
    for init, formula in {"mup": mup_stds, "spectral": spectral_stds}.items():
        layer = StructuredLinear(*case[1:], case[0], init=init, dtype=dtype)
        _is_initialised(layer, formula(layer))


def mup_stds(layer):
    """CBS 3.2; E.2 for the first core of a low-rank layer."""
    stds = [sqrt(min(core.fan_in, core.fan_out)) / core.fan_in for core in layer.structure.cores]
    if layer.label.startswith("LowRank"):
        stds[0] = 1 / sqrt(layer.in_features)
    return before_activations(layer, stds)


def before_activations(layer, stds):
    if layer.structure.between is None:
        return stds
    return [*(1 / sqrt(core.fan_in) for core in layer.structure.cores[:-1]), stds[-1]]


def spectral_stds(layer):
    stds = [
        sqrt(core.fan_out / core.fan_in) / (sqrt(core.fan_in) + sqrt(core.fan_out))
        for core in layer.structure.cores
    ]
    return before_activations(layer, stds)


def _is_initialised(layer, stds):
    for parameter, std in zip(layer.cores, stds, strict=True):
        values, n = parameter.detach().double(), parameter.numel()
        assert abs(values.square().mean().sqrt() / std - 1) < 4 / sqrt(2 * n) + 2e-3
        assert abs(values.mean()) < 4 * std / sqrt(n)


@every_case
def test_orthogonal_blocks_have_singular_values_of_exactly_sqrt_fan_out_over_fan_in(case):
    layer = StructuredLinear(*case[1:], case[0], init="orthogonal")
    for core, parameter in zip(layer.structure.cores, layer.cores, strict=True):
        blocks = parameter.detach().numpy()
        values = np.linalg.svd(blocks[:: max(1, len(blocks) // 8)], compute_uv=False)
        np.testing.assert_allclose(values, sqrt(core.fan_out / core.fan_in), rtol=1e-5)
        if core.params > 1:
            assert parameter.unique().numel() > 1, "the blocks are drawn"


@every_layer
@pytest.mark.parametrize("weight_norm", [False, True])
def test_a_layer_that_starts_at_zero_has_a_gradient_in_every_core_after_one_step(case, weight_norm):
    layer = StructuredLinear(*case[1:], case[0], zero_init=True, weight_norm=weight_norm)
    x, target = torch.randn(8, layer.in_features), torch.randn(8, layer.out_features)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert torch.equal(layer(x), torch.zeros(8, layer.out_features))
    F.mse_loss(layer(x), target, reduction="sum").backward()
    assert all(core.grad.isfinite().all() for core in layer.cores)
    assert layer.cores[-1].grad.abs().max() > 0
    optimizer.step()
    optimizer.zero_grad()
    F.mse_loss(layer(x), target, reduction="sum").backward()
    for core in layer.cores:
        assert core.grad.isfinite().all()
        blocks = core.grad.flatten(1).abs().amax(-1)
        assert (blocks.max() if any(layer.padding) else blocks.min()) > 0, (
            "every block that is not padding"
        )


@every_case
@pytest.mark.parametrize("init", ["mup", "spectral"])
def test_weight_norm_multiplies_by_gamma_min_1_sigma_over_rms(case, init):
    layer = layer_of(case, weight_norm=True, bias=False, init=init)
    sigmas = (mup_stds if init == "mup" else spectral_stds)(layer)
    x = tokens(2, layer.structure.in_features)
    x[:, layer.in_features :] = 0
    for rms in (
        0.25,
        0.999,
        1.001,
        8.0,
    ):  # of each core, in its sigma: below the cap, about it, above it
        with torch.no_grad():
            for core, sigma in zip(layer.cores, sigmas, strict=True):
                core.mul_(rms * sigma / core.square().mean().sqrt())
        normalised = [
            gamma * min(1, 1 / rms) * core
            for gamma, core in zip(layer.gains.tolist(), layer.cores, strict=True)
        ]  # fmt: skip
        expected = one_einsum(layer.structure, normalised, x)[:, : layer.out_features]
        assert_close(layer(x[:, : layer.in_features]), expected)
        assert_close(layer.weight @ x[0, : layer.in_features], expected[0])


@some_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_norm_is_right_in_every_dtype_for_small_and_for_large_cores(case, dtype):
    layer = StructuredLinear(*case[1:], case[0], weight_norm=True, dtype=dtype)
    drawn = [core.detach().clone() for core in layer.cores]
    wide = () if dtype == torch.float16 else (1e19, 1e-30)
    for scale in (0.5, 1000.0, *wide):  # squares of the large ones are beyond the dtype
        with torch.no_grad():
            for core, start in zip(layer.cores, drawn, strict=True):
                core.copy_(scale * start)
        for effective, core, sigma in zip(
            layer.effective_cores(), layer.cores, mup_stds(layer), strict=True
        ):
            exact = core.double()
            factor = min(1, sigma / exact.square().mean().sqrt())
            assert effective.dtype == dtype
            assert_close(
                effective.double(), factor * exact, rtol=4 * torch.finfo(dtype).eps, atol=0
            )


@every_layer
def test_weight_norm_has_a_finite_gradient_at_a_zero_core(case):
    layer = layer_of(case, weight_norm=True)
    with torch.no_grad():
        for core in layer.cores:
            core.zero_()
    layer(tokens(2, layer.in_features)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@every_small_layer
def test_derivatives_through_weight_norm_are_right(case):
    layer = layer_of(case, weight_norm=True)
    with torch.no_grad():
        for n, core in enumerate(layer.cores):
            core.mul_((0.5, 2.0)[n % 2])  # one below its cap, the next above
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x = tokens(2, layer.in_features).requires_grad_()

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(function, (x, *parameters), fast_mode=True)


# ---- the layer's weight --------------------------------------------------------------------------


@pytest.fixture
def no_dense(monkeypatch):
    def refuse(*_):
        raise AssertionError("a dense matrix was made")

    monkeypatch.setattr(StructuredLinear, "to_dense", refuse)


@every_layer
def test_dtype_shape_and_device_of_the_weight_are_free(case, no_dense):
    layer = StructuredLinear(*case[1:], case[0], dtype=torch.bfloat16)
    weight = layer.weight
    assert weight.shape == weight.size() == (case[2], case[1])
    assert (weight.dtype, weight.device, weight.ndim) == (torch.bfloat16, torch.device("cpu"), 2)
    assert (weight.numel(), weight.size(0), len(weight)) == (case[1] * case[2], case[2], case[2])
    assert (weight.is_cuda, weight.is_meta, weight.requires_grad) == (False, False, True)
    assert weight.is_floating_point()
    assert isinstance(weight, torch.Tensor)
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad


@every_layer
@pytest.mark.parametrize("weight_norm", [False, True])
def test_f_linear_with_the_weight_runs_through_the_structure(case, weight_norm, no_dense):
    layer = layer_of(case, weight_norm=weight_norm)
    x, bias = tokens(2, layer.in_features), tokens(layer.out_features)
    plain = layer(x) - layer.bias
    assert_close(F.linear(x, layer.weight), plain)
    assert_close(F.linear(x, layer.weight, bias), plain + bias)
    assert_close(F.linear(input=x, weight=layer.weight, bias=bias), plain + bias)


@every_small_case
def test_any_other_use_of_the_weight_is_the_dense_matrix_differentiably(case):
    layer = layer_of(case, bias=False)
    matrix = einsum_matrix(layer.structure, list(layer.cores))[
        : layer.out_features, : layer.in_features
    ]
    x = tokens(2, layer.in_features)
    assert_close(x @ layer.weight.T, x @ matrix.T)
    assert_close(layer.weight[0], matrix[0])
    assert_close(torch.stack([layer.weight, 2 * layer.weight])[1], 2 * matrix)
    np.testing.assert_allclose(layer.weight.detach().numpy(), matrix.detach().numpy(), atol=1e-12)
    weights = tokens(layer.out_features, layer.in_features)
    expected = torch.autograd.grad((weights * matrix.sin()).sum(), list(layer.cores))
    assert_close(
        torch.autograd.grad((weights * layer.weight.sin()).sum(), list(layer.cores)), expected
    )


def test_no_optimizer_takes_the_weight():
    layer = StructuredLinear(8, 8)
    with pytest.raises(ValueError, match="non-leaf"):
        torch.optim.AdamW([layer.weight])
    layer.to_dense = None  # whether it is a leaf is known without the matrix
    assert not layer.weight.is_leaf
    assert layer.weight.detach().is_leaf


def _augment(layer):
    layer.weight *= 2


WRITES = {
    "copy_": lambda layer: layer.weight.copy_(torch.ones_like(layer.weight)),
    "mul_": lambda layer: layer.weight.mul_(2),
    "augmented": _augment,
    "setitem": lambda layer: layer.weight.__setitem__(0, 1.0),
    "out": lambda layer: torch.mul(torch.ones_like(layer.weight), 2, out=layer.weight),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight], 2),
    "init.normal_": lambda layer: nn.init.normal_(layer.weight),
    "init.trunc_normal_": lambda layer: nn.init.trunc_normal_(layer.weight),
    "init.zeros_": lambda layer: nn.init.zeros_(layer.weight),
    "data =": lambda layer: setattr(layer.weight, "data", torch.ones_like(layer.weight)),
    "data.mul_": lambda layer: layer.weight.data.mul_(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writing_to_the_weight_is_an_error_and_changes_nothing(write):
    layer = layer_of(SMALL[-1])
    before = copy.deepcopy(layer.state_dict())
    with torch.no_grad(), pytest.raises((RuntimeError, AttributeError, KeyError)):
        write(layer)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_the_weight_may_be_read_by_what_writes_elsewhere():
    layer = StructuredLinear(12, 20)
    target = torch.zeros(20, 12)
    with torch.no_grad():
        target.copy_(layer.weight).add_(layer.weight, alpha=2).add_(other=layer.weight)
        target[:4] = 4 * layer.weight[:4]
        target.lerp_(4 * layer.weight, 0.5)
        torch.add(layer.weight, target, out=target)
        assert_close(target, 5 * layer.to_dense())
        torch._foreach_copy_(self=[target], src=[layer.weight])
        assert_close(target, layer.to_dense())


# ---- what trains a layer -------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_under_autocast_the_output_has_the_dtype_of_nn_linear(case, autocast):
    for dtype in (torch.float32, autocast):
        for weight_norm in (False, True):
            layer = layer_of(case, dtype=torch.float32, weight_norm=weight_norm)
            dense = nn.Linear(layer.in_features, layer.out_features)
            x = tokens(2, layer.in_features, dtype=dtype).requires_grad_()
            with torch.autocast("cpu", dtype=autocast):
                y = layer(x)
                assert y.dtype == dense(x).dtype == autocast
                assert F.linear(x, layer.weight, layer.bias).dtype == y.dtype
            y.sum().backward()
            assert x.grad.dtype == dtype
            assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
            torch.testing.assert_close(y.float(), layer(x.float()), rtol=0.1, atol=0.1)


@every_small_case
def test_gradients_are_the_same_under_activation_checkpointing(case):
    layer = layer_of(case, weight_norm=True)
    x = tokens(2, layer.in_features).requires_grad_()
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), inputs)
    assert_close(again, expected, rtol=0, atol=0)


def _compiles(case, backend, *shapes):
    torch._dynamo.reset()
    layer = layer_of(case, weight_norm=True)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for leading in shapes:
        x = tokens(*leading, layer.in_features).requires_grad_()
        inputs = [x, *layer.parameters()]
        assert_close(compiled(x), layer(x))
        expected = torch.autograd.grad(layer(x).square().sum(), inputs)
        assert_close(torch.autograd.grad(compiled(x).square().sum(), inputs), expected)


@pytest.mark.slow
@some_cases
def test_a_layer_compiles_without_graph_breaks(case):
    _compiles(case, "aot_eager", (5,), (2, 3))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_layer_compiles_with_inductor():
    _compiles(SMALL[-1], "inductor", (2, 3))


@pytest.mark.slow
@some_cases
def test_a_function_of_the_weight_compiles_without_graph_breaks(case):
    torch._dynamo.reset()
    layer = layer_of(case)
    compiled = torch.compile(
        lambda x: F.linear(x, layer.weight, layer.bias), fullgraph=True, backend="aot_eager"
    )
    x = tokens(2, layer.in_features)
    assert_close(compiled(x), layer(x))


# ---- the table -----------------------------------------------------------------------------------


@every_case
def test_a_family_comes_back_from_its_plain_data(case):
    data = json.loads(json.dumps(case[0].to_dict()))
    assert family(**data) == case[0]
    assert hash(family(**data)) == hash(case[0])
    assert pickle.loads(pickle.dumps(case[0])) == case[0]
    assert eval(case[0].label, {type(case[0]).__name__: type(case[0])}) == case[0]


@every_case
def test_a_structure_of_ones_own_is_a_layer_too(case):
    family, in_features, out_features = case
    by_family = layer_of(case)
    layer = StructuredLinear(
        in_features, out_features, family.structure(in_features, out_features)
    ).double()
    layer.load_state_dict(by_family.state_dict())
    x = tokens(2, in_features)
    assert torch.equal(layer(x), by_family(x))
    if layer.structure.in_features > 1:
        with pytest.raises(ValueError, match="is larger than the structure's"):
            StructuredLinear(layer.structure.in_features + 1, out_features, layer.structure)
    with pytest.raises(ValueError, match="is larger than the structure's"):
        StructuredLinear(in_features, layer.structure.out_features + 1, layer.structure)
