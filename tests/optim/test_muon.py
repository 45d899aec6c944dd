import copy

import pytest
import torch
from torch import nn

from benchmarks.harness.timing import peak_bytes
from structlin import (
    BTT,
    BlockDiagonal,
    LowRank,
    StructuredLinear,
    convert,
    param_groups,
    polar_factor,
)
from structlin.duality import Polar, choose_polar
from structlin.optim import Muon
from tests.models import GPT, perplexed

MUONS = 5 * [(3.4445, -4.7750, 2.0315)]  # the schedule of torch.optim.Muon


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


# ---- the steps -----------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and later have a Muon")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_a_linear_layer_moves_as_with_torchs_muon_bit_for_bit(shape, adjust):
    model = nn.Linear(*shape, bias=False)
    twin = copy.deepcopy(model)
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": adjust}
    ours = Muon(model, method=MUONS, dtype=torch.bfloat16, **options)
    theirs = torch.optim.Muon(twin.parameters(), **options)
    for _ in range(5):
        model.weight.grad = torch.randn_like(model.weight) * 1e-3
        twin.weight.grad = model.weight.grad.clone()
        ours.step()
        theirs.step()
        if adjust == "original":
            assert torch.equal(model.weight, twin.weight)
        torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("module", "matrices"),
    [
        (nn.Linear(6, 10), lambda w: w[None]),
        (nn.Conv1d(4, 8, 3), lambda w: 3 * w.movedim(-1, 0)),
        (nn.Conv2d(4, 8, 3), lambda w: 9 * w.flatten(2).movedim(-1, 0)),
        (
            nn.Conv2d(8, 12, 3, groups=4),
            lambda w: 9 * torch.cat([g.flatten(2).movedim(-1, 0) for g in w.chunk(4)]),
        ),
        (nn.ConvTranspose2d(4, 8, 3), lambda w: 9 * w.flatten(2).permute(2, 1, 0)),
        (nn.MultiheadAttention(8, 2), lambda w: w.reshape(3, 8, 8)),
        (nn.MultiheadAttention(8, 2, kdim=4, vdim=6), lambda w: w[None]),
        (StructuredLinear(64, 128, BTT(rank=2)), lambda w: 2 * w),  # two cores share the norm
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_moves_by_lr_in_its_own_norm(module, matrices):
    steps = moved(module, Muon(module, lr=0.1))
    names = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    found = [
        norms(matrices(step)) for name, step in steps.items() if name in names or "core" in name
    ]
    assert found
    for each in found:
        torch.testing.assert_close(each, torch.full_like(each, 0.1), rtol=2e-2, atol=0)


def test_the_momentum_is_nesterovs_and_the_step_the_dual_of_each_block():
    layer = StructuredLinear(64, 128, BTT(rank=2), bias=False)
    optimizer = Muon(layer, lr=0.1, momentum=0.8, method="svd")
    averages = [torch.zeros_like(core) for core in layer.cores]
    for _ in range(3):
        before = [core.detach().clone() for core in layer.cores]
        gradients = [torch.randn_like(core) for core in layer.cores]
        for core, gradient in zip(layer.cores, gradients, strict=True):
            core.grad = gradient.clone()
        optimizer.step()
        for core, old, average, gradient in zip(
            layer.cores, before, averages, gradients, strict=True
        ):
            average.lerp_(gradient, 0.2)
            u, _, vh = torch.linalg.svd(0.2 * gradient + 0.8 * average, full_matrices=False)
            m, n = core.shape[-2:]
            expected = 0.05 * (m / n) ** 0.5 * u @ vh
            torch.testing.assert_close(old - core.detach(), expected, rtol=1e-3, atol=1e-5)
            assert torch.equal(core.grad, gradient)  # never written to


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_move_by_lr_in_rms_and_only_where_they_have_a_gradient(sparse):
    module = nn.Embedding(10, 16, sparse=sparse)
    before = module.weight.detach().clone()
    module(torch.tensor([1, 4, 4])).pow(3).sum().backward()
    Muon(module, lr=0.1, matrices="all").step()
    rms = (module.weight.detach() - before).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.tensor([0, 0.1, 0, 0, 0.1, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("base", [None, {128: 64}])
def test_embeddings_heads_and_vectors_step_as_adamw_at_the_rates_of_param_groups(base):
    model = convert(GPT(width=128, depth=1), BTT(), include="ffn", weight_norm=True)
    twin = copy.deepcopy(model)
    options = {"base": base, "masses": {"lm_head": 4.0, "*wte": 0.5}, "weight_decay": 0.1}
    adamw = torch.optim.AdamW(
        param_groups(twin, 0.01, weight_decay_scaling="constant", eps=1e-8, **options),
        betas=(0.9, 0.95),
        fused=True,
    )
    optimizer = Muon(model, other_lr=0.01, **options)
    hidden = {n for g in optimizer.param_groups if g["kind"] == "matrix" for n in g["param_names"]}
    assert {n for n, p in model.named_parameters() if n.startswith("h.") and p.ndim > 1} == hidden
    ids = torch.arange(6)[None]
    for _ in range(3):
        for each, steps in ((model, optimizer), (twin, adamw)):
            steps.zero_grad()
            each(ids).square().mean().backward()
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            own.grad.copy_(other.grad)
        optimizer.step()
        adamw.step()
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other) == (name not in hidden), name


def test_large_finite_gradients_are_no_reason_to_stop():
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((8, 8), 1e30)  # whose norm overflows
    Muon(model, lr=0.1).step()
    assert norms(before - model.weight.detach()).item() == pytest.approx(0.1, rel=2e-2)


def test_what_no_weight_decay_names_does_not_decay():
    model = convert(GPT(depth=1), BTT(), include="ffn")
    model.no_weight_decay = lambda: {"wte.weight", "h.0.mlp.c_fc.weight", "lm_head.weight"}
    optimizer = Muon(model, lr=0.1, weight_decay=0.5, masses={"*": 1e-30}, matrices="all")
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


def test_groups_may_have_options_of_their_own():
    model = convert(GPT(depth=1), BTT(), include="ffn")
    head = list(model.lm_head.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in head)]
    optimizer = Muon(
        [{"params": rest, "lr": 0.05}, {"params": head, "lr": 0.01, "momentum": 0.5}],
        model=model,
        matrices="all",
    )
    found = [(g["kind"], g["lr"], g["lr_mult"], g["momentum"]) for g in optimizer.param_groups]
    assert found == [
        ("matrix", 0.05, 1, 0.95),
        ("embedding", 0.05, 1, 0.95),
        ("other", 0.05, 1e-3 / 0.05, 0.95),
        ("matrix", 0.01, 1, 0.5),
    ]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    perplexed(model, 1, optimizer)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.025, 0.025, 0.025, 0.005]
    named = Muon(model.lm_head.named_parameters(), model=model)
    assert [group["param_names"] for group in named.param_groups] == [["lm_head.weight"]]


def test_frozen_and_idle_parameters_stay():
    model = GPT(depth=1)
    model.h[0].mlp.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.h[0].named_parameters()}
    optimizer = Muon(model, weight_decay=0.1)
    model.lm_head(torch.randn(3, 64)).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.h[0].named_parameters())


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
            group["lr"] = 0.02 / (n + 2)
        if n == 2:
            compiled = len(graphs)  # the first steps make the state
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
    assert len(graphs) == compiled <= 2


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


def test_empty_parameters_are_left_in_peace():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Embedding(0, 4)])
    with pytest.warns(UserWarning, match="zero-element"):
        model.append(nn.Linear(0, 4))
    assert moved(model, Muon(model))["0.weight"].abs().sum() > 0


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


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_everything_else_steps_by_adamw_at_a_rate_of_its_own_without_decay(dtype):
    model = nn.Module()
    model.linear, model.norm = nn.Linear(8, 8), nn.LayerNorm(8)
    model.phase = nn.Parameter(torch.ones(8, dtype=dtype))
    twin = copy.deepcopy(model)
    optimizer = Muon(model, lr=0.1, other_lr=0.01, weight_decay=0.5)
    vectors = [twin.linear.bias, *twin.norm.parameters(), twin.phase]
    reference = torch.optim.AdamW(vectors, lr=0.01, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(3):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = (torch.randn(p.shape) + 1).to(p.dtype)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if p is not model.linear.weight:
            tolerance = 1e-2 if p.dtype.itemsize == 2 else 1e-5
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


# ---- how polar factors are found -----------------------------------------------------------------


@pytest.fixture
def stacks(monkeypatch):
    """The shapes of the stacks that are dualized from now on, and by what."""
    found, call = [], Polar.__call__

    def counted(self, x):
        found.append((tuple(x.shape), self.dtype))
        return call(self, x)

    monkeypatch.setattr(Polar, "__call__", counted)
    return found


def test_equal_shapes_of_all_layers_are_dualized_together(stacks):
    layers = (BlockDiagonal(blocks=2), 12, 8), (BlockDiagonal(blocks=3), 18, 12)
    cores = [StructuredLinear(m, n, family, bias=False) for family, m, n in layers]
    model = nn.ModuleList([*cores, nn.Linear(7, 4), nn.Linear(7, 4), nn.Linear(7, 5)])
    moved(model, Muon(model))
    shapes = [shape for shape, _ in stacks]
    assert shapes == [(5, 4, 6), (2, 4, 7), (1, 5, 7)]


def test_large_matrices_on_a_cpu_are_not_copied_into_stacks(stacks, monkeypatch):
    monkeypatch.setattr("structlin.duality.LARGEST_ON_CPU", 2 * 4 * 6)
    small = nn.ModuleList(nn.Linear(6, 4, bias=False) for _ in range(3))
    model = nn.Sequential(*small, *(nn.Linear(12, 8, bias=False) for _ in range(2)))
    one_by_one = [(2, 4, 6), (1, 4, 6), (1, 8, 12), (1, 8, 12)]
    together = [(3, 4, 6), (2, 8, 12)]
    for unit, method, expected in (
        (False, "fast", one_by_one), (True, "fast", together), (True, MUONS, one_by_one),
    ):  # fmt: skip
        monkeypatch.setattr("structlin.duality.has_matrix_unit", lambda unit=unit: unit)
        stacks.clear()
        moved(model, Muon(model, method=method, dtype=torch.bfloat16))
        assert [shape for shape, _ in stacks] == expected


def test_a_stack_is_decided_once_and_again_where_an_option_or_a_dtype_is_another(
    stacks, monkeypatch
):
    decided = []

    def counted(*arguments, **options):
        decided.append(arguments[0])
        return choose_polar(*arguments, **options)

    monkeypatch.setattr("structlin.optim._block.choose_polar", counted)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    optimizer = Muon(model, dtype=torch.float32)
    moved(model, optimizer)
    model[1].weight.grad = None
    optimizer.step()
    assert decided == [(4, 6), (6, 4)]
    optimizer.param_groups[0]["dtype"] = torch.float64
    moved(model, optimizer)
    optimizer.load_state_dict(Muon(model, dtype=None).state_dict())
    model.double()
    moved(model, optimizer)
    assert len(decided) == 6
    dtypes = [torch.float32] * 3 + [torch.float64] * 4
    assert [dtype for _, dtype in stacks] == dtypes
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_a_polar_factor_with_an_impossible_norm_is_an_error_before_anything_has_moved():
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 4))
    optimizer = Muon(model, method=[(5.0, 0.0, 0.0)], weight_decay=0.1)
    model(torch.randn(8, 64)).square().sum().backward()
    before = copy.deepcopy(model.state_dict())
    message = r"direction of 1\.weight has norm 5 by method=\[\(5.*none has more than 3; nothing"
    with pytest.raises(FloatingPointError, match=message):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for values in optimizer.state_dict()["state"].values():
        assert all(not value.any() for value in values.values())
    Muon(model, method=[(5.0, 0.0, 0.0)], nonfinite="ignore").step()  # nobody asks


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": torch.ones(2)}, r"lr=tensor\(\[1\., 1\.\]\): a Tensor lr must be 1-element"),
        ({"momentum": 1.0}, r"momentum=1\.0"),
        ({"method": [(1, 2)]}, r"method=\[\(1, 2\)\] is no schedule"),
        ({"method": polar_factor}, "method=<function polar_factor .* is no schedule"),
        ({"method": "muon"}, "method='muon' is unknown"),
        ({"adjust_lr_fn": "mup"}, "adjust_lr_fn='mup' is unknown"),
        ({"nonfinite": "warn"}, "nonfinite='warn'"),
        ({"masses": {"0": 0}}, "masses: '0' has 0"),
        ({"masses": {"0": (1, 2)}}, "masses: '0' is no structured layer"),
        ({"masses": {"1": (1, 2, 3)}}, r"masses: '1' has 2 cores, not \(1, 2, 3\)"),
        ({"masses": {"7": 1}}, "masses: '7' matches no layer; the model has.* '0'"),
        ({"matrices": "heads"}, "matrices='heads' is unknown; there are hidden, all"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' must be a torch.dtype"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    attention = nn.MultiheadAttention(8, 2)
    model = nn.Sequential(nn.Linear(4, 4), StructuredLinear(16, 16), nn.Conv1d(4, 4, 3), attention)
    with pytest.raises((ValueError, TypeError), match=message):
        Muon(model, **options)


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
        (lambda m: Muon(param_groups(m, 0.1), model=m), "has the rates of another optimizer"),
        (lambda m: Muon([{"params": {*m.parameters()}}], model=m), "params is a set"),
        (lambda m: Muon(["weight"], model=m), "params must be parameters"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(nn.Linear(4, 4))


def test_parameters_are_added_all_or_none():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = Muon(model)
    groups = len(optimizer.param_groups)
    model.append(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [model[2].weight, model[0].bias]})
    with pytest.raises(ValueError, match=r"lr=0\.0 must be positive"):
        optimizer.add_param_group({"params": model[2], "lr": 0.0})
    assert len(optimizer.param_groups) == groups


def test_a_state_dict_of_another_model_names_what_differs():
    model = convert(GPT(depth=1), BTT(), include="ffn")
    optimizer = Muon(model)
    perplexed(model, 1, optimizer)
    named = r"lacks \['h\.0\.mlp\.c_fc\.weight', .* has \['h\.0\.mlp\.c_fc\.cores\.0'"
    with pytest.raises(ValueError, match=named):
        Muon(GPT(depth=1)).load_state_dict(optimizer.state_dict())
    wider = convert(GPT(width=128, depth=1), BTT(), include="ffn")
    shaped = r"h\.0\.attn\.c_attn\.weight is \(384, 128\) here and \(192, 64\) there"
    with pytest.raises(ValueError, match=shaped):
        Muon(wider).load_state_dict(optimizer.state_dict())
