"""Where and how a result was made, kept with every JSON under results/."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

import structlin

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"


def environment() -> dict[str, Any]:
    """Machine, versions, command and day of this run."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name}" if spec else f"python {sys.argv[0]}"
    machine = f"{_cpu()}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return {
        "command": shlex.join([*program.split(), *without_out(sys.argv[1:])]),
        "date": date.today().isoformat(),
        "machine": machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "structlin": structlin.__version__,
    }


def without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments of a program but `--out`, which names a folder of this machine.

    >>> without_out(["--keeps", "0.5", "--out", "here", "--smoke"]), without_out(["--out=here"])
    (['--keeps', '0.5', '--smoke'], [])
    """
    remaining = []
    is_folder = False
    for argument in arguments:
        if not is_folder and not argument.startswith("--out"):
            remaining.append(argument)
        is_folder = argument == "--out"
    return remaining


def save_json(path: Path, **content: Any) -> None:
    """Write `environment()` and `content` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_text(to_text({"environment": environment(), **content}) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def to_text(content: Any) -> str:
    """JSON without spaces, a line for each row of a list of rows and for each entry around it.

    >>> print(to_text({"seed": 0, "rows": [{"lr": 1, "loss": 2}, {"lr": 2, "loss": 1}]}))
    {"seed":0,
    "rows":[
    {"lr":1,"loss":2},
    {"lr":2,"loss":1}]}
    """
    if isinstance(content, Mapping):
        entries = [f"{to_text(str(key))}:{to_text(value)}" for key, value in content.items()]
        return "{" + ",\n".join(entries) + "}"
    compact = partial(json.dumps, separators=(",", ":"), allow_nan=False)
    if isinstance(content, Sequence) and content and isinstance(content[0], Mapping):
        return "[\n" + ",\n".join(map(compact, content)) + "]"
    return compact(content)


def read(name: str) -> dict[str, Any]:
    """The kept result `name`, as "layer" or "papers/md_width"."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if "model name" in line:
                return line.split(":")[1].strip()
    return platform.processor()
