"""benchmarks/compression/heal.py: a run in pieces ends as one without a break; states are whole."""

import copy
import json
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import heal, smollm2
from benchmarks.harness.record import save_json
from structlin import LowRank, convert

RECIPE = heal.Recipe(**heal.SMOKE)


@pytest.fixture(scope="module")
def dense_and_text():
    dense, texts = smollm2.make_tiny()
    return dense, heal.cut_text(texts, RECIPE)


def start(dense, recipe=RECIPE):
    """The same small model each time, at its first step."""
    torch.manual_seed(0)
    model = convert(copy.deepcopy(dense), LowRank(rank=4), include="model.layers.*", init="project")
    return heal.Healing(model, dense, recipe)


def curve_of(healing):
    return [{n: v for n, v in row.items() if n != "seconds"} for row in healing.curve]


# ---- pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", heal.OPTIMIZERS)
def test_a_run_that_is_interrupted_ends_as_one_without_a_break(optimizer, dense_and_text, tmp_path):
    dense, text = dense_and_text
    recipe = replace(RECIPE, optimizer=optimizer)
    whole = start(dense, recipe)
    list(heal.heal(whole, text, tmp_path / "whole.pt", heal.Piece()))

    path = tmp_path / "pieces.pt"
    broken = start(dense, recipe)
    take_step = broken.take_step

    def interrupt(windows):
        if broken.step == 3:  # the last state is that of step 2
            raise KeyboardInterrupt
        return take_step(windows)

    broken.take_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(heal.heal(broken, text, path, heal.Piece()))
    resumed = start(dense, recipe)
    list(heal.heal(resumed, text, path, heal.Piece()))

    assert whole.step == resumed.step == recipe.steps == 6
    assert curve_of(resumed) == curve_of(whole)
    assert [row["step"] for row in whole.curve] == [0, 2, 4, 6]
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_piece_ends_when_its_minutes_are_over_and_the_next_goes_on(dense_and_text, tmp_path):
    dense, text = dense_and_text
    path = tmp_path / "state.pt"
    first = start(dense)
    list(heal.heal(first, text, path, heal.Piece(minutes=0)))
    assert first.step == 0
    assert torch.load(path)["step"] == 0
    second = start(dense)
    list(heal.heal(second, text, path, heal.Piece()))
    assert second.step == RECIPE.steps


# ---- states --------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_earlier_state_whole_and_says_so_once(dense_and_text, tmp_path):
    dense, text = dense_and_text
    path = tmp_path / "state.pt"
    healing = start(dense)
    heal.save_state(path, healing.state_dict())
    earlier = path.read_bytes()
    healing.take_step(text.windows)
    path.with_suffix(".part").symlink_to("/dev/full")  # whose every write finds a full disk
    message = r"step 1 could not be written .*; the earlier state is whole"
    with pytest.raises(OSError, match=message):
        heal.save_state(path, healing.state_dict())
    assert path.read_bytes() == earlier
    assert [*tmp_path.iterdir()] == [path]
    heal.save_state(path, healing.state_dict())
    assert torch.load(path)["step"] == 1


def test_an_interrupt_while_a_state_is_written_leaves_the_earlier_one(
    dense_and_text, tmp_path, monkeypatch
):
    dense, _ = dense_and_text
    path = tmp_path / "state.pt"
    heal.save_state(path, start(dense).state_dict())
    earlier = path.read_bytes()

    def stop(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(heal.torch, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        heal.save_state(path, start(dense).state_dict())
    assert path.read_bytes() == earlier
    assert [*tmp_path.iterdir()] == [path]


def test_a_state_of_another_recipe_is_refused_and_nothing_is_changed(dense_and_text):
    dense, text = dense_and_text
    other = start(dense, replace(RECIPE, lr=1e-2))
    other.take_step(text.windows)
    healing = start(dense)
    before = [parameter.clone() for parameter in healing.model.parameters()]
    with pytest.raises(ValueError, match="another recipe: lr differ"):
        healing.load_state_dict(other.state_dict())
    pairs = zip(healing.model.parameters(), before, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert heal.folder_of(heal.STATES, RECIPE) != heal.folder_of(heal.STATES, other.recipe)


def test_a_state_of_other_widths_is_refused_and_nothing_is_changed(dense_and_text):
    dense, _ = dense_and_text
    healing = start(dense)
    state = copy.deepcopy(healing.state_dict())
    *_, last = state["parameters"]
    for values in state["parameters"].values():
        values += 1
    state["parameters"][last] = state["parameters"][last][:-1]
    before = [parameter.clone() for parameter in healing.model.parameters()]
    with pytest.raises(ValueError, match=f"another model: '{last}' has the shape"):
        healing.load_state_dict(state)
    pairs = zip(healing.model.parameters(), before, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_gradients_that_are_not_finite_take_no_step_and_reach_no_state(
    dense_and_text, tmp_path, monkeypatch
):
    dense, text = dense_and_text
    path = tmp_path / "state.pt"
    healing = start(dense)
    list(heal.heal(healing, text, path, heal.Piece(minutes=0)))
    earlier = path.read_bytes()
    find = heal.find_divergence
    # the loss is what it was, and its gradient is 0 times the infinite slope of a root
    monkeypatch.setattr(heal, "find_divergence", lambda s, *rest: find(s, *rest) + root_of_zero(s))
    with pytest.raises(FloatingPointError, match="the norm of the gradients of step 1 is nan"):
        list(heal.heal(healing, text, path, heal.Piece(save_minutes=0)))
    assert all(parameter.isfinite().all() for parameter in healing.model.parameters())
    assert path.read_bytes() == earlier


def root_of_zero(s):
    return (0 * s).sqrt().sum()


def test_a_full_disk_leaves_the_earlier_result_and_nothing_else(tmp_path):
    path = tmp_path / "heal.json"
    save_json(path, rows=[1])
    earlier = path.read_bytes()
    path.with_suffix(".part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        save_json(path, rows=[2])
    assert path.read_bytes() == earlier
    assert [*tmp_path.iterdir()] == [path]


# ---- the recipe ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_torchs_divergence_of_softened_distributions(temperature):
    torch.manual_seed(0)
    s, t = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    log_q = (s.flatten(0, 1) / temperature).log_softmax(-1)
    log_p = (t.flatten(0, 1) / temperature).log_softmax(-1)
    expected = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") * temperature**2
    found = heal.find_divergence(s, t, temperature)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_cores_and_norms_learn_and_the_embedding_and_the_teacher_stay(dense_and_text):
    dense, text = dense_and_text
    healing = start(dense)
    before = copy.deepcopy(healing.model.state_dict())
    teacher = copy.deepcopy(healing.teacher.state_dict())
    healing.take_step(text.windows)
    for name, value in healing.model.state_dict().items():
        if isinstance(value, torch.Tensor):
            is_end = "embed_tokens" in name or "lm_head" in name
            assert torch.equal(value, before[name]) == is_end, name
    for name, value in healing.teacher.state_dict().items():
        assert torch.equal(value, teacher[name])


def test_healing_lowers_the_divergence(dense_and_text):
    dense, text = dense_and_text
    healing = start(dense, replace(RECIPE, lr=3e-3, tokens=100 * 48))
    losses = [healing.take_step(text.windows) for _ in range(30)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_no_token_that_heals_or_calibrates_is_held_out():
    ids = torch.arange(10_000)
    texts = {"known": ids, "wiki": ids + 10_000, "c4": ids + 20_000}
    text = heal.cut_text(texts, RECIPE)
    used = {*text.windows.flatten().tolist(), *torch.cat(text.calibration).flatten().tolist()}
    judged = torch.cat([*text.held_out.values()]).flatten().tolist()
    assert not used & {*judged}
    assert len(text.windows.unique()) == text.windows.numel()  # windows do not overlap


def test_the_curves_of_other_recipes_stay_in_the_result(dense_and_text, tmp_path):
    dense, text = dense_and_text
    nats = {name: heal.find_nats(dense, rows) for name, rows in text.held_out.items()}
    path = tmp_path / "heal.json"
    for recipe in (RECIPE, replace(RECIPE, lr=1e-3), RECIPE):
        healing = start(dense, recipe)
        healing.judge(text.held_out, loss=None)
        heal.keep_curve(path, healing, nats)
    rows = json.loads(path.read_text())["rows"]
    assert [row["recipe"]["lr"] for row in rows] == [1e-3, 1e-4]
    assert rows[1]["recipe"] == asdict(RECIPE)
    assert heal.markdown({"rows": rows}).count("\n") == 3
    assert "not measured" in heal.markdown({"rows": []})
