"""transformers' Trainer: bf16, gradient checkpointing, a checkpoint, and a resumed run that ends as
the run without a break.

    python examples/recipes/with_trainer.py                     # a small GPT-2 on characters
    python examples/recipes/with_trainer.py --optimizer muon
    python examples/recipes/with_trainer.py --smoke             # seconds: does it run?
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from characters import VOCABULARY, require, windows

require("transformers", "accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from structlin import BTT, convert
from structlin.optim import AdamW, Muon

SIZES = {"width": 256, "depth": 4, "context": 128, "batch": 8, "steps": 60, "log_every": 5}
SMOKE = {"width": 32, "depth": 1, "context": 32, "batch": 4, "steps": 6, "log_every": 1}
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
parser.add_argument("--smoke", action="store_true")


def make_trainer(folder: str, options: argparse.Namespace, seed: int) -> Trainer:
    sizes = SMOKE if options.smoke else SIZES
    arguments = TrainingArguments(
        folder,
        max_steps=sizes["steps"],
        save_steps=sizes["steps"] // 2,
        logging_steps=sizes["log_every"],
        per_device_train_batch_size=sizes["batch"],
        learning_rate=3e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(seed)  # of the weights alone: the Trainer's own seed orders the data
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=sizes["width"],
        n_layer=sizes["depth"],
        n_head=sizes["width"] // 16,
        n_positions=sizes["context"],
        bos_token_id=0,
        eos_token_id=0,
    )
    model = convert(GPT2LMHeadModel(config), BTT(rank=1), init="mup", zero_init="branch-end")
    model.gradient_checkpointing_enable()
    if options.optimizer == "muon":
        optimizer = Muon(model, lr=0.02, other_lr=arguments.learning_rate)
    else:
        optimizer = AdamW(model, lr=arguments.learning_rate, weight_decay=arguments.weight_decay)
    data = [{"input_ids": row, "labels": row} for row in windows(512, sizes["context"])]
    optimizers = (optimizer, None)  # the Trainer makes the scheduler
    return Trainer(model, arguments, train_dataset=data, optimizers=optimizers)


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        whole = make_trainer(folder, options, seed=0)
        whole.train()
        checkpoint = Path(folder) / f"checkpoint-{whole.args.save_steps}"
        resumed = make_trainer(folder, options, seed=1)
        resumed.train(resume_from_checkpoint=str(checkpoint))
    losses = losses_of(whole)
    resumed_losses = losses_of(resumed)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, resumed {resumed_losses[-1]:.3f}")
    if not torch.allclose(torch.tensor(resumed_losses), torch.tensor(losses), rtol=1e-3):
        raise SystemExit(f"the resumed run differs: {resumed_losses}, without a break {losses}")


if __name__ == "__main__":
    main()
