"""Lightning: bf16, a checkpoint, and a resumed run that ends as the run without a break.

    python examples/recipes/with_lightning.py
    python examples/recipes/with_lightning.py --smoke     # seconds: does it run?

The module converts its model in `__init__`, so that Lightning finds the cores when it loads.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from characters import VOCABULARY, require, windows

require("lightning", "transformers")

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from structlin import BTT, convert
from structlin.optim import AdamW

SIZES = {"width": 256, "depth": 4, "context": 128, "steps": 200}
SMOKE = {"width": 32, "depth": 1, "context": 32, "steps": 6}
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


class Characters(lightning.LightningModule):
    def __init__(self, width: int, depth: int, steps: int, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=width,
            n_layer=depth,
            n_head=width // 16,
            n_positions=128,
            bos_token_id=0,
            eos_token_id=0,
            # Lightning's checkpoints have no random state: with dropout a resumed run differs
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        model = GPT2LMHeadModel(config)
        self.model = convert(model, BTT(), init="mup", zero_init="branch-end")
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = self.model(tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        lr = self.hparams.lr
        optimizer = AdamW(self.model, lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, self.hparams.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    sizes = SMOKE if parser.parse_args().smoke else SIZES
    steps = sizes["steps"]
    tokens = windows(2 * steps, sizes["context"])
    batches = DataLoader(tokens, batch_size=4)  # half the steps are an epoch

    def run(folder: str, checkpoint: Path | None = None) -> list[float]:
        """The losses of a run, which goes on from the checkpoint if there is one."""
        lightning.seed_everything(0, verbose=False)
        task = Characters(sizes["width"], sizes["depth"], steps)
        # by steps: Lightning 2.6 takes a batch twice when it resumes from the end of an epoch
        save_halfway = ModelCheckpoint(
            folder, filename="{step}", save_top_k=-1, every_n_train_steps=steps // 2
        )
        trainer = lightning.Trainer(
            max_steps=steps,
            precision="bf16-mixed",
            callbacks=[save_halfway],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, batches, ckpt_path=checkpoint)
        return task.losses

    with TemporaryDirectory() as folder:
        losses = run(folder)
        checkpoint = Path(folder) / f"step={steps // 2}.ckpt"
        resumed_losses = run(f"{folder}/resumed", checkpoint)
    expected_losses = losses[steps // 2 :]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, resumed {resumed_losses[-1]:.3f}")
    if resumed_losses != expected_losses:
        raise SystemExit(
            f"the resumed run differs: {resumed_losses}, without a break {expected_losses}"
        )


if __name__ == "__main__":
    main()
