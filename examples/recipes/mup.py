"""muP in transformers' own terms: Granite's config has the multipliers, `param_groups` the rates.

    python examples/recipes/mup.py
    python examples/recipes/mup.py --smoke                # seconds: does it run?

Four steps of Adam at one rate should change the logits as much at every width. They do if the
config and the rates follow the width, and grow with the width if not.
"""

import argparse

import torch
from characters import VOCABULARY, require, windows

require("transformers")

from transformers import GraniteConfig, GraniteForCausalLM

from structlin import BTT, convert, param_groups

BASE = 64  # the width where the rate was tuned
DEPTH = 2
HEAD = 16  # features of an attention head
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


def make(width: int, base: int) -> GraniteForCausalLM:
    config = GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=DEPTH,
        num_attention_heads=width // HEAD,
        tie_word_embeddings=True,
        initializer_range=0.1,  # of the embedding, the same at every width
        embedding_multiplier=10.0,  # to unit RMS, the same at every width
        attention_multiplier=1 / HEAD,  # for heads of every width
        residual_multiplier=DEPTH**-0.5,
        logits_scaling=10.0 * width / base,  # a head tied to the embedding shrinks with the width
    )
    return convert(GraniteForCausalLM(config), BTT(rank=1), init="mup")  # of the layers: muP's


def change(width: int, base: int, tokens: torch.Tensor, seeds: int) -> float:
    """RMS of what four steps change in the logits, the mean over seeds.

    With `base` equal to `width` the config and the rates are those without muP.
    """
    changes = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = make(width, base)
        groups = param_groups(model, 3e-3, base=make(base, base))
        optimizer = torch.optim.Adam(groups)
        before = model(tokens).logits.detach()
        for _ in range(4):
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
        after = model(tokens).logits.detach()
        changes.append((after - before).square().mean().sqrt().item())
    return sum(changes) / seeds


def main() -> None:
    smoke = parser.parse_args().smoke
    widths = [BASE, 4 * BASE] if smoke else [BASE, 4 * BASE, 16 * BASE]
    seeds = 2 if smoke else 3
    tokens = windows(4, 32)
    changes = {}  # with muP, by width
    print("width  logits' change with muP  without")
    for width in widths:
        changes[width] = change(width, BASE, tokens, seeds)
        change_without = change(width, width, tokens, seeds)
        print(f"{width:5}  {changes[width]:24.3f}  {change_without:7.3f}")
    ratios = [changes[width] / changes[BASE] for width in widths]
    if not all(0.6 < ratio < 1.6 for ratio in ratios):
        raise SystemExit(f"with muP the change should not depend on the width: times {ratios}")


if __name__ == "__main__":
    main()
