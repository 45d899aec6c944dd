"""README.md and the pages of docs/, from their templates and the kept results.

    python -m benchmarks.pages            # writes the pages and results/verdicts.json
    python -m benchmarks.pages --smoke    # makes all of it, writes nothing

A page with numbers has a template beside it, `<page>.in`: `{{ gpts.characters_Muon }}` is a number
there and `{{ gpt fronts }}` a table. Each experiment says what it shows
(`benchmarks.harness.shown`).
Run this after each new measurement, and after a change of a template.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import communication, gpu, models
from benchmarks.comparison import layers
from benchmarks.compression import (
    dinov2,
    encoder_tokens,
    experts,
    heal,
    knapsack,
    minilm,
    phases,
    smollm2,
    tokens,
)
from benchmarks.examples import EXAMPLES
from benchmarks.harness.record import RESULTS, Row, read
from benchmarks.harness.report import table
from benchmarks.harness.shown import Claim, Shown
from benchmarks.papers import (
    bm_metrics,
    cbs_features,
    cbs_norm,
    cbs_scaling,
    cbs_untuned,
    md_width,
    mn_transfer,
)
from benchmarks.speed import compressed, layer, model, peers, products
from benchmarks.training import (
    gpt_seconds,
    iso_flops,
    iso_seconds,
    lr_transfer,
    optimizer,
    transfer,
)

ROOT = Path(__file__).parents[1]
SHOWN: list[Shown] = [  # in the order of their claims in docs/results.md
    cbs_features.EXPERIMENT,
    lr_transfer.EXPERIMENT,
    cbs_untuned.EXPERIMENT,
    cbs_scaling.EXPERIMENT,
    cbs_norm.EXPERIMENT,
    md_width.EXPERIMENT,
    mn_transfer.EXPERIMENT,
    bm_metrics.EXPERIMENT,
    gpt_seconds.EXPERIMENT,
    iso_flops.EXPERIMENT,
    iso_seconds.EXPERIMENT,
    optimizer.EXPERIMENT,
    transfer.EXPERIMENT,
    layers.EXPERIMENT,
    models.EXPERIMENT,
    smollm2.EXPERIMENT,
    tokens.EXPERIMENT,
    phases.EXPERIMENT,
    knapsack.EXPERIMENT,
    encoder_tokens.EXPERIMENT,
    heal.EXPERIMENT,
    dinov2.EXPERIMENT,
    experts.EXPERIMENT,
    minilm.EXPERIMENT,
    layer.BENCH,
    model.BENCH,
    compressed.BENCH,
    peers.BENCH,
    products.BENCH,
    *EXAMPLES,
]
FIELD = re.compile(r"{{ ([\w. ]+) }}")

read_once = cache(read)


# ---- claims --------------------------------------------------------------------------------------


class Judged(NamedTuple):
    shown: Shown
    claim: Claim
    verdict: Row  #: as verdicts.json has it


def judge_all() -> Iterator[Judged]:
    for shown in SHOWN:
        for claim in shown.claims:
            yield Judged(shown, claim, claim.verdict(read_once(shown.name)))


def make_verdicts() -> str:
    """What verdicts.json holds: every claim in the paper's words, and the numbers that decided."""
    verdicts = [judged.verdict for judged in judge_all()]
    return json.dumps(verdicts, indent=1, ensure_ascii=False) + "\n"


def show_claims() -> str:
    """Every claim that was tried: in few words, the verdict, and where its table is."""
    lines = []
    for shown, claim, verdict in judge_all():
        words = f"{claim.where}: {claim.short}"
        lines.append([words, verdict["verdict"], f"[table]({shown.place})"])
    header, _, *body = table(["the paper's claim", "here", ""], lines).splitlines()
    return "\n".join([header, "|---|---|---|", *body])  # all columns hold text


def count_claims() -> dict[str, str]:
    """How many hold, hold in part, are undecided, do not hold."""
    counts: Counter[str] = Counter()
    for judged in judge_all():
        # "**no**, in part undecided" and "yes (one run)" count as "no" and "yes"
        answer = re.split(r",| \(", judged.verdict["verdict"])[0]
        counts[answer.strip("*")] += 1
    return {
        "verdicts.yes": str(counts["yes"]),
        "verdicts.part": str(counts["in part"]),
        "verdicts.undecided": str(counts["undecided"]),
        "verdicts.no": str(counts["no"]),
        "verdicts.all": str(counts.total()),
    }


# ---- pages ---------------------------------------------------------------------------------------


@cache
def numbers() -> dict[str, str]:
    """All numbers by their names on the pages."""
    all_numbers = count_claims()
    for shown in SHOWN:
        new_numbers = shown.numbers(read_once(shown.name))
        duplicates = sorted({*all_numbers} & {*new_numbers})
        if duplicates:
            raise ValueError(
                f"results/{shown.name}.json: there is another number {duplicates[0]!r}"
            )
        all_numbers |= new_numbers
    return all_numbers


@cache
def tables() -> dict[str, Callable[[], str]]:
    """What makes each table, by its name on a page."""
    makers: dict[str, Callable[[], str]] = {
        "verdicts": show_claims,
        "gpu": gpu.show_results,
        "collectives": communication.show_collectives,
        "many gpus": communication.show_model,
    }
    for shown in SHOWN:
        for name, show in shown.tables.items():
            makers[name] = partial(make_table, show, shown.name)
    return makers


def make_table(show: Callable[[Row], str], result_name: str) -> str:
    return show(read_once(result_name))


def find_templates() -> list[Path]:
    return [*ROOT.glob("*.md.in"), *sorted((ROOT / "docs").rglob("*.md.in"))]


def make_page(template: Path) -> str:
    """A page from its template.

    Raises:
        KeyError: no experiment shows a number or a table of that name.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return numbers()[name] if "." in name else tables()[name]()

    return FIELD.sub(fill, template.read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    texts = {template.with_suffix(""): make_page(template) for template in find_templates()}
    texts[RESULTS / "verdicts.json"] = make_verdicts()
    for path, text in texts.items():
        print(f"# {path.relative_to(ROOT)}: {len(text)} characters")
        if not options.smoke:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
