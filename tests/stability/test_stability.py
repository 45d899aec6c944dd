"""Coordinate check and readings of a live model: exact values, hooks, modes, files, bad input."""

import copy
import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import structlin
from structlin import BTT, TT, LowRank, StructuredLinear, convert
from structlin.optim import Muon
from structlin.stability import coordinate_check, watch
from tests.models import GPT


def row(log, layer, step=0):
    (found,) = [row for row in log.rows if row.layer == layer and row.step == step]
    return found


def diagonal(*values):
    layer = nn.Linear(len(values), len(values), bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(values).diag())
    return layer


def operator_norm(matrix):
    """RMS->RMS, in float64."""
    rows, columns = matrix.shape
    return math.sqrt(columns / rows) * torch.linalg.matrix_norm(matrix.double(), 2).item()


def hooks(model):
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks, *module._forward_pre_hooks)
    ]


def read(model, batch):
    """One reading, as the model is."""
    with watch(model) as log:
        model(batch)
    return log


# ---- the numbers ---------------------------------------------------------------------------------


def test_a_hand_made_layer_has_the_numbers_of_its_definition():
    model = nn.Sequential(diagonal(3.0, 4.0), nn.Identity(), diagonal(0.5, 0.0))
    log = read(model, torch.tensor([[1.0, 1.0]], dtype=torch.float64))
    first, last = row(log, "0"), row(log, "2")
    assert first.rms == pytest.approx(math.sqrt((9 + 16) / 2))
    assert first.forward == pytest.approx(math.sqrt((9 + 16) / 2))  # RMS of the input is 1
    assert (first.dependency, first.update) == (pytest.approx(4), None)
    assert last.forward == pytest.approx(1.5 / 5)  # (1.5, 0) from (3, 4)
    assert last.dependency == pytest.approx(0.5)
    # the identity and the container make nothing new
    assert [each.layer for each in log.rows] == ["0", "2"]


@pytest.mark.parametrize("structure", [BTT(rank=2), TT(rank=2), LowRank(rank=3)], ids=str)
@pytest.mark.parametrize("widths", [(20, 36), (101, 24)])
@pytest.mark.parametrize("weight_norm", [False, True])
def test_the_dependency_of_a_structured_layer_is_the_norm_of_its_matrix(
    structure, widths, weight_norm
):
    layer = StructuredLinear(*widths, structure, weight_norm=weight_norm, dtype=torch.float64)
    with torch.no_grad():
        layer.cores[0].mul_(
            torch.linspace(0.2, 2, layer.cores[0].numel()).reshape_as(layer.cores[0])
        )
    before = copy.deepcopy(layer)
    with watch(layer) as log:
        layer(torch.randn(5, widths[0], dtype=torch.float64))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    found = row(log, "StructuredLinear")
    assert found.dependency == pytest.approx(operator_norm(before.to_dense()), rel=1e-3)
    change = layer.to_dense() - before.to_dense()
    assert found.update == pytest.approx(operator_norm(change), rel=1e-3)


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_a_wrapped_model_has_the_layers_of_the_plain_one(wrap):
    model = convert(GPT(width=16, depth=1), BTT(), include="ffn")
    tokens = torch.arange(8)[None]
    plain = {found.layer: found.dependency for found in read(model, tokens).rows}
    model.h[0].mlp = wrap(model.h[0].mlp)
    assert {found.layer: found.dependency for found in read(model, tokens).rows} == plain


def test_a_weight_that_is_no_parameter_is_measured_as_what_the_layer_multiplies_by():
    layer = nn.utils.parametrizations.spectral_norm(
        diagonal(3.0, 4.0), n_power_iterations=50
    ).eval()
    x = torch.ones(1, 2, dtype=torch.float64)
    assert row(read(layer, x), "ParametrizedLinear").dependency == pytest.approx(1, rel=1e-3)
    layer = nn.utils.parametrizations.weight_norm(diagonal(3.0, 4.0))
    assert row(read(layer, x), "ParametrizedLinear").dependency == pytest.approx(4)


def test_the_norm_of_a_wide_gaussian_matrix_is_right_though_its_singular_values_are_close():
    layer = nn.Linear(512, 384, bias=False)
    exact = operator_norm(layer.weight)
    found = row(read(layer, torch.randn(2, 512)), "Linear").dependency
    assert 0.997 * exact <= found <= (1 + 1e-5) * exact


def test_a_convolution_is_measured_as_the_linear_map_that_it_is_on_the_image():
    conv = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
    image = torch.randn(4, 2, 5, 6, dtype=torch.float64)
    columns = torch.eye(2 * 5 * 6, dtype=torch.float64).reshape(-1, 2, 5, 6)
    matrix = F.conv2d(columns, conv.weight, padding=1).flatten(1)
    exact = math.sqrt(2 / 3) * torch.linalg.matrix_norm(matrix, 2).item()
    assert row(read(conv, image), "Conv2d").dependency == pytest.approx(exact, rel=1e-3)


def test_an_embedding_is_measured_by_its_largest_vector():
    model = nn.Embedding(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0], [3.0, 4.0], [0.0, 0.0]]))
    with watch(model) as log:
        model(torch.tensor([0, 0]))
        with torch.no_grad():
            model.weight[2] += 2
    found = row(log, "Embedding")
    assert (found.rms, found.forward) == (1, 1)
    assert (found.dependency, found.update) == (pytest.approx(math.sqrt(12.5)), 2)


def test_all_matrices_of_a_torch_encoder_are_measured():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    log = read(model, torch.randn(2, 5, 16))
    assert {found.layer for found in log.rows if found.dependency} == {
        "self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2"
    }  # fmt: skip
    exact = operator_norm(model.self_attn.in_proj_weight)
    assert row(log, "self_attn.in_proj").dependency == pytest.approx(exact, rel=1e-3)


def test_a_diverged_layer_reads_nan_and_raises_nothing():
    layer = diagonal(1.0, math.inf)
    found = row(read(layer, torch.ones(1, 2, dtype=torch.float64)), "Linear")
    assert math.isnan(found.dependency)


def test_bfloat16_weights_under_autocast_are_measured_in_float32():
    layer = nn.Linear(8, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = row(read(layer, torch.randn(2, 8, dtype=torch.bfloat16)), "Linear")
    assert found.dependency == pytest.approx(operator_norm(layer.weight), rel=1e-4)


# ---- watch ---------------------------------------------------------------------------------------


def train(model, steps, inputs=4, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, inputs)).square().mean().backward()
        optimizer.step()


def test_the_update_is_that_of_the_one_step_after_the_reading():
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    changes = []
    with watch(model, every=3) as log:
        for _ in range(7):
            before = model.weight.detach().clone()
            model(torch.randn(8, 3, dtype=torch.float64)).sum()
            with torch.no_grad():
                model(torch.randn(8, 3, dtype=torch.float64))  # evaluation is no step
                model.weight += torch.randn(2, 3, dtype=torch.float64)
            changes.append(operator_norm(model.weight - before))
    assert [row.step for row in log.rows] == [0, 3, 6]
    assert [row.update for row in log.rows] == pytest.approx([changes[0], changes[3], changes[6]])


def test_a_reading_waits_for_the_step_while_gradients_accumulate():
    model = nn.Linear(4, 4, bias=False)
    with watch(model, every=1) as log:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(8, 4))
            with torch.no_grad():
                model.weight += 1
    assert [row.step for row in log.rows] == [0, 2, 4]
    assert [row.update for row in log.rows] == pytest.approx([4, 4, 4])  # all ones, 4 x 4


def test_watching_changes_nothing_in_training():
    def trained(watched):
        torch.manual_seed(0)
        model = convert(GPT(width=16, depth=1), BTT(), include="attention")
        model.h[0].mlp.c_fc = nn.Sequential(model.h[0].mlp.c_fc, nn.Dropout(0.5))
        optimizer = Muon(model)

        def steps():
            for _ in range(4):
                tokens = torch.randint(50, (2, 9))
                optimizer.zero_grad()
                F.cross_entropy(
                    model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
                ).backward()
                optimizer.step()

        if watched:
            with watch(model, every=2) as log:
                steps()
            assert {row.step for row in log.rows} == {0, 2}
            assert all(row.update > 0 for row in log.rows if row.dependency)
            assert not hooks(model)
        else:
            steps()
        return model.state_dict()

    plain, watched = trained(False), trained(True)
    assert all(torch.equal(value, watched[name]) for name, value in plain.items())


def test_the_hooks_are_gone_after_an_exception_in_the_model():
    class Failing(nn.Linear):
        def forward(self, x):
            raise ArithmeticError("of the model")

    model = nn.Sequential(nn.Linear(4, 4), Failing(4, 4))
    with pytest.raises(ArithmeticError, match="of the model"), watch(model):
        model(torch.randn(2, 4))
    assert not hooks(model)


def test_training_goes_on_after_an_error_that_the_loop_catches():
    model = nn.Sequential(nn.Linear(4, 4))
    with watch(model, every=1) as log:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(2, 5))
        train(model, 2)
    assert not hooks(model)
    assert [row.step for row in log.rows] == [1, 2]


def test_growth_is_the_last_rms_over_the_first():
    model = nn.Linear(2, 2, bias=False)
    with watch(model, every=1) as log:
        for factor in (2.0, 3.0, 1.0):
            model(torch.ones(1, 2))
            with torch.no_grad():
                model.weight *= factor
    assert log.growth == {"Linear": pytest.approx(6)}
    assert "6.0000" in str(log) == str(log.table())
    assert str(log).splitlines()[0].split() == [
        "layer", "step", "RMS", "x", "first", "forward", "dependency", "update"
    ]  # fmt: skip


def test_a_compiled_model_is_read_and_not_compiled_anew():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    with watch(compiled, every=2) as log:
        train(compiled, 5)
    assert len(graphs) == 1
    assert [(row.layer, row.step) for row in log.rows] == [
        (name, step) for step in (0, 2, 4) for name in "012"
    ]
    train(compiled, 1)
    assert len(graphs) == 1
    model.compile(backend=backend)
    with pytest.raises(ValueError, match=r"compiled by model.compile\(\)"), watch(model):
        pass


def test_watch_says_when_it_saw_nothing():
    with pytest.warns(UserWarning, match="no forward pass"), watch(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: watch("model").__enter__(), TypeError, "model='model' must be a torch.nn.Module"),
        (
            lambda: watch(nn.Linear(2, 2, device="meta")).__enter__(),
            ValueError,
            "weight is on meta",
        ),
        (
            lambda: watch(nn.Linear(2, 2), every=0).__enter__(),
            ValueError,
            "every=0 must be",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- coordinate_check ----------------------------------------------------------------------------


class Powers(nn.Module):
    """A linear network whose outputs are width^p, and whose weights a step of SGD at lr 1 moves by
    width^q."""

    def __init__(self, width, p, q):
        super().__init__()
        self.layer = nn.Linear(1, width, bias=False)
        nn.init.constant_(self.layer.weight, width**p)
        self.moved = width**q


def moved(model, batch):
    return model.moved * model.layer(batch).sum()


def check_powers(p, q, widths, steps):
    return coordinate_check(
        lambda width: Powers(width, p, q),
        widths,
        [torch.ones(1, 1)],
        loss=moved,
        optimizer=lambda model, width: torch.optim.SGD(model.parameters(), lr=1.0),
        steps=steps,
        seeds=[0],
    )


def test_slopes_are_exact_on_a_network_of_known_powers():
    check = check_powers(0.25, -0.5, [4, 16, 64], steps=2)
    sizes = {(row.width, row.step): row for row in check.rows}
    assert sizes[16, 0].output == pytest.approx(2)
    assert sizes[16, 0].change == 0
    assert sizes[16, 1].output == pytest.approx(2 - 0.25)
    assert sizes[16, 2].change == pytest.approx(0.5)  # two steps of 16^-0.5
    slopes = {(slope.quantity, slope.step): slope.slope for slope in check.slopes}
    assert slopes["output", 0] == pytest.approx(0.25, abs=1e-5)
    assert slopes["change", 1] == pytest.approx(-0.5, abs=1e-5)
    assert slopes["change", 2] == pytest.approx(-0.5, abs=1e-5)
    assert {(slope.layer, slope.quantity) for slope in check.not_flat} == {
        ("layer", "output"),
        ("layer", "change"),
    }


def mlp(width):
    model = nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )
    nn.init.zeros_(model[4].weight)
    nn.init.zeros_(model[4].bias)
    return model


def digit_like():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 16, generator=generator)
    return x, (x[:, :4] + x[:, 4:8]).argmax(dim=1)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_layer_with_an_activation_between_its_cores_is_no_linear_map():
    model = nn.Sequential(StructuredLinear(16, 16, BTT().activate()), nn.Linear(16, 16))
    log = read(model, torch.randn(8, 16))
    assert row(log, "0").dependency is None
    assert row(log, "0").forward > 0
    assert row(log, "1").dependency > 0


@pytest.mark.parametrize("structure", [None, BTT(), BTT().activate()], ids=str)
def test_one_rate_for_all_widths_is_found_and_the_rule_of_param_groups_is_flat(structure):
    def build(width):
        return (
            mlp(width) if structure is None else convert(mlp(width), structure, exclude=["0", "4"])
        )

    def naive(model, width):
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    def aware(model, width):
        return torch.optim.Adam(structlin.param_groups(model, lr=1e-2, base={width: 64}))

    options = {"loss": cross_entropy, "seeds": [0, 1]}
    wrong = coordinate_check(build, [64, 256, 1024], [digit_like()], optimizer=naive, **options)
    right = coordinate_check(build, [64, 256, 1024], [digit_like()], optimizer=aware, **options)
    grown = {slope.layer: slope.slope for slope in wrong.not_flat if slope.quantity == "change"}
    assert {"2", "4"} <= set(grown)
    assert grown["4"] > 0.5
    assert "0" not in grown
    assert right.not_flat == []
    assert str(right).endswith("all layers are flat (slopes within 0.2)")
    assert str(wrong).splitlines()[-1].startswith("not flat: ")
    assert str(wrong).count("NOT FLAT") == len(wrong.not_flat)
    sizes = {(row.layer, row.width, row.step): row for row in wrong.rows}
    for slope, line in zip(wrong.steepest, str(wrong.table()).splitlines()[2:], strict=True):
        printed = [float(cell) for cell in line.split()[2:5]]
        named = [sizes[slope.layer, width, slope.step] for width in wrong.widths]
        own = [getattr(row, slope.quantity) for row in named]
        assert printed == pytest.approx(own, rel=2e-3)


def test_the_coordinate_check_takes_the_duality_based_optimizer_and_plots():
    check = coordinate_check(
        mlp,
        [32, 128],
        [digit_like()],
        loss=cross_entropy,
        optimizer=lambda model, width: Muon(model, lr=0.1),
        steps=1,
    )
    assert check.widths == [32, 128]
    lines = [line for axis in check.plot().axes for line in axis.lines]
    assert all(list(line.get_xdata()) == [32, 128] for line in lines)
    assert len(lines) == 2 * len({row.layer for row in check.rows})


def test_the_same_seeds_give_the_same_check_and_the_users_random_numbers_go_on():
    def check():
        return coordinate_check(
            lambda width: nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1)),
            [4, 8],
            [torch.ones(3, 4)],
            loss=lambda model, x: model(x).sum(),
            optimizer=lambda model, width: torch.optim.SGD(model[2].parameters(), lr=0.1),
        )

    state = torch.get_rng_state()
    first = check()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert check() == first
    assert any(row.change > 0 for row in first.rows if row.layer == "2")
    # the same dropout each time
    assert all(row.change == 0 for row in first.rows if row.layer == "1")


def test_an_activation_that_is_not_finite_is_not_flat():
    check = check_powers(0.0, 50.0, [4, 1024], steps=1)
    assert [slope.layer for slope in check.not_flat] == ["layer", "layer"]
    assert all(math.isnan(slope.slope) for slope in check.not_flat)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"widths": [64]}, ValueError, r"widths=\[64\]: a slope needs two"),
        ({"widths": [64, -1]}, ValueError, r"widths\[1\]=-1 must be at least 1"),
        ({"batches": []}, ValueError, "batches=0"),
        ({"steps": 0}, ValueError, "steps=0"),
        ({"tolerance": 0}, ValueError, "tolerance=0 must be positive"),
        ({"widths": [2.5, 4]}, TypeError, r"widths\[0\]=2.5 must be an integer"),
        ({"build": lambda width: width}, TypeError, r"build\(2\) returned int, not a torch.nn.Mod"),
        ({"optimizer": lambda *_: None}, TypeError, r"optimizer\(model, 2\) returned NoneType"),
        ({"loss": lambda model, x: model(x)}, TypeError, r"returned Tensor of shape \(3, 2\)"),
        (
            {"optimizer": lambda *_: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
            ValueError,
            r"optimizer\(model, 2\): no output of the model changed in 3 steps",
        ),
        (
            {"build": lambda width: nn.Sequential(*[nn.Linear(2, 2) for _ in range(width)])},
            ValueError,
            "the model of width 4 has '2', that of 2 has none",
        ),
        (
            {"build": cache(lambda width: nn.Linear(2, 4))},
            ValueError,
            r"build\(2\) returned a model that it had returned before",
        ),
    ],
)
def test_a_bad_coordinate_check_is_named(changed, error, message):
    options = {
        "build": lambda width: nn.Linear(2, width),
        "widths": [2, 4],
        "batches": [torch.ones(3, 2)],
        "loss": lambda model, batch: model(batch).sum(),
        "optimizer": lambda model, width: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    with pytest.raises(error, match=message):
        coordinate_check(**options | changed)
