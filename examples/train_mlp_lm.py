"""A language model that is an MLP: structured layers reach the dense model's loss in less time.

    python examples/train_mlp_lm.py                               # three minutes on two CPU cores
    python examples/train_mlp_lm.py --structure monarch --blocks 16
    python examples/train_mlp_lm.py --data shakespeare.txt --out out/shakespeare
    python examples/train_mlp_lm.py --smoke                       # seconds: does it run?

From 16 characters it predicts the next one, as Bengio et al.'s did from words: embeddings, one
linear layer to `--width` features, residual blocks x + relu(W norm(x)), a head. The text is that of
train_gpt.py; the last tenth, whole modules but for its first lines, is held out. A run sees about a
tenth of the rest once. For the four models see examples/compare.py.

`--lr` is the best of 2^-9, 2^-8, 2^-7, 2^-6 for the first dense model (seed 0; held-out losses
1.71, 1.65, 1.64, 1.66). The same command again goes on from the checkpoints in `--out`.

Source: Bengio et al. 2003, A Neural Probabilistic Language Model (JMLR 3); muP as in Yang et al.
2022 (arXiv:2203.03466).
"""

import argparse
from pathlib import Path

import compare
import torch.nn.functional as F
import train_gpt
from torch import Tensor, nn

EMBEDDING = 24  # features of a character


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.linear(self.norm(x)))


class MLP(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.first = nn.Linear(context * EMBEDDING, width, bias=False)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        compare.initialise(self, embedding=0.5)

    def forward(self, characters: Tensor) -> Tensor:  # (batch, context) -> (batch, vocabulary)
        x = self.first(self.embedding(characters).flatten(1))
        return self.lm_head(self.norm(self.blocks(x)))


class NextCharacter(train_gpt.Text):
    model_name = "MLP"
    heldout_windows, heldout_batch = 8192, 512
    zero_init, weight_norm, head_std = (), False, 0.0

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.tokens = 1  # a window is one prediction

    def windows(self, ids: Tensor, starts: Tensor) -> compare.Batch:
        inputs, targets = super().windows(ids, starts)
        return inputs, targets[:, -1]

    def model(self, width: int) -> nn.Module:
        return MLP(self.vocabulary, self.context, width, self.options.depth)


def main(argv: list[str] | None = None) -> list[dict]:
    return compare.main(
        NextCharacter,
        __doc__,
        data="a text file, UTF-8 (default: the Python standard library's documentation and source)",
        defaults={
            "width": 512,
            "depth": 3,
            "steps": 1000,
            "batch": 512,
            "context": 16,
            "lr": 2**-7,
            "out": Path("out/train_mlp_lm"),
        },
        smoke={"width": 64, "depth": 1, "steps": 6, "batch": 8, "context": 8},
        argv=argv,
    )


if __name__ == "__main__":
    main()
