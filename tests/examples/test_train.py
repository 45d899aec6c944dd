"""The two training examples at tiny sizes: what they train, keep and say."""

import json
from itertools import groupby

import pytest
import torch

pytest.importorskip("matplotlib")

import train_gpt
import train_mlp_lm

import structlin
from tests.test_widen import count_btt

PROGRAMS = pytest.mark.parametrize(
    "program", [train_gpt, train_mlp_lm], ids=lambda program: program.__name__
)

OPTIMIZERS = {
    train_gpt: ["AdamW", "AdamW", "SOAP", "SOAP"],
    train_mlp_lm: ["AdamW"] * 4,
}


@PROGRAMS
def test_a_program_leaves_a_table_a_plot_and_results(program, tmp_path, capsys):
    rows = program.main(["--smoke", "--out", str(tmp_path)])
    narrow, wide = rows[0], rows[-1]
    assert narrow["label"] == "dense"
    assert wide["label"].startswith("BTT(rank=")
    assert narrow["width"] <= wide["width"]
    assert [row["optimizer"] for row in rows] == OPTIMIZERS[program]
    shown = capsys.readouterr().out
    assert all(f"{row['params']:,}" in shown for row in rows)
    assert all(f"{row['loss']:.4f}" in shown for row in rows)
    assert shown.count(" step ") == sum(len(row["curve"]) for row in rows)
    kept = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["loss"] for row in kept] == [row["loss"] for row in rows]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_gpts_learn_a_text(text, tmp_path):
    options = ["--smoke", "--data", str(text), "--out", str(tmp_path)]
    rows = train_gpt.main([*options, "--batch", "32", "--budget", "2e10"])
    assert all(row["loss"] < 1.0 for row in rows)  # log(30 characters) is 3.4


def test_the_mlps_learn_a_text(text, tmp_path):
    options = ["--smoke", "--data", str(text), "--out", str(tmp_path)]
    rates = ["--lr", "0.01", "--other_lr", "0.01"]
    rows = train_mlp_lm.main([*options, "--steps", "60", "--batch", "32", *rates])
    assert all(row["loss"] < 1.0 for row in rows)


def test_every_gpt_trains_for_the_flops_of_the_budget(text, tmp_path):
    budget = 1e9
    options = ["--smoke", "--data", str(text), "--budget", str(budget), "--out", str(tmp_path)]
    rows = train_gpt.main(options)
    batch, context, vocabulary = 2, 16, len(set(text.read_text(encoding="utf-8")))

    def btt(d_in, d_out):
        return 2 * 4 * count_btt(d_in, d_out)

    def forward_flops(row):  # of a token
        d = row["width"]
        linear = 2 * 12 * d * d
        if row["label"] != "dense":
            linear = btt(d, 3 * d) + btt(d, d) + btt(d, 4 * d) + btt(4 * d, d)
        return linear + 4 * context * d + 2 * d * vocabulary

    for row, recipe in zip(rows, train_gpt.RECIPES, strict=True):
        assert row["width"] == recipe.width
        assert row["flops"] == forward_flops(row)
        flops_of_a_step = 3 * batch * context * row["flops"]
        assert row["steps"] == round(budget / flops_of_a_step)
        assert row["curve"][-1] == (row["steps"] * flops_of_a_step, row["loss"])


def test_a_run_follows_from_its_seed(text, tmp_path):
    options = ["--smoke", "--data", str(text), "--out", str(tmp_path)]
    first, again, other = (
        [row["curve"] for row in train_gpt.main([*options, "--seed", seed])] for seed in "112"
    )
    assert first == again != other


def test_models_take_turns_after_the_engine_is_built(text, tmp_path, monkeypatch):
    order = []

    class Recorded(train_gpt.Run):
        def step(self, x, y):
            order.append(type(self.optimizer).__name__ + self.label)
            super().step(x, y)

    monkeypatch.setattr(train_gpt, "Run", Recorded)
    monkeypatch.setattr(train_gpt, "TURNS", 3)
    monkeypatch.setattr(structlin, "show_config", lambda: order.append("build"))
    rows = train_gpt.main(["--smoke", "--data", str(text), "--out", str(tmp_path)])
    turns = [(label, len([*steps])) for label, steps in groupby(order)]
    labels = [row["optimizer"] + row["label"] for row in rows]
    assert [label for label, _ in turns] == ["build", *labels * 3]
    for n, row in enumerate(rows):
        steps = [count for _, count in turns[1 + n :: len(rows)]]
        assert sum(steps) == row["steps"]
        assert max(steps) - min(steps) <= 1
        assert row["clock"][-1] == pytest.approx(row["steps"] * row["ms"] / 1e3, abs=0.01)


@pytest.mark.parametrize("width", [32, 1568])
def test_positions_start_as_waves_of_the_size_of_embeddings_and_the_head_at_zero(width):
    gpt = train_gpt.GPT(10, 64, 1, width)
    assert gpt.positions.weight.square().mean().sqrt().item() == pytest.approx(0.2, abs=0.02)
    assert not gpt.head.weight.any()


def test_attention_sees_no_later_token():
    gpt, ids = train_gpt.GPT(10, 8, 2, 32), torch.randint(10, (2, 8))
    torch.nn.init.normal_(gpt.head.weight)
    changed = ids.clone()
    changed[:, 5:] = (ids[:, 5:] + 1) % 10
    torch.testing.assert_close(gpt(changed)[:, :5], gpt(ids)[:, :5])
    assert not torch.equal(gpt(changed)[:, 5:], gpt(ids)[:, 5:])
