"""What a conversion survives, model by model: the table of docs/models.md.

    python -m benchmarks.models            # every model that is installed; writes docs/models.md
    python -m benchmarks.models --smoke    # two models, nothing written

Each is a tiny random model of its class, converted by `convert(model, BTT(rank=2))`. A cell that
says "no" gives the error, and whether the dense model fails in the same way.
"""

import argparse
import copy
import importlib.util
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks import zoo

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
COLUMNS = (
    "convert",
    "train step",
    "compile",
    "save/load diff",
    "save_pretrained diff",
    "to_dense diff",
    "export",
)


@dataclass(frozen=True)
class Case:
    name: str
    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def cases() -> list[Case]:
    found = [
        Case(
            name,
            "transformers",
            build,
            lambda name=name: zoo.inputs(name) | ({} if name in zoo.IMAGES else NO_CACHE),
        )
        for name, build in zoo.MODELS.items()
    ]
    found.append(
        Case(
            "TransformerEncoder",
            "torch",
            zoo.encoder,
            lambda: {"src": torch.ones(2, 5, 32).cumsum(1) / 5},
        )
    )
    for name in zoo.TIMM:
        image = zoo.timm_size(name)
        pixels = torch.linspace(-1, 1, 2 * 3 * image * image).reshape(2, 3, image, image)
        found.append(
            Case(
                name,
                "timm",
                lambda name=name: zoo.timm_model(name),
                lambda pixels=pixels: {"x": pixels},
            )
        )
    return found


NO_CACHE = {"use_cache": False}


class Outputs(nn.Module):
    """A model whose result is one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        result = self.model(**inputs)
        return getattr(result, "logits", result)


def row(case: Case) -> dict[str, str]:
    """The cells of one model; a step that raises fills its cell with the error."""
    torch.manual_seed(0)
    dense, inputs = case.build().eval(), case.inputs()
    if "use_cache" in inputs and not hasattr(dense.config, "use_cache"):
        del inputs["use_cache"]
    model = copy.deepcopy(dense)
    cells = {
        "model": type(model).__name__ if case.package != "timm" else case.name,
        "package": case.package,
    }
    linear = sum(row.layers for row in structlin.summary(model).rows)
    try:
        structlin.convert(model, structlin.BTT(rank=2))
    except ValueError as error:
        return {**cells, "convert": f"no: {reason(error)}"}
    layers = [
        module for module in model.modules() if isinstance(module, structlin.StructuredLinear)
    ]
    cells["convert"] = f"{len(layers)} of {linear} layers"

    def run(module: nn.Module) -> Tensor:
        with torch.no_grad():
            return Outputs(module)(**inputs)

    expected = run(model)

    def compiled(module: nn.Module) -> str:
        torch._dynamo.reset()
        graph = torch.compile(Outputs(module), fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            return "one graph, " + difference(graph(**inputs), run(module))

    def exported(module: nn.Module) -> str:
        program = torch.export.export(Outputs(module), (), inputs, strict=False)
        return "yes, " + difference(program.module()(**inputs), run(module))

    def saved() -> str:
        with tempfile.TemporaryDirectory() as folder:
            structlin.save(model, f"{folder}/model")
            return difference(run(structlin.load(case.build().eval(), f"{folder}/model")), expected)

    def pretrained() -> str:
        if case.package != "transformers":
            return "-"
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return difference(run(type(model).from_pretrained(folder).eval()), expected)

    def trained() -> str:
        changed = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(structlin.param_groups(changed, 1e-3))
        losses = []
        for _ in range(6):
            loss = (Outputs(changed)(**inputs) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        idle = [
            name for name, p in changed.named_parameters() if ".cores." in name and p.grad is None
        ]
        if idle:
            return f"no: no gradient in {idle[0]} and {len(idle) - 1} more"
        return (
            "loss falls"
            if losses[-1] < losses[0]
            else f"no: loss {losses[0]:.3g} -> {losses[-1]:.3g}"
        )

    def restored() -> str:
        plain = structlin.densify(copy.deepcopy(model))
        if list(plain.state_dict()) != list(dense.state_dict()):
            return "no: other state_dict keys"
        return difference(run(plain), expected)

    steps: dict[str, Callable[[], str]] = {
        "train step": trained,
        "compile": lambda: compiled(model),
        "save/load diff": saved,
        "save_pretrained diff": pretrained,
        "to_dense diff": restored,
        "export": lambda: exported(model),
    }
    of_dense = {"compile": lambda: compiled(dense), "export": lambda: exported(dense)}
    for column, step in steps.items():
        try:
            cells[column] = step()
        except Exception as error:  # the table says what happened
            cells[column] = f"**no**: {reason(error)}"
            if column in of_dense:
                cells[column] += "; so does dense" if fails(of_dense[column]) else "; dense works"
    return cells


def fails(step: Callable[[], str]) -> bool:
    try:
        step()
    except Exception:
        return True
    return False


def difference(a: Tensor, b: Tensor) -> str:
    """Largest difference, relative to the largest value: exactly 0, within rounding, or how
    much."""
    relative = ((a - b).abs().max() / b.abs().max()).item()
    return "0" if relative == 0 else "< 1e-5" if relative < 1e-5 else f"{relative:.0e}"


def reason(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {first}").replace("|", "/")[:90]


def markdown(rows: list[dict[str, str]]) -> str:
    head = ["model", "package", *COLUMNS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(line(cells) for cells in rows)])


def line(cells: dict[str, str]) -> str:
    return (
        "| " + " | ".join(cells.get(column, "") for column in ("model", "package", *COLUMNS)) + " |"
    )


def document(rows: list[dict[str, str]]) -> str:
    return f"""# Does it work on my model?

Every class below was converted, trained, compiled, saved, loaded, exported and taken back, as a
tiny random model, by `convert(model, BTT(rank=2))`. Heads, embeddings and routers stay dense. Try
`plan(model, BTT())` on a class that is missing.

{markdown(rows)}

- convert: how many of the linear layers are structured.
- train step: six steps of AdamW with `param_groups`; every core gets a gradient and the loss falls.
- compile: `torch.compile(fullgraph=True)`, traced and run with the backend `aot_eager`; difference
  to eager.
- save/load diff: `save`, then `load` into a fresh model; save_pretrained diff: transformers' own
  way there and back.
- to_dense diff: `densify` against the structured model; the keys of the state_dict are those of
  the original.
- export: `torch.export.export`, run, against the model itself.

A difference is the largest over the outputs, relative to the largest output. 0 means bit-equal.

`python -m benchmarks.models` wrote this page with {versions("transformers", "timm")}.
"""


def versions(*packages: str) -> str:
    """As "torch 2.13.0, transformers 5.23.0": of torch and `packages`."""
    names = dict.fromkeys(("torch", *packages))
    return ", ".join(f"{name} {installed}" for name in names if (installed := _version(name)))


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]  # 2.13.0, not 2.13.0+cpu
    except PackageNotFoundError:
        return ""


def main(argv: list[str] | None = None) -> list[dict[str, str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=[case.name for case in cases()], help="print these rows only"
    )
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.add_argument("--smoke", action="store_true", help="two models, printed, nothing written")
    options = parser.parse_args(argv)
    named = ["llama", "TransformerEncoder"] if options.smoke else options.models
    rows = []
    for case in cases():
        if named is not None and case.name not in named:
            continue
        if not case.installed:
            print(f"{case.name}: skipped, {case.package} is not installed")
            continue
        with warnings.catch_warnings():
            # tiny layers grow; torch and transformers warn about themselves
            warnings.simplefilter("ignore")
            rows.append(row(case))
        print(line(rows[-1]), flush=True)
    if named is None:
        missing = sorted({case.package for case in cases() if not case.installed})
        if missing:
            parser.error(f"docs/models.md lists all models: install {', '.join(missing)} first")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(document(rows), encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
