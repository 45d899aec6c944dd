"""What benchmarks.training.transfer trains and reports."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("matplotlib")

from benchmarks.harness.tasks import digits
from benchmarks.training import transfer

BASE = tuple(transfer.BASE.values())


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


def test_the_control_has_one_rate_for_all_parameters_and_branches_without_a_multiplier():
    method = transfer.METHODS["plain AdamW"]
    model = transfer.build_model("BTT r=1", 256, 8, 0, method.alpha)
    assert {block.multiplier for block in model.blocks} == {1.0}
    optimizer = method.make(model, 0.125, 256, alpha=1.0)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
    counted = sum(len(group["params"]) for group in optimizer.param_groups)
    assert counted == len(list(model.parameters()))


def rows_of(shift, structure="dense", method="AdamW", seeds=(0.0, 0.0, 0.0), **point):
    """Losses whose parabola over log2 of the rate has its vertex at -6 at the base point, and
    `shift` above, and `seeds` above that, at `point`."""
    rows = []
    for where, moved in ((transfer.BASE, 0.0), (transfer.BASE | (point or {"width": 256}), shift)):
        for power in range(-9, -2):
            for n, more in enumerate(seeds):
                centre = -6 + moved + (more if moved else 0.0)
                row = {"structure": structure, "method": method, **where}
                loss = 2.0 ** ((power - centre) ** 2 / 8)
                rows.append({**row, "lr": 2.0**power, "seed": n, "loss": loss})
    return rows


def test_the_shift_is_that_of_the_vertex_off_the_base_point():
    base, row = transfer.summarise(rows_of(0.4, width=1024, depth=16, seeds=(-0.2, 0.0, 0.2)))
    assert (base["shift"], base["width"], base["cost"]) == (0.0, 64, 1.0)
    assert (row["width"], row["depth"], row["batch"]) == (1024, 16, 64)
    assert (row["shift"], row["optimum"]) == pytest.approx((0.4, -5.6))
    assert row["over seeds"]["low"] < 0.2 < row["over seeds"]["value"] == pytest.approx(0.4)
    assert row["bracketed"]


def test_the_cost_is_of_the_base_points_best_rate():
    rows = rows_of(2.0)
    row = transfer.summarise(rows)[1]
    assert row["cost"] == pytest.approx(2**0.5)  # two factors of 2 off
    diverged = [row | {"loss": None} if row["lr"] == 2.0**-6 else row for row in rows]
    at_base = [row for row in rows if row["width"] == 64]
    there = [row for row in diverged if row["width"] == 256]
    assert transfer.summarise(at_base + there)[1]["cost"] is None


@pytest.mark.parametrize(("shift", "within"), [(0.49, "yes"), (-0.51, "**no**")])
def test_the_verdict_is_the_farthest_shift_of_all_structures_and_points(shift, within):
    rows = []
    for method in transfer.GRID:
        rows += rows_of(0.1, method=method)
        far = shift if method == "Muon" else 0.1
        rows += rows_of(far, "BTT r=1", method, width=1024, depth=16)
    rows += rows_of(3.0, method="Muon", steps=200)[21:]  # not on the grid
    result = {"summary": transfer.summarise(rows)}
    lines = transfer.farthest(result).splitlines()
    muon = next(line for line in lines if line.startswith("| Muon"))
    near = 2 if within == "yes" else 1
    far = f"{abs(shift):.2f}"
    assert muon == f"| Muon | {near} of 2 | {far} | {within} | {near} of 2 | {far} |"
    assert transfer.largest(result["summary"], "Normed") == pytest.approx((0.1, 0.1))
    (line,) = transfer.shifts(result, ["Muon"], "steps").splitlines()[2:]  # BTT has none
    assert line.startswith("| dense, Muon | -6.00 | +3.00 |")


def test_the_best_decay_of_a_point_is_that_of_the_least_loss():
    none, little, much = transfer.DECAYS
    rows = rows_of(0.4, method=none)
    for method, factor in ((little, 0.5), (much, 2.0)):
        for row in rows_of(0.25, method=method):
            less = factor if row["width"] == 256 else 1.1
            rows.append(row | {"loss": less * row["loss"]})
    rows += rows_of(0.4, method="Muon")
    assert transfer.best_decays(transfer.summarise(rows)) == [0, 1 / 16]


def test_a_point_starts_at_the_base_points_best_rate_and_takes_its_neighbours(tmp_path):
    wide = {"structure": "dense", "method": "AdamW", **transfer.BASE, "width": 256}
    start = transfer.start_of(wide, rows_of(0.0))
    assert start == 2.0**-6
    assert [job["lr"] for job in transfer.next_rates([], start)] == [2.0**-n for n in (7, 6, 5)]
    kept = rows_of(2.0)[21:]  # of the wider network, whose best is 2^-4
    assert transfer.next_rates(kept, start) == []
    assert [job["lr"] for job in transfer.next_rates(kept[:15], 2.0**-6)] == [2.0**-4]


def test_a_run_builds_and_draws_its_batches_by_its_seed_and_divergence_is_none():
    for seed in (0, 1):
        model = transfer.build_model("dense", 64, 2, seed, alpha=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), 2.0**-7, weight_decay=0.0)
        (x, y), draw = digits(), torch.Generator().manual_seed(seed)
        for rate in (2.0**-7, 2.0**-8):
            chosen = torch.randint(len(x), (64,), generator=draw)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        row = transfer.train("dense", "plain AdamW", 64, 2, 64, 2, 2.0**-7, seed)
        assert row == {"loss": F.cross_entropy(model(x), y).item()}
    assert transfer.train("dense", "plain AdamW", 64, 2, 64, 2, 1e30, 0) == {"loss": None}


def test_the_plan_is_the_whole_grid_once():
    jobs = [tuple(job.values()) for job in transfer.plan(transfer.EXPERIMENT.axes)]
    assert len(set(jobs)) == len(jobs)
    for method in (*transfer.GRID, *transfer.DECAYS):
        ran = {(s, m, *p[:2]) for s, m, *p in jobs if m == method and tuple(p[2:]) == BASE[2:]}
        assert len(ran) == 6 * 3 * 3
