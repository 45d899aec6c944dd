"""Muon in a plain loop, in transformers' Trainer and in Lightning: the few lines that each
takes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import structlin
from structlin.optim import Muon
from tests.models import GPT

TOKENS = torch.arange(64).reshape(4, 16) * 7 % 50


class Texts(Dataset):
    """Four rows of tokens, over and over."""

    def __len__(self):
        return 40

    def __getitem__(self, n):
        return {"input_ids": TOKENS[n % 4], "labels": TOKENS[n % 4]}


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.filterwarnings("ignore")  # transformers' and accelerate's own
def test_the_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model = structlin.convert(transformers.GPT2LMHeadModel(config), structlin.BTT(), include="ffn")
    optimizer = Muon(model, lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=10, per_device_train_batch_size=4, save_steps=5, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, options, train_dataset=Texts(), optimizers=(optimizer, scheduler)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-8)
    saved = torch.load(tmp_path / "checkpoint-5" / "optimizer.pt", weights_only=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.gpt = structlin.convert(GPT(depth=1), structlin.BTT(), include="ffn")
            self.losses = []

        def training_step(self, batch, _):
            loss = loss_of(self.gpt, batch["input_ids"])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = Muon(self, lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(Texts(), batch_size=4))
    assert module.losses[-1] < 0.7 * module.losses[0]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    before = len(module.losses)
    again.fit(module, DataLoader(Texts(), batch_size=4), ckpt_path=tmp_path / "last.ckpt")
    assert len(module.losses) == before + 10
