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

    file = path if path.is_file() else path / FILE
    try:
        description = _read_description(file) if file.is_file() else None
        if description is None:
            return _read_pretrained(path.parent if path.is_file() else path)
        # a layer that has two names is one: the file holds its cores under the first
        aliases = description["aliases"]
        modules = description["modules"].items()
        described = {name: data for name, data in modules if f"{name}.cores.0" not in aliases}
        return _describe("structlin.save", described, _read_sizes([file]))
    except (OSError, SafetensorError, *_MALFORMED) as error:
        text = str(error)[:200]
        raise ValueError(f"{path} holds no structured model that can be read: {text}") from None


def _read_pretrained(folder: Path) -> SavedModel:
    """The model that transformers wrote into a folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"it has neither {FILE} nor config.json")
    config = json.loads(file.read_text(encoding="utf-8")).get("quantization_config") or {}
    if config.get("quant_method") != "structlin":
        raise ValueError("its config.json names no structured layer: the model is dense")
    sizes = _read_sizes(sorted(folder.glob("*.safetensors")))
    return _describe("save_pretrained of transformers", config["modules"], sizes)


def _describe(kind: str, modules: Mapping[str, Any], sizes: Mapping[str, int]) -> SavedModel:
    layers = []
    prefixes: list[str] = []  # of the tensors of these layers that stand for their matrices
    for name, data in modules.items():
        structure = Structure.from_dict(data["structure"])
        label = f"{data['label']}, int8" if "quantized" in data else str(data["label"])
        in_features = int(data["in_features"])
        out_features = int(data["out_features"])
        matrices = int(data.get("experts", 1)) * int(data.get("fused", 1))
        params = matrices * structure.params
        layers.append(SavedLayer(name, label, in_features, out_features, params))
        prefixes += [f"{name}.cores.", f"{name}.scales.", f"{name}.weight"]
    others = [size for name, size in sizes.items() if not name.startswith(tuple(prefixes))]
    return SavedModel(kind, tuple(layers), sum(others))


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
