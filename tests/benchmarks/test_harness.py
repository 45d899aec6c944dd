"""benchmarks/harness: what an experiment runs, keeps and runs again; the training loop."""

import json

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks.harness import experiment, figures, training
from benchmarks.harness.experiment import Experiment, Search, Tune

MADE: list[tuple] = []


@pytest.fixture(autouse=True)
def _nothing_is_made_yet():
    MADE.clear()


def run(method, size, lr, seed, steps):
    """Losses that are least at a rate of `size`."""
    MADE.append((method, size, lr, seed))
    return {"loss": 1 + (torch.tensor(lr / size).log2() ** 2).item() / steps}


def losses(**changes):
    options = {
        "name": "some",
        "about": "about",
        "run": run,
        "axes": {"method": ["Adam", "SGD"], "size": [2, 8], "lr": [1.0, 2.0]},
        "sizes": {"steps": 10},
        "seeds": 2,
        "smoke": {"size": [2], "steps": 1},
        "analyse": lambda rows: {"least": min(row["loss"] for row in rows)},
        "draw": lambda result: figures.rates(result["rows"], panel=["method"], line=["size"]),
    }
    return Experiment(**options | changes)


@pytest.fixture
def kept(tmp_path):
    return lambda some, *options: some.main(["--workers", "1", "--out", str(tmp_path), *options])


def test_every_combination_of_the_axes_is_run_and_kept_with_its_picture(kept, tmp_path):
    result = kept(losses())
    assert len(MADE) == len(set(MADE)) == 2 * 2 * 2 * 2
    assert result["least"] == min(row["loss"] for row in result["rows"])
    assert result["setting"] == {"steps": 10}
    found = json.loads((tmp_path / "some.json").read_text())
    assert found["rows"] == result["rows"]
    assert found["environment"]["command"]
    assert (tmp_path / "some.png").stat().st_size > 1000


def test_the_same_command_makes_no_row_twice_and_says_where_rows_are_from(kept, tmp_path):
    first = kept(losses())
    path = tmp_path / "some.json"
    path.write_text(path.read_text().replace('"date":"', '"date":"once '))
    MADE.clear()
    assert kept(losses()) == first
    assert MADE == []
    assert json.loads(path.read_text())["environment"]["date"].startswith("once ")
    kept(losses(), "--seeds", "3")
    assert {seed for *_, seed in MADE} == {2}
    found = json.loads(path.read_text())
    assert not found["environment"]["date"].startswith("once ")
    (earlier,) = found["earlier"]
    assert earlier["rows"] == 16
    assert earlier["environment"]["date"].startswith("once ")


def test_rows_of_another_setting_are_not_taken(kept):
    kept(losses())
    MADE.clear()
    kept(losses(sizes={"steps": 20}))
    assert len(MADE) == 16


def test_only_what_is_chosen_is_run_again_and_the_other_rows_stay(kept):
    first = kept(losses())
    MADE.clear()
    assert kept(losses(), "--methods", "SGD", "--again") == first
    assert len(MADE) == 8
    assert {method for method, *_ in MADE} == {"SGD"}


def test_an_interrupted_experiment_goes_on(kept, monkeypatch):
    def interrupted(**job):
        if len(MADE) == 5:
            raise KeyboardInterrupt
        return run(**job)

    with pytest.raises(KeyboardInterrupt):
        kept(losses(run=interrupted))
    kept(losses())
    assert len(MADE) == len(set(MADE)) == 16


def test_an_axis_may_follow_from_those_before_it(kept):
    axes = {
        "method": ["Adam", "SGD"],
        "size": lambda job: [2] if job["method"] == "Adam" else [],
        "lr": [1.0],
    }
    kept(losses(axes=axes))
    assert MADE == [("Adam", 2, 1.0, 0), ("Adam", 2, 1.0, 1)]


def test_a_search_goes_from_the_best_rate_of_the_size_before(kept):
    axes = {"method": ["Adam"], "size": [2, 8]}
    some = losses(axes=axes, rates=Search(start=lambda job: 1.0), seeds=1)
    rows = kept(some)["rows"]
    tried = {size: [row["lr"] for row in rows if row["size"] == size] for size in (2, 8)}
    assert tried == {2: [0.5, 1.0, 2.0, 4.0], 8: [1.0, 2.0, 4.0, 8.0, 16.0]}
    MADE.clear()
    assert kept(some)["rows"] == rows
    assert MADE == []


@pytest.mark.parametrize("best", [2.0**power for power in range(-5, 6)])
def test_a_rate_is_tuned_on_the_first_seed_until_the_best_has_both_its_neighbours(kept, best):
    some = losses(axes={"method": ["Adam"], "size": [best]}, rates=Tune(lambda job: 1.0))
    rows = kept(some)["rows"]
    tried = [row["lr"] for row in rows if row["seed"] == 0]
    assert {best / 2, best, 2 * best} <= set(tried)
    assert len(tried) == len(set(tried)) <= 8
    assert [row["lr"] for row in rows if row["seed"] == 1] == [best]


def test_a_smoke_run_is_small_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    some = losses()
    result = some.main(["--smoke"])
    assert {size for _, size, *_ in MADE} == {2}
    assert result["setting"] == {"steps": 1}
    assert not any(tmp_path.iterdir())
    assert dict(some.sizes) == {"steps": 10}


def test_what_is_measured_beside_the_runs_sees_them_and_its_options(kept):
    def beside(chosen, found):
        return {"beside": (chosen["steps"], chosen["rounds"], len(found["rows"]))}

    some = losses(beside=beside, extra={"rounds": 3})
    assert kept(some, "--rounds", "5")["beside"] == (10, 5, 16)


def test_a_run_has_one_thread_and_what_is_measured_beside_has_all(kept, set_threads):
    def count_threads(*_, **__):
        return {"threads": torch.get_num_threads()}

    set_threads(2)
    options = {"analyse": lambda _: {}, "draw": None}
    found = kept(losses(run=count_threads, beside=count_threads, **options))
    assert found["threads"] == 2
    assert {row["threads"] for row in found["rows"]} == {1}


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
    ],
)
def test_rates_rise_and_fall_as_the_schedule_says(options, rates):
    weight, seen = torch.nn.Parameter(torch.ones(())), []
    descent = torch.optim.SGD([weight], 1.0)
    after = [1.0]

    def note(step):
        seen.append(after[-1] - weight.item())
        after.append(weight.item())

    assert training.descend(descent, lambda step: weight * 1, 4, after=note, **options)
    assert seen == pytest.approx(rates)


def test_training_ends_where_a_loss_is_not_finite():
    weight, steps = torch.nn.Parameter(torch.ones(())), []

    def loss(step):
        steps.append(step)
        return weight / (3 - step)

    assert not training.descend(torch.optim.SGD([weight], 1.0), loss, 9, schedule="constant")
    assert steps == [0, 1, 2, 3]


def test_a_picture_names_each_line_once_though_its_first_panel_has_not_all():
    rows = [
        {"panel": panel, "kind": kind, "x": x, "loss": 1.0}
        for panel, kinds in (("first", "a"), ("second", "ab"))
        for kind in kinds
        for x in (1, 2)
    ]
    (legend,) = figures.curves(rows, "x", panel=["panel"], line=["kind"]).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
