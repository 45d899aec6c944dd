"""`save` and `load`; structured layers as plain data, which transformers' config holds too."""

import os
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._arguments import checked, require_choice
from ._files import read_file, write_file
from ._linear import StructuredLinear, uninitialised
from ._model.survey import Layer, is_conv1d, linear_layers, swap
from ._quantize import QuantizedLinear
from ._state import tell_difference
from ._structure import Structure

_TYPES = {  # of the fields of a described layer; `Structure` looks at its own
    "label": str,
    "in_features": int,
    "out_features": int,
    "bias": bool,
    "weight_norm": bool,
    "init": str,
    "zero_init": bool,
}
_UNBUILDABLE = (  # what a description that nobody meant leads to, for example sizes of 10**30
    AttributeError,
    KeyError,
    OverflowError,
    RuntimeError,  # RecursionError too
    TypeError,
    ValueError,
)
_LONGEST = 500  # characters of a message that quotes names: a file may hold any text
Replacement = tuple[tuple[str, ...], StructuredLinear]  # a new layer, and its names in the model


@checked
def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model, converted or not, to `structlin.safetensors` in the folder `path`, for `load`.

    The file is replaced by one rename once the new one is on the disk: at any moment, also after a
    crash, the folder holds the old model or the new one, whole. Several processes may save and load
    at once. Tied tensors are stored once.

    Raises:
        ValueError: a tensor without values (meta), sharded, quantised, or state that is no tensor;
            `path` is a file.
        OSError: the file cannot be written, for example because the disk is full.

    >>> import tempfile
    >>> from structlin import BTT, convert
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(convert(nn.Sequential(nn.Linear(64, 64)), BTT()), folder)
    ...     load(nn.Sequential(nn.Linear(64, 64)), folder)[0].structure.params
    1024
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path={str(folder)!r} is a file; save writes a folder")
    tensors, aliases = _collect_tensors(model)
    write_file(folder, tensors, describe(model), aliases)


@checked
def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Make `model` what was saved in `path`: the layers that the file names become structured.

    Parameters are filled in place, so that an optimizer, DDP or hooks made before keep hold of
    them. Only those of another dtype than the file's, on the meta device or of a layer that becomes
    structured are new ones. The file is read once and not needed afterwards. Meanwhile the file and
    the model's old values take memory on the CPU.

    Args:
        model: freshly built and dense, also on the meta device; or converted already in the same
            way. Its parameters keep their device (meta: the CPU) and `requires_grad`, and take the
            file's dtype.

    Returns:
        `model`; the new layer if the model is itself a linear layer.

    Raises:
        ValueError: the file is missing, truncated or malformed; the model differs from what was
            saved, where the message names the layers and tensors. After this error, as after any
            other, the model is as it was.

    >>> import tempfile
    >>> from structlin import BTT, convert
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(convert(nn.Sequential(nn.Linear(16, 16)), BTT()), folder)
    ...     load(nn.Sequential(nn.Linear(16, 16)), folder)[0].label
    'BTT(rank=1)'
    """
    saved = read_file(Path(path))
    with torch.inference_mode(False), torch.no_grad(), _restore_on_error(model):
        root = swap(model, restructure(model, saved.modules))
        dtypes = {name: _read_dtype(data) for name, data in saved.modules.items()}
        _check_ties(root, saved.tensors)
        _take_dtypes(root, saved.tensors)
        try:
            root.load_state_dict(saved.tensors)
        except RuntimeError as error:
            text = str(error)[:_LONGEST]
            raise ValueError(f"path={str(path)!r}: {text}") from error
        _check_buffers(root)
    for name, dtype in dtypes.items():
        layer = root.get_submodule(name)
        if isinstance(layer, QuantizedLinear):
            layer.dtype = dtype
    return root


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Each structured layer of `model` as plain data, under all its names, for `restructure`."""
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
            "sigma": module.stds,
            **_describe_kind(module),
        }
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, StructuredLinear)
    }


def _describe_kind(layer: StructuredLinear) -> dict[str, Any]:
    """What a subclass computes with beside what every structured layer does."""
    plain = StructuredLinear.computes_with(layer)
    own = {name: value for name, value in layer.computes_with().items() if name not in plain}
    if isinstance(layer, QuantizedLinear):  # other tensors say it by theirs
        own["dtype"] = str(layer.compute_dtype).removeprefix("torch.")
    return own


def _read_dtype(data: Mapping[str, Any]) -> torch.dtype:
    """That of a layer with int8 cores; older files have it in the scales."""
    name = data.get("dtype", "float32")
    require_choice("dtype", name, ("float16", "bfloat16", "float32", "float64"))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def restructure(model: nn.Module, modules: Mapping[str, Mapping[str, Any]]) -> list[Replacement]:
    """The layers that `model` must get to have the structures that `modules` describes; for `swap`.

    They have the biases of the layers that they replace, and no other values yet. Layers that are
    as described already are left out. Nothing is changed.

    Raises:
        ValueError: layers that the model lacks, that are no plain linear layers, or that differ in
            widths, bias or what they compute with.
    """
    layers = {name: layer for layer in linear_layers(model) for name in layer.names}
    problems, found = [], dict[nn.Module, Replacement]()
    for name, data in modules.items():
        layer = layers.get(name)
        if layer is None:
            inside = name.partition(".")[2]
            whole = f" but {inside!r}: the file is of what holds this model, such as a wrapper"
            hint = whole if inside in layers else ""
            problems.append(f"{name!r}: the model has no such linear layer{hint}")
            continue
        try:
            new = _build_layer(layer, data)
        except _UNBUILDABLE as error:
            problems.append(f"{name!r}: {str(error)[:_LONGEST]}")
            continue
        if new is not None:
            found[layer.module] = layer.names, new
    converted = [
        name for name, layer in layers.items() if isinstance(layer.module, StructuredLinear)
    ]
    problems += [
        f"{name!r} is structured in the model, dense in the file"
        for name in converted
        if name not in modules
    ]
    if problems:
        raise ValueError(f"the model differs from what was saved: {'; '.join(problems[:10])}")
    return list(found.values())


def _build_layer(layer: Layer, data: Mapping[str, Any]) -> StructuredLinear | None:
    """A layer as described, in place of `layer`; None if that computes with the same already."""
    for name, kind in _TYPES.items():
        if type(data[name]) is not kind:
            raise ValueError(f"{name}={reprlib.repr(data[name])} is no {kind.__name__}")
    old, bias = layer.module, layer.module._parameters.get("bias")
    structured = isinstance(old, StructuredLinear)
    widths = layer.in_features, layer.out_features
    saved = data["in_features"], data["out_features"]
    if widths != saved:
        raise ValueError(
            f"{widths[0]} -> {widths[1]} in the model, {saved[0]} -> {saved[1]} in the file"
        )
    if (bias is not None) != data["bias"]:
        raise ValueError(f"bias={not data['bias']} in the model, bias={data['bias']} in the file")
    if not structured and layer.obstacle:
        raise ValueError(layer.obstacle)
    weight = old.weight
    assert isinstance(weight, Tensor)
    new = _make_empty(
        data,
        *widths,
        Structure.from_dict(data["structure"]),
        bias=False,
        weight_norm=data["weight_norm"],
        init=data["init"],
        zero_init=data["zero_init"],
        device="meta" if structured else weight.device,
        dtype=weight.dtype,
    )
    if data["sigma"] != new.stds:
        raise ValueError(
            f"init={new.init!r} gives sigma={new.stds} in this version, {data['sigma']} in the file"
        )
    if isinstance(old, StructuredLinear):
        _check_same(old, new, data["label"])
        return None
    new.label, new.conv1d = data["label"], is_conv1d(old)
    if not isinstance(new, QuantizedLinear):
        new.requires_grad_(weight.requires_grad)
    new.bias = bias
    return new.train(old.training)


def _make_empty(data: Mapping[str, Any], *args: Any, **options: Any) -> StructuredLinear:
    """A layer of the kind that `data` describes, without values."""
    kind: type[StructuredLinear] = StructuredLinear
    if "quantized" in data:
        require_choice("quantized", data["quantized"], ("int8",))
        kind = QuantizedLinear
    return uninitialised(*args, kind=kind, **options)


def _check_same(old: StructuredLinear, new: StructuredLinear, label: str) -> None:
    if old.structure != new.structure:
        raise ValueError(f"is {old.label} in the model, {label} in the file")
    if difference := tell_difference(old.computes_with(), new.computes_with()):
        raise ValueError(f"{difference} in the file")


def _collect_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor of the state once, contiguous, alone in its storage; other names -> the first."""
    tensors, aliases, first = dict[str, Tensor](), dict[str, str](), dict[tuple[Any, ...], str]()
    for name, tensor in model.state_dict().items():
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            kind = type(tensor).__name__
            raise ValueError(
                f"{name!r} is a {kind}, no plain tensor; gather or dequantise it before saving"
            )
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
        alone = (
            storage.nbytes() == tensor.numel() * tensor.element_size()
            and storage.data_ptr() not in seen
        )
        seen.add(storage.data_ptr())
        if not alone or not tensor.is_contiguous():
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    return tensors, aliases


# ---- filling a model -----------------------------------------------------------------------------


@contextmanager
def _restore_on_error(model: nn.Module) -> Iterator[None]:
    """If the block fails, put modules, parameters, buffers and values back as they are now."""
    kinds = ("_modules", "_parameters", "_buffers")
    places = [vars(module)[kind] for module in model.modules() for kind in kinds]
    contents = [dict(place) for place in places]
    tensors = [
        t for t in (*model.parameters(), *model.buffers()) if not t.is_meta and not t.is_inference()
    ]
    values = [(tensor, tensor._version, tensor.to("cpu", copy=True)) for tensor in tensors]
    try:
        yield
    except BaseException:
        for place, content in zip(places, contents, strict=True):
            place.clear()
            place.update(content)
        for tensor, version, value in values:
            if tensor._version != version:
                tensor.copy_(value)
        raise


def _check_ties(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raises: ValueError: tensors that are one in the model differ in the file."""
    first = dict[int, str]()
    state = model.state_dict(keep_vars=True)
    for name in (name for name in state if name in saved):
        other = first.setdefault(id(state[name]), name)
        if saved[name] is not saved[other] and not torch.equal(saved[name], saved[other]):
            raise ValueError(
                f"{other!r} and {name!r} are tied in the model and differ in the file: untie them"
            )


def _check_buffers(model: nn.Module) -> None:
    """Raises: ValueError: a buffer still has no values."""
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        text = "on the meta device and in no file (persistent=False); build the model on a device"
        raise ValueError(f"{', '.join(lost[:5])}: {text}")


def _take_dtypes(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Make anew the parameters and buffers that cannot take the file's numbers; ties stay."""
    made = dict[int, Tensor]()
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, old in list(held.items()):
                value = saved.get(f"{prefix}.{name}".removeprefix("."))
                if old is None or value is None:
                    continue
                if old.dtype == value.dtype and not old.is_meta and not old.is_inference():
                    continue
                if id(old) not in made:
                    made[id(old)] = _make_like(old, value)
                held[name] = made[id(old)]


def _make_like(old: Tensor, value: Tensor) -> Tensor:
    device = "cpu" if old.is_meta else old.device
    new = torch.empty(old.shape, dtype=value.dtype, device=device)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
