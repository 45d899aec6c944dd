"""`recipe`: what starts at zero, what is left, what is refused; against a Transformer by hand."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structlin import BTT, TT, BlockDiagonal, Monarch, StructuredLinear, param_groups, recipe
from tests.models import GPT, snapshot

ENDS = {"attn.o_proj", "mlp.down_proj"}


class Block(nn.Module):
    """One block with separate queries, keys and values, and a head; tokens are features."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({f"{name}_proj": nn.Linear(width, width) for name in "qkvo"})
        self.mlp = nn.ModuleDict(
            {"up_proj": nn.Linear(width, 4 * width), "down_proj": nn.Linear(4 * width, width)}
        )
        self.lm_head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width) -> (batch, tokens, classes)
        q, k, v = (self.attn[f"{name}_proj"](x) for name in "qkv")
        x = x + self.attn["o_proj"](F.scaled_dot_product_attention(q, k, v))
        return self.lm_head(x + self.mlp["down_proj"](F.gelu(self.mlp["up_proj"](x))))


def is_zero(layer: nn.Module, x: Tensor) -> bool:
    return bool((layer(x) == 0).all())


def zero_layers(model: nn.Module) -> set[str]:
    kinds = (nn.Linear, StructuredLinear)
    return {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, kinds) and is_zero(layer, torch.randn(3, layer.in_features))
    }


# ---- what it does --------------------------------------------------------------------------------


def test_head_queries_and_ends_of_branches_start_at_zero_and_cores_are_normalised():
    model = recipe(Block(), BTT(rank=2)).apply()
    assert zero_layers(model) == {"lm_head", "attn.q_proj", *ENDS}
    layers = [layer for layer in model.modules() if isinstance(layer, StructuredLinear)]
    assert len(layers) == 6
    assert all(layer.gains is not None for layer in layers)
    assert model.attn["q_proj"].cores[0].abs().min() > 0
    assert model.attn["q_proj"].zero_init


def test_every_parameter_moves_within_four_steps():
    """The head first, then the ends of branches, then the queries, then what those hide."""
    model = recipe(Block(), BTT(rank=2)).apply()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, target = torch.randn(4, 6, 16), torch.randint(5, (24,))
    optimizer = torch.optim.AdamW(param_groups(model, 1e-2))
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), target).backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert set(before) - moved <= {"attn.k_proj.bias"}  # which softmax does not see


def test_layers_that_stay_dense_start_at_zero_too_and_others_stay_as_they_were():
    model = Block()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    recipe(model, BTT(), include="mlp.up_proj").apply()
    assert zero_layers(model) == {"lm_head", "attn.q_proj", *ENDS}
    for name in ("attn.k_proj", "attn.v_proj"):
        assert torch.equal(model.get_submodule(name).weight, before[f"{name}.weight"])
    assert torch.equal(model.mlp["up_proj"].bias, before["mlp.up_proj.bias"])


def test_a_converted_head_starts_at_zero():
    model = recipe(Block(classes=16), BTT(), overrides={"lm_head": BTT(rank=2)}).apply()
    assert isinstance(model.lm_head, StructuredLinear)
    assert "lm_head" in zero_layers(model)


def test_hooks_on_a_layer_that_stays_dense_are_no_obstacle():
    model, seen = Block(), []
    model.lm_head.register_forward_hook(lambda *call: seen.append(call))
    recipe(model, BTT()).apply()
    assert "lm_head" in zero_layers(model)
    assert seen


def test_patterns_name_the_layers_and_none_leaves_them():
    options = {"head": (), "queries": "attn.k_proj", "branches": ["mlp.up_proj"]}
    assert zero_layers(recipe(Block(), BTT(), **options).apply()) == {"attn.k_proj", "mlp.up_proj"}


def test_of_a_head_of_several_layers_only_the_last_starts_at_zero():
    model = Block()
    model.lm_head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))
    recipe(model, BTT()).apply()
    assert {name for name in zero_layers(model) if "head" in name} == {"lm_head.2"}


def test_printing_shows_the_plan_and_the_steps_and_changes_nothing():
    model = Block()
    before = snapshot(model)
    text = str(recipe(model, BTT()))
    assert snapshot(model) == before
    for part in ("BTT(rank=1)", "attn.q_proj", "W_Q", "weight normalisation", "E.2", "QK-norm"):
        assert part in text


# ---- what it leaves ------------------------------------------------------------------------------


def test_fused_queries_keys_and_values_are_left_and_said_so():
    planned = recipe(GPT(), BTT(), include="ffn")
    (left,) = (step for step in planned.steps if step.what == "left as it is")
    assert left.names == ("h.0.attn.c_attn", "h.1.attn.c_attn")
    assert "h.*.attn.c_attn" in str(planned)
    assert not {name for name in zero_layers(planned.apply()) if "c_attn" in name}


@pytest.mark.parametrize("family", [BTT(rank=2), BlockDiagonal(blocks=4), TT(rank=2)])
def test_the_queries_of_a_fused_layer_start_at_zero_where_they_have_cores_of_their_own(family):
    torch.manual_seed(0)
    model = GPT()
    for block in model.h:
        nn.init.ones_(block.attn.c_attn.bias)
    planned = recipe(model, family, split={"*c_attn": 3})
    assert not [step for step in planned.steps if step.what == "left as it is"]
    assert "a third starts at zero" in str(planned)
    for block in planned.apply().h:
        q, k, v = block.attn.c_attn(torch.randn(4, 64)).chunk(3, dim=-1)
        assert (q == 0).all()
        assert (k != 0).all()
        assert (v != 0).all()
    optimizer = torch.optim.AdamW(param_groups(model, 1e-2))
    tokens = torch.randint(50, (4, 9))
    for _ in range(4):  # they learn: the head first, then the ends of branches, then the queries
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    for block in model.h:
        q = block.attn.c_attn(torch.randn(4, 64)).chunk(3, dim=-1)[0]
        assert (q != 0).all()


def test_a_fused_layer_whose_heads_take_turns_is_left_and_the_plan_says_why():
    model = Block()
    model.attn = nn.ModuleDict({"query_key_value": nn.Linear(16, 48), "o_proj": nn.Linear(16, 16)})
    planned = recipe(model, BTT(), split={"*query_key_value": 3})
    assert "queries, keys and values take turns for each head" in str(planned)
    layer = planned.apply().attn["query_key_value"]
    assert (layer(torch.randn(4, 16)) != 0).all()


def test_torchs_own_attention_is_left_but_for_its_last_layer():
    layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in_proj_weight stays dense
        recipe(layer, BTT(), head=()).apply()
    assert zero_layers(layer) == {"self_attn.out_proj", "linear2"}
    assert layer.self_attn.in_proj_weight.abs().min() > 0


def test_a_head_that_is_an_embedding_is_left_unless_it_is_untied():
    model = GPT(tied=True)
    planned = recipe(model, BTT(), include="ffn")
    assert "lm_head" in [name for step in planned.steps[:2] for name in step.names]
    planned.apply()
    assert model.wte.weight.abs().max() > 0
    model = GPT(vocabulary=64, tied=True)
    recipe(model, BTT(), include=["ffn"], overrides={"lm_head": BTT()}, untie=True).apply()
    assert "lm_head" in zero_layers(model)
    assert model.wte.weight.abs().max() > 0


@pytest.mark.parametrize("name", ["q_norm", "key_layernorm", "ln_q", "qk_norm"])
def test_qk_norm_is_found_where_the_model_has_it(name):
    def find(module):
        model = Block()
        model.attn[name] = module
        steps = recipe(model, BTT()).steps
        return next(step.names for step in steps if step.what == "QK-norm")

    assert find(nn.LayerNorm(4)) == (f"attn.{name}",)
    assert find(nn.Identity()) == ()


# ---- bad input -----------------------------------------------------------------------------------


def drop(*names):
    model = Block()
    for name in names:
        parent, _, child = name.rpartition(".")
        del model.get_submodule(parent)._modules[child]
    return model


@pytest.mark.parametrize(
    ("model", "options", "part"),
    [
        (drop("lm_head"), {}, "Block has no layer with the role 'head': name it by head="),
        (drop("attn.q_proj"), {}, "no layer of attention that is named like a query projection"),
        (
            drop("attn.o_proj", "mlp.down_proj"),
            {},
            "like the last one of a residual branch (o_proj",
        ),
        (Block(), {"queries": "attn.query"}, "queries: 'attn.query' matches no linear layer"),
        (Block(), {"init": "project"}, "a recipe is for training from scratch"),
        (Block().to("meta"), {}, "'lm_head' cannot start at zero: it is on the meta device"),
        (GPT(tied=True), {"branches": "lm_head"}, "it shares its weight with wte"),
        (Block(), {"include": "none"}, "include: 'none' matches no linear layer"),
    ],
)
def test_what_the_model_lacks_is_named_and_nothing_is_changed(model, options, part):
    before = [id(module) for module in model.modules()]
    with pytest.raises(ValueError, match=re.escape(part)):
        recipe(model, BTT(), **options)
    assert [id(module) for module in model.modules()] == before


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="includes"):
        recipe(Block(), BTT(), includes="mlp")


def test_a_model_that_has_changed_since_is_refused_before_anything_is_zero():
    model = Block()
    planned = recipe(model, BTT(), include="mlp.up_proj")
    model.lm_head = nn.Linear(16, 5)
    before = snapshot(model)
    with pytest.raises(ValueError, match="layer 'lm_head' was replaced after this plan"):
        planned.apply()
    assert snapshot(model) == before


def test_btt_in_a_transformer_without_weight_normalisation_is_warned_of():
    with pytest.warns(UserWarning, match="weight_norm=False: a Transformer with BTT layers"):
        recipe(Block(), BTT(), weight_norm=False)
    recipe(Block(), Monarch(blocks=4), weight_norm=False)  # warnings are errors
    mlp = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    recipe(mlp, BTT(), weight_norm=False, head="1", queries=(), branches="0", include="0")
