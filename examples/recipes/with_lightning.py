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

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


class Characters(lightning.LightningModule):
    def __init__(self, width: int, depth: int, steps: int, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = {"n_embd": width, "n_layer": depth, "n_head": width // 16, "n_positions": 128}
        # Lightning's checkpoints have no random state: with dropout a resumed run differs
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(**sizes, **no_dropout, **tokens)
        model = convert(GPT2LMHeadModel(config), BTT(), init="mup", zero_init="branch-end")
        self.model, self.losses = model, list[float]()

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = self.model(tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        lr, steps = self.hparams.lr, self.hparams.steps
        optimizer = AdamW(self.model, lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    small = parser.parse_args().smoke
    width, depth, context, steps = (32, 1, 32, 6) if small else (256, 4, 128, 200)
    batches = DataLoader(windows(2 * steps, context), batch_size=4)  # half the steps are an epoch

    def run(folder: str, resume: Path | None = None) -> Characters:
        lightning.seed_everything(0, verbose=False)
        task = Characters(width, depth, steps)
        # by steps: Lightning 2.6 takes a batch twice when it resumes from the end of an epoch
        keep = ModelCheckpoint(
            folder, filename="{step}", save_top_k=-1, every_n_train_steps=steps // 2
        )
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_steps=steps, precision="bf16-mixed", callbacks=[keep], **options
        )
        trainer.fit(task, batches, ckpt_path=resume)
        return task

    with TemporaryDirectory() as folder:
        expected = run(folder).losses
        found = run(f"{folder}/resumed", Path(folder) / f"step={steps // 2}.ckpt").losses
    print(f"loss {expected[0]:.3f} -> {expected[-1]:.3f}, resumed {found[-1]:.3f}")
    if found != expected[steps // 2 :]:
        raise SystemExit(f"the resumed run differs: {found}, without a break {expected}")


if __name__ == "__main__":
    main()
