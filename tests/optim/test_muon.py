import copy

import pytest
import torch
from torch import nn
from torch.optim.adamw import adamw

from benchmarks.harness.timing import peak_bytes
from structlin import BTT, BlockDiagonal, LowRank, StructuredLinear, convert, dualize
from structlin._kernels import engine
from structlin.duality import dualize_small
from structlin.optim import Muon
from structlin.optim._polar import has_bfloat16_products
from tests.models import GPT, perplexed

MUONS = 5 * [(3.4445, -4.7750, 2.0315)]  # the schedule of torch.optim.Muon

needs_torchs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch 2.9 and later have a Muon"
)


def norms(update: torch.Tensor) -> torch.Tensor:
    """RMS->RMS operator norm of each `(fan_out, fan_in)` matrix."""
    m, n = update.shape[-2:]
    return (n / m) ** 0.5 * torch.linalg.matrix_norm(update, 2)


def moved(module: nn.Module, optimizer: Muon) -> dict[str, torch.Tensor]:
    """What one step with random gradients subtracts, by parameter name."""
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in module.named_parameters()}


@needs_torchs_muon
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_a_linear_layer_moves_as_with_torchs_muon_bit_for_bit(shape):
    model = nn.Linear(*shape, bias=False)
    twin = copy.deepcopy(model)
    ours = Muon(
        model,
        lr=0.02,
        weight_decay=0.1,
        method=MUONS,
        dtype=torch.bfloat16,
        adjust_lr_fn="original",
    )
    theirs = torch.optim.Muon(twin.parameters(), lr=0.02, weight_decay=0.1)
    for _ in range(5):
        model.weight.grad = torch.randn_like(model.weight) * 1e-3
        twin.weight.grad = model.weight.grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(model.weight, twin.weight)


def test_every_block_of_a_core_moves_by_its_share_of_the_layers_norm():
    layer = StructuredLinear(64, 128, BTT(rank=2))
    steps = moved(layer, Muon(layer, lr=0.1))
    for name in ("cores.0", "cores.1"):
        torch.testing.assert_close(norms(steps[name]), torch.full((8,), 0.05), rtol=2e-2, atol=0)


def test_the_first_step_is_the_dual_of_each_blocks_gradient():
    layer = StructuredLinear(64, 128, BTT(rank=2), bias=False)
    before = [core.detach().clone() for core in layer.cores]
    layer(torch.randn(40, 64)).square().sum().backward()
    gradients = [core.grad.clone() for core in layer.cores]
    Muon(layer, lr=0.1, method="svd").step()
    for core, old, gradient in zip(layer.cores, before, gradients, strict=True):
        m, n = core.shape[-2:]
        for block in range(len(core)):
            u, _, vh = torch.linalg.svd(gradient[block], full_matrices=False)
            torch.testing.assert_close(
                old[block] - core[block], 0.05 * (m / n) ** 0.5 * u @ vh, rtol=1e-3, atol=1e-6
            )


@pytest.mark.parametrize(
    ("module", "matrices"),
    [
        (nn.Linear(6, 10), lambda w: w[None]),
        (nn.Conv1d(4, 8, 3), lambda w: 3 * w.movedim(-1, 0)),
        (nn.Conv2d(4, 8, 3), lambda w: 9 * w.flatten(2).movedim(-1, 0)),
        (nn.Conv3d(4, 8, 2), lambda w: 8 * w.flatten(2).movedim(-1, 0)),
        (
            nn.Conv2d(8, 12, 3, groups=4),
            lambda w: 9 * torch.cat([g.flatten(2).movedim(-1, 0) for g in w.chunk(4)]),
        ),
        (nn.ConvTranspose2d(4, 8, 3), lambda w: 9 * w.flatten(2).permute(2, 1, 0)),
        (nn.MultiheadAttention(8, 2), lambda w: w.reshape(3, 8, 8)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_moves_by_lr_in_its_own_norm(module, matrices):
    steps = moved(module, Muon(module, lr=0.1))
    weight = steps.get("weight", steps.get("in_proj_weight"))
    found = norms(matrices(weight))
    torch.testing.assert_close(found, torch.full_like(found, 0.1), rtol=2e-2, atol=0)


@pytest.fixture
def bfloat16_cpu(monkeypatch):
    """A CPU that has products of bfloat16."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)


@pytest.mark.parametrize(
    ("machine", "instruction", "expected"),
    [
        ("x86_64", None, None),
        ("x86_64", "_is_avx512_bf16_supported", torch.bfloat16),
        ("x86_64", "_is_amx_tile_supported", torch.bfloat16),
        ("x86_64", "not asked for by an older torch", None),
        ("aarch64", "_is_avx512_bf16_supported", None),
        ("arm64", "_is_mkldnn_bf16_supported", torch.bfloat16),
    ],
)
def test_the_default_is_in_16_bits_where_the_cpu_has_their_products(
    machine, instruction, expected, monkeypatch
):
    monkeypatch.setattr("platform.machine", lambda: machine)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == instruction)
        if instruction and instruction.startswith("not asked"):
            monkeypatch.delattr(torch.cpu, name)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setattr(
        torch.ops.mkldnn,
        "_is_mkldnn_bf16_supported",
        lambda: instruction == "_is_mkldnn_bf16_supported",
    )
    dtypes = []

    def noted(x, **options):
        dtypes.extend([options["dtype"]] * (x.shape[-1] == 256))
        return dualize(x, **options)

    monkeypatch.setattr("structlin.optim._polar.dualize", noted)
    module = nn.Linear(256, 256, bias=False)
    for options in ({}, {"dtype": torch.float32}, {"dtype": torch.bfloat16}):
        moved(module, Muon(module, **options))
    assert dtypes == [expected, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_is_asked_for_its_capability(capability, fast, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert has_bfloat16_products(torch.device("cuda:0")) is fast
    assert has_bfloat16_products(torch.device("mps"))


@pytest.mark.usefixtures("bfloat16_cpu")
def test_the_default_is_in_16_bits_where_matrices_are_large_but_for_float64_and_the_engine():
    in_16_bits = None if engine.load() else torch.bfloat16  # below 2^14 numbers
    for rows, size, dtype, expected in (
        (300, 63, torch.float32, None),
        (80, 64, torch.float32, in_16_bits),
        (256, 64, torch.float32, torch.bfloat16),
        (256, 64, torch.float64, None),
    ):
        module = nn.Linear(size, rows, bias=False, dtype=dtype)
        gradient = torch.randn(rows, size, dtype=dtype)
        before, module.weight.grad = module.weight.detach().clone(), gradient
        Muon(module, lr=1.0, momentum=0.0).step()
        polar = dualize(gradient, method="fast", ns_steps=5, dtype=expected)
        step = (rows / size) ** 0.5 * polar
        torch.testing.assert_close(before - module.weight.detach(), step, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("stored", ["out by in", "in by out", "attention"])
def test_parts_of_a_fused_layer_move_as_layers_of_their_own(heads, stored):
    parts, (rows, columns) = 3 * heads, (24 // heads, 24)
    if stored == "attention":
        fused = nn.MultiheadAttention(24, 4, bias=False)
        weight = fused.in_proj_weight
    elif stored == "out by in":
        fused = nn.Linear(24, 72, bias=False)
        weight = fused.weight
    else:
        fused = pytest.importorskip("transformers.pytorch_utils").Conv1D(72, 24)
        weight = fused.weight
    model = nn.ModuleDict({"attn": fused})
    optimizer = Muon(model, lr=0.1, weight_decay=0.1, split={"attn": parts}, method="svd")

    def split(x):
        return (x.mT if stored == "in by out" else x).detach().clone().chunk(parts)

    layers = [nn.Linear(columns, rows, bias=False) for _ in range(parts)]
    for layer, part in zip(layers, split(weight), strict=True):
        layer.weight.data = part.clone()
    twins = [Muon(layer, lr=0.1, weight_decay=0.1, method="svd") for layer in layers]
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        for layer, part in zip(layers, split(weight.grad), strict=True):
            layer.weight.grad = part.clone()
        optimizer.step()
        for twin in twins:
            twin.step()
    for layer, part in zip(layers, split(weight), strict=True):
        torch.testing.assert_close(part, layer.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "matrices"),
    [
        (StructuredLinear(64, 128, BTT(rank=2), bias=False), lambda w: w),
        (nn.Linear(20, 30, bias=False), lambda w: w[None]),
        (nn.Conv1d(6, 8, 3, bias=False), lambda w: w.movedim(-1, 0)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_cap_shrinks_the_matrices_whose_norm_is_above_it_and_no_others(module, matrices, share):
    module = copy.deepcopy(module)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    cap = share * min(norms(matrices(p)).min().item() for p in before.values())
    moved(module, Muon(module, lr=1e-7, max_spectral_norm=cap))
    for name, p in module.named_parameters():
        old, new = matrices(before[name]), matrices(p.detach())
        sizes = norms(old)
        for block, after, size in zip(old, new, sizes, strict=True):
            ratio = (after.norm() / block.norm()).item()
            torch.testing.assert_close(after, ratio * block, rtol=1e-4, atol=1e-6)
            if size < 0.85 * cap:
                assert ratio == pytest.approx(1, abs=1e-5)
            elif size > cap:  # a bound of the norm, at most 12 % above it for 32 equal values
                assert 0.88 * cap < ratio * size < cap * (1 + 1e-5)


def test_a_cap_is_for_matrices_alone_and_must_be_positive():
    module = nn.Embedding(10, 16)
    before = module.weight.detach().clone()
    moved(module, Muon(module, lr=1e-7, max_spectral_norm=1e-3))
    torch.testing.assert_close(module.weight.detach(), before)
    for cap in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(
            ValueError, match=f"max_spectral_norm={cap} must be positive and finite"
        ):
            Muon(module, max_spectral_norm=cap)


def test_a_cap_of_sharded_parameters_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("structlin.optim._muon.is_sharded", lambda parameter: True)
    with pytest.raises(ValueError, match=r"max_spectral_norm=2\.0: weight is sharded"):
        Muon(nn.Linear(3, 2), max_spectral_norm=2.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"nothing": 3}, "split: 'nothing' matches no layer with a matrix"),
        ({"0": 5}, "split: '0' makes 24 features in 1 groups, which do not divide into 5 parts"),
        ({"0": 0}, r"split\['0'\]=0 must be at least 1"),
        ({"1": 3}, "split: '1' is a StructuredLinear, whose blocks"),
        ({"2": 2}, "split: '2' is a Conv1d, whose blocks"),
        ({"3": 4}, "split: '3' makes 24 features in 3 groups, which do not divide into 4 parts"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
    attention = nn.MultiheadAttention(8, 2)
    model = nn.Sequential(nn.Linear(8, 24), StructuredLinear(16, 16), nn.Conv1d(4, 4, 3), attention)
    with pytest.raises(ValueError, match=message):
        Muon(model, split=parts)


def test_conv1d_of_transformers_is_oriented_in_by_out():
    owner = pytest.importorskip("transformers.pytorch_utils")
    module = owner.Conv1D(24, 6)  # 6 -> 24, weight (6, 24)
    torch.testing.assert_close(
        norms(moved(module, Muon(module, lr=0.1))["weight"].mT),
        torch.tensor(0.1),
        rtol=2e-2,
        atol=0,
    )


def test_embeddings_move_by_lr_in_rms_and_only_where_they_have_a_gradient():
    module = nn.Embedding(10, 16)
    before = module.weight.detach().clone()
    module(torch.tensor([1, 4, 4])).pow(3).sum().backward()
    Muon(module, lr=0.1).step()
    rms = (module.weight.detach() - before).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.tensor([0, 0.1, 0, 0, 0.1, 0, 0, 0, 0, 0]))


def test_a_sparse_gradient_counts_as_the_dense_one():
    dense, sparse = nn.Embedding(10, 16), nn.Embedding(10, 16, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    for module in (dense, sparse):
        optimizer = Muon(module, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.tensor([1, 4, 4])).pow(3).sum().backward()
            optimizer.step()
    torch.testing.assert_close(dense.weight, sparse.weight)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_other_parameters_of_any_dtype_step_by_adamw(dtype):
    model = nn.ParameterDict({"phase": nn.Parameter(torch.ones(8, dtype=dtype))})
    twin = copy.deepcopy(model)
    optimizer = Muon(model, other_lr=0.01)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(3):
        model.phase.grad = torch.randn(8).to(dtype) + torch.ones(8).to(dtype)
        twin.phase.grad = model.phase.grad.clone()
        optimizer.step()
        reference.step()
    tolerance = 1e-5 if dtype in (torch.complex64, torch.float64) else 1e-2
    torch.testing.assert_close(model.phase, twin.phase, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("other", ["adamw", "sign"])
def test_everything_else_has_its_own_rule_and_rate(other, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    twin = copy.deepcopy(model)
    optimizer = Muon(model, lr=0.1, other=other, other_lr=0.01, weight_decay=0.5)
    vectors = [twin[0].bias, twin[1].weight, twin[1].bias]
    fused = []
    monkeypatch.setattr(
        "structlin.optim._muon.adamw",
        lambda *states, **options: fused.append(options["fused"]) or adamw(*states, **options),
    )
    reference = torch.optim.AdamW(
        vectors, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0, fused=True
    )
    for _ in range(3):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.ones_like(p) * torch.randn(())
            q.grad = p.grad.clone()
        before = model[1].bias.detach().clone()
        optimizer.step()
        reference.step()
        if other == "adamw":
            assert all(
                torch.equal(p, q)
                for p, q in zip([model[0].bias, *model[1].parameters()], vectors, strict=True)
            )
        else:
            torch.testing.assert_close((model[1].bias - before).abs(), torch.full((8,), 0.01))
    assert fused == [True] * 3 * (other == "adamw")


def test_what_no_weight_decay_names_does_not_decay():
    model = convert(GPT(depth=1), BTT(), include="ffn")
    model.no_weight_decay = lambda: {"wte.weight", "h.0.mlp.c_fc.weight", "lm_head.weight"}
    optimizer = Muon(model, lr=0.1, weight_decay=0.5, masses={"*": 1e-30})
    kinds = [(group["kind"], group["weight_decay"]) for group in optimizer.param_groups]
    assert kinds == [("matrix", 0.5), ("matrix", 0.0), ("embedding", 0.0), ("other", 0.0)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved(model, optimizer)
    for name, p in model.named_parameters():
        declared = name.startswith(("wte", "h.0.mlp.c_fc", "lm_head"))
        if p.ndim > 1 and not declared:
            torch.testing.assert_close(p.detach(), 0.95 * before[name])
        elif p.ndim > 1:
            torch.testing.assert_close(p.detach(), before[name])


def test_masses_set_the_steps_of_layers_and_of_cores():
    model = nn.Sequential(nn.Linear(16, 16), StructuredLinear(16, 16), StructuredLinear(16, 16))
    steps = moved(model, Muon(model, lr=0.1, masses={"0": 3.0, "2": (0.25, 0.75)}))
    expected = {
        "0.weight": 0.3,
        "1.cores.0": 0.05,
        "1.cores.1": 0.05,
        "2.cores.0": 0.025,
        "2.cores.1": 0.075,
    }
    for name, norm in expected.items():
        assert norms(steps[name]).max().item() == pytest.approx(norm, rel=2e-2)


def test_momentum_is_an_average_and_nesterov_looks_ahead():
    for nesterov in (True, False):
        model = nn.Linear(5, 5, bias=False)
        optimizer = Muon(model, lr=0.1, momentum=0.8, nesterov=nesterov, method="svd")
        average = torch.zeros(5, 5)
        for _ in range(3):
            before, gradient = model.weight.detach().clone(), torch.randn(5, 5)
            model.weight.grad = gradient.clone()
            optimizer.step()
            average = 0.8 * average + 0.2 * gradient
            expected = dualize(
                0.2 * gradient + 0.8 * average if nesterov else average, method="svd"
            )
            torch.testing.assert_close(
                (before - model.weight) / 0.1, expected, rtol=1e-3, atol=1e-5
            )
            assert torch.equal(model.weight.grad, gradient)  # never written to


def test_a_state_dict_of_another_model_names_what_differs():
    optimizer = Muon(convert(GPT(depth=1), BTT(), include="ffn"))
    with pytest.raises(
        ValueError, match=r"lacks \['h\.0\.mlp\.c_fc\.weight', .* has \['h\.0\.mlp\.c_fc\.cores\.0'"
    ):
        Muon(GPT(depth=1)).load_state_dict(optimizer.state_dict())


def test_groups_may_have_options_of_their_own():
    model = convert(GPT(depth=1), BTT(), include="ffn")
    head = list(model.lm_head.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in head)]
    optimizer = Muon(
        [{"params": rest, "lr": 0.05}, {"params": head, "lr": 0.01, "momentum": 0.5}], model=model
    )
    assert [(g["kind"], g["lr"], g["momentum"]) for g in optimizer.param_groups] == [
        ("matrix", 0.05, 0.95), ("embedding", 0.05, 0.95), ("other", 1e-3, 0.95),
        ("matrix", 0.01, 0.5),
    ]  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    perplexed(model, 1, optimizer)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.025, 0.025, 5e-4, 0.005]


def test_frozen_and_idle_parameters_stay():
    model = GPT(depth=1)
    model.h[0].mlp.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.h[0].named_parameters()}
    optimizer = Muon(model, weight_decay=0.1)
    model.lm_head(torch.randn(3, 64)).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.h[0].named_parameters())


@needs_torchs_muon
@pytest.mark.parametrize("shape", [(40, 16), (16, 40)])
def test_match_rms_adamw_makes_the_steps_of_torchs_muon(shape):
    model = nn.Linear(*shape, bias=False)
    twin = copy.deepcopy(model)
    ours = Muon(model, lr=0.02, method=MUONS, dtype=torch.bfloat16, adjust_lr_fn="match_rms_adamw")
    theirs = torch.optim.Muon(
        twin.parameters(), lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    model.weight.grad = torch.randn_like(model.weight)
    twin.weight.grad = model.weight.grad.clone()
    ours.step()
    theirs.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-7)


@pytest.fixture
def stacks(monkeypatch):
    """The shapes of the stacks that are dualized from now on, none of them by the engine."""
    monkeypatch.setattr("structlin.optim._muon.is_small_for", lambda *_: False)
    shapes = []

    def counted(x, **options):
        shapes.append(tuple(x.shape))
        return dualize(x, **options)

    monkeypatch.setattr("structlin.optim._polar.dualize", counted)
    return shapes


def test_equal_shapes_of_all_layers_are_dualized_together(stacks):
    model = convert(GPT(depth=12), BTT())
    moved(model, Muon(model))
    blocks = sum(
        len(core)
        for layer in model.modules()
        if isinstance(layer, StructuredLinear)
        for core in layer.cores
    )
    assert sum(count for count, *_ in stacks) == blocks + 1  # and the head
    assert len(stacks) <= 6


@pytest.mark.usefixtures("bfloat16_cpu")
def test_small_matrices_of_all_shapes_are_dualized_in_one_call_of_the_engine(monkeypatch):
    if not engine.load():
        pytest.skip("there is no engine here")
    calls, large = [], []

    def counted(stacks, **options):
        calls.append(sorted(tuple(stack.shape) for stack in stacks))
        return dualize_small(stacks, **options)

    def one(x, **options):
        large.append((tuple(x.shape), options["dtype"]))
        return dualize(x, **options)

    monkeypatch.setattr("structlin.optim._polar.dualize_small", counted)
    monkeypatch.setattr("structlin.optim._polar.dualize", one)
    layer = StructuredLinear(36, 16, BTT())
    model = nn.Sequential(layer, nn.Linear(12, 8), nn.Linear(128, 128))
    moved(model, Muon(model))
    assert calls == [sorted([*(tuple(core.shape) for core in layer.cores), (1, 8, 12)])]
    assert large == [((1, 128, 128), torch.bfloat16)]
    for options in ({"method": "svd"}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}):
        moved(model, Muon(model, **options))
    assert len(calls) == 1


def test_the_engine_makes_the_steps_of_the_loop(monkeypatch):
    model = convert(GPT(depth=2), BTT())
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    steps = moved(model, Muon(model, lr=0.1))
    torch.manual_seed(1)
    monkeypatch.setattr("structlin._kernels.polar.available", lambda x: False)
    for name, step in moved(twin, Muon(twin, lr=0.1)).items():
        torch.testing.assert_close(steps[name], step, rtol=1e-4, atol=1e-6, msg=name)


def test_processes_divide_small_matrices_too(monkeypatch):
    divided = []

    def divide(stacks, polar, group):
        divided.extend(tuple(stack.shape) for stack in stacks)
        return [polar(stack) for stack in stacks]

    monkeypatch.setattr("structlin.optim._muon.divide_stacks", divide)
    model = nn.Linear(12, 8, bias=False)
    optimizer = Muon(model, nonfinite="ignore")
    optimizer.process_group = "all"
    moved(model, optimizer)
    assert divided == [(1, 8, 12)]


def test_shapes_that_differ_in_blocks_are_dualized_together(stacks):
    layers = (BlockDiagonal(blocks=2), 12, 8), (BlockDiagonal(blocks=3), 18, 12)
    model = nn.ModuleList(
        StructuredLinear(in_features, out_features, family, bias=False)
        for family, in_features, out_features in layers
    )
    moved(model, Muon(model))
    assert stacks == [(5, 4, 6)]  # 2 blocks of (4, 6) and 3 of them


def test_large_matrices_on_a_cpu_are_not_copied_into_stacks(stacks, monkeypatch):
    monkeypatch.setattr("structlin.optim._muon.LARGEST_ON_CPU", 2 * 4 * 6)
    small = nn.ModuleList(nn.Linear(6, 4, bias=False) for _ in range(3))
    model = nn.Sequential(*small, *(nn.Linear(12, 8, bias=False) for _ in range(2)))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    Muon(model).step()
    one_by_one = [(2, 4, 6), (1, 4, 6), (1, 8, 12), (1, 8, 12)]
    assert stacks == one_by_one
    monkeypatch.setattr("structlin.duality.has_matrix_unit", lambda: True)
    for method, expected in (("fast", [(3, 4, 6), (2, 8, 12)]), (MUONS, one_by_one)):
        optimizer = Muon(model, method=method, dtype=torch.bfloat16)
        stacks.clear()
        optimizer.step()
        assert stacks == expected


def test_a_closure_gives_the_loss():
    model = nn.Linear(3, 1)
    optimizer = Muon(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure) >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "lr=-1 must be finite and not negative"),
        ({"lr": float("inf")}, "lr=inf must be finite and not negative"),
        ({"lr": torch.tensor(float("nan"))}, r"lr=tensor\(nan\)"),
        ({"lr": torch.ones(2)}, r"lr=tensor\(\[1\., 1\.\]\): a Tensor lr must be 1-element"),
        ({"momentum": 1.0}, r"momentum=1\.0"),
        ({"eps": -1}, "eps=-1"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"method": "svd", "ns_steps": 3}, "method='svd' takes none"),
        ({"method": dualize, "ns_steps": 3}, "ns_steps=3: a function as method takes none"),
        ({"method": [(1, 2)]}, r"method=\[\(1, 2\)\] is no schedule"),
        ({"method": "muon"}, "method='muon' is unknown"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"betas": (0.9, 0.95, 0.99)}, r"betas=\(0\.9, 0\.95, 0\.99\) must be 2 numbers"),
        ({"adjust_lr_fn": "mup"}, "adjust_lr_fn='mup' is unknown"),
        ({"other": "lion"}, "other='lion' is unknown"),
        ({"nonfinite": "warn"}, "nonfinite='warn'"),
        ({"masses": {"0": 0}}, "masses: '0' has 0"),
        ({"masses": {"0": float("inf")}}, r"masses\['0'\]=inf must be finite"),
        ({"masses": {"0": (1, 2)}}, "masses: '0' is no structured layer"),
        ({"masses": {"7": 1}}, "masses: '7' matches no layer; the model has.* '0'"),
        ({"split": {"7": 2}}, "split: '7' matches no layer .*; the model has.* '0'"),
        ({"nesterov": "no"}, "nesterov='no' is a text"),
        ({"capturable": "no", "nonfinite": "ignore"}, "capturable='no' is a text"),
        ({"capturable": True}, "capturable=True: nonfinite='raise' waits for the device"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: Muon(m.parameters()), "model=None"),
        (
            lambda m: Muon([nn.Parameter(torch.ones(3, 3))], model=m),
            r"of shape \(3, 3\) belongs to no module",
        ),
        (
            lambda m: Muon([{"params": m.parameters()}, {"params": [m.weight]}], model=m),
            "more than one parameter group",
        ),
        (lambda m: Muon(copy.deepcopy(m).to("meta")), "weight is on meta"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": 3}, "split=3 must be a mapping"),
        ({"masses": 2.0}, "masses=2.0 must be a mapping"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' must be a torch.dtype"),
        ({"process_group": "x"}, "process_group='x' must be a ProcessGroup"),
        ({"max_spectral_norm": "2"}, "max_spectral_norm='2' is text.*must be a number"),
        ({"lr": "0.1"}, "lr='0.1' is text.*must be a number"),
        ({"momentum": None}, "momentum=None must be a number"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(options, message):
    with pytest.raises(TypeError, match=message):
        Muon(nn.Linear(4, 4), **options)


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (
            lambda matrix: matrix.mT,
            ValueError,
            r"matrices \(1, 4, 3\) returned \(1, 3, 4\); it must",
        ),
        (lambda matrix: matrix[0], ValueError, r"matrices \(1, 4, 3\) returned \(4, 3\)"),
        (lambda matrix: None, ValueError, "returned NoneType"),
        (
            lambda matrix: matrix / 0,
            FloatingPointError,
            "nothing was changed.*of zeros it must be zero",
        ),
    ],
)
def test_what_a_function_as_method_returns_is_checked_before_its_matrix_moves(
    method, error, message
):
    layer = nn.Linear(3, 4, bias=False)
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 3)).sum().backward()
    with pytest.raises(error, match=f"method=<function.*{message}"):
        Muon(layer, method=method, weight_decay=0.1).step()
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("other", ["adamw", "sign"])
def test_a_polar_factor_with_an_impossible_norm_is_an_error_before_anything_has_moved(other):
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 4))
    optimizer = Muon(model, method=[(5.0, 0.0, 0.0)], weight_decay=0.1, other=other)
    model(torch.randn(8, 64)).square().sum().backward()
    parts = optimizer._divide(optimizer.param_groups[0], [m.weight for m in model])
    assert [[p is model[1].weight for p in part] for part in parts] == [[False], [True]]
    before = copy.deepcopy(model.state_dict())
    message = r"factor of 1\.weight has norm 5 by method=\[\(5.*none has more than 3; nothing"
    with pytest.raises(FloatingPointError, match=message):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for values in optimizer.state_dict()["state"].values():
        assert all(not value.any() for value in values.values())
    optimizer = Muon(model, method=[(5.0, 0.0, 0.0)], nonfinite="ignore")
    optimizer.step()  # nobody waits for the device to ask


def test_the_compiled_step_is_one_graph_and_makes_the_same_steps_at_every_rate():
    model = convert(GPT(depth=1), BTT(), include="ffn")
    twin = copy.deepcopy(model)
    rate = torch.tensor(0.02)
    optimizer = Muon(model, lr=rate, nonfinite="ignore", weight_decay=0.1)
    eager = Muon(twin, lr=0.02, weight_decay=0.1)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    step = torch.compile(optimizer.step, fullgraph=True, backend=backend)
    for n in range(6):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad = torch.randn_like(p)
        step()
        eager.step()
        rate.fill_(0.02 / (n + 2))
        for group in eager.param_groups:
            group["lr"] = 0.02 / (n + 2) if group["kind"] != "other" else group["lr"]
        if n == 2:
            compiled = len(graphs)  # the first steps make the state
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
    assert len(graphs) == compiled <= 2


def test_a_rate_that_is_a_tensor_gives_the_same_steps():
    model = convert(GPT(depth=1), BTT(), include="ffn").double()
    twin = copy.deepcopy(model)
    ours = [
        Muon(model, lr=torch.tensor(0.02), other_lr=torch.tensor(1e-3), weight_decay=0.1),
        Muon(twin, lr=0.02, weight_decay=0.1),
    ]
    assert perplexed(model, 5, ours[0]) == pytest.approx(perplexed(twin, 5, ours[1]), rel=1e-5)


def test_capturable_keeps_every_number_on_the_device():
    assert Muon(nn.Linear(3, 3), capturable=True, nonfinite="ignore").param_groups[0]["capturable"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_of_the_step_makes_the_same_steps():
    model = convert(GPT(depth=1), BTT(), include="ffn").cuda()
    twin = copy.deepcopy(model)
    optimizer = Muon(
        model, lr=torch.tensor(0.02, device="cuda"), capturable=True, nonfinite="ignore"
    )
    eager = Muon(twin, lr=0.02)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        optimizer.step()  # makes the state
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        eager.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_hooks_run_around_the_step():
    model, seen = nn.Linear(3, 3), []
    optimizer = Muon(model)
    optimizer.register_step_pre_hook(
        lambda opt, args, kwargs: seen.append(("pre", model.weight.detach().clone()))
    )
    optimizer.register_step_post_hook(
        lambda opt, args, kwargs: seen.append(("post", model.weight.detach().clone()))
    )
    moved(model, optimizer)
    assert [name for name, _ in seen] == ["pre", "post"]
    assert not torch.equal(seen[0][1], seen[1][1])


def test_a_layer_added_later_trains_too():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = Muon(model, lr=0.1)
    model.append(StructuredLinear(4, 4))
    optimizer.add_param_group({"params": model[1], "lr": 0.2})
    steps = moved(model, optimizer)
    assert norms(steps["0.weight"]).item() == pytest.approx(0.1, rel=2e-2)
    assert norms(steps["1.cores.0"]).max().item() == pytest.approx(0.1, rel=2e-2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": list(model[1].parameters())})


def test_adding_the_new_cores_after_convert_does_not_hide_that_the_old_weights_are_gone():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = Muon(model)
    convert(model, LowRank(rank=1))
    optimizer.add_param_group({"params": list(model[0].cores)})
    with pytest.raises(RuntimeError, match=r"0\.weight no longer belong to the model"):
        optimizer.step()


def test_named_parameters_are_taken_as_torch_takes_them():
    model = nn.Linear(4, 4)
    assert [g["param_names"] for g in Muon(model.named_parameters(), model=model).param_groups] == [
        ["weight"],
        ["bias"],
    ]
    with pytest.raises(TypeError, match="params is a set"):
        Muon([{"params": set(model.parameters())}], model=model)
    with pytest.raises(TypeError, match="params must be parameters"):
        Muon(["weight"], model=model)


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_a_wrapped_model_resumes_from_the_state_of_the_plain_one(wrap):
    model = convert(GPT(depth=1), BTT(), include="ffn")
    optimizer = Muon(model, masses={"lm_head": 2.0})
    perplexed(model, 2, optimizer)
    wrapped = Muon(wrap(model), masses={"lm_head": 2.0})
    wrapped.load_state_dict(optimizer.state_dict())
    assert [g["param_names"] for g in wrapped.param_groups] == [
        g["param_names"] for g in optimizer.param_groups
    ]
    ordinary = nn.ModuleDict({"module": nn.Linear(3, 3)})
    assert Muon(ordinary).param_groups[0]["param_names"] == ["module.weight"]


def test_bfloat16_parameters_train_and_keep_their_dtype():
    model = convert(GPT(depth=1), BTT(), include="ffn").bfloat16()
    optimizer = Muon(model, lr=0.05)
    losses = perplexed(model, 12, optimizer)
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {
        value.dtype
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    } == {torch.bfloat16}


def test_empty_parameters_are_left_in_peace():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Embedding(0, 4)])
    with pytest.warns(UserWarning, match="zero-element"):
        model.append(nn.Linear(0, 4))
    assert moved(model, Muon(model))["0.weight"].abs().sum() > 0


def test_large_finite_gradients_are_no_reason_to_stop():
    model = nn.Linear(8, 8)
    optimizer = Muon(model, lr=0.1)
    model.weight.grad = torch.full((8, 8), 1e30)  # whose norm overflows
    before = model.weight.detach().clone()
    optimizer.step()
    assert norms(before - model.weight.detach()).item() == pytest.approx(0.1, rel=2e-2)


def test_a_state_dict_of_the_same_model_at_another_width_names_the_parameter():
    optimizer = Muon(GPT(width=32, depth=1))
    perplexed(optimizer.model, 1, optimizer)
    with pytest.raises(
        ValueError, match=r"h\.0\.attn\.c_attn\.weight is \(192, 64\) here and \(96, 32\) there"
    ):
        Muon(GPT(width=64, depth=1)).load_state_dict(optimizer.state_dict())


def test_a_model_that_was_moved_away_from_its_state_is_named_before_anything_changes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = Muon(model)
    moved(model, optimizer)
    before = model[0].weight.detach().clone()
    state = optimizer.state[model[1].weight]
    # the second device of a machine without one
    state["momentum_buffer"] = state["momentum_buffer"].to("meta")
    with pytest.raises(RuntimeError, match=r"1\.weight is on cpu and its state on meta"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_projection_of_multihead_attention_with_other_keys_is_a_matrix():
    module = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
    steps = moved(module, Muon(module, lr=0.1))
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        assert norms(steps[name]).item() == pytest.approx(0.1, rel=2e-2)


@pytest.mark.parametrize("structure", [None, BTT(rank=1)], ids=["dense", "BTT"])
def test_a_step_needs_little_memory_beside_the_parameters(structure):
    layers = [nn.Linear(512, 512, bias=False) for _ in range(10 if structure is None else 40)]
    model = nn.Sequential(*layers)
    model = model if structure is None else convert(model, structure)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = Muon(model)
    optimizer.step()  # makes the state
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert peak_bytes(optimizer.step, "cpu") <= 1.5 * parameters
