"""The kernels of two cores in Triton's interpreter (float32, float16); no GPU takes part.

x and dy lie between NaN, so that a read outside shows in the result. The oracle is the definition
in float64.
"""

import math
import operator
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import checkpoint

from structlin import BTT, TT, BlockDiagonal, Family, Kronecker, LowRank, Monarch, Structure
from structlin import StructuredLinear as Layer
from structlin._engine import operators, product
from structlin._engine.operators import OF_BIAS, OF_CORES, OF_GAINS, OF_X, Affine
from structlin._engine.triton import check
from structlin._engine.triton import pair as pairs
from structlin._engine.triton.pair import Tile, pair_of
from tests.interpreter import interpret

pytest.importorskip("triton")
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16"])
LAYERS: list[tuple[Family, int, int]] = [
    (BTT(), 24, 20),
    (BTT(rank=3), 24, 36),
    (BTT(rank=2), 23, 19),  # padded
    (Monarch(blocks=2), 24, 24),
    (Monarch(blocks=4), 16, 32),
    (LowRank(rank=3), 24, 12),
    (Kronecker(), 24, 20),
    (TT(rank=2, cores=2), 24, 24),
]


@pytest.fixture(scope="module")
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        yield interpret(patch)


@pytest.fixture(autouse=True)
def kernels(monkeypatch, interpreted):
    monkeypatch.setattr(sys.modules[pairs.__package__], "kernels", interpreted, raising=False)
    monkeypatch.setattr(check, "_answers", {})
    monkeypatch.setattr(check, "has_tf32", lambda: True)
    pairs.launches_of.cache_clear()
    yield interpreted
    pairs.launches_of.cache_clear()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Layers on CPU tensors take the way of a GPU."""
    pays = lambda program, x, trains=None: check.pays(program.numbers, x.dtype, x.device)  # noqa: E731
    monkeypatch.setattr(operators, "pays", pays)
    monkeypatch.setattr(operators, "available", lambda x: True)
    monkeypatch.setattr(operators, "_multiply", pairs.multiply)
    monkeypatch.setattr(operators, "_gradients", pairs.gradients)


def make(
    family: Family, d_in: int, d_out: int, dtype: torch.dtype, tokens: int = 19, **options
) -> tuple[Layer, Tensor, Tensor]:
    """A layer away from its start, x and dy."""
    layer = Layer(d_in, d_out, family, dtype=dtype, **options)
    with torch.no_grad():
        layer.bias.normal_()
        for parameter in layer.parameters():
            parameter.mul_(1.5)  # cores of both are clipped, gains are not 1
    x, dy = (check._surround(torch.randn(tokens, width).to(dtype)) for width in (d_in, d_out))
    return layer, x, dy


def by_kernels(layer: Layer, x: Tensor, dy: Tensor, wants: int = 15) -> list[Tensor]:
    """y, and the gradients of x, the cores, the gains and the bias."""
    sigmas = () if layer.gains is None else layer.stds
    given = list(layer.cores), layer.gains, sigmas, layer._program.numbers
    with torch.no_grad():
        y = pairs.multiply(x, given[0], layer.bias, *given[1:])
        wants &= ~OF_GAINS if layer.gains is None else -1
        return [y, *pairs.gradients(dy, x, *given, wants)]


def by_definition(layer: Layer, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The same in float64."""
    leaves = [*layer.cores, layer.bias, *([] if layer.gains is None else [layer.gains])]
    x, *exact = (each.detach().double().requires_grad_() for each in (x, *leaves))
    gains = None if layer.gains is None else exact[3]
    y = product.define(Affine(layer._program, exact[:2], exact[2], gains, layer.stds), x)
    dx, first, last, bias, *gains = torch.autograd.grad(y, [x, *exact], dy.double())
    return [y.detach(), dx, first, last, *(gains or [x.new_empty(0)]), bias]


def assert_close(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for one, right in zip(found, expected, strict=True):
        assert one.shape == right.shape
        off = (one.detach().double() - right).norm()
        assert float(off) <= TOLERANCE[dtype] * float(right.norm())


# ---- which layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "d_in", "d_out"), LAYERS, ids=str)
@pytest.mark.parametrize("activated", [False, True])
def test_a_pair_computes_what_its_program_says(family, d_in, d_out, activated):
    structure = Layer(d_in, d_out, family.activate() if activated else family).structure
    program = structure.program.fit(d_in, d_out)
    x = torch.randn(5, d_in, dtype=torch.float64)
    cores = [torch.randn(core.shape, dtype=torch.float64) for core in structure.cores]
    found = check.define(pair_of(program.numbers), x, *cores, activated)
    torch.testing.assert_close(found, product.multiply(program, cores, x))


@pytest.mark.parametrize("x_axes", ["p j", "j p"])
@pytest.mark.parametrize("y_axes", ["q o", "o q"])
@pytest.mark.parametrize(
    "cores", [("p r q j", "q o p r"), ("p q r j", "q o r p"), ("r q j", "o p r")]
)
def test_a_pair_may_have_its_axes_in_any_order(x_axes, y_axes, cores):
    sizes = {"p": 2, "q": 3, "r": 4, "j": 5, "o": 6}
    structure = Structure(f"{x_axes} -> {y_axes}", *cores, **sizes)
    pair = pair_of(structure.program.numbers)
    assert dict(zip("pqrjo", pair[:5], strict=True)) == sizes
    x = torch.randn(7, 10, dtype=torch.float64)
    given = [torch.randn(core.shape, dtype=torch.float64) for core in structure.cores]
    expected = product.multiply(structure.program, given, x)
    torch.testing.assert_close(check.define(pair, x, *given, False), expected)
    back = check.define(pair.turn(), expected, *given[::-1], False)  # W^T y
    w = product.to_dense(structure, given)
    torch.testing.assert_close(back, expected @ w)


@pytest.mark.parametrize(
    "structure",
    [
        TT(rank=2, cores=3).structure(64, 64),
        BlockDiagonal(blocks=4).structure(24, 12),
        Structure("b p j -> b q o", "b p r q j", "b q o p r", b=2, p=2, q=2, r=2, j=3, o=3),
        Structure("b c j -> b c o", "b r j", "c o r", b=2, c=3, r=2, j=3, o=3),
    ],
    ids=["three cores", "one core", "an axis of both batches", "two kinds of repetition"],
)
def test_another_structure_is_no_pair(structure):
    assert pair_of(structure.program.numbers) is None


# ---- the kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "d_in", "d_out"), LAYERS, ids=str)
@pytest.mark.parametrize("activated", [False, True])
@DTYPES
def test_the_kernels_are_the_layer_and_its_gradients(family, d_in, d_out, activated, dtype):
    family = family.activate() if activated else family
    case = make(family, d_in, d_out, dtype)
    assert_close(by_kernels(*case), by_definition(*case), dtype)


@pytest.mark.parametrize("family", [BTT(rank=2), BTT(rank=2).activate(), Kronecker()], ids=str)
@DTYPES
def test_weight_normalisation_is_inside_with_its_gradient(family, dtype):
    layer, x, dy = make(family, 24, 20, dtype, weight_norm=True)
    with torch.no_grad():
        layer.cores[1].mul_(0.1)  # is not clipped
    assert_close(by_kernels(layer, x, dy), by_definition(layer, x, dy), dtype)
    with torch.no_grad():
        layer.cores[0].zero_()
    assert all(each.isfinite().all() for each in by_kernels(layer, x, dy))


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("shape", [(32, 1, 2), (16, 4, 4)])
def test_any_tile_gives_the_same(monkeypatch, activated, shape):
    """Several tiles of tokens, p, q and j, the last in part; and sums over tokens in parts."""
    family = BTT(rank=7).activate() if activated else BTT(rank=7)
    layer, x, dy = make(family, 60, 40, torch.float32, tokens=200)
    tile = lambda pair, kind, *_: Tile(  # noqa: E731
        *shape, 16, 32 if kind == "gradients" else 16, 32, warps=4, stages=2
    )
    monkeypatch.setattr(pairs, "tile_for", tile)
    assert_close(by_kernels(layer, x, dy), by_definition(layer, x, dy), torch.float32)


def test_offsets_past_2_to_the_31_are_computed_in_64_bits(monkeypatch):
    case = make(BTT(rank=2), 24, 20, torch.float32)
    expected = by_kernels(*case)
    monkeypatch.setattr(pairs, "FAR", 1)
    assert all(map(torch.equal, by_kernels(*case), expected))


def test_no_tokens_give_no_rows_and_zero_gradients():
    y, dx, *gradients = by_kernels(*make(BTT(rank=2), 24, 20, torch.float32, tokens=0))
    assert (y.shape, dx.shape) == ((0, 20), (0, 24))
    assert not any(each.any() for each in gradients)


def test_x_and_dy_may_have_any_shape_and_strides():
    layer, x, dy = make(BTT(rank=2), 24, 20, torch.float32, tokens=20)
    y, dx, *gradients = by_kernels(layer, x, dy)
    moved = [each.view(4, 5, -1).mT.contiguous().mT for each in (x, dy)]
    found = by_kernels(layer, *moved)
    expected = [y.view(4, 5, 20), dx.view(4, 5, 24), *gradients]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("weight_norm", [False, True])
def test_no_result_shares_its_memory(weight_norm):
    case = make(BTT(), 50, 50, torch.float32, weight_norm=weight_norm)
    found = [*by_kernels(*case), *case[0].parameters(), *case[1:]]
    places = {each.untyped_storage().data_ptr() for each in found if each.numel()}
    assert len(places) == len([each for each in found if each.numel()])


def test_only_what_is_wanted_is_computed():
    case = make(BTT(rank=2), 24, 20, torch.float32, weight_norm=True)
    full = by_kernels(*case)[1:]
    of = [OF_X, OF_CORES, OF_CORES, OF_GAINS, OF_BIAS]
    for wants in (OF_X, OF_CORES, OF_GAINS, OF_BIAS):
        for bit, one, each in zip(of, by_kernels(*case, wants)[1:], full, strict=True):
            assert torch.equal(one, each) if bit == wants else one.numel() == 0


def test_a_nan_in_a_normalised_core_reaches_every_result():
    layer, x, dy = make(BTT(rank=2), 24, 20, torch.float32, weight_norm=True)
    with torch.no_grad():
        layer.cores[0][0, 0, 0] = math.nan
    assert by_kernels(layer, x, dy)[0].isnan().all()


class Compiler:
    """Stands for a kernel: what is asked of Triton, and what is launched without it."""

    def __init__(self):
        self.asked, self.launched = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.asked.append(arguments)
            return {grid: lambda *arguments: self.launched.append(arguments)}

        return launch


def test_triton_is_asked_once_for_each_kind_of_launch(monkeypatch, kernels):
    layer, x, _ = make(BTT(rank=2), 24, 20, torch.float32)
    compiler, numbers = Compiler(), layer._program.numbers
    monkeypatch.setattr(kernels, "multiply", compiler)
    x = torch.zeros(64 * 24 + 1)

    def multiply(x, bias):
        pairs.multiply(x.view(64, 24), layer.cores, bias, None, (), numbers)
        return len(compiler.asked), len(compiler.launched)

    assert [multiply(x[:-1], None) for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]
    assert multiply(x[:-1], layer.bias) == (2, 2)  # with a bias it is another kernel
    assert multiply(x[1:], None) == (3, 2)  # and so with an x that begins elsewhere
    constants = lambda arguments: [each for each in arguments if not torch.is_tensor(each)]  # noqa: E731
    assert constants(compiler.asked[0]) == constants(compiler.launched[0])


# ---- their tiles -------------------------------------------------------------------------------


def test_the_rule_takes_what_fits_and_plain_products_where_they_are_faster():
    takes = lambda family, width: pairs.pays(  # noqa: E731
        family.structure(width, width).program.numbers, torch.bfloat16, CPU
    )
    for rank in (1, 2, 4):
        assert all(takes(BTT(rank=rank), width) for width in (768, 1024, 1536))
        assert all(takes(BTT(rank=rank).activate(), width) for width in (768, 1024, 2048, 4096))
    assert takes(Monarch(blocks=16), 1024)
    assert not takes(BTT(), 8192)  # x would be read many times
    assert not takes(LowRank(rank=64), 1024)  # nothing is permuted, the middle is narrow
    pair = pair_of(BTT(rank=4).structure(1024, 1024).program.numbers)
    for kind in ("product", "gated", "gradients"):
        roomy, tight = (pairs.tile_for(pair, kind, 2, "", n << 10) for n in (227, 20))
        assert roomy != tight
        assert pairs.time_of(pair, tight, kind, 2, 20 << 10) < math.inf
    assert pairs.tile_for(pair, "product", 2, "", 1 << 10) is None


def test_what_was_measured_on_a_gpu_comes_first(monkeypatch):
    numbers = BTT().structure(1024, 1024).program.numbers
    pair = pair_of(numbers)
    names = [pairs.name_of(pair, kind, 2) for kind in ("product", "pays")]
    tile = [16, 16, 16, 1, 32, 32, 8, 2]
    monkeypatch.setitem(pairs.TUNED, "a card", {names[0]: tile})
    assert pairs.tile_for(pair, "product", 2, "a card", 227 << 10) == Tile(*tile)
    assert pairs.tile_for(pair, "product", 2, "another", 227 << 10) != Tile(*tile)
    assert pairs.pays(numbers, torch.bfloat16, CPU)
    monkeypatch.setitem(pairs.TUNED, "any", {names[0]: tile})  # where it fits
    assert pairs.tile_for(pair, "product", 2, "a third", 227 << 10) == Tile(*tile)
    assert pairs.tile_for(pair, "product", 2, "a third", 20 << 10) != Tile(*tile)
    monkeypatch.setitem(pairs.TUNED, "cpu", {names[1]: False})
    assert not pairs.pays(numbers, torch.bfloat16, CPU)


def test_w_is_formed_for_many_tokens_where_the_model_takes_that_for_faster(monkeypatch):
    def least(family, width, served=True):
        numbers = family.structure(width, width).program.numbers
        return pairs.tokens_for_matrix(numbers, torch.bfloat16, CPU, served)

    assert 64 < least(BTT(rank=4), 1024, served=False) < least(BTT(rank=4), 1024) < 4096
    assert {least(BTT(rank=1), width) for width in (1024, 4096)} == {pairs.NEVER}
    assert least(BTT(rank=4).activate(), 1024) == pairs.NEVER  # it is no matrix
    assert least(TT(rank=4, cores=3), 512) == pairs.NEVER
    name = pairs.name_of(pair_of(BTT().structure(2048, 2048).program.numbers), "matrix", 2)
    monkeypatch.setitem(pairs.TUNED, "cpu", {name: 77})
    pairs.tokens_for_matrix.cache_clear()
    assert least(BTT(), 2048) == 77


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16"])
def test_a_fault_of_triton_or_full_precision_leaves_w_alone(monkeypatch, dtype):
    def fault(device):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(check, "has_tf32", lambda: False)
    monkeypatch.setattr(pairs, "card_of", fault)
    layer = BTT(rank=2).structure(24, 24).program.numbers, dtype, CPU
    if dtype == torch.float32:  # FLOPs are dear, and W has more
        assert check.tokens_for_matrix(*layer) == pairs.NEVER
    else:
        with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
            assert check.tokens_for_matrix(*layer) == pairs.tokens_for_matrix(*layer, False)


def test_w_is_formed_on_a_gpu_from_so_many_tokens_on(monkeypatch):
    program, asked = BTT(rank=4).structure(24, 20).program, []
    monkeypatch.setattr(operators, "is_plain", lambda x: True)
    monkeypatch.setattr(check, "tokens_for_matrix", lambda *layer: asked.append(layer) or 10)
    with FakeTensorMode():
        few, many = (torch.empty(2, n, 24, dtype=torch.float16, device="cuda") for n in (4, 5))
    assert not operators.forms_matrix(program, few)
    assert operators.forms_matrix(program, many)
    assert asked == [(program.numbers, torch.float16, torch.device("cuda", 0))] * 2


# ---- before their first use --------------------------------------------------------------------

PROGRAM = BTT(rank=2).activate().structure(24, 20).program.numbers


def test_the_self_test_passes_once_for_a_layer(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check.pays(PROGRAM, torch.float16, CPU)
    monkeypatch.setattr(check, "self_test", None)
    assert check.pays(PROGRAM, torch.float16, CPU)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda y: y.mul_(1.1), "has a relative error of"),
        (lambda y: y[0].fill_(math.nan), "has a relative error of nan"),
        (lambda y: y.mul_(1 + 1e-3 * torch.rand(())), "has other bits at the second run"),
        (
            lambda y: y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(0),
            "a product wrote past its output",
        ),
    ],
)
def test_the_self_test_finds_a_fault_and_says_so_once(monkeypatch, fault, message):
    multiply = pairs.multiply
    monkeypatch.setattr(pairs, "multiply", lambda *a, **options: fault(multiply(*a, **options)))
    with pytest.warns(RuntimeWarning, match=f"from 24 to 20 features in torch.float16 .*{message}"):
        assert not check.pays(PROGRAM, torch.float16, CPU)
    assert not check.pays(PROGRAM, torch.float16, CPU)  # warnings are errors


@pytest.mark.parametrize("kept", [False, True], ids=["checkpoint", "selective"])
def test_a_first_use_under_a_checkpoint_neither_sees_its_hooks_nor_its_modes(on_a_gpu, kept):
    layer, x, dy = make(BTT(rank=2), 24, 20, torch.float32)
    x.requires_grad_()
    saved = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]  # the self-test has some
    contexts = partial(checkpoint.create_selective_checkpoint_contexts, saved)
    y = checkpoint.checkpoint(
        layer, x, use_reentrant=False, **({"context_fn": contexts} if kept else {})
    )
    found = [y, *torch.autograd.grad(y, [x, *layer.cores], dy)]
    assert_close(found, by_definition(layer, x, dy)[:4], torch.float32)
    assert list(check._answers.values()) == [True]


def test_a_first_use_in_inference_mode_is_tested_as_any_other(on_a_gpu):
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert check.pays(PROGRAM, torch.float16, CPU)


def test_a_bias_may_have_any_strides(on_a_gpu):
    layer, x, _ = make(BTT(rank=2), 24, 20, torch.float32)
    given = x, list(layer.cores)
    for bias in (torch.randn(20, 3)[:, 1], torch.randn(1).expand(20)):
        found, exact = (
            pairs.multiply(*given, each, None, (), layer._program.numbers)
            for each in (bias, bias.contiguous())
        )
        assert torch.equal(found, exact)


def test_a_batch_of_cotangents_goes_through_the_definition(on_a_gpu):
    layer, x, _ = make(BTT(rank=2), 24, 20, torch.float32, tokens=2)
    y = layer(x.requires_grad_())
    rows = lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0]  # noqa: E731
    found = torch.vmap(rows)(torch.eye(20).expand(2, 20, 20).transpose(0, 1))
    torch.testing.assert_close(found[:, 0], layer.weight.detach())


@pytest.mark.parametrize("index", range(1, 5), ids=["dx", "first", "last", "dbias"])
def test_the_self_test_finds_a_wrong_gradient(monkeypatch, index):
    gradients = pairs.gradients

    def wrong(*given):
        found = gradients(*given)
        [each for each in found if each.numel()][index - 1].add_(0.1)
        return found

    monkeypatch.setattr(pairs, "gradients", wrong)
    with pytest.warns(RuntimeWarning, match=r"has a relative error of [\d.]+$"):
        assert not check.pays(PROGRAM, torch.float32, CPU)


def test_a_kernel_that_cannot_be_launched_leaves_the_layer_to_plain_products(on_a_gpu, kernels):
    layer, x, dy = make(BTT(rank=2), 24, 20, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "find_gradients", {})  # no grid is in it
        with pytest.warns(RuntimeWarning, match="from 24 to 20 features .* are: KeyError"):
            y = layer(x)
        assert torch.equal(layer(x), y)  # without it, and without a warning
    assert_close([y], by_definition(layer, x, dy)[:1], torch.float32)


def test_without_triton_the_answer_is_no_with_one_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(RuntimeWarning, match="triton"):
        assert not check.pays(PROGRAM, torch.float16, CPU)
    assert not check.pays(PROGRAM, torch.float16, CPU)


def test_nothing_is_tested_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not check.pays(PROGRAM, torch.float16, CPU)
    monkeypatch.undo()
    assert not check._answers


def test_float32_is_taken_where_pytorch_multiplies_it_in_tf32(monkeypatch):
    monkeypatch.undo()  # of `has_tf32`
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", False), ("high", True)):
            torch.set_float32_matmul_precision(setting)
            assert check.has_tf32() is expected
            monkeypatch.setitem(check._answers, (PROGRAM, torch.float32, CPU), True)
            assert check.pays(PROGRAM, torch.float32, CPU) is expected
    finally:
        torch.set_float32_matmul_precision(before)


# ---- whole layers ------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_norm", [False, True])
def test_a_layer_on_a_gpu_takes_the_kernels_and_has_derivatives_of_any_order(
    on_a_gpu, monkeypatch, weight_norm
):
    layer, x, dy = make(BTT(rank=2).activate(), 24, 20, torch.float32, weight_norm=weight_norm)
    launched = []
    for name in ("multiply", "gradients"):
        run = getattr(operators, f"_{name}")
        count = lambda *given, run=run, name=name: launched.append(name) or run(*given)  # noqa: E731
        monkeypatch.setattr(operators, f"_{name}", count)
    x.requires_grad_()
    leaves = [x, *layer.cores]
    y = layer(x)
    found = [y, *torch.autograd.grad(y, leaves, dy, create_graph=True)]
    assert launched == ["multiply"]  # derivatives of derivatives: by the definition
    assert_close(found, by_definition(layer, x, dy)[:4], torch.float32)
    again = torch.autograd.grad(sum(each.square().sum() for each in found[1:]), leaves)
    exact = layer.double()
    monkeypatch.setattr(operators, "pays", lambda *_: False)
    x = x.detach().double().requires_grad_()
    leaves = [x, *exact.cores]
    right = torch.autograd.grad(exact(x), leaves, dy.double(), create_graph=True)
    right = torch.autograd.grad(sum(each.square().sum() for each in right), leaves)
    for one, other in zip(again, right, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


SQUARE = BTT().structure(16, 16).program
FAKE = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def trace_for_a_gpu(monkeypatch, run, tokens: int, of_any: bool = False) -> list[object]:
    """What a compiled program calls on x `(tokens, 16)`, or for any number of tokens, traced on
    fake tensors of a GPU that has kernels, and forms W from 6 tokens on."""
    graphs = []
    for name, answer in {"pays": True, "tokens_for_matrix": 6}.items():
        monkeypatch.setattr(check, name, lambda *_, answer=answer: answer)
        getattr(check, name)._dynamo_marked_constant = True
    torch._dynamo.reset()
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=of_any)
    compiled(torch.empty(tokens, 16, device="cuda:0"))
    return [node.target for node in graphs[0].graph.nodes]


def test_a_program_compiled_for_a_gpu_has_the_operator_in_every_torch(monkeypatch):
    """Torch 2.10 and 2.11 would lose it: while they compile, their `is_exporting` is true."""
    with FAKE:
        layer = Layer(16, 16, BTT(), device="cuda:0").requires_grad_(False)
        found = trace_for_a_gpu(monkeypatch, layer, 5)
    assert torch.ops.structlin.layer.default in found


@pytest.mark.parametrize(
    ("tokens", "of_any", "formed"), [(5, False, False), (6, False, True), (6, True, False)]
)
def test_a_program_compiled_for_a_gpu_forms_w_for_many_tokens(monkeypatch, tokens, of_any, formed):
    run = lambda x: x + 1 if operators.forms_matrix(SQUARE, x) else x - 1  # noqa: E731
    with FAKE:
        found = trace_for_a_gpu(monkeypatch, run, tokens, of_any)
    assert (operator.add in found, operator.sub in found) == (formed, not formed)


def test_the_first_use_in_a_compiled_program_is_tested_while_it_is_traced():
    torch._dynamo.reset()

    def run(x):
        return x + 1 if check.pays(PROGRAM, torch.float16, CPU) else x

    assert torch.compile(run, fullgraph=True, backend="aot_eager")(torch.zeros(1)) == 1
