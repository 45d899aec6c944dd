"""`save` and `load`: one safetensors file that describes itself, replaced by one rename.

    folder/structlin.safetensors, in its metadata as JSON under "structlin":
        version, modules: {name: layer}, aliases: {name: another name of the same tensor}

A saver writes a temporary file beside it, flushes that file to the disk and renames it: whoever
opens the file at any moment finds the old model or the new one, whole. transformers' config holds
the same descriptions of layers, see `hf`.
"""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor, nn

from .._hosts.transformers import is_conv1d
from .._layer.experts import Lay, StructuredExperts, describe_experts, uninitialised_experts
from .._layer.linear import StructuredLinear, uninitialised
from .._layer.order import OrderedCores
from .._layer.quantized import QuantizedLinear
from .._layer.state import tell_difference
from .._structure.arguments import checked, require_choice
from .._structure.structure import Structure
from .linears import Layer, Replacement, linear_layers, replace_layers
from .obstacles import carry_attributes
from .stacks import ExpertsLayer, expert_layers, structured_experts
from .transaction import Step, completed_at_end

VERSION = 1
FILE = "structlin.safetensors"
_MALFORMED = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_LONGEST = 500  # characters of a message that quotes names: a file may hold any text


@checked
def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model, converted or not, to `structlin.safetensors` in the folder `path`, for `load`.

    The file is replaced by one rename once the new one is on the disk: at any moment, also after a
    crash, the folder holds the old model or the new one, whole. Several processes may save and load
    at once. Tied tensors are stored once.

    Raises:
        ValueError: a tensor without values (meta), sharded, quantised, or state that is no tensor;
            cores in another order than declared (`parallel.store_outermost_`); `path` is a file.
        OSError: the file cannot be written, for example because the disk is full.

    >>> import tempfile
    >>> from structlin import BTT, convert
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(convert(nn.Sequential(nn.Linear(64, 64)), BTT()), folder)
    ...     load(nn.Sequential(nn.Linear(64, 64)), folder)[0].structure.params
    1024
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    _require_path(path)
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path={str(folder)!r} is a file; save writes a folder")
    tensors, aliases = _collect_tensors(model)
    description = {"version": VERSION, "modules": describe(model), "aliases": aliases}
    metadata = {"structlin": json.dumps(description, separators=(",", ":"))}
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}-{uuid4().hex}"
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(mode)  # safetensors lets nobody else read it
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, folder / FILE)
    except SafetensorError as error:
        raise OSError(f"{folder / FILE} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@checked
def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Make `model` what was saved in `path`: the layers that the file names become structured.

    Parameters are filled in place, so that an optimizer, DDP or hooks made before keep hold of
    them. Only those of another dtype than the file's, on the meta device or of a layer that becomes
    structured are new ones. The file is read once and not needed afterwards.

    Args:
        model: freshly built and dense, also on the meta device; or converted already in the same
            way. Its parameters keep their device (meta: the CPU) and `requires_grad`, and take the
            file's dtype.
        path: the folder, or the file in it.

    Returns:
        `model`; the new layer if the model is itself a linear layer.

    Raises:
        ValueError: the file is missing, truncated or malformed; the model differs from what was
            saved, where the message names the layers and tensors. After this error, as after any
            other, the model is as it was: numbers are only written once everything fits.

    >>> import tempfile
    >>> from structlin import BTT, convert
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(convert(nn.Sequential(nn.Linear(16, 16)), BTT()), folder)
    ...     load(nn.Sequential(nn.Linear(16, 16)), folder)[0].label
    'BTT(rank=1)'
    """
    _require_path(path)
    with torch.inference_mode(False), torch.no_grad():
        modules, tensors = _read_file(Path(path))
        copies: list[Step] = []

        def assign(root: nn.Module, undo: list[Step]) -> None:
            try:
                writes = _assign(root, tensors)
            except RuntimeError as error:
                if type(error) is not RuntimeError:
                    raise
                # torch's words of names and shapes
                raise ValueError(f"path={str(path)!r}: {str(error)[:_LONGEST]}") from error
            undo.append(copies.clear)
            copies.extend(partial(tensor.copy_, value) for tensor, value in writes)

        replacements = restructure(model, modules)
        # once the layers are in, all numbers go in: Ctrl-C is raised after the last one
        with completed_at_end(copies):
            root = replace_layers(model, replacements, assign)
    for name, data in modules.items():
        layer = root.get_submodule(name)
        if isinstance(layer, QuantizedLinear):  # older files have it in the scales
            layer.dtype = getattr(torch, data.get("dtype", "float32"))
    return root


# ---- the file ------------------------------------------------------------------------------------


class _Contents(NamedTuple):
    """What `save` wrote into a file."""

    modules: dict[str, dict[str, Any]]  #: name -> description
    tensors: dict[str, Tensor]  #: under all their names


def _read_file(path: Path) -> _Contents:
    from safetensors import SafetensorError, safe_open

    file = path if path.is_file() else path / FILE
    if not path.exists():
        raise ValueError(f"path={str(path)!r} does not exist")
    if not file.is_file():  # a pipe or a device would never end
        raise ValueError(f"path={str(path)!r} has no {FILE}; was it written by structlin.save?")
    try:
        with safe_open(file, "pt") as opened:
            description = json.loads(opened.metadata()["structlin"])
            version = description["version"]
            modules = dict(description["modules"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        aliases = {alias: tensors[name] for alias, name in description["aliases"].items()}
    except (OSError, SafetensorError, *_MALFORMED) as error:
        reason = str(error)[:200]
        raise ValueError(f"{file} is truncated, or no file of structlin.save: {reason}") from None
    if version != VERSION:
        text = f"this structlin reads version {VERSION}; take the one that wrote the file"
        raise ValueError(f"{file} has version {repr(version)[:20]}; {text}")
    return _Contents(modules, tensors | aliases)


class _Collected(NamedTuple):
    """The tensors of a state, each once."""

    tensors: dict[str, Tensor]  #: contiguous, each alone in its storage
    aliases: dict[str, str]  #: another name of a tensor -> its first one


def _collect_tensors(model: nn.Module) -> _Collected:
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in model.state_dict().items():
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            text = f"is a {type(tensor).__name__}, no plain tensor"
            raise ValueError(f"{name!r} {text}; gather or dequantise it before saving")
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device: it has no values to save")
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and first_names.setdefault(key, name) != name:
            aliases[name] = first_names[key]
            continue
        storage = tensor.untyped_storage()
        fills_storage = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        storages.add(storage.data_ptr())
        if not fills_storage or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        tensors[name] = tensor
    return _Collected(tensors, aliases)


# ---- layers as plain data ------------------------------------------------------------------------


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Each structured layer of `model` as plain data, under all its names, for `restructure`.

    Raises:
        ValueError: a layer stores its cores in another order than it was declared with.
    """
    description: dict[str, dict[str, Any]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, StructuredExperts):
            description[name] = {**layer.computes_with(), "label": layer.label}
        if isinstance(layer, StructuredLinear):
            if isinstance(layer.cores, OrderedCores):
                raise ValueError(
                    f"layer {name!r} stores its cores in another order, for tensor parallelism: "
                    "call structlin.parallel.store_as_declared_(layer) first, on one process"
                )
            description[name] = {
                **layer.computes_with(),
                "label": layer.label,
                "bias": layer.bias is not None,
                "weight_norm": layer.gains is not None,
                "init": layer.init,
                "zero_init": layer.zero_init,
                "sigma": layer.stds,
            }
        if isinstance(layer, QuantizedLinear):  # other tensors say it by theirs
            description[name]["dtype"] = str(layer.compute_dtype).removeprefix("torch.")
    return description


def restructure(model: nn.Module, modules: Mapping[str, Mapping[str, Any]]) -> list[Replacement]:
    """The layers that `model` must get to be as `modules` describes.

    They have the biases of the layers that they replace, and no other values yet. Layers that are
    as described already are left out. Nothing is changed.

    Raises:
        ValueError: layers that the model lacks, that are no plain linear layers, or that differ in
            widths, bias or what they compute with.
    """
    layers = {name: layer for layer in linear_layers(model) for name in layer.names}
    experts = {name: layer for layer in expert_layers(model) for name in layer.names}
    stacks = {name: stack for stack, names in structured_experts(model).items() for name in names}
    problems: list[str] = []
    # by the module that is replaced, so that a layer of several names is built once
    replacements: dict[nn.Module, Replacement] = {}
    for name, data in modules.items():
        layer: Layer | None = layers.get(name)
        new: nn.Module | None
        try:
            if "experts" in data:
                layer = experts.get(name)
                new = _build_experts(experts.get(name), stacks.get(name), data)
                if layer is not None and new is not None:
                    replacements[layer.module] = Replacement(layer.names, new)
                continue
            if layer is None:
                raise ValueError(_explain_missing(name, layers))
            new = _build_layer(layer, data)
            if new is not None:
                replacements[layer.module] = Replacement(layer.names, new)
        except _MALFORMED as error:
            problems.append(f"{name!r}: {str(error)[:_LONGEST]}")
    for name in describe(model):
        if name not in modules:
            problems.append(f"{name!r} is structured in the model, dense in the file")
    if problems:
        raise ValueError(f"the model differs from what was saved: {'; '.join(problems[:10])}")
    return list(replacements.values())


def _explain_missing(name: str, layers: Mapping[str, Layer]) -> str:
    """Why a model of these layers has none of that name."""
    unwrapped = name.partition(".")[2]
    if unwrapped not in layers:
        return "the model has no such linear layer"
    return (
        f"the model has no such linear layer but {unwrapped!r}: the file is of what holds this "
        "model, such as a wrapper"
    )


def _build_layer(layer: Layer, data: Mapping[str, Any]) -> StructuredLinear | None:
    """A layer as described, in place of `layer`; None if that computes with the same already."""
    old = layer.module
    widths = (layer.in_features, layer.out_features)
    saved_widths = (data["in_features"], data["out_features"])
    if widths != saved_widths:
        raise ValueError(
            f"{widths[0]} -> {widths[1]} in the model, "
            f"{saved_widths[0]} -> {saved_widths[1]} in the file"
        )
    structured = isinstance(old, StructuredLinear)
    if not structured and layer.obstacle:
        raise ValueError(layer.obstacle)
    weight: Any = old.weight
    options = {name: data[name] for name in ("weight_norm", "init", "zero_init")}
    options |= {"device": "meta" if structured else weight.device, "dtype": weight.dtype}
    if "quantized" in data:
        require_choice("quantized", data["quantized"], ("int8",))
        require_choice("dtype", data.get("dtype", "float32"), _DTYPES)
        options["kind"] = QuantizedLinear
    structure = Structure.from_dict(data["structure"])
    new = uninitialised(*widths, structure, bias=False, **options)
    if not isinstance(new, QuantizedLinear):
        new.requires_grad_(weight.requires_grad)
    new.label = str(data["label"])
    new.conv1d = is_conv1d(old)
    new.bias = old._parameters.get("bias")
    if isinstance(old, StructuredLinear) and old.structure != structure:
        raise ValueError(f"is {old.label} in the model, {new.label} in the file")
    described = describe(new)[""]
    # the dtype beside int8 cores is the model's, until `load` sets it
    saved = {**data, "dtype": described.get("dtype")}
    difference = tell_difference(described, {name: saved[name] for name in described})
    if isinstance(old, StructuredLinear):
        difference = difference or tell_difference(old.computes_with(), new.computes_with())
    if difference:
        raise ValueError(f"{difference} in the file")
    if structured:
        return None
    carry_attributes(old, new)
    return new.train(old.training)


def _build_experts(
    layer: ExpertsLayer | None, stack: StructuredExperts | None, data: Mapping[str, Any]
) -> StructuredExperts | None:
    """Experts as described, in place of the parameter of `layer`; None if the model has them."""
    structure = Structure.from_dict(data["structure"])
    lay = Lay(
        experts=int(data["experts"]),
        fused=int(data["fused"]),
        fan_out=int(data["out_features"]),
        fan_in=int(data["in_features"]),
        takes_turns=bool(data["takes_turns"]),
        transposed=bool(data["transposed"]),
    )
    if stack is not None:
        difference = tell_difference(stack.computes_with(), describe_experts(lay, structure))
        if difference:
            raise ValueError(f"{difference} in the file")
        return None
    if layer is None:
        raise ValueError("the model has no such parameter of experts")
    if layer.lay != lay:
        raise ValueError(f"{layer.lay} in the model, {lay} in the file")
    if layer.obstacle:
        raise ValueError(layer.obstacle)
    options: dict[str, Any] = {"device": layer.matrix.device, "dtype": layer.matrix.dtype}
    new = uninitialised_experts(lay, structure, **options)
    new.label = str(data["label"])
    return new.requires_grad_(layer.trains).train(layer.owner.training)


# ---- filling a model -----------------------------------------------------------------------------


class _Write(NamedTuple):
    """A tensor of the model, and the values that are to be written into it."""

    tensor: Tensor
    values: Tensor


def _assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[_Write]:
    """What is to be written into the model's tensors, after torch has seen that all fits.

    For torch to see it, `tensors` take the places of the model's. Then the model's come back, ties
    included; copies of `tensors` stay in place of those that have another dtype or no values.
    """
    _check_ties(model, tensors)
    registries: list[dict[str, Any]] = []
    for module in model.modules():
        registries += [module._parameters, module._buffers]
    registries_before = [dict(registry) for registry in registries]
    model.load_state_dict(tensors, assign=True)

    # by the id of a tensor of the model: that tensor, or the copy that stays in its place
    final: dict[int, Tensor] = {}
    writes: list[_Write] = []
    for registry, before in zip(registries, registries_before, strict=True):
        for name, tensor in before.items():
            value = registry[name]
            if tensor is None or value is tensor:
                continue
            if id(tensor) not in final:
                if type(tensor.detach()) is not Tensor:
                    raise ValueError(f"{name!r} is no plain tensor: load before sharding the model")
                has_memory = not tensor.is_meta and not tensor.is_inference()
                if has_memory and tensor.dtype == value.dtype:
                    final[id(tensor)] = tensor
                    writes.append(_Write(tensor, value))
                else:
                    final[id(tensor)] = _copy_like(tensor, value)
            registry[name] = final[id(tensor)]

    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        text = "on the meta device and in no file (persistent=False); build the model on a device"
        raise ValueError(f"{', '.join(empty[:5])}: {text}")
    return writes


def _check_ties(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    first_names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in saved:
            continue
        first_name = first_names.setdefault(id(tensor), name)
        value = saved[name]
        first_value = saved[first_name]
        if value is not first_value and not torch.equal(value, first_value):
            text = "are tied in the model and differ in the file: untie them"
            raise ValueError(f"{first_name!r} and {name!r} {text}")


def _copy_like(tensor: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` that takes the place of `tensor`: on its device, and a parameter as it."""
    device = "cpu" if tensor.is_meta else tensor.device
    copy = value.detach().to(device, copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, tensor.requires_grad)
    return copy


def _require_path(path: str | os.PathLike[str]) -> None:
    if not os.fspath(path):
        raise ValueError(f"path={path!r} is empty; take a folder")
