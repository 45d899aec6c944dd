"""Experts that are one parameter step as matrices, each by itself, whichever way they lie."""

import copy
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness.live import watch
from structlin import BTT, convert, plan
from structlin._model.parameters import weights_of
from structlin.optim import SOAP, Muon, Normed, declare_weights, param_groups
from structlin.optim._stacks import from_matrices, to_matrices

EXPERTS, WIDTH, HIDDEN = 3, 6, 4


def sizes(experts=EXPERTS, width=WIDTH, hidden=HIDDEN):
    """A configuration under the names that every model of transformers has for these numbers."""
    return SimpleNamespace(
        num_experts=experts, num_local_experts=experts, n_routed_experts=experts,
        moe_num_experts=experts, n_shared_experts=experts, zero_expert_num=0,
        hidden_size=width, intermediate_size=hidden, moe_intermediate_size=hidden,
        expert_ffn_hidden_size=hidden, moe_latent_size=None, hidden_act="silu",
        mlp_hidden_act="silu", swiglu_alpha=1.7, swiglu_limit=100.0,
        _experts_implementation="eager",
    )  # fmt: skip


def made(family, name, config=None):
    """Experts of transformers with random weights and no biases, in float64."""
    modules = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    return drawn(getattr(modules, name)(config or sizes()))


def drawn(module):
    torch.manual_seed(0)
    module = module.double()
    for name, p in module.named_parameters():
        nn.init.constant_(p, 0.0) if "bias" in name else nn.init.normal_(p)
    return module


def matrices(module, own):
    return to_matrices(weights_of(module)[own], getattr(module, own).detach())


def silu_gate(gate, up):
    return F.silu(gate) * up


def gpt_oss_gate(gate, up):
    return (up + 1) * gate * torch.sigmoid(1.7 * gate)


GATED = {
    "Mixtral": ("mixtral", "MixtralExperts", silu_gate),
    "Qwen3-MoE": ("qwen3_moe", "Qwen3MoeExperts", silu_gate),
    "Aria": ("aria", "AriaExperts", silu_gate),
    "gpt-oss": ("gpt_oss", "GptOssExperts", gpt_oss_gate),
    "privacy filter": ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", gpt_oss_gate),
    "LongCat": ("longcat_flash", "LongcatFlashExperts", silu_gate),
    "Step": ("step3p7", "Step3p7Experts", silu_gate),
}


@pytest.mark.parametrize("name", GATED)
def test_gate_up_and_down_of_an_expert_are_the_matrices_that_its_module_multiplies_by(name):
    family, kind, activate = GATED[name]
    module = made(family, kind)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    chosen, shares = torch.tensor([[1, 0]] * 5), torch.tensor([[1.0, 0.0]] * 5).double()
    found = module(x, chosen, shares)
    # expert 1 of (experts * 2, hidden, width) and (experts, width, hidden)
    gate, up = matrices(module, "gate_up_proj")[2:4]
    down = matrices(module, "down_proj")[1]
    assert (gate.shape, down.shape) == ((HIDDEN, WIDTH), (WIDTH, HIDDEN))
    expected = activate(x @ gate.T, x @ up.T) @ down.T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_experts_without_a_gate_are_the_matrices_that_their_module_multiplies_by():
    module = made("nemotron_h", "NemotronHExperts")
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    found = module(x, torch.full((5, 1), 1), torch.ones(5, 1, dtype=torch.float64))
    up, down = matrices(module, "up_proj")[1], matrices(module, "down_proj")[1]
    torch.testing.assert_close(found, F.silu(x @ up.T) @ down.T)


def test_llamas_experts_are_the_matrices_that_their_module_multiplies_by():
    module = made("llama4", "Llama4TextExperts")
    x = torch.randn(EXPERTS, WIDTH, dtype=torch.float64)  # one token for each
    found = module(x)
    pairs = matrices(module, "gate_up_proj").unflatten(0, (EXPERTS, 2))
    for token, (gate, up), down, y in zip(
        x, pairs, matrices(module, "down_proj"), found, strict=True
    ):
        torch.testing.assert_close(down @ (F.silu(gate @ token) * (up @ token)), y)


def test_shared_experts_and_parallel_experts_are_stored_as_linear_layers():
    shared = made("inkling", "InklingSharedExperts")
    assert {weight.stored for weight in weights_of(shared).values()} == {"e m n"}
    x = torch.randn(1, WIDTH, dtype=torch.float64)
    gates, ups, downs = (matrices(shared, f"{own}_proj") for own in ("gate", "up", "down"))
    outputs = [
        silu_gate(x @ gate.T, x @ up.T) @ down.T
        for gate, up, down in zip(gates, ups, downs, strict=True)
    ]
    found = shared(x, torch.ones(1, EXPERTS, dtype=torch.float64))
    torch.testing.assert_close(found, sum(outputs), rtol=1e-5, atol=1e-5)
    modules = pytest.importorskip("transformers.models.jetmoe.modeling_jetmoe")
    parallel = drawn(modules.JetMoeParallelExperts(EXPERTS, WIDTH, HIDDEN))
    x = torch.randn(EXPERTS, WIDTH, dtype=torch.float64)
    products = [m @ token for m, token in zip(matrices(parallel, "weight"), x, strict=True)]
    torch.testing.assert_close(parallel(x, [1] * EXPERTS), torch.stack(products))


class GptOssGroupedExperts(nn.Module):
    """torchtitan's, with its names and shapes; gate and up take turns."""

    def __init__(self):
        super().__init__()
        self.mlp1_weight_EGD = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN, WIDTH))
        self.mlp1_bias_EG = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN))
        self.mlp2_weight_EDF = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))


class FusedGroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2, WIDTH))
        self.w2_EDF = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))
        self.w2_EDF = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.w3_EFD = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))


def test_torchtitans_experts_lie_as_their_names_say():
    interleaved = drawn(GptOssGroupedExperts())
    found = matrices(interleaved, "mlp1_weight_EGD").unflatten(0, (EXPERTS, 2))
    stored = interleaved.mlp1_weight_EGD.detach()
    assert torch.equal(found[:, 0], stored[:, ::2])
    assert torch.equal(found[:, 1], stored[:, 1::2])
    fused = drawn(FusedGroupedExperts())
    found = matrices(fused, "w13").unflatten(0, (EXPERTS, 2))
    assert torch.equal(found[:, 1], fused.w13.detach()[:, :, 1])
    plain = drawn(GroupedExperts())
    for own, parameter in plain.named_parameters():
        assert torch.equal(matrices(plain, own), parameter.detach())
    for module in (interleaved, fused, plain):
        for own, weight in weights_of(module).items():
            parameter = getattr(module, own).detach()
            assert torch.equal(from_matrices(weight, matrices(module, own)), parameter)
    kinds = {own: g["kind"] for g in Muon(interleaved).param_groups for own in g["param_names"]}
    assert kinds == {
        "mlp1_weight_EGD": "matrix",
        "mlp2_weight_EDF": "matrix",
        "mlp1_bias_EG": "other",
    }


def test_another_class_of_the_same_name_with_other_weights_is_left_alone():
    class GroupedExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1_EFD = nn.Parameter(torch.empty(EXPERTS, HIDDEN * WIDTH))

    assert weights_of(GroupedExperts()) == {}


def test_concatenated_matrices_are_views_and_only_interleaved_ones_are_copied():
    rows, turns = made("mixtral", "MixtralExperts"), made("gpt_oss", "GptOssExperts")
    for module, own, is_view in (
        (rows, "gate_up_proj", True),
        (rows, "down_proj", True),
        (turns, "down_proj", True),
        (turns, "gate_up_proj", False),
    ):
        stored = getattr(module, own)
        assert (matrices(module, own).data_ptr() == stored.data_ptr()) == is_view


# ---- whole models --------------------------------------------------------------------------------

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 4},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4},
}
WITHOUT_EXPERTS = {"Qwen3Moe": 0.25, "Mixtral": 0.15, "GptOss": 0.15}  # at most, of the numbers


def language_model(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("make", [Muon, SOAP])
@pytest.mark.parametrize("name", MODELS)
def test_every_expert_of_a_language_model_is_a_matrix_and_routers_and_biases_are_not(name, make):
    model = language_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = make(model)
    kinds = {name: g["kind"] for g in optimizer.param_groups for name in g["param_names"]}
    experts = [n for n in kinds if ".experts." in n and "bias" not in n]
    assert len(experts) == 4
    assert {kinds[n] for n in experts} == {"matrix"}
    others = [n for n in kinds if "bias" in n or ".gate." in n or ".router." in n]
    assert {kinds[n] for n in others} == {"other"}
    numbers = {n: p.numel() for n, p in model.named_parameters()}
    stepped = sum(numbers[n] for n, kind in kinds.items() if kind == "matrix")
    before = stepped - sum(numbers[n] for n in experts)
    assert before < WITHOUT_EXPERTS[name] * sum(numbers.values())
    assert stepped > 0.8 * sum(numbers.values())
    ids = torch.randint(64, (2, 8))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_plan_says_what_the_experts_are():
    text = str(plan(language_model("Mixtral"), BTT()))
    # two layers of four experts; gate and up are two matrices of each
    assert re.search(
        r"experts\.gate_up_proj +16 +experts +32 -> 48 .*Muon and SOAP step each", text
    )
    assert re.search(r"experts\.down_proj +8 +experts +48 -> 32 .*Muon and SOAP step each", text)


# ---- steps ---------------------------------------------------------------------------------------


class Fused(nn.Module):
    """`linears` in one parameter, by `store`."""

    def __init__(self, linears, store):
        super().__init__()
        self.weight = nn.Parameter(store([linear.weight.detach() for linear in linears]))


class Rows(Fused):
    """e (f m) n"""


class Turns(Fused):
    """e n (m f)"""


declare_weights(Rows, weight="e (f m) n")
declare_weights(Turns, weight="e n (m f)")


def in_rows(weights):
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])


def in_turns(weights):
    rows, columns = weights[0].shape
    stored = torch.empty(len(weights) // 2, columns, 2 * rows, dtype=weights[0].dtype)
    for n, weight in enumerate(weights):
        stored[n // 2, :, n % 2 :: 2] = weight.T
    return stored


FUSED = {"rows": (Rows, in_rows), "turns": (Turns, in_turns)}
OPTIMIZERS = {
    "Muon": lambda model: Muon(model, lr=0.1, weight_decay=0.1),
    "SOAP": lambda model: SOAP(model, lr=0.1, weight_decay=0.1, precondition_frequency=2),
    "SOAP, short side": lambda model: SOAP(model, lr=0.1, max_precond_dim=5),
}


def steps_of(model, optimizer, gradients):
    """What `model` is after a step with each of `gradients`, one for each of its parameters."""
    for step in gradients:
        for p, gradient in zip(model.parameters(), step, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("name", FUSED)
def test_a_step_of_fused_experts_is_that_of_a_linear_layer_for_each_gate_and_up(name, make):
    kind, store = FUSED[name]
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2 * EXPERTS)]
    alone = nn.ModuleList(layers).double()
    fused = kind(layers, store)
    shape = HIDDEN, WIDTH
    gradients = [[torch.randn(shape).double() for _ in layers] for _ in range(5)]
    together = [[store(step)] for step in gradients]
    expected = store(steps_of(alone, OPTIMIZERS[make](alone), gradients))
    (found,) = steps_of(fused, OPTIMIZERS[make](fused), together)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_soap_has_one_pair_of_factors_for_each_expert():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2 * EXPERTS)]
    model = Turns(layers, in_turns)
    optimizer = SOAP(model)
    steps_of(model, optimizer, [[torch.randn_like(model.weight)]])
    state = optimizer.state[model.weight]
    assert state["left"].shape == (2 * EXPERTS, HIDDEN, HIDDEN)
    assert state["right"].shape == (2 * EXPERTS, WIDTH, WIDTH)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_experts_resume_bit_for_bit(make):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2 * EXPERTS)]
    model = Turns(layers, in_turns)
    gradients = [[torch.randn_like(model.weight)] for _ in range(6)]
    optimizer = OPTIMIZERS[make](model)
    steps_of(model, optimizer, gradients[:3])
    resumed = copy.deepcopy(model)
    other = OPTIMIZERS[make](resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (expected,) = steps_of(model, optimizer, gradients[3:])
    (found,) = steps_of(resumed, other, gradients[3:])
    assert torch.equal(found, expected)


def test_the_compiled_step_of_experts_is_one_graph_and_equals_the_step():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2 * EXPERTS)]
    model = Turns(layers, in_turns)
    twin = copy.deepcopy(model)
    gradients = [[torch.randn_like(model.weight)] for _ in range(3)]
    (expected,) = steps_of(model, Muon(model, nonfinite="ignore"), gradients)
    optimizer = Muon(twin, nonfinite="ignore")
    torch.compiler.reset()
    step = torch.compile(optimizer.step, fullgraph=True, backend="eager")
    (found,) = steps_of(twin, SimpleNamespace(step=step), gradients)
    torch.testing.assert_close(found, expected)


def test_normed_takes_the_largest_norm_of_an_expert():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN, bias=False).double() for _ in range(2 * EXPERTS)]
    model = Rows(layers, in_rows)
    before = model.weight.detach().clone()
    steps_of(model, Normed(torch.optim.SGD(model.parameters(), 0.1), model), [[before]])
    change = (model.weight.detach() - before).unflatten(1, (2, HIDDEN))
    norms = torch.linalg.matrix_norm(change, 2) * (WIDTH / HIDDEN) ** 0.5
    assert norms.amax().item() == pytest.approx(0.1, rel=0.02)


def test_experts_have_mups_rates():
    config, wide = sizes(), sizes(EXPERTS, 2 * WIDTH, 4 * HIDDEN)
    base = made("gpt_oss", "GptOssExperts", config)
    model = made("gpt_oss", "GptOssExperts", wide)
    for asked in (base, {2 * WIDTH: WIDTH, 4 * HIDDEN: HIDDEN}):
        groups = param_groups(model, 1.0, weight_decay=0.1, base=asked)
        rates = {own: group["lr"] for group in groups for own in group["param_names"]}
        # gate and up take in the model's width, down the hidden one
        assert rates.pop("gate_up_proj") == pytest.approx(1 / 2)
        assert rates.pop("down_proj") == pytest.approx(1 / 4)
        assert set(rates.values()) == {1.0}


def test_the_norm_of_experts_is_the_largest_of_theirs():
    torch.manual_seed(0)

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2 * EXPERTS)]
            self.experts = Turns(layers, in_turns)

        def forward(self, x):
            return torch.einsum("bn,enf->bef", x, self.experts.weight)

    model = Routed()
    before = model.experts.weight.detach().clone()
    with watch(model) as log:
        model(torch.randn(8, WIDTH)).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    (row,) = [row for row in log.rows if row.dependency is not None]
    change = model.experts.weight.detach() - before
    for stored, found in ((before, row.dependency), (change, row.update)):
        gates = stored.unflatten(2, (HIDDEN, 2)).movedim(3, 1)  # (e, f, n, m)
        norms = torch.linalg.matrix_norm(gates, 2) * (WIDTH / HIDDEN) ** 0.5
        assert found == pytest.approx(norms.amax().item(), rel=0.02)
    assert row.layer == "experts.weight"


# ---- declarations --------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize(
    ("stored", "shape", "fused"),
    [
        ("e m n", (3, 4, 6), 2),
        ("e n m", (3, 6, 4), 2),
        ("m n", (4, 6), 2),
        ("n m", (6, 4), 2),
        ("(f m) n", (16, 6), 4),
        ("e (n f) m", (3, 12, 4), 2),
        ("f e m n", (2, 3, 4, 6), 2),
    ],
)
def test_a_declared_text_says_how_each_matrix_lies(stored, shape, fused):
    class Declared(Own):
        pass

    class Subclass(Declared):
        pass

    declare_weights(Declared, fused=fused, weight=stored)
    for kind in (Declared, Subclass):
        module = kind(*shape)
        weight = weights_of(module)["weight"]
        assert (weight.kind, weight.fan_out, weight.fan_in) == ("matrix", 4, 6)
        found = matrices(module, "weight")
        assert found.shape[1:] == (4, 6)
        assert found.numel() == module.weight.numel()
        assert torch.equal(from_matrices(weight, found), module.weight)
        assert Muon(module).param_groups[0]["kind"] == "matrix"


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ("e m", "has no 'n'"),
        ("e m n k", "has the axis 'k'"),
        ("e m m n", "has 'm' more than once"),
        ("(e m) n", "parentheses around other axes"),
        ("(m n)", "parentheses around other axes"),
        ("e (f m n", "not closed"),
        ("", "has no 'm'"),
    ],
)
def test_a_text_that_does_not_say_where_each_matrix_is_is_refused(stored, reason):
    with pytest.raises(ValueError, match=f"^weight=.*{reason}.*'e m n'"):
        declare_weights(Own, weight=stored)
    assert weights_of(Own(3, 4, 6)) == {}


def test_what_cannot_be_declared_is_refused():
    with pytest.raises(TypeError, match=r"module_class=Tensor .*type\(model"):
        declare_weights(torch.Tensor, weight="m n")
    with pytest.raises(TypeError, match="module_class="):
        declare_weights(Own(3, 4), weight="m n")
    with pytest.raises(ValueError, match="module_class=Linear is a layer"):
        declare_weights(nn.Linear, weight="m n")
    with pytest.raises(ValueError, match="weights: none of Own"):
        declare_weights(Own)
    with pytest.raises(TypeError, match="weight=3 must be a text"):
        declare_weights(Own, weight=3)


def test_a_declaration_that_does_not_fit_the_module_is_refused_where_the_model_is_read():
    class Misnamed(Own):
        pass

    class Flat(Own):
        pass

    class Odd(Own):
        pass

    declare_weights(Misnamed, wieght="e m n")
    declare_weights(Flat, weight="e m n")
    declare_weights(Odd, weight="e (f m) n")
    with pytest.raises(ValueError, match="Misnamed has no parameter 'wieght'"):
        Muon(Misnamed(3, 4, 6))
    with pytest.raises(ValueError, match=r"Flat.weight of shape \(12, 6\): the text has 3"):
        Muon(Flat(12, 6))
    with pytest.raises(ValueError, match=r"Odd.weight of shape \(3, 5, 6\).* f is 2"):
        Muon(Odd(3, 5, 6))


# ---- the warning ---------------------------------------------------------------------------------


class Undeclared(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(3, 4, 6))
        self.w1_bias = nn.Parameter(torch.randn(3, 1, 4))


class UndeclaredExperts(Undeclared):
    pass


@pytest.mark.parametrize("make", [Muon, SOAP])
def test_experts_of_an_unknown_class_are_listed_once(make):
    blocks = nn.ModuleList(nn.ModuleDict({"moe": UndeclaredExperts()}) for _ in range(3))
    for model, listed in (
        (nn.ModuleDict({"h": blocks}), r"h\.\*\.moe\.w1 \(3, 4, 6\) by AdamW"),
        (nn.ModuleDict({"experts": Undeclared()}), r"experts\.w1 \(3, 4, 6\) by AdamW"),
    ):
        with pytest.warns(UserWarning, match=f"{make.__name__} steps {listed}") as said:
            make(model)
        assert len(said) == 1
        assert "declare_weights(Undeclared" in str(said[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(model.requires_grad_(False))


class VisionExpert(nn.Module):
    """A transformer that is one of several: vectors that stand in three dimensions."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 6))
        self.pos_embed = nn.Parameter(torch.randn(1, 7, 6))
        self.prompts = nn.Parameter(torch.randn(3, 2, 6))
        self.gamma = nn.Parameter(torch.randn(1, 1, 6))
        self.linear = nn.Linear(6, 6)


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.probe = nn.Parameter(torch.randn(2, 3, 6))


def test_vectors_in_three_dimensions_are_not_listed():
    model = nn.ModuleDict(
        {
            "experts": nn.ModuleList([VisionExpert(), Pooling()]),
            "prompt_experts": nn.ParameterDict({"prompt": torch.randn(3, 2, 6)}),
            "pool": Pooling(),
            "expertise": Pooling(),
            "structured": convert(nn.ModuleDict({"experts": nn.Linear(64, 64)}), BTT()),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon(model)
