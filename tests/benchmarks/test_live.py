"""Readings of a live model: exact values, hooks, modes, bad input."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness.live import watch
from structlin import BTT, TT, LowRank, StructuredLinear, convert
from structlin.optim import Muon
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


def test_a_layer_with_an_activation_between_its_cores_is_no_linear_map():
    model = nn.Sequential(StructuredLinear(16, 16, BTT().activate()), nn.Linear(16, 16))
    log = read(model, torch.randn(8, 16))
    assert row(log, "0").dependency is None
    assert row(log, "0").forward > 0
    assert row(log, "1").dependency > 0
