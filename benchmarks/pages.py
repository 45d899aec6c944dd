"""The tables, numbers and pictures of README.md and docs/, made from the kept results.

    python -m benchmarks.pages            # writes them into the pages and docs/images
    python -m benchmarks.pages --smoke    # makes all of it, writes nothing

A page has `<!-- name -->` where a table begins and `<!-- end -->` where it ends. The numbers inside
sentences are those of `benchmarks.markers`. Run this script after each new measurement.
tests/test_pages.py fails where a page or a picture is not what the results give.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from benchmarks import gpu
from benchmarks import models as tested
from benchmarks.comparison import layers as comparison
from benchmarks.compression import methods
from benchmarks.compression import minilm as minilm_run
from benchmarks.harness.record import RESULTS, read
from benchmarks.harness.report import fill, table
from benchmarks.markers import GROUPS, accuracies, fill_numbers
from benchmarks.papers import tables as papers
from benchmarks.papers.summary import evidence, summary
from benchmarks.papers.verdicts import untested
from benchmarks.speed import layer, model, peers
from benchmarks.training import gpt_seconds, lr_transfer, optimizer, transfer
from structlin import Core, Structure, to_dense

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DRAWN = Structure("g d -> b a", "g b d", "b a g", g=4, d=4, b=4, a=4)  # BTT of rank 1
ROLES = {"batch": "tab:blue", "fan-out": "tab:green", "fan-in": "tab:red", "repeat": "tab:gray"}
MAIN_JOB = "train_gpt"  # the program of examples/ that the README's first command runs
TRANSFER = ("BTT r=1", "Monarch")  # of the picture: our rates are nearer, and the naive ones are


# ---- tables --------------------------------------------------------------------------------------


def show_runs(name: str) -> str:
    """The runs of a program of examples/ on two machines; seconds are steps times the median of a
    step."""
    cells = []
    for row, other in zip(read(name)["rows"], read(f"{name}_xeon")["rows"], strict=True):
        figures = [f"{row['flops']:,}", f"{row['loss']:.3f}"]
        seconds = [f"{each['clock'][-1]:.0f}" for each in (row, other)]
        cells.append([row["label"], str(row["width"]), *figures, *seconds])
    titles = ["", "width", "FLOPs per token", "held-out loss", "seconds, EPYC", "Xeon"]
    return table(titles, cells)


def tuned_losses() -> str:
    """The naive rule's loss over ours, each at its best rate, and both at dense's."""
    rows = read("lr_transfer")["table"]
    widths = sorted({row["width"] for row in rows})
    found = {(row["structure"], row["width"], row["rule"]): row for row in rows}
    cells = []
    for structure in lr_transfer.STRUCTURES:
        if structure == "dense":
            continue
        ratios = []
        for kind, width in product(("best_loss", "loss_at_reference_lr"), widths):
            naive, aware = (found[structure, width, rule][kind] for rule in lr_transfer.RULES)
            ratios.append(f"{naive / aware:.2f}")
        cells.append([structure, *ratios])
    titles = [f"tuned, {w}" for w in widths] + [f"dense's rate, {w}" for w in widths]
    return table(["", *titles], cells)


def head_rates() -> str:
    """Tuned losses with four times the head's rate, over the naive rule's without; dense's over its
    own."""
    rows = read("lr_transfer")["table"]
    widths = sorted({row["width"] for row in rows})
    found = {(row["structure"], row["width"], row["rule"]): row["best_loss"] for row in rows}
    rules = [f"{rule}{lr_transfer.HEAD}" for rule in ("aware", "naive")]
    cells = []
    for structure in lr_transfer.STRUCTURES:
        reference = "aware" if structure == "dense" else "naive"
        ratios = [
            f"{found[structure, width, rule] / found[structure, width, reference]:.2f}"
            if (structure, width, rule) in found
            else ""
            for rule, width in product(rules, widths)
        ]
        cells.append([structure, *ratios])
    titles = [f"{rule}, {width}" for rule, width in product(("ours", "naive"), widths)]
    return table(["head x4", *titles], cells)


def show_seeds(name: str) -> str:
    """The runs of one program with seeds 0, 1, 2: a step's milliseconds over those of the widest
    dense model, and how many times fewer seconds until a dense model's final loss."""
    kept = [read(f"{name}{end}")["rows"] for end in ("", "_seed1", "_seed2")]
    models = list(zip(*kept, strict=True))
    dense = {f"dense {rows[0]['width']}": rows for rows in models if rows[0]["label"] == "dense"}
    widest, cells = list(dense)[-1], []
    for rows in models:
        row = rows[0]
        figures = [str(row["width"]), f"{row['params']:,}", f"{row['flops']:,}"]
        figures.append(", ".join(f"{each['loss']:.3f}" for each in rows))
        pairs = zip(rows, dense[widest], strict=True)
        figures.append(", ".join(f"{each['ms'] / other['ms']:.2f}" for each, other in pairs))
        for other, runs in dense.items():
            pairs = zip(rows, runs, strict=True)
            factors = (times_fewer(each, run, other) for each, run in pairs)
            figures.append("" if rows == runs else ", ".join(factors))
        cells.append([row["label"], *figures])
    titles = ["width", "params", "FLOPs per token", "held-out loss, by seed"]
    untils = [f"until {other}'s loss" for other in dense]
    return table(["", *titles, f"ms per step / {widest}'s", *untils], cells)


def times_fewer(row: dict[str, Any], other: dict[str, Any], name: str) -> str:
    seconds = row["seconds to the loss of"][name]
    return "never" if seconds is None else f"{other['clock'][-1] / seconds:.1f}"


def minilm() -> str:
    """Cosine to the original's vectors, plain / calibrated / refined; of a peer its own."""
    rows = [row for row in read("minilm")["rows"] if row["budget"] < 1]
    budgets = sorted({row["budget"] for row in rows})
    found = {(row["family"], row["budget"], row["way"]): f"{row['cosine']:.2f}" for row in rows}
    cells = []
    for family in dict.fromkeys(row["family"] for row in rows):
        ours = ("plain", *minilm_run.CALIBRATED)
        ways = ("peer",) if (family, budgets[0], "peer") in found else ours
        shown = [[found.get((family, budget, way), "-") for way in ways] for budget in budgets]
        cells.append([family, *(" / ".join(each) for each in shown)])
    return table(["", *(f"{budget:.0%}" for budget in budgets)], cells)


def minilm_half() -> str:
    """Half of the encoder: low-rank with its blocks refined, what else was done to it, peers."""
    cells = []
    for row in read("minilm")["rows"]:
        left_out = row["way"] in ("plain", "calibrated")
        left_out |= row["budget"] not in (minilm_run.HALF, 1)
        if left_out or (row["way"] not in ("peer", "dense") and row["family"] != "low-rank"):
            continue
        name = row["family"] + ("" if row["way"] in ("peer", "dense") else f", {row['way']}")
        figures = [f"{row[name]:.2f}" for name in ("cosine", "same_neighbour", "topic")]
        healing = f" + {row['heal_seconds']:.0f}" if "heal_seconds" in row else ""
        seconds = f"{row['cpu_seconds']:.0f}{healing}"
        cells.append([name, f"{row['bytes'] / 1e6:.1f}", *figures, seconds])
    return table(["", "MB", "cosine", "same neighbour", "topic found", "CPU s"], cells)


def smollm2() -> str:
    """Perplexity of the language model by what is kept, and what else was measured at 0.8; of the
    families' int8 rows, which are alike, that of low-rank."""
    rows = methods.in_order(read("smollm2")["rows"])
    rows = [row for row in rows if row["way"] != "int8" or row["method"] in ("dense", "low-rank")]
    keeps = sorted({row["keep"] for row in rows if row["keep"] < 1}, reverse=True)
    found = {(methods.name_of(row), row["keep"]): row for row in rows}
    cells = []
    for name in dict.fromkeys(methods.name_of(row) for row in rows):
        whole = found.get((name, 1.0))
        line = [_perplexity(whole or found.get((name, keep))) for keep in keeps]
        row = whole or found.get((name, 0.8))
        if row is None:
            cells.append([name, *line, *["-"] * 5])
            continue
        figures = [f"{row['kl']:.2f}", f"{100 * row['choice']:.0f} %", f"{row['bytes'] / 1e6:.0f}"]
        speeds = row.get("speed", {}).values()
        times = [f"{list(each.values())[-1]['x_dense']['median']:.2f}x" for each in speeds]
        healing = f" + {row['heal_seconds']:.0f}" if "heal_seconds" in row else ""
        line += [*figures, ", ".join(times) or "-", f"{row['cpu_seconds']:.0f}{healing}"]
        cells.append([name, *line])
    titles = [*(f"keep {keep:g}" for keep in keeps), "KL", "task", "MB", "speed", "CPU s"]
    return table(["", *titles], cells)


def said() -> str:
    """What the language model of examples/compress.py says before and after, word by word, to the
    first and the last prompt."""
    lines = ["```text"]
    first, *_, last = zip(*(row["sample"] for row in read("compress")["rows"]), strict=True)
    for answers in (first, last):
        lines.append(answers[0].split(" -> ")[0])
        for row, answer in zip(read("compress")["rows"], answers, strict=True):
            name = "dense" if row["budget"] == 1 else f"keep {row['budget']:g}"
            text = answer.split(" -> ", 1)[1].replace("\n", "\\n")
            lines.append(f"  {name}: {text}")
    return "\n".join([*lines, "```"])


def _perplexity(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['perplexity']:.1f}"


def dinov2() -> str:
    """Accuracy of the vision transformer, half of it kept: neighbours / linear probe."""
    rows = [row for row in methods.in_order(read("dinov2")["rows"]) if row["keep"] in (0.5, 1)]
    cells = [[methods.name_of(row), accuracies(row)] for row in rows]
    return table(["", "keep 0.5"], cells)


def front_speeds() -> str:
    """The README's table: the speeds of both CPUs, EPYC / Xeon, against nn.Linear; forward and
    backward of 4096 tokens."""
    machines = (read("layer")["rows"], read("layer_xeon")["rows"])
    structures = ("BTT r=1", "BTT r=4", "Monarch 16", "low-rank d/8")
    lines = []
    for d_in, d_out, dtype in (
        (512, 512, "float32"),
        (1024, 1024, "float32"),
        (1024, 4096, "float32"),
        (512, 512, "bfloat16"),
        (1024, 1024, "bfloat16"),
    ):
        wanted = {"d_in": d_in, "d_out": d_out, "dtype": dtype, "tokens": 4096, "backward": True}
        cells = [f"{d_in} -> {d_out}, {dtype}"]
        for name in structures:
            rows = [
                papers.one(rows, structure=name, implementation="auto", **wanted)
                for rows in machines
            ]
            cells.append(" / ".join(f"{row['x_dense']['median']:.2f}x" for row in rows))
        lines.append(cells)
    return table(["", *structures], lines)


NO_GPU = """\
Triton kernels for NVIDIA GPUs exist (`pip install triton`). They pass in Triton's interpreter
and compile for sm_80, sm_90 and sm_100, but are **untested on GPU**. `benchmarks/gpu_run.sh`
checks, tunes and measures them.
"""


def show_gpu() -> str:
    """What was measured on GPUs, each table with its card; until then, that nothing was."""
    made = list[str]()

    def add(machine: str, what: str, command: str, name: str, tables: str) -> None:
        link = f"[json](../benchmarks/results/{name})"
        made.append(f"{machine}: {what} (`python -m {command}`, {link}).\n\n{tables}\n")

    if rows := gpu.read_rows(RESULTS / "gpu.jsonl"):
        what = "speed of forward + backward against nn.Linear, and the share of the kernels' bound"
        (about,) = (row for row in rows if row["kind"] == "environment")
        add(about["machine"], what, "benchmarks.gpu", "gpu.jsonl", gpu.markdown(rows))
    for name, what, show in (
        ("layer", "layers by default, in bfloat16", partial(layer.markdown, dtype="bfloat16")),
        ("model", "whole models", model.markdown),
    ):
        if (RESULTS / f"{name}_gpu.json").exists():
            found = read(f"{name}_gpu")
            command = f"benchmarks.speed.{name}"
            add(found["environment"]["machine"], what, command, f"{name}_gpu.json", show(found))
    return "\n".join(made) or NO_GPU


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"main job": lambda: show_runs(MAIN_JOB), "speed": front_speeds},
    "docs/speed.md": {
        "float32": lambda: layer.markdown(read("layer"), "float32"),
        "bfloat16": lambda: layer.markdown(read("layer"), "bfloat16"),
        "few tokens Xeon": lambda: layer.few_tokens(read("layer_xeon"), ("float32", "bfloat16")),
        "peers": lambda: peers.markdown(read("peers")),
        "models": lambda: model.markdown(read("model")),
        "gpu": show_gpu,
    },
    "docs/optimizers.md": {
        "learning rates": lambda: lr_transfer.markdown(read("lr_transfer")),
        "tuned losses": tuned_losses,
        "head rates": head_rates,
        "optimizer steps": lambda: optimizer.markdown(read("optimizer")),
    },
    "docs/transfer.md": {
        "farthest": lambda: transfer.farthest(read("transfer")),
        "batch": lambda: transfer.shifts(read("transfer"), transfer.GRID, "batch"),
        "steps": lambda: transfer.shifts(read("transfer"), transfer.GRID, "steps"),
    },
    "docs/results.md": {"verdicts": summary, "untested": untested},
    "docs/examples.md": {
        "three seeds": lambda: show_seeds(MAIN_JOB),
    },
    "docs/choose.md": {"comparison": lambda: comparison.markdown(read("comparison"))},
    "docs/gpts.md": {
        "gpt seconds": lambda: gpt_seconds.markdown(read("gpt_seconds"), read("gpt_seconds_epyc")),
        "gpt candidates": lambda: gpt_seconds.candidates(read("gpt_seconds")),
    },
    "docs/models.md": {"models": lambda: tested.markdown(read("models"))},
    "docs/compress.md": {
        "sentence encoder": minilm,
        "half of the encoder": minilm_half,
        "language model": smollm2,
        "said": said,
        "vision": dinov2,
    },
} | {f"docs/results/{page}.md": tables for page, tables in papers.TABLES.items()}


def make_page(page: str) -> str:
    """README.md or a page of docs/ with its tables and numbers made anew."""
    text = fill((ROOT / page).read_text(encoding="utf-8"), TABLES.get(page, {}))
    return fill_numbers(text, GROUPS)


def find_pages() -> list[str]:
    """The pages that may hold tables and numbers."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def make_evidence() -> str:
    """What verdicts.json holds."""
    return json.dumps(evidence(), indent=1, ensure_ascii=False) + "\n"


# ---- a structure as blocks and wires -------------------------------------------------------------


def wires(structure: Structure) -> list[list[int]]:
    """The permutations of a structure's program: for each core, which of the numbers that lie
    before it each of its inputs is, `(batch, repeat, fan_in)` row-major; last, which number of the
    last core each feature of y is.

    >>> wires(Structure("g d -> b a", "g b d", "b a g", g=2, d=2, b=2, a=1))
    [[0, 1, 2, 3], [0, 2, 1, 3], [0, 1]]
    """
    found, width = [], structure.in_features
    for step in structure.program.steps:
        found.append((step.move, width))
        width = step.batch * step.repeat * step.fan_out
    return [
        torch.arange(width).view(move.sizes or -1).permute(move.order or (0,)).flatten().tolist()
        for move, width in [*found, (structure.program.last, width)]
    ]


def draw_structure(structure: Structure) -> Figure:
    """x, every core as its blocks, the wires between them, y, and the matrix that all of it is."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes, image = figure.subplots(1, 2, width_ratios=(2.6, 1))
    sources, x, lying = wires(structure), 0.0, places(structure.in_features)
    axes.plot([x] * len(lying), lying, "k.", markersize=6)
    label(axes, x, "x", [(axis, "repeat") for axis in structure.inputs])
    for n, core in enumerate(structure.cores):
        inputs = places(len(sources[n]))
        wire(axes, x, [lying[source] for source in sources[n]], inputs)
        lying = places(core.batch * core.repeat * core.fan_out)
        block(axes, x + 1, core, inputs, lying)
        label(axes, x + 1.4, f"core {n + 1}", roles_of(core, structure.subscripts[n]))
        x += 1.8
    wire(axes, x, [lying[source] for source in sources[-1]], places(structure.out_features))
    axes.plot([x + 1] * structure.out_features, places(structure.out_features), "k.", markersize=6)
    label(axes, x + 1, "y", [(axis, "repeat") for axis in structure.outputs])
    for n, role in enumerate(("batch", "fan-out", "fan-in")):
        style = {"color": ROLES[role], "ha": "center", "weight": "bold"}
        axes.text((x + 1) / 2 + 0.6 * (n - 1), -0.24, role, **style)
    axes.set(xlim=(-0.4, x + 1.4), ylim=(-0.26, 1.24))
    axes.axis("off")
    draw = torch.Generator().manual_seed(0)
    matrix = to_dense(
        structure, [torch.randn(core.shape, generator=draw) for core in structure.cores]
    )
    limit = matrix.abs().max().item()
    image.imshow(matrix.tolist(), cmap="RdBu", vmin=-limit, vmax=limit)
    share = structure.params / matrix.numel()
    image.set_title(
        f"y = W x, W with {structure.params} parameters,\n{share:.0%} of a dense matrix's"
    )
    image.set(xticks=[], yticks=[])
    return figure


def places(count: int) -> list[float]:
    """Heights from 1 to 0."""
    return [1 - n / max(1, count - 1) for n in range(count)]


def wire(axes: Axes, x: float, starts: list[float], ends: list[float]) -> None:
    for start, end in zip(starts, ends, strict=True):
        axes.plot([x, x + 1], [start, end], color="0.7", linewidth=0.9, zorder=0)


def block(axes: Axes, x: float, core: Core, inputs: list[float], outputs: list[float]) -> None:
    """A core, inputs to the left and outputs to the right; a block that is used again has its
    colour again."""
    colours = colormaps["tab10"]
    for n in range(core.batch * core.repeat):
        ins = inputs[n * core.fan_in : (n + 1) * core.fan_in]
        outs = outputs[n * core.fan_out : (n + 1) * core.fan_out]
        corners = [(x, ins[0]), (x + 0.8, outs[0]), (x + 0.8, outs[-1]), (x, ins[-1])]
        colour = colours(n // core.repeat % colours.N)
        axes.add_patch(Polygon(corners, facecolor=colour, edgecolor=colour, alpha=0.5))
    axes.plot(
        [x] * len(inputs), inputs, "k.", [x + 0.8] * len(outputs), outputs, "k.", markersize=3
    )
    times = f", {core.repeat} times" if core.repeat > 1 else ""
    size = f"{core.batch} blocks of {core.fan_out} x {core.fan_in}{times}"
    axes.text(x + 0.4, -0.12, size, ha="center")


def label(axes: Axes, x: float, title: str, letters: list[tuple[str, str]]) -> None:
    """`title`, and the names of axes below it in the colours of their roles."""
    axes.text(x, 1.18, title, ha="center")
    for n, (letter, role) in enumerate(letters):
        place = x + 0.16 * (n - (len(letters) - 1) / 2)
        style = {"family": "monospace", "size": "large", "weight": "bold", "color": ROLES[role]}
        axes.text(place, 1.08, letter, ha="center", **style)


def roles_of(core: Core, text: str) -> list[tuple[str, str]]:
    """The axes of a core as they were written, each with its role."""
    roles = {axis: "batch" for axis in core.batch_axes}
    roles |= {axis: "fan-out" for axis in core.fan_out_axes}
    roles |= {axis: "fan-in" for axis in core.fan_in_axes}
    return [(axis, roles[axis]) for axis in text.split()]


# ---- pictures ------------------------------------------------------------------------------------

# name of the file -> what it shows, and a function that draws it
PICTURES: dict[str, tuple[Callable[[], str], Callable[[], Figure]]] = {
    "structure.png": (lambda: repr(DRAWN), lambda: draw_structure(DRAWN)),
    "lr_transfer.png": (
        lambda: json.dumps(read("lr_transfer")["rows"]),
        lambda: lr_transfer.plot_some(read("lr_transfer"), TRANSFER),
    ),
}


def digest(content: str) -> str:
    """What a picture says it was drawn from."""
    return f"sha256 of what is drawn: {hashlib.sha256(content.encode()).hexdigest()}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    for page in find_pages():
        made = make_page(page)
        print(f"# {page}: {len(made)} characters")
        if not options.smoke:
            (ROOT / page).write_text(made, encoding="utf-8")
    verdicts = make_evidence()
    if not options.smoke:
        (RESULTS / "verdicts.json").write_text(verdicts, encoding="utf-8")
    for name, (content, draw) in PICTURES.items():
        figure = draw()
        if not options.smoke:
            IMAGES.mkdir(parents=True, exist_ok=True)
            about = {"Description": digest(content())}
            figure.savefig(IMAGES / name, dpi=110, metadata=about)


if __name__ == "__main__":
    main()
