"""The layer multiplies by what its state says, whatever users do to it; and refuses what it cannot
hold."""

import copy
import json
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from structlin import (
    BTT,
    TT,
    Family,
    Kronecker,
    LowRank,
    Structure,
    StructuredLinear,
    family,
    project,
    quantize,
)
from structlin._structure.structure import Program
from tests.catalogue import SMALL, SMALL_IDS, layer_of, tokens

every_small_case = pytest.mark.parametrize("case", SMALL, ids=SMALL_IDS)


def test_a_float64_layer_stays_float64_under_autocast_as_nn_linear_does():
    x = tokens(3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (
            StructuredLinear(16, 16, dtype=torch.float64)(x).dtype
            == nn.Linear(16, 16, dtype=torch.float64)(x).dtype
        )


@pytest.mark.parametrize("change", [lambda layer: layer, quantize])
def test_float64_under_autocast_is_refused_by_a_layer_of_another_dtype(change):
    layer = change(StructuredLinear(16, 16))
    refused = pytest.raises(TypeError, match="float64, which autocast leaves as it is, the cores")
    with torch.autocast("cpu", dtype=torch.bfloat16), refused:
        layer(tokens(3, 16))


class Halved(Family):
    def structure(self, in_features, out_features):
        return Structure("i -> o", "o i", i=in_features // 2, o=out_features)


class Nothing(Family):
    def structure(self, in_features, out_features):
        return None


def test_a_family_that_gives_no_structure_is_refused():
    with pytest.raises(TypeError, match="gives a NoneType, not a Structure"):
        StructuredLinear(8, 8, Nothing())


class Unseen(Family):
    def __init__(self, blocks):
        self.blocks = blocks

    def structure(self, in_features, out_features):
        return Structure("b i -> b o", "b o i", b=self.blocks, i=8 // self.blocks, o=8)


@pytest.mark.parametrize("chosen", [Unseen(2), Unseen(2).activate()])
def test_a_family_whose_options_are_no_fields_is_refused_as_two_of_them_look_alike(chosen):
    with pytest.raises(TypeError, match=r"Unseen has the attribute 'blocks'.*`blocks: int`"):
        StructuredLinear(8, 16, chosen)


@dataclass(frozen=True)
class Narrow(Family):
    rank: int

    def structure(self, in_features, out_features):
        return Structure("i -> o", "r i", "o r", i=in_features, o=out_features, r=self.rank)


def test_a_users_family_takes_numpy_integers_and_is_plain_data_all_the_same():
    by_numpy, by_python = Narrow(np.int64(3)), Narrow(3)
    layer = StructuredLinear(8, 6, by_numpy)
    assert layer.structure == by_python.structure(8, 6)
    assert layer.label == "Narrow(rank=3)"
    assert family(**json.loads(json.dumps(by_numpy.to_dict()))) == by_python
    nested = json.loads(json.dumps(by_numpy.activate().to_dict()))
    assert family(**nested) == by_python.activate()


@pytest.mark.parametrize("bias", [0, 1, None, False, True, np.bool_(True), 2, "False", 1.0, []])
def test_the_bias_flag_is_what_it_is_to_nn_linear_or_refused_as_no_flag(bias):
    if not isinstance(bias, int | np.bool_ | None) or bias == 2:
        with pytest.raises(ValueError if bias == 2 else TypeError, match="bias="):
            StructuredLinear(8, 6, BTT(), bias=bias)
        return
    layer, linear = StructuredLinear(8, 6, BTT(), bias=bias), nn.Linear(8, 6, bias=bias)
    assert (layer.bias is None) == (linear.bias is None)
    assert f"bias={linear.bias is not None}" in repr(layer)


def test_a_users_family_is_known_by_its_name_and_may_not_take_one_of_ours():
    assert family("halved") == Halved()
    assert family(**Halved().to_dict()) == Halved()
    with pytest.raises(ValueError, match="structlin has the family BTT, and case is ignored"):
        type("BTT", (Family,), {"structure": lambda self, i, o: None})


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        (lambda cores: cores[:1], "1 cores given; the structure has 2"),
        (lambda cores: [cores[0], cores[1][:1]], r"cores\[1\] has shape"),
        (lambda cores: [torch.ones(1, 1, 1), cores[1]], r"cores\[0\] has shape"),
    ],
)
def test_cores_that_do_not_fit_are_refused_before_anything_is_written(cores, message):
    layer = StructuredLinear(16, 16)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=message):
        layer.set_cores_(cores([torch.zeros_like(core) for core in layer.cores]))
    assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_a_structure_can_not_be_changed():
    structure = TT(rank=2).structure(12, 20)
    with pytest.raises(TypeError):
        structure.sizes["i1"] = 7
    with pytest.raises(AttributeError, match="immutable"):
        structure.flops = 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cores": "oi"}, TypeError, "must be a text and a list of texts"),
        ({"sizes": [("i", 2)]}, TypeError, "must be a mapping"),
        ({"rank": 3}, ValueError, "rank: a Structure has signature, cores, sizes, between alone"),
        ({"between": "relu"}, ValueError, "between='relu' is no activation; there are silu"),
        ({"between": 3}, TypeError, "between=3 is no activation; there are silu"),
        (
            {"sizes": {"i": 2, "o": 3, "between": 3}},
            ValueError,
            "sizes: the axis name 'between' is reserved",
        ),
    ],
)
def test_plain_data_that_is_no_structure_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        Structure.from_dict(
            {"signature": "i -> o", "cores": ["o i"], "sizes": {"i": 2, "o": 3}} | change
        )


@pytest.mark.parametrize("widths", [(64.0, 64), (64, True), ("64", 64)])
def test_a_width_is_an_integer_also_where_its_factors_are_known(widths):
    BTT().structure(64, 64)
    BTT().structure(64, 1)
    with pytest.raises(TypeError, match="must be an integer"):
        BTT().structure(*widths)


def test_a_layer_that_is_padded_much_warns_where_it_is_made():
    with pytest.warns(UserWarning, match="out_features=17 is padded to 32, by 88.2%") as caught:
        StructuredLinear(32, 17, LowRank(rank=2).structure(32, 32))
    with pytest.warns(UserWarning, match="in_features=5 is padded to 6, by 20.0%; 4 and 6 fit"):
        StructuredLinear(5, 16, BTT())
    assert caught[0].filename == __file__
    StructuredLinear(5, 16, BTT(), device="meta")  # `load` does so


def test_a_width_that_nobody_could_factor_is_refused_at_once():
    with pytest.raises(ValueError, match="in_features=1000000000000000000 must be at most"):
        Kronecker().structure(10**18, 4)


def test_a_layer_whose_structure_is_replaced_computes_with_the_new_one():
    layer, wanted = (StructuredLinear(20, 28, BTT(rank=2), bias=False) for _ in range(2))
    rank_one = StructuredLinear(20, 28, BTT(rank=1), bias=False)
    wide = StructuredLinear(32, 32, BTT(rank=1), bias=False)
    x = torch.randn(3, 20)
    for other in (rank_one, wide, wanted):
        layer.structure, layer.cores = other.structure, other.cores
        assert layer.padding == (
            other.structure.in_features - 20,
            other.structure.out_features - 28,
        )
        with torch.no_grad():
            assert_close(layer(x), x @ layer.to_dense().T, rtol=1e-4, atol=1e-5)


def test_a_padded_layer_derives_its_program_once_when_it_is_made(monkeypatch):
    layer, x = StructuredLinear(23, 29, BTT(rank=2)), torch.randn(3, 23)
    assert all(layer.padding)
    y = layer(x)
    monkeypatch.setattr(Program, "fit", None)  # nobody can call it
    for again in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert again.padding == layer.padding
        assert torch.equal(again(x), y)


@every_small_case
@pytest.mark.parametrize("options", [{}, {"weight_norm": True}], ids=["", "weight_norm"])
def test_a_batch_of_gradients_is_each_of_them(case, options):
    layer = layer_of(case, **options)
    x = tokens(3, layer.in_features).requires_grad_()
    y, leaves = layer(x), [x, *layer.parameters()]
    batch = tokens(4, *y.shape)
    found = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in batch]
    for n, value in enumerate(found):
        assert_close(value, torch.stack([gradients[n] for gradients in each]))


def test_a_low_rank_layer_trains_by_views_of_its_cores_without_copies_of_their_gradients():
    y = StructuredLinear(12, 8, LowRank(rank=2))(torch.randn(3, 12))
    nodes, names = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [each for each, _ in node.next_functions if each is not None]
    assert "SqueezeBackward1" in names  # SelectBackward0 fills a gradient with zeros first
    assert not any(name.startswith("Select") for name in names)


def test_a_matrix_whose_squares_overflow_is_projected():
    left = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = 1e160 * left @ left.T
    cores = project(weight, LowRank(rank=2))
    dense = cores[1][0] @ cores[0][0]
    assert_close(dense / 1e160, weight / 1e160)


def test_torch_fx_traces_a_layer_as_one_node_that_computes_the_same():
    model = nn.Sequential(nn.Linear(12, 16), StructuredLinear(16, 20, BTT()), nn.ReLU())
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == [
        "placeholder",
        *3 * ["call_module"],
        "output",
    ]
    x = torch.randn(2, 3, 12)
    assert torch.equal(traced(x), model(x))
    traced(x).sum().backward()
    assert all(core.grad is not None for core in traced.get_submodule("1").cores)
    with pytest.raises(TypeError, match=r"take nn\.Sequential\(layer\): torch\.fx traces a model"):
        torch.fx.symbolic_trace(model[1])


def double(module, args, y):
    return 2 * y


class Table(nn.Module):
    """Position MLPs of Swin V2 read a buffer, and its attention the weight itself; with a hook."""

    def __init__(self, kind):
        super().__init__()
        self.register_buffer("table", torch.randn(5, 16))
        self.mlp, self.qkv = kind(16, 16), kind(16, 16)
        self.mlp.register_forward_hook(double)

    def forward(self, x):
        y = F.linear(x.to(self.qkv.weight.dtype), self.qkv.weight, self.qkv.bias)
        return y + self.mlp(self.table) + self.mlp(input=x)


class Thrice(StructuredLinear):
    def forward(self, input):
        return 3 * super().forward(input)


@pytest.mark.parametrize("kind", [nn.Linear, StructuredLinear, Thrice])
def test_torch_fx_keeps_the_parameters_of_a_layer_that_sees_no_input_and_runs_its_hook_once(kind):
    model, x = Table(kind), torch.randn(5, 16)
    traced = torch.fx.symbolic_trace(model)
    for copied in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert torch.equal(copied(x), model(x))
        assert {*copied.state_dict()} == {*model.state_dict()}
    traced(x).sum().backward()
    assert all(value.grad is not None for value in model.parameters())


def test_an_input_may_be_given_by_the_name_that_nn_linear_gives_it():
    x = torch.randn(3, 16)
    for layer in (StructuredLinear(16, 12), quantize(StructuredLinear(16, 12))):
        assert torch.equal(layer(input=x), layer(x))


@every_small_case
def test_each_sequence_of_a_jagged_nested_tensor_is_multiplied_as_it_is_alone(case):
    layer = layer_of(case)
    each = [tokens(length, layer.in_features) for length in (3, 0, 5)]
    x = torch.nested.nested_tensor(each, layout=torch.jagged, requires_grad=True)
    y = layer(x)
    torch.autograd.backward(y.values().sum())
    (dx,) = torch.autograd.grad(layer(each[2].requires_grad_()).sum(), each[2])
    assert y.shape[:2] == x.shape[:2]  # the same lengths, so that y + x is known to fit
    for alone, one in zip(each, y.unbind(), strict=True):
        assert_close(one, layer(alone))
    assert_close(x.grad.unbind()[2], dx)
    assert_close(F.linear(x, layer.weight, layer.bias).values(), y.values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with pytest.raises(TypeError, match=r"layout=torch\.strided; take layout=torch\.jagged"):
        StructuredLinear(16, 12)(x)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "sparse_csc", "mkldnn"])
def test_the_weight_and_a_view_of_it_read_in_every_layout(layout):
    layer = StructuredLinear(16, 12)
    for read in (lambda weight: weight, lambda weight: weight[:8]):
        found = getattr(read(layer.weight), f"to_{layout}")().to_dense()
        assert_close(found, read(layer.to_dense()))
    assert_close(layer.weight.to_sparse_bsr((4, 4)).to_dense(), layer.to_dense())


def replace(layer):
    layer.weight = nn.Parameter(torch.zeros(12, 16))


def freeze(layer):
    layer.weight.requires_grad = False


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replace, "parameter 'weight'"),
        (freeze, "setting requires_grad"),
        (lambda layer: layer.weight.requires_grad_(False), "requires_grad_"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "parameter 'weight_orig'"),
    ],
)
def test_what_would_change_the_weight_is_told_to_change_the_cores(change, what):
    layer = StructuredLinear(16, 12)
    before = copy.deepcopy(layer.state_dict())
    text = f"^{what} would change the weight .*: write to, freeze or prune layer.cores"
    with pytest.raises(RuntimeError, match=text):
        change(layer)
    assert_close(layer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("read", [lambda weight: weight, lambda weight: weight.detach()])
def test_a_hook_on_the_weight_which_would_never_run_is_refused(read):
    layer = StructuredLinear(16, 12)
    with pytest.raises(RuntimeError, match="put a hook on each of the cores of StructuredLinear"):
        read(layer.weight).register_hook(lambda gradient: 2 * gradient)


def test_torch_jit_script_says_at_once_that_tracing_is_the_way():
    layer = StructuredLinear(16, 12)
    for model in (layer, nn.Sequential(nn.Linear(16, 16), layer)):
        with pytest.raises(RuntimeError, match=r"take StructuredLinear\(.*: use torch\.jit\.trace"):
            torch.jit.script(model)


@pytest.mark.parametrize(("tokens", "forms"), [(1, False), (63, False), (64, True), (200, True)])
def test_w_is_formed_from_as_many_tokens_on_as_the_larger_width(tokens, forms):
    layer = StructuredLinear(64, 48, TT(rank=14), bias=False)
    assert layer.structure.flops > 0.7 * 2 * 64 * 48
    x = torch.randn(tokens, 64)
    with FlopCounterMode(display=False) as once:
        layer.to_dense()
    with FlopCounterMode(display=False) as counted:
        layer(x)
    dense = once.get_total_flops() + 2 * 64 * 48 * tokens
    assert counted.get_total_flops() == (dense if forms else tokens * layer.structure.flops)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the check of the width
def test_torch_jit_traces_a_layer_for_any_number_of_tokens():
    layer = StructuredLinear(16, 20, BTT(rank=2), weight_norm=True)
    traced = torch.jit.trace(layer, torch.randn(3, 16))
    for x in (torch.randn(7, 16), torch.randn(1, 16)):
        assert_close(traced(x), layer(x))


@pytest.mark.slow
def test_a_compiled_layer_makes_one_choice_for_all_numbers_of_tokens():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    layer, counter = StructuredLinear(64, 48, TT(rank=14)), CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for number in (20, 63, 64, 200):  # not compiled, W is formed from 64 on
        x = torch.randn(number, 64)
        assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_a_layer_on_meta_that_was_loaded_by_assignment_keeps_what_it_got():
    with torch.device("meta"):
        layer = StructuredLinear(16, 16, BTT())
    layer.load_state_dict(StructuredLinear(16, 16, BTT()).state_dict(), assign=True)
    before = [core.detach().clone() for core in layer.cores]
    layer._is_hf_initialized = True  # as transformers sets it
    assert all(map(torch.equal, layer.cores, before))
    layer.register_parameter("extra", None)
