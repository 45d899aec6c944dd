"""What the fault tests share: models that tell of a torn file, forged files, and processes."""

import json
import multiprocessing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structlin import BTT, LowRank, convert, load

FILE = "structlin.safetensors"


def build_dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 16)
    )


def build_filled(value: float) -> nn.Module:
    """A converted model all of whose numbers are `value`."""
    model = convert(build_dense(), BTT(rank=2), overrides={"2": LowRank(rank=4)}, weight_norm=True)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return model


def read_value(folder: Path) -> float:
    """The value of the model in `folder`, which must be one."""
    model = load(build_dense(), folder)
    values = {tensor.double().unique().item() for tensor in (*model.parameters(), *model.buffers())}
    assert len(values) == 1, f"a model that nobody saved: {sorted(values)}"
    return values.pop()


def start(function: Callable[..., None], *args: Any) -> Any:
    """A process that runs `function`, forked, so that it starts in milliseconds."""
    with warnings.catch_warnings():
        # forking beside the threads of other libraries
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(
            target=function, args=args, daemon=True
        )
        process.start()
    return process


def split_file(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header without structlin's own metadata, that metadata, and the numbers."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return header, json.loads(header.pop("__metadata__")["structlin"]), data[8 + size :]


def forge_file(header: dict[str, Any], own: Any, numbers: bytes) -> bytes:
    """A file that safetensors reads, whatever it says of the model."""
    about = {"__metadata__": {"structlin": json.dumps(own, separators=(",", ":"))}}
    text = json.dumps({**about, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + numbers
