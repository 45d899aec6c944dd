"""README and docs/: every link and picture is there, all code runs, every number is a kept
result's."""

import doctest
import json
import math
import re
from itertools import product
from math import exp
from pathlib import Path
from statistics import fmean, geometric_mean

import pytest
import torch

pytest.importorskip("matplotlib")

from PIL import Image

from benchmarks import muon_vs_adamw, pages, record, starts
from benchmarks.papers import tables, verdicts
from structlin import BTT, TT, Kronecker, LowRank, Monarch, to_dense

ROOT = pages.ROOT
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN = [page for page in PAGES if ">>>" in page.read_text(encoding="utf-8")]


def page_text(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """What `#...` can name: the headings, as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- links and code ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_local_link_and_picture_of_a_page_is_there(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert ROOT.resolve() in found.resolve().parents, target
        assert not anchor or anchor in anchors(found), target


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set[Path](), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve()
            if linked not in reached:
                todo.append(linked)
    assert {page.resolve() for page in PAGES} <= {page.resolve() for page in reached}


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_code_of_a_page_gives_the_output_that_it_shows(page):
    results = doctest.testfile(
        str(page), module_relative=False, encoding="utf-8", optionflags=doctest.ELLIPSIS
    )
    assert results.attempted > 3
    assert results.failed == 0


def test_the_pages_with_code_are_found():
    assert {"README.md", "docs/theory.md", "docs/compress.md"} <= {name_of(page) for page in RUN}


def test_the_main_job_and_the_tests_are_installed_with_the_pinned_versions():
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(commands) == 2
    assert all(command.startswith("pip install -c constraints.txt -e ") for command in commands)


# ---- tables and pictures -------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages.TABLES)
def test_the_tables_of_a_page_are_what_the_kept_results_give(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert record.fill(text, pages.TABLES[page]) == text
    for name, make in pages.TABLES[page].items():
        assert f"<!-- {name} -->\n{make()}\n<!-- end -->" in text
        assert len(make().splitlines()) > 2  # titles, the line below them, a row


@pytest.mark.parametrize("name", pages.PICTURES)
def test_a_picture_is_drawn_from_what_is_kept(name):
    content, _ = pages.PICTURES[name]
    with Image.open(pages.IMAGES / name) as picture:
        assert picture.text["Description"] == pages.digest(content())


def test_the_examples_in_the_docstrings_give_what_they_show():
    for module in (pages, record):
        results = doctest.testmod(module)
        assert results.attempted
        assert not results.failed


def test_a_programs_tables_show_medians_and_seconds_until_another_models_loss(monkeypatch):
    row = {"label": "dense", "width": 512, "flops": 2_064_384, "loss": 1.6172, "seconds": 43.3}
    row |= {"params": 1_036_544, "bits/char": 2.3}
    rows = [
        row | {"seconds to the loss of": {"dense 1024": None}, "clock": [1, 38.2]},
        row | {"seconds to the loss of": {"dense 512": 44.5, "dense 1024": 49.9}},
    ]
    monkeypatch.setattr(pages, "read", lambda name: {"rows": rows})
    _, _, *shown = pages.show_runs("train_mlp_lm").splitlines()
    assert shown == [
        "| dense | 512 | 2,064,384 | 1.617 | 38 |",
        "| dense | 512 | 2,064,384 | 1.617 | 43 |",
    ]
    titles, _, *shown = pages.show_more("train_mlp_lm").splitlines()
    assert titles.endswith("| until dense 1024's loss, s | until dense 512's loss, s |")
    assert shown == [
        "| dense | 512 | 1,036,544 | 2.300 | never |  |",
        "| dense | 512 | 1,036,544 | 2.300 | 50 | 44 |",
    ]


FAMILIES = [
    BTT(rank=1),
    BTT(rank=2),
    BTT(rank=1, cores=3),
    Monarch(blocks=2),
    Monarch(blocks=8),
    Kronecker(),
    TT(rank=2),
    LowRank(rank=3),
]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_ways_through_blocks_and_wires_are_the_entries_of_the_matrix(family):
    structure = family.structure(16, 24)
    ways = [{source} for source in range(structure.in_features)]  # from which of x a number comes
    *sources, last = pages.wires(structure)
    for core, source in zip(structure.cores, sources, strict=True):
        inputs, ways = [ways[place] for place in source], []
        for block in range(core.batch * core.repeat):
            read = inputs[block * core.fan_in : (block + 1) * core.fan_in]
            ways += [set().union(*read)] * core.fan_out
    found = [ways[place] for place in last]
    ones = to_dense(structure, [torch.ones(core.shape) for core in structure.cores])
    assert found == [{n for n, entry in enumerate(row) if entry} for row in ones.tolist()]


def test_a_picture_shows_every_block_and_wire():
    for family in (BTT(rank=2), Kronecker()):
        structure = family.structure(16, 16)
        axes, matrix = pages.draw_structure(structure).axes
        assert len(axes.patches) == sum(core.batch * core.repeat for core in structure.cores)
        wires = [line for line in axes.lines if line.get_marker() in ("", "None")]
        assert len(wires) == sum(len(source) for source in pages.wires(structure))
        assert matrix.images[0].get_array().shape == (16, 16)


# ---- numbers in sentences ------------------------------------------------------------------------


def test_what_is_said_of_speed_is_what_the_kept_results_have():
    def speeds(name):
        rows = pages.read(name)["rows"]
        plain = [row for row in rows if row["implementation"] == "auto"]
        keys = ("d_in", "tokens", "dtype", "backward", "structure")
        assert plain
        return {
            tuple(row[key] for key in keys): row["x_dense"]["median"]
            for row in plain
            if row["d_in"] == row["d_out"]
        }

    text, kept = page_text("speed.md"), speeds("layer")
    command = pages.read("layer")["environment"]["command"]
    assert f"`{command}` on two CPU cores" in text
    narrow, wide = (kept[width, 4096, "bfloat16", True, "BTT r=1"] for width in (1024, 2048))
    assert (
        f"In bfloat16 it is {narrow:.1f} times as fast as dense at 1024 and {wide:.1f} times at "
        "2048" in text
    )
    lowest = min(speed for (_, tokens, *_), speed in kept.items() if tokens == 4096)
    assert (
        f"the slowest structure of all widths and both dtypes has {lowest:.2f} of dense's speed"
        in text
    )
    fresh = speeds("layer_default_allocator")[1024, 4096, "float32", True, "BTT r=1"]
    assert f"BTT r=1 was {fresh:.1f} times as fast as dense at 1024" in text


def test_what_is_said_of_the_roofline_is_what_the_kept_results_have():
    def shares(name):
        return [
            next(
                row["fused_share"]
                for row in pages.read(name)["rows"]
                if (row["structure"], row["implementation"]) == ("BTT r=1", "auto")
                and (row["d_in"], row["d_out"], row["tokens"]) == (1024, 1024, 4096)
                and row["dtype"] == dtype
                and row["backward"]
            )
            for dtype in ("float32", "bfloat16")
        ]

    (wide, half), (wide_epyc, half_epyc) = shares("layer_xeon"), shares("layer")
    assert (
        f"reaches {wide:.2f} in float32 ({wide_epyc:.2f} on the EPYC) and {half:.2f} in bfloat16 "
        f"({half_epyc:.2f})" in page_text("speed.md")
    )


def test_the_share_of_denses_flop_rate_is_the_speed_times_the_share_of_its_flops():
    row = next(
        row
        for row in pages.read("layer")["rows"]
        if (row["structure"], row["implementation"], row["dtype"]) == ("BTT r=1", "auto", "float32")
        and (row["d_in"], row["d_out"], row["tokens"]) == (1024, 4096, 4096)
        and row["backward"]
    )
    speed = row["x_dense"]["median"]
    share = speed * BTT(rank=1).structure(1024, 4096).flops / (2 * 1024 * 4096)
    table = pages.TABLES["README.md"]["speed"]().splitlines()
    column = table[0].split("|").index(" 1024 -> 4096, float32 ")
    cells = next(line.split("|") for line in table if "BTT r=1" in line)
    assert cells[column] == f" {speed:.2f}x ({100 * share:.0f}%) "
    assert len(table) == 2 + 5


def test_what_is_said_of_whole_models_is_what_the_kept_result_has():
    result, text = pages.read("model"), page_text("speed.md")
    assert result["environment"]["command"] in text
    speeds = {
        (row["variant"], row["model"], row["task"]): row["x_dense"]
        for row in result["rows"]
        if not row["compiled"]
    }
    shares = [
        speed["median"] / speeds["none", name, task]["median"]
        for (variant, name, task), speed in speeds.items()
        if variant == "BTT r=1, all"
    ]
    assert len(shares) == 5
    assert f"{min(shares):.2f} to {max(shares):.2f} of its speed, not compiled" in text
    training = [x for (_, *job), x in speeds.items() if job == ["GPT-2 small", "training"]]
    widest = max(training, key=lambda speed: speed["p80"] / speed["p20"])
    assert f"are as wide as {widest['p20']:.1f} to {widest['p80']:.1f}" in text


def test_what_is_said_of_the_parts_of_a_step_is_what_the_kept_result_has():
    result, text = pages.read("parts"), page_text("speed.md")
    part = pages.parts.parts_of_whole(result["shares"]["rows"])
    linear, head = (100 * (1 - part[name]) for name in ("linear layers (BTT r=1)", "head and loss"))
    assert f"take {linear:.0f} % of it, the head and the loss {head:.0f} %" in text
    speed = pages.parts.parts_of_whole(result["remedies"]["rows"])
    slower = [name for name, part in speed.items() if part > 1]
    assert slower == list(speed)[-3:]


def test_what_is_said_of_self_guided_training_is_what_the_kept_result_has():
    text, rows = page_text("optimizers.md"), pages.read("self_guided")["rows"]

    def wins(structure, way, against):
        losses = (pages.self_guided.losses_of(rows, structure, each) for each in (way, against))
        return sum(ours < theirs for ours, theirs in zip(*losses, strict=True))

    btt, low = pages.self_guided.STRUCTURES
    always, drawn = "self-guided", "self-guided, at random"
    counts = [wins(name, always, "plain") for name in (btt, low)]
    assert "helps BTT in {} of 3 seeds and low-rank in {} of 3; at random".format(*counts) in text
    counts = [wins(name, drawn, "plain") for name in (btt, low)]
    assert "it helps BTT in {} of 3 and low-rank in {} of 3. For".format(*counts) in text
    longer = "plain, equal FLOPs"
    counts = [wins(btt, longer, way) + wins(low, longer, way) for way in (drawn, always)]
    assert "plain layers end lower in {} of 6 runs, and in {} of 6 against".format(*counts) in text


def test_what_is_said_of_the_search_is_what_the_kept_result_has():
    result, text = pages.read("search"), page_text("search.md")
    little = {task: [*claims.values()][-1] for task, claims in result["claims"].items()}
    assert little == {"teacher": False, "digits": False, "text": True}
    assert "less compute is better on the teacher and the digits" in text
    for task, summary in result["summaries"].items():
        assert summary["flops"]["class nu"]["low"] > (1 if task != "text" else 0.99)
    ratios = [row["ratio"]["value"] for row in result["summaries"]["text"]["flops"]["standings"]]
    assert max(ratios) / min(ratios) < 1.1
    assert "But there all structures are nearly alike: 800 steps are few" in text
    assert result["setting"]["steps"]["text"] == 800
    grids = {
        task: [len({row[name] for row in rows}) for name in ("width", "seed")]
        for task, rows in result["rows"].items()
    }
    assert grids == {"teacher": [3, 3], "digits": [3, 3], "text": [2, 3]}
    assert "with three seeds and two widths (text) or three" in text


def test_what_is_said_of_mixtures_is_what_the_kept_result_has():
    result, text = pages.read("moe"), page_text("mixtures.md")
    rows = {row["kind"]: row for row in result["table"]}
    mixture, dense = rows.pop("BTT-MoE, 2 of 8"), rows["dense"]
    assert all(row["flops"] <= dense["flops"] for row in (mixture, *rows.values()))
    assert all(max(mixture["losses"]) < min(row["losses"]) for row in rows.values())
    lower = 100 * (1 - fmean(mixture["losses"]) / fmean(dense["losses"]))
    assert f"The mixture ends {lower:.0f} % lower than dense" in text
    assert f"with {mixture['params'] / dense['params']:.1f} times its parameters" in text
    assert f"takes {mixture['step']['median']:.1f} times dense's milliseconds" in text
    share = mixture["largest_share"]
    assert f"the largest expert has {100 * share:.0f} % of the assignments" in text
    assert f"{len(mixture['losses'])} seeds, {result['setting']['steps']} steps" in text
    for row in result["table"]:
        rates, losses = zip(*row["tried"], strict=True)
        assert 0 < losses.index(min(losses)) < len(rates) - 1
    tried = ", ".join(f"{loss:.3f} at {rate:g}" for rate, loss in dense["tried"][1:])
    assert f"(dense, seed 0: {tried})" in text


def test_what_is_said_of_other_packages_is_what_the_kept_result_has():
    found = {
        (row["structure"], row["implementation"], row["tokens"], row["dtype"], row["backward"]):
        row["structlin_x"]["median"]
        for row in pages.read("peers")["rows"]
        if "structlin_x" in row
    }  # fmt: skip

    def speeds(structure, name="", tokens=4096, dtypes=("float32", "bfloat16")):
        return [
            speed
            for (matrix, implementation, some, dtype, _), speed in found.items()
            if matrix.startswith(structure) and name in implementation
            and some == tokens and dtype in dtypes
        ]  # fmt: skip

    text = page_text("speed.md")
    fastkron = speeds("Kronecker", "fastkron") + speeds("Kronecker", "fastkron", 16)
    assert min(fastkron) > 1
    assert f"Ahead of FastKron in all {len(fastkron)} cases" in text
    btt = speeds("BTT", "strided")
    assert f"strided BTT by {min(btt):.1f} to {max(btt):.1f} times with 4096 tokens" in text
    behind = {key: speed for key, speed in found.items() if speed < 1 and "low-rank" not in key[0]}
    forming = "TT r=8", "tensorly-torch 0.5.0 reconstructed", 4096, "bfloat16", False
    assert f"TT r=8, of tensorly-torch, which forms W there ({behind.pop(forming):.2f})" in text
    assert {key[3:] for key in behind} == {("float32", True)}
    many, few = (
        {key: speed for key, speed in behind.items() if key[2] == some} for some in (4096, 16)
    )
    assert {key[0] for key in many} == {"Monarch 4"}
    (speed,) = {f"{speed:.2f}" for speed in many.values()}
    assert f"({speed} of its speed with 4096 tokens)" in text
    assert {key[0] for key in few} == {"Monarch 4", "BLAST 4, r=d/8"}
    assert f"Monarch 4 and BLAST ({min(few.values()):.2f} to {max(few.values()):.2f})" in text


def test_what_is_said_of_the_compressed_gpt_is_what_the_kept_result_has():
    dense, *rows = pages.read("compress")["rows"]
    text = page_text("compress.md")
    plain, calibrated = (
        {(row["family"], row["budget"]): row for row in rows if row["aware"] is aware}
        for aware in (False, True)
    )

    def bits(row, when):
        return row[when]["bits/char"]

    assert "Calibration wins everywhere, right after conversion and healed" in text
    for key, row in calibrated.items():
        assert all(bits(row, when) < bits(plain[key], when) for when in ("after", "healed"))
    ahead = [key for key in plain if bits(calibrated[key], "after") < bits(plain[key], "healed")]
    assert f"ahead of healing alone in {len(ahead)} of {len(plain)} cases" in text
    assert "Low-rank is the best at both budgets, calibrated and healed" in text
    for budget in (0.5, 0.25):
        same = {family: row for (family, size), row in calibrated.items() if size == budget}
        for when in ("after", "healed"):
            assert min(same, key=lambda family: bits(same[family], when)) == "lowrank"
            assert max(same, key=lambda family: bits(same[family], when)) == "blockdiagonal"
    assert "Block-diagonal loses at every budget" in text
    base = dense["after"]["bits/char"]
    regained = [
        (bits(row, "after") - bits(row, "healed")) / (bits(row, "after") - base)
        for row in calibrated.values()
    ]
    least, most = (f"{100 * share:.0f} %" for share in (min(regained), max(regained)))
    assert f"100 steps bring back {least} to {most} of what calibration had left lost" in text
    half = calibrated["lowrank", 0.5]
    perplexities = [row["perplexity"] for row in (dense["after"], half["after"], half["healed"])]
    assert "{:.2f} (dense), {:.2f} (calibrated), {:.2f} (healed)".format(*perplexities) in text
    seconds = f"{half['seconds']:.0f} CPU seconds of projection and {half['heal_seconds']:.0f} of"
    assert seconds in text


def test_what_is_said_of_tuned_rates_is_what_the_kept_result_has():
    result, text = pages.read("lr_transfer"), page_text("optimizers.md")
    rows = {(row["structure"], row["width"], row["rule"]): row for row in result["table"]}
    pairs = {
        (structure, width): (row, rows[structure, width, "aware"])
        for (structure, width, rule), row in rows.items()
        if rule == "naive"
    }
    tuned = [naive["best_loss"] / ours["best_loss"] for naive, ours in pairs.values()]
    lower = sum(ratio < 1 for ratio in tuned)
    assert f"the naive rule has the lower loss in {lower} of {len(tuned)} cases" in text
    assert f"by up to a factor of {1 / min(tuned):.1f}" in text
    kind = "loss_at_reference_lr"
    won = [key for key, (naive, ours) in pairs.items() if ours[kind] < naive[kind]]
    wide, narrow = (sum(width == each for _, width in won) for each in (1024, 64))
    assert (
        f"it ends lower in {len(won)} of {len(pairs)} cases, in {wide} of 6 at width 1024 and in "
        f"{narrow} of 6 at width 64"
    ) in text
    means = [
        sum(abs(pairs[structure, width][rule]["shift"]) for width in (64, 256, 1024)) / 3
        for rule in (0, 1)
        for structure in ("low-rank", "Monarch")
    ]
    assert (
        "nearer ones: {:.2f} and {:.2f} factors of 2 away on average, ours {:.2f} and {:.2f}"
    ).format(*means) in text
    largest = result["largest_shift"]
    assert f"within a factor of {2 ** largest['aware']:.0f} of dense's everywhere" in text
    assert f"without it within a factor of {2 ** largest['naive']:.0f}" in text


def test_what_is_said_of_feature_changes_is_what_the_kept_result_has():
    result, text = pages.read("papers/cbs_features"), page_text("optimizers.md")
    grown = [math.exp(found["value"]) for found in result["growth"]["aware"].values()]
    assert f"between {min(grown):.2f} and {max(grown):.2f} of itself for every structure" in text
    short = {name: math.exp(found["value"]) for name, found in result["shortfall"].items()}
    lowrank = short.pop("low-rank")
    assert f"width 1024 {lowrank:.2f} of ours for low-rank" in text
    assert f"between {min(short.values()):.2f} and {max(short.values()):.2f} of it" in text


def test_what_the_page_says_of_muon_beside_adamw_holds():
    rows = pages.read("muon_vs_adamw")["table"]
    assert all(row["Muon"]["loss"] < row["AdamW"]["loss"] for row in rows)
    reached = [(row["task"], steps) for row in rows for steps in row["muon_steps_to_adamws_loss"]]
    shares = [steps / rows[0]["steps"] for _, steps in reached if steps]
    text = page_text("optimizers.md")
    assert f"needs between {min(shares):.2f} and {max(shares):.2f} of AdamW's steps" in text
    assert [task for task, steps in reached if steps is None] == ["ViT"]
    assert "one seed of the ViT never reaches it" in text
    short = [(row["short"], row["AdamW"]["loss"]) for row in rows if row["short"]]
    assert all(min(run["losses"]) > loss for run, loss in short)
    (share,) = {run["steps"] / rows[0]["steps"] for run, _ in short}
    assert f"A run of {share:.2f} of the steps does not get there either" in text


def test_what_the_page_says_of_the_tuned_short_run_holds():
    result = pages.read("muon_vs_adamw")
    usual = {row["structure"]: row for row in result["table"] if row["task"] == "GPT"}
    adamw = {
        row["seed"]: row["loss"]
        for row in result["rows"]
        if (row["task"], row["structure"], row["optimizer"]) == ("GPT", "BTT r=1", "AdamW")
        and row["lr"] == usual["BTT r=1"]["AdamW"]["lr"]
    }
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for row in result["tuned"]:
        losses.setdefault((row["structure"], row["way"]), {})[row["seed"]] = row["loss"]
    tuned = losses["BTT r=1", "all of it"]
    assert set(tuned) == set(adamw) == {0, 1, 2}
    assert all(tuned[seed] < adamw[seed] for seed in adamw)
    mean = {pair: sum(found.values()) / len(found) for pair, found in losses.items()}
    before = {each: row["AdamW"]["loss"] for each, row in usual.items()}
    text = page_text("optimizers.md")
    assert (
        f"{mean['BTT r=1', 'all of it']:.3f} on average against {before['BTT r=1']:.3f}, "
        f"and dense has {mean['dense', 'all of it']:.3f} against {before['dense']:.3f}"
    ) in text
    needed = ("without momentum", "without lr and masses")
    least = min(mean["BTT r=1", way] for way in needed)
    assert f"without either it is {least:.3f} or more" in text
    rest = [way for pair, way in losses if pair == "BTT r=1" and way.startswith("with")]
    assert all(mean["BTT r=1", way] < least for way in rest if way not in needed)
    assert all(mean[each, "AdamW, all steps"] > before[each] - 0.005 for each in usual)
    recipe = result["recipe"]
    assert f"momentum {recipe['momentum']}" in text
    assert f"lr=2**{math.log2(recipe['lr'])}" in text


def test_what_the_page_says_of_muons_defaults_and_what_changes_them_holds():
    result, text = pages.read("muon_vs_adamw"), page_text("optimizers.md")
    losses = muon_vs_adamw.setting_losses(result["settings"])
    usual, shorter, tenth, recipe = muon_vs_adamw.SETTINGS
    assert all(len(found) == 3 for found in losses.values())
    mean = {key: f"{fmean(found):.3f}" for key, found in losses.items()}
    said = {}
    for structure in muon_vs_adamw.STRUCTURES:
        keys = [("characters", structure, setting) for setting in (usual, shorter, tenth)]
        by_seed = zip(*(losses[key] for key in keys), strict=True)
        assert all(each[0] > each[1] > each[2] for each in by_seed)
        said[structure] = "{}, {} and {} on {}".format(*(mean[key] for key in keys), structure)
    assert f"for every seed: {said['BTT r=1']}, and {said['dense']}." in text
    tuned, before = (losses["characters", "BTT r=1", setting] for setting in (recipe, usual))
    lower = f"{100 * (1 - fmean(tuned) / fmean(before)):.0f} % below the defaults"
    said = [mean["characters", structure, recipe] for structure in ("BTT r=1", "dense")]
    assert f"takes BTT r=1 to {said[0]}, {lower}, and dense to {said[1]}" in text
    said = [mean["pairs of characters", "dense", setting] for setting in (shorter, usual, tenth)]
    assert "helps again, {} against {}, and the tenth".format(*said[:2]) in text
    assert f"takes nearly all of that back, {said[2]}" in text
    ahead = [
        ours < theirs
        for (text_name, structure, setting), found in losses.items()
        if setting == usual
        for ours, theirs in zip(losses[text_name, structure, shorter], found, strict=True)
    ]
    assert f"is ahead in {sum(ahead)} of {len(ahead)} runs" in text
    _, shorter, tenth, _ = muon_vs_adamw.SETTINGS.values()
    assert shorter == {"momentum": 0.85}
    assert tenth == shorter | {"masses": {"wte": 0.1, "wpe": 0.1}}
    assert result["changes"] == muon_vs_adamw.SETTINGS


def test_what_the_page_says_of_options_around_muons_step_holds():
    table = {(row["option"], row["structure"]): row for row in pages.read("muon_options")["table"]}
    wins = {pair: row["wins"] for pair, row in table.items()}
    text, dense, btt = page_text("optimizers.md"), "dense", "BTT r=1"
    cautious = wins["cautious steps", dense] + wins["cautious steps", btt]
    assert f"Cautious steps come nearest, ahead in {cautious} of 6 runs" in text
    others = {option for option, _ in wins} - {"cautious steps"}
    assert all(wins[option, dense] + wins[option, btt] < cautious for option in others)
    row = "NorMuon's row scale"
    said = f"ahead in {wins[row, dense]} of 3 on dense and in {wins[row, btt]} of 3 on BTT"
    assert said in text
    cost = table["cap of 2", dense]["loss"] - table["plain", dense]["loss"]
    assert f"a cap of 2 costs dense {cost:.2f} of the loss" in text
    assert "Below plain Muon for every seed on dense and BTT: none." in text


def test_what_the_page_says_of_a_steps_cost_holds():
    runs = {
        (row["width"], row["threads"]): {each["optimizer"]: each for each in row["optimizers"]}
        for row in pages.read("optimizer")["rows"]
    }
    text = page_text("optimizers.md")
    beside = {run: found["structlin Muon"]["beside_torch"]["median"] for run, found in runs.items()}
    assert f"takes {min(beside.values()):.2f} to {max(beside.values()):.2f} times" in text
    assert max(beside.values()) < 1
    for threads in (1, 2):
        shares = [
            100 * found["structlin Muon on BTT"]["share"]["median"]
            for (_, each), found in runs.items()
            if each == threads
        ]
        assert f"{min(shares):.1f} to {max(shares):.1f} %" in text
        assert max(shares) < 3
    for found in runs.values():
        for ours, theirs in (
            ("structlin Muon", "AdamW"),
            ("structlin Muon on BTT", "AdamW on BTT"),
        ):
            assert found[ours]["state"] + found[ours]["peak"] <= found[theirs]["state"]


def test_what_the_page_says_of_polar_factors_holds():
    rows = {(row["structure"], row["method"]): row["steps"] for row in pages.read("polar")["table"]}
    for structure in dict.fromkeys(structure for structure, _ in rows):
        exact, cheap, jordan = (
            rows[structure, name]
            for name in ("ns, 8 steps", "fast, 5 steps, bfloat16", "jordan, 5 steps, bfloat16")
        )
        assert cheap["loss"] <= exact["most"]
        assert jordan["loss"] > max(exact["loss"], cheap["loss"])
        assert {exact["seeds"], cheap["seeds"], jordan["seeds"]} == {3}
    text, table = page_text("optimizers.md"), pages.read("polar")["table"]
    for structure in ("dense", "BTT r=1"):
        losses = [row["seconds"]["loss"] for row in table if row["structure"] == structure]
        assert f"from {min(losses):.3f} to {max(losses):.3f} on {structure}" in text
        assert all(row["seconds"]["seeds"] == 3 for row in table)
        (default,) = (
            row for row in table if (row["structure"], row["method"]) == (structure, "default")
        )
        assert default["seconds"]["loss"] == min(losses)  # "the lowest on both"
    times = {row["method"]: row["step_ms"] for row in table if row["structure"] == "BTT r=1"}
    assert times["fast, 5 steps, bfloat16"] > times["fast, 6 steps"]  # "16 bits cost seconds"


def test_the_table_of_models_lists_as_many_as_the_pages_say():
    listed = (ROOT / "docs/models.md").read_text(encoding="utf-8").count("one graph")
    assert f"{listed} model classes" in page_text("convert.md")
    assert f"{listed} classes that were tested" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_results_that_the_pages_show_have_a_command_and_versions():
    for name in ("layer", "lr_transfer", "minilm", "model", "muon_vs_adamw", "optimizer", "peers"):
        found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["environment"]
        assert {"command", "machine", "torch"} <= set(found)


# ---- docs/results.md -----------------------------------------------------------------------------


def test_a_verdict_is_yes_only_if_all_of_the_claim_holds():
    assert [verdicts.judge(*holds) for holds in ((True, True), (True, False), (False, False))] == [
        "yes",
        "in part",
        "**no**",
    ]


def test_the_verdicts_change_with_the_rows(monkeypatch):
    def turned(name):
        result = pages.read(name)
        if name == "lr_transfer":
            result["largest_shift"] = {"naive": 1.0, "aware": 3.0}
        if name == "papers/cbs_scaling":
            for found in result["comparisons"].values():
                found["against_dense"]["BTT r=1"] = {"value": 0.1, "low": 0.05, "high": 0.2}
        return result

    def line(claim):
        return next(line for line in verdicts.verdicts().splitlines() if claim in line)

    assert "| yes | within a factor of 2 (" in line("CBS 2b")
    assert "| yes | 0.83 (0.83 to 0.84)" in line("CBS 4: BTT is below dense")
    monkeypatch.setattr(verdicts, "read", turned)
    assert "| **no** | within a factor of 8 (" in line("CBS 2b")
    assert "| in part | 1.11 (1.05 to 1.22)" in line("CBS 4: BTT is below dense")


def test_every_kept_result_of_the_papers_is_on_the_page_with_its_command():
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    kept = sorted(path.stem for path in (ROOT / "benchmarks/results/papers").glob("*.json"))
    assert len(kept) > 10
    for name in kept:
        assert f"](../benchmarks/results/papers/{name}.json)" in text
        assert f"](../benchmarks/results/papers/{name}.png)" in text
        command = pages.read(f"papers/{name}")["environment"]["command"]
        assert " ".join(command.split()[:3]) in text


def test_what_is_said_of_transfer_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/mn_transfer")
    compared = result["comparisons"]["transfer"]
    found = [result["transfer"][f"{name}, width"] for name in compared]
    assert list(compared) == ["ResMLP", "ResNet", "GPT"]
    moved, costs = (
        [row["Adam"]["estimates"][key]["value"] for row in found] for key in ("moved", "cost")
    )
    falls = "factors of {:.1f} (ResMLP), {:.1f} (ResNet) and {:.1f} (GPT)"
    assert falls.format(*(2**-each for each in moved)) in text
    cost = "costs {:.2f}, {:.2f} and {:.2f} times the loss"
    assert cost.format(*map(math.exp, costs)) in text
    adam, sgd = (
        [by_method[name]["width"] for by_method in compared.values()] for name in ("Adam", "SGD")
    )
    assert [each["low"] > 0 for each in adam] == [True, False, False]
    assert all(each["value"] > 0 for each in adam)
    mlp, conv, gpt = sgd
    assert conv["high"] < 0
    assert abs(gpt["value"]) < 0.1
    assert mlp["low"] < 0 < mlp["value"]
    depth = [each["blocks"] for by_method in compared.values() for each in by_method.values()]
    assert all(each["low"] < 0 < each["high"] for each in depth)
    assert all(
        abs(result["transfer"][f"{name}, blocks"]["Adam"]["estimates"]["moved"]["value"]) < 1
        for name in compared
    )


def test_what_is_said_of_the_masses_of_gpts_is_what_the_kept_result_has():
    text, found = page_text("results.md"), pages.read("papers/mn_mass_gpt")["estimates"]
    cost = 100 * (math.exp(found["cost"]["value"]) - 1)
    assert f"best mass and rate cost the larger one {cost:.1f} %" in text
    assert found["best"]["larger"][0] == min(map(float, found["masses"]["Python"]))
    assert found["best"]["larger"][1] < found["best"]["small"][1]
    costs = {
        mass: [100 * (math.exp(each[mass]["value"]) - 1) for each in found["masses"].values()]
        for mass in ("1.0", "4.0", "16.0")
    }
    least, most = min(costs["16.0"]), (max(costs[mass]) for mass in ("1.0", "4.0"))
    said = "1 costs at most {:.1f} %, 4 up to {:.1f} %, 16 from {:.1f} % on"
    assert said.format(*most, least) in text


def test_what_is_said_of_the_overhead_is_what_the_kept_result_has():
    paper, text = pages.read("papers/mn_overhead")["paper's setting"], page_text("results.md")
    for way in ("power", "bound"):
        value, low, high = (100 * paper["intervals"][way][key] for key in ("value", "low", "high"))
        assert f"{value:.0f} % ({low:.0f} to {high:.0f})" in text
    seconds = paper["seconds"]
    step = seconds["forward + backward"] + seconds["Adam"]
    more = [1e3 * (seconds[way] - seconds["Adam"]) for way in ("power", "bound")]
    assert f"a step takes {1e3 * step:.0f} ms" in text
    assert "normalised in {:.0f} (power) and {:.0f} (bound)".format(*more) in text
    rows = pages.read("papers/mn_overhead")["rows"]
    assert all(
        row["overhead"][way] < 0.1
        for row in rows
        for way in ("bound", "power")
        if way == "power" or row["tokens"] == 4096
    )


def test_what_is_said_of_scaling_is_what_the_kept_result_has():
    compared = pages.read("papers/cbs_scaling")["comparisons"]
    teacher, digits = (compared[task]["exponents"] for task in ("teacher", "digits"))
    shared = [
        found[name]["value"] for found in (teacher, digits) for name in ("Kronecker", "TT r=4")
    ]
    steeper = [
        value > found["dense"]["value"]
        for value, found in zip(shared, (teacher, teacher, digits, digits), strict=True)
    ]
    text = page_text("results.md")
    assert "three of their four exponents are larger than dense's" in text
    assert steeper == [True, True, True, False]
    dense = teacher["dense"]["value"], digits["dense"]["value"]
    assert (
        f"({shared[0]:.3f} and {shared[1]:.3f} against {dense[0]:.3f}, "
        f"{shared[2]:.3f} against {dense[1]:.3f})"
    ) in text
    steepest = {name: f"{digits[name]['value']:.2f}" for name in verdicts.FIGURE_4}
    assert max(steepest.values()) == steepest["low-rank"] > steepest["BTT r=1"]
    assert steepest["BTT r=1"] == steepest["Kronecker"]
    assert "Nor is BTT the steepest on digits: low-rank is, and Kronecker is as steep" in text
    grown = [compared[task]["exponent_differences"][0] for task in ("teacher", "digits")]
    assert "(larger by {low:.3f} to {high:.3f} for every resampling".format(**grown[0]) in text
    assert "(larger by {low:.3f} to {high:.3f}), BTT of rank 1 gains".format(**grown[1]) in text
    ratios = {
        (*row["pair"], task): tables.interval(row, 2, exp)
        for task, found in compared.items()
        for row in found["log_ratios"]
    }
    three, four = (
        [ratios["BTT r=1", f"BTT r=1, {n} cores", task].split(" ", 1) for task in compared]
        for n in (3, 4)
    )
    assert (
        "BTT r=1 has {} of the loss of three cores on the teacher {} and {} on digits {}, {} {} "
        "and {} {} of that of four".format(*three[0], *three[1], *four[0], *four[1])
    ) in text


def test_what_is_said_of_scaling_against_structures_that_share_is_what_the_kept_result_has():
    text, compared = page_text("results.md"), pages.read("papers/cbs_scaling")["comparisons"]
    found = [
        exp(tables.one(compared[task]["log_ratios"], pair=pair)["value"])
        for pair in (["BTT r=1", "Kronecker"], ["BTT r=4", "TT r=4"])
        for task in compared
    ]
    said = "({:.2f} and {:.2f} of Kronecker's loss, {:.2f} and {:.2f} of that of TT r=4)"
    assert said.format(*found) in text


def test_what_is_said_of_the_mlp_language_model_is_what_the_kept_seeds_have():
    text = page_text("results.md")
    kept = [pages.read(f"train_mlp_lm{end}")["rows"] for end in ("", "_seed1", "_seed2")]
    below = sum(rows[2]["loss"] < rows[1]["loss"] for rows in kept)
    assert below == 2
    assert "(below it for two seeds of three)" in text
    wide, narrow = kept[0][1:3]
    assert [round(wide[key] / narrow[key]) for key in ("params", "flops")] == [11, 11]
    assert "an eleventh of its parameters and FLOPs" in text
    assert all(rows[3]["loss"] < min(rows[0]["loss"], rows[1]["loss"]) for rows in kept)
    assert "the wider one ends below both dense models for every seed" in text


def test_what_is_said_of_projection_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/cbs_projection")
    largest = max(row["largest_error_at_bound"] for row in result["table"])
    assert f"is at most {largest:.0e} at the bound" in text
    square = {(row["structure"], row["in"], row["out"]): row for row in result["table"]}
    assert square["BTT", 64, 64]["bonds"] == [8]
    assert square["TT", 64, 64]["bonds"] == [64]
    assert {square[name, 64, 64]["params_over_dense"] for name in ("BTT", "TT")} == {2}
    errors = [
        row["error"]
        for row in result["rows"]
        if (row["structure"], row["in"], row["out"], row["rank"]) == ("TT", 64, 64, 8)
    ]
    assert f"TT has an error of {fmean(errors):.2f}" in text


def test_what_is_said_of_mass_is_what_the_kept_result_has():
    text, found = page_text("results.md"), pages.read("papers/mn_mass")["masses"]
    curves = {
        f"{axis} {size}": row["curve"]
        for axis, sizes in found.items()
        for size, row in sizes.items()
    }
    near = max(curve["1.0"] / min(curve.values()) for curve in curves.values())
    assert f"the best of the grid or within {math.ceil(100 * (near - 1))} % of it" in text
    worst = {name: max(curve.values()) / min(curve.values()) for name, curve in curves.items()}
    first = worst.pop("width 16")
    least, most = min(worst.values()), max(worst.values())
    assert f"costs a factor of {least:.1f} to {most:.1f} ({first:.1f} at width 16)" in text


def test_what_is_said_of_coefficients_is_what_the_kept_result_has():
    text, rows = page_text("results.md"), pages.read("papers/md_coefficients")["table"]
    found = {
        row["method"]: [row["efficiency in training"], *row["efficiency"].values()] for row in rows
    }
    jordan = found["jordan"]
    assert f"a factor {min(jordan):.2f} to {max(jordan):.2f} of the steepest descent" in text
    assert f'ours are {min(found["ns"]):.3f} ("ns", 8 steps)' in text
    assert f'or at least {min(found["fast"]):.3f} ("fast", 6 steps)' in text
    spread = max(high / low for row in rows if row["losses"] for low, high in [row["losses"]])
    assert f"those of one method's seeds differ by a factor of up to {spread:.1f}" in text


def test_what_is_said_of_tuning_normalisation_and_the_gpt_is_what_the_kept_results_have():
    text, result = page_text("results.md"), pages.read("papers/cbs_tuning")
    aware = [row for row in result["advantages"] if row["rule"] == "aware"]
    means = {
        (width, kind): geometric_mean(row[kind] for row in aware if row["width"] == width)
        for width in (64, 256)
        for kind in ("tuned", "dense's")
    }
    assert f"ends {100 * (1 / means[64, 'tuned'] - 1):.0f} % lower on average at width 64" in text
    assert f"and {100 * (1 - means[256, 'tuned']):.0f} % at 256" in text
    assert f"aware from {means[64, 'tuned']:.2f} to {means[256, 'tuned']:.2f} on average" in text
    gains = [100 * (means[width, "dense's"] - 1) for width in (64, 256)]
    assert f"by {gains[0]:.0f} % and {gains[1]:.0f} % on average" in text
    dense = {
        (row["width"], row["rule"]): row["tuned"]
        for row in result["table"]
        if row["structure"] == "dense"
    }
    assert f"(dense itself: {dense[64, 'aware']:.4f} and {dense[256, 'aware']:.4f})" in text
    others = [dense[width, "aware, others x4"] for width in (64, 256)]
    assert f"gains by it as well ({others[0]:.4f} and {others[1]:.4f})" in text
    faster = [row for row in result["advantages"] if row["rule"] == "aware, others x4"]
    assert all(row["tuned"] > 0.99 for row in faster)
    won = [
        sum(row[kind] > 1.01 for row in rows if row["width"] == width)
        for rows, kind in ((faster, "tuned"), (aware, "dense's"))
        for width in (64, 256)
    ]
    assert f"for {won[0]} of 7 structures at width 64 and {won[1]} of 7 at 256, and" in text
    more = f"ends more than 1 % lower for {won[2]} of 7 structures at width 64 and {won[3]} of 7"
    assert more in text
    rates = {rule: [] for rule in ("naive", "aware")}
    for row in result["table"]:
        if row["structure"] != "dense" and row["rule"] in rates:
            rates[row["rule"]].append(row["best_lr"] / 2**-6)
    assert (min(rates["aware"]), max(rates["aware"]), max(rates["naive"])) == (1, 2, 4)
    assert (
        "within a factor of 2 of dense's for all of them, where the naive rule's is up to 4" in text
    )
    norm = {(r["lr"], r["model"]): r["loss"] for r in pages.read("papers/cbs_norm")["table"]}
    lower = [
        100 * (1 - norm[rate, "BTT, normalised"] / norm[rate, "BTT"]) for rate in ("usual", "large")
    ]
    assert f"loss is {lower[0]:.0f} % lower at the usual rate and {lower[1]:.0f} % lower at" in text
    higher = [
        100 * (norm["usual", f"BTT, {name}"] / norm["usual", "BTT"] - 1)
        for name in ("a quarter of the rate", "weight decay 1")
    ]
    assert "end {:.0f} % and {:.0f} % higher than BTT without either".format(*higher) in text


def test_what_is_said_of_the_gpts_of_figure_9_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/cbs_gpt")
    ratios, rows = result["log_ratios"], result["rows"]
    found = [tables.interval(ratios[name], 3, exp) for name in list(ratios)[:2]]
    assert f"At equal FLOPs BTT has {found[0]} of dense's loss, and {found[1]} of it when" in text
    one_rate = tables.interval(ratios["all FLOPs, one rate"], 3, exp)
    assert f"{one_rate} of it where dense too has that rate alone" in text

    def losses(structure, width, eps, lr=2**-7):
        wanted = {"structure": structure, "width": width, "eps": eps, "lr": lr}
        return [row["loss"] for row in tables.select(rows, **wanted)]

    means = [fmean(losses("BTT", width, 1e-4)) for width in (144, 576)]
    assert "from {:.2f} at width 144 to {:.2f} at 576".format(*means) in text
    means = [fmean(losses("dense", width, 1e-4, 2**-6)) for width in (64, 256)]
    assert "dense's best from {:.2f} at 64 to {:.2f} at 256".format(*means) in text
    small = [losses(name, 64, 1e-8) for name in ("dense", "BTT")]
    dense, btt = (f"{min(found):.2f} to {max(found):.2f}" for found in small)
    said = f"dense then ends at {dense} and BTT, whose head shares its cores between words, at"
    usual = tables.interval(ratios["same width, usual eps"], 2, exp)
    assert f"{said} {btt}, {usual} of it, which is no matter of compute" in text


def test_what_is_said_of_the_residual_mlps_of_figure_4_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/cbs_mlp")
    pairs = {tuple(row["pair"]): row for row in result["pairs"]}
    assert "At equal FLOPs BTT is below every other structure" in text
    others = [name for name in result["exponents"] if name != "BTT r=1"]
    assert all(pairs["BTT r=1", other]["loss"]["high"] < 0 for other in others)
    assert "Kronecker and TT are above dense" in text
    assert all(pairs[name, "dense"]["loss"]["low"] > 0 for name in ("Kronecker", "TT r=4"))
    assert "Kronecker has the largest, above BTT's with all of the interval" in text
    values = {name: found["value"] for name, found in result["exponents"].items()}
    assert max(values, key=values.__getitem__) == "Kronecker"
    assert pairs["BTT r=1", "Kronecker"]["steeper"]["high"] < 0
    assert "and TT's is larger than dense's too" in text
    assert pairs["TT r=4", "dense"]["steeper"]["low"] > 0


def test_what_is_said_of_the_vits_of_figure_4_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/cbs_vit")
    assert (
        "BTT is below Kronecker, TT and Monarch with all of each interval, and TT is above" in text
    )
    pairs = {tuple(row["pair"]): row for row in result["pairs"]}
    for other in ("Kronecker", "TT r=8", "Monarch b=4"):
        assert pairs["BTT r=1", other]["loss"]["high"] < 0
    assert pairs["TT r=8", "dense"]["loss"]["low"] > 0
    assert "Against dense itself, and between any two exponents, three seeds do not decide" in text
    undecided = [pairs["BTT r=1", "dense"]["loss"], *(row["steeper"] for row in pairs.values())]
    assert all(found["low"] < 0 < found["high"] for found in undecided)
    assert {row["lr"] for row in result["rows"]} == {result["setting"]["lr"]}


def test_what_is_said_of_both_rules_beside_dense_attention_is_what_the_kept_result_has():
    text, tuned = page_text("results.md"), pages.read("papers/cbs_ffn")["tuned"]
    aware, naive = tuned["loss"]["aware"], tuned["loss"]["naive"]
    assert "The naive rule, tuned, is ahead in loss for every seed, and in mean error;" in text
    assert all(naive["logs"][seed] < aware["logs"][seed] for seed in aware["logs"])
    means = {rule: fmean(found["logs"].values()) for rule, found in tuned["error"].items()}
    assert means["naive"] < means["aware"]
    assert "Its best rate is twice the aware rule's" in text
    assert naive["lr"] == 2 * aware["lr"]
    assert not naive["at end"]
    assert not aware["at end"]
    ratios = pages.read("papers/cbs_ffn")["aware / naive"]
    assert all(found["low"] < 0 < found["high"] for found in ratios.values())


def test_what_is_said_of_duality_is_what_the_kept_results_have():
    text = page_text("results.md")
    result = pages.read("papers/md_watermark")
    found, rows = result["estimates"], result["rows"]
    rates = {method: set(lrs) for method, lrs in found["lrs"].items()}
    assert rates == {"plain": {1.0}, "dualized": {0.5}}
    assert "stable up to twice dualized training's largest rate" in text
    assert f"its contrast is {found['contrast']['plain']['value']:.2f}, not below the 0.5" in text
    contrasts = {
        (method, lr): fmean(
            row["contrast"] for row in rows if (row["method"], row["lr"]) == (method, lr)
        )
        for method, lr in product(rates, (0.25, 0.5, 1.0, 2.0))
    }
    assert "erases the letter, and at every rate tried" in text
    assert min(value for key, value in contrasts.items() if key[0] == "dualized") > 0.9
    assert "which it has up to a rate of 1/2" in text
    assert [contrasts["plain", lr] < 0.5 for lr in (0.25, 0.5, 1.0)] == [True, True, False]
    plain, dualized = (
        [row[key] for row in result["stable_ranks"]] for key in ("gradient", "dualized")
    )
    assert (
        f"width 32 to 256: {min(plain):.1f} to {max(plain):.1f}; of its polar factor "
        f"{min(dualized):.0f} to {max(dualized):.0f}"
    ) in text
    steps = pages.read("papers/md_coefficients")["steps to converge"]
    assert (
        f"cubic {steps['cubic']} steps, (2, -1.5, 0.5) {steps['quintic']}, (3, -3.2, 1.2) "
        f"{steps['quintic-steep']}"
    ) in text


def test_what_is_said_of_the_modular_norm_and_stability_is_what_the_kept_results_have():
    text = page_text("results.md")
    depth = pages.read("papers/mn_mass")["depth"]
    tared, free = (2 ** depth[name]["range"] for name in ("tared", "free"))
    assert f"stays within a factor of {tared + 0.05:.1f} from 2 blocks to 32" in text
    assert f"with free masses it moves by a factor of {free:.1f}" in text
    ratios = [
        loss / depth["tared"]["losses"][blocks] for blocks, loss in depth["free"]["losses"].items()
    ]
    assert f"the loss is {min(ratios):.1f} to {max(ratios):.1f} times as high" in text
    metrics = pages.read("papers/bm_metrics")
    powers = {
        name: by_optimizer["AdamW, one lr"]["update"]
        for name, by_optimizer in metrics["exponents"].items()
    }
    assert (
        "width^{:.2f} (dense), ^{:.2f} (low-rank) and ^{:.2f} (BTT)".format(*powers.values())
        in text
    )
    products = [
        row["dependency"]
        for row in metrics["fresh"]
        if row["init"] == "spectral" and row["structure"] != "dense"
    ]
    assert f"between {min(products):.2f} and {max(products):.2f}" in text


def test_what_is_said_of_the_three_stability_numbers_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/bm_metrics")
    fresh = {(row["structure"], row["init"], row["width"]): row for row in result["fresh"]}
    small, large = (fresh["dense", "spectral", width]["dependency"] for width in (64, 1024))
    below = f"({100 * (1 - small):.1f} % below 1 at width 64, {100 * (1 - large):.1f} % at 1024)"
    assert below in text
    cores = [abs(row["largest core"] - 1) for row in fresh.values() if row["init"] == "spectral"]
    assert f"each core by itself (within {math.ceil(1000 * max(cores)) / 10} %)" in text
    assert (
        max(abs(row["dependency"] - 1) for row in fresh.values() if row["init"] == "orthogonal")
        < 0.15
    )
    assert "is within 15 % of 1 for every family" in text
    two = [
        row["dependency"] for key, row in fresh.items() if key[0] == "BTT r=1" and key[2] == 1024
    ]
    assert any(f"{value:.2f}" in text for value in two)
    rows = {(row["structure"], row["optimizer"], row["width"]): row for row in result["rows"]}
    muon = [rows["dense", "Muon", width]["dependency"] for width in (64, 256, 1024)]
    assert all(0.95 < each[0] < 1.05 for each in muon)
    lr, steps = result["setting"]["lr"]["Muon"], rows["dense", "Muon", 1024]["steps"][-1]
    assert (
        f"has gone from 1 to {muon[-1][-1]:.1f} in {steps} steps of {lr:g} (dense; they add up to "
        f"{lr * steps:.0f})"
    ) in text
    powers = [
        abs(power)
        for by_optimizer in result["exponents"].values()
        for name in ("Muon", "AdamW, muP")
        for power in by_optimizer[name].values()
    ]
    assert max(powers) < 0.13
    assert "powers of the width are below 0.13" in text

    def first(structure):
        ends = [rows[structure, "AdamW, one lr", width]["update"][0] for width in (64, 1024)]
        return *ends, math.log(ends[1] / ends[0]) / math.log(1024 / 64)

    assert (
        "from width 64 to 1024 the update goes from {:.2f} to {:.2f} (width^{:.2f}; the fan-in is "
        "the width) in the dense layer".format(*first("dense"))
    ) in text
    assert "from {:.3f} to {:.3f} (width^{:.2f}) in the BTT layer".format(*first("BTT r=4")) in text


def test_what_is_said_of_rates_by_width_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/md_width")
    shares = result["estimates"]["dualized / Adam"]
    values = [math.exp(found["value"]) for found in shares.values()]
    assert f"with {min(values):.2f} to {max(values):.2f} of the better Adam's loss" in text
    below = " and ".join(width for width, found in shares.items() if found["high"] < 0)
    assert f"with its whole interval below 1 at widths {below};" in text
    excess = result["estimates"]["excess"].values()
    assert sum(found["low"] < 0 < found["high"] for found in excess) == 2
    assert "leave two drifts undecided" in text


def test_what_is_said_of_sgd_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/cbs_sgd")
    farthest = {
        (rule, name == "low-rank"): 2
        ** max(
            abs(row["shift"])
            for found in result["shifts"].values()
            for row in found["table"]
            if row["rule"] == rule and (row["structure"] == "low-rank") == (name == "low-rank")
        )
        for rule in ("naive", "aware")
        for name in ("low-rank", "others")
    }
    assert farthest["aware", True] == 4
    assert farthest["aware", False] == 2
    assert farthest["naive", True] == 8
    assert "low-rank is a factor of 4 away at width 256, the others at most 2" in text
    assert "without the rule it is up to a factor of 8 away" in text
    means = [
        found["mean_shift"][rule]
        for found in result["shifts"].values()
        for rule in ("aware", "naive")
    ]
    said = "the teacher ({:.2f} against {:.2f}) and loses on digits ({:.2f} against {:.2f})"
    assert said.format(*means) in text
    diverged = []
    for found in result["shifts"].values():
        counts = {
            rule: sum(
                row["loss_at_reference_lr"] is None
                for row in found["table"]
                if row["rule"] == rule and row["structure"] != "dense"
            )
            for rule in ("naive", "aware")
        }
        assert counts["naive"] == counts["aware"]
        diverged.append(counts["aware"])
    assert "({} of 8 cases on the teacher, {} of 8 on digits)".format(*diverged) in text
    assert result["kept"]["structures"] == ["dense"]


def test_what_is_said_of_in_norm_is_what_the_kept_result_has():
    text, result = page_text("results.md"), pages.read("papers/bm_norms")
    worst = max(result["sides"].values())
    assert f"agree to {worst:.0e} for every structure" in text
    rows = {(row["structure"], row["state"]): row["middle"] for row in result["estimates"]}
    grown = [
        round(sum(rows[name, "trained"]) / sum(rows[name, "fresh"]))
        for name in ("dense", "BTT r=4")
    ]
    assert grown == [2, 3]
    assert "it doubles (dense) and triples (BTT)" in text
    assert all(abs(row["power"]["value"]) < 0.15 for row in result["estimates"])


def test_what_is_said_of_the_gpt_is_what_the_kept_results_have():
    text = page_text("examples.md")
    kept = [pages.read(f"train_gpt{end}") for end in ("", "_seed1", "_seed2")]
    assert [result["seed"] for result in kept] == [0, 1, 2]
    lower, steps, seconds = [], [], []
    for dense, naive, ours, wider in (result["rows"] for result in kept):
        assert ours["width"] == dense["width"]
        assert round(dense["flops"] / ours["flops"]) == 5
        assert dense["loss"] < ours["loss"] < naive["loss"]
        assert wider["flops"] <= dense["flops"]
        assert wider["width"] == 4.75 * dense["width"]
        until = wider["seconds to the loss of"]["dense 128"]
        lower.append(100 * (1 - wider["loss"] / dense["loss"]))
        steps.append(until / wider["clock"][-1])
        seconds.append(until / dense["clock"][-1])
    assert "has a fifth of the FLOPs and is worse, less so with our rate than" in text
    assert f"4.75 times as wide and ends {min(lower):.1f} to {max(lower):.1f} % lower" in text
    assert f"after {min(steps):.2f} to {max(steps):.2f} of its steps, and slower" in text
    assert f"takes {min(seconds):.1f} to {max(seconds):.1f} times dense's seconds" in text


def test_the_readme_says_where_a_transformer_from_scratch_ends():
    rows = record.read("starts")["rows"]
    found = starts.compare_starts(
        rows, lambda key: starts.best(starts.curve_of(rows, starts.dense_of(key)))
    )
    assert "BTT then ends within 1 % of dense's loss, or below" in " ".join(
        (ROOT / "README.md").read_text().split()
    )
    for model in ("GPT-2", "nanoGPT", "ViT"):
        logs = found[model, "AdamW", "BTT r=1", "mup, ends"]
        assert len(logs) == 3
        assert sum(logs) / len(logs) <= math.log(1.01)
