"""What the experiments train on: a teacher with unlimited data, digits, text.

A `Task` is made from a seed; `batch(size)` draws inputs and targets, `new(size)` the same that no
training of its seed sees, and `loss` compares a model's outputs with targets. What a Transformer
learns (`Characters`, `Images`) is a function of a step, so that all models see the same batches.
"""

import pydoc_data.topics
import sysconfig
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import models

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Task(Protocol):
    loss: Callable[[Tensor, Tensor], Tensor]

    def batch(self, size: int) -> Batch: ...
    def new(self, size: int) -> Batch: ...


# ---- regression ----------------------------------------------------------------------------------


class Teacher:
    """Regression of a fixed random MLP on Gaussian inputs: every batch is new, so the loss is the
    test loss.

    Two hidden layers of 256 ReLUs, random biases, features centred in each layer, 16 inputs, 4
    outputs of unit variance: a student that predicts the mean has loss 1. The teacher differs from
    seed to seed.
    """

    inputs, outputs, width = 16, 4, 256
    loss = staticmethod(F.mse_loss)

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, torch.Generator().manual_seed(1_000_003 * seed + 1)
        widths = (self.inputs, self.width, self.width, self.outputs)
        self.weights = [self._normal(n, m) * (2 / m) ** 0.5 for m, n in pairwise(widths)]
        self.biases = [0.5 * self._normal(self.width) for _ in range(2)]
        y = self._raw(self._normal(8192, self.inputs))
        self.mean, self.std = y.mean(0), y.std(0)

    def batch(self, size: int) -> Batch:
        x = self._normal(size, self.inputs)
        return x, (self._raw(x) - self.mean) / self.std

    def new(self, size: int) -> Batch:
        self.random.manual_seed(-1 - self.seed)
        return self.batch(size)

    def _raw(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights[:-1], self.biases, strict=True):
            x = F.relu(x @ weight.T + bias)
            x = x - x.mean(1, keepdim=True)
        return x @ self.weights[-1].T

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)


# ---- digits --------------------------------------------------------------------------------------


@cache
def digits() -> Batch:
    """scikit-learn's 1797 images `(1797, 64)`, standardised as a whole, and their labels
    `(1797,)`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(labels)


class Digits:
    """Classification of scikit-learn's digits, each time moved by up to a pixel either way and with
    noise added; of all images, or of the "train" three quarters or the "test" quarter."""

    inputs, outputs, noise = 64, 10, 0.5
    loss = staticmethod(F.cross_entropy)

    def __init__(self, seed: int, part: str | None = None) -> None:
        self.seed, self.random = seed, torch.Generator().manual_seed(1_000_003 * seed + 2)
        images, self.labels = digits()
        padded = F.pad(images.unflatten(1, (8, 8)), (1, 1, 1, 1), value=images.min().item())
        self.moved = torch.stack(
            [padded[:, i : i + 8, j : j + 8].flatten(1) for i in range(3) for j in range(3)]
        )
        if part is not None:
            held = torch.arange(len(self.labels)) % 4 == 0
            chosen = held if part == "test" else ~held
            self.moved, self.labels = self.moved[:, chosen], self.labels[chosen]

    def batch(self, size: int) -> Batch:
        move = torch.randint(9, (size,), generator=self.random)
        image = torch.randint(len(self.labels), (size,), generator=self.random)
        noise = torch.randn(size, self.inputs, generator=self.random)
        return self.moved[move, image] + self.noise * noise, self.labels[image]

    def new(self, size: int) -> Batch:
        self.random.manual_seed(-1 - self.seed)
        return self.batch(size)


class PlainDigits:
    """The images as they are, drawn from torch's own generator, or from one of `seed`; none is held
    out."""

    inputs, outputs = 64, 10
    loss = staticmethod(F.cross_entropy)

    def __init__(self, seed: int | None = None) -> None:
        self.x, self.y = digits()
        self.random = None if seed is None else torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> Batch:
        chosen = torch.randint(len(self.x), (size,), generator=self.random)
        return self.x[chosen], self.y[chosen]

    def new(self, size: int) -> Batch:
        return self.x, self.y


# ---- text ----------------------------------------------------------------------------------------


def library() -> str:
    """The text of examples/train_gpt.py: pydoc's topics, then the standard library's modules."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    texts += [path.read_text("utf-8", "ignore") for path in modules]
    return "\n".join(texts).encode("ascii", "ignore").decode()


@cache
def text() -> tuple[Tensor, int]:
    """pydoc's topics as ids, and how many characters there are; what is no ASCII is left out."""
    found = "".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ascii_ = bytearray(found.encode("ascii", "ignore"))
    characters, ids = torch.frombuffer(ascii_, dtype=torch.uint8).unique(return_inverse=True)
    return ids, len(characters)


class Text:
    """The character after each of a window of `context`; of the first nine tenths of the text
    ("train") or of the last ("test")."""

    def __init__(self, seed: int, part: str, *, context: int) -> None:
        ids, _ = text()
        cut = len(ids) - len(ids) // 10
        self.ids = ids[:cut] if part == "train" else ids[cut:]
        self.context, self.random = context, torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> Batch:
        starts = torch.randint(len(self.ids) - self.context - 1, (size,), generator=self.random)
        chosen = self.ids[starts[:, None] + torch.arange(self.context + 1)]
        return chosen[:, :-1], chosen[:, 1:]

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# ---- what Transformers learn ---------------------------------------------------------------------


def generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + step)


class Characters:
    """A text for GPTs, of which the last tenth is held out.

    Args:
        path: of the text, UTF-8; None: `library`.
        sizes: "batch", "depth", "context", and "heads"; others are no matter.
    """

    weight_norm = True  # of structured layers

    def __init__(self, seed: int, path: Path | None = None, **sizes: int) -> None:
        self.seed, self.sizes, self.tokens = seed, sizes, sizes["context"]
        self.vocabulary, ids = self.tokenise(path.read_text("utf-8") if path else library())
        cut = len(ids) - len(ids) // 10
        self.train, self.held = ids[:cut], ids[cut:]
        starts = torch.linspace(0, len(self.held) - self.tokens - 1, 128).long()
        self.heldout = [self.windows(self.held, part) for part in starts.split(32)]

    def tokenise(self, text: str) -> tuple[int, Tensor]:
        """How many tokens there are, here characters, and those of `text`."""
        points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
        characters, ids = points.unique(return_inverse=True)
        return len(characters), ids

    def windows(self, ids: Tensor, starts: Tensor) -> Batch:
        window = ids[starts[:, None] + torch.arange(self.tokens + 1)]
        return window[:, :-1], window[:, 1:]

    def model(self, width: int) -> nn.Module:
        depth, heads = self.sizes["depth"], self.sizes.get("heads")
        return models.GPT(self.vocabulary, self.tokens, width, depth, heads)

    def batch(self, step: int) -> Batch:
        random, size = generator(self.seed, step), (self.sizes["batch"],)
        last = len(self.train) - self.tokens
        return self.windows(self.train, torch.randint(last, size, generator=random))


class Images:
    """Images `(N, channels, height, columns)` and labels for ViTs, each moved by up to an eighth of
    its height; `held` are those that are held out."""

    weight_norm = False

    def __init__(self, seed: int, train: Batch, held: Batch, patch: int, **sizes: int) -> None:
        (self.images, self.labels), (images, labels) = train, held
        mean, std = self.images.mean(), self.images.std()
        self.images, images = (self.images - mean) / std, (images - mean) / std
        self.seed, self.sizes, self.patch = seed, sizes, patch
        self.tokens = self.images[0, 0].numel() // patch**2
        self.heldout = list(zip(images.split(256), labels.split(256), strict=True))

    def model(self, width: int) -> nn.Module:
        shape, classes = self.images.shape[1:], int(self.labels.max()) + 1
        sizes = self.sizes["depth"], self.sizes["heads"]
        return models.ViT(shape, self.patch, classes, width, *sizes)

    def batch(self, step: int) -> Batch:
        random, count = generator(self.seed, step), self.sizes["batch"]
        chosen = torch.randint(len(self.images), (count,), generator=random)
        height, columns = self.images.shape[2:]
        margin = height // 8
        padded = F.pad(self.images[chosen], (margin,) * 4, value=float(self.images.min()))
        down, right = torch.randint(2 * margin + 1, (2, count, 1), generator=random)
        y, x = (down + torch.arange(height))[:, :, None], (right + torch.arange(columns))[:, None]
        # (count, height, columns, channels)
        moved = padded[torch.arange(count)[:, None, None], :, y, x]
        return moved.permute(0, 3, 1, 2), self.labels[chosen]
