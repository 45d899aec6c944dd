"""Mamba reads its layers' weights as well as calling them."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.zoo import TOKENS, mamba
from structlin import BTT, StructuredLinear, convert, load, param_groups, save


def converted() -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these layers grow")
        return convert(mamba(), BTT(rank=2))


def test_mamba_is_converted_and_trains():
    model = converted()
    mixer = model.backbone.layers[0].mixer
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        assert isinstance(getattr(mixer, name), StructuredLinear), name
    assert not isinstance(model.lm_head, StructuredLinear)
    optimizer = torch.optim.AdamW(param_groups(model, 3e-3))
    losses = []
    for _ in range(8):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for name, p in model.named_parameters() if ".cores." in name)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_mamba_is_saved_and_loaded_bit_equal(tmp_path):
    model = converted().eval()
    save(model, tmp_path / "m")
    loaded = load(mamba(), tmp_path / "m").eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
