"""What a saved model says of itself, read from its files without building it.

A file of `save` has the description of its layers in its metadata. A folder of transformers'
`save_pretrained` has it in its config.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .._structure.structure import Structure
from .files import FILE

_MALFORMED = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class SavedLayer:
    """A structured layer in a file."""

    name: str
    label: str
    in_features: int
    out_features: int
    params: int  #: of the cores


@dataclass(frozen=True)
class SavedModel:
    """A saved model's structured layers, and how many numbers are beside them."""

    kind: str  #: what wrote it
    layers: tuple[SavedLayer, ...]
    other_numbers: int  #: in biases, norms, embeddings, dense layers and buffers


def read_saved(path: Path) -> SavedModel:
    """Describe the model in a folder or file of `save` or of transformers' `save_pretrained`.

    Raises:
        ValueError: there is none, it is dense, or its files are truncated or malformed.
    """
    from safetensors import SafetensorError

    folder = path.parent if path.is_file() else path
    own = path if path.is_file() else folder / FILE
    try:
        if own.is_file() and (description := _read_description(own)) is not None:
            tensors = _read_sizes([own])
            # a layer that has two names is one: the file holds its cores under the first
            aliases = set(description["aliases"])
            modules = {
                name: data
                for name, data in description["modules"].items()
                if f"{name}.cores.0" not in aliases
            }
            return _describe("structlin.save", modules, tensors)
        config = folder / "config.json"
        if not config.is_file():
            raise ValueError(f"it has neither {FILE} nor config.json")
        said = json.loads(config.read_text(encoding="utf-8")).get("quantization_config") or {}
        if said.get("quant_method") != "structlin":
            raise ValueError("its config.json names no structured layer: the model is dense")
        tensors = _read_sizes(sorted(folder.glob("*.safetensors")))
        return _describe("save_pretrained of transformers", said["modules"], tensors)
    except (OSError, SafetensorError, *_MALFORMED) as error:
        text = str(error)[:200]
        raise ValueError(f"{path} holds no structured model that can be read: {text}") from None


def _describe(kind: str, modules: Mapping[str, Any], tensors: Mapping[str, int]) -> SavedModel:
    layers = []
    for name, data in modules.items():
        structure = Structure.from_dict(data["structure"])
        label = f"{data['label']}, int8" if "quantized" in data else str(data["label"])
        widths = int(data["in_features"]), int(data["out_features"])
        count = int(data.get("experts", 1)) * int(data.get("fused", 1))
        layers.append(SavedLayer(name, label, *widths, count * structure.params))
    inside = tuple(f"{name}.{part}" for name in modules for part in ("cores.", "scales.", "weight"))
    others = sum(size for name, size in tensors.items() if not name.startswith(inside))
    return SavedModel(kind, tuple(layers), others)


def _read_description(file: Path) -> dict[str, Any] | None:
    """What `save` wrote into the metadata of its file; None: the file is of another writer."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get("structlin")
    return None if text is None else dict(json.loads(text))


def _read_sizes(files: list[Path]) -> dict[str, int]:
    """The names of the tensors in safetensors files, and how many numbers each has."""
    from safetensors import safe_open

    sizes = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                sizes[name] = prod(opened.get_slice(name).get_shape())
    return sizes
