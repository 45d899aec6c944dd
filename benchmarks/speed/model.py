"""Tokens a second and memory of whole models: the shapes of GPT-2 small and ViT-S/16, dense and
converted.

    python -m benchmarks.speed.model                      # 5 minutes at most, results/model.json
    python -m benchmarks.speed.model --budget 120 --out out
    python -m benchmarks.speed.model --smoke              # seconds, tiny shapes

Random weights of transformers' models, dropout off; float32 on a CPU, bfloat16 on a GPU. "mlp"
converts the MLPs, "all" every linear layer but the head; "none" takes those layers away and shows
what is left of a step: the head, attention, norms, activations, the optimizer. Training is forward
+ backward + AdamW; prefill and images are one forward pass; decode is one token after a context,
with the cache. "compiled" means torch.compile of every block, checked against the model before. The
variants take turns; speeds are ratios to the dense model within a round, of the time that a user
waits. Jobs are in order of importance, compiled ones last; what does not fit the budget is left out
and said.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.harness import timing
from benchmarks.harness.record import RESULTS, save_json

ROUNDS = (3, 15)
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}  # inside every vocabulary
COMPILED_ERROR = {
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
}  # largest difference over largest logit


def variants(width: int) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Name -> what makes it of the dense model, in place; width 384 does not regroup 16 blocks."""
    monarch = structlin.Monarch(blocks=16 if width % 256 == 0 else 8)
    chosen = {
        "BTT r=1": structlin.BTT(rank=1),
        f"Monarch {monarch.blocks}": monarch,
        "low-rank d/8": structlin.LowRank(rank=width // 8),
    }
    where = {"mlp": "ffn", "all": None}
    converted = {
        f"{name}, {short}": partial(structlin.convert, structure=family, include=include)
        for name, family in chosen.items()
        for short, include in where.items()
    }
    return {"dense": lambda model: model, **converted, "none": without_linear}


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


@dataclass
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
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = GPT2LMHeadModel(
                GPT2Config(**sizes, **dropout, vocab_size=self.classes, use_cache=False, **TOKENS)
            )
        else:
            sizes = {
                "hidden_size": self.width,
                "intermediate_size": 4 * self.width,
                "num_hidden_layers": self.layers,
            }
            model = ViTForImageClassification(
                ViTConfig(**sizes, num_attention_heads=self.width // 64, num_labels=self.classes)
            )
        return model.to(self.device, self.dtype)

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        if self.text:
            return {
                "input_ids": torch.randint(
                    self.classes, (self.batch, self.context), device=self.device
                )
            }
        return {
            "pixel_values": torch.randn(
                self.batch, 3, 224, 224, device=self.device, dtype=self.dtype
            )
        }

    @cached_property
    def labels(self) -> Tensor:
        if self.text:
            return self.inputs["input_ids"].roll(-1, 1).flatten()
        return torch.randint(self.classes, (self.batch,), device=self.device)


def shapes(device: str, *, smoke: bool) -> list[Shape]:
    if smoke:
        return [
            Shape("GPT-2, tiny", 256, 1, 1, 8, 96, device),
            Shape("ViT, tiny", 128, 1, 1, 197, 5, device),
        ]
    large = device == "cuda"
    return [
        Shape("GPT-2 small", 768, 12, 8 if large else 1, 1024 if large else 128, 50257, device),
        Shape("ViT-S/16", 384, 12, 128 if large else 2, 197, 1000, device),
    ]


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The transformer blocks: the longest ModuleList."""
    return max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)


# ---- jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    model: str
    task: str  #: "training", "prefill", "decode" or "images"
    compiled: bool

    @property
    def title(self) -> str:
        return f"{self.model}, {self.task}" + (", compiled" if self.compiled else "")


def jobs(models: Sequence[Shape]) -> list[Job]:
    gpt, vit = (shape.name for shape in models)
    eager = [Job(gpt, "training", False), Job(gpt, "prefill", False), Job(gpt, "decode", False)]
    eager += [Job(vit, "training", False), Job(vit, "images", False)]
    return [
        *eager,
        Job(gpt, "prefill", True),
        Job(vit, "images", True),
        Job(gpt, "training", True),
        Job(vit, "training", True),
    ]


def training(model: nn.Module, shape: Shape) -> Callable[[], Tensor]:
    """A step; the optimizer's state is made by the first."""
    optimizer = torch.optim.AdamW(structlin.param_groups(model, lr=1e-4), fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**shape.inputs).logits.flatten(0, -2), shape.labels)
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


def work_of(model: nn.Module, shape: Shape, task: str) -> Callable[[], Tensor]:
    if task == "training":
        return training(model.train(), shape)
    return (
        decode(model.eval(), shape) if task == "decode" else partial(inference, model.eval(), shape)
    )


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


def measure(
    job: Job, shape: Shape, models: dict[str, nn.Module], end: float, **limits: Any
) -> list[dict[str, Any]]:
    """A row for every model that is ready, and compiled, before `end`; `limits` are those of
    `timing.interleaved`."""
    works: dict[str, Callable[[], Tensor]] = {}
    for name, model in models.items():
        if works and time.perf_counter() > end:
            print(f"# left out: {job.title}, {name}")
            continue
        if job.compiled:
            compile_blocks(model, shape)
        works[name] = work_of(model, shape, job.task)
        # the first call: memory, optimizer state, compilation
        if not torch.isfinite(works[name]()).all():
            raise ArithmeticError(f"{job.title}, {name}: the result is not finite")
    works["dense, last"] = works["dense"]
    times = timing.interleaved(works, partial(timing.wall, device=shape.device), end=end, **limits)
    dense = [sum(pair) / 2 for pair in zip(times["dense"], times["dense, last"], strict=True)]
    tokens = 1 if job.task == "decode" else shape.batch * shape.context
    rows = []
    for name, samples in times.items():
        model = models[name.removesuffix(", last")]
        model.zero_grad()  # so that a step's gradients count in its peak
        row = {
            "variant": name,
            "tokens": tokens,
            "context": shape.context,
            "rounds": len(samples),
            "tokens_per_s": timing.spread([tokens / value for value in samples]),
            "x_dense": timing.spread([a / b for a, b in zip(dense, samples, strict=True)]),
            "params": sum(parameter.numel() for parameter in model.parameters()),
            "param_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            # decoding only swaps the cache for a longer one, and a profiler does not see what was
            # there before it
            "peak_bytes": None
            if job.task == "decode"
            else timing.peak_bytes(works[name], shape.device),
        }
        rows.append(asdict(job) | row)
    for model in models.values():
        model.zero_grad()
    return rows


# ---- showing -------------------------------------------------------------------------------------


def job_of(row: dict[str, Any]) -> Job:
    return Job(**{field.name: row[field.name] for field in fields(Job)})


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    first, last = rows[0]["tokens_per_s"]["median"], rows[-1]["tokens_per_s"]["median"]
    size = f"tokens at once: {rows[0]['tokens']}, context {rows[0]['context']}"
    table = Table(
        title=f"{job_of(rows[0]).title}, {size}: median of {rows[0]['rounds']} interleaved rounds "
        f"(p20-p80); dense, first and last of a round, {first:,.0f} and {last:,.0f} tokens/s"
    )
    table.add_column("model")
    for title in (
        "parameters",
        "MB",
        "tokens/s",
        "(p20-p80)",
        "x dense",
        "(p20-p80)",
        "peak MB on top",
    ):
        table.add_column(title, justify="right")
    for row in rows[:-1]:
        rate, speed = row["tokens_per_s"], row["x_dense"]
        table.add_row(
            row["variant"],
            f"{row['params']:,}",
            f"{row['param_bytes'] / 1e6:.0f}",
            f"{rate['median']:,.0f}",
            f"({rate['p20']:,.0f}-{rate['p80']:,.0f})",
            f"{speed['median']:.2f}",
            f"({speed['p20']:.2f}-{speed['p80']:.2f})",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}",
        )
    console.print(table)


LEGEND = """x dense: speed against the dense model; peak: allocated by one step or call, on top of
the parameters, and in training of the optimizer's state (twice the parameters)."""


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/speed.md: speed against the dense model for every job, and parameters."""
    columns = list(dict.fromkeys(job_of(row) for row in result["rows"]))
    cells = {(job_of(row), row["variant"]): row for row in result["rows"]}
    names = dict.fromkeys(
        row["variant"] for row in result["rows"] if row["variant"] not in ("dense", "dense, last")
    )
    dense = [f"{cells[job, 'dense']['tokens_per_s']['median']:,.0f} tokens/s" for job in columns]
    lines = [f"| | {' | '.join(job.title for job in columns)} |", "|---|" + "--:|" * len(columns)]
    lines.append(f"| dense | {' | '.join(dense)} |")
    for name in names:
        rows = [cells.get((job, name)) for job in columns]
        speeds = [f"{row['x_dense']['median']:.2f}x" if row else "-" for row in rows]
        lines.append(f"| {name} | {' | '.join(speeds)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=300,
        metavar="SECONDS",
        help="jobs that do not fit are left out",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes, kept only if --out is given"
    )
    options = parser.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    end = time.perf_counter() + options.budget
    all_shapes = {shape.name: shape for shape in shapes(options.device, smoke=options.smoke)}
    todo, rounds = jobs(list(all_shapes.values())), ROUNDS
    if options.smoke:
        todo, rounds = todo[:6], (2, 2)
    setting = {
        "device": options.device,
        "threads": torch.get_num_threads(),
        "budget": options.budget,
    }
    setting["shapes"] = [asdict(shape) for shape in all_shapes.values()]
    converted: dict[str, dict[str, nn.Module]] = {}
    results: list[list[dict[str, Any]]] = []
    for n, job in enumerate(todo):
        shape = all_shapes[job.model]
        if time.perf_counter() > end:
            print(f"# left out: {job.title}")
            continue
        if job.model not in converted:
            converted[job.model] = {}
            dense = shape.build()
            chosen = variants(shape.width)
            for name in [*[*chosen][:2], "none"] if options.smoke else chosen:
                converted[job.model][name] = chosen[name](copy.deepcopy(dense))
        until = time.perf_counter() + (end - time.perf_counter()) / (len(todo) - n)
        results.append(measure(job, shape, converted[job.model], end, rounds=rounds, until=until))
        for row in results[-1]:
            print(json.dumps(row, allow_nan=False), flush=True)
        if not options.smoke or options.out != RESULTS:
            rows = [row for rows in results for row in rows]
            save_json(options.out / "model.json", setting=setting, rows=rows)
    console = Console(width=150)
    for rows in results:
        show(rows, console)
    print(LEGEND)
    return [row for rows in results for row in rows]


if __name__ == "__main__":
    main()
