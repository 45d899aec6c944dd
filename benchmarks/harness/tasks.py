"""What the experiments train on: a teacher with unlimited data, digits, text.

A task is made from a seed; `batch(size)` draws inputs and targets, `new(size)` the same that no
training of its seed sees, and `loss` compares a model's outputs with targets.
"""

import argparse
import pydoc_data.topics
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import compare
import train_gpt
import train_mlp_lm
import train_vit

Batch = tuple[Tensor, Tensor]  # inputs, targets
ExampleTask = TypeVar("ExampleTask", bound=compare.Task)


class Plateau(train_gpt.Text):
    """The text of examples/train_gpt.py for a GPT whose head starts at zero, as muP has it: it
    stays on its first plateau for hundreds of steps, and chance decides when it leaves it. The kept
    results of most experiments are of this GPT."""

    head_std = 0.0


EXAMPLES: dict[str, type[compare.Task]] = {
    "GPT": Plateau, "ViT": train_vit.Images, "MLP": train_mlp_lm.NextCharacter,
}  # fmt: skip


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


class WiderTeacher(Teacher):
    """Students gain from width for longer."""

    inputs, outputs, width = 32, 8, 512


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


class Samples:
    """Classification of samples, drawn from torch's own generator, or from one of `seed`; new ones
    are all that are held out."""

    loss = staticmethod(F.cross_entropy)

    def __init__(self, data: Batch, held: Batch, seed: int | None = None) -> None:
        (self.x, self.y), self.held = data, held
        self.random = None if seed is None else torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> Batch:
        chosen = torch.randint(len(self.x), (size,), generator=self.random)
        return self.x[chosen], self.y[chosen]

    def new(self, size: int) -> Batch:
        return self.held


class PlainDigits(Samples):
    """The images as they are; none is held out."""

    inputs, outputs = 64, 10

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(digits(), digits(), seed)


class MixedDigits:
    """Digits with the augmentation of "Compute Better Spent" (appendix E), at the size of
    scikit-learn's: moved by up to a pixel either way and mixed in pairs; a fifth of them is held
    out.

    The paper trains on CIFAR with random crops, flips, mixup (alpha 0.8) and labels smoothed by
    0.3. The same here but for flips, which would make another digit of some. A target is a
    distribution over the classes; the loss is the divergence from it (nats), so that what mixup and
    smoothing add to any model's cross-entropy is not in it.
    """

    side, outputs, mixup, smoothing = 8, 10, 0.8, 0.3
    inputs = side * side

    def __init__(self, seed: int, *, heldout: bool = False) -> None:
        self.seed, self.random = seed, torch.Generator().manual_seed(1_000_003 * seed + 3)
        self.images, self.labels = _fold(heldout)

    def batch(self, size: int) -> Batch:  # (size, inputs), (size, classes)
        first, second = (self.draw(size) for _ in range(2))
        share = self._beta(size)[:, None]
        return tuple(share * a + (1 - share) * b for a, b in zip(first, second, strict=True))

    def new(self, size: int) -> Batch:
        other = MixedDigits(self.seed, heldout=True)
        other.random.manual_seed(-1 - self.seed)
        return other.batch(size)

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(-1), targets, reduction="batchmean")

    def draw(self, size: int) -> Batch:  # moved, not mixed
        chosen = torch.randint(len(self.images), (size,), generator=self.random)
        down, right = torch.randint(3, (2, size, 1), generator=self.random)
        y, x = (move + torch.arange(self.side) for move in (down, right))
        padded = F.pad(self.images, (1, 1, 1, 1), value=self.images.min().item())
        moved = padded[chosen[:, None, None], y[:, :, None], x[:, None]]  # (size, side, side)
        labels = F.one_hot(self.labels[chosen], self.outputs)
        return moved.flatten(1), (1 - self.smoothing) * labels + self.smoothing / self.outputs

    def _beta(self, size: int) -> Tensor:
        """Beta(mixup, mixup) from this task's own generator: a ratio of gammas, each by Joehnk's
        rejection."""
        found = torch.empty(0)
        while len(found) < size:
            u, v = torch.rand(2, 4 * size, generator=self.random) ** (1 / self.mixup)
            found = torch.cat([found, (u / (u + v))[u + v <= 1]])
        return found[:size]


@cache
def _fold(heldout: bool) -> Batch:
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = len(order) // 5
    chosen = order[:cut] if heldout else order[cut:]
    side = MixedDigits.side
    return images[chosen].unflatten(1, (side, side)), labels[chosen]


# ---- text ----------------------------------------------------------------------------------------

CORPORA = ("documentation", "Python", "C++")


@cache
def text(corpus: str = "documentation") -> tuple[Tensor, int]:
    """A text as ids, and how many characters there are; what is no ASCII is left out. The texts of
    pydoc's topics, or the first million characters of the standard library's modules or of
    PyTorch's headers."""
    if corpus == "documentation":
        topics = pydoc_data.topics.topics
        found = "".join(topics[name] for name in sorted(topics))
    else:
        headers = Path(torch.__file__).parent / "include" / "ATen"
        files = {
            "Python": Path(sysconfig.get_path("stdlib")).glob("*.py"),
            "C++": headers.glob("*.h"),
        }
        found = "".join(path.read_text("utf-8", "ignore") for path in sorted(files[corpus]))
        found = found[:1_000_000]
    ascii_ = bytearray(found.encode("ascii", "ignore"))
    characters, ids = torch.frombuffer(ascii_, dtype=torch.uint8).unique(return_inverse=True)
    return ids, len(characters)


class Text:
    """The character after each of a window of `context`; of the whole text, of its first nine
    tenths ("train") or of the last ("test")."""

    def __init__(
        self,
        seed: int,
        part: str | None = None,
        *,
        context: int = 32,
        corpus: str = "documentation",
    ) -> None:
        ids, _ = text(corpus)
        cut = len(ids) - len(ids) // 10
        self.ids = ids if part is None else ids[:cut] if part == "train" else ids[cut:]
        self.context, self.random = context, torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> Batch:
        starts = torch.randint(len(self.ids) - self.context - 1, (size,), generator=self.random)
        chosen = self.ids[starts[:, None] + torch.arange(self.context + 1)]
        return chosen[:, :-1], chosen[:, 1:]

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def of_examples(kind: type[ExampleTask], seed: int, **sizes: int) -> ExampleTask:
    """A task of examples/, such as `train_gpt.Text`, the Python standard library by characters.

    Args:
        sizes: "batch", "depth" and, of text, "context"; others are no matter.
    """
    return kind(argparse.Namespace(data=None, seed=seed, steps=0, **sizes))


class Windows:
    """Windows of a text of examples/, drawn from one generator; new ones are those held out."""

    def __init__(self, text: train_gpt.Text, seed: int) -> None:
        self.text, self.random = text, torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> Batch:
        last = len(self.text.train) - self.text.context
        starts = torch.randint(last, (size,), generator=self.random)
        return self.text.windows(self.text.train, starts)

    def new(self, size: int) -> Batch:
        inputs, targets = zip(*self.text.heldout, strict=True)
        return torch.cat(inputs)[:size], torch.cat(targets)[:size]

    loss = staticmethod(Text.loss)


class Words(Plateau):
    """The same text in words, runs of spaces and single other characters, so that the head is a
    large part of a GPT.

    The `vocabulary - 1` most frequent pieces, and one token for all others.
    """

    def __init__(self, seed: int, batch: int, context: int, depth: int, vocabulary: int) -> None:
        self.options = argparse.Namespace(seed=seed, batch=batch, depth=depth)
        self.tokens, self.context, self.vocabulary = context, context, vocabulary
        ids = word_ids(vocabulary)
        cut = len(ids) - len(ids) // 10
        self.train, heldout = ids[:cut], ids[cut:]
        starts = torch.linspace(0, len(heldout) - context - 1, 128).long()
        self.heldout = [self.windows(heldout, part) for part in starts.split(32)]


@cache
def word_ids(vocabulary: int) -> Tensor:
    pieces = re.findall(r"\w+| +|\n *|.", train_gpt.read_text(None))
    frequent = {
        piece: n for n, (piece, _) in enumerate(Counter(pieces).most_common(vocabulary - 1))
    }
    return torch.tensor([frequent.get(piece, vocabulary - 1) for piece in pieces])
