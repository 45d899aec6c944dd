"""What is left of a training step of GPT-2 small when its linear layers are BTT, and what helps?

    python -m benchmarks.speed.parts --only shares    # which part takes how much: results/parts
    python -m benchmarks.speed.parts --only remedies  # what changes that; the other rows stay
    python -m benchmarks.speed.parts --only heads     # head and loss alone, on one thread
    python -m benchmarks.speed.parts --smoke          # seconds

A part is taken out of the model (a norm or GELU becomes the identity, attention returns its values,
a linear layer the first feature, embeddings a constant, the head and the loss the mean square of
the features; no step of the optimizer): the share is one minus the time of the step without it over
the time with it. Shares of parts that overlap, as those of the head and of the embedding that it is
tied to, need not add up to one. A remedy changes how a part is computed. All steps take turns in
one process, on the same parameters, and the fast fifth of all rounds counts (the 20th percentile),
since other programs only ever lengthen a step. The same command again adds its rounds to those in
--out.

Heads alone, forward and backward, are compared by the processor time of one thread, and by the most
memory that a step takes; each run replaces the last.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.harness import report, timing
from benchmarks.harness.experiment import parser, result_path
from benchmarks.harness.race import Heat, Row, race
from benchmarks.harness.record import environment, save_json
from benchmarks.speed.model import NO_DROPOUT, TOKENS, Absent

SIZES = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
SMOKE = {"n_embd": 64, "n_layer": 1, "n_head": 1, "vocab_size": 96}
BATCH, CONTEXT = 2, 256
HEAD = structlin.BTT(rank=8)
TOKENS_ALONE = (1024, 4096)
TORCH_CHUNK = 256  # tokens; 512 are as fast, 128 slower, and torch's own choice the slowest
FULL, LAST = "all of it", "all of it, last"


class Constant(nn.Module):
    """An embedding that looks nothing up."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("vector", torch.randn(features))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.vector.expand(*tokens.shape, -1)


class Step:
    """A training step of a GPT-2 whose linear layers are BTT, and what may be changed in it."""

    def __init__(self, sizes: dict[str, int], batch: int, context: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(**sizes, **NO_DROPOUT, use_cache=False, **TOKENS)
        self.model = structlin.convert(GPT2LMHeadModel(config), structlin.BTT(rank=1)).train()
        self.ids = torch.randint(sizes["vocab_size"], (batch, context))
        self.labels = self.ids.roll(-1, 1).flatten()
        widths = sizes["n_embd"], sizes["vocab_size"]
        self.new_head = structlin.StructuredLinear(*widths, HEAD, bias=False)
        self.loss = self.plain_loss
        self.optimizer: torch.optim.Optimizer | None = self.make_optimizer(fused=True)

    def make_optimizer(self, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(structlin.param_groups(self.model, 1e-5), **options)

    def plain_loss(self, hidden: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden), self.labels)

    def chunked_loss(self, hidden: Tensor) -> Tensor:
        return structlin.linear_cross_entropy(hidden, self.model.lm_head, self.labels)

    def structured_loss(self, hidden: Tensor) -> Tensor:
        return F.cross_entropy(self.new_head(hidden), self.labels)

    def structured_chunked_loss(self, hidden: Tensor) -> Tensor:
        return structlin.linear_cross_entropy(hidden, self.new_head, self.labels)

    def __call__(self) -> Tensor:
        self.model.zero_grad()
        self.new_head.zero_grad()
        hidden = self.model.transformer(input_ids=self.ids).last_hidden_state.flatten(0, 1)
        loss = self.loss(hidden)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()


# ---- what is changed -----------------------------------------------------------------------------


@contextmanager
def replaced(
    step: Step, kinds: tuple[type[nn.Module], ...], make: Callable[[nn.Module], nn.Module]
) -> Iterator[None]:
    """All modules of the body that are of these kinds, replaced by what `make` makes of them."""
    body = step.model.transformer
    old = {name: module for name, module in body.named_modules() if isinstance(module, kinds)}
    for name, module in old.items():
        body.set_submodule(name, make(module))
    yield
    for name, module in old.items():
        body.set_submodule(name, module)


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@contextmanager
def both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def return_values(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    return value.transpose(1, 2), None  # (batch, tokens, heads, features)


def activations(step: Step) -> tuple[type[nn.Module], ...]:
    return (type(step.model.transformer.h[0].mlp.act),)


def attention_by(step: Step, name: str) -> Any:
    return attribute(step.model.config, "_attn_implementation", name)


def shares(step: Step) -> dict[str, Callable[[], Any]]:
    """Part -> a step without it."""
    from transformers import AttentionInterface

    AttentionInterface.register("values", return_values)
    width = step.model.config.n_embd
    linear = (structlin.StructuredLinear,)
    identity = lambda module: nn.Identity()  # noqa: E731
    return {
        "head and loss": lambda: attribute(step, "loss", lambda hidden: hidden.square().mean()),
        "optimizer (AdamW, fused)": lambda: attribute(step, "optimizer", None),
        "linear layers (BTT r=1)": lambda: replaced(
            step, linear, lambda module: Absent(module.out_features)
        ),
        "embeddings": lambda: replaced(step, (nn.Embedding,), lambda module: Constant(width)),
        "GELU": lambda: replaced(step, activations(step), identity),
        "attention": lambda: attention_by(step, "values"),
        "norms": lambda: replaced(step, (nn.LayerNorm,), identity),
    }


def remedies(step: Step) -> dict[str, Callable[[], Any]]:
    """Remedy -> a step with it; `before` of a name says that it is worse, for comparison."""
    gelu = lambda: replaced(step, activations(step), lambda module: nn.GELU("tanh"))  # noqa: E731
    chunks = lambda: attribute(step, "loss", step.chunked_loss)  # noqa: E731
    foreach, loop = (step.make_optimizer(foreach=each) for each in (True, False))
    return {
        "GELU as one operation": gelu,
        "loss in chunks": chunks,
        "both": lambda: both(gelu(), chunks()),
        f"head {HEAD.label}, not tied": lambda: attribute(step, "loss", step.structured_loss),
        f"head {HEAD.label}, loss in chunks": lambda: attribute(
            step, "loss", step.structured_chunked_loss
        ),
        "AdamW, foreach in place of fused": lambda: attribute(step, "optimizer", foreach),
        "AdamW, one by one in place of fused": lambda: attribute(step, "optimizer", loop),
        "attention as separate operations": lambda: attention_by(step, "eager"),
    }


# ---- the head and the loss alone -----------------------------------------------------------------


def losses(width: int, vocabulary: int, tokens: int) -> dict[tuple[str, str], Callable[[], Any]]:
    """(head, way) -> forward and backward of the head and the loss."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    heads: dict[str, nn.Module] = {"nn.Linear": nn.Linear(width, vocabulary, bias=False)}
    families = {
        "BTT r=1": structlin.BTT(rank=1),
        "low-rank d/8": structlin.LowRank(rank=width // 8),
    }
    for name, family in families.items():
        heads[name] = structlin.StructuredLinear(width, vocabulary, family, bias=False)
    works: dict[tuple[str, str], Callable[[], Tensor]] = {}
    for name, head in heads.items():
        works[name, "all logits"] = partial(lambda h: F.cross_entropy(h(hidden), labels), head)
        works[name, "in chunks"] = partial(structlin.linear_cross_entropy, hidden, head, labels)
    if hasattr(nn, "LinearCrossEntropyOptions"):  # torch 2.13
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=TORCH_CHUNK)
        weight = heads["nn.Linear"].weight
        works["nn.Linear", f"torch, chunks of {TORCH_CHUNK}"] = partial(
            F.linear_cross_entropy, hidden, weight, labels, options=options
        )
    leaves = {name: [hidden, *head.parameters()] for name, head in heads.items()}
    return {
        key: partial(lambda work, each: torch.autograd.grad(work(), each), work, leaves[key[0]])
        for key, work in works.items()
    }


def measure_heads(sizes: dict[str, int], counts: Sequence[int], heat: Heat) -> list[Row]:
    """Every loss for so many tokens: processor time in turns, and bytes."""
    rows = []
    for n, tokens in enumerate(counts):
        works = losses(sizes["n_embd"], sizes["vocab_size"], tokens)
        peaks = {key: timing.peak_bytes(work, "cpu") for key, work in works.items()}
        own = replace(heat, share=tokens / sum(counts[n:]))
        times = race(works, own, clock=processor_seconds).seconds
        rows += [
            {
                "head": head,
                "name": way,
                "tokens": tokens,
                "ms": [round(1e3 * sample, 1) for sample in times[head, way]],
                "x": timing.ratio(times[head, "all logits"], times[head, way]),
                "peak_bytes": peaks[head, way],
            }
            for head, way in works
        ]
    return rows


def processor_seconds(work: Callable[[], Any], device: str) -> float:
    """This process's own seconds, which other programs do not lengthen much."""
    start = time.process_time()
    work()
    return time.process_time() - start


def show_heads(rows: Sequence[Row]) -> Table:
    shown = [
        {
            "head": row["head"],
            "loss": row["name"],
            "tokens": str(row["tokens"]),
            "ms": f"{median(row['ms']):.0f}",
            "x": f"{row['x']['median']:.2f} ({row['x']['p20']:.2f}-{row['x']['p80']:.2f})",
            "MB": f"{row['peak_bytes'] / 1e6:.0f}",
        }
        for row in rows
    ]
    rounds = len(rows[-1]["ms"])
    return report.grid(f"head and loss alone, one thread, medians of {rounds} rounds", shown)


# ---- measuring and showing -----------------------------------------------------------------------


def run_changed(step: Step, change: Callable[[], Any]) -> None:
    with change():
        step()


def measure(changes: dict[str, Callable[[], Any]], step: Step, heat: Heat) -> list[Row]:
    """A row for each change: the time of its step, round by round, and of the whole one, twice."""
    works: dict[str, Callable[[], Any]] = {FULL: step}
    works |= {name: partial(run_changed, step, change) for name, change in changes.items()}
    for work in works.values():
        work()  # memory, state of optimizers
    times = race(works, heat, last=LAST, clock=timing.wall).seconds
    times[FULL] += times.pop(LAST)
    return [
        {"name": name, "ms": [round(1e3 * sample, 1) for sample in samples]}
        for name, samples in times.items()
    ]


def add_rounds(rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    """Put the rounds of an earlier result before those of `rows`, if it has the same steps."""
    if [row["name"] for row in rows] == [row["name"] for row in kept]:
        for row, earlier in zip(rows, kept, strict=True):
            row["ms"] = earlier["ms"] + row["ms"]


def parts_of_whole(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The 20th percentile of each step over that of the whole one.

    >>> parts_of_whole([{"name": "all of it", "ms": [9, 4]}, {"name": "norms", "ms": [4, 4]}])
    {'all of it': 1.0, 'norms': 0.8}
    """
    fast = {row["name"]: timing.spread(row["ms"])["p20"] for row in rows}
    return {name: ms / fast[FULL] for name, ms in fast.items()}


def show(title: str, rows: Sequence[Row]) -> Table:
    found = parts_of_whole(rows)
    shown = [
        {
            "step": row["name"],
            "ms": f"{timing.spread(row['ms'])['p20']:.1f}",
            "(median)": f"({median(row['ms']):.1f})",
            "of the whole step": f"{found[row['name']]:.2f}",
        }
        for row in rows
    ]
    return report.grid(f"{title}, 20th percentile of {len(rows[-1]['ms'])} rounds", shown)


def main(argv: list[str] | None = None) -> Row:
    about, pieces = parser(__doc__, workers=None), {"shares": shares, "remedies": remedies}
    about.add_argument("--only", choices=[*pieces, "heads"], help="this alone (default: all)")
    about.add_argument("--seconds", type=float, default=30, help="of rounds, for each of them")
    options = about.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    sizes, batch, context = (SMOKE, 1, 16) if options.smoke else (SIZES, BATCH, CONTEXT)
    path, threads = result_path(options, "parts"), torch.get_num_threads()
    setting = {"sizes": sizes, "batch": batch, "context": context, "threads": threads}
    result: Row = {"setting": setting}
    kept = json.loads(path.read_text()) if path and path.exists() else {}
    if kept.get("setting") == setting:
        result |= {name: kept[name] for name in (*pieces, "heads") if name in kept}
    for name in [options.only] if options.only else [*pieces, "heads"]:
        end = time.perf_counter() + options.seconds
        heat = Heat(rounds=(2, 2) if options.smoke else (2, 15), end=end)
        if name == "heads":
            torch.set_num_threads(1)
            rows = measure_heads(sizes, (8,) if options.smoke else TOKENS_ALONE, heat)
            torch.set_num_threads(threads)
            table = show_heads(rows)
        else:
            step = Step(sizes, batch, context)
            rows = measure(pieces[name](step), step, heat)
            add_rounds(rows, result.get(name, {}).get("rows", []))
            table = show(name, rows)
        result[name] = {"rows": rows, "environment": environment()}
        Console(width=120).print(table)
    if path:
        save_json(path, **result)
    return result


if __name__ == "__main__":
    main()
