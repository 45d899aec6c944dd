"""`structlin compress`: a trained model of text becomes smaller, is healed, measured and saved."""

import argparse
import copy
import ctypes
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import structlin

from .._families import Family
from .._kernels import engine
from .._report import Summary, Table
from . import read
from .arguments import parse_structure
from .jobs import CausalLM, Job, Source, choose_kind, first_tensor

Row = dict[str, Any]
CARD = """# {source}, compressed

structlin replaced the linear layers by structured ones: {params} parameters
are left in linear layers ({share:.0%}). The licence is that of the model that this one comes from.

## What was done

- Structure: {structure}, which keeps {keep} of the parameters of the layers that it is meant for.
- Projection: {data}.
- Healing: {heal}.
- A batch: {batch}.
- Numbers: {dtype}.
- Seconds of CPU time: {seconds:.0f} and {heal_seconds:.0f}.

## What it cost

Measured on held-out data, which neither calibrated nor healed.

| | dense | right after{healed}
|---|--:|--:{line}
{figures}
{said}
## How to load it

```python
{loading}
```

## The layers

```
{layers}
```
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is compressed and healed."""

    structure: Family
    keep: float
    calibration: int  #: batches; 0: by the weights alone
    heal: int  #: steps of distillation
    heal_lr: float
    refine: int = 0
    first: int = 0  #: the batch with which healing begins; earlier ones the model has seen
    include: list[str] | None = None
    exclude: tuple[str, ...] = ()


# ---- the command ---------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> tuple[str, Row]:
    """The tables, and all of it as plain data."""
    path = Path(options.model)
    structure = parse_structure(options.structure, open_size=True)
    text = read.read_text(options.data)
    if not (path.is_dir() or path.suffix.lower() == ".gguf"):
        raise ValueError(
            f"{path}: no GGUF file or folder of transformers; structlin.compress in Python takes "
            "any model"
        )
    kind = choose_kind(path)
    asked = {name: value for name, value in vars(options).items() if value is not None}
    given = {name: asked.get(name, usual) for name, usual in kind.defaults.items()}
    sizes = {name: given.pop(name) for name in ("context", "batch")}
    with writing(options.out) as folder:
        engine.load()  # builds it, so that no time has that in it
        tell(f"reading {path}")
        about = {"model": path, "text": text, "data": options.data.name, "seed": options.seed}
        job = kind(Source(**about, **sizes))
        chosen = {"include": options.include, "exclude": tuple(options.exclude)}
        recipe = Recipe(
            structure=structure, keep=options.keep, refine=options.refine, **given, **chosen
        )
        tell("measuring the dense model")
        dense = describe_dense(job)
        row, summary = compress(job, recipe, dense, folder)
    shown = f"{summary}\n\n{show_figures(dense, row)}\n\nsaved in {options.out}, with a README.md"
    layers = [asdict(each) for each in summary.rows]
    found = {"model": options.model, "out": str(options.out), "keep": options.keep}
    return shown, {**found, "dense": dense, "compressed": row, "layers": layers}


def tell(what: str) -> None:
    print(f"structlin: {what}", file=sys.stderr)


def show_figures(dense: Row, row: Row) -> str:
    healed = row["healed"]
    table = Table("held out", "dense", "right after", *(["healed"] if healed else []))
    for name, before in dense["after"].items():
        found = [before, row["after"][name], *([healed[name]] if healed else [])]
        table.row(name, *(f"{value:.3f}" for value in found))
    return str(table)


# ---- one compressed model ------------------------------------------------------------------------


def describe_dense(job: Job) -> Row:
    """What the dense model is, and does.

    Raises:
        ValueError: it does not fit the data.
    """
    row = size(job.dense, structlin.summary(job.dense))
    found = job.measure(job.dense)
    if isinstance(job, CausalLM):
        job.require_fit(found)
    return row | {"after": found, "sample": job.sample(job.dense)}


def compress(
    job: Job,
    recipe: Recipe,
    dense: Row,
    folder: Path,
    tell_plan: Callable[[structlin.Plan], None] | None = None,
) -> tuple[Row, Summary]:
    """Compress a copy of the job's model, heal it, measure it, and save it with a model card.

    Args:
        dense: what `describe_dense` returned.
        folder: it is made if it is not there.
        tell_plan: is given the plan before it is applied.

    Raises:
        ValueError: what `plan_compression` and `distill` raise.
        RuntimeError: the model that is loaded from the folder computes something else.
    """
    tell("compressing")
    model, start = copy.deepcopy(job.dense), time.process_time()
    planned = plan(model, job, recipe)
    if tell_plan is not None:
        tell_plan(planned)
    errors = list(planned.errors.values())
    model = planned.apply()
    del planned  # which holds the dense layers
    give_back()
    summary = structlin.summary(model)
    row = {**size(model, summary), "error": sum(errors) / max(1, len(errors))}
    row |= {"seconds": time.process_time() - start, "after": job.measure(model)}
    row |= heal(model, job, recipe) | {"sample": job.sample(model)}
    tell("saving")
    folder.mkdir(exist_ok=True)
    job.save(model, folder)
    require_equal(job, model, job.load(folder), folder)
    card = write_card(job, recipe, dense, row, summary, model)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return row, summary


def plan(model: nn.Module, job: Job, recipe: Recipe) -> structlin.Plan:
    aware = recipe.calibration > 0
    return structlin.plan_compression(
        model,
        recipe.structure,
        [job.batch(step) for step in range(recipe.calibration)] if aware else None,
        keep=recipe.keep,
        allocation="sensitivity" if aware else "error",
        refine=recipe.refine,
        include=recipe.include,
        exclude=recipe.exclude,
    )


def heal(model: nn.Module, job: Job, recipe: Recipe) -> Row:
    """What distillation made of the model, in place."""
    if not recipe.heal:
        return {"loss": None, "heal_seconds": 0.0, "healed": None}
    tell(f"healing, {recipe.heal} steps")
    start, steps = time.process_time(), range(recipe.first, recipe.first + recipe.heal)
    healed = structlin.distill(
        model,
        job.dense,
        map(job.batch, steps),
        steps=recipe.heal,
        lr=recipe.heal_lr,
        held_out=[job.batch(steps.stop + n) for n in range(job.judges)],
        logits=job.logits,
    )
    seconds = time.process_time() - start
    losses = [healed.before, healed.after]
    return {"loss": losses, "heal_seconds": seconds, "healed": job.measure(model)}


def size(model: nn.Module, summary: Summary) -> Row:
    whole = sum(each.numel() * each.element_size() for each in model.parameters())
    return {"params": summary.params, "flops": summary.flops, "bytes": whole}


@torch.no_grad()
def require_equal(job: Job, model: nn.Module, loaded: nn.Module, folder: Path) -> None:
    """Raises: RuntimeError: the model that was loaded does not compute the same."""
    batch = job.heldout[0]
    one, other = (
        first_tensor(each(**batch) if isinstance(batch, dict) else each(batch))
        for each in (model.eval(), loaded.eval())
    )
    if not torch.equal(one, other):
        raise RuntimeError(
            f"{folder}: the model that was loaded differs from the one that was saved"
        )


def write_card(
    job: Job, recipe: Recipe, dense: Row, row: Row, summary: Summary, model: nn.Module
) -> str:
    """What was done to a model, with which data, and what it cost."""
    data = "by the weights alone"
    if recipe.calibration:
        data = f"calibrated on {recipe.calibration} batches"
    if recipe.refine:
        data += f", {recipe.refine} steps of refinement for each block"
    said = "".join(
        f"\n- before: {before}\n- after: {after}"
        for before, after in zip(dense["sample"], row["sample"], strict=True)
    )
    healed = row["healed"]
    figures = "\n".join(
        f"| {name} | {before:.3f} | {row['after'][name]:.3f} |"
        + (f" {healed[name]:.3f} |" if healed else "")
        for name, before in dense["after"].items()
    )
    rate = f"distillation from the dense model, on {recipe.heal} batches, learning rate "
    return CARD.format(
        source=job.source,
        share=row["params"] / dense["params"],
        params=f"{row['params']:,} of {dense['params']:,}",
        structure=f"{type(recipe.structure).__name__}, of a size chosen for each layer",
        keep=recipe.keep,
        data=data,
        batch=job.unit,
        heal=f"{rate}{recipe.heal_lr:g}" if recipe.heal else "none",
        healed=" | healed |" if healed else " |",
        line="|--:|" if healed else "|",
        figures=figures,
        said=f"\n## What it says\n{said}\n" if said else "",
        layers=summary,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        seconds=row["seconds"],
        heal_seconds=row["heal_seconds"],
        loading=job.loading,
    )


# ---- folders and memory --------------------------------------------------------------------------


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A folder beside it, which takes its place once all is written; a failure leaves nothing.

    Raises:
        ValueError: there is something already, or nothing can be written there.
    """
    folder = folder.absolute()
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"--out {folder}: there is something already; take a new folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: {error.strerror}") from None
    try:
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def give_back() -> None:
    """Let the system have what glibc keeps of freed tensors."""
    gc.collect()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
