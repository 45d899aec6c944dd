"""The two training examples at tiny sizes: what they train, keep and say."""

import json

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
    train_gpt: ["Muon", "SOAP", "SOAP"],
    train_mlp_lm: ["AdamW"] * 4,
}


@PROGRAMS
def test_a_program_leaves_a_table_a_plot_and_results(program, tmp_path, capsys):
    rows = program.main(["--smoke", "--out", str(tmp_path)])
    narrow, wide = rows[0], rows[-1]
    assert (narrow["label"], narrow["width"]) == ("dense", program.SMOKE["width"])
    assert wide["label"].startswith("BTT(rank=")
    assert narrow["width"] <= wide["width"]
    assert wide["flops"] <= narrow["flops"]
    assert [row["optimizer"] for row in rows] == OPTIMIZERS[program]
    shown = capsys.readouterr().out
    assert all(f"{row['params']:,}" in shown for row in rows)
    assert all(f"{row['loss']:.4f}" in shown for row in rows)
    assert shown.count(" step ") == sum(len(row["curve"]) for row in rows)
    kept = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["loss"] for row in kept] == [row["loss"] for row in rows]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("program", [train_gpt, train_mlp_lm])
def test_the_models_learn_a_text(program, text, tmp_path):
    options = ["--smoke", "--data", str(text), "--out", str(tmp_path)]
    rates = ["--lr", "0.03" if program is train_gpt else "0.01", "--other_lr", "0.01"]
    rows = program.main([*options, "--steps", "60", "--batch", "32", *rates])
    assert all(row["loss"] < 1.0 for row in rows)  # log(30 characters) is 3.4


def test_the_widest_gpt_is_the_widest_within_the_flops_of_dense(text, tmp_path):
    options = ["--smoke", "--data", str(text), "--width", "96", "--out", str(tmp_path)]
    rows = train_gpt.main(options)
    context, vocabulary = 16, len(set(text.read_text(encoding="utf-8")))

    def flops(d, attention, mlp):
        return attention + mlp + 4 * context * d + 2 * d * vocabulary

    def btt(d_in, d_out, rank):
        return 2 * rank * count_btt(d_in, d_out)

    def structured(d):
        return flops(d, btt(d, 3 * d, 4) + btt(d, d, 4), btt(d, 4 * d, 4) + btt(4 * d, d, 4))

    budget = flops(96, 8 * 96 * 96, 16 * 96 * 96)
    assert rows[0]["flops"] == budget
    widths = [d for d in range(32, 2048, 32) if structured(d) <= budget]
    assert rows[2]["width"] == max(widths) > 96
    assert rows[2]["flops"] == structured(max(widths))


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
    monkeypatch.setattr(train_gpt, "TURN", 2)
    monkeypatch.setattr(structlin, "show_config", lambda: order.append("build"))
    options = ["--smoke", "--data", str(text), "--steps", "5", "--out", str(tmp_path)]
    rows = train_gpt.main(options)
    labels = [row["optimizer"] + row["label"] for row in rows]
    assert order == ["build", *(label for n in (2, 2, 1) for label in labels for _ in range(n))]
    for row in rows:
        assert row["clock"][-1] == pytest.approx(5 * row["ms"] / 1e3, abs=0.01)


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
