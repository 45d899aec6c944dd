"""A vision Transformer on small images: dense and structured layers side by side.

    python examples/train_vit.py             # scikit-learn's digits; two minutes on two CPU cores
    python examples/train_vit.py --structure monarch --blocks 8
    python examples/train_vit.py --data cifar-10-batches-py --width 192 --depth 6 --steps 20000 \\
        --batch 128
    python examples/train_vit.py --smoke     # seconds: does it run?

Four models learn the digits (or CIFAR-10's python batches, or the arrays `images` and `labels` of
an .npz: `--data`) from one seed, at one learning rate: see examples/compare.py. The same command
again goes on from the checkpoints in `--out`.

Source: Dosovitskiy et al. 2021 (arXiv:2010.11929), with mean pooling; muP as in Yang et al. 2022
(arXiv:2203.03466).
"""

import argparse
import hashlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

import compare
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ViT(nn.Module):
    def __init__(
        self,
        shape: torch.Size,
        patch: int,
        classes: int,
        width: int,
        depth: int,
        heads: int | None = None,
    ) -> None:
        super().__init__()
        channels, height, columns = shape
        self.patch = patch
        self.patch_embedding = nn.Linear(channels * patch * patch, width)
        self.position = nn.Embedding(height * columns // patch**2, width)
        blocks = (compare.Block(width, causal=False, heads=heads) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, classes)
        compare.initialise(self, embedding=1)

    # (batch, channels, height, columns) -> (batch, classes)
    def forward(self, images: Tensor) -> Tensor:
        # (batch, patches, channels * patch * patch)
        patches = F.unfold(images, self.patch, stride=self.patch).mT
        x = self.patch_embedding(patches) + self.position.weight
        return self.head(self.ln_f(self.blocks(x)).mean(1))


# ---- data: images (N, H, W) or (N, H, W, C) or (N, C, H, W), and labels (N,) ---------------------


class Arrays(pickle.Unpickler):
    """Reads numpy arrays and builtin containers, and nothing else: a pickle can otherwise run any
    code."""

    def find_class(self, module: str, name: str) -> Any:
        admitted = {
            "_reconstruct": np.ndarray([]).__reduce__()[0],
            "_frombuffer": np.arange(1).__reduce_ex__(5)[0],
            "ndarray": np.ndarray,
            "dtype": np.dtype,
            # how Python 3 writes bytes in an old protocol
            "encode": lambda text, _: text.encode("latin1"),
        }
        if module.split(".")[0] in ("numpy", "_codecs") and name in admitted:
            return admitted[name]
        raise pickle.UnpicklingError(
            f"it holds {module}.{name}, which is no array or builtin container"
        )


def read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images `(N, 3, 32, 32)` and labels of one of CIFAR-10's python batches."""
    try:
        with path.open("rb") as file:
            content = Arrays(file, encoding="bytes").load()
        images, labels = content[b"data"].reshape(-1, 3, 32, 32), np.asarray(content[b"labels"])
        check(images, labels)
        return images, labels
    except Exception as error:  # a file that is not a pickle raises anything
        raise ValueError(
            f"--data: {path} is not a python batch of CIFAR-10: "
            f"{str(error) or type(error).__name__}"
        ) from None


def read_npz(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if missing := [name for name in ("images", "labels") if name not in arrays]:
                raise ValueError(
                    f"it has no array {missing[0]!r}; it has {', '.join(arrays) or 'none'}"
                )
            return divide(arrays["images"], arrays["labels"])
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"--data: {path} is not an .npz of images and labels: {error}") from None


def read_images(path: Path | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and held-out `(images, labels)`: CIFAR-10's own division, or a fixed fifth held out.

    Raises:
        ValueError, OSError: there is no such file or folder, or it is not what it should be.
    """
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return divide(digits.images, digits.target)
    if not path.exists():
        raise ValueError(f"--data {path}: no such file or folder")
    if path.is_file():
        return read_npz(path)
    batches = [read_cifar_batch(each) for each in sorted(path.glob("data_batch_*"))]
    if batches and (path / "test_batch").is_file():
        images, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
        return [(images, labels), read_cifar_batch(path / "test_batch")]
    if not batches and len(files := sorted(path.glob("*.npz"))) == 1:
        return read_npz(files[0])
    raise ValueError(
        f"--data {path} has neither CIFAR-10's data_batch_* and test_batch, "
        "nor exactly one .npz file"
    )


def divide(images: np.ndarray, labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    check(images, labels)
    if len(images) < 5:
        raise ValueError(f"{len(images)} images are too few; a fifth is held out")
    order = np.random.default_rng(0).permutation(len(images))  # the same for every --seed
    cut = len(order) - len(order) // 5
    return [(images[part], labels[part]) for part in (order[:cut], order[cut:])]


def check(images: np.ndarray, labels: np.ndarray) -> None:
    for name, array, kinds in (("images", images, "uif"), ("labels", labels, "ui")):
        if array.dtype.kind not in kinds:
            raise ValueError(
                f"{name} are of dtype {array.dtype}, "
                f"not numbers{' of a class' * (name == 'labels')}"
            )
    if images.ndim not in (3, 4) or labels.ndim != 1:
        raise ValueError(
            f"images have shape {images.shape}, labels {labels.shape}; they should be (N, H, W) or "
            "(N, H, W, C) or (N, C, H, W), and (N,)"
        )
    if len(images) != len(labels):
        raise ValueError(f"there are {len(images)} images and {len(labels)} labels")
    if not images.size:
        raise ValueError(f"images of shape {images.shape} are empty")
    if not np.isfinite(images).all() or labels.min() < 0:
        raise ValueError("there is an image that is not finite, or a label below 0")


def as_tensors(images: np.ndarray, labels: np.ndarray) -> compare.Batch:
    pixels = torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32))
    if pixels.ndim == 3:
        pixels = pixels.unsqueeze(1)
    elif pixels.shape[-1] <= 4 < pixels.shape[1]:
        pixels = pixels.permute(0, 3, 1, 2)
    return pixels, torch.from_numpy(labels.astype(np.int64))


def patch_size(shape: torch.Size) -> int:
    """The smallest patch, at least 2 x 2, that divides the image into at most 64."""
    _, height, columns = shape
    for patch in range(2, min(height, columns) + 1):
        if height % patch == columns % patch == 0 and height * columns <= 64 * patch**2:
            return patch
    raise ValueError(
        f"--data: images of {height} x {columns} pixels cannot be cut into "
        "at most 64 square patches"
    )


class Images(compare.Task):
    metric = "accuracy"
    read = staticmethod(read_images)

    def __init__(self, options: argparse.Namespace) -> None:
        parts = self.read(options.data)
        (self.images, self.labels), (images, labels) = (as_tensors(*part) for part in parts)
        mean, std = self.images.mean(), self.images.std().clamp(min=1e-6)
        self.images, images = (self.images - mean) / std, (images - mean) / std
        self.options, self.classes = options, int(max(self.labels.max(), labels.max())) + 1
        self.patch = patch_size(self.images.shape[1:])
        self.tokens = self.images[0, 0].numel() // self.patch**2
        self.heldout = list(zip(images.split(256), labels.split(256), strict=True))
        content = hashlib.sha256(b"".join(each.tobytes() for part in parts for each in part))
        self.config = {"data": content.hexdigest()[:12]}
        self.heads = vars(options).get("heads")
        self.config |= {"heads": self.heads} if self.heads else {}
        name = options.data.name if options.data else "scikit-learn's digits"
        steps = f"{options.steps:,} steps of {options.batch} images"
        data = f"{len(self.images):,} images of {name}"
        self.title = f"ViT of {options.depth} blocks on {data}, {steps}, seed {options.seed}"

    def model(self, width: int) -> nn.Module:
        size = width, self.options.depth, self.heads
        return ViT(self.images.shape[1:], self.patch, self.classes, *size)

    def batch(self, step: int) -> compare.Batch:
        """Random images, each moved by up to an eighth of its height."""
        random, count = compare.generator(self.options.seed, step), self.options.batch
        chosen = torch.randint(len(self.images), (count,), generator=random)
        height, columns = self.images.shape[2:]
        margin = height // 8
        padded = F.pad(self.images[chosen], (margin,) * 4, value=float(self.images.min()))
        down, right = torch.randint(2 * margin + 1, (2, count, 1), generator=random)
        y, x = (down + torch.arange(height))[:, :, None], (right + torch.arange(columns))[:, None]
        # (count, height, columns, channels)
        moved = padded[torch.arange(count)[:, None, None], :, y, x]
        return moved.permute(0, 3, 1, 2), self.labels[chosen]

    def score(self, loss: float, accuracy: float) -> float:
        return accuracy


def main(argv: list[str] | None = None) -> list[dict]:
    return compare.main(
        Images,
        __doc__,
        data="CIFAR-10's folder of python batches, or an .npz of images and labels "
        "(default: scikit-learn's digits)",
        defaults={
            "between": "silu",
            "attention": None,
            "width": 128,
            "depth": 2,
            "steps": 1500,
            "batch": 32,
            "lr": 0.002,
            "heads": None,
            "out": Path("out/train_vit"),
        },
        smoke={"width": 32, "depth": 1, "steps": 6, "batch": 8},
        argv=argv,
    )


if __name__ == "__main__":
    main()
