"""A vision Transformer on small images: dense and structured layers side by side.

    python examples/train_vit.py    # scikit-learn's digits; two minutes on two cores
    python examples/train_vit.py --data images.npz --width 192 --depth 6 --steps 20000 --batch 128

Images come from the arrays `images`, of shape (N, H, W) or (N, H, W, C), and `labels` of an .npz; a
fifth is held out. For the three models see train_gpt.py. Sources: Dosovitskiy et al. 2021
(arXiv:2010.11929), with mean pooling; muP as in Yang et al. 2022 (arXiv:2203.03466).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from train_gpt import HEAD, compare, initialise, parse

SIZES = {
    "width": 128,
    "depth": 2,
    "batch": 32,
    "steps": 1500,
    "lr": 0.03,  # of hidden matrices
    "other_lr": 0.002,  # of everything else
    "seed": 0,
}
SMOKE = {"width": 32, "depth": 1, "batch": 8, "steps": 6}


class Block(nn.Module):
    """The block of train_gpt.py, but every patch sees all patches."""

    def __init__(self, width):
        super().__init__()
        self.attn_norm = nn.LayerNorm(width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.attn_in = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):  # (batch, patches, width)
        heads = self.attn_in(self.attn_norm(x)).unflatten(-1, (3, -1, HEAD))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, patches, HEAD)
        y = F.scaled_dot_product_attention(q, k, v, scale=1 / HEAD)
        x = x + self.attn_out(y.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class ViT(nn.Module):
    def __init__(self, shape, patch, classes, depth, width):
        super().__init__()
        channels, height, columns = shape
        self.patch = patch
        self.patch_embedding = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Embedding(height * columns // patch**2, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, classes)
        initialise(self, embedding=1)

    def forward(self, images):  # (batch, channels, height, columns) -> (batch, classes)
        patches = F.unfold(images, self.patch, stride=self.patch).mT
        x = self.patch_embedding(patches) + self.positions.weight  # (batch, patches, width)
        return self.head(self.norm(self.blocks(x)).mean(1))


# ---- the data ------------------------------------------------------------------------------------


def count_train(count):
    """How many of `count` images are for training: all but a fifth."""
    return count - count // 5


def read_images(path):
    """Images (N, channels, height, columns), standardised, and labels (N,), in random order."""
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = digits.images
        labels = digits.target
    else:
        with np.load(path, allow_pickle=False) as arrays:
            images = arrays["images"]
            labels = arrays["labels"]
    order = np.random.default_rng(0).permutation(len(images))  # the same for every --seed
    pixels = torch.tensor(images[order], dtype=torch.float32)
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    train_pixels = pixels[: count_train(len(pixels))]
    standardised = (pixels - train_pixels.mean()) / train_pixels.std()
    return standardised, torch.tensor(labels[order], dtype=torch.int64)


class Shifted:
    """Batches of randomly moved training images; the last fifth of the images is held out."""

    def __init__(self, images, labels, batch_size, seed):
        self.batch_size = batch_size
        self.seed = seed
        self.height, self.columns = images.shape[2:]
        train_count = count_train(len(images))
        train_images = images[:train_count]
        self.labels = labels[:train_count]
        self.margin = self.height // 8
        darkest = float(train_images.min())
        self.padded = F.pad(train_images, (self.margin,) * 4, value=darkest)
        heldout_images = images[train_count:].split(256)
        heldout_labels = labels[train_count:].split(256)
        self.heldout = list(zip(heldout_images, heldout_labels, strict=True))

    def batch(self, step):
        """Random images, each moved by up to an eighth of its height."""
        random = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        numbers = torch.randint(len(self.labels), (self.batch_size,), generator=random)
        shifts = torch.randint(2 * self.margin + 1, (2, self.batch_size, 1), generator=random)
        down, right = shifts  # (batch, 1) each

        # One gather cuts a window of height x columns out of each padded image. The indices of
        # images (batch, 1, 1), rows (batch, height, 1) and columns (batch, 1, columns) broadcast to
        # (batch, height, columns). The slice between them makes the channels the last axis.
        rows = (down + torch.arange(self.height))[:, :, None]
        columns = (right + torch.arange(self.columns))[:, None, :]
        windows = self.padded[numbers[:, None, None], :, rows, columns]
        return windows.permute(0, 3, 1, 2), self.labels[numbers]


def patch_size(height, columns):
    """The smallest patch, at least 2 x 2, that divides the image into at most 64."""
    for patch in range(2, min(height, columns) + 1):
        if height % patch == columns % patch == 0 and height * columns <= 64 * patch**2:
            return patch
    raise ValueError(f"images of {height} x {columns} pixels have no at most 64 square patches")


def main(argv=None):
    options = parse(__doc__, "out/train_vit", SIZES, SMOKE, argv)
    images, labels = read_images(options.data)
    data = Shifted(images, labels, options.batch, options.seed)
    shape = images.shape[1:]  # channels, height, columns
    classes = int(labels.max()) + 1
    patch = patch_size(data.height, data.columns)

    def build(width):
        return ViT(shape, patch, classes, options.depth, width)

    return compare(build, data, options)


if __name__ == "__main__":
    main()
