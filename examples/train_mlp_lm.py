"""A language model that is an MLP: structured layers reach the dense model's loss in less time.

    python examples/train_mlp_lm.py    # three minutes on two CPU cores; seconds with --smoke

From 16 characters it predicts the next one, as Bengio et al.'s did from words: embeddings, one
linear layer to `--width` features, residual blocks x + relu(W norm(x)), a head. The text is that of
train_gpt.py. Four models learn it by AdamW: dense ones of `--width` and of twice that, a structured
one of twice that, and one as wide as the first one's FLOPs allow. Sources: Bengio et al. 2003, A
Neural Probabilistic Language Model (JMLR 3); muP as in Yang et al. 2022 (arXiv:2203.03466).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from train_gpt import compare, initialise, parse, read_text

import structlin

EMBEDDING = 24  # features of a character
STRUCTURE = structlin.BTT(rank=1)


def adamw(model, lr, other_lr, base):
    return structlin.optim.AdamW(
        model, lr, betas=(0.9, 0.95), weight_decay=0.0, base=base, fused=True
    )


RUNS = [(1, False, adamw), (2, False, adamw), (2, True, adamw), (None, True, adamw)]
SIZES = {
    "width": 512,
    "depth": 3,
    "context": 16,
    "batch": 512,
    "steps": 1000,
    "lr": 2**-7,
    "other_lr": 2**-7,
    "seed": 0,
}
SMOKE = {"width": 64, "depth": 1, "context": 8, "batch": 8, "steps": 6}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + F.relu(self.linear(self.norm(x)))


class MLP(nn.Module):
    def __init__(self, vocabulary, context, depth, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.first = nn.Linear(context * EMBEDDING, width, bias=False)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        initialise(self, embedding=0.5)

    def forward(self, characters):  # (batch, context) -> (batch, vocabulary)
        x = self.first(self.embedding(characters).flatten(1))
        return self.head(self.norm(self.blocks(x)))


def main(argv=None):
    options = parse(__doc__, "out/train_mlp_lm", SIZES, SMOKE, argv)
    characters, ids = read_text(options.data)
    train_ids, heldout_ids = ids.tensor_split([len(ids) - len(ids) // 10])

    def windows(ids, starts):
        window = ids[starts[:, None] + torch.arange(options.context + 1)]
        return window[:, :-1], window[:, -1]

    def batch(step):
        random = torch.Generator().manual_seed(1_000_003 * options.seed + step)
        last, size = len(train_ids) - options.context, (options.batch,)
        return windows(train_ids, torch.randint(last, size, generator=random))

    starts = torch.linspace(0, len(heldout_ids) - options.context - 1, 8192).long()
    heldout = [windows(heldout_ids, part) for part in starts.split(512)]
    dense = partial(MLP, len(characters), options.context, options.depth)
    return compare(dense, batch, heldout, options, STRUCTURE, RUNS)


if __name__ == "__main__":
    main()
