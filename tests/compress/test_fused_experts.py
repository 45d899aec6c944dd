"""Experts that lie in one parameter: compressed one by one, kept as one module."""

import contextlib
import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from structlin import (
    BTT,
    Kronecker,
    LowRank,
    compress,
    densify,
    load,
    plan_compression,
    save,
    summary,
)
from structlin._compress import project as projecting
from structlin._convert import plan as planning
from structlin._layer.experts import DenseExperts, Lay, StructuredExperts
from structlin._model.stacks import expert_layers
from structlin.optim import Muon, declare_weights, param_groups

EXPERTS, WIDTH, INSIDE = 4, 12, 8


class Own(nn.Module):
    """Experts of a user's own, gate and up in one parameter."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INSIDE, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INSIDE) / INSIDE**0.5)

    def forward(self, x, chosen):
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero()[:, 0]
            gate, up = F.linear(x[rows], self.gate_up[expert]).chunk(2, -1)
            y = y.index_add(0, rows, F.linear(F.silu(gate) * up, self.down[expert]))
        return y


declare_weights(Own, gate_up="e (f m) n", down="e m n")


class Mixture(nn.Module):
    """A token goes to the expert that its first entry says."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.experts = Own()

    def forward(self, x):
        chosen = x[:, 0].round().long().clamp(0, EXPERTS - 1)
        return self.experts(x, chosen) + self.inside(x)


def make_tokens(counts, seed=0, narrow=0.05):
    """So many tokens for each expert, in directions of its own."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for expert, count in enumerate(counts):
        scales = torch.full((WIDTH,), narrow)
        scales[1 + 2 * expert : 4 + 2 * expert] = 1.0
        rows = torch.randn(count, WIDTH, generator=generator) * scales
        rows[:, 0] = expert
        parts.append(rows)
    return torch.cat(parts)


def make_mixture():
    torch.manual_seed(0)
    return Mixture()


def multiply_cores(stack):
    """The matrices of low-rank experts, `(count, out, in)`, by their cores alone."""
    first, second = stack.cores
    return torch.einsum("ero,emr->emo", first, second)


# ---- the product ---------------------------------------------------------------------------------


def build_experts(kind):
    """A module of transformers' experts, its config, and the einsum of one expert's product."""
    pytest.importorskip("transformers", minversion="5")
    from transformers import GptOssConfig, Llama4TextConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": WIDTH, "intermediate_size": INSIDE}
    if kind == "qwen3":
        config = Qwen3MoeConfig(
            num_experts=EXPERTS, hidden_size=WIDTH, moe_intermediate_size=INSIDE, hidden_act="silu"
        )
        experts = Qwen3MoeExperts(config)
    elif kind == "gpt-oss":
        config = GptOssConfig(num_local_experts=EXPERTS, **sizes)
        experts = GptOssExperts(config)
    else:
        config = Llama4TextConfig(num_local_experts=EXPERTS, **sizes)
        experts = Llama4TextExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.4)
    experts.config = config
    return experts, config


def loop_over_experts(kind, experts, gate_up, down, x, chosen, shares):
    """What the experts give, by matrices `(experts, 2, INSIDE, WIDTH)` and `(experts, WIDTH,
    INSIDE)`, token by token."""
    rows = []
    if kind == "llama4":
        chosen = torch.arange(EXPERTS).repeat_interleave(len(x) // EXPERTS)[:, None]
        shares = torch.ones(len(x), 1)
    for token, experts_of_token, shares_of_token in zip(x, chosen, shares, strict=True):
        y = torch.zeros(WIDTH)
        for expert, share in zip(experts_of_token.tolist(), shares_of_token, strict=True):
            gate, up = gate_up[expert] @ token
            if kind == "gpt-oss":
                bias = experts.gate_up_proj_bias[expert]
                gate = (gate + bias[::2]).clamp(max=experts.limit)
                up = (up + bias[1::2]).clamp(-experts.limit, experts.limit)
                inside = (up + 1) * gate * torch.sigmoid(gate * experts.alpha)
                y = y + share * (down[expert] @ inside + experts.down_proj_bias[expert])
            else:
                y = y + share * (down[expert] @ (F.silu(gate) * up))
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss", "llama4"])
def test_transformers_own_forward_with_structured_experts_is_a_loop_over_their_matrices(
    kind, implementation, monkeypatch
):
    torch.manual_seed(0)
    experts, config = build_experts(kind)
    config._experts_implementation = implementation
    x = torch.randn(12, WIDTH, requires_grad=True)
    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in x])  # the last one gets none
    shares = torch.rand(12, 2)
    for layer in expert_layers(experts):
        structure = LowRank(rank=3).structure(layer.in_features, layer.out_features)
        delattr(experts, layer.attribute)
        setattr(experts, layer.attribute, StructuredExperts(layer.lay, structure))
    gate_up = multiply_cores(experts.gate_up_proj).unflatten(0, (EXPERTS, 2))
    down = multiply_cores(experts.down_proj)
    expected = loop_over_experts(kind, experts, gate_up, down, x, chosen, shares)

    def refuse(self):
        raise AssertionError("the dense parameter was formed")

    monkeypatch.setattr(StructuredExperts, "to_dense", refuse)
    arguments = (x,) if kind == "llama4" else (x, chosen, shares)
    y = experts(*arguments)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
    gradients_of = [x, *experts.gate_up_proj.cores, *experts.down_proj.cores]
    weights = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad((y * weights).sum(), gradients_of),
        torch.autograd.grad((expected * weights).sum(), gradients_of),
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_parameter_comes_apart_into_its_matrices_and_together_again(transposed, takes_turns):
    lay = Lay(3, 2, 4, 5, takes_turns, transposed)
    weight = torch.randn(lay.shape)
    matrices = lay.split(weight)
    rows = weight.mT if transposed else weight
    for expert in range(3):
        gate = rows[expert, ::2] if takes_turns else rows[expert, :4]
        up = rows[expert, 1::2] if takes_turns else rows[expert, 4:]
        assert torch.equal(matrices[expert, 0], gate)
        assert torch.equal(matrices[expert, 1], up)
    assert torch.equal(lay.join(matrices), weight)
    assert torch.equal(DenseExperts(lay, nn.Parameter(weight)).to_dense(), weight)


def test_code_that_reads_the_parameter_finds_a_tensor():
    lay = Lay(EXPERTS, 2, INSIDE, WIDTH)
    stack = StructuredExperts(lay, BTT(rank=1).structure(WIDTH, INSIDE))
    dense = stack.to_dense()
    assert stack.shape == dense.shape == (EXPERTS, 2 * INSIDE, WIDTH)
    assert stack.dtype == torch.float32
    assert stack.device.type == "cpu"
    assert stack.transpose(1, 2).shape == (EXPERTS, WIDTH, 2 * INSIDE)
    assert stack[-1].shape == (2 * INSIDE, WIDTH)
    torch.testing.assert_close(stack[1] + 0, dense[1])
    torch.testing.assert_close(stack.mT.sum(), dense.sum())
    torch.testing.assert_close(torch.einsum("emn,en->em", stack, torch.ones(4, 12)), dense.sum(-1))
    with pytest.raises(IndexError, match="expert 4 is out of range"):
        stack[4]
    with pytest.raises(RuntimeError, match="made of their cores"):
        stack.zero_()


READS = {
    "view": lambda w: w.view(-1, WIDTH),
    "a number from the left": lambda w: 2 - w,
    "a number from the right": lambda w: w * 0.5 + 1,
    "unary": lambda w: abs(-w),
    "power": lambda w: w**2,
    "at": lambda w: w @ torch.ones(EXPERTS, WIDTH, 3),
    "dtype": lambda w: w.to(torch.float64),
    "double": lambda w: w.double(),
    "of tokens, from the last": lambda w: w[torch.tensor([-1, 0])] @ torch.ones(2, WIDTH, 1),
    "detached": lambda w: w.detach()[1] @ torch.ones(WIDTH, 3),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_forward_does_with_the_parameter_it_may_do_with_experts(name):
    lay = Lay(EXPERTS, 2, INSIDE, WIDTH)
    stack = StructuredExperts(lay, LowRank(rank=2).structure(WIDTH, INSIDE))
    dense = lay.join(multiply_cores(stack).unflatten(0, (EXPERTS, 2)))
    expected = READS[name](dense)
    found = READS[name](stack)
    torch.testing.assert_close(found, expected)
    assert found.requires_grad == expected.requires_grad
    assert {core.dtype for core in stack.cores} == {torch.float32}  # a cast is of the tensor alone


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.mul_(0),
        lambda w: w.detach().mul_(0),
        lambda w: w[0].data.mul_(0),
        lambda w: nn.init.normal_(w),
        lambda w: w.data[1].zero_(),
        lambda w: w.__setitem__(0, 0.0),
        lambda w: torch._foreach_mul_([w.data], 0.0),
    ],
)
def test_a_write_that_would_be_lost_is_refused(write):
    stack = StructuredExperts(Lay(2, 1, 4, 4), LowRank(rank=2).structure(4, 4))
    with torch.no_grad(), pytest.raises(RuntimeError, match="made of their cores"):
        write(stack)


def test_a_hook_that_would_never_run_is_refused():
    stack = StructuredExperts(Lay(2, 1, 4, 4), LowRank(rank=2).structure(4, 4))
    for weight in (stack, stack[0]):
        with pytest.raises(RuntimeError, match="register_hook: no gradient reaches a weight"):
            weight.register_hook(lambda gradient: 2 * gradient)


def test_cores_that_no_token_reaches_have_a_gradient_of_zeros():
    stack = StructuredExperts(Lay(2, 1, 4, 4), LowRank(rank=2).structure(4, 4))
    tokens = torch.empty(0, 1, 4)
    y = tokens @ stack[torch.empty(0, dtype=torch.long)].mT
    assert y.shape == (0, 1, 4)
    y.sum().backward()
    assert all(core.grad is not None and not core.grad.any() for core in stack.cores)


def test_a_token_of_an_expert_that_is_not_there_is_refused():
    stack = StructuredExperts(Lay(2, 1, 4, 4), LowRank(rank=2).structure(4, 4))
    with pytest.raises(IndexError, match="expert 2 is out of range: there are 2"):
        stack[torch.tensor([0, 2])] @ torch.ones(2, 4, 1)


# ---- what each expert is projected for -----------------------------------------------------------


def test_each_expert_is_projected_for_the_tokens_that_reach_it():
    model = make_mixture()
    x = make_tokens([600] * EXPERTS)
    dense = copy.deepcopy(model)
    compress(model, LowRank(rank=3), [x], keep=None, include="*gate_up", allocation="error")
    matrices = multiply_cores(model.experts.gate_up).unflatten(0, (EXPERTS, 2))
    for expert in range(EXPERTS):
        rows = x[x[:, 0] == expert].double()
        # the ridge draws a little to the weight
        spread = rows.square().mean(0).sum() / WIDTH * 0.3 * WIDTH / len(rows)
        root = torch.linalg.cholesky(rows.mT @ rows / len(rows) + spread * torch.eye(WIDTH))
        for part in range(2):
            weight = dense.experts.gate_up[expert].double().chunk(2)[part]
            least = torch.linalg.svdvals(weight @ root)[3:].norm()
            found = ((weight - matrices[expert, part].double()) @ root).norm()
            assert found.item() == pytest.approx(least.item(), rel=1e-3)


def test_experts_keep_their_function_better_than_with_one_whitening_for_all_and_than_by_svd():
    model = make_mixture()
    dense = copy.deepcopy(model)
    x, new = make_tokens([400] * EXPERTS), make_tokens([200] * EXPERTS, seed=1)
    compress(model, LowRank(rank=2), [x], keep=None, include="*gate_up", allocation="error")

    def truncate(root):
        peer = copy.deepcopy(dense)
        for weight in peer.experts.gate_up.data.unflatten(1, (2, INSIDE)).flatten(0, 1):
            u, s, v = torch.linalg.svd(weight @ root, full_matrices=False)
            weight.copy_(u[:, :2] @ s[:2].diag() @ v[:2] @ root.inverse())
        return (peer(new) - dense(new)).norm()

    found = (model(new) - dense(new)).norm()
    assert found < 0.8 * truncate(torch.linalg.cholesky(x.mT @ x / len(x)))
    assert found < 0.8 * truncate(torch.eye(WIDTH))


def test_an_expert_that_no_token_reaches_is_its_svd_and_said():
    model = make_mixture()
    weight = model.experts.down[2].detach().clone()
    with pytest.warns(UserWarning, match=r"reached expert 2 of experts\.gate_up, expert 2 of"):
        planned = plan_compression(
            model, LowRank(rank=3), [make_tokens([50, 50, 0, 50])], keep=None, include="experts.*"
        )
    assert "of 0 tokens in expert 2: few" in str(planned)
    planned.apply()
    u, s, v = torch.linalg.svd(weight)
    expected = u[:, :3] @ s[:3].diag() @ v[:3]
    torch.testing.assert_close(multiply_cores(model.experts.down)[2], expected, atol=1e-5, rtol=0)


def test_with_sizes_by_harm_an_expert_that_no_token_reaches_is_its_svd_too():
    model = make_mixture()
    weight = model.experts.down[2].detach().clone()
    with pytest.warns(UserWarning, match=r"reached expert 2"):
        compress(model, LowRank(rank=1), [make_tokens([50, 50, 0, 50])], include="experts.*")
    matrix = multiply_cores(model.experts.down)[2]
    rank = int(torch.linalg.matrix_rank(matrix))
    u, s, v = torch.linalg.svd(weight)
    expected = u[:, :rank] @ s[:rank].diag() @ v[:rank]
    torch.testing.assert_close(matrix, expected, atol=1e-5, rtol=0)


def test_an_expert_that_few_tokens_reach_is_said_with_their_number():
    model = make_mixture()
    x = make_tokens([60, 60, 60, 1])
    with pytest.warns(UserWarning, match=r"expert 3 of experts\.gate_up \(1 of 12\)"):
        planned = plan_compression(model, LowRank(rank=3), [x], keep=None, include="experts.*")
    assert "of 1 tokens in expert 3: few" in str(planned)


@pytest.mark.parametrize("allocation", ["sensitivity", "error"])
def test_all_experts_of_a_parameter_get_one_size_within_what_is_kept(allocation):
    model = make_mixture()
    numbers = model.experts.gate_up.numel() + model.experts.down.numel()
    x = make_tokens([100] * EXPERTS)
    compress(model, LowRank(rank=1), [x], keep=0.6, allocation=allocation, include="experts.*")
    stacks = [model.experts.gate_up, model.experts.down]
    left = sum(core.numel() for stack in stacks for core in stack.cores)
    assert 0.45 * numbers < left <= 0.6 * numbers
    row = next(row for row in summary(model).loose if row.name == "experts.gate_up")
    assert row.matrices == 2 * EXPERTS
    assert row.params == sum(core.numel() for core in model.experts.gate_up.cores)


def test_without_data_each_matrix_is_its_svd():
    model = make_mixture()
    weight = model.experts.gate_up[1, INSIDE:].detach().clone()  # up
    options = {"keep": None, "allocation": "error", "include": "experts.*"}
    compress(model, LowRank(rank=2), None, **options)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    expected = u[:, :2] @ s[:2].diag() @ v[:2]
    torch.testing.assert_close(multiply_cores(model.experts.gate_up)[3], expected)


def test_refinement_lowers_the_error_of_a_block_of_experts():
    torch.manual_seed(0)

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Mixture(), Mixture()])

        def forward(self, x):
            for block in self.blocks:
                x = torch.cat([x[:, :1], x[:, 1:] + block(x)[:, 1:]], -1)
            return x

    x = make_tokens([100] * EXPERTS)
    planned = plan_compression(Blocks(), LowRank(rank=1), [x], refine=20, include="*experts.*")
    assert all(after < before for before, after in planned.blocks.values())
    planned.apply()


# ---- bad input -----------------------------------------------------------------------------------


@contextlib.contextmanager
def as_it_was(model):
    """The model has the same parameters, with the same numbers, at the end."""
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    yield
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (parameter, values) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, values)


def test_inputs_that_are_not_finite_are_refused_by_the_name_of_the_expert():
    model = make_mixture()
    x = make_tokens([60] * EXPERTS)
    x[0, 5] = torch.nan
    options = {"keep": None, "allocation": "error", "include": "experts.*"}
    with as_it_was(model), pytest.raises(ValueError, match=r"experts\.gate_up\.0\.0' are not fin"):
        compress(model, LowRank(rank=2), [x], **options)


def test_a_weight_that_is_not_finite_is_refused():
    model = make_mixture()
    model.experts.down.data[1, 0, 0] = torch.inf
    x = make_tokens([60] * EXPERTS)
    with as_it_was(model), pytest.raises(ValueError, match=r"'experts\.down' is not finite"):
        compress(model, LowRank(rank=2), [x], keep=None, include="experts.*")


def test_experts_that_nobody_declared_are_listed_once_and_stay():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

        def forward(self, x):
            return torch.einsum("tn,emn->tm", x, self.weight)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts())
    weight = model[1].weight
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compress(model, LowRank(rank=2), [torch.randn(100, WIDTH)], keep=None)
    texts = [str(warning.message) for warning in said]
    assert sum("left dense, for they are parameters" in text for text in texts) == 1
    assert model[1].weight is weight


def test_flops_of_experts_are_not_counted():
    model = make_mixture()
    x = make_tokens([60] * EXPERTS)
    with as_it_was(model), pytest.raises(ValueError, match="count='flops'"):
        compress(model, LowRank(rank=1), [x], count="flops", include="experts.*")


def test_an_interrupt_while_an_expert_is_projected_leaves_the_model(monkeypatch):
    model = make_mixture()
    calls = []

    def interrupt(*args, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return solve(*args, **options)

    solve = projecting.solve
    monkeypatch.setattr(projecting, "solve", interrupt)
    with as_it_was(model), pytest.raises(KeyboardInterrupt):
        compress(model, LowRank(rank=2), [make_tokens([60] * EXPERTS)], keep=None)


def test_an_interrupt_while_experts_are_swapped_in_leaves_the_model(monkeypatch):
    model = make_mixture()
    planned = plan_compression(model, LowRank(rank=2), [make_tokens([60] * EXPERTS)], keep=None)

    def interrupt(self, undo):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning.Plan, "_write_values", interrupt)
    with as_it_was(model), pytest.raises(KeyboardInterrupt):
        planned.apply()
    monkeypatch.undo()
    assert isinstance(planned.apply().experts.down, StructuredExperts)


def test_a_plan_refuses_experts_that_were_trained_since():
    model = make_mixture()
    planned = plan_compression(model, LowRank(rank=2), [make_tokens([60] * EXPERTS)], keep=None)
    model.experts.down.data[0, 0, 0] += 1
    with pytest.raises(ValueError, match=r"experts\.down.* got other weights"):
        planned.apply()


# ---- files, and the way back ---------------------------------------------------------------------


def compressed_mixture():
    model = make_mixture()
    return compress(model, LowRank(rank=2), [make_tokens([60] * EXPERTS)], keep=None)


def test_the_router_and_what_is_around_the_experts_stays():
    model = make_mixture()
    experts = model.experts
    compress(model, LowRank(rank=2), [make_tokens([60] * EXPERTS)], keep=None, include="experts.*")
    assert model.experts is experts
    assert type(model.inside) is nn.Linear


def test_save_and_load_give_the_same_experts(tmp_path):
    model = compressed_mixture()
    save(model, tmp_path)
    again = load(Mixture(), tmp_path)
    x = make_tokens([20] * EXPERTS, seed=3)
    assert torch.equal(again(x), model(x))
    assert load(compressed_mixture(), tmp_path)(x).equal(model(x))


def test_densify_gives_the_parameter_back():
    model = compressed_mixture()
    x = make_tokens([20] * EXPERTS, seed=3)
    y = model(x)
    expected = multiply_cores(model.experts.gate_up).unflatten(0, (EXPERTS, 2)).flatten(1, 2)
    densify(model)
    assert type(model.experts.gate_up) is nn.Parameter
    torch.testing.assert_close(model.experts.gate_up.data, expected.data)
    torch.testing.assert_close(model(x), y)
    Mixture().load_state_dict(model.state_dict())


def test_deepcopy_and_double_take_the_cores_along():
    model = compressed_mixture()
    copied = copy.deepcopy(model).double()
    x = make_tokens([20] * EXPERTS, seed=3)
    torch.testing.assert_close(copied(x.double()).float(), model(x), atol=1e-5, rtol=1e-4)
    assert copied.experts.down.dtype == torch.float64


def test_optimizers_step_the_cores_of_experts_at_the_rates_of_a_linear_layer():
    model = compressed_mixture()
    kinds = {}
    for group in Muon(model).param_groups:
        for parameter in group["params"]:
            kinds[parameter] = group["kind"]
    cores = [*model.experts.gate_up.cores, *model.experts.down.cores]
    assert {kinds[core] for core in cores} == {"matrix"}
    # low-rank: 1/2 of the dense rate where it reads the inputs, and in / (2 rank) after that
    rates = {}
    for group in param_groups(model, 1.0):
        for parameter in group["params"]:
            rates[parameter] = group["lr"]
    first, second = model.experts.gate_up.cores
    assert (rates[first], rates[second]) == (0.5, WIDTH / (2 * 2))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_save_pretrained_and_from_pretrained_give_the_same_mixture(tmp_path, implementation):
    transformers = pytest.importorskip("transformers", minversion="5")
    import structlin.hf  # noqa: F401

    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        experts_implementation=implementation,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    ids = torch.randint(32, (4, 16))
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    compress(model, LowRank(rank=2), [{"input_ids": ids}], keep=None)
    assert [layer.mlp.gate.weight for layer in model.model.layers] == gates
    model.save_pretrained(tmp_path)
    again, report = type(model).from_pretrained(
        tmp_path, output_loading_info=True, experts_implementation=implementation
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    dense = densify(copy.deepcopy(model))
    torch.testing.assert_close(
        dense(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-4
    )
    assert "quantization_config" not in vars(dense.config)


# ---- routing that differs between calls and models -----------------------------------------------


def test_as_many_tokens_of_an_expert_in_both_models_are_no_pairs():
    stop = SimpleNamespace
    dense, compressed = torch.zeros(3, 4), torch.ones(3, 4)
    wait = stop(call=stop(masks=[]), dense=stop(input=dense), compressed=stop(input=compressed))
    [pair] = projecting._pair_inputs([wait], are_tokens_same=False)
    assert pair.x is compressed
    assert pair.z is compressed
    [pair] = projecting._pair_inputs([wait], are_tokens_same=True)
    assert pair.x is dense
    assert pair.z is compressed


def test_an_expert_that_only_batches_without_gradients_reach_is_projected_for_their_tokens():
    model = make_mixture()
    weight = model.experts.gate_up[3, :INSIDE].detach().double()
    batches = [make_tokens([40, 40, 40, 0], seed=n) for n in range(16)]
    rows = make_tokens([0, 0, 0, 300], seed=20)
    batches[1] = torch.cat([batches[1], rows])  # of 16 calls, eight have gradients: 0, 2, 4, ...
    compress(model, LowRank(rank=3), batches, keep=None, include="*gate_up")
    matrix = multiply_cores(model.experts.gate_up)[6].double()
    rows = rows.double()
    found = ((weight - matrix) @ rows.mT).norm()
    left = torch.linalg.svdvals(weight @ rows.mT)[3:].norm()
    assert found.item() == pytest.approx(left.item(), rel=0.02)


def test_an_expert_without_gradients_is_projected_as_if_all_outputs_counted_alike():
    batches = [make_tokens([40, 40, 40, 0], seed=n) for n in range(16)]
    batches[1] = torch.cat([batches[1], make_tokens([0, 0, 0, 300], seed=20)])
    options = {"keep": None, "include": "*gate_up"}
    by_harm = compress(make_mixture(), Kronecker(), batches, **options)
    alike = compress(make_mixture(), Kronecker(), batches, allocation="error", **options)
    found = by_harm.experts.gate_up.to_dense()
    expected = alike.experts.gate_up.to_dense()
    torch.testing.assert_close(found[3], expected[3])
    assert not torch.allclose(found[0], expected[0])
