"""What the commands read: text, and models of a GGUF file, a folder of transformers or timm.

Nothing is downloaded. transformers, gguf and timm are imported where they are needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._files import FILE

PLAIN_SPLITS = ("default", "gpt-2")  # of text before byte pairs are merged, as transformers splits
CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of the names of causal language models


def import_extra(name: str, model: object) -> Any:
    """A package that not everybody has.

    Raises:
        ValueError: it is not here, or fails; the message names the extra that brings it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f'{model}: {name} is needed ({error}): pip install "structlin[{name}]"'
        ) from None


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        ValueError: there is no such file, or it is not text.
    """
    if not path.is_file():
        what = "it is a folder, not a text file" if path.is_dir() else "no such file"
        raise ValueError(f"--data {path}: {what}")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--data {path} is not text: the byte at {error.start} is not UTF-8"
        ) from None
    except OSError as error:
        raise ValueError(f"--data {path}: {error.strerror}") from None
    if "\0" in text:
        raise ValueError(f"--data {path} is not text: it has a zero byte at {text.index(chr(0))}")
    return text


# ---- models of transformers and timm -------------------------------------------------------------


def is_causal(path: Path) -> bool:
    """Whether a GGUF file or a folder of transformers has a causal language model.

    Raises:
        ValueError: it has no config that transformers reads.
    """
    if path.suffix.lower() == ".gguf":
        return True
    kinds = _read_config(path).architectures or [""]
    return str(kinds[0]).endswith(CAUSAL)


def _read_config(path: Path) -> Any:
    """The config of a GGUF file or a folder of transformers, whose model is dense."""
    transformers = import_extra("transformers", path)
    if path.suffix.lower() != ".gguf":
        weights = [each.name for kind in ("safetensors", "bin") for each in path.glob(f"*.{kind}")]
        _refuse_structured(path, weights == [FILE])
        with _naming(path):
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
        _refuse_structured(path, method == "structlin")
        return config
    _require_file(path)
    import_extra("gguf", path)
    with _naming(path):
        options = {"gguf_file": path.name, "local_files_only": True}
        return transformers.AutoConfig.from_pretrained(path.parent, **options)


def build_skeleton(name: str) -> nn.Module:
    """The model of a GGUF file, a folder of transformers or timm's list, on the meta device: its
    layers, without values.

    Raises:
        ValueError: there is no such model, or a package that it needs is not here.
    """
    path = Path(name)
    if path.suffix.lower() == ".gguf" or path.is_dir():
        config, transformers = _read_config(path), import_extra("transformers", path)
        kind = transformers.AutoModelForCausalLM if is_causal(path) else transformers.AutoModel
        with _naming(path), torch.device("meta"):
            model: nn.Module = kind.from_config(config)
        return model
    timm = import_timm(name)
    with _naming(name), torch.device("meta"):
        model = timm.create_model(name)
    return model


def import_timm(name: str) -> Any:
    """timm, which has a model of that name.

    Raises:
        ValueError: it has none, or timm is not here.
    """
    if Path(name).exists():
        raise ValueError(f"{name} is neither a folder nor a GGUF file")
    timm = import_extra("timm", f"{name}: no such folder; for a model of timm")
    if name not in timm.list_models():
        raise ValueError(f"{name}: no such folder, nor a model of timm")
    return timm


def _refuse_structured(path: Path, saved: bool) -> None:
    if saved:
        raise ValueError(
            f"{path} holds a model that structlin saved: its layers are structured already; give "
            "the dense model that it was made from"
        )


@contextmanager
def _naming(path: object) -> Iterator[None]:
    """An error of reading names what was read; transformers, tokenizers and timm have their own."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")


# ---- language models -----------------------------------------------------------------------------


def read_language_model(path: Path) -> tuple[Any, Any]:
    """The causal language model of a GGUF file or a folder of transformers, in float32, and its
    tokenizer.

    Raises:
        ValueError: they cannot be read, or are not of one another.
    """
    if path.suffix.lower() == ".gguf":
        _require_file(path)
        return read_gguf(path)
    transformers = import_extra("transformers", path)
    with _naming(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = load_causal_lm(path, dtype=torch.float32, local_files_only=True)
    check_tokenizer(model, tokenizer, str(path))
    return model, tokenizer


def read_encoder(path: Path) -> tuple[Any, Any]:
    """Any other model of text in a folder of transformers, in float32, and its tokenizer, which
    pads.

    Raises:
        ValueError: they cannot be read, or are not of one another.
    """
    transformers = import_extra("transformers", path)
    options = {"dtype": torch.float32, "local_files_only": True}
    with _naming(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(path, **options).eval()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    check_tokenizer(model, tokenizer, str(path))
    return model, tokenizer


def read_gguf(path: Path) -> tuple[nn.Module, Any]:
    """The causal language model in a GGUF file, in float32, and its tokenizer.

    transformers reads both (of llama.cpp's rows of q and k, too, it makes its own). It leaves out
    one thing: SmolLM's tokenizer takes digits one by one before anything else.

    Raises:
        ValueError: it is no GGUF file, of an architecture or of numbers that transformers or gguf
            do not read, without all of the model's tensors, or of a tokenizer that splits text by a
            rule that is not known here.
    """
    gguf, transformers = import_extra("gguf", path), import_extra("transformers", path)

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        """It refuses to read on where the file has ended, which gguf's own does for ever."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **named)
            if len(found) < count:
                raise ValueError(f"it has {len(self.data):,} bytes, less than it says to hold")
            return found

    try:
        fields = Reader(path).fields
        split = _split_of(fields)
        options = {"gguf_file": path.name, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
        model = load_causal_lm(path.parent, dtype=torch.float32, **options)
    except Exception as error:  # gguf, tokenizers and huggingface_hub have their own
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if split == "smollm":
        _split_digits(tokenizer)
    vars(model.config).pop("quantization_config", None)  # its weights are float32 from now on
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):  # and it can be saved
        vars(model).pop(name, None)
    model.config.name_or_path = path.stem
    check_tokenizer(model, tokenizer, path.name)
    return model.eval(), tokenizer


def _split_of(fields: Any) -> str:
    """The name of the rule by which a tokenizer of byte pairs splits text."""
    model, pre = (
        fields[key].contents() if key in fields else ""
        for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if "general.architecture" not in fields:
        raise ValueError("it does not say its architecture (general.architecture)")
    architecture = fields["general.architecture"].contents()
    if model == "gpt2" and architecture == "llama" and pre not in ("smollm", *PLAIN_SPLITS):
        known = ", ".join(("smollm", *PLAIN_SPLITS))
        raise ValueError(f"its tokenizer splits text as {pre!r}, and {known} are known")
    return str(pre)


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])


def load_causal_lm(folder: Path, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, which starts at random what it does not find.

    Raises:
        ValueError: tensors of the model are not in the files, or have another shape there.
    """
    kind = import_extra("transformers", folder).AutoModelForCausalLM
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = kind.from_pretrained(folder, **options)
    wrong = [f"{name} is not there" for name in sorted(found["missing_keys"])]
    wrong += [
        f"{name} is {tuple(there)}, and its config says {tuple(own)}"
        for name, there, own in sorted(found["mismatched_keys"])
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} tensors of the model are wrong: {'; '.join(wrong[:3])}")
    return model


def check_tokenizer(model: Any, tokenizer: Any, name: str) -> None:
    """Raises: ValueError: the tokenizer has ids for which the model has no embedding."""
    rows = model.get_input_embeddings().weight.shape[0]
    last = max(tokenizer.get_vocab().values())
    if last >= rows:
        raise ValueError(
            f"{name}: the tokenizer has ids up to {last:,} and the model embeds {rows:,} from 0 "
            "on: they are not of one another"
        )


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """The ids of a text, which may be longer than what the model reads at once: `(tokens,)`."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
