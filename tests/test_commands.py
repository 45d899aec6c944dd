"""The commands: each one's table, its JSON, its errors with their exit codes, and its page."""

import copy
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from structlin import BTT, LowRank, Monarch, Split, StructuredLinear, cli, convert, save
from structlin.cli import find_source, parse_structure, read_model

transformers = pytest.importorskip("transformers")
PAGE = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def run(capsys, *arguments):
    """The exit code, and what stands on stdout and stderr."""
    try:
        code = cli.main([str(each) for each in arguments])
    except SystemExit as error:  # argparse
        code = error.code
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny causal language model in `m`, an encoder in `e`, with a tokenizer, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(["_", *WORDS])}, "_"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    given = {"tokenizer_object": tokenizer, "unk_token": "_", "pad_token": "_"}
    sizes = {"vocab_size": 12, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    for name, model in (
        ("m", transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))),
        ("e", transformers.BertModel(transformers.BertConfig(**sizes))),
    ):
        model.save_pretrained(folder / name)
        transformers.PreTrainedTokenizerFast(**given).save_pretrained(folder / name)
    (folder / "text.txt").write_text(" ".join(WORDS[n * n % 10] for n in range(900)))
    return folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BTT(rank=__import__('os').getpid())", "is not written like BTT"),
        ("BTT(**{})", "BTT has no option 'None'"),
        ("LowRank(rank='4')", "rank='4' must be an integer of at least 1"),
        ("BTT(rank=1) + LowRank(rank=2)", "cannot be a sum"),
        ("", "is not written like"),
        ("BTT(rank='2')", "rank='2' must be an integer"),
        ("FFT()", "'FFT' is no family; there are Dense, LowRank"),
        ("LowRank", "LowRank needs rank="),
        ("BTT(2, 3)", "BTT(2, 3): only ['rank'] may stand there without a name"),
        ("BTT(2, rank=3)", "BTT(2, rank=3) has rank= twice"),
        ("BTT(*[2])", "is not written like BTT"),
        ("Split(3, of=exec('1'))", "is not written like BTT"),
    ],
)
def test_other_text_is_refused_and_nothing_of_it_runs(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_structure(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("BTT(4)", BTT(4)),  # as README and docs write it
        ("BTT((2, 3), cores=3)", BTT((2, 3), cores=3)),
        ("lowrank(16)", LowRank(16)),
        ("Monarch", Monarch()),
        (repr(Split(3, of=BTT(2))), Split(3, of=BTT(2))),
    ],
)
def test_a_structure_is_written_as_in_python(text, wanted):
    assert parse_structure(text) == wanted


def test_info_says_versions_and_what_multiplies(capsys):
    found = json.loads(run(capsys, "info", "--json")[1])
    assert found["torch"] == torch.__version__
    assert re.match("compiled engine|plain products", found["CPU"])
    _, out, _ = run(capsys, "info")
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", out, re.MULTILINE)


def test_plan_counts_without_the_weights_and_says_what_stays_dense(capsys, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "m" / "config.json").read_bytes())
    given = ["plan", tmp_path, "--structure", "LowRank(rank=4)", "--exclude", "ffn"]
    found = json.loads(run(capsys, *given, "--json")[1])
    assert found["dense"]["model.layers.1.mlp.up_proj"] == "excluded"
    assert found["params"] == 8 * 4 * 64 + 2 * 3 * 32 * 64 + 32 * 12
    _, out, _ = run(capsys, *given)
    assert re.search(r"self_attn\.q_proj +2 +32 -> 32 +LowRank\(rank=4\) +512 +25\.0%", out)
    assert "dense, 6 layers: excluded" in out
    kept = json.loads(run(capsys, "plan", tmp_path, "--keep", 0.5, "--json")[1])
    assert 0.4 < (kept["params"] - 32 * 12) / (8 * 32 * 32 + 6 * 32 * 64) <= 0.5


@pytest.mark.parametrize("include", ["ffn", "*experts*"])
def test_plan_shows_the_experts_of_a_mixture_as_compress_would_make_them(capsys, tmp_path, include):
    sizes = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    transformers.Qwen3MoeConfig(**sizes).save_pretrained(tmp_path)
    code, out, err = run(capsys, "plan", tmp_path, "--keep", "0.5", "--include", include)
    assert code == 0, err
    for name in ("gate_up_proj", "down_proj"):
        assert re.search(rf"experts\.{name} .* LowRank\(rank=\d+\)", out)


def test_plan_and_compress_take_one_structure_where_none_is_given(capsys, folder):
    found = [json.loads(run(capsys, "plan", folder / "m", *more, "--json")[1]) for more in GIVEN]
    texts = [{row["structure"].split("(")[0] for row in each["rows"]} for each in found]
    assert texts == [{"dense", "BTT"}, {"dense", "LowRank"}]
    parsed = cli.make_parser().parse_args(["plan", "m"]).structure
    data = str(folder / "text.txt")
    given = ["compress", "m", "--keep", "1", "--data", data, "--out", "y"]
    assert parsed is cli.make_parser().parse_args(given).structure is None


GIVEN = ((), ("--keep", 0.5))


def arguments(model, out, *more):
    data = model.parent / "text.txt"
    return ["compress", model, "--keep", 0.5, "--data", data, "--out", out, *more]


@pytest.mark.filterwarnings("ignore:distill")
@pytest.mark.parametrize(("kind", "figure"), [("m", "perplexity"), ("e", "cosine")])
def test_compress_leaves_a_model_that_transformers_loads(capsys, folder, tmp_path, kind, figure):
    out = tmp_path / "new" / "small"
    code, shown, says = run(capsys, *arguments(folder / kind, out, "--heal", 2))
    assert code == 0, says
    measured = r": [\d.]+ dense, [\d.]+ compressed, [\d.]+ healed\n"
    assert re.search(f"held-out {figure}{measured}saved in {out}", shown)
    assert "structlin: compressing" in says
    model = find_source(folder / kind)[1].from_pretrained(out)
    layers = [each for each in model.modules() if isinstance(each, StructuredLinear)]
    dense = sum(layer.in_features * layer.out_features for layer in layers)
    assert 0 < sum(layer.structure.params for layer in layers) < 0.6 * dense
    assert [path.name for path in out.parent.iterdir()] == ["small"]


@pytest.mark.filterwarnings("ignore:distill")
def test_a_compressed_sentence_encoder_keeps_what_stands_beside_its_weights(
    capsys, folder, tmp_path
):
    encoder, out = tmp_path / "encoder", tmp_path / "small"
    shutil.copytree(folder / "e", encoder)
    beside = {
        "modules.json": '[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]',
        "1_Pooling/config.json": "{}",
        "2_Dense/model.safetensors": "a layer after the encoder",
        "config_sentence_transformers.json": "{}",
        "README.md": "which model it is",
    }
    left = {
        "pytorch_model.bin": "old",
        "onnx/model.onnx": "old",
        ".cache/x": "",
    }
    for name, text in (beside | left).items():
        (encoder / name).parent.mkdir(exist_ok=True)
        (encoder / name).write_text(text)
    shutil.copy(folder / "text.txt", tmp_path)
    assert run(capsys, *arguments(encoder, out, "--heal", 0))[0] == 0
    assert {name: (out / name).read_text() for name in beside} == beside
    assert not [name for name in left if (out / name).exists()]
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "structlin"
    assert (out / "model.safetensors").stat().st_size < (
        encoder / "model.safetensors"
    ).stat().st_size
    (encoder / "modules.json").write_text('[{"path": "../.."}]')
    code, _, says = run(capsys, *arguments(encoder, tmp_path / "other" / "a" / "b", "--heal", 0))
    assert (code, (tmp_path / "other").exists()) == (2, False)
    assert "modules.json names '../..', outside its folder" in says


def saved_models(tmp_path):
    """A model converted with two ranks, saved in each way; and the dense one, saved."""
    sizes = {"vocab_size": 12, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5}
    config = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    dense = transformers.LlamaForCausalLM(config)
    model = copy.deepcopy(dense)
    overrides = {"*layers.[14].mlp.up_proj": LowRank(rank=3)}
    convert(model, LowRank(rank=2), include="*up_proj", overrides=overrides)
    model.save_pretrained(tmp_path / "transformers", max_shard_size="20KB")
    save(model, tmp_path / "own")
    dense.save_pretrained(tmp_path / "dense")
    return model


def test_info_shows_a_saved_model_as_each_way_of_saving_left_it(capsys, tmp_path, monkeypatch):
    model = saved_models(tmp_path)
    cores = 96 * (3 * 2 + 2 * 3)
    others = sum(p.numel() for p in model.parameters()) - cores
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", None)  # it is not built
    for place in ("own", "own/structlin.safetensors", "transformers"):
        code, out, _ = run(capsys, "info", tmp_path / place)
        assert code == 0
        shown = re.findall(r"(?m)^model\.layers\.(\S+)\.mlp\.up_proj +(\d) +32 -> 64 +(\S+) ", out)
        two, three = ("{0,2,3}", "3", "LowRank(rank=2)"), ("{1,4}", "2", "LowRank(rank=3)")
        assert shown == [two, three]
        assert re.search(rf"structured layers +5 +{cores:,} +11\.2%", out)
        assert re.search(rf"other numbers +{others:,}", out)
        found = json.loads(run(capsys, "info", tmp_path / place, "--json")[1])
        assert (found["params"], found["other_numbers"], len(found["layers"])) == (cores, others, 5)


def test_info_counts_a_layer_of_two_names_once(capsys, tmp_path):
    shared = torch.nn.Linear(32, 32)
    save(convert(torch.nn.Sequential(shared, torch.nn.ReLU(), shared), LowRank(rank=2)), tmp_path)
    found = json.loads(run(capsys, "info", tmp_path, "--json")[1])
    assert (len(found["layers"]), found["params"], found["other_numbers"]) == (1, 128, 32)


def test_info_refuses_what_is_no_saved_structured_model(capsys, tmp_path):
    saved_models(tmp_path)
    (tmp_path / "empty").mkdir()
    whole = (tmp_path / "own" / "structlin.safetensors").read_bytes()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "structlin.safetensors").write_bytes(whole[: len(whole) // 2])
    for place, says in (
        ("dense", "its config.json names no structured layer: the model is dense"),
        ("empty", "it has neither structlin.safetensors nor config.json"),
        ("nowhere", "it has neither"),
        ("half", "holds no structured model that can be read"),
    ):
        code, out, err = run(capsys, "info", tmp_path / place)
        assert (code, out) == (2, "")
        assert says in err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "structlin: interrupted; nothing was written\n"),
        (OSError(28, "No space"), 1, "structlin: failed: OSError: [Errno 28] No space\n"),
        (ValueError("the weight of\n layer"), 2, "structlin: error: the weight of layer\n"),
    ],
)
def test_what_stops_a_run_leaves_no_half_written_folder(
    capsys, folder, tmp_path, monkeypatch, error, code, says
):
    def stop(self, into):
        (into / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", stop)
    found, out, err = run(capsys, *arguments(folder / "m", tmp_path / "small", "--heal", 0))
    assert (found, out, err[-len(says) :]) == (code, "", says)
    assert not [*tmp_path.iterdir()]


def test_the_signal_of_schedulers_is_like_an_interrupt(capsys, folder, tmp_path, monkeypatch):
    def stop(self, into):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", stop)
    before = signal.getsignal(signal.SIGTERM)
    code, _, err = run(capsys, *arguments(folder / "m", tmp_path / "small", "--heal", 0))
    assert (code, err.splitlines()[-1]) == (130, "structlin: interrupted; nothing was written")
    assert not [*tmp_path.iterdir()]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_model_of_other_tensors_tokens_or_layers_is_refused(folder, tmp_path):
    model, tokenizer = read_model(folder / "m")
    state = {name: x for name, x in model.state_dict().items() if "1.mlp.up" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 tensors .* model\.layers\.1\.mlp\.up_proj"):
        read_model(tmp_path)
    model.save_pretrained(tmp_path)
    tokenizer.add_tokens(["more", "words"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the model embeds 12 tokens, and its tokenizer has 12"):
        read_model(tmp_path)
    convert(model, LowRank(rank=4), include="ffn", init="project").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is structured already; give the dense model"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "the following arguments are required: COMMAND; see structlin --help"),
        ("plan .", ". has no config.json"),
        ("plan broken", "broken cannot be read: "),
        ("plan huge.gguf", "huge.gguf cannot be read: "),
        ("plan m --include *nix", "'*nix' matches no linear layer"),
        ("plan m --structure FFT()", "'FFT' is no family"),
        (
            "compress m --keep 2 --data text.txt --out y",
            "argument --keep: 2 must be above 0 and at most 1",
        ),
        ("plan m --keep half", "argument --keep: half must be above 0 and at most 1"),
        ("compress m --keep 1 --data text.txt --out y --heal -1", "--heal -1 must be 0 or more"),
        ("compress m --keep 1", "the following arguments are required: --data, --out"),
        ("compress x --keep 1 --data text.txt --out y", "x is neither a folder of transformers"),
        ("compress m --keep 1 --data x --out y", "argument --data: x: No such file"),
        ("compress m --keep 1 --data huge.gguf --out y", "argument --data: huge.gguf is no text: "),
        ("compress m --keep 1 --data few.txt --out y", "--data has 3 tokens; at least 640 are"),
        ("compress m --keep 1 --data text.txt --out m", "there is something already"),
        ("compress m --keep 1 --data text.txt --out text.txt/y", "Not a directory"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_exit_code_2(
    capsys, folder, monkeypatch, given, message
):
    monkeypatch.chdir(folder)
    key = b"general.architecture"  # of 2^40 integers, in a file of some bytes
    entry = struct.pack(f"<Q{len(key)}sIIQ", len(key), key, 9, 4, 255 << 40)
    Path("huge.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry)
    Path("few.txt").write_text("alpha beta gamma")
    Path("broken").mkdir(exist_ok=True)
    Path("broken", "config.json").write_text("{")
    code, out, err = run(capsys, *given.split())
    assert (code, out) == (2, "")
    assert re.match(f"structlin.*{re.escape(message)}", err.splitlines()[-1])
    assert not [*Path().rglob("*part*"), *Path().glob("y")]


def test_a_package_that_is_not_here_is_named_with_its_extra(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, _, err = run(capsys, "plan", "m")
    assert 'pip install "structlin[transformers]"' in err


def test_the_module_and_the_entry_point_are_the_command():
    command = [sys.executable, "-m", "structlin.cli", "plan", "nowhere"]
    assert subprocess.run(command, capture_output=True).returncode == 2
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (value,) = re.findall(r'^structlin = "(.*)"$', project, re.MULTILINE)
    assert EntryPoint("structlin", value, "console_scripts").load() is cli.main


def test_the_page_has_a_transcript_of_each_command_with_arguments_that_exist():
    found = re.findall(r"```console\n\$ structlin (.*)\n", PAGE)
    names = sorted(command.split()[0] for command in found)
    assert names == ["compress", "info", "info", "plan"]
    for command in found:
        cli.make_parser().parse_args(command.replace("topics.txt", __file__).split())
