"""accelerate: a loop of one's own in bf16 with accumulated gradients, its state saved and loaded.

    python examples/recipes/with_accelerate.py
    python examples/recipes/with_accelerate.py --smoke    # seconds: does it run?

OneCycleLR sets one rate for all groups. `structlin.optim.AdamW` keeps the ratios between the cores'
rates.
"""

import argparse
from tempfile import TemporaryDirectory

import torch
from characters import VOCABULARY, require, windows

require("accelerate", "transformers")

from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from structlin import BTT, convert
from structlin.optim import AdamW

SIZES = {"width": 256, "depth": 4, "context": 128, "steps": 25}
SMOKE = {"width": 32, "depth": 1, "context": 32, "steps": 4}
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


def main() -> None:
    sizes = SMOKE if parser.parse_args().smoke else SIZES
    width = sizes["width"]
    steps = sizes["steps"]  # updates in one pass over the data
    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=2, cpu=not torch.cuda.is_available()
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=sizes["depth"],
        num_attention_heads=width // 16,
    )
    model = convert(LlamaForCausalLM(config), BTT(rank=1), init="mup", zero_init="branch-end")
    optimizer = AdamW(model, lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=2 * steps)
    batches = DataLoader(windows(8 * steps, sizes["context"]), batch_size=4)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)

    def train() -> list[float]:
        losses = []
        for tokens in batches:
            with accelerator.accumulate(model):
                loss = model(tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses_before = train()
    with TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        expected_losses = train()
        accelerator.load_state(folder)
        loaded_losses = train()
    print(
        f"loss {losses_before[0]:.3f} -> {losses_before[-1]:.3f} -> {expected_losses[-1]:.3f}, "
        f"loaded {loaded_losses[-1]:.3f}"
    )
    if loaded_losses != expected_losses:
        raise SystemExit(
            f"after loading the losses differ: {loaded_losses}, before {expected_losses}"
        )


if __name__ == "__main__":
    main()
