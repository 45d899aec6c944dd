"""What a conversion survives, model by model: the table of docs/models.md.

    python -m benchmarks.models            # results/models.json; needs transformers and timm
    python -m benchmarks.models --models llama
    python -m benchmarks.models --smoke    # two models

Each is a tiny random model of its class, converted by `convert(model, BTT(rank=2))`. A cell that
says "no" gives the error, and whether the dense model fails in the same way.
"""

import copy
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import structlin
from benchmarks import zoo
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment, Row

CASES: dict[str, tuple[str, zoo.Build, dict[str, Any]]] = {  # name -> package, model, inputs
    **{name: ("transformers", build, zoo.inputs(name)) for name, build in zoo.MODELS.items()},
    "TransformerEncoder": ("torch", zoo.encoder, {"src": torch.ones(2, 5, 32).cumsum(1) / 5}),
    **{
        name: ("timm", partial(zoo.timm_model, name), {"x": zoo.ramp(2, 3, side, side)})
        for name, side in zoo.TIMM.items()
    },
}


class Outputs(nn.Module):
    """A model whose result is one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        result = self.model(**inputs)
        return getattr(result, "logits", result)


@dataclass(frozen=True)
class Subject:
    """A model before it was converted and after; what is tried of either gives a cell."""

    build: zoo.Build
    inputs: dict[str, Any]
    dense: nn.Module
    model: nn.Module

    def run(self, module: nn.Module) -> Tensor:
        with torch.no_grad():
            return Outputs(module)(**self.inputs)

    def train(self, module: nn.Module) -> str:
        trained = copy.deepcopy(module)
        losses = []
        optimizer = torch.optim.AdamW(structlin.param_groups(trained, 1e-3, weight_decay=0.0))
        for _ in range(6):
            loss = (Outputs(trained)(**self.inputs) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        without_gradient = [name for name, p in trained.named_parameters() if p.grad is None]
        idle = [name for name in without_gradient if ".cores." in name]
        if idle:
            return f"no: no gradient in {idle[0]} and {len(idle) - 1} more"
        if losses[-1] < losses[0]:
            return "loss falls"
        return f"no: loss {losses[0]:.3g} -> {losses[-1]:.3g}"

    def compile(self, module: nn.Module) -> str:
        torch._dynamo.reset()
        graph = torch.compile(Outputs(module), fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            return "one graph, " + difference(graph(**self.inputs), self.run(module))

    def save(self, module: nn.Module) -> str:
        with tempfile.TemporaryDirectory() as folder:
            structlin.save(module, f"{folder}/model")
            loaded = structlin.load(self.build().eval(), f"{folder}/model")
            return difference(self.run(loaded), self.run(module))

    def save_pretrained(self, module: Any) -> str:
        if not hasattr(module, "save_pretrained"):
            return "-"
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            loaded = type(module).from_pretrained(folder).eval()
            return difference(self.run(loaded), self.run(module))

    def densify(self, module: nn.Module) -> str:
        plain = structlin.densify(copy.deepcopy(module))
        if list(plain.state_dict()) != list(self.dense.state_dict()):
            return "no: other state_dict keys"
        return difference(self.run(plain), self.run(module))

    def export(self, module: nn.Module) -> str:
        program = torch.export.export(Outputs(module), (), self.inputs, strict=False)
        return "yes, " + difference(program.module()(**self.inputs), self.run(module))


STEPS: dict[str, Callable[[Subject, nn.Module], str]] = {
    "train step": Subject.train,
    "compile": Subject.compile,
    "save/load diff": Subject.save,
    "save_pretrained diff": Subject.save_pretrained,
    "to_dense diff": Subject.densify,
    "export": Subject.export,
}
COLUMNS = ("class", "package", "convert", *STEPS)


def run(model: str) -> Row:
    """The cells of one model; a step that raises fills its cell with the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny layers grow; torch and transformers warn too
        return try_all(model, *CASES[model])


def try_all(name: str, package: str, build: zoo.Build, inputs: dict[str, Any]) -> Row:
    torch.manual_seed(0)
    dense = build().eval()
    if "pixel_values" not in inputs and hasattr(getattr(dense, "config", None), "use_cache"):
        inputs = inputs | {"use_cache": False}
    subject = Subject(build, inputs, dense, copy.deepcopy(dense))
    linear = sum(row.layers for row in structlin.summary(dense).rows)
    structlin.convert(subject.model, structlin.BTT(rank=2))
    layers = [m for m in subject.model.modules() if isinstance(m, structlin.StructuredLinear)]
    cells = {
        "class": name if package == "timm" else type(dense).__name__,
        "package": package,
        "version": version(package).partition("+")[0],  # 2.13.0, not 2.13.0+cpu
        "convert": f"{len(layers)} of {linear} layers",
    }
    for column, step in STEPS.items():
        attempt = try_step(step, subject, subject.model)
        cells[column] = attempt.cell
        if attempt.failed and column in ("compile", "export"):
            dense_fails = try_step(step, subject, dense).failed
            cells[column] += "; so does dense" if dense_fails else "; dense works"
    return cells


class Attempt(NamedTuple):
    cell: str
    failed: bool


def try_step(
    step: Callable[[Subject, nn.Module], str], subject: Subject, module: nn.Module
) -> Attempt:
    try:
        return Attempt(step(subject, module), failed=False)
    except Exception as error:  # the table says what happened
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        text = re.sub(r"\s+", " ", f"{type(error).__name__}: {first_line}").replace("|", "/")
        return Attempt(f"**no**: {text[:90]}", failed=True)


def difference(a: Tensor, b: Tensor) -> str:
    """Largest difference, relative to the largest value: exactly 0, within rounding, or how
    much."""
    relative = ((a - b).abs().max() / b.abs().max()).item()
    if relative == 0:
        return "0"
    return "< 1e-5" if relative < 1e-5 else f"{relative:.0e}"


def markdown(result: Row) -> str:
    """The table of docs/models.md."""
    rows = [[row[column] for column in COLUMNS] for row in result["rows"]]
    return report.table(["model", *COLUMNS[1:]], rows)


EXPERIMENT = Experiment(
    name="models",
    about=__doc__,
    tables={"tested models": markdown},
    run=run,
    axes={"model": [*CASES]},
    seeds=0,
    smoke={"model": ["llama", "TransformerEncoder"]},
    analyse=lambda rows: {},
    show=lambda result: [report.grid("models", result["rows"], names=len(COLUMNS) + 1)],
    workers=1,
)

if __name__ == "__main__":
    EXPERIMENT.main()
