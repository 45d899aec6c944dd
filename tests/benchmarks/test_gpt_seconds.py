"""What follows from the runs of `benchmarks.training.gpt_seconds`, on rows made by hand."""

import math
from argparse import Namespace

import pytest

pytest.importorskip("matplotlib")

from benchmarks.training import gpt_seconds
from structlin import StructuredLinear

OURS = gpt_seconds.OURS["gpts"]
SIZES = {"tuned": 64, "Python": {"context": 16, "batch": 2, "depth": 1, "steps": 1}}


def test_both_rates_are_tuned_at_one_width_and_all_seeds_run_at_the_best_of_theirs():
    made = []

    class Runs:
        options, sizes = Namespace(smoke=False), {"tuned": 256}

        def of(self, jobs):
            made.extend(job | {"loss": loss(job)} for job in jobs if not find(job))

        def all(self):
            return made

    def find(job):
        return [row for row in made if job.items() <= row.items()]

    def loss(job):  # the least at lr 2^-4, or 2^-6 at width 512, and other_lr 2^-8
        lr = 2.0 ** (-6 if job["width"] == 512 else -4)
        return 1 + math.log2(job["lr"] / lr) ** 2 + math.log2(job["other_lr"] * 2**8) ** 2

    axes = {"setup": ["Python"], "optimizer": ["SOAP"], "kind": ["dense"]}
    gpt_seconds.design(Runs(), axes | {"width": [256, 512], "seed": range(2)})

    def tried(name, **where):
        return {math.log2(row[name]) for row in made if where.items() <= row.items()}

    assert tried("lr", width=256, other_lr=2**-8) >= {-5, -4, -3}
    assert tried("other_lr", width=256, lr=2**-4) >= {-9, -8, -7}
    assert tried("lr", width=512) == {-7, -6, -5, -4, -3}
    assert tried("other_lr", width=512) == {-8}
    assert tried("lr", width=512, seed=1) == {-6}
    assert tried("lr", width=256, seed=1) == {-4}


def test_adamw_has_one_rate():
    start = {"lr": 0.5, "other_lr": 0.25}
    found = gpt_seconds.lacking([], (start, gpt_seconds.names_of("AdamW")))
    assert {rates["other_lr"] for rates in found} == {0.25}
    assert [rates["lr"] for rates in found] == [0.5, 0.25, 1.0]


@pytest.mark.parametrize("kind", list(gpt_seconds.KINDS))
def test_a_structured_model_has_the_flops_of_dense_at_most(kind):
    rates = {"lr": 0.01, "other_lr": 0.01}
    row, dense = (
        gpt_seconds.train("Python", "SOAP", each, 64, **rates, seed=0, **SIZES)
        for each in (kind, "dense")
    )
    assert 0.5 * dense["flops"] < row["flops"] <= dense["flops"]
    assert row["own_width"] == 64 or kind != "dense"
    model, _ = gpt_seconds.make_trainer("Python", "SOAP", kind, 64, rates, 0, SIZES)
    layers = [layer for layer in model.modules() if isinstance(layer, StructuredLinear)]
    assert len(layers) == (0 if kind == "dense" else 4)
    assert all(layer.gains is not None for layer in layers)


def make_row(kind, width, losses, **more):
    where = {"setup": "Python", "optimizer": "SOAP", "kind": kind, "width": width}
    rest = {"lr": 1.0, "other_lr": 1.0, "params": 1, "steps": 10, "own_width": width}
    return [where | rest | {"seed": n, "loss": x, "flops": width} for n, x in enumerate(losses)]


def test_losses_are_compared_at_equal_flops_and_at_equal_seconds_seed_by_seed():
    rows = [*make_row("dense", 1, [4.0, 4.0]), *make_row("dense", 4, [1.0, 2.0])]
    rows += make_row("BTT r=1", 4, [0.5, 3.0])
    names = ("setup", "optimizer", "kind", "width")
    cells = {tuple(row[name] for name in names): row for row in rows}
    times = [
        dict(zip(names, cell, strict=True)) | {"milliseconds": 100.0 * time}
        for cell, time in zip(cells, (1, 4, 2), strict=True)
    ]
    table = gpt_seconds.tabulate(rows, times)
    ours = table[-1]
    assert ours["seconds"] == 2
    assert ours["over dense"]["SOAP"] == [0.5, 1.5]
    # halfway between the two, in logarithms
    assert ours["over dense"]["seconds"] == pytest.approx([0.5 / 2, 3 / 8**0.5])
    assert gpt_seconds.percents(ours["over dense"]["SOAP"]) == "-50.0 to +50.0"
    # 2 seconds in place of 4 for a loss of at most 1; a loss of 2 is not reached
    mine = ({"optimizer": "Muon"}, {"optimizer": "Muon"}, OURS)
    table = [row | names for row, names in zip(table, mine, strict=True)]
    assert gpt_seconds.sooner(table, "Python", OURS) == [0.5, math.inf]


def test_each_rate_stands_under_its_kind_and_optimizer():
    cells = [
        ("Python", "dense", 1 / 2),
        ("Wikipedia", "BTT r=4", 1 / 4),
        ("Wikipedia", "dense", 2.0),
    ]
    table = [
        {"setup": setup, "kind": kind, "lr": lr, "other_lr": 1.0, "optimizer": "SOAP", "width": 1}
        for setup, kind, lr in cells
    ]
    table.append(table[0] | {"width": 2, "lr": 1 / 8})
    shown = gpt_seconds.rates({"table": table}).splitlines()
    assert shown[0] == "|  | dense, SOAP | BTT r=4, SOAP |"
    assert shown[2:] == [
        "| Python, 1 | 2^-1, 2^0 | - |",
        "| Python, 2 | 2^-3, 2^0 | - |",
        "| Wikipedia, 1 | 2^1, 2^0 | 2^-2, 2^0 |",
    ]
    assert gpt_seconds.rate_moves({"table": table}) == 2  # 2^-1 to 2^-3


def make_cell(kind, optimizer, losses, seconds, **more):
    where = {"setup": "Python", "kind": kind, "optimizer": optimizer, "width": 256}
    return where | {"losses": losses, "seconds": seconds, "lr": 2**-9, "own_width": 1} | more


def test_the_best_of_both_kinds_are_compared_by_their_mean_losses():
    table = [
        make_cell("dense", "AdamW", [2.0, 2.0], 1.0),
        make_cell("dense", "SOAP", [1.0, 1.5], 8.0),
        make_cell("dense", "Muon", [0.5, None], 8.0),  # one seed diverged
        make_cell("BTT r=4", "AdamW", [1.5, 1.0], 2.0) | {"over dense": {"AdamW": [0.75, 0.5]}},
        make_cell("BTT r=4", "SOAP", [0.9, 1.1], 4.0),
    ]
    result = {"table": table, "setting": {"tuned": 256}}
    (line,) = gpt_seconds.best_of_both(result).splitlines()[2:]
    assert line == (
        "| Python | 1.250 (dense, SOAP) | 1.000 (BTT r=4, SOAP) | -20.0 % (-26.7 to -10.0) | 0.50 |"
    )
    (line,) = gpt_seconds.adamw_of_both(result).splitlines()[2:]
    assert line == "| Python | 2^-9 | 2.000 | 1.250 | -50.0 to -25.0 % | 2.00 |"


def test_a_dense_model_by_soap_that_lacks_a_basis_is_marked():
    table = [
        make_cell(kind, optimizer, [1.0], 1.0, width=width)
        for kind, optimizer, width in (
            ("dense", "SOAP", 256),
            ("dense", "SOAP", 512),
            ("dense", "Muon", 512),
            ("BTT r=4", "SOAP", 512),
        )
    ]
    shown = gpt_seconds.fronts({"table": table, "setting": {"largest_basis": 1024}})
    assert shown.count("*") == 1
    assert "| Python, 512: dense | 1.000 (1 s) | 1.000 (1 s) * |" in shown
    assert "| Python, 512: BTT r=4 | - | 1.000 (1 s) |" in shown


def test_a_run_that_diverged_is_behind_every_other():
    rows = [*make_row("dense", 1, [4.0]), *make_row("BTT r=1", 1, [None])]
    times = [{**row, "milliseconds": 1.0} for row in rows]
    *_, ours = gpt_seconds.tabulate(rows, times)
    assert ours["over dense"] == {"SOAP": [None]}
    assert gpt_seconds.percents(ours["over dense"]["SOAP"]) == "-"
