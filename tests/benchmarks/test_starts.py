"""benchmarks.training.starts: its starts, what its models read, and what its table says."""

import doctest
import math

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("matplotlib")

from benchmarks.training import starts
from benchmarks.zoo import import_timm
from structlin import StructuredLinear

SMALL = starts.EXPERIMENT.smoke["sizes"]


def build(name):
    pytest.importorskip({"GPT-2": "transformers", "ViT": "timm"}.get(name, "torch"))
    import_timm()
    torch.manual_seed(0)
    return starts.build(name, SMALL, 97)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, StructuredLinear)]


@pytest.mark.parametrize("name", ["GPT-2", "ViT", "MLP"])
def test_a_factor_that_is_shared_evenly_leaves_the_matrix(name):
    torch.manual_seed(0)
    alone = layers_of(starts.restart(build(name), name, "BTT r=1", "match"))
    torch.manual_seed(0)
    shared = layers_of(starts.restart(build(name), name, "BTT r=1", "evenly"))
    assert len(alone) == len(shared) > 1
    for one, other in zip(alone, shared, strict=True):
        share = one.init_scale**0.5
        assert_close(other.cores[0], one.cores[0] * share)
        assert_close(other.cores[1], one.cores[1] / share)
        assert_close(other.to_dense(), one.to_dense())


def test_the_ways_to_start_are_what_the_module_says():
    def made(way):
        return layers_of(starts.restart(build("MLP"), "MLP", "BTT r=1", way))

    assert all(layer.gains is not None for layer in (*made("match, norm"), *made("paper")))
    assert all(layer.gains is None for layer in made("match"))
    assert [layer.init_scale for layer in made("mup")] == [1.0] * 3
    assert made("paper")[-1].cores[-1].count_nonzero() == 0


def test_a_gpt_predicts_every_next_character_and_the_mlp_the_last():
    data, size, heldout = starts.load("GPT-2", 0, {"batch": 3, "heldout": 5})
    inputs, targets = data.batch(size)
    assert inputs.shape == targets.shape == (3, starts.CONTEXT)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert len(data.new(heldout)[0]) == heldout == 5
    assert not data.new(heldout)[0][:3].equal(inputs)
    data, size, heldout = starts.load("MLP", 0, {"batch": 3, "heldout": 5})
    inputs, targets = data.batch(size)
    assert inputs.shape == (24, starts.WINDOW)
    assert targets.shape == (24,)
    assert len(data.new(heldout)[0]) == heldout == 80


def test_a_run_is_a_function_of_its_seed():
    run = {**starts.job_of(("MLP", "AdamW", "BTT r=1", "match")), "lr": 1e-3, "sizes": SMALL}
    first, second = (starts.train(**run, seed=0) for _ in range(2))
    assert first == second
    assert first["loss"] != starts.train(**run, seed=1)["loss"]


def rows(losses):
    """Dense at two rates, one start at dense's best; three seeds."""
    found = [("", "dense", 1.0, 0, 3.0), ("", "dense", 2.0, 0, 9.0)]
    found += [("", "dense", 1.0, n, 3.0 + n) for n in (1, 2)]
    found += [("BTT r=1", "match", 1.0, n, loss) for n, loss in enumerate(losses)]
    return [
        {"model": "MLP", "optimizer": "AdamW", "structure": s, "start": w, "lr": lr, "seed": n}
        | {"loss": loss}
        for s, w, lr, n, loss in found
    ]


def test_a_start_is_compared_with_dense_of_the_same_seed_at_denses_best_rate():
    found = starts.compare_starts(rows([3.3, 4.4, 5.5]))
    logs = found["MLP", "AdamW", "BTT r=1", "match"]
    assert logs == pytest.approx([math.log(1.1)] * 3)
    result = {"rows": rows([3.3, 4.4, 5.5]), "setting": {"seeds": 3}}
    assert "BTT" not in starts.show(result, tuned=True)
    text = starts.show(result)
    assert "| MLP, AdamW, BTT r=1 | +10.0 ± 0.0 |" in text


def test_a_run_that_diverged_is_said():
    text = starts.show({"rows": rows([3.3, 4.4, None]), "setting": {"seeds": 3}})
    assert "+inf" in text


def test_the_examples_in_the_docstrings_give_what_they_show():
    results = doctest.testmod(starts)
    assert results.attempted
    assert not results.failed
