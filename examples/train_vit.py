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
    """That of train_gpt.py, but every patch sees all others."""

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
        # (batch, patches, channels * patch * patch)
        x = self.patch_embedding(F.unfold(images, self.patch, stride=self.patch).mT)
        return self.head(self.norm(self.blocks(x + self.positions.weight)).mean(1))


def read_images(path):
    """Images (N, channels, height, columns), standardised, and labels (N,), in random order."""
    if path is None:
        from sklearn.datasets import load_digits

        images, labels = load_digits().images, load_digits().target
    else:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    order = np.random.default_rng(0).permutation(len(images))  # the same for every --seed
    pixels = torch.tensor(images[order], dtype=torch.float32)
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    train = pixels[: len(pixels) - len(pixels) // 5]
    return (pixels - train.mean()) / train.std(), torch.tensor(labels[order], dtype=torch.int64)


class Shifted:
    """Batches of the first four fifths of the images; the others are held out."""

    def __init__(self, images, labels, size, seed):
        cut = len(images) - len(images) // 5
        self.labels, self.size, self.seed = labels[:cut], size, seed
        self.height, self.columns = images.shape[2:]
        self.margin = self.height // 8
        self.padded = F.pad(images[:cut], (self.margin,) * 4, value=float(images[:cut].min()))
        self.heldout = [*zip(images[cut:].split(256), labels[cut:].split(256), strict=True)]

    def batch(self, step):
        """Random images, each moved by up to an eighth of its height."""
        random = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        chosen = torch.randint(len(self.labels), (self.size,), generator=random)
        down, right = torch.randint(2 * self.margin + 1, (2, self.size, 1), generator=random)
        y = (down + torch.arange(self.height))[:, :, None]
        x = (right + torch.arange(self.columns))[:, None]
        # (size, height, columns, channels)
        moved = self.padded[chosen[:, None, None], :, y, x]
        return moved.permute(0, 3, 1, 2), self.labels[chosen]


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
    shape, classes = images.shape[1:], int(labels.max()) + 1
    patch = patch_size(*shape[1:])

    def build(width):
        return ViT(shape, patch, classes, options.depth, width)

    return compare(build, data, options)


if __name__ == "__main__":
    main()
