"""Compression: a trained dense model becomes structured, with the least change of what it computes.

    python examples/compress.py                        # minutes on two CPU cores
    python examples/compress.py --families btt lowrank --budgets 0.5 0.25
    python examples/compress.py --model path/to/folder --data text.txt    # of transformers
    python examples/compress.py --model vit_tiny_patch16_224 --checkpoint vit.pth    # of timm
    python examples/compress.py --smoke                # seconds: does it run?

Every family compresses the model at every budget, twice: nearest to the weights, and nearest to
what the layers compute on a few batches (calibration). The plan shows each layer's size and error.
Then the model is healed: it learns from the dense one, without labels (`structlin.distill`), and is
saved in `--out` and loaded again. The table has figures on held-out data for all of that.

The model is a small GPT that learns the text here (see examples/train_gpt.py); with `--model` one
in a local folder of transformers, a causal LM or an encoder of sentences, or one of timm, which
learns scikit-learn's digits from random weights or a checkpoint.
"""

import argparse
import copy
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import compare
import torch
from compress_models import Job, choose_job, first_tensor
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

import structlin

FAMILIES = {
    "btt": structlin.BTT(),
    "monarch": structlin.Monarch(),
    "lowrank": structlin.LowRank(rank=1),
    "blockdiagonal": structlin.BlockDiagonal(blocks=4),
}
SIZES = {  # of the small GPT, its training and of batches; --smoke
    "width": (128, 32),
    "depth": (2, 1),
    "context": (64, 16),
    "batch": (8, 2),
    "steps": (1000, 8),
    "heal": (100, 2),
    "calibration": (8, 2),
    "image": (32, 32),
}
JUDGES = 4  # batches of training data by which distillation judges, and does not train
ABOUT = {
    "batch": "sequences, or images, of a step; sentences come twice as many",
    "steps": "of training before compression; a model of transformers is not trained",
    "heal": "steps of distillation after compression",
    "calibration": "batches of training data",
    "image": "side of the images, for a model of timm",
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="a text file, UTF-8 (default: the standard library's documentation and source)",
    )
    parser.add_argument(
        "--model", help="a local folder of transformers, with its tokenizer; or a name of timm"
    )
    parser.add_argument("--checkpoint", type=Path, help="weights for a model of timm")
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=["btt", "monarch", "lowrank"]
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=fraction,
        default=[0.5, 0.25],
        help="fractions of the parameters of the layers that are converted",
    )
    for name, (default, _) in SIZES.items():
        parser.add_argument(
            f"--{name}", type=compare.positive, default=default, help=ABOUT.get(name)
        )
    parser.add_argument("--lr", type=compare.rate, default=0.002, help="of training")
    parser.add_argument("--heal-lr", type=compare.rate, default=0.001, help="of distillation")
    parser.add_argument("--seed", type=compare.seed, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/compress"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one budget")
    options = parser.parse_args(argv)
    if options.smoke:
        smoke = {name: size for name, (_, size) in SIZES.items()}
        vars(options).update(smoke, families=options.families[:2], budgets=options.budgets[:1])
    try:
        if options.checkpoint is not None and options.model is None:
            raise ValueError("--checkpoint needs --model, a name of timm")
        options.job = choose_job(options)
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


def compress(
    job: Job, options: argparse.Namespace, family: str, budget: float, aware: bool
) -> dict[str, Any]:
    """One row: the dense model compressed to `budget`, measured, healed, measured and saved."""
    model, start = copy.deepcopy(job.dense), time.process_time()
    batches = [job.batch(step) for step in range(options.calibration)] if aware else None
    shared = "sensitivity" if aware else "error"
    planned = structlin.plan_compression(
        model, FAMILIES[family], batches, keep=budget, allocation=shared
    )
    if aware:
        print(f"\n{family}, calibrated, budget {budget}\n{planned}")
    model, errors = planned.apply(), list(planned.errors.values())
    row = {"family": family, "budget": budget, "aware": aware, **size(model)}
    row |= {"error": sum(errors) / len(errors), "seconds": time.process_time() - start}
    row["after"] = job.measure(model)
    start, steps = time.process_time(), range(options.steps, options.steps + options.heal)
    healed = structlin.distill(
        model,
        job.dense,
        map(job.batch, steps),
        steps=options.heal,
        lr=options.heal_lr,
        held_out=[job.batch(steps.stop + n) for n in range(JUDGES)],
        logits=job.logits,
    )
    row |= {"loss": [healed.before, healed.after], "heal_seconds": time.process_time() - start}
    row["healed"] = job.measure(model)
    folder = options.out / f"{family}-{budget}{'-calibrated' if aware else ''}"
    job.save(model, folder)
    require_equal(job, model, job.load(folder), folder)
    return row


@torch.no_grad()
def require_equal(job: Job, model: nn.Module, loaded: nn.Module, folder: Path) -> None:
    """End the program if the model that was loaded does not compute the same."""
    batch = job.heldout[0]
    one, other = (
        first_tensor(each(**batch) if isinstance(batch, dict) else each(batch))
        for each in (model.eval(), loaded.eval())
    )
    if not torch.equal(one, other):
        raise SystemExit(f"{folder}: the model that was loaded differs from the one that was saved")


def size(model: nn.Module) -> dict[str, int]:
    summary = structlin.summary(model)
    return {"params": summary.params, "flops": summary.flops}


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    shown = Table(
        title=title,
        caption="error: mean relative error of the layers (calibrated: of their outputs); after: "
        "right after conversion;\nhealed: after distillation; CPU seconds of both",
    )
    figures = list(rows[0]["after"])
    counts = "model", "budget", "params", "FLOPs/token", "error"
    results = [f"{name}\n{when}" for name in figures for when in ("after", "healed")]
    for name in (*counts, *results, "convert s", "heal s"):
        shown.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for row in rows:
        name = row["family"] + (", calibrated" if row["aware"] else "")
        cells = [f"{row['params']:,}", f"{row['flops']:,}", f"{row['error']:.3f}"]
        for figure in figures:
            found = [row["after"][figure], row["healed"] and row["healed"][figure]]
            cells += ["" if value is None else f"{value:.3f}" for value in found]
        cells += [f"{row['seconds']:.1f}", f"{row['heal_seconds']:.1f}"]
        shown.add_row(name, str(row["budget"]), *cells)
    return shown


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The first figure against parameters: right after conversion, and healed."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    dense, *others = rows
    measured = next(iter(dense["after"]))
    for axes, when, title in zip(
        panels, ("after", "healed"), ("right after", "healed by distillation"), strict=True
    ):
        for n, family in enumerate(dict.fromkeys(row["family"] for row in others)):
            for aware in (False, True):
                points = sorted(
                    (row["params"], row[when][measured])
                    for row in others
                    if (row["family"], row["aware"]) == (family, aware)
                )
                style = {
                    "color": f"C{n}",
                    "linestyle": "-" if aware else "--",
                    "marker": "o" if aware else "x",
                }
                label = family + (", calibrated" if aware else "")
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.axhline(dense["after"][measured], color="black", linewidth=0.8, label="dense")
        axes.set(xlabel="parameters of the linear layers", title=title)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=6)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"held-out {measured}")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    options = parse(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    job, console = options.job, Console(width=None if sys.stdout.isatty() else 150)
    base = {"family": "dense", "budget": 1.0, "aware": False, **size(job.dense), "error": 0.0}
    base |= {"seconds": 0.0, "after": job.measure(job.dense), "healed": None, "heal_seconds": 0.0}
    rows = [base]
    options.out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these layers grow")  # tiny ones, under --smoke
        for family in options.families:
            for budget in options.budgets:
                for aware in (False, True):
                    try:
                        rows.append(compress(job, options, family, budget, aware))
                    except ValueError as error:
                        raise SystemExit(f"{family}, budget {budget}: {error}") from None
    with compare.replacing(options.out / "compress.png") as path:
        plot(rows, path)
    with compare.replacing(options.out / "compress.json") as path:
        command = " ".join([Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)])
        about_run = {
            "machine": compare.machine("cpu"),
            "torch": torch.__version__,
            "seed": options.seed,
            "heal": {"steps": options.heal, "lr": options.heal_lr, "batch": options.batch},
        }
        everything = {**about_run, "command": command, "title": job.title, "rows": rows}
        path.write_text(json.dumps(everything, indent=1) + "\n")
    console.print(table(job.title, rows))
    console.print(f"models, compress.png and compress.json are in {options.out}")
    return rows


if __name__ == "__main__":
    main()
