"""What examples/compress.py compresses: models with their inputs, figures that say how good they
are, and how they are saved and loaded."""

import argparse
from pathlib import Path
from typing import Any

import compare
import pretrained
import torch
import torch.nn.functional as F
import train_gpt
from torch import Tensor, nn

import structlin
from structlin._commands import jobs, read


def choose_kind(model: str | None) -> type[jobs.Job]:
    """The kind of job that `--model` names.

    Raises:
        ValueError: a folder without the config of a model.
    """
    if model is None:
        return SmallGPT
    path = Path(model)
    if path.suffix.lower() == ".gguf" or path.is_dir():
        return jobs.choose_kind(path)
    return Digits


def make_job(kind: type[jobs.Job], options: argparse.Namespace) -> jobs.Job:
    """The job, from the options of the command line."""
    if kind in (SmallGPT, Digits):
        return kind(options)
    path = pretrained.locate(Path(options.model))
    data = options.data.name if options.data else "Python's standard library"
    sizes = {name: getattr(options, name) for name in ("context", "batch", "seed")}
    return kind(jobs.Source(model=path, text=train_gpt.read_text(options.data), data=data, **sizes))


# ---- language models -----------------------------------------------------------------------------


class SmallGPT(jobs.LanguageModel):
    """The GPT of examples/train_gpt.py, trained here on the text."""

    logits = True

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.text = options, train_gpt.Text(options)
        self.title = self.source = self.text.title
        self.unit = f"{options.batch} windows of {options.context} characters"
        self.dense = self.build()
        train(self.dense, self.loss, options)

    def build(self) -> nn.Module:
        return compare.build(self.text, self.options.width, None, self.options.seed)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return jobs.next_token_loss(model, *self.text.batch(step))

    def save(self, model: nn.Module, folder: Path) -> None:
        structlin.save(model, folder)

    def load(self, folder: Path) -> nn.Module:
        return structlin.load(self.build(), folder)


# ---- images --------------------------------------------------------------------------------------


class Digits(jobs.Job):
    """A model of timm, trained here on scikit-learn's handwritten digits (8 x 8, enlarged)."""

    logits = True

    def __init__(self, options: argparse.Namespace) -> None:
        from sklearn.datasets import load_digits

        self.options = options
        self.unit = f"{options.batch} images"
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
        timm = read.import_timm(self.options.model)
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
