"""examples/compress.py at tiny sizes: every kind of model, what is kept, bad arguments."""

import json
import sys

import pytest
import safetensors.torch
import torch

pytest.importorskip("matplotlib")

import compress
import compress_models

from benchmarks.zoo import import_timm
from structlin import StructuredLinear
from structlin._commands import jobs

pytestmark = pytest.mark.filterwarnings("ignore:distill")  # two steps need not heal anything
TEXT = "The quick brown fox jumps over the lazy dog number {n}, and does so again. "


def structured(model):
    return [module for module in model.modules() if isinstance(module, StructuredLinear)]


def test_compress_leaves_a_table_a_plot_results_and_models(tmp_path, capsys):
    rows = compress.main(["--smoke", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert [(row["family"], row["aware"]) for row in rows[1:]] == [
        (family, aware) for family in ("btt", "monarch") for aware in (False, True)
    ]
    dense, *others = rows
    for row in others:
        assert row["params"] <= 0.65 * dense["params"]  # the head stays dense
        assert row["after"]["bits/char"] < dense["after"]["bits/char"] + 0.5
        assert row["healed"]["bits/char"] < dense["after"]["bits/char"] + 0.5
        assert row["healed"]["perplexity"] == pytest.approx(2 ** row["healed"]["bits/char"])
    assert "btt, calibrated" in shown
    assert "blocks.0.mlp.c_fc" in shown  # the plan
    assert json.loads((tmp_path / "compress.json").read_text())["rows"] == rows
    assert (tmp_path / "compress.png").stat().st_size > 1000
    assert (tmp_path / "btt-0.5-calibrated" / "structlin.safetensors").stat().st_size > 1000


def test_a_model_that_is_loaded_otherwise_than_saved_ends_the_program(tmp_path, monkeypatch):
    options = compress.parse(["--smoke", "--out", str(tmp_path)])
    monkeypatch.setattr(options.job, "load", lambda folder: options.job.build())
    options.base = {}
    with pytest.raises(RuntimeError, match=r"btt-0\.5: the model that was loaded differs"):
        compress.compress(options.job, options, "btt", 0.5, aware=False)


def save_tokenizer(folder):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {letter: n for n, letter in enumerate("_ abcdefghijklmnopqrstuvwxyz.,")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="_", pad_token="_"
    )
    made.save_pretrained(folder)


def save_encoder(folder):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=50, num_attention_heads=2, **sizes)
    transformers.BertModel(config).save_pretrained(folder)


def write_text(path):
    path.write_text("".join(TEXT.format(n="abcdefghij"[n % 10] * (n // 10 + 1)) for n in range(80)))
    return path


def test_compress_takes_a_causal_model_of_transformers_and_saves_it_as_one(tmp_path, capsys):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from benchmarks.zoo import llama

    save_tokenizer(tmp_path / "m")
    llama().save_pretrained(tmp_path / "m")
    text = write_text(tmp_path / "text.txt")
    options = ["--smoke", "--model", str(tmp_path / "m"), "--data", str(text), "--budgets", "0.5"]
    rows = compress.main([*options, "--out", str(tmp_path / "out")])
    assert [(row["family"], row["aware"]) for row in rows] == [("dense", False), ("lowrank", True)]
    assert set(rows[1]["healed"]) == {"bits/char", "perplexity"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "lowrank-0.5-calibrated")
    planned = [line for line in capsys.readouterr().out.splitlines() if " -> " in line]
    converted = [line for line in planned if "LowRank(rank=" in line]
    dense = [line for line in planned if "dense: within what is kept" in line]
    assert len(converted) + len(dense) == 14  # two blocks of seven layers
    assert len(structured(loaded)) == len(converted) > 7


def test_compress_takes_a_gguf_file_and_leaves_a_folder_with_a_model_card(
    tmp_path, write_gguf, capsys
):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, text = write_gguf(tmp_path / "m.gguf"), tmp_path / "text.txt"
    text.write_text("".join(f"{n} {'ABC'[n % 3] * 5}" for n in range(1000)))
    options = ["--smoke", "--model", str(path), "--data", str(text)]
    _, row = compress.main([*options, "--out", str(tmp_path / "out")])
    folder = tmp_path / "out" / "lowrank-0.8-calibrated"
    card = (folder / "README.md").read_text()
    figures = [f"{row[when]['perplexity']:.3f}" for when in ("after", "healed")]
    assert f"| {' | '.join(figures)} |" in card
    assert "tokens of text.txt" in card
    assert "import structlin.hf" in card
    assert f"- after: {row['sample'][0]}" in card
    assert row["sample"][0] in " ".join(capsys.readouterr().out.split())
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert structured(model)
    said = [
        jobs.generate(model, tokenizer, "ABC 01", use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert said[0] == said[1]
    assert jobs.generate(model, tokenizer, jobs.PROMPTS[0]) == row["sample"][0]


def test_compress_takes_an_encoder_of_transformers(tmp_path):
    save_encoder(tmp_path / "m")
    text = write_text(tmp_path / "text.txt")
    options = ["--smoke", "--model", str(tmp_path / "m"), "--data", str(text)]
    rows = compress.main([*options, "--families", "btt", "--out", str(tmp_path / "out")])
    dense, *others = rows
    assert dense["after"] == {"cosine": pytest.approx(1.0), "same neighbour": 1.0}
    assert all(0.5 < row["healed"]["cosine"] <= 1 for row in others)


def test_compress_takes_a_model_of_timm_and_a_checkpoint(tmp_path):
    import_timm()
    timm = pytest.importorskip("timm")
    pytest.importorskip("sklearn")
    name, path = "test_vit", tmp_path / "vit.pth"
    torch.save(timm.create_model(name, num_classes=7, img_size=32).state_dict(), path)
    options = ["--smoke", "--model", name, "--checkpoint", str(path), "--families", "lowrank"]
    rows = compress.main([*options, "--out", str(tmp_path / "out")])
    assert [row["family"] for row in rows] == ["dense", "lowrank", "lowrank"]
    assert set(rows[0]["after"]) == {"accuracy", "loss"}
    wrong = timm.create_model(name, img_size=64).state_dict()
    torch.save(wrong, path)
    with pytest.raises(ValueError, match=r"is --image what .*: pos_embed$"):
        compress_models.take_checkpoint(timm.create_model(name, img_size=32), path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "0"], "'0' is not a fraction"),
        (["--budgets", "half"], "'half' is not a fraction"),
        (["--families", "fft"], "invalid choice"),
        (["--model", "nowhere"], "nowhere: no such folder"),
        (["--model", "nowhere.gguf"], "nowhere.gguf: no such file"),
        (["--data", "nowhere.txt"], "no such file"),
        (["--checkpoint", "vit.pth"], "--checkpoint needs --model"),
        (
            ["--model", "nowhere", "--data", __file__],
            "nowhere: no such folder, and a model of timm",
        ),
        (["--heal", "0"], "'0' is not a positive integer"),
    ],
)
def test_compress_refuses_bad_arguments_with_one_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        compress.main(["--smoke", *arguments])
    assert message in capsys.readouterr().err


def save_llama(folder):
    pytest.importorskip("transformers")
    from benchmarks.zoo import llama

    save_tokenizer(folder)
    llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "vit.pth"], "--checkpoint needs --model, a name of timm"),
        (["--context", "33"], "--context 33 is more than the 32 tokens that the model reads"),
        (["--data", "short.txt"], "a tenth of it is held out, so that --context 16 needs"),
        (["--out", "text.txt"], "File exists: 'text.txt'"),
    ],
)
def test_what_does_not_go_with_a_model_is_refused_before_it_is_compressed(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "m")
    write_text(tmp_path / "text.txt")
    (tmp_path / "short.txt").write_text("too short " * 16)
    monkeypatch.setattr(jobs.CausalLM, "measure", None)  # nobody comes that far
    options = ["--model", "m", "--data", "text.txt", "--context", "16"]
    with pytest.raises(SystemExit):
        compress.main([*options, *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("encoder", [False, True])
def test_a_tokenizer_of_another_model_is_refused(tmp_path, capsys, encoder):
    folder, text = tmp_path / "m", write_text(tmp_path / "text.txt")
    (save_encoder if encoder else save_llama)(folder)
    path, rows = folder / "tokenizer.json", 50 if encoder else 96
    path.write_text(path.read_text().replace('".": 28', f'".": {rows}'))
    with pytest.raises(SystemExit):
        compress.main(["--smoke", "--model", str(folder), "--data", str(text)])
    message = f"the tokenizer has ids up to {rows} and the model embeds {rows} from 0 on"
    assert message in capsys.readouterr().err


def test_a_folder_without_all_tensors_of_its_model_is_refused(tmp_path, capsys):
    folder, text = save_llama(tmp_path / "m"), write_text(tmp_path / "text.txt")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state.pop("model.layers.1.mlp.up_proj.weight")
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit):
        compress.main(["--smoke", "--model", str(folder), "--data", str(text)])
    assert "layers.1.mlp.up_proj.weight is not there" in capsys.readouterr().err


def test_weights_that_are_no_numbers_are_named_and_nothing_is_saved(tmp_path):
    folder, text = save_llama(tmp_path / "m"), write_text(tmp_path / "text.txt")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    options = ["--model", str(folder), "--data", str(text), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"weight of layer 'model\.layers\.1\.mlp\.up_proj'"):
        compress.main(["--smoke", *options])
    assert not [*(tmp_path / "out").iterdir()]


def test_a_budget_that_no_sizes_reach_is_named_and_the_others_are_done(tmp_path):
    sizes = {name: str(small) for name, (_, small) in compress.SIZES.items()}
    options = [word for name, small in sizes.items() for word in (f"--{name}", small)]
    options += ["--families", "lowrank", "--ways", "plain", "--budgets", "0.001", "0.5"]
    with pytest.raises(SystemExit, match=r"^lowrank, budget 0\.001, plain: keep=0\.001 .* or more"):
        compress.main([*options, "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "compress.json").read_text())
    assert [row["budget"] for row in kept["rows"]] == [1.0, 0.5]
    assert kept["command"].endswith(" ".join(options[-4:]) + f" --out {tmp_path}")
    assert kept["cpu_seconds"] > 0


def test_a_library_that_is_not_here_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit):
        compress.main(["--smoke", "--model", str(tmp_path)])
    assert "transformers is needed (import of transformers halted" in capsys.readouterr().err


def test_a_text_with_too_few_sentences_for_an_encoder_is_refused(tmp_path, capsys):
    save_encoder(tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 5)
    with pytest.raises(SystemExit):
        compress.main(["--smoke", "--model", str(tmp_path / "m"), "--data", str(text)])
    assert "the text has 1 sentences of 30 to 250 characters" in capsys.readouterr().err
