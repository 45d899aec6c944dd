"""The example programs: data of every kind, bad input, resuming. Tiny sizes; warnings are
errors."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

import compare
import train_gpt
import train_vit

import structlin

GPT = ["--smoke", "--device", "cpu"]
VIT = ["--smoke", "--device", "cpu", "--steps", "2"]
RUNS = ["dense", "dense_wide", "structured", "structured_wide"]


@pytest.fixture
def images():
    draw = np.random.default_rng(1)
    return draw.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8), draw.integers(0, 3, 20)


def error_of(main, capsys, *arguments):
    """The one message with which a program refuses `arguments`."""
    with pytest.raises(SystemExit) as stopped:
        main([*arguments])
    assert stopped.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("error:") == 1
    return written.err.split("error:")[1]


def curves(rows):
    return [row["curve"] for row in rows]


# ---- a run ---------------------------------------------------------------------------------------


def test_gpt_leaves_a_table_a_plot_and_results(text, tmp_path, capsys):
    rows = train_gpt.main([*GPT, "--data", str(text), "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert [row["run"] for row in rows] == RUNS
    for title in (
        "params",
        "FLOPs/token",
        "loss",
        "bits/char",
        "seconds",
        "BTT(rank=1), silu",
    ):
        assert title in shown
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rows"] == rows
    assert results["torch"] == torch.__version__
    assert not list(tmp_path.glob("*.tmp"))


def test_gpt_learns_a_text(text):
    rows = train_gpt.main(
        [*GPT, "--data", str(text), "--steps", "60", "--batch", "8", "--lr", "0.01"]
    )
    assert all(row["bits/char"] < 1.5 for row in rows)  # log2(30 characters) is 4.9


def test_the_widest_model_is_the_widest_within_the_flops_of_dense(text, tmp_path):
    options = [*GPT, "--data", str(text), "--width", "96", "--heads", "2", "--out", str(tmp_path)]
    rows = {row["run"]: row for row in train_gpt.main(options)}
    head, depth, context, vocabulary = 32, 1, 16, len(set(text.read_text(encoding="utf-8")))

    def flops(d, attention, mlp):  # with two heads of 32 features
        return depth * (attention + mlp + 4 * context * 64) + 2 * d * vocabulary

    def dense(d):
        return flops(d, 8 * d * 64, 16 * d * d)

    # 2 multiply-adds of BTT: rank (d_in b + g d_out), for the most even factors
    def btt(d_in, d_out, rank):
        def small(n):
            return max(k for k in range(1, n + 1) if n % k == 0 and k * k <= n)

        return 2 * rank * (d_in * small(d_out) + d_out * small(d_in))

    def structured(d):  # linear cores of rank 2 in attention
        attention = btt(d, 3 * 64, 2) + btt(64, d, 2)
        return flops(d, attention, btt(d, 4 * d, 1) + btt(4 * d, d, 1))

    assert rows["dense"]["flops"] == dense(96)
    assert rows["dense_wide"]["flops"] == dense(192)
    assert rows["structured"]["flops"] == structured(192)
    widths = [d for d in range(head, 64 * head, head) if structured(d) <= dense(96)]
    assert rows["structured_wide"]["width"] == max(widths) > 96


def test_fixed_heads_leave_more_flops_for_the_width():
    options = [*VIT, "--width", "64", "--steps", "1"]
    scaled, fixed = (train_vit.main([*options, *heads])[-1] for heads in ([], ["--heads", "2"]))
    assert fixed["width"] > scaled["width"]
    assert fixed["flops"] > 0.9 * scaled["flops"]


def test_one_rate_reaches_all_widths_by_mup_and_the_cores_by_their_shapes(text, tmp_path):
    options = [*GPT, "--data", str(text), "--width", "64", "--lr", "0.01", "--out", str(tmp_path)]
    dense, wide, structured, _ = train_gpt.main([*options, "--between", "none"])
    assert dense["lr"] == [0.01, 0.01]
    assert wide["lr"] == pytest.approx([0.005, 0.01])  # embeddings keep the rate
    # a core of mlp.c_proj, 512 -> 128, whose dense layer has the rate 0.005
    assert structured["lr"] == pytest.approx([0.005, 0.005 * 512 / 16 / 2])
    assert structured["params"] < wide["params"]


@pytest.mark.parametrize("width", [1, 2, 33, 1570])
def test_positions_start_as_waves_of_unit_size_at_every_width(width):
    waves = train_gpt.waves(64, width)
    assert waves.shape == (64, width)
    assert waves.square().mean().sqrt().item() == pytest.approx(1, abs=0.1)


def test_an_activation_stays_out_of_attention(text):
    options = train_options(["--data", str(text), "--between", "silu"], attention=None)
    (*_, run, _), task = compare.choose(task := train_gpt.Text(options), options), task
    model = compare.build(task, run.width, run.structure, 0, **run.options)
    (block,) = model.blocks
    for layer in (block.attn.c_attn, block.attn.c_proj):
        assert layer.structure.between is None
    for layer in (block.mlp.c_fc, block.mlp.c_proj):
        assert layer.structure.between == "silu"


def test_the_head_of_a_gpt_starts_small_and_that_of_a_vit_at_zero(text):
    gpt, vit = train_options(["--data", str(text)]), train_options([])
    head = compare.build(train_gpt.Text(gpt), 64, structlin.BTT(), seed=0).lm_head.weight
    assert head.std().item() == pytest.approx(0.02, rel=0.1)
    assert not compare.build(train_vit.Images(vit), 64, None, seed=0).head.weight.any()


def test_a_learning_rate_warms_up_and_decays_to_a_tenth():
    rates = [compare.warmup_cosine(step, 100) for step in range(101)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[100] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_a_batch_depends_on_seed_and_step_alone(text, tmp_path):
    options = train_options(["--data", str(text), "--seed", "3"])
    one, other = train_gpt.Text(options), train_gpt.Text(options)
    assert all(torch.equal(a, b) for a, b in zip(one.batch(5), other.batch(5), strict=True))
    assert not torch.equal(one.batch(5)[0], one.batch(6)[0])
    inputs, targets = one.batch(5)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def train_options(arguments, **defaults):
    sizes = {"width": 32, "depth": 1, "steps": 4, "batch": 2, "context": 16, "out": Path()}
    return compare.arguments("", "", sizes | defaults).parse_args(arguments)


# ---- checkpoints ---------------------------------------------------------------------------------


def test_an_interrupted_run_ends_as_an_uninterrupted_one(text, tmp_path, monkeypatch):
    arguments = [*GPT, "--data", str(text), "--steps", "8", "--out"]
    whole = train_gpt.main([*arguments, str(tmp_path / "whole")])
    written, replace = [], os.replace

    def interrupted(source, target):
        replace(source, target)
        written.append(target)
        if len(written) == 13:  # in the middle of the second run
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(SystemExit, match="same command goes on"):
        train_gpt.main([*arguments, str(tmp_path / "parts")])
    assert {path.stem for path in (tmp_path / "parts").iterdir()} == {*RUNS[:2]}
    monkeypatch.setattr(os, "replace", replace)
    parts = train_gpt.main([*arguments, str(tmp_path / "parts")])
    assert curves(parts) == curves(whole)  # bit-equal
    for name in RUNS:
        one, other = (
            torch.load(tmp_path / folder / f"{name}.pt", weights_only=True)["history"]["losses"]
            for folder in ("whole", "parts")
        )
        assert len(one) == 8
        assert one == other


def test_a_finished_run_is_not_repeated(text, tmp_path, monkeypatch):
    arguments = [*GPT, "--data", str(text), "--out", str(tmp_path)]
    first = train_gpt.main(arguments)
    monkeypatch.setattr(torch.optim.AdamW, "step", None)
    assert train_gpt.main(arguments) == first


def test_a_checkpoint_of_another_configuration_is_refused(text, tmp_path, capsys):
    arguments = [*GPT, "--data", str(text), "--out", str(tmp_path)]
    train_gpt.main(arguments)
    capsys.readouterr()
    changed = ("--steps", "7", "--lr", "0.5", "--optimizer", "muon")
    message = error_of(train_gpt.main, capsys, *arguments, *changed)
    for part in (
        "dense.pt",
        "steps is 6 there and 7 here",
        "lr is 0.",
        "optimizer is 'adamw' there and 'muon' here",
        "0.5 here",
        "another --out",
    ):
        assert part in message
    message = error_of(train_gpt.main, capsys, *arguments, "--structure", "kronecker")
    assert "structured.pt" in message
    assert "structure is 'BTT(rank=1), silu' there and 'Kronecker(), silu' here" in message


@pytest.mark.parametrize(
    "content", [b"", b"not a checkpoint", pickle.dumps({"config": print}, protocol=2)]
)
def test_a_file_that_is_no_checkpoint_is_refused(text, tmp_path, capsys, content):
    (tmp_path / "structured.pt").write_bytes(content)
    message = error_of(train_gpt.main, capsys, *GPT, "--data", str(text), "--out", str(tmp_path))
    assert "structured.pt is not a checkpoint" in message


# ---- text ----------------------------------------------------------------------------------------


def test_the_default_text_is_ascii_documentation_and_source():
    text = train_gpt.read_text(None)
    assert text.isascii()
    assert len(text) > 1_000_000
    assert "def " in text
    assert text == train_gpt.read_text(None)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "no such file"),
        (b"", "has 0 characters"),
        (b"a short text", "has 12 characters"),
        (b"a" * 5000, "the text is 'a' throughout"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe" * 100, "not text"),
        (b"zeros\0" * 100, "not text"),
    ],
)
def test_what_is_not_a_text_long_enough_is_refused(tmp_path, capsys, content, part):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert part in error_of(train_gpt.main, capsys, *GPT, "--data", str(path))


def test_a_folder_is_no_text(tmp_path, capsys):
    assert "it is a folder" in error_of(train_gpt.main, capsys, *GPT, "--data", str(tmp_path))


# ---- images --------------------------------------------------------------------------------------


def write_cifar(folder, images=6, protocol=2, **changed):
    draw = np.random.default_rng(0)
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        content = {
            b"data": draw.integers(0, 256, (images, 3072), dtype=np.uint8),
            b"labels": [int(label) for label in draw.integers(0, 10, images)],
        }
        content.update({key.encode(): value for key, value in changed.items()})
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))


def test_vit_learns_the_digits(capsys):
    size = ["--width", "64", "--steps", "100", "--batch", "32", "--lr", "0.01"]
    rows = train_vit.main(["--smoke", "--device", "cpu", *size])
    assert all(row["accuracy"] > 0.3 for row in rows)  # ten classes
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("protocol", [2, 5])
def test_vit_reads_cifar_python_batches(tmp_path, protocol):
    write_cifar(tmp_path, protocol=protocol)
    (images, labels), (test_images, test_labels) = train_vit.read_images(tmp_path)
    assert images.shape == (12, 3, 32, 32)
    assert labels.shape == (12,)
    assert test_images.shape == (6, 3, 32, 32)
    first = pickle.loads((tmp_path / "data_batch_1").read_bytes())
    assert np.array_equal(images[0, 2, 1], first[b"data"][0, 2 * 1024 + 32 : 2 * 1024 + 64])
    assert test_labels.tolist() == pickle.loads((tmp_path / "test_batch").read_bytes())[b"labels"]
    assert len(train_vit.main([*VIT, "--data", str(tmp_path)])) == 4


def test_vit_reads_an_npz(tmp_path, images):
    pixels, labels = images
    np.savez(tmp_path / "small.npz", images=pixels, labels=labels)
    for path in (tmp_path, tmp_path / "small.npz"):
        (train, _), (held, held_labels) = train_vit.read_images(path)
        assert (len(train), len(held)) == (16, 4)
    assert any(
        np.array_equal(held[0], image) and held_labels[0] == label
        for image, label in zip(*images, strict=True)
    )
    assert train_vit.as_tensors(held, held_labels)[0].shape == (4, 3, 8, 8)
    assert len(train_vit.main([*VIT, "--data", str(tmp_path)])) == 4


@pytest.mark.parametrize(
    ("arrays", "part"),
    [
        ({"images": np.zeros((9, 8, 8))}, "no array 'labels'"),
        (
            {"pictures": np.zeros((9, 8, 8)), "labels": np.zeros(9, int)},
            "no array 'images'; it has pictures, labels",
        ),
        ({"images": np.zeros((9, 8, 8)), "labels": np.zeros(8, int)}, "9 images and 8 labels"),
        ({"images": np.zeros((9, 64)), "labels": np.zeros(9, int)}, "images have shape (9, 64)"),
        ({"images": np.zeros((9, 8, 8)), "labels": np.full(9, 0.5)}, "labels are of dtype float64"),
        (
            {"images": np.zeros((0, 8, 8)), "labels": np.zeros(0, int)},
            "images of shape (0, 8, 8) are empty",
        ),
        ({"images": np.zeros((4, 8, 8)), "labels": np.zeros(4, int)}, "4 images are too few"),
        ({"images": np.full((9, 8, 8), np.nan), "labels": np.zeros(9, int)}, "not finite"),
        ({"images": np.zeros((9, 8, 8)), "labels": np.full(9, -1)}, "a label below 0"),
        ({"images": np.zeros((9, 31, 37)), "labels": np.zeros(9, int)}, "31 x 37"),
        (
            {"images": np.array([print] * 9), "labels": np.zeros(9, int)},
            "not an .npz of images and labels",
        ),
    ],
)
def test_an_npz_that_does_not_fit_is_refused(tmp_path, capsys, arrays, part):
    np.savez(tmp_path / "bad.npz", **arrays)
    assert part in error_of(train_vit.main, capsys, *VIT, "--data", str(tmp_path / "bad.npz"))


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4 broken", b"\x93NUMPY"])
def test_a_file_that_is_no_npz_is_refused(tmp_path, capsys, content):
    (tmp_path / "bad.npz").write_bytes(content)
    assert "not an .npz" in error_of(
        train_vit.main, capsys, *VIT, "--data", str(tmp_path / "bad.npz")
    )


def test_a_folder_without_images_is_refused(tmp_path, capsys):
    assert "neither" in error_of(train_vit.main, capsys, *VIT, "--data", str(tmp_path))
    assert "no such file" in error_of(
        train_vit.main, capsys, *VIT, "--data", str(tmp_path / "absent")
    )


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    "changed",
    [{"labels": Evil()}, {"data": None}, {"data": np.zeros((6, 100), np.uint8)}, {"labels": "abc"}],
)
def test_a_pickle_that_is_no_cifar_batch_is_refused(tmp_path, capsys, monkeypatch, changed):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path, **changed)
    message = error_of(train_vit.main, capsys, *VIT, "--data", str(tmp_path))
    assert "data_batch_1 is not a python batch of CIFAR-10" in message
    assert not (tmp_path / "evil").exists()


def test_an_activation_between_the_cores_is_named_and_changes_the_loss(text, tmp_path):
    options = [*GPT, "--data", str(text), "--width", "64"]
    plain, silu = (
        train_gpt.main([*options, *between, "--out", str(tmp_path / between[1])])[2]
        for between in (["--between", "none"], ["--between", "silu", "--attention", "1"])
    )
    assert silu["label"] == plain["label"] + ", silu"
    assert silu["params"] == plain["params"]
    assert silu["loss"] != plain["loss"]


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--steps", "0"], "not a positive integer"),
        (["--depth", "-1"], "not a positive integer"),
        (["--lr", "nan"], "not a positive number"),
        (["--lr", "fast"], "not a positive number"),
        (["--structure", "lowrank"], "--structure lowrank needs --rank"),
        (["--structure", "monarch", "--rank", "2"], "Monarch has no option 'rank'"),
        (["--structure", "monarch", "--blocks", "5"], "blocks=5 does not divide"),
        (["--structure", "dense"], "--structure dense has one core: pass --between none"),
        (["--structure", "blockdiagonal", "--blocks", "4"], "has one core: pass --between none"),
        (["--attention", "4", "--between", "none"], "--attention 4 needs --between silu"),
        (["--rank", "100"], "rank=100 is over the useful bound"),
        (["--seed", "-1"], "not an integer from 0"),
        (["--device", "nowhere"], "'nowhere' does not work here"),
        (["--device", "meta"], "'meta' does not work here"),
        (["--learning-rate", "1"], "unrecognized arguments"),
    ],
)
def test_a_bad_option_is_refused(text, capsys, arguments, part):
    assert part in error_of(train_gpt.main, capsys, *GPT, "--data", str(text), *arguments)


def test_a_width_is_whole_heads_where_the_number_of_heads_is_not_fixed(capsys):
    message = error_of(train_vit.main, capsys, *VIT, "--width", "48")
    assert "--width 48 is not a multiple of the head size 32" in message


def test_the_structured_layers_of_a_gpt_are_weight_normalised_and_those_of_a_vit_are_not(text):
    gpt, vit = train_options(["--data", str(text)]), train_options([])
    for task, normalised in ((train_gpt.Text(gpt), True), (train_vit.Images(vit), False)):
        model = compare.build(task, 64, structlin.BTT(), seed=0)
        layers = [part for part in model.modules() if isinstance(part, structlin.StructuredLinear)]
        assert len(layers) == 4
        assert {layer.gains is not None for layer in layers} == {normalised}


def test_muon_trains_dense_and_structured_at_one_rate(text, tmp_path):
    options = [*GPT, "--data", str(text), "--optimizer", "muon", "--out", str(tmp_path)]
    rows = train_gpt.main([*options, "--steps", "40", "--batch", "8"])
    assert [row["run"] for row in rows] == RUNS
    assert all(row["lr"] == [0.002, compare.MUON_LR] for row in rows)
    assert all(row["bits/char"] < 3.5 for row in rows)  # log2(30 characters) is 4.9


def test_with_amp_the_products_are_bfloat16_and_the_parameters_are_not(
    text, tmp_path, capsys, monkeypatch
):
    options = [*GPT, "--data", str(text), "--steps", "2", "--out", str(tmp_path)]
    plain, seen = compare.F.cross_entropy, set()

    def watch(logits, *rest, **how):
        seen.add(logits.dtype)
        return plain(logits, *rest, **how)

    monkeypatch.setattr(compare.F, "cross_entropy", watch)
    train_gpt.main([*options, "--amp"])
    assert seen == {torch.bfloat16}
    state = torch.load(tmp_path / "structured.pt", weights_only=True)
    assert {value.dtype for value in state["model"].values()} == {torch.float32}
    capsys.readouterr()
    assert "amp is True there and None here" in error_of(train_gpt.main, capsys, *options)
