"""What the experiments train on: a teacher with unlimited data, digits, text.

A `Task` is made from a seed; `batch(size)` draws inputs and targets, `new(size)` the same that no
training of its seed sees, and `loss` compares a model's outputs with targets. What a Transformer
learns (`Characters`, `Images`) is a function of a step, so that all models see the same batches.
"""

import pydoc_data.topics
import sysconfig
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import models

Batch = tuple[Tensor, Tensor]  # inputs, targets
TOPICS = pydoc_data.topics.topics  # name -> text


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

    inputs = 16
    outputs = 4
    width = 256
    loss = staticmethod(F.mse_loss)

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = torch.Generator().manual_seed(1_000_003 * seed + 1)
        widths = (self.inputs, self.width, self.width, self.outputs)
        self.weights = [
            self._normal(fan_out, fan_in) * (2 / fan_in) ** 0.5
            for fan_in, fan_out in pairwise(widths)
        ]
        self.biases = [0.5 * self._normal(self.width) for _ in range(2)]
        y = self._raw(self._normal(8192, self.inputs))
        self.mean = y.mean(0)
        self.std = y.std(0)

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

    inputs = 64
    outputs = 10
    noise = 0.5
    loss = staticmethod(F.cross_entropy)

    def __init__(self, seed: int, part: str | None = None) -> None:
        self.seed = seed
        self.random = torch.Generator().manual_seed(1_000_003 * seed + 2)
        images, self.labels = digits()
        padded = F.pad(images.unflatten(1, (8, 8)), (1, 1, 1, 1), value=images.min().item())
        moved_images = []
        for down, right in product(range(3), range(3)):
            window = padded[:, down : down + 8, right : right + 8]
            moved_images.append(window.flatten(1))
        self.moved = torch.stack(moved_images)  # (moves, images, pixels)
        if part is not None:
            is_test = torch.arange(len(self.labels)) % 4 == 0
            is_in_part = is_test if part == "test" else ~is_test
            self.moved = self.moved[:, is_in_part]
            self.labels = self.labels[is_in_part]

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

    inputs = 64
    outputs = 10
    loss = staticmethod(F.cross_entropy)

    def __init__(self, seed: int | None = None) -> None:
        self.x, self.y = digits()
        self.random = None if seed is None else torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> Batch:
        indices = torch.randint(len(self.x), (size,), generator=self.random)
        return self.x[indices], self.y[indices]

    def new(self, size: int) -> Batch:
        return self.x, self.y


# ---- text ----------------------------------------------------------------------------------------


def library() -> str:
    """The text of examples/train_gpt.py: pydoc's topics, then the standard library's modules."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for _, text in sorted(TOPICS.items())]
    texts += [path.read_text("utf-8", "ignore") for path in modules]
    return "\n".join(texts).encode("ascii", "ignore").decode()


@cache
def text() -> tuple[Tensor, int]:
    """pydoc's topics as ids, and how many characters there are; what is no ASCII is left out."""
    topics = "".join(text for _, text in sorted(TOPICS.items()))
    codes = torch.frombuffer(bytearray(topics.encode("ascii", "ignore")), dtype=torch.uint8)
    characters, ids = codes.unique(return_inverse=True)
    return ids, len(characters)


class Text:
    """The character after each of a window of `context`; of the first nine tenths of the text
    ("train") or of the last ("test")."""

    def __init__(self, seed: int, part: str, *, context: int) -> None:
        ids, _ = text()
        cut = len(ids) - len(ids) // 10
        self.ids = ids[:cut] if part == "train" else ids[cut:]
        self.context = context
        self.random = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> Batch:
        starts = torch.randint(len(self.ids) - self.context - 1, (size,), generator=self.random)
        windows = self.ids[starts[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1], windows[:, 1:]

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
        self.seed = seed
        self.sizes = sizes
        self.tokens = sizes["context"]
        self.vocabulary, ids = self.tokenise(path.read_text("utf-8") if path else library())
        cut = len(ids) - len(ids) // 10
        self.train = ids[:cut]
        self.held = ids[cut:]
        starts = torch.linspace(0, len(self.held) - self.tokens - 1, 128).long()
        self.heldout = [self.windows(self.held, batch) for batch in starts.split(32)]

    def tokenise(self, text: str) -> tuple[int, Tensor]:
        """How many tokens there are, here characters, and those of `text`."""
        points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
        characters, ids = points.unique(return_inverse=True)
        return len(characters), ids

    def windows(self, ids: Tensor, starts: Tensor) -> Batch:
        windows = ids[starts[:, None] + torch.arange(self.tokens + 1)]
        return windows[:, :-1], windows[:, 1:]

    def model(self, width: int) -> nn.Module:
        heads = self.sizes.get("heads")
        return models.GPT(self.vocabulary, self.tokens, width, self.sizes["depth"], heads)

    def batch(self, step: int) -> Batch:
        count = len(self.train) - self.tokens  # of windows
        random = generator(self.seed, step)
        starts = torch.randint(count, (self.sizes["batch"],), generator=random)
        return self.windows(self.train, starts)


class Images:
    """Images `(N, channels, height, columns)` and labels for ViTs, each moved by up to an eighth of
    its height; `held` are those that are held out."""

    weight_norm = False

    def __init__(self, seed: int, train: Batch, held: Batch, patch: int, **sizes: int) -> None:
        train_images, self.labels = train
        held_images, held_labels = held
        mean = train_images.mean()
        std = train_images.std()
        self.images = (train_images - mean) / std
        held_images = (held_images - mean) / std
        self.seed = seed
        self.sizes = sizes
        self.patch = patch
        self.tokens = self.images[0, 0].numel() // patch**2
        self.heldout = list(zip(held_images.split(256), held_labels.split(256), strict=True))

    def model(self, width: int) -> nn.Module:
        shape = self.images.shape[1:]
        classes = int(self.labels.max()) + 1
        depth = self.sizes["depth"]
        heads = self.sizes["heads"]
        return models.ViT(shape, self.patch, classes, width, depth, heads)

    def batch(self, step: int) -> Batch:
        random = generator(self.seed, step)
        count = self.sizes["batch"]
        indices = torch.randint(len(self.images), (count,), generator=random)
        height, columns = self.images.shape[2:]
        margin = height // 8
        padded = F.pad(self.images[indices], (margin,) * 4, value=float(self.images.min()))

        # Image n is the window of `padded` whose corner is (down[n], right[n]); the three index
        # tensors broadcast to (count, height, columns).
        down, right = torch.randint(2 * margin + 1, (2, count, 1), generator=random)
        n = torch.arange(count)[:, None, None]
        y = (down + torch.arange(height))[:, :, None]
        x = (right + torch.arange(columns))[:, None, :]
        moved = padded[n, :, y, x]  # (count, height, columns, channels)
        return moved.permute(0, 3, 1, 2), self.labels[indices]
