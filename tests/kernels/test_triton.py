"""The Triton products in Triton's interpreter (float32, float16) and its compiler for sm_90; no GPU
takes part.

Operands lie inside buffers of NaN, with gaps, so that a read outside shows in the result and a
write outside in the buffer. The oracle is `torch.einsum` in float64.
"""

import importlib.util
import json
import math
import subprocess
import sys
import warnings
from functools import partial
from itertools import product as product_of
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from benchmarks import ahead, gpu, gpu_steps
from benchmarks.harness.record import RESULTS
from structlin import BTT, Family, Kronecker, Monarch, StructuredLinear
from structlin._engine import product as product_module
from structlin._engine.triton import check, gemm
from structlin._engine.triton import launch as triton_op
from structlin._engine.triton import stages as triton_stages
from tests.kernels.test_engine import by_einsum

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
BORDER = 4096  # elements; a tile of rows past the end stays inside
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16"])
Z, M, K, N = "z1 z2", "m1 m2", "k1 k2", "n1 n2"
SIZES = {"z1": 2, "z2": 2, "m1": 13, "m2": 3, "k1": 3, "k2": 7, "n1": 2, "n2": 5}


@pytest.fixture(scope="module")
def kernels():
    """`triton_gemm` once more, its kernel interpreted: Triton decides that when it decorates
    one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.find_spec("structlin._engine.triton.gemm")
        module = sys.modules[spec.name + "_interpreted"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name + "_interpreted"]


class Guarded:
    """A random tensor of the axes `order`, slowest first, in a buffer of NaN with a border and a
    gap after each row."""

    def __init__(
        self, order: str, sizes: dict[str, int] = SIZES, dtype: torch.dtype = torch.float32
    ) -> None:
        *outer, last = (sizes[axis] for axis in order.split())
        self.order = order
        self.buffer = torch.full(
            (2 * BORDER + math.prod(outer) * (last + 1),), math.nan, dtype=dtype
        )
        self.inside = self.buffer[BORDER:-BORDER].view(*outer, last + 1)[..., :last]
        self.inside.copy_(torch.randn(self.inside.shape))

    def __call__(self, *axes: str) -> Tensor:
        """The tensor with its axes in this order, each group filled up to two with a dimension of
        1."""
        groups = (
            " ".join([*group.split(), "1", "1"][: max(2, len(group.split()))]) for group in axes
        )
        return rearrange(self.inside, f"{self.order} -> {' '.join(groups)}")

    def forget(self) -> "Guarded":
        self.buffer.fill_(math.nan)
        return self

    def only_inside_is_written(self) -> bool:
        return (
            int(self.buffer.isfinite().sum())
            == self.inside.numel()
            == int(self.inside.isfinite().sum())
        )


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.dtype == torch.float64
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[found.dtype], error  # NaN is not


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("yzmlkj,yzkjni->yzmlni", a.double(), b.double())


def block_gemm_weight(kernels, dy: Tensor, x: Tensor, out: Tensor, **options) -> None:
    """`out[z, o, i] = sum_n dy[z, n, o] x[z, n, i]`, as the gradient of a core."""
    kernels.block_gemm(dy.permute(0, 1, 4, 5, 2, 3), x, out, rows="k", **options)


def weight_product(dy: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("yznmpo,yznmji->yzpoji", dy.double(), x.double())


# a, b, out: all row-major; tokens fastest everywhere; nothing contiguous and every index in two
# levels
LAYOUTS = pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        (f"{M} {Z} {K}", f"{Z} {N} {K}", f"{M} {Z} {N}"),
        (f"{Z} {K} {M}", f"{Z} {K} {N}", f"{Z} {N} {M}"),
        ("k2 z2 m1 k1 z1 m2", "n1 k1 z1 n2 z2 k2", "n2 m2 z1 m1 n1 z2"),
    ],
    ids=["rows", "tokens-fastest", "scattered"],
)


@DTYPES
@LAYOUTS
def test_block_gemm_is_the_batched_product_of_any_strided_views(kernels, dtype, a, b, out):
    a, b, out = (Guarded(order, dtype=dtype) for order in (a, b, out))
    kernels.block_gemm(a(Z, M, K), b(Z, K, N), out.forget()(Z, M, N))
    assert_close(out(Z, M, N), product(a(Z, M, K), b(Z, K, N)))
    assert out.only_inside_is_written()


@pytest.mark.parametrize("order", ["z1 z2 n1 n2", "n2 m2 z1 n1 z2"])
def test_a_bias_is_added_in_float32_wherever_it_lies(kernels, order):
    """Expanded over the tokens; the second also differs between the repeats of a token."""
    a, b, out = (
        Guarded(axes, dtype=torch.float16)
        for axes in (f"{M} {Z} {K}", f"{Z} {N} {K}", f"{Z} {N} {M}")
    )
    bias = Guarded(order, dtype=torch.float16)
    bias.order = f"{order} {' '.join(axis for axis in ('m1', 'm2') if axis not in order)}"
    bias.inside = bias.inside[(..., *[None] * (6 - bias.inside.ndim))]
    expanded = bias(Z, M, N).expand(out(Z, M, N).shape)
    kernels.block_gemm(a(Z, M, K), b(Z, K, N), out.forget()(Z, M, N), bias=expanded)
    assert_close(out(Z, M, N), product(a(Z, M, K), b(Z, K, N)) + expanded.double())
    assert out.only_inside_is_written()


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("splits", [None, 3])
def test_block_gemm_weight_sums_over_tokens_however_the_sum_is_split(
    kernels, dtype, a, b, out, splits
):
    x, dw, dy = (Guarded(order, dtype=dtype) for order in (a, b, out))
    found = []
    for _ in range(2):  # and the same bits twice
        block_gemm_weight(kernels, dy(Z, M, N), x(Z, M, K), dw.forget()(Z, N, K), splits=splits)
        found.append(dw.inside.clone())
    assert_close(dw(Z, N, K), weight_product(dy(Z, M, N), x(Z, M, K)))
    assert dw.only_inside_is_written()
    assert torch.equal(*found)


@pytest.mark.parametrize("tokens", [1, 16, 17, 64])
@pytest.mark.parametrize("fan_in", [1, 16, 40])
def test_ragged_sides_are_padded_inside_the_kernel(kernels, tokens, fan_in):
    sizes = {"z": 3, "m": tokens, "k": fan_in, "n": 5}
    a, b, out = Guarded("m z k", sizes), Guarded("z n k", sizes), Guarded("z n m", sizes)
    tile = kernels.Tile(16, 16, 16, warps=4, stages=2)
    kernels.block_gemm(a("z", "m", "k"), b("z", "k", "n"), out.forget()("z", "m", "n"), tile=tile)
    assert_close(out("z", "m", "n"), product(a("z", "m", "k"), b("z", "k", "n")))
    assert out.only_inside_is_written()


def test_no_tokens_give_no_rows_and_a_zero_gradient(kernels):
    empty = torch.empty(1, 3, 0, 1, 4, 1)
    kernels.block_gemm(empty, torch.ones(1, 3, 4, 1, 5, 1), torch.empty(1, 3, 0, 1, 5, 1))
    for splits in (None, 2):
        dw = torch.full((1, 3, 5, 1, 4, 1), math.nan)
        block_gemm_weight(kernels, torch.empty(1, 3, 0, 1, 5, 1), empty, dw, splits=splits)
        assert torch.equal(dw, torch.zeros_like(dw))


def test_an_expanded_operand_is_read_through_its_zero_strides(kernels):
    a, b, out = (
        torch.randn(1, 1, 9, 1, 6, 1).expand(2, 3, 9, 4, 6, 1),
        torch.randn(2, 3, 6, 1, 4, 2),
        Guarded(f"{Z} {M} {N}", {"z1": 2, "z2": 3, "m1": 9, "m2": 4, "n1": 4, "n2": 2}),
    )
    kernels.block_gemm(a, b, out.forget()(Z, M, N))
    assert_close(out(Z, M, N), product(a, b))


def test_sums_are_float32_and_may_be_stored_so(kernels):
    """Of float16 operands: 2048 + 1 is not a float16."""
    a, out = torch.ones(1, 1, 1, 1, 2049, 1, dtype=torch.float16), torch.empty(1, 1, 1, 1, 1, 1)
    kernels.block_gemm(a, a.permute(0, 1, 4, 5, 2, 3), out)
    assert out.item() == 2049


def test_the_parts_of_a_split_sum_are_float32(kernels):
    """2049 - 2048 over two parts of 64 tokens, of float16 operands."""
    dy, x = (
        torch.zeros(1, 1, 128, 1, 1, 1, dtype=torch.float16),
        torch.ones(1, 1, 128, 1, 1, 1, dtype=torch.float16),
    )
    dy[:, :, 0], dy[:, :, 1], dy[:, :, 64] = 2048, 1, -2048
    dw = torch.empty(1, 1, 1, 1, 1, 1, dtype=torch.float16)
    block_gemm_weight(kernels, dy, x, dw, splits=2)
    assert dw.item() == 1


def test_offsets_past_int32_are_computed_in_64_bits(kernels, monkeypatch):
    """`FAR` is lowered: a tensor of 2**31 elements does not fit here."""
    indices = []
    note = lambda bias, options: indices.append(str(options["int_type"]))  # noqa: E731
    monkeypatch.setattr(kernels, "_product", Interpreted(kernels._product, note))
    dy, x, dw = Guarded(f"{M} {Z} {N}"), Guarded(f"{M} {Z} {K}"), Guarded(f"{Z} {N} {K}")
    for far in (2**31, 64):
        monkeypatch.setattr(kernels, "FAR", far)
        kernels._plan.cache_clear()
        block_gemm_weight(kernels, dy(Z, M, N), x(Z, M, K), dw.forget()(Z, N, K), splits=2)
        assert_close(dw(Z, N, K), weight_product(dy(Z, M, N), x(Z, M, K)))
    kernels._plan.cache_clear()
    assert indices == ["int32", "int64"]


def test_the_extent_is_the_largest_offset(kernels):
    assert kernels._extent(((3, 5, 7), (35, 7, 1))) == 104
    assert kernels._extent(((2**40, 1), (0, 2**40))) == 0


def test_every_gpu_has_a_tile_for_every_kind_and_an_unknown_one_has_the_fallback(kernels):
    for name in kernels.TILES:
        for kind in map(" ".join, product_of(("half", "tf32", "ieee"), ("product", "weight"))):
            tile = kernels.tile_for(10**6, 10**6, 10**6, name, kind)
            assert tile.stages * (tile.m + tile.n) * tile.k * 4 <= 320 * 1024
    assert kernels.table_of("a GPU of next year") == kernels.TILES["fallback"]


@pytest.fixture(scope="module")
def stages(kernels):
    """`triton_stages` on the interpreted products."""
    both = (triton_stages.forward, triton_stages.backward)
    forward, backward = (partial(each, by=kernels.block_gemm) for each in both)
    return SimpleNamespace(forward=forward, backward=backward)


@pytest.mark.parametrize(("family", "d_in", "d_out"), gpu.SMALL, ids=str)
@DTYPES
@pytest.mark.parametrize("tokens", [0, 19])
def test_the_stages_are_the_layer_and_its_gradients(
    stages, family: Family, d_in: int, d_out: int, tokens: int, dtype: torch.dtype
):
    """Against float64 autograd of one einsum over the whole expression."""
    structure = family.structure(d_in, d_out)
    assert triton_stages.supported(structure.program.numbers)
    x = Guarded("t i", {"t": tokens, "i": d_in}, dtype).inside
    dy = Guarded("t o", {"t": tokens, "o": d_out}, dtype).inside
    cores = [
        torch.randn(core.batch, core.fan_in, core.fan_out).to(dtype).mT for core in structure.cores
    ]
    bias = torch.randn(d_out).to(dtype)
    y, *middle = stages.forward(structure.program.numbers, cores, x, bias)
    both = (True, True)
    dx, *gradients = stages.backward(structure.program.numbers, cores, x, middle, dy, both)

    wanted = by_einsum(structure, cores, x, bias, dy)[:-1]
    for found, expected in zip((y, dx, *gradients), wanted, strict=True):
        assert found.shape == expected.shape
        assert found.is_contiguous()
        assert tokens == 0 or assert_close(found, expected) is None
        assert tokens or not found.any()


def test_only_what_is_wanted_is_computed(stages):
    structure = BTT(rank=2).structure(16, 16)
    cores = [torch.randn(core.shape) for core in structure.cores]
    x, dy, program = torch.randn(5, 16), torch.randn(5, 16), structure.program.numbers
    _, *middle = stages.forward(program, cores, x, None)
    assert [each.shape for each in middle] == [(5 * 2 * 16,)]
    both = stages.backward(program, cores, x, middle, dy, (True, True))
    for wants in ((True, False), (False, True)):
        found = stages.backward(program, cores, x, middle, dy, wants)
        for one, other, wanted in zip(found, both, (wants[0], *[wants[1]] * 2), strict=True):
            assert torch.equal(one, other) if wanted else one.numel() == 0


def test_float32_products_follow_the_precision_of_pytorch(kernels):
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("PyTorch 2.9 and later have one")
    before = matmul.fp32_precision
    try:
        for setting, expected in (("none", "ieee"), ("ieee", "ieee"), ("tf32", "tf32")):
            matmul.fp32_precision = setting
            assert kernels.kind_of(torch.float32, "m") == f"{expected} product"
            assert kernels.kind_of(torch.float16, "k") == "half weight"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("family", [BTT(rank=2), Kronecker(), Monarch(blocks=2)], ids=str)
def test_the_operator_has_derivatives_of_any_order(monkeypatch, family: Family):
    """The products are PyTorch's in float64 here, those of a layer whose kernels are refused."""
    monkeypatch.setattr(gemm, "block_gemm", triton_stages.plain)
    structure = family.structure(6, 4) if family != Monarch(blocks=2) else family.structure(4, 8)
    x = torch.randn(2, 3, structure.in_features, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(structure.out_features, dtype=torch.float64, requires_grad=True)
    cores = [
        torch.randn(core.shape, dtype=torch.float64, requires_grad=True) for core in structure.cores
    ]

    def run(x: Tensor, bias: Tensor, *cores: Tensor) -> Tensor:
        return triton_op.apply(product_module.multiply, structure, x, cores, bias)

    expected = product_module.multiply(structure.program, cores, x) + bias
    torch.testing.assert_close(run(x, bias, *cores), expected)
    assert gradcheck(run, (x, bias, *cores))
    assert gradgradcheck(run, (x, bias, *cores))
    some = [leaf.requires_grad_(wanted) for leaf, wanted in ((x, False), (cores[0], True))]
    assert gradgradcheck(lambda core: run(some[0], bias.detach(), core, *cores[1:]), (some[1],))

    def third(run):
        y = run(x, bias, *cores).pow(3).sum()
        for _ in range(2):
            y = torch.autograd.grad(y, cores[0], create_graph=True)[0].pow(2).sum()
        return torch.autograd.grad(y, cores)

    plain = lambda x, bias, *cores: product_module.multiply(structure.program, cores, x) + bias  # noqa: E731
    torch.testing.assert_close(third(run), third(plain))


# ---- the self-test -------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, kernels):
    """`triton_check` on the interpreted products, before its first use."""
    monkeypatch.setattr(check, "_passed", {})
    monkeypatch.setattr(check, "refused", set())
    monkeypatch.setitem(sys.modules, "structlin._engine.triton.gemm", kernels)
    return partial(check.usable, program=BTT().structure(16, 16).program.numbers)


def test_the_self_test_passes(fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fresh(torch.device("cpu"), torch.float16)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda out: out.mul_(1.1), "relative error"),
        (lambda out: out[0, 0, 0].fill_(math.nan), "relative error"),
        (
            lambda out: out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0),
            "wrote past its output",
        ),
        (lambda out: out.mul_(1 + 1e-3 * torch.rand(())), "other bits"),
    ],
)
@pytest.mark.parametrize("rows", ["m", "k"])
def test_the_self_test_finds_a_fault_and_says_so_once(
    fresh, monkeypatch, kernels, fault, message, rows
):
    """The products are einsums here, but for the fault."""

    def wrong(a, b, out, bias=None, splits=None, **options):
        triton_stages.plain(a, b, out, bias)
        if options.get("rows", "m") == rows:
            fault(out)

    monkeypatch.setattr(kernels, "block_gemm", wrong)
    name = {"m": "a product with a bias", "k": "a split product"}[rows]
    device = torch.device("cpu")
    with pytest.warns(
        RuntimeWarning, match=f"not used for torch.float16 on cpu.*{name} .*{message}"
    ):
        assert not fresh(device, torch.float16)
    assert not fresh(device, torch.float16)  # warnings are errors


def test_without_triton_the_answer_is_no_with_one_warning(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(RuntimeWarning, match="triton"):
        assert not fresh(torch.device("cpu"), torch.float32)
    assert not fresh(torch.device("cpu"), torch.float32)


# ---- a layer whose kernels are refused -----------------------------------------------------------


class Interpreted:
    """The interpreted kernel in place of the compiled one; it may be given a fault."""

    def __init__(self, kernel, fault=lambda bias, options: False):
        self.kernel, self.fault, self.refused = kernel, fault, 0

    def __getitem__(self, grid):
        def launch(a, b, out, bias, *arguments, **options):
            if self.fault(bias, options):
                self.refused += 1
                raise RuntimeError("out of resource: shared memory")
            self.kernel[grid](a, b, out, bias, *arguments, **options)

        return launch


@pytest.fixture
def on_a_gpu(monkeypatch, kernels):
    """Layers on CPU tensors take the way of a GPU whose products have passed, after `faulty`."""
    monkeypatch.setattr(check, "_passed", {(torch.device("cpu"), torch.float32): True})
    monkeypatch.setattr(check, "refused", set())
    monkeypatch.setattr(product_module.operators, "pays", lambda program, x: False)
    usable = lambda x, s: check.usable(x.device, x.dtype, s.program.numbers)  # noqa: E731
    monkeypatch.setattr(triton_op, "available", usable)

    def faulty(fault):
        kernel = Interpreted(kernels._product, fault)
        monkeypatch.setattr(gemm, "_product", kernel)
        return kernel

    return faulty


def results_of(layer: StructuredLinear, x: Tensor, way) -> list[Tensor]:
    """The output, and the gradients of its squares' sum."""
    leaves = [x, *layer.cores, layer.bias]
    y = way(x)
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize(
    "fault",
    [
        lambda bias, options: True,
        lambda bias, options: bias is not None,  # the last of the forward pass
        lambda bias, options: options["split"],  # one of the backward pass
    ],
    ids=["all", "forward", "backward"],
)
def test_a_layer_whose_kernel_cannot_be_launched_has_the_plain_products_after_one_warning(
    on_a_gpu, monkeypatch, fault
):
    monkeypatch.setitem(gemm.TILES["fallback"], "rows_per_program", 16)
    layer, other = (StructuredLinear(16, 16, BTT(rank=rank)) for rank in (1, 2))
    x = torch.randn(40, 16, requires_grad=True)
    plain = lambda x: product_module.multiply(layer.structure.program, layer.cores, x) + layer.bias  # noqa: E731
    expected = results_of(layer, x, plain)
    kernel = on_a_gpu(fault)
    with pytest.warns(RuntimeWarning, match="16 -> 16 of 2 cores.*out of resource") as seen:
        found = results_of(layer, x, layer)
    assert len(seen) == 1
    torch.testing.assert_close(found, expected)
    assert kernel.refused == 1
    torch.testing.assert_close(results_of(layer, x, layer), expected)  # warnings are errors
    assert kernel.refused == 1
    on_a_gpu(lambda bias, options: False)
    results_of(other, x, other)  # the others keep their kernels
    assert triton_op.available(x, other.structure)
    assert not triton_op.available(x, layer.structure)


def test_a_compiled_program_keeps_the_operator_and_is_right_after_a_refusal(on_a_gpu):
    kernel, layer = on_a_gpu(lambda bias, options: False), StructuredLinear(16, 16, BTT())
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 16, requires_grad=True)
    expected = results_of(layer, x, layer)
    torch.testing.assert_close(results_of(layer, x, compiled), expected)
    kernel.fault = lambda bias, options: True
    with pytest.warns(RuntimeWarning, match="out of resource"):
        torch.testing.assert_close(results_of(layer, x, compiled), expected)
    assert kernel.refused == 1


def test_a_program_compiled_for_a_gpu_has_the_operator_in_every_torch(monkeypatch):
    """Traced on fake tensors of a GPU. Those of torch 2.10 and 2.11 would lose it: while they
    compile, their `is_exporting` is true."""
    gpu_0, graphs = torch.device("cuda", 0), []
    monkeypatch.setattr(check, "_passed", {(gpu_0, torch.float32): True})
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = StructuredLinear(16, 16, BTT(), device=gpu_0).requires_grad_(False)
        backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
        torch.compile(layer, fullgraph=True, backend=backend)(torch.empty(5, 16, device=gpu_0))
    targets = [node.target for node in graphs[0].graph.nodes]
    assert torch.ops.structlin.multiply.default in targets


def test_the_first_use_in_a_compiled_program_is_tested_while_it_is_traced(fresh):
    torch._dynamo.reset()
    device, program = torch.device("cpu"), BTT().structure(16, 16).program.numbers

    def run(x):
        return x + 1 if check.usable(device, torch.float32, program) else x

    assert torch.compile(run, fullgraph=True, backend="aot_eager")(torch.zeros(1)) == 1


# ---- tiles by GPU --------------------------------------------------------------------------------


def tile_rows(seconds: dict[str, dict[tuple[int, ...], float]]) -> list[dict]:
    """Rows of the job `tiles`, for products of one rule."""
    shared = {"kind": "tile", "structure": "BTT r=1", "width": 64, "dtype": "float16"}
    return [
        shared | {"rule": "half product 128 32 32 4 1", "product": name, "tile": list(tile)}
        | {"seconds": took}
        for name, times in seconds.items()
        for tile, took in times.items()
    ]  # fmt: skip


RULE, FAST, FASTER_ONCE = (128, 32, 32, 4, 1), (64, 32, 32, 4, 1), (128, 32, 32, 8, 1)


def test_the_faster_tiles_of_a_gpu_are_written_under_its_name_and_read_there_alone(
    kernels, monkeypatch, tmp_path
):
    monkeypatch.setattr(kernels, "TILES", {"fallback": kernels.TILES["fallback"]})
    monkeypatch.setattr(kernels, "gpu_of", lambda device: "a new GPU")
    monkeypatch.setattr(gpu, "kernels", lambda: SimpleNamespace(gemm=kernels))
    rows, table = gpu.Rows(tmp_path / "rows.jsonl"), tmp_path / "tiles.json"
    seconds = {"y1": {RULE: 2.0, FAST: 1.9, FASTER_ONCE: 1.0}, "y2": {RULE: 2.0, FAST: 1.9}}
    for row in tile_rows(seconds):
        rows.add(row.pop("kind"), **row)
    tile = partial(kernels.tile_for, 999, 32, 32, "a new GPU")
    assert tile("half product") == RULE
    gpu.tuned(rows, math.inf, table)
    written = json.loads(table.read_text())
    assert written["a new GPU"] == {"tuned": {"half product 128 32 32 4 1": list(FAST)}}
    assert written["fallback"] == kernels.TILES["fallback"]
    monkeypatch.setattr(kernels, "TILES", written)
    kernels.tile_for.cache_clear()
    assert tile("half product") == FAST
    assert tile("half weight") == RULE
    assert kernels.tile_for(999, 32, 32, "another", "half product") == RULE
    kernels.tile_for.cache_clear()


@pytest.mark.parametrize("seconds", [{RULE: 2.0, FAST: 1.99}, {RULE: 2.0, FAST: 3.0}, {RULE: 2.0}])
def test_a_tile_that_gains_nearly_nothing_is_not_written(seconds):
    assert gpu.faster_tiles(tile_rows({"y1": seconds})) == {}


@pytest.mark.parametrize("sizes", [(10**5, 64, 64), (40, 8, 3), (64, 4096, 100), (10**5, 512, 512)])
def test_the_tiles_that_are_tried_are_the_rules_and_others_that_fit(sizes):
    _, tile = gemm.rule(*sizes, "fallback", "half product")
    first, *others = gpu.candidates(tile, sizes)
    assert first == tile
    assert len({tile, *others}) == 1 + len(others) > 1
    assert {tile.stages, 2} <= {each.stages for each in (tile, *others)}
    for each in others:
        assert each.m * each.n <= (128 * 64 if each.warps == 4 else 128 * 256)
        assert all(side < 2 * max(16, size) for side, size in zip(each[:3], sizes, strict=True))


# ---- the compiler --------------------------------------------------------------------------------


@pytest.fixture
def target():
    """Triton compiles for sm_90, on no GPU."""
    from triton.runtime import driver

    before = driver._active
    ahead.set_target(90)
    yield
    driver._active = before


def test_the_tiles_of_both_hopper_cards_are_compiled_ahead(monkeypatch):
    h100, h200 = ahead.GPUS[90]
    assert (h100, h200) == ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    assert len(ahead.tables_of(90)) == 1
    monkeypatch.setitem(gemm.TILES, h100, {"tuned": {"half product 1 1 1 4 1": list(FAST)}})
    assert {*ahead.tables_of(90).values()} == {h100, h200}


def test_what_is_collected_for_a_gpu_comes_back_from_its_file(target, monkeypatch, tmp_path):
    todo = [("self_test", partial(gpu.self_test, dtype=dtype)) for dtype in ("float32", "bfloat16")]
    monkeypatch.setattr(gpu, "jobs", lambda widths, names: todo)
    assert gpu_steps.collect(tmp_path, [16], ["BTT r=1"]) > 4
    launches = ahead.Launches(gemm._product)
    for arguments, options in json.loads((tmp_path / gpu_steps.FILE).read_text()):
        options = {name: gpu_steps.live(each) for name, each in options.items()}
        launches[(1,)](*map(gpu_steps.live, arguments), **options)
    assert launches.found.keys() == ahead.collect(90, todo).keys()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["jobs", "example"])
def test_what_computes_launches_what_is_collected_without_values_and_nothing_else(
    target, kernels, monkeypatch, source
):
    """The jobs of `benchmarks.gpu` on small layers, among them the self-test and the tests' layers;
    a step of an example. Bfloat16 is wrong in the interpreter, and float16 stands for it."""
    monkeypatch.setattr(gemm, "gpu_of", lambda device: ahead.GPUS[90][0])
    monkeypatch.setattr(gpu, "GOALS", [("BTT r=1", 16)])
    monkeypatch.setattr(gpu, "ROUNDS", (1, 1))
    monkeypatch.setitem(gpu.TOLERANCE, "bfloat16", 1.0)
    todo, steps = [], []
    if source == "jobs":
        names = ["BTT r=1", "Monarch 4", "TT r=4"]
        todo = gpu.jobs([16], names, dtype="float16", tokens=48, far_tokens=350)
    else:
        steps = ahead.steps_of_examples(["train_mlp_lm"], [["--smoke"]])
    collected = ahead.collect(90, todo, steps)
    launches = ahead.Launches(gemm._product, kernels._product)
    with ahead.as_on_a_gpu(launches, ahead.GPUS[90][0]):
        ahead.run_jobs(launches, todo)
        for _, step in steps:
            step()
    assert len(collected) > 8
    assert launches.found.keys() == collected.keys()


@pytest.mark.slow
def test_the_kernels_compile_for_sm_90_with_tensor_cores_and_without_spills():
    """Those of the layers of one width, each once. In processes of their own: Triton's driver is
    replaced by one that only knows the target."""
    command = [sys.executable, "-m", "benchmarks.ahead", "--smoke"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    (row,) = (json.loads(line) for line in found.stdout.splitlines() if line.startswith("{"))
    assert row["kernels"] > 40
    assert row["spilling"] == row["too_large"] == []
    assert row["with_tensor_cores"] > row["kernels"] / 2


@pytest.mark.parametrize("arch", ahead.GPUS)
def test_of_all_kernels_that_were_compiled_ahead_none_spills_or_is_too_large(arch):
    kept = json.loads((RESULTS / "ahead.json").read_text())
    (row,) = (row for row in kept["rows"] if row["arch"] == f"sm_{arch}")
    assert row["spilling"] == row["too_large"] == []
    assert sum(row["of"].values()) == row["kernels"]
    assert {"self_test", "small", "check", "layer", "tiles", "far", *ahead.EXAMPLES} == {*row["of"]}
