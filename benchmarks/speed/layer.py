"""How fast is a structured layer? Time, memory and their bounds, against nn.Linear of equal width
and of equal FLOPs.

    python -m benchmarks.speed.layer                      # 15 minutes at most: results/layer.json,
                                                          # on a GPU results/layer_gpu.json
    python -m benchmarks.speed.layer --budget 60 --out out
    python -m benchmarks.speed.layer --smoke              # seconds

The protocol is that of `benchmarks.harness.race`; data are random. On a CPU the process keeps the
memory that it frees, as with the jemalloc or tcmalloc that PyTorch's tuning guide advises: glibc
returns much of it to the kernel, and which of two layers then waits for fresh pages is an accident
(`timing.keep_pages`). With few tokens on a CPU a sample is calls back to back for 2 ms, caches
warm. On a GPU times are the device's, caches cold (`timing.seconds`), and beside them what a user
waits for one call. Implementations and options: `benchmarks.speed.variants`; compiling is no part
of a sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import product
from math import prod
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.harness import report, timing
from benchmarks.harness.race import ORACLE_TOKENS, Bench, Heat, Row, Times, Variant, race
from benchmarks.harness.record import read
from benchmarks.harness.statistics import one, select, values
from benchmarks.harness.timing import Key, Work, ratio
from benchmarks.speed.variants import SMOKE, TOLERANCE, Job, equal_flops_widths, variants

ROUNDS = (3, 25)
SAMPLE_SECONDS = 2e-3  # at least, with few tokens on a CPU
WAITS = 5  # samples of what a user waits for a call on a GPU
FEW = 1, 4, 16  # tokens, forward, in every dtype
FEW_AT = 512, 1024, 2048  # the square widths
XEON = "layer_xeon"  # the kept result of another machine
DTYPES = "float32", "bfloat16"  # that pages show
# the implementations beside nn.Linear and auto, shown by their speed alone
OTHERS = ("loop", "strided", "merged", "compiled")


def jobs(device: str, smoke: bool = False) -> list[Job]:
    """In order of importance: what does not fit the budget is dropped from the end."""
    if smoke:
        tiny = Job(SMOKE, SMOKE, 256, "float32", True)
        wide = Job(SMOKE, 4 * SMOKE, 16, "bfloat16", False)
        return [tiny, wide, Job(SMOKE, SMOKE, 4, "float16", False, brief=True)]
    if device == "cuda":
        tokens = 16384
        dtype = "bfloat16"
        second_dtype = "float32"
        widths = (4096, 1024, 2048, 768, 8192)
        ffn_widths = (4096, 1024)
        decoding_widths = (4096,)
    else:
        tokens = 4096
        dtype = "float32"
        second_dtype = "bfloat16"
        widths = (1024, 2048, 512)
        ffn_widths = (1024,)
        decoding_widths = (1024,)
    square = [Job(d, d, tokens, dtype, True) for d in widths]
    decoding = []
    for decoding_dtype, d in product((dtype, second_dtype), decoding_widths):
        decoding.append(Job(d, d, 16, decoding_dtype, False))
    up_down = []
    for d in ffn_widths:
        up_down.append(Job(d, 4 * d, tokens, dtype, True))
        up_down.append(Job(4 * d, d, tokens, dtype, True))
    second = [replace(job, dtype=second_dtype) for job in square]
    few = []
    for few_dtype, d, count in product(TOLERANCE, FEW_AT, FEW):
        job = Job(d, d, count, few_dtype, False)
        if job not in decoding:
            few.append(replace(job, brief=True))
    training = [*square[:2], *decoding, *second[:2], *few, *up_down, *square[2:], *second[2:]]
    inference = [replace(job, backward=False) for job in training if job.backward]
    return [*training, *inference, *(replace(job, dtype=second_dtype) for job in up_down)]


# ---- measuring -----------------------------------------------------------------------------------


def race_layers(job: Job, layers: Sequence[Variant], heat: Heat) -> Times[Variant]:
    """The race of a job's layers; the first is nn.Linear."""
    is_short = heat.device == "cpu" and job.tokens < ORACLE_TOKENS
    return race(
        {variant: variant.work for variant in layers},
        heat,
        last=replace(layers[0], name="dense, last"),
        errors={variant: variant.error for variant in layers},
        tolerance=TOLERANCE[job.dtype],
        least=SAMPLE_SECONDS if is_short else 0.0,
    )


def measure(job: Job, heat: Heat) -> list[Row]:
    """A row for each of the job's variants; only brief jobs have no bounds, nor nn.Linear of equal
    FLOPs."""
    times = race_layers(job, variants(job, heat.device, heat.end), heat)
    works = {variant: variant.work for variant in times.seconds}
    waits = user_waits(works, heat.device) if heat.device == "cuda" else {}
    rows = []
    for variant in times.seconds:
        row = asdict(job) | layer_row(variant, times, heat, job) | compared(variant, times, job)
        if waits:
            row["wall_ms"] = waits[variant]
        rows.append(row)
    return rows


def layer_row(variant: Variant, times: Times[Variant], heat: Heat, job: Job) -> Row:
    """What a variant takes, in seconds, memory and shares of its bounds."""
    structure = variant.structure
    forward = partial(variant.run, variant.x)
    row = {
        "structure": variant.name,
        "implementation": variant.title,
        "widths": variant.widths,
        "params": structure.params,
        "flops": structure.flops,
        "dense_flops": 2 * job.d_in * job.d_out,
        **times.row(variant),
        "peak_bytes": timing.peak_bytes(variant.work, heat.device),
        "saved_bytes": timing.saved_bytes(forward, variant.parameters) if job.backward else None,
    }
    if heat.ceilings is not None:
        size = variant.x.element_size()
        seconds = median(times.seconds[variant])
        bound = partial(heat.ceilings.bound, structure, job.tokens, size, backward=job.backward)
        row |= {"bound_share": bound() / seconds, "fused_share": bound(fused=True) / seconds}
    return row


def compared(variant: Variant, times: Times[Variant], job: Job) -> Row:
    """The speed of a layer of the job's width against nn.Linear of equal width, and of equal FLOPs
    unless the job is brief; what an option costs."""
    samples = times.seconds[variant]
    widths = (job.d_in, job.d_out)
    row: Row = {}
    if variant.widths == widths:
        twin = "nn.Linear + bias" if variant.option == "bias" else "nn.Linear"
        row["x_dense"] = ratio(samples_of(times, "dense", twin, widths), samples)
        if not job.brief:
            equal_widths = equal_flops_widths(variant.structure)
            scale = variant.structure.flops / (2 * prod(equal_widths))  # to the same FLOPs
            dense = samples_of(times, "dense", "nn.Linear", equal_widths)
            scaled = [scale * sample for sample in dense]
            row["x_equal_flops"] = ratio(scaled, samples)
    if variant.option:
        plain = samples_of(times, variant.name, variant.implementation, widths)
        row["over_plain"] = ratio(samples, plain)
    return row


def samples_of(
    times: Times[Variant], name: str, title: str, widths: tuple[int, int]
) -> list[float]:
    """The samples of a variant; of the reference the means of both in a round."""
    reference = next(iter(times.seconds))
    wanted = (name, title, widths)
    (variant,) = (v for v in times.seconds if (v.name, v.title, v.widths) == wanted)
    return times.reference if variant is reference else times.seconds[variant]


def user_waits(works: Mapping[Key, Work], device: str) -> dict[Key, dict[str, float]]:
    """Milliseconds from one call of each to its result, caches warm: with few tokens, what
    enqueuing takes."""
    waited = race(works, Heat(device, (WAITS, WAITS)), clock=timing.wall)
    return {key: waited.ms(key) for key in works}


# ---- showing -------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> Table | None:
    """A table of one job: `auto` in full, the other implementations as speeds."""
    if rows[0]["brief"]:
        return None
    title = (
        f"{job_of(rows[0]).title}: median of {rows[0]['rounds']} interleaved rounds (p20-p80); "
        f"dense, first and last of a round, {rows[0]['ms']['median']:.3g} and "
        f"{rows[-1]['ms']['median']:.3g} ms"
    )
    speeds: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["implementation"] in OTHERS:
            cell = f"{row['x_dense']['median']:.2f}"
            speeds.setdefault(row["structure"], {})[row["implementation"]] = cell
    lines = [cells(rows[0])]
    for row in rows[1:]:
        if row["implementation"] not in (*OTHERS, "nn.Linear"):
            line = cells(row)
            if row["implementation"] == "auto":
                line |= speeds.get(row["structure"], {})
            lines.append(line)
    return report.grid(title, lines)


def cells(row: Row) -> dict[str, str]:
    """A row as text."""
    speed = row["x_dense"]
    flops = row["flops"] / row["dense_flops"]
    saved = row["saved_bytes"]
    texts = {
        "structure": row["structure"] + "".join(row["implementation"].partition(" + ")[1:]),
        "FLOP rate": f"{flops * speed['median']:.2f}",
        "FLOPs": f"{flops:.3f}",
        "ms": report.with_spread(row["ms"], ".3g"),
        "x dense": report.with_spread(speed, ".2f"),
        "at its FLOPs": f"{row['x_equal_flops']['median']:.2f}",
        "bound": f"{row['bound_share']:.2f}",
        "fused": f"{row['fused_share']:.2f}",
        "peak MB": f"{row['peak_bytes'] / 1e6:.1f}",
        "saved MB": "" if saved is None else f"{saved / 1e6:.1f}",
    }
    if "wall_ms" in row:
        texts["wall ms"] = f"{row['wall_ms']['median']:.3g}"
    if "over_plain" in row:
        texts["/ plain"] = f"{row['over_plain']['median']:.2f}"
    return texts


LEGEND = """x dense: speed against nn.Linear of equal width; at its FLOPs: against nn.Linear of
equal FLOPs (the nearest multiple of 64 wide, time scaled to the same FLOPs); FLOPs, FLOP rate: of
nn.Linear's; bound: share of the roofline of strided products; fused: of one that keeps the middle
in a cache (the only one that holds where the middle fits); peak: allocated by one call; saved: kept
for the backward pass, without parameters; / plain: time over the same without the option; with
bias, x dense is against nn.Linear with bias; wall: one call and its result, caches warm; the last
columns: the speed of other implementations against nn.Linear of equal width."""


def markdown(result: Row, dtype: str) -> str:
    """The table of docs/speed.md: speed of `auto` against nn.Linear of equal width, for a dtype,
    and in brackets its FLOPs a second as a share of nn.Linear's; nn.Linear's time in ms. Forward
    and backward of many tokens."""
    rows = [row for row in select(result["rows"], dtype=dtype, backward=True) if "x_dense" in row]
    rows.sort(key=lambda row: (row["d_in"] * row["d_out"], row["d_in"]))
    cells = {}
    for row in rows:
        title = f"{row['d_in']} -> {row['d_out']}"
        if row["implementation"] == "auto":
            cells[row["structure"], title] = _speed(row)
        elif row["structure"] == "dense" and row["implementation"] == "nn.Linear":
            cells["nn.Linear", title] = f"{row['ms']['median']:.3g} ms"
    return report.pivot(cells)


def _speed(row: Row) -> str:
    speed = row["x_dense"]["median"]
    return f"{speed:.2f}x ({speed * row['flops'] / row['dense_flops']:.0%})"


def few_tokens(result: Row, dtypes: Iterable[str] = TOLERANCE) -> str:
    """The table of docs/speed.md: a forward pass of `FEW` tokens, the lowest speed against
    nn.Linear of all widths."""
    rows = [
        row
        for row in select(result["rows"], implementation="auto", backward=False)
        if row["tokens"] in FEW and row["d_in"] == row["d_out"]
    ]
    columns = {(dtype, n): f"{dtype}, {n}" for dtype, n in product(dtypes, FEW)}
    cells: dict[tuple[str, str], str] = {}
    for name, (dtype, n) in product(values(rows, "structure"), columns):
        speeds = [
            row["x_dense"]["median"] for row in select(rows, structure=name, dtype=dtype, tokens=n)
        ]
        if speeds:
            least = min(speeds)
            cells[name, columns[dtype, n]] = f"{least:.2f}x"
    return report.pivot(cells, [*columns.values()])


def below(result: Row) -> str:
    if any(row["brief"] for row in result["rows"]):
        return f"{LEGEND}\n\n{few_tokens(result)}"
    return LEGEND


def job_of(row: Row) -> Job:
    """Results that were kept before there were brief jobs say nothing of it."""
    return Job(**{field.name: row[field.name] for field in fields(Job) if field.name in row})


# ---- the run -------------------------------------------------------------------------------------


def weight(job: Job, device: str) -> float:
    """How long a round takes, relatively: dense's FLOPs, and twice as many with merged."""
    return job.flops * (2 if device == "cpu" and job.merges else 1)


def least_seconds(job: Job, device: str, heats: Sequence[list[Row]]) -> float:
    """What a job's least number of rounds takes, judged by the jobs of as many tokens before it."""
    slowest = 0.0  # seconds of a round, for each unit of `weight`
    for rows in heats:
        if rows[0]["tokens"] == job.tokens:
            seconds = sum(row["ms"]["median"] for row in rows) / 1e3
            slowest = max(slowest, seconds / weight(job_of(rows[0]), device))
    return (ROUNDS[0] + 3) * weight(job, device) * slowest


def square(result: Row, **wanted: Any) -> list[Row]:
    """The rows of square layers as they run by default, that have what is `wanted`."""
    rows = select(result["rows"], implementation="auto", **wanted)
    return [row for row in rows if row["d_in"] == row["d_out"]]


def numbers(epyc: Row) -> dict[str, str]:
    """BTT of rank 1 at width 1024 with 4096 tokens, and forward passes of few tokens; when and in
    how many rounds layers were measured."""
    btt = {"structure": "BTT r=1", "d_in": 1024, "tokens": 4096, "backward": True}
    btt_speeds = []
    texts = {}
    for machine, result in (("epyc", epyc), ("xeon", read(XEON))):
        for dtype in DTYPES:
            (row,) = square(result, dtype=dtype, **btt)
            btt_speeds.append(row["x_dense"]["median"])
            texts[f"roofline.{machine}_{dtype}"] = f"{row['fused_share']:.2f}"
            rows = square(result, dtype=dtype, backward=False)
            speeds = [row["x_dense"]["median"] for row in rows if row["tokens"] in FEW]
            texts["few.layers"] = str(len(speeds))
            texts[f"few.{machine}_slower_{dtype}"] = str(sum(speed < 1 for speed in speeds))
            if machine == "xeon" and dtype == "float32":
                texts["few.xeon_least"] = f"{min(speeds):.2f}"
        texts[f"{machine}.day"] = report.day(result)
    many = square(epyc, tokens=4096, backward=True)
    rounds = [row["rounds"] for row in many if row["dtype"] in DTYPES]
    texts["front.slowest"] = f"{min(btt_speeds):.1f}"
    texts["front.fastest"] = f"{max(btt_speeds):.1f}"
    return texts | report.least_and_most("front.rounds_", rounds, "d")


def front(result: Row) -> str:
    """The README's table: speeds against nn.Linear, forward and backward of 4096 tokens."""
    structures = ("BTT r=1", "BTT r=4", "Monarch 16", "low-rank d/8")
    wanted = {"implementation": "auto", "tokens": 4096, "backward": True}
    lines = []
    for d_in, d_out, dtype in (
        (1024, 1024, "float32"),
        (1024, 4096, "float32"),
        (1024, 1024, "bfloat16"),
    ):
        layer = wanted | {"d_in": d_in, "d_out": d_out, "dtype": dtype}
        rows = [one(result["rows"], structure=name, **layer) for name in structures]
        shown = [f"{row['x_dense']['median']:.1f}x" for row in rows]
        lines.append([f"{d_in} -> {d_out}, {dtype}", *shown])
    return report.table(["", *structures], lines)


TABLES = {
    "speed": front,
    "float32": partial(markdown, dtype="float32"),
    "bfloat16": partial(markdown, dtype="bfloat16"),
    "few tokens Xeon": lambda result: few_tokens(read(XEON), DTYPES),
}


BENCH = Bench(
    name="layer",
    about=__doc__,
    numbers=numbers,
    tables=TABLES,
    budget=900,
    jobs=jobs,
    measure=measure,
    table=show,
    rounds=ROUNDS,
    ceilings=lambda job: None if job.brief else job.dtype,
    weight=weight,
    least=least_seconds,
    setting=lambda device, smoke: {"tokens": jobs(device, smoke)[0].tokens},
    below=below,
)

if __name__ == "__main__":
    BENCH.main()
