"""examples/train_mlp_lm.py at tiny sizes, and what its table says about seconds."""

import argparse
import doctest
import json

import pytest
import torch

pytest.importorskip("matplotlib")

import compare
import train_mlp_lm

SMOKE = ["--smoke", "--device", "cpu"]


def test_the_structured_models_are_as_wide_as_dense_and_as_wide_as_its_flops_allow(text, tmp_path):
    options = [*SMOKE, "--data", str(text), "--out", str(tmp_path)]
    rows = train_mlp_lm.main([*options, "--json", str(tmp_path / "kept.json")])
    assert [row["run"] for row in rows] == ["dense", "dense_wide", "structured", "structured_wide"]
    dense, dense_wide, structured, widest = rows
    letters = len(set(text.read_text(encoding="utf-8")))
    for row in (dense, dense_wide):
        width = row["width"]
        assert row["flops"] == 2 * width * (8 * train_mlp_lm.EMBEDDING + width + letters)
    assert structured["width"] == dense_wide["width"] == 2 * dense["width"]
    assert structured["flops"] < dense_wide["flops"]
    assert widest["width"] > structured["width"]
    assert widest["flops"] <= dense["flops"]
    assert json.loads((tmp_path / "kept.json").read_text())["rows"] == rows
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_engine_is_built_before_any_step_is_timed(text, monkeypatch):
    done = []

    def train_all(*_):
        done.append("train")
        raise KeyboardInterrupt

    monkeypatch.setattr(compare.structlin, "show_config", lambda: done.append("build"))
    monkeypatch.setattr(compare, "train_all", train_all)
    with pytest.raises(SystemExit, match="interrupted"):
        train_mlp_lm.main([*SMOKE, "--data", str(text)])
    assert done == ["build", "train"]


def test_all_models_learn_a_text(text):
    rows = train_mlp_lm.main([*SMOKE, "--data", str(text), "--steps", "60", "--batch", "32"])
    assert all(row["bits/char"] < 1.5 for row in rows)  # log2(28 characters) is 4.8


def test_a_target_is_the_character_after_its_window_and_none_is_seen_in_training(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_text("".join(chr(0x4E00 + n) for n in range(500)))  # every character once
    options = argparse.Namespace(data=path, context=8, batch=64, seed=0, steps=1, depth=1)
    task = train_mlp_lm.NextCharacter(options)
    inputs, targets = task.batch(0)
    assert torch.equal(inputs[:, -1] + 1, targets)
    assert torch.equal(inputs, targets[:, None] - torch.arange(8, 0, -1))
    heldout = torch.cat([torch.cat([x.flatten(), y]) for x, y in task.heldout])
    assert heldout.min() > task.train.max()
    assert heldout.max() == 499
    assert {int(y) for _, targets in task.heldout for y in targets} == set(range(458, 500))


def test_seconds_until_a_loss_are_linear_between_evaluations():
    assert doctest.testmod(compare).attempted
    row = {"curve": [[1, 3.0], [2, 2.0], [3, 2.5], [4, 1.0]], "clock": [1.0, 2.0, 3.0, 5.0]}
    losses = (3.5, 3.0, 2.25, 2.0, 1.75, 0.9)
    assert [compare.seconds_until(row, loss) for loss in losses] == [1, 1, 1.75, 2, 4, None]


def test_runs_take_turns_and_the_seconds_are_those_of_their_steps(text, tmp_path, monkeypatch):
    order = []
    train = compare.train

    def recorded(task, run, *rest):
        for history in train(task, run, *rest):
            order.append(run.name)
            yield history

    monkeypatch.setattr(compare, "train", recorded)
    monkeypatch.setattr(compare, "TURN", 2)
    options = [*SMOKE, "--data", str(text), "--steps", "5", "--out", str(tmp_path)]
    rows = train_mlp_lm.main(options)
    names = [row["run"] for row in rows]
    assert order == [name for turn in (2, 2, 1) for name in names for _ in range(turn)]
    for row in rows:
        state = torch.load(tmp_path / f"{row['run']}.pt", weights_only=True)
        times = state["history"]["times"]
        assert row["seconds"] == round(sum(times), 1)
        assert row["ms"] == pytest.approx(1e3 * sorted(times)[2], abs=0.01)
        assert row["clock"][-1] == pytest.approx(5 * sorted(times)[2], abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "9999"], "--context 9999 needs at least"),
        (["--heads", "4"], "unrecognized arguments: --heads 4"),
    ],
)
def test_what_does_not_fit_is_refused_with_one_message(text, capsys, arguments, message):
    with pytest.raises(SystemExit):
        train_mlp_lm.main([*SMOKE, "--data", str(text), *arguments])
    assert message in capsys.readouterr().err
