"""What is compressed: a model of text with its inputs, figures that say how good it is, and how it
is saved and loaded."""

import math
import random
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import read

HELDOUT = 256  # sentences on which an encoder is measured
NEEDED = 64  # sentences that a text must have for an encoder
HELDOUT_WINDOWS = 16  # of text, on which a causal language model is measured
HELDOUT_BATCH = 2  # windows at a time: their logits are the largest tensors of a run
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
)
NEW_TOKENS = 32
LOADING = """import structlin.hf  # from_pretrained then knows structured layers
from transformers import {0}

model = {0}.from_pretrained(folder)"""
Batch = tuple[Tensor, Tensor]  # tokens and those that follow them, (batch, context) each


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model's file or folder, a text for it, and the batches to make of that text."""

    model: Path
    text: str
    data: str  #: what the text is called
    context: int  #: tokens of a window
    batch: int  #: windows of a batch; sentences come twice as many
    seed: int


def choose_kind(model: Path) -> "type[CausalLM] | type[Encoder]":
    """The kind of job that a GGUF file or a folder of transformers is.

    Raises:
        ValueError: it has no config that transformers reads.
    """
    return CausalLM if read.is_causal(model) else Encoder


class Job(ABC):
    """A model to compress. A `ValueError` of its making is an error of the command line."""

    defaults: ClassVar[dict[str, Any]] = {}  # sizes of batches and of healing
    judges = 4  # batches of training data by which distillation judges, and does not train
    title: str  # heads the table
    source: str  # what a model card says of the model and of the data
    unit: str  # what a batch holds, and how many
    loading = "model = structlin.load(model, folder)  # the dense model, made by its own code"
    dense: nn.Module
    logits: bool | None = None  # whether the models return bare logits, see structlin.distill
    heldout: list[Any]

    @abstractmethod
    def batch(self, step: int) -> Any:
        """Inputs of the models, a function of the seed and of `step` alone."""

    @abstractmethod
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Figures on what is held out; the first one is plotted."""

    def sample(self, model: nn.Module) -> list[str]:
        """What the model says, for a reader: none where it says nothing."""
        return []

    @abstractmethod
    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model, converted or not."""

    @abstractmethod
    def load(self, folder: Path) -> nn.Module:
        """The model that was saved there, from the folder alone."""


def first_tensor(output: Any) -> Tensor:
    """What a model returns first: logits, or a hidden state."""
    return output if isinstance(output, Tensor) else output[0]


class LanguageModel(Job):
    """Held-out bits a character, and perplexity a token."""

    text: Any  #: has `batch(step)` and `heldout`, both of `Batch`
    characters_per_token = 1.0

    def batch(self, step: int) -> Any:
        return self.text.batch(step)[0].long()

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        losses = [next_token_loss(model, *batch).item() for batch in self.text.heldout]
        nats = sum(losses) / len(losses)
        bits = nats / math.log(2) / self.characters_per_token
        return {"bits/char": bits, "perplexity": math.exp(min(nats, 700.0))}

    @property
    def heldout(self) -> list[Any]:  # type: ignore[override]
        return [inputs.long() for inputs, _ in self.text.heldout]


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = first_tensor(model(inputs.long()))  # (batch, tokens, vocabulary)
    return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())


class Windows:
    """Random windows of a text's tokens; windows of its last tenth are held out.

    Raises:
        ValueError: the text is too short.
    """

    def __init__(self, ids: Tensor, source: Source) -> None:
        self._source, cut = source, len(ids) - len(ids) // 10
        self._train, heldout = ids[:cut], ids[cut:]
        if len(heldout) <= source.context:
            raise ValueError(
                f"the text has {len(ids):,} tokens; a tenth of it is held out, so that "
                f"--context {source.context} needs at least {10 * (source.context + 1):,}"
            )
        starts = torch.linspace(0, len(heldout) - source.context - 1, HELDOUT_WINDOWS).long()
        self.heldout = [self._cut(heldout, part) for part in torch.split(starts, HELDOUT_BATCH)]

    def batch(self, step: int) -> Batch:
        random = torch.Generator().manual_seed(1_000_003 * self._source.seed + step)
        last = len(self._train) - self._source.context
        return self._cut(self._train, torch.randint(last, (self._source.batch,), generator=random))

    def _cut(self, ids: Tensor, starts: Tensor) -> Batch:
        window = ids[starts[:, None] + torch.arange(self._source.context + 1)]
        return window[:, :-1], window[:, 1:]


class CausalLM(LanguageModel):
    """A causal language model in a GGUF file or a folder of transformers, on its own tokens of the
    text."""

    defaults: ClassVar[dict[str, Any]] = {  # ten minutes for 135 million parameters on two cores
        "context": 256,
        "batch": 2,
        "calibration": 16,
        "heal": 30,
        "heal_lr": 1e-4,
    }
    judges = 1
    loading = LOADING.format("AutoModelForCausalLM")

    def __init__(self, source: Source) -> None:
        self.dense, self.tokenizer = read.read_language_model(source.model)
        positions = getattr(self.dense.config, "max_position_embeddings", None)
        if positions is not None and source.context > positions:
            raise ValueError(
                f"--context {source.context} is more than the {positions:,} tokens that the model "
                "reads at once"
            )
        ids = read.tokenize(self.tokenizer, source.text)
        self.text = Windows(ids, source)
        self.characters_per_token = len(source.text) / len(ids)
        path = source.model
        name = path.stem if path.is_file() else path.name
        self.source = f"{name} on {len(ids):,} tokens of {source.data}"
        self.unit = f"{source.batch} windows of {source.context} tokens"
        self.title = f"{type(self.dense).__name__} of {self.source}"

    def batch(self, step: int) -> dict[str, Tensor]:
        ids = self.text.batch(step)[0].long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # nothing is padding

    def require_fit(self, dense: dict[str, float]) -> None:
        """Raises: ValueError: with these figures the dense model was not trained on such tokens."""
        config: Any = self.dense.config
        tokens = config.vocab_size
        if dense["perplexity"] > 2 * tokens:
            raise ValueError(
                f"{self.source}: the dense model's perplexity is {dense['perplexity']:,.0f}, and a "
                f"blind guess has {tokens:,}: its tokenizer is another model's, or the text no text"
            )

    def sample(self, model: nn.Module) -> list[str]:
        return [generate(model, self.tokenizer, prompt) for prompt in PROMPTS]

    def save(self, model: nn.Module, folder: Path) -> None:
        save_pretrained(model, self.tokenizer, folder)

    def load(self, folder: Path) -> nn.Module:
        return load_saved("AutoModelForCausalLM", folder)


def generate(model: Any, tokenizer: Any, prompt: str, *, use_cache: bool = True) -> str:
    """The prompt and the likeliest tokens after it; a model of chats is asked."""
    text = prompt
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = model.eval().generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
    )
    said = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return f"{prompt} -> {said.strip()}"


def save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_saved(kind: str, folder: Path) -> nn.Module:
    """The model of that class of transformers in a folder."""
    import transformers

    from .. import hf  # noqa: F401  # from_pretrained then knows structured layers

    model: nn.Module = getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
    return model


# ---- encoders of sentences -----------------------------------------------------------------------


class Encoder(Job):
    """Any other model of text in a folder of transformers: do sentence vectors stay what they were?

    A sentence's vector is the mean over its tokens, of unit length.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "context": 64,
        "batch": 8,
        "calibration": 8,
        "heal": 100,
        "heal_lr": 1e-3,
    }
    loading = LOADING.format("AutoModel")

    def __init__(self, source: Source) -> None:
        self.dense, self.tokenizer = read.read_encoder(source.model)
        found = split_sentences(source.text, source.seed)
        if len(found) < NEEDED:
            raise ValueError(
                f"the text has {len(found)} sentences of 30 to 250 characters; an encoder needs "
                f"at least {NEEDED}: --data"
            )
        n = min(HELDOUT, len(found) // 4)
        heldout, self.sentences, self.size = found[:n], found[n:], 2 * source.batch
        self.heldout = [self.tokenize(heldout[i : i + 32]) for i in range(0, n, 32)]
        self.before = self.embed(self.dense)
        self.unit = f"{source.batch} pairs of sentences"
        self.source = f"{source.model.name} on sentences of {source.data}"
        self.title = f"{type(self.dense).__name__} of {self.source}, {n} held out"

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        return dict(self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

    def batch(self, step: int) -> dict[str, Tensor]:
        chosen = random.Random(step).sample(self.sentences, min(self.size, len(self.sentences)))
        return self.tokenize(chosen)

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:  # (sentences, width)
        model.eval()
        rows = []
        for batch in self.heldout:
            hidden, mask = first_tensor(model(**batch)), batch["attention_mask"][..., None]
            rows.append((hidden * mask).sum(1) / mask.sum(1))
        return F.normalize(torch.cat(rows))

    def measure(self, model: nn.Module) -> dict[str, float]:
        after = self.embed(model)
        nearest = [
            (vectors @ vectors.mT).fill_diagonal_(-1).argmax(1) for vectors in (self.before, after)
        ]
        return {
            "cosine": (self.before * after).sum(1).mean().item(),
            "same neighbour": (nearest[0] == nearest[1]).float().mean().item(),
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        save_pretrained(model, self.tokenizer, folder)

    def load(self, folder: Path) -> nn.Module:
        return load_saved("AutoModel", folder)


def split_sentences(text: str, seed: int) -> list[str]:
    """Distinct sentences of 30 to 250 characters, shuffled."""
    parts = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"(?<=[.!?])\s+|\n\n", text))
    found = dict.fromkeys(part for part in parts if 30 <= len(part) <= 250)
    return random.Random(seed).sample(list(found), len(found))
