"""benchmarks/compression/knapsack.py: three choices of sizes among the same curves."""

import math
from itertools import product

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import knapsack
from structlin import Dense, LowRank, plan_compression
from structlin._compress.knapsack import choose
from structlin._projection.curve import Curve, list_sizes
from tests.tables import read_table


def make_curves():
    """Three layers. The second gains next to nothing before it is dense, which is not convex."""
    sizes = list_sizes(LowRank(rank=1), 8, 8, "params")[-4:]
    assert [size.cost for size in sizes] == [16, 32, 48, 64]
    errors = [[9.0, 4.0, 1.0, 0.0], [7.0, 7.0, 6.0, 0.0], [5.0, 3.0, 1.0, 0.0]]
    return [Curve(sizes, each, 10.0) for each in errors]


def test_the_sums_are_over_the_least_that_any_choice_has(monkeypatch):
    curves = make_curves()
    monkeypatch.setattr(knapsack, "measure_curves", lambda model, family: curves)
    for keep in (0.4, 0.5, 0.6, 0.7, 0.8):
        limit = keep * 3 * 64
        sums = []
        for options in product(range(4), repeat=3):
            chosen = [*zip(curves, options, strict=True)]
            if sum(curve.sizes[option].cost for curve, option in chosen) <= limit:
                sums.append(sum(curve.errors[option] for curve, option in chosen))
        row = knapsack.run(model="any", family="low-rank", keep=keep)
        for name, make in knapsack.CHOICES.items():
            harm = make(curves, limit, [1.0] * 3).harm
            assert row[f"{name}_over_best"] == pytest.approx(harm / min(sums))
        assert row["bound_over_best"] <= 1 + 1e-9
        assert row["compress_over_best"] >= 1 - 1e-9
        assert row["compress_over_best"] <= row["greedy_over_best"]
        assert row["layers"] == 3


def test_one_of_those_shares_shows_a_greedy_choice_that_is_not_the_best(monkeypatch):
    curves = make_curves()
    monkeypatch.setattr(knapsack, "measure_curves", lambda model, family: curves)
    rows = [knapsack.run(model="any", family="low-rank", keep=keep) for keep in (0.5, 0.6)]
    assert max(row["greedy_over_best"] for row in rows) > 1.3
    assert max(row["compress_over_best"] for row in rows) <= 1.01


def test_curves_are_those_that_compress_chooses_among():
    curves = knapsack.measure_curves("tiny", "low-rank")
    assert len(curves) == 14  # of two blocks: q, k, v, o, gate, up, down
    for curve in curves:
        assert curve.errors[-1] == 0  # dense
        assert all(math.isfinite(error) for error in curve.errors)
    limit = 0.6 * sum(curve.sizes[-1].cost for curve in curves)
    options = choose(curves, limit, [1.0] * len(curves)).options
    chosen = [curve.sizes[option] for curve, option in zip(curves, options, strict=True)]
    dense, part, batches = knapsack.MODELS["tiny"]()
    family = knapsack.methods.FAMILIES["low-rank"]
    planned = plan_compression(dense, family, batches, keep=0.6, include=f"{part}*")
    for size, decision in zip(chosen, planned.decisions, strict=False):  # the head comes last
        if decision.structure is None:
            assert isinstance(size.family, Dense)
        else:
            assert size.structure == decision.resolved


def test_a_page_has_both_choices_of_each_family_and_the_largest_gap():
    def make_row(model, family, keep, greedy, compress):
        named = {"model": model, "family": family, "keep": keep}
        return named | {"greedy_over_best": greedy, "compress_over_best": compress}

    rows = [
        make_row("A", "low-rank", 0.8, 1.02, 1.0),
        make_row("A", "Monarch", 0.8, 1.1504, 1.0049),
        make_row("B", "low-rank", 0.8, 1.0, 1.0),
    ]
    result = {"rows": rows}
    columns = ["low-rank, greedy", "low-rank, compress", "Monarch, greedy", "Monarch, compress"]
    assert read_table(knapsack.show_gaps(result)) == [
        ["", "keep", *columns],
        ["A", "0.8", "1.020", "1.000", "1.150", "1.005"],
        ["B", "0.8", "1.000", "1.000", "-", "-"],
    ]
    assert knapsack.numbers(result) == {"knapsack.greedy": "1.150", "knapsack.compress": "1.005"}
