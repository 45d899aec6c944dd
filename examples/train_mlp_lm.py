"""A language model that is an MLP: structured layers reach the dense model's loss in less time.

    python examples/train_mlp_lm.py    # three minutes on two CPU cores; seconds with --smoke

From 16 characters it predicts the next one, as Bengio et al.'s did from words: embeddings, one
linear layer to `--width` features, residual blocks x + relu(W norm(x)), a head. The text is that of
train_gpt.py. Four models learn it by AdamW: dense ones of `--width` and of twice that, a structured
one of twice that, and one as wide as the first one's FLOPs allow. Sources: Bengio et al. 2003, A
Neural Probabilistic Language Model (JMLR 3); muP as in Yang et al. 2022 (arXiv:2203.03466).
"""

import torch
import torch.nn.functional as F
from torch import nn
from train_gpt import Windows, initialise, make_run, parse, read_text, report, train

import structlin

EMBEDDING = 24  # features of a character
STRUCTURE = structlin.BTT(rank=1)
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


class NextCharacter(Windows):
    """Windows of a text, and the one character after each."""

    def __init__(self, ids, context, batch_size, seed):
        super().__init__(ids, context, batch_size, seed, heldout_windows=8192, heldout_batch=512)

    def cut(self, ids, starts):
        """x, `(windows, context)`, and y, `(windows,)`."""
        x, y = super().cut(ids, starts)
        return x, y[:, -1]


def main(argv=None):
    options = parse(__doc__, "out/train_mlp_lm", SIZES, SMOKE, argv)
    characters, ids = read_text(options.data)
    data = NextCharacter(ids, options.context, options.batch, options.seed)

    def build(width):
        return MLP(len(characters), options.context, options.depth, width)

    def build_structured(width):
        return structlin.convert(build(width), STRUCTURE, init="mup")

    base = build(options.width)  # the rate is for this model; muP scales it to other widths

    def adamw(model):
        return structlin.optim.AdamW(
            model, options.lr, betas=(0.9, 0.95), weight_decay=0.0, base=base, fused=True
        )

    x, _ = data.heldout[0]
    widened = structlin.widen(build, STRUCTURE, dense=options.width, example=x[:1], multiple=32)
    label = STRUCTURE.label
    steps = options.steps
    runs = [
        make_run("dense", build, options.width, adamw, data, options, steps),
        make_run("dense", build, 2 * options.width, adamw, data, options, steps),
        make_run(label, build_structured, 2 * options.width, adamw, data, options, steps),
        make_run(label, build_structured, widened.width, adamw, data, options, steps),
    ]
    structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))  # builds the engine before times
    structlin.show_config()
    train(runs, data)
    return report(runs, data, options)


if __name__ == "__main__":
    main()
