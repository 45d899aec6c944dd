"""README and docs/: every link and picture is there, all code runs, every marked number is a kept
result's."""

import doctest
import json
import math
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import examples, pages
from benchmarks.harness import record, report, statistics
from benchmarks.speed import layer
from benchmarks.training import gpt_seconds, iso_report, lr_transfer, transfer
from examples import train_gpt
from structlin._structure import families

ROOT = pages.ROOT
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN = [page for page in PAGES if ">>>" in page.read_text(encoding="utf-8")]


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


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_code_of_a_page_gives_the_output_that_it_shows(page):
    results = doctest.testfile(
        str(page), module_relative=False, encoding="utf-8", optionflags=doctest.ELLIPSIS
    )
    assert results.attempted > 3
    assert results.failed == 0


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/convert.md"])
@pytest.mark.filterwarnings("ignore")
def test_the_code_without_prompts_runs_after_what_stands_above_it(page, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # for what it writes
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES})
    namespace: dict[str, object] = {}
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert any(">>>" not in block for block in blocks)
    for block in blocks:
        examples = doctest.DocTestParser().get_examples(block)
        code = [each.source for each in examples if each.exc_msg is None] or [block]
        exec("".join(code), namespace)


def test_the_pages_with_code_are_found():
    assert {"README.md", "docs/theory.md", "docs/compress.md"} <= {name_of(page) for page in RUN}


def test_the_main_job_and_the_tests_are_installed_with_the_pinned_versions():
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(commands) == 2
    assert all(command.startswith("pip install -c constraints.txt -e ") for command in commands)


# ---- tables and pictures -------------------------------------------------------------------------


def test_the_examples_in_the_docstrings_give_what_they_show():
    for module in (examples, iso_report, report):
        results = doctest.testmod(module)
        assert results.attempted
        assert not results.failed


# ---- numbers in sentences ------------------------------------------------------------------------


def test_the_pages_are_what_make_pages_writes():
    for template in pages.find_templates():
        page = template.with_suffix("").read_text(encoding="utf-8")
        assert page == pages.make_page(template), template
        assert "<!--" not in page


def test_every_number_and_every_table_stands_on_a_page():
    texts = [template.read_text(encoding="utf-8") for template in pages.find_templates()]
    assert {*pages.numbers(), *pages.tables()} == {*pages.FIELD.findall("".join(texts))}
    assert all(pages.numbers().values())


def test_a_number_that_nobody_shows_is_refused_by_name(tmp_path):
    (tmp_path / "some.md.in").write_text("2 + 2 = {{ sum.two }}")
    with pytest.raises(KeyError, match=r"sum\.two"):
        pages.make_page(tmp_path / "some.md.in")


def test_a_number_of_two_experiments_is_refused(monkeypatch):
    monkeypatch.setattr(pages, "SHOWN", [lr_transfer.EXPERIMENT] * 2)
    with pytest.raises(ValueError, match="there is another number 'rates"):
        pages.numbers.__wrapped__()


# ---- what the pages say without a number, in the kept results ------------------------------------


def test_the_widest_mlp_ends_lowest_at_the_flops_of_the_narrow_dense_one():
    for end in examples.SEEDS:
        narrow, dense, ours, widest = record.read(f"train_mlp_lm{end}")["rows"]
        assert widest["flops"] <= narrow["flops"]
        assert widest["loss"] < min(row["loss"] for row in (narrow, dense, ours))
        assert (dense["width"], ours["width"]) == (1024, 1024)


def test_the_main_job_runs_each_model_at_its_best_width_and_rates_of_its_flops():
    budget = train_gpt.SIZES["budget"]
    table = record.read("iso_flops")["table"]
    for recipe in train_gpt.RECIPES:
        kind = "BTT r=4" if recipe.structured else "dense"
        place = {"setup": "Python", "kind": kind, "optimizer": recipe.optimizer}
        (best,) = statistics.select(table, **place, budget=budget)
        assert (recipe.width, recipe.lr, recipe.other_lr) == (
            best["width"],
            best["lr"],
            best["other_lr"],
        )


def test_in_the_main_job_structure_is_ahead_by_adamw_and_behind_by_soap_with_every_seed():
    for end in examples.SEEDS:
        rows = record.read(f"train_gpt{end}")["rows"]
        dense_adamw, structured_adamw, dense_soap, structured_soap = rows
        assert structured_adamw["loss"] < dense_adamw["loss"]
        assert structured_soap["loss"] > dense_soap["loss"]
        for row in rows:
            assert row["optimizer"] == ("SOAP" if row in (dense_soap, structured_soap) else "AdamW")
            flops, _ = row["curve"][-1]
            assert flops == pytest.approx(train_gpt.SIZES["budget"], rel=1e-3)


def test_our_rule_brings_btt_nearer_to_dense_and_monarch_not():
    table = record.read("lr_transfer")["table"]
    moved = {
        (name, rule): sum(
            abs(r["shift"]) for r in statistics.select(table, structure=name, rule=rule)
        )
        for name in ("BTT r=1", "Monarch")
        for rule in ("naive", "aware")
    }
    assert moved["BTT r=1", "aware"] < moved["BTT r=1", "naive"]
    assert moved["Monarch", "aware"] > moved["Monarch", "naive"]


@pytest.mark.parametrize(
    ("ours", "setup", "most_over_soap"),
    [
        ("gpts", "Python", 1.0),
        ("gpts", "Wikipedia", 1.015),
        ("every", "Wikipedia", 1.011),
        ("every", "Fashion-MNIST", 1.0),
    ],
)
def test_at_equal_flops_a_structured_gpt_by_soap_ends_below_dense_by_muon_with_every_seed(
    ours, setup, most_over_soap
):
    """On subwords it is level with dense by SOAP."""
    table = record.read("gpt_seconds")["table"]
    (row,) = statistics.select(table, setup=setup, width=256, **gpt_seconds.OURS[ours])
    muon, soap = (row["over dense"][name] for name in ("Muon", row["optimizer"]))
    assert len(muon) == len(soap) == 3
    assert max(muon) < 1
    assert max(soap) < most_over_soap


def test_by_adamw_a_structured_gpt_has_a_lower_loss_at_the_rate_of_the_dense_one():
    rows = statistics.select(record.read("gpt_seconds")["table"], optimizer="AdamW", width=256)
    for setup in ("Python", "Wikipedia", "Fashion-MNIST"):
        (dense,), (ours,) = (
            statistics.select(rows, setup=setup, kind=kind) for kind in ("dense", "BTT r=4")
        )
        assert dense["lr"] == ours["lr"]
        pairs = zip(ours["losses"], dense["losses"], strict=True)
        assert all(structured < plain for structured, plain in pairs)
        (muon,) = statistics.select(
            record.read("gpt_seconds")["table"],
            setup=setup, kind="dense", optimizer="Muon", width=256,
        )  # fmt: skip
        assert min(ours["losses"]) > max(muon["losses"])


def test_where_width_and_length_are_free_adamw_alone_gains_from_structure_with_every_seed():
    table = record.read("iso_flops")["table"]
    rows = statistics.select(iso_report.compare(table), kind="BTT r=4", budget=1e12)
    above = {row["optimizer"]: row["above"] for row in rows}
    assert {name: len(seeds) for name, seeds in above.items()} == dict.fromkeys(above, 3)
    assert max(above.pop("AdamW")) < 0
    assert {*above} == {"Muon", "SOAP"}
    assert all(min(seeds) > 0 for seeds in above.values())


def test_a_narrow_dense_model_has_a_lower_loss_than_every_gpt_of_the_fixed_number_of_tokens():
    narrow = statistics.select(
        record.read("iso_flops")["table"],
        setup="Python", kind="dense", optimizer="SOAP", budget=5e12,
    )  # fmt: skip
    fixed = statistics.select(record.read("gpt_seconds")["table"], setup="Python")
    assert max(narrow[0]["losses"]) < min(loss for row in fixed for loss in row["losses"])


def test_tables_of_gpts_and_of_the_gain_have_at_most_six_columns():
    for page in ("README.md", "docs/gpts.md", "docs/gain.md"):
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            assert not line.startswith("| ") or line.count(" |") <= 6, line


def test_structured_gpts_of_subwords_have_more_parameters_than_dense_and_others_fewer():
    table = record.read("gpt_seconds")["table"]
    for row in (row for row in table if row["kind"] != "dense" and row["width"] == 256):
        share = row["params"] / gpt_seconds.best_dense(table, row)["params"]
        assert 1.115 < share < 1.135 if row["setup"] == "Wikipedia" else share < 1


def test_calibrated_accuracies_of_the_vision_model_are_not_told_apart_from_denses():
    for name, shares in record.read("dinov2")["share"]["0.5"].items():
        if name.endswith(", calibrated"):
            assert all(each["low"] < 1 < each["high"] for each in shares.values()), name


def test_of_our_layers_beside_other_packages_tt_alone_is_slower_than_dense_with_many_tokens():
    rows = statistics.select(record.read("peers")["rows"], implementation="structlin", tokens=4096)
    slower = {(r["structure"], r["dtype"]) for r in rows if r["x_dense"]["median"] < 1}
    assert slower == {("TT r=8", "bfloat16")}


def test_no_structure_is_slower_than_dense_with_many_tokens_but_narrow_ones_in_bfloat16():
    for name in ("layer", "layer_xeon"):
        slower = [
            (row["d_in"], row["dtype"])
            for row in layer.square(record.read(name), tokens=4096, backward=True)
            if row["x_dense"]["median"] < 1
        ]
        assert set(slower) <= {(512, "bfloat16")}
        assert bool(slower) == (name == "layer_xeon")


def test_normed_holds_the_rate_over_width_and_depth_where_adamw_and_muon_do_not():
    rows = record.read("transfer")["summary"]
    for method in ("Normed", transfer.POWER):
        assert max(transfer.largest(rows, method)) <= 0.5
    far = transfer.far(rows, "Muon")
    assert min(row["shift"] for row in far) > 0
    assert {(row["structure"], row["depth"]) for row in far} == {("dense", 6), ("dense", 16)}


def test_longer_training_wants_lower_rates_and_muon_follows_the_batch_by_less_than_its_root():
    for method in ("AdamW", "Muon"):
        for structure in transfer.FEW:
            rows = statistics.select(record.read("transfer")["summary"], method=method)
            rows = statistics.select(rows, structure=structure, width=64, depth=2)
            steps = {row["steps"]: row["shift"] for row in rows if row["batch"] == 64}
            batch = {row["batch"]: row["shift"] for row in rows if row["steps"] == 50}
            assert steps[200] < steps[25]
            if method == "AdamW":
                assert max(map(abs, batch.values())) < 0.25
            else:
                assert -1 < batch[16] < 0 < batch[256] < 1


def test_a_language_model_loses_less_than_by_peers_that_save_flops_and_more_than_by_wanda():
    excess = record.read("smollm2")["excess"]
    for keep in ("0.8", "0.6"):
        ours = excess[keep]["low-rank, calibrated"]
        for peer in ("SVD", "ASVD", "ASVD, its search", "SVD-LLM", "K-FAC SVD"):
            assert ours["high"] < excess[keep][peer]["low"]
        assert excess[keep]["Wanda"]["high"] < ours["low"]
    (low_rank,) = statistics.select(
        record.read("smollm2")["rows"], method="low-rank", way="calibrated", keep=0.6
    )
    (pruned,) = statistics.select(record.read("smollm2")["rows"], method="pruning", keep=0.6)
    assert pruned["perplexity_wiki"] > low_rank["perplexity_wiki"]
    assert pruned["perplexity_c4"] < low_rank["perplexity_c4"]
    assert excess["0.8"]["pruning"]["high"] < excess["0.8"]["low-rank, calibrated"]["low"]


def test_measured_harm_changes_an_encoder_little():
    for family in ("BTT", "Monarch", "low-rank", "block-diagonal"):
        rows = statistics.select(record.read("minilm")["rows"], family=family, budget=0.5)
        cosines = {row["way"]: row["cosine"] for row in rows}
        assert abs(cosines["calibrated"] - cosines["uncorrected"]) < 0.011


def test_the_results_that_the_pages_show_have_a_command_and_versions():
    for name in ("layer", "lr_transfer", "minilm", "model", "optimizer", "peers"):
        assert {"command", "machine", "torch"} <= set(record.read(name)["environment"])


# ---- docs/results.md -----------------------------------------------------------------------------


def test_the_numbers_behind_the_verdicts_are_those_of_the_kept_results():
    kept = (record.RESULTS / "verdicts.json").read_text(encoding="utf-8")
    assert kept == pages.make_verdicts()
    assert {tuple(row) for row in json.loads(kept)} == {("where", "claim", "verdict", "found")}


def test_a_verdict_changes_with_the_result():
    """Best rates at dense's with the rule, at four times it without; then the other way round."""
    (claim,) = lr_transfer.EXPERIMENT.claims

    def rows(structure, rule, best):
        return [
            {"structure": structure, "width": 64, "rule": rule, "seed": seed, "lr": lr}
            | {"loss": 2.0 ** abs(math.log2(lr / best))}
            for lr in (2.0**power for power in range(-9, -1))
            for seed in range(3)
        ]

    for naive, aware, verdict in ((-4, -6, "yes"), (-6, -4, "**no**")):
        result = rows("dense", "aware", 2.0**-6) + rows("TT r=4", "naive", 2.0**naive)
        result += rows("TT r=4", "aware", 2.0**aware)
        assert claim.verdict({"rows": result})["verdict"] == verdict


def test_the_verdicts_of_three_seeds_use_intervals_and_the_others_say_that_they_are_of_one_run():
    for shown, claim, found in pages.judge_all():
        seeds = {row.get("seed", 0) for row in record.read(shown.name)["rows"]}
        assert (claim.runs == "one run") == (len(seeds) == 1), claim.short
        assert found["verdict"].endswith("(one run)") == (len(seeds) == 1)


def test_every_kept_result_of_the_papers_is_on_a_page_with_its_command():
    text = "".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs/results").glob("*.md")
    )
    text = " ".join(text.split())
    kept = sorted(path.stem for path in (ROOT / "benchmarks/results/papers").glob("*.json"))
    assert len(kept) > 5
    for name in kept:
        assert f"](../../benchmarks/results/papers/{name}.json)" in text
        command = record.read(f"papers/{name}")["environment"]["command"]
        assert " ".join(command.split()[:3]) in text
