"""What follows from the runs of `benchmarks.training.gpt_seconds`, on rows made by hand."""

from argparse import Namespace

import pytest

pytest.importorskip("matplotlib")

from benchmarks.training import gpt_seconds
from structlin import StructuredLinear

KIND = "BTT r=1 + SiLU everywhere"
WHERE = {"setup": "Python", "optimizer": "AdamW", "width": 256}


def make_row(kind, length, seed, loss, lr=0.004):
    at = {"kind": kind, "length": length, "seed": seed, "lr": lr, "loss": loss}
    size = {"flops": 4 if kind == "dense" else 1, "params": 1, "steps": round(100 * length)}
    return {**WHERE, **at, **size}


DENSE = [make_row("dense", 1.0, seed, 2.0) for seed in (0, 1, 2)]
TIMES = [
    {**WHERE, "kind": "dense", "median": 1.0, "p20": 1.0, "p80": 1.0},
    {**WHERE, "kind": KIND, "median": 0.5, "p20": 0.4, "p80": 0.6},
]


def compare(losses):
    rows = [*DENSE, *(make_row(KIND, *of, loss) for of, loss in losses.items())]
    return gpt_seconds.compare_kinds(rows, TIMES)


def test_a_structure_that_ends_at_the_loss_of_dense_saves_what_its_step_saves():
    dense, mine = compare({(1.0, seed): 2.0 for seed in (0, 1, 2)})
    assert dense["seconds"] == dense["flops"] == 1
    assert (mine["seconds"], mine["spread"]) == (0.5, [0.4, 0.6])
    assert mine["until"]["seconds"]["by_seed"] == [2, 2, 2]
    assert mine["until"]["flops"]["value"] == 4


def test_half_a_schedule_that_is_enough_counts_for_all_its_seeds_alone():
    losses = {(1.0, seed): 1.5 for seed in (0, 1, 2)} | {(0.5, seed): 2.0 for seed in (0, 1, 2)}
    longest, half = compare(losses)[1:]
    assert (longest["until"]["seconds"]["value"], "until" in half) == (4, False)
    del losses[0.5, 2]  # seed 2 has no half
    (_, longest, _) = compare(losses)
    assert longest["until"]["seconds"]["value"] == 2
    assert longest["until"]["seconds"]["by_seed"] == [2, 2, 2]


def test_a_structure_that_stays_above_never_gets_there():
    assert compare({(1.0, seed): 2.1 for seed in (0, 1, 2)})[1]["until"]["seconds"]["value"] == 0


def test_only_the_rate_that_is_best_on_the_longest_schedule_of_a_width_counts():
    looks = [make_row("dense", 1.0, 0, loss, lr) for lr, loss in ((0.002, 2.2), (0.008, 2.1))]
    short = make_row("dense", 0.25, 0, 1.0, lr=0.008)
    wide = [make_row("dense", 1.0, 0, lr, lr) | {"width": 512} for lr in (0.002, 0.004)]
    assert gpt_seconds.at_best_rates([*looks, short, *DENSE, *wide]) == [*DENSE, wide[0]]
    assert gpt_seconds.at_best_rates(DENSE[1:]) == []  # no seed says which rate is best


def test_dense_alone_is_tuned_at_every_width_and_all_seeds_have_the_best_rate():
    made = []

    class Runs:
        options = Namespace(smoke=False)

        def of(self, jobs):
            found = [job | {"loss": loss(job)} for job in jobs]
            made.extend(row for row in found if row not in made)
            return found

        def all(self):
            return made

    def loss(job):  # the lower the better at width 512, down to a quarter
        return 1 + abs(job["lr"] - (0.001 if job["width"] == 512 else 0.004))

    axes = {"setup": ["Python"], "optimizer": ["AdamW"], "kind": ["dense", KIND]}
    axes |= {"width": [256, 512], "length": [1.0, 0.5], "seed": range(2)}
    gpt_seconds.design(Runs(), axes)

    def tried(seed, **where):
        rows = (row for row in made if (where | {"seed": seed}).items() <= row.items())
        return {1000 * row["lr"] for row in rows}

    assert tried(0, kind="dense", width=256) == {2, 4, 8}
    assert tried(0, kind="dense", width=512) == {0.5, 1, 2, 4}
    assert [tried(1, kind="dense", width=width) for width in (256, 512)] == [{4}, {1}]
    assert tried(0, kind=KIND, width=512) == tried(1, kind=KIND) == {4}
    assert len(gpt_seconds.at_best_rates(made)) == 2 * 2 * 2 * 2


@pytest.mark.parametrize("kind", [kind for kind in gpt_seconds.KINDS if "no zero" in kind])
def test_without_a_zero_start_nothing_starts_at_zero_and_muon_has_its_momentum(kind):
    sizes = {"context": 16, "batch": 2, "depth": 1, "steps": 1}
    model, muon = gpt_seconds.make_trainer("Python", "Muon", kind, 64, 0.01, 0, sizes)
    layers = [layer for layer in model.modules() if isinstance(layer, StructuredLinear)]
    assert layers
    assert all(parameter.any() for parameter in model.parameters())
    assert all(layer.gains is None for layer in layers)
    assert muon.defaults["momentum"] == gpt_seconds.MOMENTUM == 0.85
