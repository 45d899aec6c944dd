"""How fast is a structured layer? Time, memory and their bounds, against nn.Linear of equal width
and of equal FLOPs.

    python -m benchmarks.speed.layer                      # 15 minutes at most: results/layer.*
    python -m benchmarks.speed.layer --budget 60 --out out
    python -m benchmarks.speed.layer --allocator default  # results/layer_default_allocator.*
    python -m benchmarks.speed.layer --smoke              # seconds

The protocol: the machine's ceilings are measured first; data are random; every variant is compared
with a float64 oracle, on memory poisoned with NaN (but what torch.compile makes), before it is
timed; the variants take turns, dense first and last. Speeds are ratios within a round. On a CPU the
process keeps the memory that it frees, as with the jemalloc or tcmalloc that PyTorch's tuning guide
advises: glibc returns much of it to the kernel, and which of two layers then waits for fresh pages
is an accident (`timing.keep_pages`). With few tokens on a CPU a sample is calls back to back for 2
ms, caches warm. On a GPU times are the device's, caches cold (`timing.seconds`), and beside them
what a user waits for one call. Implementations and options: `benchmarks.speed.variants`;
compiling is no part of a sample.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import product
from math import ceil, inf, prod
from pathlib import Path
from platform import libc_ver
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import structlin
from benchmarks.harness import timing
from benchmarks.harness.record import RESULTS, save_json
from benchmarks.harness.report import table
from benchmarks.speed.variants import SMOKE, Job, Variant, equal_flops_widths, variants

ROUNDS = (3, 25)
TOLERANCE = {
    "float32": 1e-5,
    "bfloat16": 1e-2,
    "float16": 1e-3,
}  # of the relative Frobenius error; bfloat16 rounds to 2^-9 each time, float16 to 2^-12
SHORTEST = 2e-3  # seconds of a sample on a CPU
ORACLE_TOKENS = 256
MANY = 8  # numbers, beyond those of the gains of weight normalisation
WAITS = 5  # samples of what a user waits for a call on a GPU
FEW = 1, 4, 16  # tokens, forward, in every dtype
FEW_AT = 512, 1024, 2048  # the square widths
# what the line under the table of few tokens tells of
OTHERS = (
    "loop",
    "strided",
    "structured",
    "merged",
    "compiled",
)  # the implementations beside nn.Linear and auto


# ---- what is measured ----------------------------------------------------------------------------


def jobs(device: str) -> list[Job]:
    """In order of importance: what does not fit the budget is dropped from the end."""
    if device == "cuda":
        tokens, main, widths, ffn, decode = (
            16384,
            "bfloat16",
            (4096, 1024, 2048, 768, 8192),
            (4096, 1024),
            (4096,),
        )
    else:
        tokens, main, widths, ffn, decode = 4096, "float32", (1024, 2048, 512), (1024,), (1024,)
    other = "float32" if main == "bfloat16" else "bfloat16"
    square = [Job(d, d, tokens, main, True) for d in widths]
    decoding = [Job(d, d, 16, dtype, False) for dtype in (main, other) for d in decode]
    up_down = [Job(*shape, tokens, main, True) for d in ffn for shape in ((d, 4 * d), (4 * d, d))]
    second = [replace(job, dtype=other) for job in square]
    few = [
        Job(d, d, count, dtype, False, brief=True)
        for dtype in TOLERANCE
        for d in FEW_AT
        for count in FEW
        if Job(d, d, count, dtype, False) not in decoding
    ]
    training = [*square[:2], *decoding, *second[:2], *few, *up_down, *square[2:], *second[2:]]
    inference = [replace(job, backward=False) for job in training if job.backward]
    return [*training, *inference, *(replace(job, dtype=other) for job in up_down)]


# ---- measuring -----------------------------------------------------------------------------------


def error(variant: Variant, *, backward: bool) -> float:
    """The largest relative error of the output and the gradients, at full size, on a sample of the
    tokens.

    The output's gradient is zero outside the sample, so that the parameters' gradients are the
    sample's alone.
    """
    x, dy = variant.x, torch.zeros_like(variant.dy)
    sample = (
        torch.linspace(0, len(x) - 1, min(len(x), ORACLE_TOKENS), device=x.device).round().long()
    )
    dy[sample] = variant.dy[sample]
    # What is compiled takes its memory past torch's allocations, and would be compiled anew for the
    # poisoned mode
    poisoned = nullcontext() if variant.implementation == "compiled" else timing.poisoned()
    with poisoned, torch.set_grad_enabled(backward):
        y = variant.run(x)
        gradients = torch.autograd.grad(y, [x, *variant.parameters], dy) if backward else ()
    if not all(torch.isfinite(tensor).all() for tensor in (y, *gradients)):
        return inf
    wide = [
        tensor.detach().double().requires_grad_(backward)
        for tensor in (x[sample], *variant.parameters)
    ]
    wanted = variant.oracle(variant.structure, wide[1:], wide[0])
    pairs = [(y[sample], wanted)]
    if backward:
        found = (gradients[0][sample], *gradients[1:])
        pairs += zip(found, torch.autograd.grad(wanted, wide, dy[sample].double()), strict=True)
    # The gradient of a gain is a sum of a million numbers that nearly cancel: bfloat16 has no
    # digits of it
    return max(timing.relative_error(*pair) for pair in pairs if pair[1].numel() > MANY)


def measure(
    job: Job,
    found: Sequence[Variant],
    device: str,
    ceilings: timing.Ceilings | None,
    **limits: Any,
) -> list[dict[str, Any]]:
    """A row for every one of the job's variants; `limits` are those of `timing.interleaved`.

    A brief job has neither bounds, and needs no `ceilings`, nor nn.Linear of equal FLOPs.
    """
    errors = [error(variant, backward=job.backward) for variant in found]
    for variant, off in zip(found, errors, strict=True):
        if not off < TOLERANCE[job.dtype]:
            raise ArithmeticError(
                f"{variant.name}, {variant.title}: relative error {off:.1e} in {job.title}"
            )
    works = [variant.forward_backward if job.backward else variant.forward for variant in found]
    times = sample(works, job, device, **limits)
    dense = [sum(pair) / 2 for pair in zip(times[0], times[-1], strict=True)]
    of_width = {v.widths: t for v, t in zip(found, times, strict=True) if v.title == "nn.Linear"}
    of_width[job.d_in, job.d_out] = dense
    without = {
        (v.name, v.title): t
        for v, t in zip(found, times, strict=True)
        if v.widths == (job.d_in, job.d_out)
    }
    without["dense", "nn.Linear"] = dense
    waits = user_waits(works, device) if device == "cuda" else None
    rows = []
    for n, (variant, work, samples) in enumerate(zip(found, works, times, strict=True)):
        structure = variant.structure
        seconds = statistics.median(samples)
        forward = partial(variant.run, variant.x)
        saved = timing.saved_bytes(forward, variant.parameters) if job.backward else None
        row = {
            **asdict(job),
            "structure": variant.name,
            "implementation": variant.title,
            "widths": variant.widths,
            "params": structure.params,
            "flops": structure.flops,
            "dense_flops": 2 * job.d_in * job.d_out,
            "rounds": len(samples),
            "ms": timing.spread([1e3 * sample for sample in samples]),
            "peak_bytes": timing.peak_bytes(work, device),
            "saved_bytes": saved,
            "error": errors[n],
        }
        if ceilings is not None:
            size = variant.x.element_size()
            bound = partial(ceilings.bound, structure, job.tokens, size, backward=job.backward)
            row["bound_share"] = bound() / seconds
            row["fused_share"] = bound(fused=True) / seconds
        if variant.widths == (job.d_in, job.d_out):
            twin = without["dense", "nn.Linear + bias"] if variant.option == "bias" else dense
            row["x_dense"] = timing.spread([a / b for a, b in zip(twin, samples, strict=True)])
        if "x_dense" in row and not job.brief:
            widths = equal_flops_widths(structure)
            equal = [structure.flops / (2 * prod(widths)) * sample for sample in of_width[widths]]
            row["x_equal_flops"] = timing.spread(
                [a / b for a, b in zip(equal, samples, strict=True)]
            )
        if variant.option:
            plain = without[variant.name, variant.implementation]
            row["over_plain"] = timing.spread([a / b for a, b in zip(samples, plain, strict=True)])
        if waits:
            row["wall_ms"] = waits[n]
        rows.append(row)
    return rows


def sample(
    works: Sequence[Callable[[], Any]], job: Job, device: str, **limits: Any
) -> list[list[float]]:
    """Seconds of a call of each, round by round."""
    short = device == "cpu" and job.tokens < ORACLE_TOKENS
    calls = [ceil(SHORTEST / timing.wall(work, device)) if short else 1 for work in works]
    repeated = {
        n: partial(_repeat, work, count)
        for n, (work, count) in enumerate(zip(works, calls, strict=True))
    }
    times = timing.interleaved(repeated, partial(timing.seconds, device=device), **limits)
    return [[total / count for total in times[n]] for n, count in enumerate(calls)]


def user_waits(works: Sequence[Callable[[], Any]], device: str) -> list[dict[str, float]]:
    """Milliseconds from one call of each to its result, caches warm: with few tokens, what
    enqueuing takes."""
    clock, rounds = partial(timing.wall, device=device), (WAITS, WAITS)
    times = timing.interleaved(dict(enumerate(works)), clock, rounds=rounds, until=inf)
    return [timing.spread([1e3 * sample for sample in times[n]]) for n in range(len(works))]


def _repeat(work: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        work()


# ---- showing -------------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A table of one job: `auto` in full, the other implementations as speeds."""
    title = job_of(rows[0]).title
    first, last = rows[0]["ms"]["median"], rows[-1]["ms"]["median"]
    title += (
        f": median of {rows[0]['rounds']} interleaved rounds (p20-p80); "
        "dense, first and last of a round, "
    )
    shown = Table(
        title=f"{title}{first:.3g} and {last:.3g} ms", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    shown.add_column("structure", no_wrap=True)
    columns = (
        "FLOP rate",
        "FLOPs",
        "ms",
        "(p20-p80)",
        "x dense",
        "(p20-p80)",
        "at its FLOPs",
        "bound",
        "fused",
    )
    others = [name for name in OTHERS if any(row["implementation"] == name for row in rows)]
    with_options, waits = any("over_plain" in row for row in rows), "wall_ms" in rows[0]
    extra = ["/ plain"] * with_options + ["wall ms"] * waits
    for column in (*columns, "peak MB", "saved MB", *extra, *others):
        shown.add_column(column, justify="right", no_wrap=True)
    speeds = {
        (row["structure"], row["implementation"]): row["x_dense"]["median"]
        for row in rows
        if "x_dense" in row
    }
    for row in rows:
        if row["implementation"] in others or (
            row["implementation"] == "nn.Linear" and row is not rows[0]
        ):
            continue
        # with the option
        name = row["structure"] + "".join(row["implementation"].partition(" + ")[1:])
        ms, speed, flops = row["ms"], row["x_dense"], row["flops"] / row["dense_flops"]
        shown.add_row(
            name,
            f"{flops * speed['median']:.2f}",
            f"{flops:.3f}",
            f"{ms['median']:.3g}",
            f"({ms['p20']:.3g}-{ms['p80']:.3g})",
            f"{speed['median']:.2f}",
            f"({speed['p20']:.2f}-{speed['p80']:.2f})",
            f"{row['x_equal_flops']['median']:.2f}",
            f"{row['bound_share']:.2f}",
            f"{row['fused_share']:.2f}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            "" if row["saved_bytes"] is None else f"{row['saved_bytes'] / 1e6:.1f}",
            *[f"{row['over_plain']['median']:.2f}" if "over_plain" in row else ""] * with_options,
            *([f"{row['wall_ms']['median']:.3g}"] if waits else []),
            *(f"{speeds[key]:.2f}" if (key := (name, how)) in speeds else "" for how in others),
        )
    console.print(shown)


LEGEND = """x dense: speed against nn.Linear of equal width; at its FLOPs: against nn.Linear of
equal FLOPs (the nearest multiple of 64 wide, time scaled to the same FLOPs); FLOPs, FLOP rate: of
nn.Linear's; bound: share of the roofline of strided products; fused: of one that keeps the middle
in a cache (the only one that holds where the middle fits); peak: allocated by one call; saved: kept
for the backward pass, without parameters; / plain: time over the same without the option; with
bias, x dense is against nn.Linear with bias; wall: one call and its result, caches warm; the last
columns: the speed of other implementations against nn.Linear of equal width."""


def markdown(result: dict[str, Any], dtype: str) -> str:
    """The table of docs/speed.md: speed of `auto` against nn.Linear of equal width, for a dtype,
    and in brackets its FLOPs a second as a share of nn.Linear's; nn.Linear's time in ms. Forward
    and backward of many tokens."""
    rows = [
        row
        for row in result["rows"]
        if row["dtype"] == dtype and row["backward"] and "x_dense" in row
    ]
    columns = sorted(
        {job_of(row) for row in rows}, key=lambda job: (job.d_in * job.d_out, job.d_in)
    )
    cells = {(job_of(row), row["structure"], row["implementation"]): row for row in rows}
    titles = [f"{job.d_in} -> {job.d_out}" for job in columns]
    dense = [f"{cells[job, 'dense', 'nn.Linear']['ms']['median']:.3g} ms" for job in columns]
    lines = [
        f"| | {' | '.join(titles)} |",
        "|---|" + "--:|" * len(columns),
        f"| nn.Linear | {' | '.join(dense)} |",
    ]
    for name in dict.fromkeys(row["structure"] for row in rows if row["implementation"] == "auto"):
        found = [cells.get((job, name, "auto")) for job in columns]
        lines.append(f"| {name} | {' | '.join(_speed(row) if row else '-' for row in found)} |")
    return "\n".join(lines)


def few_tokens(result: dict[str, Any]) -> str:
    """The table of docs/speed.md: a forward pass of `FEW` tokens, the lowest speed against
    nn.Linear of all widths."""
    rows = [
        row
        for row in result["rows"]
        if not row["backward"]
        and row["tokens"] in FEW
        and row["d_in"] == row["d_out"]
        and row["implementation"] == "auto"
    ]
    columns = list(product(TOLERANCE, FEW))
    lines = []
    for name in dict.fromkeys(row["structure"] for row in rows):
        cells = []
        for column in columns:
            speeds = [
                row["x_dense"]["median"]
                for row in rows
                if (row["dtype"], row["tokens"]) == column and row["structure"] == name
            ]
            cells.append(f"{min(speeds):.2f}x" if speeds else "-")
        lines.append([name, *cells])
    return table(["", *(f"{dtype}, {count}" for dtype, count in columns)], lines)


def _speed(row: dict[str, Any]) -> str:
    speed = row["x_dense"]["median"]
    return f"{speed:.2f}x ({speed * row['flops'] / row['dense_flops']:.0%})"


def plot(
    rows: Sequence[dict[str, Any]], ceilings: dict[str, dict[str, float]], tokens: int, path: Path
) -> None:
    """Time against FLOPs of forward + backward: nn.Linear's line, `auto` of every structure, and
    their rooflines."""
    chosen = [
        row
        for row in rows
        if row["backward"] and row["tokens"] == tokens and row["structure"] != "dense, last"
    ]
    dtypes = list(dict.fromkeys(row["dtype"] for row in chosen))
    figure = Figure(figsize=(5 * len(dtypes) + 2, 4.5), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        points: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for row in chosen:
            if row["dtype"] == dtype and row["implementation"] in ("nn.Linear", "auto"):
                points.setdefault(row["structure"], {}).setdefault(
                    3 * tokens * row["flops"], []
                ).append(row)
        for n, (name, by_flops) in enumerate(points.items()):
            flops = sorted(by_flops)
            ms = [
                statistics.median(row["ms"]["median"] for row in by_flops[value]) for value in flops
            ]
            share = [
                statistics.median(row["bound_share"] for row in by_flops[value]) for value in flops
            ]
            style = (
                {"color": "black", "marker": "."}
                if name == "dense"
                else {"color": f"C{n}", "marker": "o"}
            )
            axes.plot(flops, ms, label=name, linestyle="-" if name == "dense" else "none", **style)
            roofline = [a * b for a, b in zip(ms, share, strict=True)]
            axes.plot(
                flops,
                roofline,
                color=style["color"],
                linestyle="--" if name == "dense" else "none",
                marker="_",
            )
        axes.plot([], [], "k--", marker="_", label="roofline of strided products")
        axes.set(xscale="log", yscale="log", xlabel="FLOPs, forward + backward", ylabel="ms")
        axes.set_title(
            f"{dtype}, {tokens} tokens; {ceilings[dtype]['rate'] / 1e12:.2g} TFLOP/s",
            fontsize="medium",
        )
        axes.grid(alpha=0.3)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, format="png")


def job_of(row: dict[str, Any]) -> Job:
    """Results that were kept before there were brief jobs say nothing of it."""
    return Job(**{field.name: row[field.name] for field in fields(Job) if field.name in row})


# ---- the run -------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=900,
        metavar="SECONDS",
        help="jobs that do not fit are left out",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON and the plot")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny layers, kept only if --out is given"
    )
    parser.add_argument(
        "--allocator",
        choices=("keep", "default"),
        default="keep",
        help="what a CPU's freed memory becomes",
    )
    options = parser.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    end, device, rounds = time.perf_counter() + options.budget, options.device, ROUNDS
    todo = jobs(device)
    if options.smoke:
        todo, rounds = (
            [
                Job(SMOKE, SMOKE, 256, "float32", True),
                Job(SMOKE, 4 * SMOKE, 16, "bfloat16", False),
                Job(SMOKE, SMOKE, 4, "float16", False, brief=True),
            ],
            (2, 2),
        )
    keeps_pages = device == "cpu" and options.allocator == "keep" and timing.keep_pages()
    torch.manual_seed(0)
    measured = {
        dtype: timing.ceilings(device, getattr(torch, dtype), smoke=options.smoke)
        for dtype in dict.fromkeys(job.dtype for job in todo if not job.brief)
    }
    for dtype, found in measured.items():
        rates = f"{found.rate / 1e12:.3g} TFLOP/s, {found.bandwidth / 1e9:.3g} GB/s"
        print(f"# ceilings, {dtype}: {rates}, {1e6 * found.call:.3g} us a call")
    setting = {
        "device": device,
        "threads": torch.get_num_threads(),
        "tokens": todo[0].tokens,
        "budget": options.budget,
    }
    if device == "cpu":
        setting["allocator"] = (
            "keeps freed pages" if keeps_pages else f"{libc_ver()[0] or 'libc'}'s default"
        )
    content = {
        "setting": setting,
        "ceilings": {dtype: asdict(found) for dtype, found in measured.items()},
    }
    keeps = not options.smoke or options.out != RESULTS
    path = options.out / (
        "layer.json" if options.allocator == "keep" else "layer_default_allocator.json"
    )
    results: list[list[dict[str, Any]]] = []
    for n, job in enumerate(todo):
        least = max(
            (seconds_least(rows, device) for rows in results if rows[0]["tokens"] == job.tokens),
            default=0,
        )
        if end - time.perf_counter() < weight(job, device) * least:
            print(f"# left out: {job.title}")
            continue
        layers, now = variants(job, device, end), time.perf_counter()  # after compiling
        share = weight(job, device) / sum(weight(job, device) for job in todo[n:])
        limits = {"rounds": rounds, "until": now + max(3.0, (end - now) * share), "end": end}
        ceilings = None if job.brief else measured[job.dtype]
        results.append(measure(job, layers, device, ceilings, **limits))
        for row in results[-1]:
            print(json.dumps(row, allow_nan=False), flush=True)
        if keeps:
            save_json(path, **content, rows=[row for rows in results for row in rows])
    console = Console(width=210)
    whole = [rows for rows in results if not rows[0]["brief"]]
    for rows in whole:
        show(rows, console)
    print(LEGEND)
    flat = [row for rows in results for row in rows]
    if len(whole) < len(results):
        print(f"\n{few_tokens(content | {'rows': flat})}")
    if keeps and flat:
        plot(flat, content["ceilings"], todo[0].tokens, path.with_suffix(".png"))
    return flat


def weight(job: Job, device: str) -> float:
    """How long a round takes, relatively: dense's FLOPs; with all modes there are about three times
    as many."""
    return job.flops * (3 if device == "cpu" and job.modes else 1)


def seconds_least(rows: Sequence[dict[str, Any]], device: str) -> float:
    """Seconds that a job takes with the least number of rounds, for each unit of its weight."""
    return (
        (ROUNDS[0] + 3)
        * sum(row["ms"]["median"] for row in rows)
        / 1e3
        / weight(job_of(rows[0]), device)
    )


if __name__ == "__main__":
    main()
