"""examples/compress.py at tiny sizes: what is kept, in which folder, bad arguments."""

import json
import math

import compress
import pretrained
import pytest
import torch

from structlin import StructuredLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:distill")  # two steps need not heal anything


def structured(model):
    return [module for module in model.modules() if isinstance(module, StructuredLinear)]


def test_a_gguf_file_leaves_a_folder_with_a_model_card(tmp_path, write_gguf, capsys):
    path, text, out = write_gguf(tmp_path / "m.gguf"), tmp_path / "text.txt", tmp_path / "out"
    text.write_text("".join(f"{n} {'ABC'[n % 3] * 5}" for n in range(1000)))
    options = ["--smoke", "--model", str(path), "--data", str(text), "--out", str(out)]
    dense, row = compress.main(options)
    shown = capsys.readouterr().out
    assert json.loads((out / "compress.json").read_text())["rows"] == [dense, row]
    assert row["params"] < dense["params"] < dense["bytes"]
    assert "model.layers.0.mlp.up_proj" in shown  # the plan
    assert row["sample"][0] in shown
    card = (out / "README.md").read_text()
    figures = [each["perplexity"] for each in (dense["after"], row["after"], row["healed"])]
    assert " | ".join(f"{each:.3f}" for each in figures) in card
    assert "m on " in card
    assert f"- after: {row['sample'][0]}" in card
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert structured(model)
    assert compress.ask(model, tokenizer, compress.PROMPTS[0]) == row["sample"][0]


def test_the_tiny_model_is_measured_on_what_is_held_out(tmp_path):
    dense, row = compress.main(["--smoke", "--family", "btt", "--out", str(tmp_path)])
    bits = math.log2(dense["after"]["perplexity"])  # a character of this text is a token
    assert dense["after"]["bits/char"] == pytest.approx(bits, rel=0.01)
    assert row["healed"]["perplexity"] == pytest.approx(dense["after"]["perplexity"], rel=0.1)


def test_a_batch_is_of_its_step_and_of_no_held_out_token():
    text = compress.Windows(torch.arange(1000), context=8, batch=50, characters=3000)
    one, again, other = (text.batch(step)["input_ids"] for step in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.max() < 900 <= text.heldout.min()
    assert text.per_token == 3


def test_a_model_that_is_loaded_otherwise_than_saved_ends_the_program(tmp_path, monkeypatch):
    other, _ = pretrained.make_tiny()
    kind = transformers.LlamaForCausalLM
    monkeypatch.setattr(kind, "from_pretrained", lambda folder, **options: other)
    with pytest.raises(RuntimeError, match="the model that was loaded differs"):
        compress.main(["--smoke", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model and --data: which model, and which text"),
        (["--smoke", "--keep", "2"], "keep=2.0 must be a fraction above 0 and at most 1"),
        (["--smoke", "--keep", "0.0001"], "keep=0.0001"),
        (["--smoke", "--family", "fft"], "invalid choice"),
        (["--smoke", "--heal", "0"], "'0' is not a positive integer"),
        (["--smoke", "--model", "nowhere"], "nowhere"),
        (["--smoke", "--data", "nowhere.txt"], "No such file"),
        (["--smoke", "--data", "short.txt"], "a tenth of it is held out, so that --context 16"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_saved(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short " * 10)
    with pytest.raises(SystemExit):
        compress.main([*arguments, "--out", "out"])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
