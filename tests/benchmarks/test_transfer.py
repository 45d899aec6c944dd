"""What benchmarks.transfer trains and reports, and what docs/transfer.md says of its result."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

from benchmarks import transfer
from benchmarks.record import read


def test_a_deeper_network_starts_with_branches_that_add_up_to_as_much():
    sizes = []
    for depth in (2, 32):
        model = transfer.build_model("dense", 64, depth, 0)
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
        start = model.embed(x)
        end = start
        for block in model.blocks:
            assert block.multiplier == 2 / depth
            for layer in (block.fc1, block.fc2):
                nn.init.eye_(layer.cores[0][0] if hasattr(layer, "cores") else layer.weight)
                nn.init.zeros_(layer.bias)
            end = block(end)
        sizes.append((end - start).square().mean().sqrt().item())
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)


def rows_of(shift, structure="dense", method="AdamW", axis="width"):
    """Losses whose parabola over log2 of the rate has its vertex at -6, and `shift` above."""
    rows = []
    for size, centre in ((64, -6.0), (256, -6.0 + shift)):
        for power in range(-9, -2):
            loss = 2.0 ** ((power - centre) ** 2 / 8)
            shared = {"structure": structure, "method": method, "axis": axis, "size": size}
            rows += [{**shared, "lr": 2.0**power, "seed": n, "loss": loss} for n in range(3)]
    return rows


def test_the_shift_is_that_of_the_vertex_off_the_base_point():
    (row,) = transfer.summarise(rows_of(0.4))
    assert row["shifts"] == pytest.approx({"64": 0.0, "256": 0.4})
    assert row["optima"]["64"] == pytest.approx(-6)
    assert row["over seeds"]["low"] == pytest.approx(0.4)
    assert row["bracketed"]


@pytest.mark.parametrize(("shift", "within"), [(0.49, "yes"), (-0.51, "**no**")])
def test_the_verdict_is_the_farthest_shift_of_all_structures_and_axes(shift, within):
    rows = []
    for method in transfer.OPTIMIZERS:
        rows += rows_of(0.1, method=method)
        rows += rows_of(shift if method == "Muon" else 0.0, "BTT r=1", method)
    result = {"summary": transfer.summarise(rows)}
    lines = transfer.farthest(result).splitlines()
    muon = next(line for line in lines if line.startswith("| Muon"))
    assert (
        muon
        == f"| Muon | {abs(shift):.2f} | {within} | {2 if within == 'yes' else 1} of 2 | "
        + (f"{abs(shift):.2f} |")
    )
    assert transfer.largest(result["summary"], "Normed") == pytest.approx((0.1, 0.1))


def test_a_run_that_is_kept_is_not_trained_again(monkeypatch):
    trained = []
    monkeypatch.setattr(transfer, "_tuned", lambda row, steps: trained.append(row) or 1.0)
    monkeypatch.setitem(transfer.AXES, "width", [64])
    job = ("dense", "AdamW", "width")
    rows = transfer.seek(job, {}, seeds=2, steps=1)
    assert len(trained) == len(rows) > 0
    kept = {transfer._key(row): row for row in rows}
    assert transfer.seek(job, kept, seeds=2, steps=1) == rows
    assert len(trained) == len(rows)


def test_a_fifth_of_the_labels_that_are_learned_is_wrong_and_no_image_is_in_both_halves():
    (x, labels), (held, _) = transfer.noisy_digits()
    images, right = transfer.digits()
    assert len(x) + len(held) == len(images)
    lookup = {
        tuple(image): label for image, label in zip(images.tolist(), right.tolist(), strict=True)
    }
    wrong = [
        lookup[tuple(i)] != label for i, label in zip(x.tolist(), labels.tolist(), strict=True)
    ]
    assert 0.13 < sum(wrong) / len(wrong) < 0.23  # a tenth of those drawn is right
    assert not {tuple(image) for image in x.tolist()} & {tuple(image) for image in held.tolist()}


# ---- docs/transfer.md ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def summary():
    return read("transfer")["summary"]


@pytest.fixture(scope="module")
def page():
    path = Path(__file__).parents[2] / "docs" / "transfer.md"
    return " ".join(path.read_text(encoding="utf-8").split())


def chosen(summary, method, *axes):
    return [row for row in summary if row["method"] == method and row["axis"] in axes]


def test_what_is_said_of_the_best_rates_is_what_the_kept_result_has(summary, page):
    names = ("AdamW", "Muon", "Normed")
    own, dense = zip(*(transfer.largest(summary, name) for name in names), strict=True)
    assert "one rate of Normed, tuned on the dense model at the base point, is within" in page
    assert max(own[2], dense[2]) <= 0.5
    assert "Muon's is so off each structure's own base point" in page
    assert own[1] <= 0.5
    assert "AdamW's but for BTT r=4 in 16 blocks" in page
    far = [
        (row["structure"], row["axis"], size)
        for row in chosen(summary, "AdamW", "width", "depth")
        for size, shift in row["shifts"].items()
        if abs(shift) > 0.5
    ]
    assert far == [("BTT r=4", "depth", "16")]
    assert "off dense's base point both are within a factor of 2" in page
    assert 0.5 < min(dense[:2]) <= max(dense[:2]) <= 1
    rows = chosen(summary, "AdamW", "depth")
    assert next(row["cost"] for row in rows if row["structure"] == "BTT r=4") < 1.005
    cross = [row for row in summary if row["axis"] in ("width", "depth")]
    assert all(row["bracketed"] for row in cross)
    assert f"costs up to a factor of {max(row['cost'] for row in cross):.2f} of the loss" in page


def test_what_is_said_of_batch_and_duration_is_what_the_kept_result_has(summary, page):
    assert "AdamW's hardly moves with the batch" in page
    for row in chosen(summary, "AdamW", "batch"):
        assert max(map(abs, row["shifts"].values())) < 0.25
    assert "Muon's moves in the rule's direction, and by less" in page
    for row in chosen(summary, "Muon", "batch"):
        assert -1 < row["shifts"]["16"] < 0 < row["shifts"]["256"] < 1
    assert (
        "Muon's falls with the steps by a power between 1/2 and 1, AdamW's by one below 1/2" in page
    )
    for method, least, most in (("Muon", 0.5, 1.0), ("AdamW", 0.0, 0.5)):
        for row in chosen(summary, method, "steps"):
            power = (row["shifts"]["25"] - row["shifts"]["200"]) / 3
            assert least < power < most


def test_what_is_said_of_decay_is_what_the_kept_result_has(summary, page):
    assert "The loss hardly depends on the decay here" in page
    rows = [row for row in summary if row["axis"] == "decay"]
    assert len(rows) == 6
    assert all(row["cost"] < 1.05 for row in rows)


def test_what_the_page_says_was_not_run_was_not(page):
    result = read("transfer")
    setting = result["setting"]
    assert "widths 256 and 1024 with 2 blocks, and 16 blocks at width 64" in page
    assert setting["axes"]["width"] == [64, 256, 1024]
    assert setting["axes"]["depth"] == [2, 16]
    assert "50 steps at batch 64" in page
    assert (setting["steps"], setting["batch"], setting["seeds"]) == (50, 64, 3)
    assert "width 1024 for Muon and Normed on dense and Monarch layers" in page
    ran = {(row["structure"], row["method"], row["size"]) for row in result["rows"]}
    left = {tuple(each) for each in setting["not run"]}
    assert left == {(s, m, 1024) for s in ("dense", "Monarch") for m in ("Muon", "Normed")}
    assert not left & ran
    assert len({row[:2] for row in ran if row[1] in ("AdamW", "Muon", "Normed")}) == 18
