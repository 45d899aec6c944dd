"""What examples/compress.py compresses: models with their inputs, figures that say how good they
are, and how they are saved and loaded."""

import argparse
import math
import random
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import compare
import pretrained
import torch
import torch.nn.functional as F
import train_gpt
from torch import Tensor, nn

import structlin

HELDOUT = 256  # sentences on which an encoder is measured
NEEDED = 64  # sentences that a text must have for an encoder
HELDOUT_WINDOWS = 16  # of text, on which a model of transformers is measured
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


class Job(ABC):
    """`ValueError`, `OSError` and `ImportError` from its making are errors of the command line."""

    defaults: ClassVar[dict[str, Any]] = {}  # options that are other than compress.SIZES
    judges = 4  # batches of training data by which distillation judges, and does not train
    title: str  # heads the table
    source: str  # what a model card says of the model and of the data
    unit: str  # what a batch holds
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


def choose_kind(model: str | None) -> type[Job]:
    """The kind of job that `--model` names.

    Raises:
        ValueError, OSError: a folder without the config of a model.
    """
    if model is None:
        return SmallGPT
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        return CausalLM
    if not path.is_dir():
        return Digits
    from transformers import AutoConfig

    kinds = AutoConfig.from_pretrained(path, local_files_only=True).architectures or [""]
    return CausalLM if kinds[0].endswith(("ForCausalLM", "LMHeadModel")) else Encoder


def first_tensor(output: Any) -> Tensor:
    """What a model returns first: logits, or a hidden state."""
    return output if isinstance(output, Tensor) else output[0]


# ---- language models -----------------------------------------------------------------------------


class LanguageModel(Job):
    """Held-out bits a character, and perplexity a token."""

    text: train_gpt.Text
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
    def heldout(self) -> list[Any]:
        return [inputs.long() for inputs, _ in self.text.heldout]


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = first_tensor(model(inputs.long()))  # (batch, tokens, vocabulary)
    return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())


class SmallGPT(LanguageModel):
    """The GPT of examples/train_gpt.py, trained here on the text."""

    logits = True

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.text = options, train_gpt.Text(options)
        self.title = self.source = self.text.title
        self.unit = f"windows of {options.context} characters"
        self.dense = self.build()
        train(self.dense, self.loss, options)

    def build(self) -> nn.Module:
        torch.manual_seed(self.options.seed)
        return self.text.model(self.options.width)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return next_token_loss(model, *self.text.batch(step))

    def save(self, model: nn.Module, folder: Path) -> None:
        structlin.save(model, folder)

    def load(self, folder: Path) -> nn.Module:
        return structlin.load(self.build(), folder)


class CausalLM(LanguageModel):
    """A causal language model in a GGUF file or a folder of transformers, on its own tokens of the
    text."""

    defaults: ClassVar[dict[str, Any]] = {  # ten minutes for 135 million parameters on two cores
        "families": ["lowrank"],
        "budgets": [0.8],
        "ways": ["calibrated"],
        "context": 256,
        "batch": 2,
        "calibration": 16,
        "heal": 60,
        "heal_lr": 1e-4,
    }
    judges = 1
    loading = LOADING.format("AutoModelForCausalLM")

    def __init__(self, options: argparse.Namespace) -> None:
        path, text = pretrained.locate(Path(options.model)), train_gpt.read_text(options.data)
        self.dense, self.tokenizer = read_language_model(path)
        positions = getattr(self.dense.config, "max_position_embeddings", None)
        if positions is not None and options.context > positions:
            raise ValueError(
                f"--context {options.context} is more than the {positions:,} tokens that the model "
                "reads at once"
            )
        ids = pretrained.tokenize(self.tokenizer, text)
        cut = len(ids) - len(ids) // 10
        self.text = train_gpt.Text(options)
        self.text.train, heldout = ids[:cut], ids[cut:]
        if len(heldout) <= options.context:
            raise ValueError(
                f"the text has {len(ids):,} tokens; a tenth of it is held out, so that "
                f"--context {options.context} needs at least {10 * (options.context + 1):,}"
            )
        starts = torch.linspace(0, len(heldout) - options.context - 1, HELDOUT_WINDOWS).long()
        parts = starts.split(HELDOUT_BATCH)
        self.text.heldout = [self.text.windows(heldout, part) for part in parts]
        self.characters_per_token = len(text) / len(ids)
        data = options.data.name if options.data else "Python's standard library"
        self.source = (
            f"{path.stem if path.is_file() else path.name} on {len(ids):,} tokens of {data}"
        )
        self.unit = f"windows of {options.context} tokens"
        self.title = f"{type(self.dense).__name__} of {self.source}"

    def batch(self, step: int) -> dict[str, Tensor]:
        ids = self.text.batch(step)[0].long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # nothing is padding

    def sample(self, model: nn.Module) -> list[str]:
        return [generate(model, self.tokenizer, prompt) for prompt in PROMPTS]

    def save(self, model: nn.Module, folder: Path) -> None:
        save_pretrained(model, self.tokenizer, folder)

    def load(self, folder: Path) -> nn.Module:
        from transformers import AutoModelForCausalLM

        import structlin.hf  # noqa: F401  # from_pretrained then knows structured layers

        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def read_language_model(path: Path) -> tuple[Any, Any]:
    """A causal language model and its tokenizer.

    Raises:
        ValueError, OSError: they cannot be read, or are not of one another.
    """
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"--model {path}: no such file")
        return pretrained.read_gguf(path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = pretrained.load_causal_lm(path, dtype=torch.float32, local_files_only=True)
    pretrained.check_tokenizer(model, tokenizer, str(path))
    return model, tokenizer


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


# ---- encoders of sentences -----------------------------------------------------------------------


class Encoder(Job):
    """Any other model of text in a folder of transformers: do sentence vectors stay what they were?

    A sentence's vector is the mean over its tokens, of unit length.
    """

    unit = "pairs of sentences"
    loading = LOADING.format("AutoModel")

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = Path(options.model)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        options_ = {"dtype": torch.float32, "local_files_only": True}
        self.dense = AutoModel.from_pretrained(folder, **options_).eval()
        pretrained.check_tokenizer(self.dense, self.tokenizer, options.model)
        found = split_sentences(train_gpt.read_text(options.data), options.seed)
        if len(found) < NEEDED:
            raise ValueError(
                f"the text has {len(found)} sentences of 30 to 250 characters; an encoder needs "
                f"at least {NEEDED}: --data"
            )
        n = min(HELDOUT, len(found) // 4)
        heldout, self.sentences, self.size = found[:n], found[n:], 2 * options.batch
        self.heldout = [self.tokenize(heldout[i : i + 32]) for i in range(0, n, 32)]
        self.before = self.embed(self.dense)
        data = options.data.name if options.data else "Python's standard library"
        self.source = f"{folder.name} on sentences of {data}"
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
        from transformers import AutoModel

        import structlin.hf  # noqa: F401  # from_pretrained then knows structured layers

        return AutoModel.from_pretrained(folder, local_files_only=True)


def split_sentences(text: str, seed: int) -> list[str]:
    """Distinct sentences of 30 to 250 characters, shuffled."""
    parts = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"(?<=[.!?])\s+|\n\n", text))
    found = dict.fromkeys(part for part in parts if 30 <= len(part) <= 250)
    return random.Random(seed).sample(list(found), len(found))


# ---- images --------------------------------------------------------------------------------------


class Digits(Job):
    """A model of timm, trained here on scikit-learn's handwritten digits (8 x 8, enlarged)."""

    logits = True
    unit = "images"

    def __init__(self, options: argparse.Namespace) -> None:
        from sklearn.datasets import load_digits

        self.options = options
        self.dense = self.build()
        if options.checkpoint is not None:
            take_checkpoint(self.dense, options.checkpoint)
        pixels, classes = load_digits(return_X_y=True)
        images = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 8 - 1  # from -1 to 1
        images = F.interpolate(images, size=(options.image, options.image), mode="bilinear")
        order = torch.randperm(len(images), generator=compare.generator(options.seed, 0))
        images, classes = images[order].expand(-1, 3, -1, -1), torch.tensor(classes)[order]
        cut = len(images) - len(images) // 5
        self.images, self.classes = images[:cut], classes[:cut]
        self.heldout = list(images[cut:].split(60))
        self.heldout_classes = classes[cut:]
        train(self.dense, self.loss, options)
        start = "random weights" if options.checkpoint is None else options.checkpoint.name
        self.title = self.source = (
            f"{options.model} from {start}, {options.steps:,} steps of {options.batch} digits, "
            f"seed {options.seed}"
        )

    def build(self) -> nn.Module:
        try:
            import timm
        except ImportError as error:
            raise ValueError(
                f"--model {self.options.model}: no such folder, and timm is not here: {error}"
            ) from None
        if self.options.model not in timm.list_models():
            raise ValueError(f"--model {self.options.model}: no such folder, nor a model of timm")
        torch.manual_seed(self.options.seed)
        try:
            return timm.create_model(
                self.options.model, num_classes=10, img_size=self.options.image
            )
        except TypeError:  # a model for images of any size
            return timm.create_model(self.options.model, num_classes=10)

    def draw(self, step: int) -> Tensor:
        random_ = compare.generator(self.options.seed, step)
        return torch.randint(len(self.images), (self.options.batch,), generator=random_)

    def batch(self, step: int) -> Tensor:
        return self.images[self.draw(step)]

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return F.cross_entropy(model(self.batch(step)), self.classes[self.draw(step)])

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        logits = torch.cat([model(images) for images in self.heldout])  # (images, 10)
        right = (logits.argmax(1) == self.heldout_classes).float().mean().item()
        return {
            "accuracy": right,
            "loss": F.cross_entropy(logits, self.heldout_classes).item(),
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        structlin.save(model, folder)

    def load(self, folder: Path) -> nn.Module:
        return structlin.load(self.build(), folder)


def take_checkpoint(model: nn.Module, path: Path) -> None:
    """Load the file's weights; the head of another number of classes stays random.

    Raises:
        ValueError: no such file; anything but the head is not as in the file.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        raise ValueError(f"--checkpoint {path}: no such file")
    state, own = load_state_dict(str(path)), model.state_dict()
    fits = {
        name: value
        for name, value in state.items()
        if name in own and own[name].shape == value.shape
    }
    head = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key in module.state_dict()
        if module is model.get_classifier()
    }
    missing = sorted(set(own) - set(fits) - head)
    if missing:
        raise ValueError(
            f"--checkpoint {path}: tensors of the model are not in the file, or of another shape "
            f"(is --image what it was trained with?): {', '.join(missing[:5])}"
        )
    model.load_state_dict(fits, strict=False)


# ---- training ------------------------------------------------------------------------------------


def train(model: nn.Module, loss: Any, options: argparse.Namespace) -> None:
    """`--steps` of AdamW at `--lr`, with a warmup and a cosine; `loss(model, step)`."""
    optimizer = torch.optim.AdamW(structlin.param_groups(model, options.lr, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: compare.warmup_cosine(step, options.steps)
    )
    model.train()
    for step in range(options.steps):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
