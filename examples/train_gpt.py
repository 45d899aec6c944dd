"""A GPT on characters, in nanoGPT's manner: dense and structured layers side by side.

    python examples/train_gpt.py                              # four minutes on two CPU cores
    python examples/train_gpt.py --structure monarch --blocks 8
    python examples/train_gpt.py --data shakespeare.txt --out out/shakespeare
    python examples/train_gpt.py --smoke                      # seconds: does it run?

Four models learn the documentation and the source text of the Python standard library (or any text,
`--data`) from one seed, at one learning rate: see examples/compare.py. Structured MLPs have SiLU
between their cores, attention has BTT of rank 2 without one, and structured layers are
weight-normalised. `--lr` is the best of 0.001, 0.002, 0.004 for the first dense model (seed 0;
held-out losses 1.76, 1.72, 1.79). The same command again goes on from the checkpoints in `--out`.

Source: nanoGPT (github.com/karpathy/nanoGPT); muP as in Yang et al. 2022 (arXiv:2203.03466); weight
normalisation as in Qiu et al. 2024 (arXiv:2406.06248), section 5.1; an activation between factors
as in Liu et al. 2025 (arXiv:2502.10940).
"""

import argparse
import hashlib
import math
import pydoc_data.topics
import sysconfig
from pathlib import Path

import compare
import torch
from torch import Tensor, nn


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int, context: int, width: int, depth: int, heads: int | None = None
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        blocks = (compare.Block(width, causal=True, heads=heads) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        compare.initialise(self, embedding=0.2)
        # positions are learned, but start as waves: a head then soon finds the tokens before
        with torch.no_grad():
            self.wpe.weight.copy_(0.2 * waves(context, width))

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, tokens) -> (batch, tokens, vocabulary)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.lm_head(self.ln_f(self.blocks(self.wte(tokens) + self.wpe(positions))))


def waves(positions: int, width: int) -> Tensor:
    """Sines and cosines of wavelengths from 2 pi to 4 pi `positions`, of unit RMS: `(positions,
    width)`.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """
    frequencies = (2 * positions) ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(positions)[:, None] * frequencies
    return math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


def read_text(path: Path | None) -> str:
    """The text at `path`; if None the standard library's topics of documentation, then its
    top-level modules.

    Raises:
        ValueError: there is no such file, or it is not text.
    """
    if path is None:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        topics = pydoc_data.topics.topics
        texts = [
            *(topics[name] for name in sorted(topics)),
            *(each.read_text("utf-8", "ignore") for each in modules),
        ]
        return "\n".join(texts).encode("ascii", "ignore").decode()
    if not path.is_file():
        what = "it is a folder, not a text file" if path.is_dir() else "no such file"
        raise ValueError(f"--data {path}: {what}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {path} is not text: {error}") from None
    if "\0" in text:
        raise ValueError(f"--data {path} is not text: it has a zero byte")
    return text


class Text(compare.Task):
    metric = "bits/char"
    model_name = "GPT"
    weight_norm, head_std = True, 0.02  # of the head as GPT-2's
    heldout_windows, heldout_batch = 128, 32

    def __init__(self, options: argparse.Namespace) -> None:
        text = read_text(options.data)
        self.options, self.context = options, options.context
        self.tokens = self.context
        if len(text) < 10 * (self.context + 1):
            raise ValueError(
                f"the text has {len(text):,} characters; a tenth of it is held out, "
                f"so that --context {self.context} needs at least {10 * (self.context + 1):,}"
            )
        self.vocabulary, ids = self.tokenise(text)
        if self.vocabulary < 2:
            raise ValueError(f"the text is {text[0]!r} throughout: nothing in it can be predicted")
        cut = len(ids) - len(ids) // 10
        self.train, heldout = ids[:cut], ids[cut:]
        starts = torch.linspace(0, len(heldout) - self.context - 1, self.heldout_windows).long()
        self.heldout = [self.windows(heldout, part) for part in starts.split(self.heldout_batch)]
        self.config = {
            "data": hashlib.sha256(text.encode()).hexdigest()[:12],
            "context": self.context,
        }
        self.heads = vars(options).get("heads")  # an option that not every user of the task has
        self.config |= {"heads": self.heads} if self.heads else {}
        name = options.data.name if options.data else "Python's standard library"
        steps = f"{options.steps:,} steps of {options.batch} x {self.context} characters"
        data = f"{len(ids):,} characters of {name}"
        model = f"{self.model_name} of {options.depth} blocks"
        self.title = f"{model} on {data}, {steps}, seed {options.seed}"

    def tokenise(self, text: str) -> tuple[int, Tensor]:
        """How many tokens there are, here characters, and those of `text`."""
        points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
        characters, ids = points.unique(return_inverse=True)
        return len(characters), ids

    def windows(self, ids: Tensor, starts: Tensor) -> compare.Batch:
        window = ids[starts[:, None] + torch.arange(self.context + 1)]
        return window[:, :-1], window[:, 1:]

    def model(self, width: int) -> nn.Module:
        return GPT(self.vocabulary, self.tokens, width, self.options.depth, self.heads)

    def batch(self, step: int) -> compare.Batch:
        random = compare.generator(self.options.seed, step)
        return self.windows(
            self.train,
            torch.randint(len(self.train) - self.context, (self.options.batch,), generator=random),
        )

    def score(self, loss: float, accuracy: float) -> float:
        return loss / math.log(2)


def main(argv: list[str] | None = None) -> list[dict]:
    return compare.main(
        Text,
        __doc__,
        data="a text file, UTF-8 (default: the Python standard library's documentation and source)",
        defaults={
            "between": "silu",
            "attention": None,
            "width": 256,
            "depth": 2,
            "steps": 1000,
            "batch": 8,
            "context": 64,
            "lr": 0.002,
            "heads": None,
            "out": Path("out/train_gpt"),
        },
        smoke={"width": 64, "depth": 1, "steps": 6, "batch": 2, "context": 16},
        argv=argv,
    )


if __name__ == "__main__":
    main()
