"""examples/plan_large.py: what it counts, and that nothing is loaded."""

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import plan_large


def test_seven_billion_parameters_are_planned_without_their_values(capsys):
    model = plan_large.build(None, smoke=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    planned = plan_large.plan(model, 0.5)
    chosen = [each for each in planned.decisions if each.resolved is not None]
    assert len(chosen) == 32 * 7
    dense = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    kept = sum(each.resolved.params for each in chosen)
    assert 0.49 * dense < kept <= 0.5 * dense


def test_the_program_prints_sizes_and_minutes(capsys):
    found = plan_large.main(["--smoke", "--keep", "0.5", "--layers"])
    shown = capsys.readouterr().out
    assert found.dense == 2 * (4 * 64**2 + 3 * 64 * 128)
    assert 0.4 * found.dense < found.kept <= 0.5 * found.dense
    assert "model.layers.1.mlp.down_proj" in shown
    assert "minutes" in shown


def test_twice_the_tokens_take_twice_the_passes_and_the_same_projections(monkeypatch):
    monkeypatch.setattr(plan_large, "measure_rate", lambda: 1e9)
    monkeypatch.setattr(plan_large, "time_layer", lambda: 1e-3)
    model = plan_large.build(None, smoke=True)
    planned = plan_large.plan(model, 0.5)
    one, two, many = (plan_large.estimate(model, planned, tokens) for tokens in (1000, 2000, 2**20))
    assert two.passes == pytest.approx(2 * one.passes)
    assert two.projections == one.projections
    assert many.passes < 2**20 / 1000 * one.passes  # gradients are of a few batches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "0"], "'0' is not a fraction"),
        (["--model", "nowhere"], "nowhere: no such folder"),
        (["--tokens", "0"], "'0' is not a positive integer"),
    ],
)
def test_bad_arguments_are_refused_with_one_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        plan_large.main(["--smoke", *arguments])
    assert message in capsys.readouterr().err
