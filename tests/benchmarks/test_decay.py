"""What benchmarks.decay trains and reports, and what docs/transfer.md says of its result."""

import math
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
    base, far = decay.POINTS
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
    base, far = decay.POINTS
    centres = {base: (-4.0, -6.0), far: (-4.75, -4.0)}
    rows = []
    for structure in decay.FEW:
        for method, rule in decay.DEFAULTS.items():
            for point in decay.POINTS:
                job = (decay.BOTH, structure, method, rule, *point)
                rows += search(job, rows, monkeypatch, centres)[0]
    table = decay.summarise_both(rows)
    assert len(table) == 8
    assert [(row["shift"], row["cost"]["value"]) for row in table[::2]] == [(0.0, 1.0)] * 4
    for row in table[1::2]:
        assert (row["rate"], row["decay"]) == pytest.approx((-4.75, -4.0))
        assert row["shift"] == pytest.approx(-0.75)
        there = bowl(2.0**-4, 2.0**-6, centres[far])
        assert row["kept"] == pytest.approx(there)
        assert row["cost"]["low"] == pytest.approx(there / bowl(2.0**-5, 2.0**-4, centres[far]))


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
    corner = [row for row in result["rate and decay"] if row["width"] == 256]
    ran = [(row["structure"], row["method"], row["depth"]) for row in corner]
    assert ran == [("dense", "AdamW", 16), ("BTT r=1", "AdamW", 16), ("BTT r=1", "Muon", 16)]
    assert decay.LEFT_OUT == [("dense", "Muon", 256, 16)]
    assert "Muon on dense layers was not run at the corner." in page
    most = max(abs(row["shift"]) for row in corner)
    assert f"the best rate is within 2^{most:.2f} of the base point's" in page
    assert (most <= 0.5) == ("so within a factor of sqrt 2" in page)
    assert "up in two cases and down in one" in page
    assert sorted(row["shift"] > 0 for row in corner) == [False, True, True]
    costs = [row["cost"]["value"] for row in corner]
    assert (
        f"the base point's best rate and decay cost a factor of {min(costs):.2f} to "
        f"{max(costs):.2f} of the loss" in page
    )
    inside = [row for row in corner if row["kept"] <= row["seeds"][1]]
    assert (len(inside) == len(corner)) == ("no more than the seeds differ" in page)
