"""How fast is a structured layer? Time, memory and their bounds, against nn.Linear of equal width and of equal FLOPs.

    python -m benchmarks.layer                       # 7 minutes at most, results/layer.{json,png}
    python -m benchmarks.layer --budget 60 --out out
    python -m benchmarks.layer --smoke               # seconds

The protocol: the machine's ceilings are measured first; data are random; every variant is compared with a float64
oracle, on memory poisoned with NaN, before it is timed; the variants take turns, dense first and last. Speeds are
ratios within a round. On a GPU times are the device's, caches cold (`timing.seconds`); with few tokens on a CPU a
sample is calls back to back for 2 ms, caches warm.

Implementations: nn.Linear; auto, what `StructuredLinear` does by itself; structured and merged, the two modes that it
chooses from; einsum, `contract.reference`; strided, two products that write into a strided view of the output, with one
copy of the activations each way, as the published BTT and Monarch layers do it (written here from the formula).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import ceil, inf, prod, sqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.record import RESULTS, save_json
from structlin import BTT, TT, Dense, Family, Kronecker, LowRank, Monarch, Structure, StructuredLinear, contract

ROUNDS = (3, 25)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of the relative Frobenius error; bfloat16 rounds to 2^-9 each time
SHORTEST = 2e-3  # seconds of a sample on a CPU
ORACLE_TOKENS = 256
OTHERS = ("einsum", "strided", "structured", "merged")  # the implementations beside nn.Linear and auto


def families(width: int) -> dict[str, Family]:
    """The structures of a row each; `width` is the smaller side of the layer."""
    return {
        "BTT r=1": BTT(rank=1),
        "BTT r=2": BTT(rank=2),
        "BTT r=4": BTT(rank=4),
        "Monarch 4": Monarch(blocks=4),
        "Monarch 16": Monarch(blocks=16),
        "low-rank d/4": LowRank(rank=width // 4),
        "low-rank d/8": LowRank(rank=width // 8),
        "Kronecker": Kronecker(),
        "TT r=4": TT(rank=4),
    }


# ---- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One setting; all its variants are timed in turns."""

    d_in: int
    d_out: int
    tokens: int
    dtype: str
    backward: bool

    @property
    def title(self) -> str:
        work = "forward + backward" if self.backward else "forward"
        return f"{self.d_in} -> {self.d_out}, {self.tokens} tokens, {self.dtype}, {work}"

    @property
    def flops(self) -> int:
        """Of the dense layer."""
        return self.passes * 2 * self.tokens * self.d_in * self.d_out

    @property
    def passes(self) -> int:
        """Forward products: the backward pass has two more of the same FLOPs for each."""
        return 3 if self.backward else 1


def jobs(device: str) -> list[Job]:
    """In order of importance: what does not fit the budget is dropped from the end."""
    if device == "cuda":
        tokens, main, widths, ffn, decode = 16384, "bfloat16", (4096, 1024, 2048, 768, 8192), (4096, 1024), (4096,)
    else:
        tokens, main, widths, ffn, decode = 4096, "float32", (1024, 2048, 512), (1024,), (1024,)
    other = "float32" if main == "bfloat16" else "bfloat16"
    square = [Job(d, d, tokens, main, True) for d in widths]
    decoding = [Job(d, d, 16, dtype, False) for dtype in (main, other) for d in decode]
    up_down = [Job(*shape, tokens, main, True) for d in ffn for shape in ((d, 4 * d), (4 * d, d))]
    second = [replace(job, dtype=other) for job in square]
    training = [*square[:2], *decoding, *second[:2], *up_down, *square[2:], *second[2:]]
    inference = [replace(job, backward=False) for job in training if job.backward]
    return [*training, *inference, *(replace(job, dtype=other) for job in up_down)]


@dataclass
class Variant:
    """A layer as a function, its parameters, and the structure that says what it has to compute."""

    name: str
    implementation: str
    structure: Structure
    run: Callable[[Tensor], Tensor]
    cores: Sequence[Tensor]
    x: Tensor
    dy: Tensor

    @property
    def widths(self) -> tuple[int, int]:
        return self.structure.in_features, self.structure.out_features

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.run(self.x)

    def forward_backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.run(self.x), [self.x, *self.cores], self.dy)


def variants(job: Job, device: str) -> list[Variant]:
    """nn.Linear first and last; between them all structures, and nn.Linear at their FLOPs."""
    dtype = getattr(torch, job.dtype)

    def data(width: int) -> Tensor:
        return torch.randn(job.tokens, width, device=device).to(dtype)

    x, dy = data(job.d_in).requires_grad_(job.backward), data(job.d_out)

    def dense(d_in: int, d_out: int, x: Tensor, dy: Tensor) -> Variant:
        weight = nn.Parameter((torch.randn(d_out, d_in, device=device) / sqrt(d_in)).to(dtype))
        layer = Dense().structure(d_in, d_out)
        return Variant("dense", "nn.Linear", layer, partial(F.linear, weight=weight), [weight], x, dy)

    found = [dense(job.d_in, job.d_out, x, dy)]
    equal_flops = set[tuple[int, int]]()
    for name, family in families(min(job.d_in, job.d_out)).items():
        layer = StructuredLinear(job.d_in, job.d_out, family, bias=False, device=device, dtype=dtype)
        structure, cores = layer.structure, list(layer.cores)
        runs: dict[str, Callable[[Tensor], Tensor]] = {
            "auto": layer,
            "einsum": partial(contract.reference, structure, cores),
        }
        if (
            device == "cuda" or job.d_in * job.d_out <= 1024**2
        ):  # wider, a CPU needs too long for what nobody would take
            runs["structured"] = partial(contract.apply, structure, cores, mode="structured")
            runs["merged"] = partial(contract.apply, structure, cores, mode="dense")
        if all(core.repeat == 1 and core.batch > 1 for core in structure.cores):
            runs["strided"] = partial(StridedProducts.apply, structure, *cores)
        found += [Variant(name, how, structure, run, cores, x, dy) for how, run in runs.items()]
        equal_flops.add(equal_flops_widths(structure))
    for d_in, d_out in sorted(equal_flops - {(job.d_in, job.d_out)}):
        found.append(dense(d_in, d_out, data(d_in).requires_grad_(job.backward), data(d_out)))
    return [*found, replace(found[0], name="dense, last")]


def equal_flops_widths(structure: Structure) -> tuple[int, int]:
    """The dense layer of the same aspect ratio and FLOPs: multiples of 64, so that dense is at its best.

    >>> equal_flops_widths(BTT().structure(1024, 4096))
    (192, 896)
    """
    scale = sqrt(structure.flops / (2 * structure.in_features * structure.out_features))
    d_in, d_out = (max(64, 64 * round(scale * width / 64)) for width in (structure.in_features, structure.out_features))
    return d_in, d_out


class StridedProducts(torch.autograd.Function):
    """`y = W x` for two cores without repetition: see the head of this file."""

    @staticmethod
    def forward(ctx: Any, structure: Structure, first: Tensor, last: Tensor, x: Tensor) -> Tensor:
        split, middle, join = structure.rearrangements
        blocks = _rearrange(x[None], split)  # (batch, tokens, fan_in), a view
        h = _rearrange(torch.bmm(blocks, first.mT), middle)  # the copy
        y = x.new_empty(1, len(x), structure.out_features)
        torch.bmm(h, last.mT, out=_rearrange(y, join, back=True))
        ctx.structure = structure
        ctx.save_for_backward(blocks, h, first, last)
        return y[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        split, middle, join = ctx.structure.rearrangements
        blocks, h, first, last = ctx.saved_tensors
        dy_blocks = _rearrange(dy[None], join, back=True)
        dh = _rearrange(torch.bmm(dy_blocks, last), middle, back=True)  # the copy
        dx = dy.new_empty(1, len(dy), ctx.structure.in_features)
        torch.bmm(dh, first, out=_rearrange(dx, split))
        return None, torch.bmm(dh.mT, blocks), torch.bmm(dy_blocks.mT, h), dx[0]


def _rearrange(tensor: Tensor, rearrangement: tuple[str, dict[str, int]], *, back: bool = False) -> Tensor:
    pattern, sizes = rearrangement
    return rearrange(tensor, " -> ".join(reversed(pattern.split(" -> "))) if back else pattern, **sizes)


# ---- measuring -------------------------------------------------------------------------------------------------------


def error(variant: Variant, *, backward: bool) -> float:
    """The largest relative error of the output and the gradients, at full size, on a sample of the tokens.

    The output's gradient is zero outside the sample, so that the cores' gradients are the sample's alone.
    """
    x, dy = variant.x, torch.zeros_like(variant.dy)
    sample = torch.linspace(0, len(x) - 1, min(len(x), ORACLE_TOKENS), device=x.device).round().long()
    dy[sample] = variant.dy[sample]
    with timing.poisoned(), torch.set_grad_enabled(backward):
        y = variant.run(x)
        gradients = torch.autograd.grad(y, [x, *variant.cores], dy) if backward else ()
    if not all(torch.isfinite(tensor).all() for tensor in (y, *gradients)):
        return inf
    wide = [tensor.detach().double().requires_grad_(backward) for tensor in (x[sample], *variant.cores)]
    wanted = timing.oracle(variant.structure, wide[1:], wide[0])
    pairs = [(y[sample], wanted)]
    if backward:
        found = (gradients[0][sample], *gradients[1:])
        pairs += zip(found, torch.autograd.grad(wanted, wide, dy[sample].double()), strict=True)
    return max(timing.relative_error(*pair) for pair in pairs)


def measure(job: Job, device: str, ceilings: timing.Ceilings, **limits: Any) -> list[dict[str, Any]]:
    """A row for every variant; `limits` are those of `timing.interleaved`."""
    found = variants(job, device)
    errors = [error(variant, backward=job.backward) for variant in found]
    for variant, off in zip(found, errors, strict=True):
        if not off < TOLERANCE[job.dtype]:
            raise ArithmeticError(f"{variant.name}, {variant.implementation}: relative error {off:.1e} in {job.title}")
    works = [variant.forward_backward if job.backward else variant.forward for variant in found]
    times = sample(works, job, device, **limits)
    dense = [sum(pair) / 2 for pair in zip(times[0], times[-1], strict=True)]
    of_width = {v.widths: t for v, t in zip(found, times, strict=True) if v.implementation == "nn.Linear"}
    of_width[job.d_in, job.d_out] = dense
    rows = []
    for variant, work, samples, off in zip(found, works, times, errors, strict=True):
        structure = variant.structure
        bound = partial(ceilings.bound, structure, job.tokens, variant.x.element_size(), backward=job.backward)
        seconds = statistics.median(samples)
        row = {
            **asdict(job),
            "structure": variant.name,
            "implementation": variant.implementation,
            "widths": variant.widths,
            "params": structure.params,
            "flops": structure.flops,
            "dense_flops": 2 * job.d_in * job.d_out,
            "rounds": len(samples),
            "ms": timing.spread([1e3 * sample for sample in samples]),
            "bound_share": bound() / seconds,
            "fused_share": bound(fused=True) / seconds,
            "peak_bytes": timing.peak_bytes(work, device),
            "saved_bytes": timing.saved_bytes(partial(variant.run, variant.x), variant.cores) if job.backward else None,
            "error": off,
        }
        if variant.widths == (job.d_in, job.d_out):
            widths = equal_flops_widths(structure)
            equal = [structure.flops / (2 * prod(widths)) * sample for sample in of_width[widths]]
            row["x_dense"] = timing.spread([a / b for a, b in zip(dense, samples, strict=True)])
            row["x_equal_flops"] = timing.spread([a / b for a, b in zip(equal, samples, strict=True)])
        rows.append(row)
    return rows


def sample(works: Sequence[Callable[[], Any]], job: Job, device: str, **limits: Any) -> list[list[float]]:
    """Seconds of a call of each, round by round."""
    short = device == "cpu" and job.tokens < ORACLE_TOKENS
    calls = [ceil(SHORTEST / timing.wall(work, device)) if short else 1 for work in works]
    repeated = {n: partial(_repeat, work, count) for n, (work, count) in enumerate(zip(works, calls, strict=True))}
    times = timing.interleaved(repeated, partial(timing.seconds, device=device), **limits)
    return [[total / count for total in times[n]] for n, count in enumerate(calls)]


def _repeat(work: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        work()


# ---- showing ---------------------------------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A table of one job: `auto` in full, the other implementations as speeds."""
    title = job_of(rows[0]).title
    first, last = rows[0]["ms"]["median"], rows[-1]["ms"]["median"]
    rounds = rows[0]["rounds"]
    table = Table(title=f"{title}: median of {rounds} interleaved rounds (p20-p80); dense, first and last of a round, "
                  f"{first:.3g} and {last:.3g} ms")  # fmt: skip
    table.add_column("structure", no_wrap=True)
    columns = "FLOPs", "ms", "(p20-p80)", "x dense", "(p20-p80)", "at its FLOPs", "FLOP rate", "bound", "fused bound"
    others = [name for name in OTHERS if any(row["implementation"] == name for row in rows)]
    for column in (*columns, "peak MB", "saved MB", *(f"{name} x" for name in others)):
        table.add_column(column, justify="right", no_wrap=True)
    speeds = {(row["structure"], row["implementation"]): row["x_dense"]["median"] for row in rows if "x_dense" in row}
    for row in rows:
        if row["implementation"] in others or (row["implementation"] == "nn.Linear" and row is not rows[0]):
            continue
        ms, speed, flops = row["ms"], row["x_dense"], row["flops"] / row["dense_flops"]
        table.add_row(
            row["structure"],
            f"{flops:.3f}",
            f"{ms['median']:.3g}",
            f"({ms['p20']:.3g}-{ms['p80']:.3g})",
            f"{speed['median']:.2f}",
            f"({speed['p20']:.2f}-{speed['p80']:.2f})",
            f"{row['x_equal_flops']['median']:.2f}",
            f"{flops * speed['median']:.2f}",
            f"{row['bound_share']:.2f}",
            f"{row['fused_share']:.2f}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            "" if row["saved_bytes"] is None else f"{row['saved_bytes'] / 1e6:.1f}",
            *(f"{speeds[key]:.2f}" if (key := (row["structure"], name)) in speeds else "" for name in others),
        )
    console.print(table)


LEGEND = """x dense: speed against nn.Linear of equal width; at its FLOPs: against nn.Linear of equal FLOPs (the nearest
multiple of 64 wide, time scaled to the same FLOPs); FLOPs, FLOP rate: of nn.Linear's; bound: share of the roofline of
strided products; fused bound: of one that keeps the middle in a cache (the only one that holds where the middle fits);
peak: allocated by one call; saved: kept for the backward pass, without parameters; the last columns: the speed of other
implementations against nn.Linear of equal width."""


def markdown(result: dict[str, Any], dtype: str) -> str:
    """The README's table: speed of `auto` against nn.Linear of equal width, for a dtype; nn.Linear's time in ms."""
    rows = [row for row in result["rows"] if row["dtype"] == dtype and "x_dense" in row]
    training = {job_of(row): None for row in rows if row["backward"]}
    decoding = {job_of(row): None for row in rows if row["tokens"] == 16}
    columns = [*sorted(training, key=lambda job: (job.d_in * job.d_out, job.d_in)), *decoding]
    cells = {(job_of(row), row["structure"], row["implementation"]): row for row in rows}
    titles = [f"{job.d_in} -> {job.d_out}" + ("" if job.backward else ", 16 tokens, forward") for job in columns]
    dense = [f"{cells[job, 'dense', 'nn.Linear']['ms']['median']:.3g} ms" for job in columns]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "--:|" * len(columns), f"| nn.Linear | {' | '.join(dense)} |"]
    for name in families(64):
        speeds = [f"{cells[job, name, 'auto']['x_dense']['median']:.2f}x" for job in columns]
        lines.append(f"| {name} | {' | '.join(speeds)} |")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], ceilings: dict[str, dict[str, float]], tokens: int, path: Path) -> None:
    """Time against FLOPs of forward + backward: nn.Linear's line, `auto` of every structure, and their rooflines."""
    chosen = [row for row in rows if row["backward"] and row["tokens"] == tokens and row["structure"] != "dense, last"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in chosen))
    figure = Figure(figsize=(5 * len(dtypes) + 2, 4.5), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        points: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for row in chosen:
            if row["dtype"] == dtype and row["implementation"] in ("nn.Linear", "auto"):
                points.setdefault(row["structure"], {}).setdefault(3 * tokens * row["flops"], []).append(row)
        for n, (name, by_flops) in enumerate(points.items()):
            flops = sorted(by_flops)
            ms = [statistics.median(row["ms"]["median"] for row in by_flops[value]) for value in flops]
            share = [statistics.median(row["bound_share"] for row in by_flops[value]) for value in flops]
            style = {"color": "black", "marker": "."} if name == "dense" else {"color": f"C{n}", "marker": "o"}
            axes.plot(flops, ms, label=name, linestyle="-" if name == "dense" else "none", **style)
            roofline = [a * b for a, b in zip(ms, share, strict=True)]
            axes.plot(flops, roofline, color=style["color"], linestyle="--" if name == "dense" else "none", marker="_")
        axes.plot([], [], "k--", marker="_", label="roofline of strided products")
        axes.set(xscale="log", yscale="log", xlabel="FLOPs, forward + backward", ylabel="ms")
        axes.set_title(f"{dtype}, {tokens} tokens; {ceilings[dtype]['rate'] / 1e12:.2g} TFLOP/s", fontsize="medium")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, format="png")


def job_of(row: dict[str, Any]) -> Job:
    return Job(**{field.name: row[field.name] for field in fields(Job)})


# ---- the run ---------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget", type=float, default=420, metavar="SECONDS", help="jobs that do not fit are left out"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON and the plot")
    parser.add_argument("--smoke", action="store_true", help="tiny layers, kept only if --out is given")
    options = parser.parse_args(argv)
    end, device, rounds = time.perf_counter() + options.budget, options.device, ROUNDS
    todo = jobs(device)
    if options.smoke:
        todo, rounds = [Job(64, 64, 256, "float32", True), Job(64, 256, 16, "bfloat16", False)], (2, 2)
    torch.manual_seed(0)
    measured = {
        dtype: timing.ceilings(device, getattr(torch, dtype), smoke=options.smoke)
        for dtype in dict.fromkeys(job.dtype for job in todo)
    }
    for dtype, found in measured.items():
        rates = f"{found.rate / 1e12:.3g} TFLOP/s, {found.bandwidth / 1e9:.3g} GB/s"
        print(f"# ceilings, {dtype}: {rates}, {1e6 * found.call:.3g} us a call")
    setting = {"device": device, "threads": torch.get_num_threads(), "tokens": todo[0].tokens, "budget": options.budget}
    content = {"setting": setting, "ceilings": {dtype: asdict(found) for dtype, found in measured.items()}}
    keeps = not options.smoke or options.out != RESULTS
    results: list[list[dict[str, Any]]] = []
    for n, job in enumerate(todo):
        now = time.perf_counter()
        left = end - now
        if left < job.flops * max((least(rows) for rows in results if rows[0]["tokens"] == job.tokens), default=0):
            print(f"# left out: {job.title}")
            continue
        until = now + max(3.0, left * job.flops / sum(job.flops for job in todo[n:]))
        results.append(measure(job, device, measured[job.dtype], rounds=rounds, until=until, end=end))
        for row in results[-1]:
            print(json.dumps(row, allow_nan=False), flush=True)
        if keeps:
            save_json(options.out / "layer.json", **content, rows=[row for rows in results for row in rows])
    console = Console(width=190)
    for rows in results:
        show(rows, console)
    print(LEGEND)
    flat = [row for rows in results for row in rows]
    if keeps and flat:
        plot(flat, content["ceilings"], todo[0].tokens, options.out / "layer.png")
    return flat


def least(rows: Sequence[dict[str, Any]]) -> float:
    """Seconds that a job takes with the least number of rounds, for each FLOP of its dense layer."""
    return (ROUNDS[0] + 3) * sum(row["ms"]["median"] for row in rows) / 1e3 / job_of(rows[0]).flops


if __name__ == "__main__":
    main()
