"""What benchmarks.training.decay trains and reports."""

import math
from itertools import product

import pytest

pytest.importorskip("matplotlib")

from benchmarks.harness.record import read
from benchmarks.training import decay


def test_a_fifth_of_the_labels_that_are_learned_is_wrong_and_no_image_is_in_both_halves():
    (x, labels), (held, _) = decay.noisy_digits()
    images, right = decay.digits()
    assert len(x) + len(held) == len(images)
    lookup = {
        tuple(image): label for image, label in zip(images.tolist(), right.tolist(), strict=True)
    }
    wrong = [
        lookup[tuple(i)] != label for i, label in zip(x.tolist(), labels.tolist(), strict=True)
    ]
    assert 0.13 < sum(wrong) / len(wrong) < 0.23  # a tenth of those drawn is right
    assert not {tuple(image) for image in x.tolist()} & {tuple(image) for image in held.tolist()}


def bowl(lr, weight_decay, centre):
    """Its log is least at log2 (rate, decay) = `centre`; the best rate falls with the decay."""
    a, b = math.log2(lr) - centre[0], math.log2(weight_decay) - centre[1]
    return math.exp(0.1 * (a * a + a * b + b * b))


def search(job, rows, centres, seeds=2):
    """What is added to `rows` until nothing more is asked for."""
    start = decay.start_of(job, rows)
    found = decay.select(rows, **job)
    while more := decay.next_pairs(found, (job["search"], start)):
        centre = centres[job["width"], job["depth"]]
        for pair, seed in product(more, range(seeds)):
            found.append({**job, **pair, "seed": seed, "loss": bowl(**pair, centre=centre)})
    return found


def test_rate_and_decay_are_searched_until_the_best_has_its_eight_neighbours():
    base, far, *_ = decay.POINTS
    centres = {base: (-4.0, -6.0), far: (-5.0, -6.0)}
    names = ("search", "structure", "method", "rule", "width", "depth")
    job = dict(zip(names, (decay.BOTH, "dense", "AdamW", "1/width", *base), strict=True))
    rows = search(job, [], centres)
    losses = decay.surface(rows)
    assert decay.best(losses) == (2.0**-4, 2.0**-6)
    around = {(2.0**a, 2.0**b) for a in (-5, -4, -3) for b in (-8, -6, -4)}
    assert around <= losses.keys()
    assert len(rows) == 2 * len(losses)
    assert search(job, rows, centres) == rows
    corner = search(job | {"width": far[0], "depth": far[1]}, rows, centres)
    assert (2.0**-4, 2.0**-6) in decay.surface(corner)
    assert decay.best(decay.surface(corner)) == (2.0**-5, 2.0**-6)


def test_what_is_carried_over_is_the_base_points_best_and_its_loss_there():
    base, far, *_ = decay.POINTS
    centres = dict.fromkeys(decay.POINTS, (-4.75, -4.0)) | {base: (-4.0, -6.0)}
    rows = []
    for job in decay.plan(decay.EXPERIMENT.axes):
        if job["search"] == decay.BOTH:
            rows += search(job, rows, centres)
    found = decay.summarise_both(rows)
    alike = [row for row in found if row["method"] != "Muon"]
    assert len(alike) == 2 * len(decay.STRUCTURES) * len(decay.POINTS)
    assert len(found) - len(alike) == len(decay.OF_MUON)
    there = bowl(2.0**-4, 2.0**-6, centres[far])
    for row in found:
        if (row["width"], row["depth"]) == base:
            assert (row["shift"], row["cost"]["value"]) == (0.0, 1.0)
            continue
        assert (row["rate"], row["decay"]) == pytest.approx((-4.75, -4.0))
        assert row["shift"] == pytest.approx(-0.75)
        assert row["kept"] == pytest.approx(there)
        assert row["cost"]["low"] == pytest.approx(there / bowl(2.0**-5, 2.0**-4, centres[far]))


# ---- the kept result -----------------------------------------------------------------------------
def test_the_points_of_the_kept_result_were_run_whole():
    result = read("decay")
    assert len(result["decay"]) == 6
    assert result["setting"]["lr"] == 2.0**-7
    assert result["setting"]["widths"] == [64, 512]
    away = [row for row in result["rate and decay"] if (row["width"], row["depth"]) != (64, 2)]
    ran = {(row["structure"], row["method"], row["width"], row["depth"]) for row in away}
    both = product(decay.STRUCTURES, ("AdamW", decay.NORMED), decay.POINTS[1:])
    assert ran == {(s, m, *point) for s, m, point in both}  # Muon's point is struck
