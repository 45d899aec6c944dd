"""Files: `model.safetensors` with the numbers, `structlin.json` with exact module names and structures.

The manifest holds no pattern and no code. It carries the checksum of the other file and of itself, and is written last,
so that a folder is either whole or refused. Needs safetensors.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._linear import StructuredLinear, uninitialised
from ._model.survey import Layer, is_conv1d, linear_layers, swap
from ._structure import Structure

VERSION = 1
WEIGHTS, MANIFEST = "model.safetensors", "structlin.json"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model, converted or not, into the folder `path`; `load` is the inverse.

    Tied tensors are stored once. An earlier model in the folder is replaced file by file, the manifest last: after an
    interruption the folder holds the old model, the new one, or one that `load` refuses.

    Raises:
        ValueError: a tensor without values (meta), sharded, quantised, or state that is no tensor; `path` is a file.

    >>> from structlin import BTT, convert
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(convert(nn.Sequential(nn.Linear(64, 64)), BTT()), folder)
    ...     load(nn.Sequential(nn.Linear(64, 64)), folder)[0].structure.params
    1024
    """
    from safetensors.torch import save_file

    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path={str(path)!r} is a file; save writes a folder")
    tensors, aliases = _unique(model)
    folder.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".structlin-", dir=folder))
    try:
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        manifest = {"format": "structlin", "version": VERSION, "modules": describe(model), "aliases": aliases}
        manifest |= {"tensors": {name: str(tensor.dtype) for name, tensor in tensors.items()}}
        manifest |= {WEIGHTS: _sha256(new / WEIGHTS)}
        manifest["checksum"] = _checksum(manifest)
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for name in (WEIGHTS, MANIFEST):
            os.replace(new / name, folder / name)
    finally:
        shutil.rmtree(new)


def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Make `model` what was saved in `path`: exactly the layers that the file names become structured.

    Args:
        model: freshly built and dense, also on the meta device; or converted already in the same way. Its parameters
            keep their device (meta: the CPU) and `requires_grad`, and take the file's dtype.

    Returns:
        `model`; the new layer if the model is itself a linear layer.

    Raises:
        ValueError: a file is missing, truncated or edited; the model differs from what was saved: the message names
            the layers and tensors that do. The model is then as it was.
    """
    manifest, tensors = _read(Path(path))
    replacements = restructure(model, manifest["modules"], device="meta")
    wanted = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    for names, layer in replacements:
        for name in names:
            prefix = f"{name}." if name else ""
            wanted.pop(f"{prefix}weight")
            wanted |= {f"{prefix}{key}": tensor for key, tensor in layer.state_dict(keep_vars=True).items()}
    sources = {name: manifest["aliases"].get(name, name) for name in (*tensors, *manifest["aliases"])}
    _check_tensors(wanted, {name: tensors[source] for name, source in sources.items()}, path)
    ties = _ties(wanted, sources, tensors)
    _check_buffers(model)

    devices = {name: "cpu" if tensor.is_meta else tensor.device for name, tensor in wanted.items()}
    for names, layer in replacements:
        old = model.get_submodule(names[0])._parameters["weight"]
        assert old is not None
        for name in names:
            for key in layer.state_dict():
                place = f"{name}.{key}" if name else key
                devices[place] = "cpu" if old.is_meta else old.device
    model = swap(model, replacements)
    model.load_state_dict({name: tensors[sources[name]].to(devices[name]) for name in wanted}, assign=True)
    for first, *others in ties:  # assigning untied them
        one = model.get_parameter(first)
        for name in others:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, one)
    return model


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every structured layer of `model` as plain data, under each of its names; `restructure` is the inverse."""
    return {
        name: {
            "structure": module.structure.to_dict(),
            "label": module.label,
            "in_features": module.in_features,
            "out_features": module.out_features,
            "bias": module.bias is not None,
            "weight_norm": module.gains is not None,
            "init": module.init,
            "zero_init": module.zero_init,
            "conv1d": module.conv1d,
            "mode": module.mode,
            "dtype": str(module.cores[0].dtype),
        }
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, StructuredLinear)
    }


def restructure(
    model: nn.Module, modules: Mapping[str, Mapping[str, Any]], *, device: torch.device | str | None = None
) -> list[tuple[tuple[str, ...], StructuredLinear]]:
    """The layers that `model` must get to have the structures that `modules` describes, with their names; for `swap`.

    Layers that have them already are left out. Nothing is changed.

    Args:
        device: of the new layers; None: that of the layers they replace.

    Raises:
        ValueError: layers that the model lacks, that are no plain linear layers, or that differ in widths, bias or
            structure.
    """
    layers = {name: layer for layer in linear_layers(model) for name in layer.names}
    problems, found = [], list[tuple[tuple[str, ...], StructuredLinear]]()
    done = set[int]()
    for name, data in modules.items():
        layer = layers.get(name)
        if layer is None:
            problems.append(f"{name!r}: the model has no such linear layer")
            continue
        try:
            new = _fitting(layer, data, device)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{name!r}: {error}")
            continue
        if new is not None and id(layer.module) not in done:
            found.append((layer.names, new))
            done.add(id(layer.module))
    converted = [name for name, layer in layers.items() if isinstance(layer.module, StructuredLinear)]
    problems += [f"{name!r} is structured in the model, dense in the file" for name in converted if name not in modules]
    if problems:
        raise ValueError(f"the model differs from what was saved: {'; '.join(problems[:10])}")
    return found


def _fitting(layer: Layer, data: Mapping[str, Any], device: torch.device | str | None) -> StructuredLinear | None:
    """A new layer as described, in place of `layer`; None if it is that already."""
    old = layer.module
    structure = Structure.from_dict(data["structure"])
    widths = layer.in_features, layer.out_features
    saved = data["in_features"], data["out_features"]
    if widths != saved:
        raise ValueError(f"{widths[0]} -> {widths[1]} in the model, {saved[0]} -> {saved[1]} in the file")
    if (old._parameters.get("bias") is not None) != data["bias"]:
        raise ValueError(f"bias={not data['bias']} in the model, bias={data['bias']} in the file")
    if isinstance(old, StructuredLinear):
        if old.structure != structure or (old.gains is not None) != data["weight_norm"]:
            raise ValueError(f"is {old.label} in the model, {data['label']} in the file, or differs in weight_norm")
        return None
    if layer.obstacle:
        raise ValueError(layer.obstacle)
    if is_conv1d(old) != data["conv1d"]:
        raise ValueError("an nn.Linear in one, a Conv1D in the other")
    assert isinstance(old.weight, Tensor)
    kept = ("bias", "weight_norm", "init", "zero_init")
    options: dict[str, Any] = {key: data[key] for key in kept}
    options |= {"device": device or old.weight.device, "dtype": old.weight.dtype}
    new = uninitialised(*widths, structure, **options)
    new.mode = str(data["mode"])
    new.label, new.conv1d = str(data["label"]), bool(data["conv1d"])
    for core in new.cores:
        core.requires_grad_(old.weight.requires_grad)
    for own, other in [(new.bias, old._parameters.get("bias"))]:
        if own is not None and other is not None:
            own.requires_grad_(other.requires_grad)
    return new.train(old.training)


def _unique(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor of the state once, contiguous and alone in its storage; other names of it -> the first."""
    tensors, aliases, first = dict[str, Tensor](), dict[str, str](), dict[tuple[Any, ...], str]()
    for name, tensor in model.state_dict().items():
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            kind = type(tensor).__name__
            raise ValueError(f"{name!r} is a {kind}, no plain tensor; gather or dequantise it before saving")
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device: it has no values to save")
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor
    seen = set[int]()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.numel() * tensor.element_size() and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        tensors[name] = (
            tensor if alone and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
        )
    return tensors, aliases


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in (MANIFEST, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"path={str(folder)!r} has no {name}; was it written by structlin.save?")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != "structlin" or not isinstance(manifest["version"], int):
            raise KeyError("format")
        if manifest["version"] > VERSION:
            version = manifest["version"]
            raise ValueError(
                f"{folder / MANIFEST} has version {version}; upgrade structlin, which reads up to {VERSION}"
            )
        intact = manifest.pop("checksum") == _checksum(manifest)
        shapes = all(isinstance(manifest[part], dict) for part in ("modules", "aliases", "tensors"))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder / MANIFEST} is no manifest of structlin, or is truncated") from None
    if not intact or not shapes:
        raise ValueError(f"{folder / MANIFEST} was edited: its checksum is another")
    if manifest[WEIGHTS] != _sha256(folder / WEIGHTS):
        raise ValueError(f"{folder / WEIGHTS} is not the file that {MANIFEST} was written with: truncated or edited")
    try:
        return manifest, load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {error}") from None


def _check_tensors(wanted: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    problems = [f"{name!r} is in the model, not in the file" for name in wanted if name not in saved]
    problems += [f"{name!r} is in the file, not in the model" for name in saved if name not in wanted]
    problems += [
        f"{name!r} has shape {tuple(wanted[name].shape)} in the model, {tuple(saved[name].shape)} in the file"
        for name in wanted
        if name in saved and wanted[name].shape != saved[name].shape
    ]
    if problems:
        raise ValueError(f"path={str(path)!r}: the model differs from what was saved: {'; '.join(problems[:10])}")


def _ties(wanted: Mapping[str, Tensor], sources: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of the model's tied parameters; tied ones must be equal in the file."""
    groups: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        groups.setdefault(id(tensor), []).append(name)
    ties = [names for names in groups.values() if len(names) > 1]
    for first, *others in ties:
        for name in others:
            if not torch.equal(tensors[sources[first]], tensors[sources[name]]):
                raise ValueError(f"{first!r} and {name!r} are tied in the model and differ in the file: untie them")
    return ties


def _check_buffers(model: nn.Module) -> None:
    saved = model.state_dict()
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    if lost:
        raise ValueError(
            f"{', '.join(lost[:5])}: on the meta device and in no file (persistent=False); build the model on a device"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
