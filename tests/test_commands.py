"""The commands: each one's table, its JSON, its errors with their exit codes, and its page."""

import json
import re
import shutil
import struct
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from structlin import BTT, LowRank, StructuredLinear, convert, save
from structlin._commands import compress, main
from structlin._commands.arguments import parse_structure

PAGE = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def run(capsys, *arguments):
    """The exit code, and what stands on stdout and stderr."""
    try:
        code = main.main([str(each) for each in arguments])
    except SystemExit as error:  # argparse
        code = error.code
    return code, *capsys.readouterr()


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder of a tiny causal language model with its tokenizer, and a text."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(["_", *WORDS])}, "_"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    given = {"tokenizer_object": tokenizer, "unk_token": "_", "pad_token": "_"}
    transformers.PreTrainedTokenizerFast(**given).save_pretrained(folder / "m")
    config = transformers.LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "m")
    (folder / "text.txt").write_text(" ".join(WORDS[n * n % 10] for n in range(900)))
    return folder


# ---- structures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [BTT(rank=3), LowRank(rank=8), parse_structure("Split(split=3, of=BTT())")], ids=str
)
def test_a_structure_is_read_from_its_repr(family):
    assert parse_structure(repr(family)) == family


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BTT(rank=__import__('os').getpid())", "is not written like BTT"),
        ("BTT(**{})", "is not written like"),
        ("BTT(2)", "is not written like"),
        ("BTT(", "is not written like"),
        ("", "is not written like"),
        ("(" * 5000, "is not written like"),
        ("BTT(rank='2')", "rank='2' must be an integer"),
        ("FFT()", "'FFT' is no family; there are dense, lowrank"),
        ("LowRank", "LowRank needs rank="),
        ("LowRank(r=1, rank=1)", "has no option 'r'"),
    ],
)
def test_other_text_is_refused_and_nothing_of_it_runs(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_structure(text)


# ---- info, bench ---------------------------------------------------------------------------------


def test_info_says_versions_and_what_multiplies(capsys):
    found = run_json(capsys, "info")
    assert found["torch"] == torch.__version__
    assert re.match("compiled engine|plain products", found["CPU"])
    _, out, _ = run(capsys, "info")
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", out, re.MULTILINE)


def test_bench_times_the_structures_against_dense(capsys):
    given = ["bench", 64, 128, "--tokens", 8, "--structures", "BTT(rank=1)", "lowrank(rank=16)"]
    found = run_json(capsys, *given)
    dense, btt, low = found["rows"]
    assert (dense["ms_to_dense"], dense["flops_to_dense"]) == (1.0, 1.0)
    assert btt["structure"] == "BTT(rank=1)"
    assert low["params"] == 16 * (64 + 128)
    assert low["flops_to_dense"] == 16 * (64 + 128) / (64 * 128)
    for row in (btt, low):
        assert 0 < row["ms_to_dense_p20"] <= row["ms_to_dense"] <= row["ms_to_dense_p80"]
        assert row["ms"] > 0
    code, out, _ = run(capsys, *given, "--forward")
    assert code == 0
    assert "64 -> 128, 8 tokens, float32, forward, CPU threads: 1" in out
    assert re.search(r"LowRank\(rank=16\) +3,072 +[\d.]+ +[\d.]+ +[\d.]+ to [\d.]+ +0\.375", out)


def test_bench_leaves_out_of_the_usual_structures_what_does_not_fit(capsys):
    names = [row["structure"] for row in run_json(capsys, "bench", 63, 62, "--tokens", 1)["rows"]]
    assert names[0] == "dense"
    assert "LowRank(rank=7)" in names
    assert not any("Monarch" in name for name in names)


# ---- plan ----------------------------------------------------------------------------------------


def test_plan_counts_without_the_weights(capsys, llama, tmp_path):
    (tmp_path / "config.json").write_bytes((llama / "m" / "config.json").read_bytes())
    found = run_json(capsys, "plan", tmp_path, "--structure", "LowRank(rank=4)", "--exclude", "ffn")
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert len(layers) == 2 * 7 + 1
    query = layers["model.layers.1.self_attn.q_proj"]
    assert (query["params"], query["flops"]) == (4 * 64, 8 * 64)
    assert query["bytes"] * query["dense_params"] == query["params"] * query["dense_bytes"]
    assert layers["model.layers.1.mlp.up_proj"]["reason"] == "excluded"
    assert layers["lm_head"]["structure"] is None
    saved = 8 * (32 * 32 - 4 * 64)
    assert found["dense_params"] - found["params"] == saved
    assert found["dense_flops"] - found["flops"] == 2 * saved


def test_plan_shows_equal_layers_as_one(capsys, llama):
    code, out, _ = run(capsys, "plan", llama / "m", "--keep", 0.5, "--include", "ffn")
    assert code == 0
    assert re.search(r"model\.layers\.\*\.mlp\.up_proj +2 +ffn +32 -> 64 +LowRank\(rank=\d+\)", out)
    assert re.search(r"q_proj +2 +attention +32 -> 32 +- \(not included\) +2,048 +100\.0%", out)
    assert "whole model" in out


def test_plan_reads_an_encoder_as_the_page_shows_it(capsys, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
    config = transformers.BertConfig(**sizes, architectures=["BertModel"])
    config.save_pretrained("all-MiniLM-L6-v2")
    command, shown = next(each for each in transcripts() if each[0].startswith("plan"))
    code, out, _ = run(capsys, *command.split())
    assert code == 0
    assert out.strip() == shown.strip()


@pytest.mark.parametrize("saver", ["save_pretrained", "structlin.save"])
def test_a_folder_that_structlin_saved_is_said_to_be_one(capsys, llama, tmp_path, saver):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(llama / "m")
    convert(model, LowRank(rank=4), include="ffn", init="project")
    save(model, tmp_path) if saver == "structlin.save" else model.save_pretrained(tmp_path)
    given = ["compress", tmp_path, "--keep", 0.5, "--data", llama / "text.txt", "--out", "y"]
    for command in (["plan", tmp_path], given):
        code, out, err = run(capsys, *command)
        assert (code, out) == (2, "")
        assert re.search(r"holds a model that structlin saved: .* give the dense model", err)


# ---- compress ------------------------------------------------------------------------------------


def arguments(llama, out, *more):
    given = ["compress", llama / "m", "--keep", 0.5, "--data", llama / "text.txt", "--out", out]
    return [*given, "--context", 8, "--calibration", 2, "--heal", 0, *more]


def test_compress_leaves_a_model_that_transformers_loads(capsys, llama, tmp_path):
    import transformers

    out = tmp_path / "new" / "small"
    code, shown, says = run(capsys, *arguments(llama, out))
    assert code == 0, says
    assert f"saved in {out}" in shown
    assert re.search(r"perplexity +[\d.]+ +[\d.]+$", shown, re.MULTILINE)
    assert "structlin: compressing" in says
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    layers = [each for each in model.modules() if isinstance(each, StructuredLinear)]
    assert sum(layer.structure.params for layer in layers) < 0.5 * 2 * (4 * 32 * 32 + 3 * 32 * 64)
    card = (out / "README.md").read_text()
    assert "- Healing: none." in card
    assert "LowRank, of a size chosen for each layer" in card
    assert [path.name for path in out.parent.iterdir()] == ["small"]


@pytest.mark.filterwarnings("ignore:distill")
def test_compress_gives_one_json_object(capsys, llama, tmp_path):
    several = ["--structure", "BTT", "--heal", 4, "--include", "ffn"]
    found = run_json(capsys, *arguments(llama, tmp_path / "small", *several))
    assert found["compressed"]["params"] < found["dense"]["params"]
    assert set(found["compressed"]["healed"]) == {"bits/char", "perplexity"}
    assert {
        row["name"].split(".")[-1] for row in found["layers"] if row["structure"] == "dense"
    } >= {
        "q_proj",
        "lm_head",
    }


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "structlin: interrupted; nothing was written\n"),
        (OSError(28, "No space left"), 1, "structlin: failed: OSError: [Errno 28] No space left\n"),
        (ValueError("the weight of\n layer"), 2, "structlin: error: the weight of layer\n"),
    ],
    ids=repr,
)
def test_what_stops_a_run_leaves_no_half_written_folder(
    capsys, llama, tmp_path, monkeypatch, error, code, says
):
    def stop(job, recipe, dense, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(compress, "compress", stop)
    found, out, err = run(capsys, *arguments(llama, tmp_path / "small"))
    assert (found, out) == (code, "")
    assert err.endswith(says)
    assert not [*tmp_path.iterdir()]


def test_a_model_that_guesses_worse_than_blindly_is_refused(capsys, llama, tmp_path):
    """As one does whose tokenizer is another model's."""
    import transformers

    shutil.copytree(llama / "m", tmp_path / "m")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m")
    model.lm_head.weight.data *= 500
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "text.txt").write_text((llama / "text.txt").read_text())
    code, out, err = run(capsys, *arguments(tmp_path, tmp_path / "small"))
    assert (code, out) == (2, "")
    assert re.search(r"a blind guess has 12: its tokenizer is another model's", err)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("name", ["plan", "compress", "bench", "info"])
def test_help_names_the_options(capsys, name):
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"usage: structlin {name}" in out
    assert "--json" in out


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "the following arguments are required: COMMAND; see structlin --help"),
        ("frob", "invalid choice: 'frob'"),
        ("plan nowhere.gguf", "nowhere.gguf: no such file"),
        ("plan text.txt", "text.txt is neither a folder nor a GGUF file"),
        ("plan .", ". cannot be read: "),
        ("plan m --keep 2", "'2' is not a fraction above 0 and at most 1"),
        ("plan m --include *nix", "'*nix' matches no linear layer"),
        ("plan m --structure FFT()", "'FFT' is no family"),
        (
            "compress m --keep 1 --data x --out y --refine 1000001",
            "'1000001' is more than 1,000,000",
        ),
        ("bench 64", "IN OUT: 64 must be two widths, or none"),
        ("bench 64 0", "'0' is not a positive integer"),
        ("bench 63 63 --structures Monarch(blocks=8)", "blocks=8 does not divide"),
        ("compress m --keep 1", "the following arguments are required: --data, --out"),
        ("compress x --keep 1 --data text.txt --out y", "x: no GGUF file or folder"),
        ("compress m --keep 1 --data x --out y", "--data x: no such file"),
        ("compress m --keep 1 --data text.txt --out m", "there is something already"),
        ("compress m --keep 1 --data text.txt --out text.txt/y", "Not a directory"),
        (
            "compress m --keep 1 --data text.txt --out y --context 65",
            "the 64 tokens that the model",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_exit_code_2(
    capsys, llama, monkeypatch, given, message
):
    monkeypatch.chdir(llama)
    code, out, err = run(capsys, *given.split())
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("structlin")
    assert message in last
    assert "Traceback" not in err
    assert not [path for path in Path().rglob("*") if "part" in path.name or path.name == "y"]


@pytest.mark.parametrize(("package", "name"), [("transformers", "m"), ("timm", "vit_tiny")])
def test_a_package_that_is_not_here_is_named_with_its_extra(
    capsys, llama, monkeypatch, package, name
):
    monkeypatch.chdir(llama)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = run(capsys, "plan", name)
    assert code == 2
    assert f'pip install "structlin[{package}]"' in err


def test_a_gguf_file_that_says_more_than_it_holds_is_refused_at_once(capsys, llama, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.chdir(llama)
    key = b"general.architecture"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    entry = struct.pack(f"<Q{len(key)}sIIQ", len(key), key, 9, 4, 1 << 40)  # of integers
    Path("huge.gguf").write_bytes(header + entry)
    for command in ("plan huge.gguf", "compress huge.gguf --keep 1 --data text.txt --out y"):
        code, out, err = run(capsys, *command.split())
        assert (code, out) == (2, "")
        assert "huge.gguf cannot be read: " in err.splitlines()[-1]


@pytest.mark.slow
def test_the_module_and_the_entry_point_are_the_command():
    command = [sys.executable, "-m", "structlin"]
    done = subprocess.run([*command, "info", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["torch"] == torch.__version__
    done = subprocess.run([*command, "plan", "nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (value,) = re.findall(r'^structlin = "(.*)"$', project, re.MULTILINE)
    assert EntryPoint("structlin", value, "console_scripts").load() is main.main


# ---- the page ------------------------------------------------------------------------------------


def transcripts():
    """The commands of the page, each with what it printed."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    found = [block.split("\n", 1) for block in blocks]
    return [(command.removeprefix("$ structlin "), shown) for command, shown in found]


def test_the_page_has_a_transcript_of_each_command_with_arguments_that_exist():
    names = [command.split()[0] for command, _ in transcripts()]
    assert sorted(names) == ["bench", "compress", "info", "plan"]
    for command, _ in transcripts():
        main.make_parser().parse_args(command.split())
