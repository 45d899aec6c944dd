"""Compression: a trained dense model becomes structured, with the least change of what it computes.

    python examples/compress.py                        # minutes on two CPU cores
    python examples/compress.py --families btt lowrank --budgets 0.5 0.25
    python examples/compress.py --model model.gguf --data text.txt           # a causal LM
    python examples/compress.py --model path/to/folder --data text.txt       # of transformers
    python examples/compress.py --model vit_tiny_patch16_224 --checkpoint vit.pth    # of timm
    python examples/compress.py --smoke                # seconds: does it run?

Every family compresses the model at every budget, in every way: nearest to the weights ("plain"),
and nearest to what the layers compute on a few batches ("calibrated"). The plan shows each layer's
size and error. Then the model is healed: it learns from the dense one, without labels
(`structlin.distill`), and is saved in `--out`, with a model card, and loaded again. The table has
figures on held-out data for all of that.

The model is a small GPT that learns the text here (see examples/train_gpt.py); with `--model` one
in a GGUF file or a local folder of transformers, a causal LM or an encoder of sentences, or one of
timm, which learns scikit-learn's digits from random weights or a checkpoint. Packages of
examples/pretrained.py have a GGUF file and text, which are found by their bare names. A causal LM
is by default compressed once, low-rank and calibrated, to 80 % of its linear layers, in about ten
minutes for 135 million parameters. It is loaded, healed and saved in float32.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import compare
import pretrained
import torch
from compress_models import Digits, choose_kind, make_job
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import structlin
from structlin._commands import compress as commands
from structlin._commands.arguments import fraction
from structlin._commands.jobs import CausalLM, Job

try:
    import resource
except ImportError:  # Windows
    resource = None

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
CHOICES = {  # more defaults that a kind of model may have otherwise, see Job.defaults
    "families": ["btt", "monarch", "lowrank"],
    "budgets": [0.5, 0.25],
    "ways": ["plain", "calibrated"],
    "heal_lr": 0.001,
}
LANGUAGE = {"families": ["lowrank"], "budgets": [0.8], "ways": ["calibrated"]}  # of a causal LM
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
        type=located,
        help="a text file, UTF-8 (default: the standard library's documentation and source)",
    )
    parser.add_argument(
        "--model",
        help="a GGUF file; a local folder of transformers, with its tokenizer; or a name of timm",
    )
    parser.add_argument("--checkpoint", type=Path, help="weights for a model of timm")
    parser.add_argument("--families", nargs="+", choices=FAMILIES)
    parser.add_argument("--ways", nargs="+", choices=CHOICES["ways"])
    text = "fractions of the parameters of the layers that are converted"
    parser.add_argument("--budgets", nargs="+", type=fraction, help=text)
    for name in SIZES:
        parser.add_argument(f"--{name}", type=compare.positive, help=ABOUT.get(name))
    parser.add_argument("--lr", type=compare.rate, default=0.002, help="of training")
    parser.add_argument("--heal-lr", type=compare.rate, help="of distillation")
    parser.add_argument("--seed", type=compare.seed, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/compress"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one budget")
    options = parser.parse_args(argv)
    try:
        kind = choose_kind(options.model)
        if options.checkpoint is not None and kind is not Digits:
            raise ValueError("--checkpoint needs --model, a name of timm")
        if options.data is not None and kind is Digits:
            raise ValueError(
                f"--model {options.model}: no such folder, and a model of timm learns digits: "
                "leave --data out"
            )
        usual = CHOICES | {name: size for name, (size, _) in SIZES.items()} | kind.defaults
        usual |= LANGUAGE if kind is CausalLM else {}
        vars(options).update({n: x for n, x in usual.items() if getattr(options, n) is None})
        if options.smoke:
            smoke = {name: size for name, (_, size) in SIZES.items()}
            vars(options).update(smoke, families=options.families[:2], budgets=options.budgets[:1])
        options.job = make_job(kind, options)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, ImportError) as error:  # transformers or scikit-learn is not here
        parser.error(str(error))
    return options


def located(text: str) -> Path:
    try:
        return pretrained.locate(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def compress(
    job: Job, options: argparse.Namespace, family: str, budget: float, aware: bool
) -> dict[str, Any]:
    """One row: the dense model compressed to `budget`, measured, healed, measured and saved."""
    recipe = commands.Recipe(
        structure=FAMILIES[family],
        keep=budget,
        calibration=options.calibration if aware else 0,
        heal=options.heal,
        heal_lr=options.heal_lr,
        first=options.steps,
    )
    folder = options.out / f"{family}-{budget}{'-calibrated' if aware else ''}"

    def show(planned: structlin.Plan) -> None:
        if aware:
            print(f"\n{family}, calibrated, budget {budget}\n{planned}")

    row, _ = commands.compress(job, recipe, options.base, folder, show)
    return {"family": family, "budget": budget, "aware": aware, **row}


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
    panels = figure.subplots(1, 2, sharey=True)
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
                if points:
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
    job = options.job
    try:
        dense = commands.describe_dense(job)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    base = {"family": "dense", "budget": 1.0, "aware": False, **dense}
    base |= {"error": 0.0, "seconds": 0.0, "healed": None, "heal_seconds": 0.0}
    rows, options.base = [base], base
    failed = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these layers grow")  # tiny ones, under --smoke
        for family in options.families:
            for budget in options.budgets:
                for way in options.ways:
                    try:
                        rows.append(compress(job, options, family, budget, way == "calibrated"))
                    except (ValueError, FloatingPointError) as error:
                        failed.append(f"{family}, budget {budget}, {way}: {error}")
    if len(rows) > 1:
        report(options, rows, " ".join(sys.argv[1:] if argv is None else argv))
    if failed:
        raise SystemExit("\n".join(failed))
    return rows


def report(options: argparse.Namespace, rows: list[dict[str, Any]], command: str) -> None:
    """Write the results and the plot to the folder, and print the table."""
    job, console = options.job, Console(width=None if sys.stdout.isatty() else 150)
    with compare.replacing(options.out / "compress.png") as path:
        plot(rows, path)
    with compare.replacing(options.out / "compress.json") as path:
        about_run = {
            "machine": compare.machine("cpu"),
            "torch": torch.__version__,
            "structlin": structlin.__version__,
            **measure_process(),
            "seed": options.seed,
            "heal": {"steps": options.heal, "lr": options.heal_lr, "batch": options.batch},
        }
        command = f"{Path(sys.argv[0]).name} {command}"
        everything = {**about_run, "command": command, "title": job.title, "rows": rows}
        path.write_text(json.dumps(everything, indent=1) + "\n")
    console.print(table(job.title, rows))
    for row in rows:
        for said in row["sample"]:
            console.print(f"{row['family']}, {row['budget']:g}: {said}", markup=False)
    console.print(f"models, compress.png and compress.json are in {options.out}")


def measure_process() -> dict[str, float]:
    """What this process has taken so far, where the system says it."""
    found = {"cpu_seconds": round(time.process_time(), 1)}
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        found["peak_bytes"] = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


if __name__ == "__main__":
    main()
