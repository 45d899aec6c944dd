"""Tokens a second and memory of whole models: the shapes of GPT-2 small and ViT-S/16, dense and
converted.

    python -m benchmarks.speed.model                      # 5 minutes at most, results/model.json,
                                                          # on a GPU results/model_gpu.json
    python -m benchmarks.speed.model --budget 120 --out out
    python -m benchmarks.speed.model --smoke              # seconds, tiny shapes

Random weights of transformers' models, dropout off; float32 on a CPU, bfloat16 on a GPU. "mlp"
converts the MLPs, "all" every linear layer but the head, "all and head" GPT-2's head too, which is
then not tied to the embedding and trains by `structlin.linear_cross_entropy`; "loss in chunks" is
dense with that loss. Both take GELU as one operation. "none" takes the layers of "all" away and
shows what is left of a step: the head, attention, norms, activations, the optimizer. Training is
forward + backward + AdamW; prefill and images are one forward pass; decode is one token after a
context, with the cache. "compiled" means torch.compile of every block, checked against the model
before. The variants take turns; speeds are ratios to the dense model within a round, of the time
that a user waits. Jobs are in order of importance, compiled ones last; what does not fit the budget
is left out and said.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property, partial

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.harness import report, timing
from benchmarks.harness.race import Bench, Heat, Row, race
from benchmarks.harness.statistics import one, select
from benchmarks.harness.timing import spread

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}  # inside every vocabulary
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = "GPT-2 small", "ViT-S/16"
TINY_MODELS = "GPT-2, tiny", "ViT, tiny"  # of a smoke run
CHUNKED = "dense, loss in chunks"
WITH_HEAD = "BTT r=1, all and head"
# largest difference over largest logit
COMPILED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def variants(shape: "Shape") -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Name -> what makes it of the dense model, in place; width 384 does not regroup 16 blocks."""
    width = shape.width
    monarch = structlin.Monarch(blocks=16 if width % 256 == 0 else 8)
    chosen = {
        "BTT r=1": structlin.BTT(rank=1),
        f"Monarch {monarch.blocks}": monarch,
        "low-rank d/8": structlin.LowRank(rank=width // 8),
    }
    converted = {}
    for name, family in chosen.items():
        convert = partial(structlin.convert, structure=family)
        converted[f"{name}, mlp"] = partial(convert, include="ffn")
        converted[f"{name}, all"] = convert
    heads = {CHUNKED: fuse_gelu, WITH_HEAD: with_head} if shape.text else {}
    return {"dense": lambda model: model, **heads, **converted, "none": without_linear}


def fuse_gelu(model: nn.Module) -> nn.Module:
    """GPT-2, in place, with its GELU as one operation instead of seven."""
    for block in blocks(model):
        block.mlp.act = nn.GELU(approximate="tanh")
    return model


def with_head(model: nn.Module) -> nn.Module:
    """GPT-2, in place, with BTT in all linear layers and in a head of its own."""
    where = {"include": ("*", "head"), "untie": True}
    return fuse_gelu(structlin.convert(model, structlin.BTT(rank=1), **where))


class Absent(nn.Module):
    """A linear layer of no FLOPs: every output is the first input."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1].expand(*x.shape[:-1], self.out_features)


def without_linear(model: nn.Module) -> nn.Module:
    """The model, in place, without the layers that "all" converts."""
    for decision in structlin.plan(model, structlin.Dense()).decisions:
        if decision.structure is not None:
            out_features = decision.layer.out_features
            model.set_submodule(decision.layer.name, Absent(out_features))
    return model


# ---- models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model's class and sizes, and how much of it a job runs at once."""

    name: str
    width: int
    layers: int
    batch: int
    context: int  #: tokens of a text; patches of an image, and the class token
    classes: int  #: of the head: vocabulary or labels
    device: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def text(self) -> bool:
        return self.name.startswith("GPT")

    def build(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

        torch.manual_seed(0)
        if self.text:
            sizes = {"n_embd": self.width, "n_layer": self.layers, "n_head": self.width // 64}
            options = {**NO_DROPOUT, **TOKENS, "use_cache": False}
            model = GPT2LMHeadModel(GPT2Config(**sizes, **options, vocab_size=self.classes))
        else:
            sizes = {"hidden_size": self.width, "intermediate_size": 4 * self.width}
            sizes |= {"num_hidden_layers": self.layers, "num_attention_heads": self.width // 64}
            model = ViTForImageClassification(ViTConfig(**sizes, num_labels=self.classes))
        return model.to(self.device, self.dtype)

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        if self.text:
            size = (self.batch, self.context)
            return {"input_ids": torch.randint(self.classes, size, device=self.device)}
        images = torch.randn(self.batch, 3, 224, 224, device=self.device, dtype=self.dtype)
        return {"pixel_values": images}

    @cached_property
    def labels(self) -> Tensor:
        if self.text:
            return self.inputs["input_ids"].roll(-1, 1).flatten()
        return torch.randint(self.classes, (self.batch,), device=self.device)


@cache
def shape_of(name: str, device: str) -> Shape:
    texts, length, images = (8, 1024, 128) if device == "cuda" else (4, 128, 4)
    sizes = {
        "GPT-2 small": (768, 12, texts, length, 50257),
        "ViT-S/16": (384, 12, images, 197, 1000),
        "GPT-2, tiny": (256, 1, 1, 8, 96),
        "ViT, tiny": (128, 1, 1, 197, 5),
    }
    return Shape(name, *sizes[name], device)


@cache
def models(shape: Shape) -> dict[str, nn.Module]:
    """Name -> the variant; a tiny shape has few of them."""
    dense = shape.build()
    few = ["dense", CHUNKED, WITH_HEAD, "BTT r=1, mlp", "none"]
    models_by_name = {}
    for name, make in variants(shape).items():
        if name in few or shape.name not in TINY_MODELS:
            models_by_name[name] = make(copy.deepcopy(dense))
    return models_by_name


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The transformer blocks: the longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


# ---- jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    model: str
    task: str  #: "training", "prefill", "decode" or "images"
    compiled: bool

    @property
    def title(self) -> str:
        title = f"{self.model}, {self.task}"
        return f"{title}, compiled" if self.compiled else title


def jobs(device: str, smoke: bool) -> list[Job]:
    gpt, vit = TINY_MODELS if smoke else MODELS
    tasks = [(gpt, "training"), (gpt, "prefill"), (gpt, "decode")]
    tasks += [(vit, "training"), (vit, "images")]
    all_jobs = [Job(*task, compiled=False) for task in tasks]
    all_jobs += [Job(*tasks[n], compiled=True) for n in (1, 4, 0, 3)]
    return all_jobs[:6] if smoke else all_jobs


def training(model: nn.Module, shape: Shape, in_chunks: bool = False) -> Callable[[], Tensor]:
    """A step; the optimizer's state is made by the first."""
    optimizer = torch.optim.AdamW(
        structlin.param_groups(model, lr=1e-4, weight_decay=0.0), fused=True
    )

    def measure_loss() -> Tensor:
        if in_chunks:
            hidden = model.transformer(**shape.inputs).last_hidden_state.flatten(0, 1)
            return structlin.linear_cross_entropy(hidden, model.lm_head, shape.labels)
        return F.cross_entropy(model(**shape.inputs).logits.flatten(0, -2), shape.labels)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = measure_loss()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@torch.no_grad()
def inference(model: nn.Module, shape: Shape) -> Tensor:
    return model(**shape.inputs).logits


def decode(model: nn.Module, shape: Shape) -> Callable[[], Tensor]:
    """The logits of one more token of one text; the cache is cut back to the context after it."""
    text = shape.inputs["input_ids"][:1]
    with torch.no_grad():
        cache = model(input_ids=text, use_cache=True).past_key_values

    @torch.no_grad()
    def step() -> Tensor:
        logits = model(input_ids=text[:, -1:], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def work_of(name: str, model: nn.Module, shape: Shape, task: str) -> Callable[[], Tensor]:
    if task == "training":
        return training(model.train(), shape, in_chunks=name in (CHUNKED, WITH_HEAD))
    model.eval()
    if task == "decode":
        return decode(model, shape)
    return partial(inference, model, shape)


def compile_blocks(model: nn.Module, shape: Shape) -> None:
    """In place.

    Raises:
        ArithmeticError: the compiled model's logits are not the model's.
    """
    before = inference(model.eval(), shape)
    for block in blocks(model):
        block.compile()
    error = ((inference(model, shape) - before).abs().max() / before.abs().max()).item()
    if not error < COMPILED_ERROR[shape.dtype]:
        raise ArithmeticError(f"{shape.name}, compiled: the logits differ by {error:.1e}")


def measure(job: Job, heat: Heat) -> list[Row]:
    """A row for every model that is ready, and compiled, before the time is up."""
    shape = shape_of(job.model, heat.device)
    works: dict[str, Callable[[], Tensor]] = {}
    for name, model in models(shape).items():
        if name == CHUNKED and job.task != "training":
            continue
        if works and time.perf_counter() > heat.end:
            print(f"# left out: {job.title}, {name}")
            continue
        if job.compiled:
            compile_blocks(model, shape)
        works[name] = work_of(name, model, shape, job.task)
        # the first call: memory, optimizer state, compilation
        if not torch.isfinite(works[name]()).all():
            raise ArithmeticError(f"{job.title}, {name}: the result is not finite")
    times = race(works, heat, last="dense, last", clock=timing.wall)
    tokens = 1 if job.task == "decode" else shape.batch * shape.context
    rows = []
    for name, samples in times.seconds.items():
        variant = name.removesuffix(", last")
        model = models(shape)[variant]
        work = works[variant]
        model.zero_grad()  # so that a step's gradients count in its peak
        row = {
            "variant": name,
            "tokens": tokens,
            "context": shape.context,
            "rounds": len(samples),
            "tokens_per_s": spread([tokens / sample for sample in samples]),
            "x_dense": times.speed(name),
            "params": sum(parameter.numel() for parameter in model.parameters()),
            "param_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            # decoding only swaps the cache for a longer one, and a profiler does not see what was
            # there before it
            "peak_bytes": None if job.task == "decode" else timing.peak_bytes(work, heat.device),
        }
        rows.append(asdict(job) | row)
        model.zero_grad()
    return rows


# ---- showing -------------------------------------------------------------------------------------


def job_of(row: Row) -> Job:
    return Job(**{field.name: row[field.name] for field in fields(Job)})


def show(rows: Sequence[Row]) -> Table:
    opening = rows[0]["tokens_per_s"]["median"]
    closing = rows[-1]["tokens_per_s"]["median"]
    title = (
        f"{job_of(rows[0]).title}, tokens at once: {rows[0]['tokens']}, context "
        f"{rows[0]['context']}: median of {rows[0]['rounds']} interleaved rounds (p20-p80); "
        f"dense, first and last of a round, {opening:,.0f} and {closing:,.0f} tokens/s"
    )
    lines = []
    for row in rows[:-1]:
        peak = row["peak_bytes"]
        lines.append(
            {
                "model": row["variant"],
                "parameters": f"{row['params']:,}",
                "MB": f"{row['param_bytes'] / 1e6:.0f}",
                "tokens/s": report.with_spread(row["tokens_per_s"], ",.0f"),
                "x dense": report.with_spread(row["x_dense"], ".2f"),
                "peak MB on top": "" if peak is None else f"{peak / 1e6:.1f}",
            }
        )
    return report.grid(title, lines)


LEGEND = """x dense: speed against the dense model; peak: allocated by one step or call, on top of
the parameters, and in training of the optimizer's state (twice the parameters)."""


def markdown(result: Row) -> str:
    """The table of docs/speed.md: speed against the dense model for every job, not compiled."""
    rows = select(result["rows"], compiled=False)
    cells = {}
    for row in select(rows, variant="dense"):
        cells["dense", job_of(row).title] = f"{row['tokens_per_s']['median']:,.0f} tokens/s"
    for row in rows:
        if row["variant"] not in ("dense", "dense, last"):
            cells[row["variant"], job_of(row).title] = f"{row['x_dense']['median']:.2f}x"
    return report.pivot(cells)


def numbers(result: Row) -> dict[str, str]:
    """Whole models, not compiled; a share is of the speed of the model without linear layers. And
    what compiling makes of BTT's speed against dense."""
    plain = select(result["rows"], compiled=False)
    speeds = {(row["variant"], row["model"], row["task"]): row["x_dense"] for row in plain}
    shares = []
    for (variant, name, task), speed in speeds.items():
        if variant == "BTT r=1, all":
            shares.append(speed["median"] / speeds["none", name, task]["median"])
    compiled = []
    for row in select(result["rows"], variant="BTT r=1, all", compiled=True):
        speed = speeds[row["variant"], row["model"], row["task"]]
        compiled.append(row["x_dense"]["median"] / speed["median"])
    everywhere = speeds["BTT r=1, all", "GPT-2 small", "training"]
    rounds = [row["rounds"] for row in plain if row["variant"] == "BTT r=1, all"]
    return {
        **report.least_and_most("model.share_", shares, ".2f"),
        **report.least_and_most("model.compiled_", compiled, ".2f"),
        **report.least_and_most("model.head_", beside_chunks(result), ".1f"),
        **report.least_and_most("model.rounds_", rounds, "d"),
        "model.spread_low": f"{everywhere['p20']:.1f}",
        "model.spread_high": f"{everywhere['p80']:.1f}",
        "model.gpt_training": f"{everywhere['median']:.1f}",
        "model.day": report.day(result),
    }


def beside_chunks(result: Row) -> list[float]:
    """How many times as fast GPT-2 trains with BTT everywhere as dense that has the loss in chunks
    and GELU in one operation too: by the medians of ratios in a round, and by those of tokens per
    second; compiled and not."""
    ratios = []
    for compiled in (False, True):
        rows = select(result["rows"], model="GPT-2 small", task="training", compiled=compiled)
        btt = one(rows, variant=WITH_HEAD)
        dense = one(rows, variant=CHUNKED)
        for key in ("x_dense", "tokens_per_s"):
            ratios.append(btt[key]["median"] / dense[key]["median"])
    return ratios


BENCH = Bench(
    name="model",
    about=__doc__,
    numbers=numbers,
    tables={"models": markdown},
    budget=300,
    jobs=jobs,
    measure=measure,
    table=show,
    rounds=(3, 15),
    keeps_pages=False,
    setting=lambda device, smoke: {
        "shapes": [asdict(shape_of(name, device)) for name in (TINY_MODELS if smoke else MODELS)]
    },
    below=lambda result: LEGEND,
)

if __name__ == "__main__":
    BENCH.main()
