"""What benchmarks.transfer trains and reports, and what docs/transfer.md says of its result."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

from benchmarks import transfer
from benchmarks.record import read

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
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(model.parameters())
    )


def test_alpha_one_half_has_the_multiplier_and_the_rates_that_go_with_it():
    for name in transfer.HALVES:
        assert transfer.METHODS[name].alpha == 0.5
    model = transfer.build_model("dense", 64, 8, 0, alpha=0.5)
    assert model.blocks[0].multiplier == 0.5
    optimizer = transfer.METHODS["AdamW, alpha 1/2"].make(model, 1.0, 64, alpha=0.5)
    rates = {
        id(parameter): group["lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert rates[id(model.blocks[3].fc1.cores[0])] == 0.5  # 4^(alpha - 1)
    assert rates[id(model.embed.weight)] == 1.0


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
    grid = transfer.shifts(result, ["Muon"], "width", "depth").splitlines()
    assert grid[0].startswith("|  | base point | 256 x 2 | 1024 x 16 | kept |")
    assert grid[2].startswith("| dense, Muon | -6.00 | +0.10 | not run |")
    (line,) = transfer.shifts(result, ["Muon"], "steps").splitlines()[2:]  # BTT has none
    assert line.startswith("| dense, Muon | -6.00 | +3.00 |")


def test_the_best_decay_is_that_of_the_least_loss_and_dense_at_the_base_point_says_what_is_kept():
    none, little, much = transfer.DECAYS
    rows = [*rows_of(0.4, method=none), *rows_of(1.0, "BTT r=1", none)]
    for method, factor in ((little, 0.5), (much, 2.0)):
        for structure in ("dense", "BTT r=1"):
            for row in rows_of(0.25, structure, method):
                less = factor if row["width"] == 256 else 1.1
                rows.append(row | {"loss": less * row["loss"]})
    result = {"summary": transfer.summarise(rows), "rows": rows}
    base, wide, btt, wide_btt = transfer.with_decay(result)
    assert [row["decay"] for row in (base, wide, btt, wide_btt)] == [0, 1 / 16, 0, 1 / 16]
    assert (wide["shift"], wide_btt["shift"]) == pytest.approx((0.25, 0.25))
    assert (base["cost"], btt["cost"]) == (1, 1)
    assert wide["cost"] == pytest.approx(2 * 2 ** ((0.4**2 - 0.25**2) / 8))
    assert wide_btt["cost"] == pytest.approx(2 * 2 ** ((1 - 0.25**2) / 8))
    assert "| dense | -6.00, 0 | +0.25, 1/16 | 2.02 |" in transfer.show_decay(result)
    other = rows_of(0.4, method="Muon")
    assert not transfer.with_decay({"summary": transfer.summarise(other), "rows": other})


def test_a_run_that_is_kept_is_not_trained_again_and_a_point_starts_at_the_base_points_best(
    monkeypatch,
):
    trained = []

    def sweep(where, lrs, seeds):
        rows = [
            {**where, "lr": lr, "seed": seed, "loss": 1.0 + abs(lr - 2.0**-5)}
            for lr in lrs
            for seed in range(seeds)
        ]
        trained.extend(rows)
        return rows

    monkeypatch.setattr(transfer, "sweep", sweep)
    base, wide = ("dense", "AdamW", BASE), ("dense", "AdamW", (256, *BASE[1:]))
    rows = transfer.seek(base, [], seeds=2)
    assert {row["lr"] for row in rows} == {2.0**-n for n in (4, 5, 6, 7, 8)}
    assert len(trained) == len(rows)
    assert transfer.seek(base, rows, seeds=2) == rows
    assert len(trained) == len(rows)
    found = transfer.seek(wide, rows, seeds=2)
    assert {row["lr"] for row in found} == {2.0**-n for n in (4, 5, 6)}
    assert {row["width"] for row in found} == {256}


def test_a_run_builds_and_draws_its_batches_by_its_seed_and_divergence_is_none():
    where = transfer.BASE | {"structure": "dense", "method": "plain AdamW", "steps": 2}
    for row in transfer.sweep(where, [2.0**-7], seeds=2):
        model = transfer.build_model("dense", 64, 2, row["seed"], alpha=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), 2.0**-7, weight_decay=0.0)
        data = transfer.digits()
        transfer.train(model, optimizer, data, steps=2, batch=64, seed=row["seed"])
        assert row == {**where, "lr": 2.0**-7, "seed": row["seed"], "loss": row["loss"]}
        assert row["loss"] == transfer.evaluate(model, data)
    (row,) = transfer.sweep(where, [1e30], seeds=1)
    assert row["loss"] is None


def test_the_plan_is_the_whole_grid_and_begins_with_the_base_points():
    jobs = transfer.plan()
    assert len(set(jobs)) == len(jobs)
    assert [job[2] == BASE for job in jobs] == sorted(job[2] == BASE for job in jobs)[::-1]
    for method in (*transfer.GRID, *transfer.DECAYS):
        ran = {(s, m, *p[:2]) for s, m, p in jobs if m == method and p[2:] == BASE[2:]}
        assert len(ran) == 6 * 3 * 3


# ---- docs/transfer.md ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def result():
    return read("transfer")


@pytest.fixture(scope="module")
def page():
    path = Path(__file__).parents[2] / "docs" / "transfer.md"
    return " ".join(path.read_text(encoding="utf-8").split())


def chosen(result, method, axis):
    """The rows where nothing but `axis` may differ from the base point."""
    held = {name: value for name, value in transfer.BASE.items() if name != axis}
    rows = [row for row in result["summary"] if held.items() <= row.items()]
    found = {}
    for row in rows:
        if row["method"] == method and row["structure"] in transfer.FEW:
            found.setdefault(row["structure"], {})[row[axis]] = row["shift"]
    return found.values()


def points(rows):
    """ "BTT r=4 with 16 blocks of width 64" for each row."""
    return [
        f"{row['structure']} with {row['depth']} blocks of width {row['width']}" for row in rows
    ]


def far(result, method):
    """The rows of the grid whose best rate is beyond sqrt 2 of the base point's."""
    rows = transfer.on_grid(result["summary"], method)
    return [row for row in rows if abs(row["shift"]) > 0.5]


def test_what_is_said_of_the_best_rates_is_what_the_kept_result_has(result, page):
    summary = result["summary"]
    assert "one rate of Normed, tuned on the dense model at the base point, is within" in page
    for method in ("Normed", "Normed, power"):
        assert max(transfer.largest(summary, method)) <= 0.5
        assert len(transfer.on_grid(summary, method)) == 54
    assert "at all 54 points of the grid" in page
    (outlier,) = far(result, "AdamW")
    where = f"{outlier['structure']} with {outlier['depth']} blocks of width {outlier['width']}"
    assert f"is within sqrt 2 of its structure's base point but at one point, {where}" in page
    assert "where keeping the base point's costs nothing" in page
    assert outlier["cost"] == 1
    moved, rows = far(result, "Muon"), transfer.on_grid(summary, "Muon")
    assert (
        f"beyond sqrt 2 at {len(moved)} of the {len(rows) - 6} points, on dense, "
        "Monarch and BTT layers with 6 or 16 blocks, always upwards and by up to "
        f"{max(row['shift'] for row in moved):.2f}" in page
    )
    assert {row["structure"] for row in moved} == {"dense", "Monarch", "BTT r=1", "BTT r=4"}
    assert {row["depth"] for row in moved} <= {6, 16}
    assert min(row["shift"] for row in moved) > 0
    rows = [row for method in transfer.GRID for row in transfer.on_grid(summary, method)]
    assert all(row["bracketed"] for row in rows)
    costs = [
        max(row["cost"] for row in transfer.on_grid(summary, method))
        for method in ("Normed", transfer.POWER, "AdamW", "Muon")
    ]
    assert (
        f"keeping it costs up to a factor of {costs[0]:.2f} of the loss under Normed (Kronecker; "
        f"{costs[1]:.2f} by power iterations), {costs[2]:.2f} under AdamW (dense) and "
        f"{costs[3]:.2f} under Muon" in page
    )
    dearest_of = {"Normed": "Kronecker", transfer.POWER: "Kronecker", "AdamW": "dense"}
    for method, structure in dearest_of.items():
        dearest = max(transfer.on_grid(summary, method), key=lambda row: row["cost"])
        assert dearest["structure"] == structure


def test_what_is_said_of_rate_and_decay_together_is_what_the_kept_result_has(result, page):
    within = [
        sum(abs(row["shift"]) <= 0.5 for row in transfer.on_grid(result["summary"], method)) - 6
        for method in list(transfer.DECAYS)[1:]
    ]
    assert "at {} and {} of the 48 points".format(*within) in page
    rows = transfer.with_decay(result)
    counts = [sum(row["decay"] == decay for row in rows) for decay in transfer.DECAYS.values()]
    said = "best at {} of the {} points, 1/16 at {} and 1/4 at {}, low-rank's base point"
    assert said.format(counts[0], len(rows), *counts[1:]) in page
    moved = [row for row in rows if abs(row["shift"]) > 0.5]
    assert f"at {48 - len(moved)} of 48 points; the other {len(moved)} are low-rank's" in page
    assert {row["structure"] for row in moved} == {"low-rank"}
    at_base = {r["structure"]: r for r in rows if transfer.BASE.items() <= r.items()}
    dense, outlier = at_base["dense"], at_base["low-rank"]
    assert [row for row in rows if row["decay"] == 0.25] == [outlier]
    *others, dearest = sorted(row["cost"] for row in rows)
    assert dearest == outlier["cost"]
    assert f"ends lower by a factor of {dearest:.2f} with a decay of 1/4" in page
    assert f"no other of the {len(rows)} points more than {others[-1]:.2f}" in page
    assert (round(dense["optimum"]), dense["decay"], dense["cost"]) == (-4, 0, 1)
    assert round(outlier["optimum"]) == -3  # twice that rate


def test_what_is_said_of_the_control_is_what_the_kept_result_has(result, page):
    summary = result["summary"]
    most, ruled = [], []
    for structure in transfer.FEW:
        for method, found in (("plain AdamW", most), ("AdamW", ruled)):
            rows = transfer.on_grid(summary, method)
            found.append(max(abs(r["shift"]) for r in rows if r["structure"] == structure))
    rows = transfer.on_grid(summary, "plain AdamW")
    assert max(row["shift"] for row in rows) == 0
    assert (
        f"the best rate falls by up to {most[0]:.1f} factors of 2 on dense layers and "
        f"{most[1]:.1f} on BTT, where under the rules of `param_groups` it moves by at most "
        f"{ruled[0]:.2f} and {ruled[1]:.2f}" in page
    )
    cost = max(row["cost"] for row in rows)
    assert f"keeping the base point's rate costs up to {cost:.0f} times the loss" in page


def test_what_is_said_of_alpha_one_half_is_what_the_kept_result_has(result, page):
    summary = result["summary"]
    rows = [row for method in transfer.HALVES for row in transfer.on_grid(summary, method)]
    most = max(abs(row["shift"]) for row in rows)
    assert f"The best rate moves by at most {most:.2f} factors of 2" in page
    ratios = []
    for row in rows:
        if row["depth"] == 16:
            where = {key: row[key] for key in ("structure", "width", "depth")}
            where["method"] = row["method"].removesuffix(", alpha 1/2")
            (other,) = transfer._matching(transfer.on_grid(summary, where["method"]), where)
            ratios.append(row["loss"] / other["loss"])
    assert len(ratios) == 4
    assert (
        f"the loss in 16 blocks is {min(ratios):.2f} to {max(ratios):.2f} times that of alpha = 1"
        in page
    )


def test_what_is_said_of_batch_and_duration_is_what_the_kept_result_has(result, page):
    assert "AdamW's hardly moves with the batch" in page
    for shifts in chosen(result, "AdamW", "batch"):
        assert max(map(abs, shifts.values())) < 0.25
    assert "Muon's moves in the rule's direction, and by less" in page
    for shifts in chosen(result, "Muon", "batch"):
        assert -1 < shifts[16] < 0 < shifts[256] < 1
    assert (
        "Muon's falls with the steps by a power between 1/2 and 1 (on dense layers not steadily), "
        "AdamW's by one below 1/2" in page
    )
    steady = [shifts[50] > shifts[100] for shifts in chosen(result, "Muon", "steps")]
    assert steady == [False, True]
    for method, least, most in (("Muon", 0.5, 1.0), ("AdamW", 0.0, 0.5)):
        for shifts in chosen(result, method, "steps"):
            assert least < (shifts[25] - shifts[200]) / 3 < most


def test_the_grid_that_the_page_names_was_run_whole(result, page):
    assert "a grid of widths 64, 256 and 1024 with 2, 6 and 16 blocks" in page
    setting = result["setting"]
    assert setting["widths"] == transfer.WIDTHS == [64, 256, 1024]
    assert setting["depths"] == transfer.DEPTHS == [2, 6, 16]
    assert "50 steps at batch 64" in page
    assert setting["base"] == transfer.BASE == {"width": 64, "depth": 2, "batch": 64, "steps": 50}
    assert setting["seeds"] == 3
    ran = {
        (row["structure"], row["method"], tuple(row[name] for name in transfer.BASE))
        for row in result["rows"]
    }
    assert set(transfer.plan()) == ran
