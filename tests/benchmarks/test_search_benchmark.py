"""`benchmarks.training.search` runs, keeps and reads; its claims follow the intervals."""

import json

import pytest

pytest.importorskip("matplotlib")

import structlin
from benchmarks.training import search
from structlin import StructuredLinear
from structlin.search import Search, Trial


def estimate(value, low, high):
    return {"value": value, "low": low, "high": high}


def effects(omega, psi, nu):
    return {"flops": {"effects": {"omega": omega, "psi": psi}, "class nu": nu}}


@pytest.mark.parametrize(
    ("omega", "psi", "nu", "expected"),
    [
        ((1.3, 1.1, 1.5), (0.7, 0.6, 0.9), (1.02, 0.95, 1.09), [True, True, True]),
        ((0.9, 0.8, 0.99), (1.2, 1.1, 1.3), (1.4, 1.2, 1.6), [False, False, False]),
        ((1.1, 0.9, 1.3), (0.9, 0.7, 1.1), (1.05, 0.98, 1.2), [None, None, None]),
    ],
)
def test_a_claim_holds_where_its_interval_says_so(omega, psi, nu, expected):
    found = search.claims(effects(*(estimate(*each) for each in (omega, psi, nu))))
    assert [*found.values()] == expected


def test_structures_of_every_kind_are_drawn_and_all_cost_less_than_dense():
    drawn = search.draw_structures(search.DRAWN)
    points = list(drawn.items())[len(search.FAMILIES) :]
    assert len(points) >= 2 * search.DRAWN
    full = [each for _, each in points if (each.omega, each.psi) == (0, 1)]
    assert len(full) >= search.DRAWN
    assert any(each.omega > 0.2 for _, each in points)
    for width in {width for widths in search.WIDTHS.values() for width in widths}:
        assert all(each.structure(width, width).in_features >= width for _, each in points)


def trial(name, flops, seed, exponent, **measures):
    numbers = {"params": 1, "flops": flops, "seconds": 1.0}
    loss = flops**-exponent * (1 + 0.1 * seed)
    return Trial(name, flops, seed, loss, **numbers, **measures, family={})


def test_exponents_are_those_of_the_losses_of_the_class():
    full, shared = {"omega": 0.0, "psi": 1.0, "nu": 0.5}, {"omega": 0.5, "psi": 1.0, "nu": 0.5}
    rows = [
        trial(name, flops, seed, exponent + 0.01 * seed, **measures)
        for name, exponent, measures in (
            ("dense", 0.3, full),
            ("one", 0.4, full),
            ("two", 0.6, full),
            ("Kronecker", 0.9, shared),
        )
        for flops in (100, 1000)
        for seed in (0, 1)
    ]
    found = search.exponents(rows)
    assert found["dense"]["value"] == pytest.approx(0.305)
    assert found["class"]["value"] == pytest.approx(0.505)
    assert found["difference"] == pytest.approx(estimate(0.2, 0.2, 0.2))


def test_on_text_the_blocks_are_structured_and_the_loss_is_of_held_out_text():
    model = structlin.convert(
        search.build("text", 64), search.FAMILIES["BTT"], include=search.SQUARE["text"]
    )
    layers = [name for name, each in model.named_modules() if type(each) is StructuredLinear]
    assert layers == [f"blocks.{n}.linear" for n in range(3)]
    inputs, targets = search.draw_text(0).new(64)
    assert (inputs.shape, targets.shape) == ((64, 16), (64,))
    text = search.read_text()
    first, *_ = text.heldout[0][0]
    windows = text.train.unfold(0, len(first), 1)
    assert not (windows == first).all(1).any()


@pytest.mark.parametrize("task", [*search.KINDS])
def test_a_run_is_a_function_of_its_seed_and_has_the_measures_of_its_structure(task):
    def run(seed):
        row = search.train(task, "BTT", 64, seed, steps={task: 2}, batch=8)
        return {name: row[name] for name in row if name != "seconds"}

    first = run(0)
    assert first == run(0)
    assert first["loss"] != run(1)["loss"]
    assert (first["omega"], first["psi"]) == (0.0, 1.0)
    assert structlin.family(**first["family"]) == search.FAMILIES["BTT"]


def test_a_smoke_run_keeps_rows_times_and_claims(tmp_path):
    result = search.EXPERIMENT.main(["--smoke", "--tasks", "teacher", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "search.json").read_text())
    assert (tmp_path / "search.png").exists()
    assert {name: kept[name] for name in ("rows", "claims")} == json.loads(
        json.dumps({name: result[name] for name in ("rows", "claims")})
    )
    rows = kept["rows"]["teacher"]
    assert {row["seed"] for row in rows} == {0, 1}
    assert {row["width"] for row in rows} == {64, 256}
    found = search.of_kept(kept, "teacher")
    assert isinstance(found, Search)
    times = {(row["structure"], row["width"]): row["median"] for row in kept["times"]["teacher"]}
    row = found.rows[0]
    assert row.seconds == pytest.approx(2 * times[row.structure, row.width] / 1e3)
    assert len(search.show_effects(kept).splitlines()) == 2 + 2
    shown = search.show_places(kept).splitlines()
    assert [line.split(" | ")[0] for line in shown[2:]] == [f"| {name}" for name in search.FAMILIES]
    standings = kept["summaries"]["teacher"]["flops"]["standings"]
    places = [row["structure"] for row in standings]
    (dense,) = (line for line in shown if line.startswith("| dense |"))
    assert f"| {places.index('dense') + 1} (" in dense
