"""benchmarks/compression/heal.py: a run in pieces ends as one without a break; states are whole."""

import copy
import json
import math
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import heal, smollm2
from benchmarks.harness.record import save_json
from structlin import LowRank, convert
from tests.tables import read_table

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


def test_a_state_is_written_as_often_as_the_piece_says(dense_and_text, tmp_path, monkeypatch):
    dense, text = dense_and_text
    written = []
    monkeypatch.setattr(heal, "save_state", lambda path, state: written.append(state["step"]))
    often = start(dense)
    list(heal.heal(often, text, tmp_path / "often.pt", heal.Piece(save_minutes=0)))
    # the start, every step, and the end of the piece
    assert written == [0, 1, 2, 3, 4, 5, 6, 6]

    written.clear()
    seldom = start(dense)
    list(heal.heal(seldom, text, tmp_path / "seldom.pt", heal.Piece(save_minutes=60)))
    assert written == [0, 2, 4, 6, 6]  # with each judgement


def test_a_point_of_the_curve_is_told_after_its_state_is_written(dense_and_text, tmp_path):
    dense, text = dense_and_text
    path = tmp_path / "state.pt"
    for row in heal.heal(start(dense), text, path, heal.Piece()):
        state = torch.load(path)
        assert state["step"] == row["step"]
        assert state["curve"][-1] == row


def test_seconds_of_the_pieces_add_up(dense_and_text, tmp_path):
    dense, text = dense_and_text
    first = start(dense)
    first.take_step(text.windows)
    assert first.seconds > 0
    first.seconds = 1000.0
    second = start(dense)
    second.load_state_dict(first.state_dict())
    second.take_step(text.windows)
    assert second.seconds > 1000.0
    second.judge(text.held_out, loss=0.5)
    row = second.curve[-1]
    assert row["seconds"] == round(second.seconds, 1)
    assert row["loss"] == 0.5
    assert row["tokens"] == 2 * 4 * 12  # two steps of four windows of 12


@pytest.mark.filterwarnings("ignore:these layers grow", "ignore:compress")  # so small
def test_the_same_command_goes_on_where_the_last_one_ended(tmp_path, capsys):
    command = ["--smoke", "--states", str(tmp_path / "states"), "--out", str(tmp_path)]
    started = heal.main([*command, "--minutes", "0"])
    assert started.step == 0
    finished = heal.main(command)
    assert finished.step == 6
    assert len([*(tmp_path / "states").iterdir()]) == 1
    result = json.loads((tmp_path / "heal.json").read_text())
    (row,) = result["rows"]
    assert [point["step"] for point in row["curve"]] == [0, 2, 4, 6]
    assert row["curve"][0] == started.curve[0]
    assert row["seconds"] == round(finished.seconds, 1)
    assert "6 of 6 steps, 288 tokens" in capsys.readouterr().out
    assert (tmp_path / "heal.png").stat().st_size > 0


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


def test_a_state_of_another_model_is_refused(dense_and_text):
    dense, _ = dense_and_text
    state = start(dense).state_dict()
    state["parameters"].popitem()
    with pytest.raises(ValueError, match="another model: its parameters have other names"):
        start(dense).load_state_dict(state)


# ---- the recipe ----------------------------------------------------------------------------------


def test_the_rate_rises_over_a_twentieth_of_the_steps_and_falls_by_half_a_cosine():
    # 105 steps: five of warm-up, then 100 from cos 0 to cos pi
    rates = [heal.scale_rate(step, 105) for step in range(106)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0
    assert rates[5 + 25] == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert rates[5 + 50] == pytest.approx(0.5)
    assert rates[5 + 75] == pytest.approx((1 - math.sqrt(0.5)) / 2)
    assert rates[105] == pytest.approx(0.0)


def test_the_shortest_runs_warm_up_for_a_step():
    assert heal.scale_rate(0, 20) == 1.0
    assert heal.scale_rate(0, 1) == 1.0
    assert heal.scale_rate(1, 1) == 1.0  # after the only step


def test_each_pass_takes_every_window_once_in_an_order_of_its_own():
    windows = torch.arange(5)[:, None] + 100
    batches = [heal.take_batch(windows, 2, step) for step in range(10)]
    assert all(batch.shape == (2, 1) for batch in batches)
    passes = torch.cat(batches).view(4, 5).tolist()  # four passes of five windows
    for order in passes:
        assert sorted(order) == [100, 101, 102, 103, 104]
    assert len({tuple(order) for order in passes}) == 4

    # a resumed run takes the batch of its step
    assert heal.take_batch(windows, 2, 7).equal(batches[7])


def test_a_step_takes_its_batch_and_the_run_as_many_steps_as_its_tokens_pay_for():
    recipe = heal.Recipe(tokens=2_000_000, batch=2, window=1024, judgements=12)
    assert recipe.steps == 976  # 2,000,000 / 2,048 is 976.56
    judged = sorted(recipe.judged_steps())
    assert len(judged) == 12
    assert judged[-1] == 976
    # evenly spread: 976 / 12 is 81.3
    gaps = {later - earlier for earlier, later in zip([0, *judged[:-1]], judged, strict=True)}
    assert gaps == {81, 82}


def test_windows_heal_in_one_row_each_and_calibrate_one_by_one():
    texts = {
        "known": torch.arange(100),
        "wiki": torch.arange(200, 300),
        "c4": torch.arange(300, 400),
    }
    recipe = heal.Recipe(context=24, window=12, calibration=3, windows=2)
    text = heal.cut_text(texts, recipe)
    without_rest = torch.arange(96)  # 4 tokens are left over
    assert text.windows.equal(without_rest.view(8, 12))

    # from the first token to the last one
    assert len(text.calibration) == 3
    for ids, start in zip(text.calibration, [0, 38, 76], strict=True):
        assert ids.tolist() == [[*range(start, start + 24)]]
    assert text.held_out["wiki"].tolist() == [[*range(200, 224)], [*range(276, 300)]]
    assert text.held_out["c4"].tolist() == [[*range(300, 324)], [*range(376, 400)]]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_torchs_divergence_of_softened_distributions(temperature):
    torch.manual_seed(0)
    s, t = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    log_q = (s.flatten(0, 1) / temperature).log_softmax(-1)
    log_p = (t.flatten(0, 1) / temperature).log_softmax(-1)
    expected = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") * temperature**2
    found = heal.find_divergence(s, t, temperature)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def find_mean_divergence(model, dense, windows):
    """KL(dense || model) of the next token, by torch."""
    log_q = model(windows).logits.log_softmax(-1).flatten(0, 1)  # (tokens, vocabulary)
    with torch.no_grad():
        log_p = dense(windows).logits.log_softmax(-1).flatten(0, 1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def test_a_step_lowers_the_mean_divergence_of_its_windows_from_the_dense_model(dense_and_text):
    dense, text = dense_and_text
    healing = start(dense, replace(RECIPE, bf16=False))
    windows = heal.take_batch(text.windows, 4, 0)  # (4, window)
    expected = find_mean_divergence(healing.model, dense, windows)
    assert healing.take_step(text.windows) == pytest.approx(expected.item(), rel=1e-4)

    # the gradients are those of all windows
    healing = start(dense, replace(RECIPE, bf16=False))
    find_mean_divergence(healing.model, dense, windows).backward()
    expected = {n: p.grad for n, p in healing.model.named_parameters() if p.requires_grad}
    healing = start(dense, replace(RECIPE, bf16=False))
    healing.take_step(text.windows)
    for name, parameter in healing.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6)


def test_the_windows_of_a_step_count_alike_where_the_last_run_has_fewer(dense_and_text):
    dense, text = dense_and_text
    healing = start(dense, replace(RECIPE, bf16=False, batch=3))  # runs of two windows and of one
    windows = heal.take_batch(text.windows, 3, 0)
    expected = find_mean_divergence(healing.model, dense, windows)
    assert healing.take_step(text.windows) == pytest.approx(expected.item(), rel=1e-4)


def test_a_compiled_run_takes_the_same_step(dense_and_text, monkeypatch):
    dense, text = dense_and_text
    compile_traced = partial(torch.compile, backend="aot_eager")  # without minutes of a compiler
    monkeypatch.setattr(torch, "compile", compile_traced)
    eager, compiled = (start(dense, replace(RECIPE, bf16=False)) for _ in range(2))
    compiled.compile()
    assert compiled.take_step(text.windows) == pytest.approx(eager.take_step(text.windows))
    stepped = dict(compiled.model.named_parameters())
    for name, parameter in eager.model.named_parameters():
        torch.testing.assert_close(stepped[name], parameter, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_ends_the_run_and_changes_nothing(dense_and_text):
    dense, text = dense_and_text
    broken = copy.deepcopy(dense)
    broken.model.norm.weight.data.fill_(math.nan)
    healing = start(dense)
    healing.teacher = broken
    before = copy.deepcopy(healing.model.state_dict())
    with pytest.raises(FloatingPointError, match=r"the loss of step 1 is nan: lr=0\.0001 is too"):
        healing.take_step(text.windows)
    assert healing.step == 0
    for name, value in healing.model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[name])


def find_group(healing, name):
    """The group of the optimizer that holds a parameter."""
    for group in healing.optimizer.param_groups:
        if name in group["param_names"]:
            return group
    raise ValueError(name)


CORE = "model.layers.0.mlp.up_proj.cores.0"
NORM = "model.norm.weight"


def test_adamw_has_the_recipes_rate_betas_and_no_decay(dense_and_text):
    dense, _ = dense_and_text
    healing = start(dense, replace(RECIPE, lr=1e-3, tokens=50 * 48))
    assert healing.recipe.steps == 50
    for name in (CORE, NORM):
        group = find_group(healing, name)
        # round(.05 * 50) = 2 steps of warm-up, so the first has half of the rate
        assert group["lr"] == pytest.approx(0.5 * 1e-3)
        assert group["betas"] == (0.9, 0.95)
        assert group["weight_decay"] == 0
    assert find_group(healing, NORM)["lr_mult"] == 1


def test_muon_has_a_hundred_times_the_rate_on_cores_and_the_rate_itself_on_norms(dense_and_text):
    dense, _ = dense_and_text
    healing = start(dense, replace(RECIPE, lr=1e-3, optimizer="muon"))
    # six steps have a warm-up of one, so the first has the whole rate
    core_group = find_group(healing, CORE)
    norm_group = find_group(healing, NORM)
    assert core_group["kind"] == "matrix"
    assert core_group["lr"] * core_group["lr_mult"] == pytest.approx(0.1)
    assert norm_group["lr"] * norm_group["lr_mult"] == pytest.approx(1e-3)


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


# ---- what is shown -------------------------------------------------------------------------------


def make_point(tokens, nats, seconds):
    texts = {"perplexity_wiki": 20.0, "nats_wiki": nats, "perplexity_c4": 40.0, "nats_c4": nats}
    return {"tokens": tokens, "seconds": seconds, **texts}


def test_the_page_has_a_line_for_each_point_of_each_curve():
    dense = {"wiki": [1.0, 2.0, 3.0], "c4": [1.0, 2.0, 3.0]}
    # the differences from dense are .3, .5, .7: their standard deviation is .2, and Student's
    # 97.5 % quantile with 2 degrees of freedom is 4.302653
    reach = 100 * math.expm1(4.302653 * 0.2 / math.sqrt(3))
    unequal = [1.3, 2.5, 3.7]
    equal = [1.5, 2.5, 3.5]
    half = {
        "recipe": asdict(heal.Recipe()),
        "step": 488,
        "steps": 976,
        "dense": dense,
        "curve": [make_point(0, unequal, 0.0), make_point(999_424, equal, 3599.6)],
    }
    whole = half | {"recipe": asdict(heal.Recipe(family="BTT", keep=0.6)), "step": 976}
    name = "low-rank, keep 0.8, adamw (on its way, 999,424 of 2,000,000 tokens)"
    before = ["0", f"20.0 ± {reach:.0f} %", f"40.0 ± {reach:.0f} %", "0"]
    after = ["999,424", "20.0 ± 0 %", "40.0 ± 0 %", "3600"]
    assert read_table(heal.markdown({"rows": [half, whole]})) == [
        ["", "tokens", "Wikipedia", "C4", "s"],
        [name, *before],
        [name, *after],
        ["BTT, keep 0.6, adamw", *before],
        ["BTT, keep 0.6, adamw", *after],
    ]


def test_the_sentences_have_the_last_runs_tokens_and_perplexities():
    nats = {"wiki": [math.log(15.0)], "c4": [math.log(30.0)]}
    first = make_point(0, [3.0], 0.0) | {"perplexity_wiki": 26.04, "perplexity_c4": 61.0}
    last = make_point(999_424, [3.0], 4000.0)
    earlier = {"recipe": asdict(heal.Recipe(lr=1.0)), "dense": nats, "curve": [first, first]}
    run = {"recipe": asdict(heal.Recipe()), "dense": nats, "curve": [first, last]}
    assert heal.numbers({"rows": []}) == {}
    assert heal.numbers({"rows": [earlier, run]}) == {
        "heal.tokens": "999,424",
        "heal.lr": "0.0001",
        "heal.rate": "250",
        "heal.calibration": "65,536",
        "heal.wiki_before": "26.0",
        "heal.wiki_after": "20.0",
        "heal.wiki_dense": "15.0",
        "heal.c4_before": "61.0",
        "heal.c4_after": "40.0",
        "heal.c4_dense": "30.0",
    }


def test_the_picture_has_the_curve_of_each_run_and_the_dense_models_perplexity():
    nats = {"wiki": [math.log(15.0)], "c4": [math.log(30.0)]}
    points = [make_point(0, [3.0], 0.0), make_point(96, [3.0], 1.0)]
    row = {"recipe": asdict(heal.Recipe()), "dense": nats, "curve": points}
    figure = heal.draw({"rows": [row]})
    expected = [(20.0, 15.0), (40.0, 30.0)]  # healed and dense, on Wikipedia and on C4
    for axes, (healed, dense) in zip(figure.axes, expected, strict=True):
        curve, line = axes.lines
        assert [*curve.get_xdata()] == [0, 96]
        assert [*curve.get_ydata()] == [healed, healed]
        assert [*line.get_ydata()] == pytest.approx([dense, dense])
