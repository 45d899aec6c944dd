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

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


def main() -> None:
    small = parser.parse_args().smoke
    width, depth, context, steps = (32, 1, 32, 4) if small else (256, 4, 128, 25)
    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=2, cpu=not torch.cuda.is_available()
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=width // 16, **sizes)
    model = convert(LlamaForCausalLM(config), BTT(rank=1), init="mup", zero_init="branch-end")
    optimizer = AdamW(model, lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=2 * steps)
    batches = DataLoader(windows(8 * steps, context), batch_size=4)
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

    first = train()
    with TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        expected = train()
        accelerator.load_state(folder)
        found = train()
    print(f"loss {first[0]:.3f} -> {first[-1]:.3f} -> {expected[-1]:.3f}, loaded {found[-1]:.3f}")
    if found != expected:
        raise SystemExit(f"after loading the losses differ: {found}, before {expected}")


if __name__ == "__main__":
    main()
