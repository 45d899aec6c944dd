"""`linear_cross_entropy` is F.cross_entropy of the layer's output, in value and gradients, whatever
the layer, the chunk and the options; it keeps no logits; bad arguments are refused by name."""

import copy
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from structlin import (
    BTT,
    Dense,
    LowRank,
    Monarch,
    StructuredLinear,
    linear_cross_entropy,
    quantize,
)

WIDTH, CLASSES, SHAPE = 12, 40, (3, 7)


class Tied(nn.Module):
    """A head that multiplies by an embedding, and says no number of classes."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x):
        return 5 * torch.tanh(F.linear(x, self.embedding.weight) / 5)


def plain(x, layer, target, **options):
    return F.cross_entropy(layer(x).flatten(0, -2), target.flatten(), **options)


def make_layer(kind, dtype=torch.float64):
    options = {"dtype": dtype}
    structured = partial(StructuredLinear, WIDTH, CLASSES, **options)
    if kind == "dense":
        return nn.Linear(WIDTH, CLASSES, **options)
    if kind == "dense, hooked":
        layer = nn.Linear(WIDTH, CLASSES, bias=False, **options)
        layer.register_forward_hook(lambda module, args, output: 2 * output)
        return layer
    if kind == "weight norm of torch":
        layer = nn.Linear(WIDTH, CLASSES, **options)
        return nn.utils.parametrizations.weight_norm(layer)
    if kind == "weight norm of ours":
        return structured(BTT(rank=2), weight_norm=True)
    if kind == "quantized":
        return quantize(structured(BTT(rank=1)))
    if kind == "head of two":
        return nn.Sequential(nn.LayerNorm(WIDTH, **options), structured(Monarch(blocks=2)))
    if kind == "tied":
        return Tied(nn.Embedding(CLASSES, WIDTH, **options))
    families = {"BTT": BTT(rank=1), "low-rank": LowRank(rank=3), "W formed": Dense()}
    return structured(families[kind])


KINDS = [
    "dense",
    "dense, hooked",
    "weight norm of torch",
    "weight norm of ours",
    "quantized",
    "head of two",
    "tied",
    "BTT",
    "low-rank",
    "W formed",
]


def draw(shape=SHAPE, dtype=torch.float64, classes=CLASSES):
    x = torch.randn(*shape, WIDTH, dtype=dtype, requires_grad=True)
    return x, torch.randint(classes, shape)


def gradients(loss, x, layer, scale=3.0):
    leaves = [each for each in (x, *layer.parameters()) if each.requires_grad]
    return torch.autograd.grad(scale * loss, leaves)


def assert_same(x, layer, target, chunk=5, **options):
    losses = [
        linear_cross_entropy(x, layer, target, chunk=chunk, **options),
        plain(x, layer, target, **options),
    ]
    assert_close(*losses, equal_nan=True)
    ours, theirs = (gradients(loss, x, layer) for loss in losses)
    assert_close(ours, theirs, equal_nan=True)


# ---- the same as with all logits -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_all_logits(kind):
    layer, (x, target) = make_layer(kind), draw()
    assert_same(x, layer, target)
    assert_same(x, layer, target, chunk=None)
    with torch.no_grad():
        found = linear_cross_entropy(x, layer, target, chunk=4)
        assert_close(found, plain(x, layer, target))
    assert not found.requires_grad
    assert all(each.grad is None for each in (x, *layer.parameters()))


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.sampled_from(["dense", "BTT"]),
    st.booleans(),
    st.floats(0, 1),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([-100, 0, 3]),
    st.randoms(use_true_random=False),
)
def test_every_option_in_chunks_of_every_size(
    tokens, chunk, kind, weighted, smoothing, reduction, ignored, random
):
    torch.manual_seed(random.randrange(2**32))
    layer, (x, target) = make_layer(kind), draw((tokens,))
    target[torch.rand(tokens) < 0.3] = ignored
    options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
    options["weight"] = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
    assert_same(x, layer, target, chunk, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["dense", "BTT"])
def test_no_label_and_one_class_are_as_in_torch(kind, reduction):
    layer, (x, target) = make_layer(kind), draw()
    assert_same(x, layer, torch.full_like(target, -100), reduction=reduction)
    empty = torch.randn(0, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_same(empty, layer, target.new_zeros(0), reduction=reduction)
    one = nn.Linear(WIDTH, 1, dtype=torch.float64)
    assert_same(x, one, torch.zeros_like(target), reduction=reduction)
    token = torch.randn(WIDTH, dtype=torch.float64)
    found = linear_cross_entropy(token, layer, target[0, 0], reduction=reduction)
    assert_close(found, F.cross_entropy(layer(token), target[0, 0], reduction=reduction))


def test_huge_logits_and_classes_that_are_impossible_keep_their_digits():
    layer, (x, target) = nn.Linear(WIDTH, CLASSES), draw(dtype=torch.float32)
    layer.weight.data *= 1e4
    layer.bias.data[7] = -math.inf
    target[target == 7] = 0
    assert_same(x, layer, target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "BTT"])
def test_half_precision_sums_in_float32(kind, dtype):
    wide = make_layer(kind, torch.float32)
    layer, (x, target) = copy.deepcopy(wide).to(dtype), draw((600,), torch.float32)
    target[:300] = 0  # gradients that add up
    loss = linear_cross_entropy(x.to(dtype), layer, target, chunk=2)
    wanted = linear_cross_entropy(x, wide, target)
    assert loss.dtype == dtype
    assert_close(loss.float(), wanted, rtol=1e-2, atol=0)
    loss.backward()
    expected = gradients(wanted, x, wide, scale=1)
    unit = torch.finfo(dtype).eps
    for each, exact in zip(layer.parameters(), expected[1:], strict=True):
        error = (each.grad.float() - exact).norm() / exact.norm()
        assert error < 2 * unit, error  # a sum in `dtype` over 300 chunks is 10 times as far off


def test_gradients_that_float16_has_no_number_for_after_division_are_kept():
    layer = nn.Linear(4, 2000, bias=False, dtype=torch.float16)
    x = torch.randn(2000, 4, dtype=torch.float16)
    target = torch.zeros(2000, dtype=torch.long)
    loss = linear_cross_entropy(x, layer, target, chunk=100)
    (2.0**16 * loss.float()).backward()  # as GradScaler does
    assert (layer.weight.grad[1:] != 0).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["dense", "BTT", "tied"])
def test_under_autocast_it_is_what_cross_entropy_is_there(kind):
    layer, (x, target) = make_layer(kind, torch.float32), draw(dtype=torch.float32)
    options = {"label_smoothing": 0.2}
    with torch.autocast("cpu", torch.bfloat16):
        losses = [linear_cross_entropy(x, layer, target, chunk=4, **options)]
        losses += [plain(x, layer, target, **options)]
    assert [loss.dtype for loss in losses] == 2 * [torch.float32]
    assert_close(*losses, rtol=1e-5, atol=0)  # of the same logits in bfloat16
    for ours, theirs in zip(*(gradients(loss, x, layer) for loss in losses), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


# ---- what trains, and when -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "BTT", "weight norm of torch"])
@pytest.mark.parametrize("frozen", ["head", "input", "bias", "both"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(kind, frozen):
    layer, (x, target) = make_layer(kind), draw()
    layer.requires_grad_(frozen not in ("head", "both"))
    if frozen == "bias":
        layer.bias.requires_grad_(False)
    x.requires_grad_(frozen not in ("input", "both"))
    if frozen == "both":
        assert not linear_cross_entropy(x, layer, target).requires_grad
    else:
        assert_same(x, layer, target)


@pytest.mark.parametrize("kind", ["dense", "BTT"])
def test_gradients_add_up_over_batches_and_graphs_that_are_kept(kind):
    layer, theirs = make_layer(kind), make_layer(kind)
    theirs.load_state_dict(layer.state_dict())
    for _ in range(3):
        x, target = draw()
        (linear_cross_entropy(x, layer, target, chunk=5) / 3).backward()
        (plain(x, theirs, target) / 3).backward()
    assert_close([p.grad for p in layer.parameters()], [p.grad for p in theirs.parameters()])
    loss = linear_cross_entropy(x, layer, target)
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert_close(first, second)


def test_a_weight_that_is_also_an_embedding_gets_both_gradients():
    embedding = nn.Embedding(CLASSES, WIDTH, dtype=torch.float64)
    head = nn.Linear(WIDTH, CLASSES, bias=False)
    head.weight = embedding.weight
    ids, target = torch.randint(CLASSES, SHAPE), torch.randint(CLASSES, SHAPE)
    for layer in (head, Tied(embedding)):
        losses = [f(embedding(ids), layer, target) for f in (linear_cross_entropy, plain)]
        assert_close(*(torch.autograd.grad(loss, embedding.weight) for loss in losses))


@pytest.mark.parametrize("kind", ["dense", "BTT", "weight norm of torch"])
def test_hooks_of_parameters_run_once_and_see_the_whole_gradient(kind):
    layer, (x, target) = make_layer(kind), draw()
    wanted = gradients(plain(x, layer, target), x, layer, scale=1)[1:]
    seen, after = {}, []
    for name, parameter in layer.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad))
        parameter.register_post_accumulate_grad_hook(after.append)
    linear_cross_entropy(x, layer, target, chunk=4).backward()
    assert_close([grad for (grad,) in seen.values()], list(wanted))
    assert len(after) == len(wanted)


@pytest.mark.parametrize("hooked", [True, False])
def test_the_layer_has_its_own_parameters_all_the_while(hooked):
    layer, (x, target) = make_layer("head of two"), draw()
    own, seen = list(map(id, layer.parameters())), []
    if hooked:
        layer[1].cores[0].register_hook(lambda grad: None)
    layer[0].register_forward_hook(lambda *_: seen.append(list(map(id, layer.parameters()))))
    linear_cross_entropy(x, layer, target, chunk=7).backward()
    assert len(seen) >= 3
    assert all(each == own for each in seen)


def test_threads_that_share_a_head_have_the_gradients_of_one():
    layer, batches = make_layer("BTT"), [draw((96,)) for _ in range(8)]
    own = [id(parameter) for parameter in layer.parameters()]

    def run(batch):
        return gradients(linear_cross_entropy(batch[0], layer, batch[1], chunk=2), batch[0], layer)

    wanted = list(map(run, batches))
    with ThreadPoolExecutor(4) as pool:
        assert_close(list(pool.map(run, batches)), wanted)
    assert [id(parameter) for parameter in layer.parameters()] == own


def test_a_head_of_tensors_that_are_no_leaves_has_their_gradients():
    layer, (x, target) = make_layer("BTT"), draw()
    leaves = {name: each.detach().requires_grad_() for name, each in layer.named_parameters()}
    found = []
    for loss in (linear_cross_entropy, plain):
        model = nn.ModuleDict({"layer": layer})
        model.forward = partial(loss, layer=layer, target=target)
        held = {f"layer.{name}": each.sin() for name, each in leaves.items()}
        value = torch.func.functional_call(model, held, (x,))
        found.append(torch.autograd.grad(value, [x, *leaves.values()]))
    assert_close(*found)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["dense", "BTT", "weight norm of torch"])
def test_a_checkpoint_around_it_changes_nothing(kind, reentrant):
    layer, (x, target) = make_layer(kind), draw()
    body = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    run = lambda x: linear_cross_entropy(body(x).tanh(), layer, target, chunk=4)  # noqa: E731
    losses = [checkpoint(run, x, use_reentrant=reentrant), plain(body(x).tanh(), layer, target)]
    leaves = [x, *body.parameters(), *layer.parameters()]
    found = []
    for loss in losses:
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        found.append([leaf.grad for leaf in leaves])
    assert_close(*found)


def test_a_parametrisation_with_a_state_is_computed_once():
    layer, (x, target) = nn.Linear(WIDTH, CLASSES, dtype=torch.float64), draw()
    layer = nn.utils.parametrizations.spectral_norm(layer)
    other = copy.deepcopy(layer)
    losses = [linear_cross_entropy(x, layer, target, chunk=2), plain(x, other, target)]
    assert_close(*losses)
    assert_close(gradients(losses[0], x, layer), gradients(losses[1], x, other))
    assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))


def test_masks_of_dropout_in_the_layer_are_those_of_its_gradients():
    layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES, dtype=torch.float64))
    x, target = draw()
    kept = []
    layer[0].register_forward_hook(lambda module, args, output: kept.append(output != 0))
    found = linear_cross_entropy(x, layer, target, chunk=7)
    (dx,) = torch.autograd.grad(found, x)
    assert ((dx.view(-1, WIDTH) != 0) == torch.cat(kept[-3:])).all()


def test_an_adapter_learns_and_what_it_is_added_to_does_not():
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"head": nn.Linear(WIDTH, CLASSES, dtype=torch.float64)})
    config = peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    layer = peft.inject_adapter_in_model(config, model)["head"].double()
    x, target = draw()
    assert_same(x, layer, target)
    assert sum(parameter.requires_grad for parameter in layer.parameters()) == 2


def test_no_more_logits_exist_than_those_of_a_chunk():
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    self.numbers = max(self.numbers, each.numel())
            return result

    for kind in ("dense", "low-rank", "tied"):
        layer, (x, target) = make_layer(kind), draw((64,))
        with Largest() as most:
            linear_cross_entropy(x, layer, target, chunk=16).backward()
        assert most.numbers <= max(16 * CLASSES, 64 * WIDTH)


@pytest.mark.parametrize(
    ("widths", "structure", "wanted"),
    [
        ((16, 50257), LowRank(rank=2), [64, 64, 64, 8]),  # 16 MiB of logits
        ((512, 16384), Dense(), [512, 88]),  # as many logits as parameters
    ],
)
def test_a_chunk_follows_from_the_sizes(widths, structure, wanted):
    layer, tokens, seen = StructuredLinear(*widths, structure, bias=False), sum(wanted), []
    layer.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    x, target = torch.randn(tokens, widths[0]), torch.randint(widths[1], (tokens,))
    with torch.no_grad():
        linear_cross_entropy(x, layer, target)
    assert seen == wanted


def test_a_chunk_is_thousands_of_tokens_on_every_device_but_a_cpu():
    """1 GiB of logits, which do not exist here."""
    layer, seen = StructuredLinear(16, 50257, LowRank(rank=2), device="meta"), []
    layer.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    x, target = torch.empty(8192, 16, device="meta"), torch.empty(8192, device="meta").long()
    with torch.no_grad():
        linear_cross_entropy(x, layer, target)
    assert seen == [5312, 2880]


# ---- beside what else torch has ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, at every graph break
def test_a_compiled_model_stops_there_and_goes_on():
    torch._dynamo.reset()
    layer, (x, target) = make_layer("low-rank", torch.float32), draw(dtype=torch.float32)
    body = nn.Linear(WIDTH, WIDTH)

    def loss(x):
        return 2 * linear_cross_entropy(body(x).tanh(), layer, target, chunk=4)

    found = torch.compile(loss, backend="aot_eager")(x)
    assert_close(found, loss(x))
    assert_close(gradients(found, x, layer), gradients(loss(x), x, layer))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="leave fullgraph=True out"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(x)
    compiled = torch.compile(layer, backend="aot_eager")
    assert_same(x, compiled, target)


def test_shapes_on_meta():
    layer = StructuredLinear(64, 64, BTT(rank=1), device="meta")
    x = torch.empty(5, 64, device="meta", requires_grad=True)
    target = torch.empty(5, dtype=torch.long, device="meta")
    loss = linear_cross_entropy(x, layer, target, chunk=2)
    assert (loss.shape, loss.device.type) == ((), "meta")
    loss.backward()
    assert x.grad.shape == x.shape


def test_a_second_derivative_is_refused():
    layer, (x, target) = make_layer("BTT"), draw()
    loss = linear_cross_entropy(x, layer, target)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot run under torch\.func: take"):
        torch.func.grad(lambda x: linear_cross_entropy(x, layer, target))(x)


PROGRAM = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from structlin import BTT, StructuredLinear, linear_cross_entropy

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/init", rank=0, world_size=1)
torch.manual_seed(0)
x, target = torch.randn(20, 16), torch.randint(64, (20,))

class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), head

    def forward(self, x, target):
        return linear_cross_entropy(self.body(x).tanh(), self.head, target, chunk=6)

def make(kind):
    torch.manual_seed(1)
    head = nn.Linear(16, 64) if kind == "dense" else StructuredLinear(16, 64, BTT(rank=1))
    return Model(head)

for kind in ("dense", "btt"):
    model = make(kind)
    loss = F.cross_entropy(model.head(model.body(x).tanh()), target)
    loss.backward()
    wanted = [p.grad for p in model.parameters()]
    for wrap in (DistributedDataParallel, fully_shard):
        wrapped = wrap(make(kind))
        for _ in range(2):
            wrapped.zero_grad()
            found = wrapped(x, target)
            found.backward()
        grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in wrapped.parameters()]
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(grads, wanted)
        print(kind, wrap.__name__, "agrees")
by_itself = make("btt")
fully_shard(by_itself.head)
try:
    by_itself(x, target)
except ValueError as error:
    print("refused:", error)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_reach_ddp_and_fsdp_where_the_model_is_wrapped_as_a_whole(tmp_path):
    own = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    options = {"env": os.environ | own, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], **options)
    assert done.returncode == 0, done.stderr
    *agree, refused = done.stdout.splitlines()
    assert len(agree) == 4
    assert "is sharded (DTensor)" in refused


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, r"target\[1, 2\] = 40: .* 0 to 39", lambda x, y: {"target": put(y, 40)}),
        (ValueError, r"target\[1, 2\] = -1: ", lambda x, y: {"target": put(y, -1)}),
        (ValueError, r"shape \(2, 7\)", lambda x, y: {"target": y[:2]}),
        (ValueError, r"shape \(21,\)", lambda x, y: {"target": y.flatten()}),
        (TypeError, "torch.int32", lambda x, y: {"target": y.int()}),
        (TypeError, "class probabilities", lambda x, y: {"target": y.double()}),
        (TypeError, "int64; it must be floating", lambda x, y: {"input": x.long()}),
        (TypeError, "layer=Parameter", lambda x, y: {"layer": nn.Parameter(x)}),
        (TypeError, "weight=1", lambda x, y: {"weight": 1}),
        (ValueError, r"= \(40,\)", lambda x, y: {"weight": torch.ones(3)}),
        (ValueError, "gradient", lambda x, y: {"weight": torch.ones(40, requires_grad=True)}),
        (ValueError, "chunk=0", lambda x, y: {"chunk": 0}),
        (ValueError, "chunk=2.5", lambda x, y: {"chunk": 2.5}),
        (ValueError, "label_smoothing=nan", lambda x, y: {"label_smoothing": math.nan}),
        (ValueError, "label_smoothing=-1", lambda x, y: {"label_smoothing": -1}),
        (ValueError, "ignore_index=None", lambda x, y: {"ignore_index": None}),
        (ValueError, "reduction='none' has no", lambda x, y: {"reduction": "none"}),
        (ValueError, "reduction='avg' is unknown", lambda x, y: {"reduction": "avg"}),
        (ValueError, "LSTM", lambda x, y: {"layer": nn.LSTM(WIDTH, 40, dtype=x.dtype)}),
    ],
)
def test_a_bad_argument_is_refused_by_name(error, message, change):
    x, target = draw()
    arguments = {"input": x, "layer": make_layer("BTT"), "target": target}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**arguments, **change(x, target)})


def put(target, value):
    target[1, 2] = value
    return target


def test_a_gradient_that_would_be_lost_is_refused():
    layer, (x, target) = make_layer("BTT"), draw()
    scale = torch.ones(CLASSES, dtype=torch.float64, requires_grad=True)
    layer.register_forward_hook(lambda module, args, output: output * scale)
    with pytest.raises(ValueError, match=r"shape \(40,\) .* not in layer.parameters"):
        linear_cross_entropy(x, layer, target)
    assert linear_cross_entropy(x.detach(), layer.requires_grad_(False), target) > 0
