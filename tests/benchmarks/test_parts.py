"""The parts of a step: what is taken out is out, and in again afterwards; remedies compute the
same."""

import doctest
import json
from contextlib import nullcontext

import pytest
from torch import nn
from torch.testing import assert_close

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from benchmarks.speed import parts
from structlin import StructuredLinear

SMALL = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 40}


@pytest.fixture(scope="module")
def step():
    return parts.Step(SMALL, batch=2, context=80)


def gradients(step, change):
    optimizer, step.optimizer = step.optimizer, None
    with change():
        loss = step()
    step.optimizer = optimizer
    return loss, [p.grad.clone() for p in step.model.parameters()]


def test_every_way_of_the_head_alone_has_the_same_gradients():
    works = parts.losses(16, 40, 24)
    assert len(works) == 7
    for (head, _), work in works.items():
        assert_close(work(), works[head, "all logits"]())


def test_a_remedy_that_claims_to_compute_the_same_does(step):
    loss, plain = gradients(step, nullcontext)
    remedies = parts.remedies(step)
    names = ("GELU as one operation", "loss in chunks", "both", "attention as separate operations")
    for name in names:
        found, grads = gradients(step, remedies[name])
        assert_close(found, loss, rtol=1e-5, atol=1e-6)
        assert_close(grads, plain, rtol=1e-4, atol=1e-5)


def test_what_is_taken_out_is_out_and_in_again_afterwards(step):
    before = {name: type(module) for name, module in step.model.named_modules()}
    names = (step.loss, step.optimizer, step.model.config._attn_implementation)
    changed = {**parts.shares(step), **parts.remedies(step)}
    assert len(changed) == 7 + 8
    for name, change in changed.items():
        with change():
            now = {key: type(module) for key, module in step.model.named_modules()}
            new = (step.loss, step.optimizer, step.model.config._attn_implementation)
            assert now != before or new != names, name
            kinds = {kind for key, kind in now.items() if key.startswith("transformer.h")}
            assert (nn.LayerNorm in kinds) is (name != "norms")
            assert (StructuredLinear in kinds) is not name.startswith("linear")
        assert {key: type(module) for key, module in step.model.named_modules()} == before
        assert (step.loss, step.optimizer, step.model.config._attn_implementation) == names


def test_a_step_without_an_optimizer_moves_nothing_and_one_with_moves(step):
    before = [p.detach().clone() for p in step.model.parameters()]
    with parts.shares(step)["optimizer (AdamW, fused)"]():
        step()
    assert all(p.equal(old) for p, old in zip(step.model.parameters(), before, strict=True))
    step()
    assert not all(p.equal(old) for p, old in zip(step.model.parameters(), before, strict=True))


def test_the_same_command_adds_its_rounds_and_keeps_the_other_piece(tmp_path):
    for only in ("shares", "heads", "remedies", "shares"):
        parts.main(["--smoke", "--only", only, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "parts.json").read_text())
    assert result["shares"]["rows"][0]["name"] == parts.FULL  # measured twice a round
    assert [len(row["ms"]) for row in result["shares"]["rows"]] == [8] + 7 * [4]
    assert [len(row["ms"]) for row in result["remedies"]["rows"]] == [4] + 8 * [2]
    assert [len(row["ms"]) for row in result["heads"]["rows"]] == 7 * [2]
    assert all(row["peak_bytes"] > 0 for row in result["heads"]["rows"])


def test_the_time_of_a_change_is_that_of_fast_rounds():
    rows = [{"name": parts.FULL, "ms": [10, 10, 30]}, {"name": "norms", "ms": [8, 8, 30]}]
    assert parts.parts_of_whole(rows) == {parts.FULL: 1, "norms": 0.8}
    assert not doctest.testmod(parts).failed
