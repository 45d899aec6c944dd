"""Compression: a trained dense model becomes structured with the least change of its function.

    python examples/compress.py                        # minutes on two CPU cores
    python examples/compress.py --families btt lowrank --budgets 0.5 0.25
    python examples/compress.py --model path/to/checkpoint --data text.txt    # a transformers LM
    python examples/compress.py --smoke                # seconds: does it run?

A small GPT learns the text (see examples/train_gpt.py), then every family compresses it at every
budget, twice: nearest to the weights, and nearest to the layers' outputs on a few batches of the
training text (calibration). The table shows held-out bits per character right after, and after a
short fine-tuning of both with `param_groups`.
"""

import argparse
import copy
import json
import math
import sys
import warnings
from pathlib import Path

import compare
import torch
import torch.nn.functional as F
import train_gpt
from matplotlib.figure import Figure
from torch import Tensor, nn

import structlin

FAMILIES = {
    "btt": structlin.BTT(),
    "monarch": structlin.Monarch(),
    "lowrank": structlin.LowRank(rank=1),
    "blockdiagonal": structlin.BlockDiagonal(blocks=4),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="a text file, UTF-8 (default: the standard library's documentation)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="a local folder of a causal LM of transformers, with its tokenizer",
    )
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=["btt", "monarch", "lowrank"]
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=fraction,
        default=[0.5, 0.25],
        help="fractions of the parameters",
    )
    for name, default in (
        ("width", 128),
        ("depth", 2),
        ("context", 64),
        ("batch", 8),
        ("steps", 1000),
    ):
        parser.add_argument(f"--{name}", type=compare.positive, default=default)
    parser.add_argument(
        "--finetune", type=compare.positive, default=100, help="steps after compression"
    )
    parser.add_argument(
        "--calibration", type=compare.positive, default=8, help="batches of training text"
    )
    parser.add_argument("--lr", type=compare.rate, default=0.002)
    parser.add_argument("--seed", type=compare.seed, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/compress"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    options = parser.parse_args(argv)
    if options.smoke:
        smoke = {
            "width": 32,
            "depth": 1,
            "context": 16,
            "batch": 2,
            "steps": 8,
            "finetune": 2,
            "calibration": 2,
        }
        vars(options).update(smoke, families=options.families[:2], budgets=options.budgets[:1])
    try:
        options.text = train_gpt.Text(options)
        options.dense = None
        if options.model is not None:
            options.dense = pretrained(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction above 0 and at most 1")
    return value


def pretrained(options: argparse.Namespace) -> nn.Module:
    """The model at `--model`; its tokens take the place of the text's characters."""
    if not options.model.is_dir():
        raise ValueError(f"--model {options.model}: no such folder")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text, tokenizer = (
        train_gpt.read_text(options.data),
        AutoTokenizer.from_pretrained(options.model),
    )
    ids = torch.tensor(tokenizer(text)["input_ids"])
    cut = len(ids) - len(ids) // 10
    options.text.train, heldout = ids[:cut], ids[cut:]
    starts = torch.linspace(0, len(heldout) - options.context - 1, 128).long()
    options.text.heldout = [options.text.windows(heldout, part) for part in starts.split(32)]
    options.text.characters = len(text) / len(ids)
    return AutoModelForCausalLM.from_pretrained(options.model)


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())


@torch.no_grad()
def bits(model: nn.Module, text: train_gpt.Text) -> float:
    """Held-out bits per character."""
    model.eval()
    nats = sum(loss(model, *batch).item() for batch in text.heldout) / len(text.heldout)
    return nats / math.log(2) / getattr(text, "characters", 1)


def train(
    model: nn.Module, text: train_gpt.Text, steps: int, lr: float, first: int = 0
) -> nn.Module:
    """`steps` of AdamW from batch `first` on."""
    optimizer = torch.optim.AdamW(structlin.param_groups(model, lr, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: compare.warmup_cosine(step, steps)
    )
    model.train()
    for step in range(first, first + steps):
        loss(model, *text.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def compress(
    dense: nn.Module, options: argparse.Namespace, family: str, budget: float, aware: bool
) -> dict:
    """One row: `dense` compressed to `budget`, measured, fine-tuned and measured again."""
    batches = [options.text.batch(step)[0] for step in range(options.calibration)]
    model = copy.deepcopy(dense)
    planned = structlin.plan(
        model,
        FAMILIES[family],
        budget=budget,
        init="project",
        calibration=batches if aware else None,
    )
    model, errors = planned.apply(), list(planned.errors.values())
    row = {
        "family": family,
        "budget": budget,
        "aware": aware,
        "error": sum(errors) / len(errors),
        **size(model),
    }
    row["after"] = bits(model, options.text)
    row["tuned"] = bits(
        train(model, options.text, options.finetune, options.lr / 4, first=options.steps),
        options.text,
    )
    return row


def size(model: nn.Module) -> dict[str, int]:
    summary = structlin.summary(model)
    return {"params": summary.params, "flops": summary.flops}


def table(rows: list[dict]) -> str:
    head = f"{'model':<24}{'budget':>7}{'params':>12}{'FLOPs/token':>13}{'error':>8}"
    head += f"{'after':>8}{'tuned':>8}"
    lines = [head, "-" * len(head)]
    for row in rows:
        name = row["family"] + (", calibrated" if row["aware"] else "")
        figures = f"{row['budget']:>7}{row['params']:>12,}{row['flops']:>13,}{row['error']:>8.3f}"
        lines.append(f"{name:<24}{figures}{row['after']:>8.3f}{row['tuned']:>8.3f}")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    dense, *others = rows
    for axes, when, title in zip(
        panels, ("after", "tuned"), ("right after", "after fine-tuning"), strict=True
    ):
        for n, family in enumerate(dict.fromkeys(row["family"] for row in others)):
            for aware in (False, True):
                points = sorted(
                    (r["params"], r[when])
                    for r in others
                    if (r["family"], r["aware"]) == (family, aware)
                )
                style = {
                    "color": f"C{n}",
                    "linestyle": "-" if aware else "--",
                    "marker": "o" if aware else "x",
                }
                axes.plot(
                    *zip(*points, strict=True),
                    label=family + (", calibrated" if aware else ""),
                    **style,
                )
        axes.axhline(dense[when], color="black", linewidth=0.8, label="dense")
        axes.set(xlabel="parameters of the linear layers", title=title)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=6)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out bits/char")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def main(argv: list[str] | None = None) -> list[dict]:
    options = parse(argv)
    dense = options.dense
    if dense is None:
        torch.manual_seed(options.seed)
        dense = train(options.text.model(options.width), options.text, options.steps, options.lr)
    tuned = train(
        copy.deepcopy(dense), options.text, options.finetune, options.lr / 4, first=options.steps
    )
    base = {"family": "dense", "budget": 1.0, "aware": False, "error": 0.0, **size(dense)}
    rows = [{**base, "after": bits(dense, options.text), "tuned": bits(tuned, options.text)}]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these layers grow")  # tiny ones, under --smoke
        for family in options.families:
            for budget in options.budgets:
                rows += [compress(dense, options, family, budget, aware) for aware in (False, True)]
    options.out.mkdir(parents=True, exist_ok=True)
    with compare.replacing(options.out / "compress.png") as path:
        plot(rows, path)
    with compare.replacing(options.out / "compress.json") as path:
        command = " ".join([Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)])
        about_run = {
            "machine": compare.machine("cpu"),
            "torch": torch.__version__,
            "seed": options.seed,
        }
        path.write_text(
            json.dumps(
                {**about_run, "command": command, "title": options.text.title, "rows": rows},
                indent=1,
            )
        )
    print(options.text.title)
    print(
        "error: mean relative error of the layers (calibrated: of their outputs); after, tuned: "
        "held-out bits/char"
    )
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
