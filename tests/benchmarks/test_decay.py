"""What benchmarks.decay trains and reports, and what docs/transfer.md says of its result."""

import math
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import decay
from benchmarks.record import read


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


def search(job, rows, monkeypatch, centres, seeds=2):
    trained = []

    def held_out_loss(row, steps):
        trained.append(row)
        return bowl(row["lr"], row["weight_decay"], centres[row["width"], row["depth"]])

    monkeypatch.setattr(decay, "held_out_loss", held_out_loss)
    found = decay.seek(job, rows, seeds, steps=1)
    return found, trained


def test_rate_and_decay_are_searched_until_the_best_has_its_eight_neighbours(monkeypatch):
    base, far, *_ = decay.POINTS
    centres = {base: (-4.0, -6.0), far: (-5.0, -6.0)}
    job = (decay.BOTH, "dense", "AdamW", "1/width", *base)
    rows, trained = search(job, [], monkeypatch, centres)
    losses = decay.surface(rows)
    assert decay.best(losses) == (2.0**-4, 2.0**-6)
    around = {(2.0**a, 2.0**b) for a in (-5, -4, -3) for b in (-8, -6, -4)}
    assert around <= losses.keys()
    assert len(trained) == len(rows) == 2 * len(losses)
    again, trained = search(job, rows, monkeypatch, centres)
    assert again == rows
    assert not trained
    corner, _ = search((*job[:4], *far), rows, monkeypatch, centres)
    assert (2.0**-4, 2.0**-6) in decay.surface(corner)
    assert decay.best(decay.surface(corner)) == (2.0**-5, 2.0**-6)


def test_what_is_carried_over_is_the_base_points_best_and_its_loss_there(monkeypatch):
    base, far, *_ = decay.POINTS
    centres = dict.fromkeys(decay.POINTS, (-4.75, -4.0)) | {base: (-4.0, -6.0)}
    rows = []
    for job in decay.plan():
        if job[0] == decay.BOTH:
            rows += search(job, rows, monkeypatch, centres)[0]
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
    table = decay.show_both({"rate and decay": found})
    assert "| dense, AdamW | -4.00, -6 | -0.75, +2, 1.35 | -0.75, +2, 1.35 |" in table
    assert "| BTT r=1, Muon | -4.00, -6 | -0.75, +2, 1.35 | not run | not run |" in table


# ---- docs/transfer.md ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def result():
    return read("decay")


@pytest.fixture(scope="module")
def page():
    path = Path(__file__).parents[2] / "docs" / "transfer.md"
    return " ".join(path.read_text(encoding="utf-8").split())


def test_what_is_said_of_decay_is_what_the_kept_result_has(result, page):
    assert "The loss hardly depends on the decay here" in page
    assert len(result["decay"]) == 6
    assert all(row["cost"] < 1.05 for row in result["decay"])
    setting = result["setting"]
    assert "training takes 150 steps" in page
    assert setting["steps"] == 150
    assert "AdamW at rate 2^-7 of the base" in page
    assert setting["lr"] == 2.0**-7
    assert setting["widths"] == [64, 512]


def test_what_is_said_of_rate_and_decay_is_what_the_kept_result_has(result, page):
    away = [row for row in result["rate and decay"] if (row["width"], row["depth"]) != (64, 2)]
    ran = {(row["structure"], row["method"], row["width"], row["depth"]) for row in away}
    normed = decay.NORMED
    both = product(decay.STRUCTURES, ("AdamW", normed), decay.POINTS[1:])
    assert ran == {(s, m, *point) for s, m, point in both} | {("BTT r=1", "Muon", 256, 16)}
    shifts = {m: [row["shift"] for row in away if row["method"] == m] for m in decay.DEFAULTS}
    most = {m: max(map(abs, found)) for m, found in shifts.items()}
    near = {m: sum(abs(shift) <= 0.5 for shift in found) for m, found in shifts.items()}
    assert (
        f"within sqrt 2 of the base point's at {near['AdamW']} of 18 points under AdamW and at "
        f"{near[normed]} of 18 under Normed" in page
    )
    assert len(shifts["AdamW"]) == len(shifts[normed]) == 18
    down = sum(shift < 0 for shift in shifts[normed])
    assert (
        f"It moves by up to {most['AdamW']:.2f} factors of 2 under AdamW, both ways, and "
        f"{most[normed]:.2f} under Normed, downwards at {down} of 18 points" in page
    )
    assert min(shifts["AdamW"]) < -0.5
    assert max(shifts["AdamW"]) > 0.5
    costs = [row["cost"] for row in away]
    assert (
        f"keeping the base point's rate and decay costs a factor of "
        f"{min(cost['value'] for cost in costs):.2f} to "
        f"{max(cost['value'] for cost in costs):.2f} of the loss" in page
    )
    shown = sum(cost["low"] > 1 for cost in costs)
    assert f"and in {shown} of {len(costs)} cases more than the seeds show" in page
