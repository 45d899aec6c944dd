"""`linear_cross_entropy` is F.cross_entropy of the layer's output, in value and gradients."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from structlin import BTT, Dense, LowRank, StructuredLinear, linear_cross_entropy, quantize
from structlin._model import loss as loss_module

WIDTH, CLASSES, SHAPE = 12, 40, (3, 7)
STRUCTURED = partial(StructuredLinear, WIDTH, CLASSES, dtype=torch.float64)


class Tied(nn.Module):
    """A head that multiplies by an embedding, and says no number of classes."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x):
        return 5 * torch.tanh(F.linear(x, self.embedding.weight) / 5)


def dense(hooked=False):
    layer = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
    if hooked:  # or torch's own function takes it
        layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


HEADS = {
    "dense": dense,
    "dense, hooked": partial(dense, hooked=True),
    "weight norm of torch": lambda: nn.utils.parametrizations.weight_norm(dense()),
    "weight norm of ours": partial(STRUCTURED, BTT(rank=2), weight_norm=True),
    "quantized": lambda: quantize(STRUCTURED(BTT(rank=1))),
    "head of two": lambda: nn.Sequential(nn.LayerNorm(WIDTH).double(), STRUCTURED()),
    "tied": lambda: Tied(nn.Embedding(CLASSES, WIDTH, dtype=torch.float64)),
    "BTT": STRUCTURED,
    "low-rank": partial(STRUCTURED, LowRank(rank=3)),
    "W formed": partial(STRUCTURED, Dense()),
}


def heads(*names):
    return pytest.mark.parametrize("kind", names or HEADS)


def draw(kind, shape=SHAPE, dtype=torch.float64):
    x = torch.randn(*shape, WIDTH, dtype=dtype, requires_grad=True)
    return HEADS[kind]().to(dtype), x, torch.randint(CLASSES, shape)


def plain(x, layer, target, **options):
    return F.cross_entropy(layer(x).flatten(0, -2), target.flatten(), **options)


def chunked(x, layer, target, chunk=5, **options):
    """The loss in chunks of so many tokens; None: as many as it takes by itself."""
    choose = loss_module._choose_sizes
    with pytest.MonkeyPatch.context() as patch:
        if chunk is not None:
            patch.setattr(loss_module, "_choose_sizes", lambda *of: (choose(*of)[0], chunk))
        return linear_cross_entropy(x, layer, target, **options)


def gradients(loss, x, layer, scale=3.0):
    leaves = [each for each in (x, *layer.parameters()) if each.requires_grad]
    return torch.autograd.grad(scale * loss, leaves)


def assert_same(x, layer, target, chunk=5, rtol=None, atol=None, **options):
    losses = chunked(x, layer, target, chunk, **options), plain(x, layer, target, **options)
    found = [[loss, *gradients(loss, x, layer)] for loss in losses]
    assert_close(*found, equal_nan=True, rtol=rtol, atol=atol)


# ---- the same as with all logits -----------------------------------------------------------------


@heads()
def test_loss_and_gradients_are_those_of_all_logits(kind):
    layer, x, target = draw(kind)
    assert_same(x, layer, target)
    assert_same(x, layer, target, chunk=None)
    loss = chunked(x, layer, target)
    assert_close(*(torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)))
    with torch.no_grad():
        found = chunked(x, layer, target, 4)
        assert_close(found, plain(x, layer, target))
    assert not found.requires_grad
    assert all(each.grad is None for each in (x, *layer.parameters()))


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.sampled_from(["dense", "BTT"]),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([-100, 0, 3]),
    st.randoms(use_true_random=False),
)
def test_every_option_in_chunks_of_every_size(tokens, chunk, kind, reduction, ignored, random):
    torch.manual_seed(random.randrange(2**32))
    layer, x, target = draw(kind, (tokens,))
    target[torch.rand(tokens) < 0.3] = ignored
    assert_same(x, layer, target, chunk, ignore_index=ignored, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@heads("dense", "BTT")
def test_no_label_and_one_token_are_as_in_torch(kind, reduction):
    layer, x, target = draw(kind)
    assert_same(x, layer, torch.full_like(target, -100), reduction=reduction)
    assert_same(x[:0], layer, target[:0], reduction=reduction)
    found = linear_cross_entropy(x[0, 0], layer, target[0, 0], reduction=reduction)
    assert_close(found, F.cross_entropy(layer(x[0, 0]), target[0, 0], reduction=reduction))


@heads("dense", "dense, hooked")
def test_huge_logits_and_classes_that_are_impossible_keep_their_digits(kind):
    layer, x, target = draw(kind, dtype=torch.float32)
    layer.weight.data *= 1e4
    layer.bias.data[7] = -math.inf
    assert_same(x, layer, target.where(target != 7, 0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@heads("dense", "BTT")
def test_half_precision_sums_in_float32(kind, dtype):
    wide, x, target = draw(kind, (600,), torch.float32)
    layer = copy.deepcopy(wide).to(dtype)
    target[:300] = 0  # gradients that add up
    loss, wanted = chunked(x.to(dtype), layer, target, 2), linear_cross_entropy(x, wide, target)
    assert loss.dtype == dtype
    assert_close(loss.float(), wanted, rtol=1e-2, atol=0)
    loss.backward()
    for each, exact in zip(layer.parameters(), gradients(wanted, x, wide, 1)[1:], strict=True):
        error = (each.grad.float() - exact).norm() / exact.norm()
        assert error < 2 * torch.finfo(dtype).eps  # a sum in `dtype` is 10 times as far off


def test_gradients_that_float16_has_no_number_for_after_division_are_kept():
    layer = nn.Linear(4, 2000, bias=False, dtype=torch.float16)
    x, target = torch.randn(2000, 4, dtype=torch.float16), torch.zeros(2000, dtype=torch.long)
    (2.0**16 * chunked(x, layer, target, 100).float()).backward()  # as GradScaler does
    assert (layer.weight.grad[1:] != 0).float().mean() > 0.9


@heads("dense", "BTT", "tied")
def test_under_autocast_it_is_what_cross_entropy_is_there(kind):
    layer, x, target = draw(kind, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = chunked(x, layer, target, 4), plain(x, layer, target)
    assert [loss.dtype for loss in losses] == 2 * [torch.float32]
    assert_close(*losses, rtol=1e-5, atol=0)  # of the same logits in bfloat16
    for ours, theirs in zip(*(gradients(loss, x, layer) for loss in losses), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


# ---- what trains, and when -----------------------------------------------------------------------


@heads("dense", "BTT", "weight norm of torch")
@pytest.mark.parametrize("frozen", ["head", "input", "bias", "both"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(kind, frozen):
    layer, x, target = draw(kind)
    layer.requires_grad_(frozen not in ("head", "both"))
    layer.bias.requires_grad_(frozen == "input")
    x.requires_grad_(frozen not in ("input", "both"))
    if frozen == "both":
        assert not linear_cross_entropy(x, layer, target).requires_grad
    else:
        assert_same(x, layer, target)


@heads("dense", "BTT", "weight norm of torch")
def test_hooks_of_parameters_run_once_and_see_the_whole_gradient(kind):
    layer, x, target = draw(kind)
    wanted = gradients(plain(x, layer, target), x, layer, scale=1)[1:]
    own, seen, after = list(map(id, layer.parameters())), {}, []
    for name, parameter in layer.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad))
        parameter.register_post_accumulate_grad_hook(after.append)
    chunked(x, layer, target, 4).backward()
    assert_close([grad for (grad,) in seen.values()], list(wanted))
    assert len(after) == len(wanted)
    assert list(map(id, layer.parameters())) == own


def test_a_head_of_tensors_that_are_no_leaves_and_of_an_embedding_has_their_gradients():
    layer, x, target = draw("BTT")
    leaves = {name: each.detach().requires_grad_() for name, each in layer.named_parameters()}
    found, table = [], nn.Embedding(CLASSES, WIDTH, dtype=torch.float64)
    for loss in (chunked, plain):
        model = nn.ModuleDict({"layer": layer})
        model.forward = partial(loss, layer=layer, target=target)
        held = {f"layer.{name}": each.sin() for name, each in leaves.items()}
        value = torch.func.functional_call(model, held, (x,))
        tied = torch.autograd.grad(loss(table(target), Tied(table), target), table.weight)
        found.append([*torch.autograd.grad(value, [x, *leaves.values()]), *tied])
    assert_close(*found)


@pytest.mark.parametrize("reentrant", [True, False])
@heads("dense", "BTT", "weight norm of torch")
def test_a_checkpoint_around_it_changes_nothing(kind, reentrant):
    layer, x, target = draw(kind)
    run = lambda x: chunked(x.tanh(), layer, target, 4)  # noqa: E731
    found = []
    for loss in (checkpoint(run, x, use_reentrant=reentrant), plain(x.tanh(), layer, target)):
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        loss.backward()
        found.append([leaf.grad for leaf in (x, *layer.parameters())])
    assert_close(*found)


def test_nothing_is_computed_twice():
    layer, x, target = draw("dense")
    layer, kept = nn.utils.parametrizations.spectral_norm(layer), []
    other = copy.deepcopy(layer)
    losses = chunked(x, layer, target, 2), plain(x, other, target)
    assert_close(gradients(losses[0], x, layer), gradients(losses[1], x, other))
    assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))
    layer = nn.Sequential(nn.Dropout(0.5), dense())
    layer[0].register_forward_hook(lambda module, args, output: kept.append(output != 0))
    (dx,) = torch.autograd.grad(chunked(x, layer, target, 7), x)
    assert ((dx.view(-1, WIDTH) != 0) == torch.cat(kept[-3:])).all()


@pytest.mark.parametrize(
    ("widths", "structure", "device", "wanted"),
    [
        ((16, 50257), LowRank(rank=2), "cpu", [64, 64, 64, 8]),  # 16 MiB of logits
        ((512, 16384), Dense(), "cpu", [512, 88]),  # as many logits as parameters
        ((16, 50257), LowRank(rank=2), "meta", [5312, 2880]),  # 1 GiB on any other device
    ],
)
def test_a_chunk_follows_from_the_sizes(widths, structure, device, wanted):
    layer, seen = StructuredLinear(*widths, structure, bias=False, device=device), []
    layer.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    x = torch.randn(sum(wanted), widths[0], device=device, requires_grad=device == "meta")
    target = torch.randint(widths[1], (sum(wanted),), device=device)
    loss = linear_cross_entropy(x, layer.requires_grad_(device == "meta"), target)
    assert (seen, loss.shape, loss.requires_grad) == (wanted, (), device == "meta")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, at every graph break
def test_a_compiled_model_stops_there_and_goes_on():
    layer, x, target = draw("low-rank", dtype=torch.float32)
    loss = lambda x: 2 * linear_cross_entropy(x.tanh(), layer, target)  # noqa: E731
    found = torch.compile(loss, backend="aot_eager")(x)
    assert_close(gradients(found, x, layer), gradients(loss(x), x, layer))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="linear_cross_entropy"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"label 40; .* 0 to 39", lambda x, y: {"target": y.fill_(40)}),
        ("label -1;", lambda x, y: {"target": y.fill_(-1)}),
        (r"shape \(2, 7\)", lambda x, y: {"target": y[:2]}),
        ("torch.int32", lambda x, y: {"target": y.int()}),
        ("input=a tensor of torch.int64", lambda x, y: {"input": x.long()}),
        ("reduction='none' is unknown", lambda x, y: {"reduction": "none"}),
        ("LSTM", lambda x, y: {"layer": nn.LSTM(WIDTH, 40, dtype=x.dtype)}),
    ],
)
def test_a_bad_argument_is_refused_by_name(message, change):
    layer, x, target = draw("BTT")
    arguments = {"input": x, "layer": layer, "target": target}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**arguments, **change(x, target)})


def test_gradients_that_would_be_lost_are_refused():
    layer, x, target = draw("BTT")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, layer, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda x: linear_cross_entropy(x, layer, target))(x)
    scale = torch.ones(CLASSES, dtype=torch.float64, requires_grad=True)
    layer.register_forward_hook(lambda module, args, output: output * scale)
    with pytest.raises(ValueError, match=r"shape \(40,\) .* not in layer.parameters"):
        linear_cross_entropy(x, layer, target)
    assert linear_cross_entropy(x.detach(), layer.requires_grad_(False), target) > 0
