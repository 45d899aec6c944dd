"""docs/training_loop.md: each block of the page, run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import which
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader

from structlin import BTT, StructuredLinear, convert, param_groups
from tests.models import GPT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training_loop.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
LR = 1e-2
OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning:(torch|accelerate|lightning|onnx|transformers|copyreg).*",
)


def run(heading, **names):
    """The names that the block below a heading leaves, given those that it takes."""
    exec(BLOCKS[heading], names)
    return SimpleNamespace(**names)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 36), nn.GELU(), nn.Linear(36, 16))


def loss_of(model, x):
    return (model(x) - x.roll(1, -1)).square().mean()


def require_ratios(optimizer):
    """Every group has the dense model's rate, and what a step multiplies it by."""
    assert len({float(group["lr"]) for group in optimizer.param_groups}) == 1
    assert len({group["lr_mult"] for group in optimizer.param_groups}) > 1
    assert all(group["keeps_ratios"] for group in optimizer.param_groups)


def take_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model, optimizer, scheduler, steps):
    x, losses = torch.randn(64, 16), []
    for _ in range(steps):
        losses.append(take_step(model, optimizer, x))
        scheduler()
        require_ratios(optimizer)
    assert losses[-1] < losses[0]


def test_the_page_is_short_and_every_block_of_it_is_here():
    assert len(PAGE.split()) <= 900
    assert len(BLOCKS) == PAGE.count("```python") == PAGE.count("\n## ")
    tested = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{heading}"' in tested for heading in BLOCKS)


def test_a_loop_of_ones_own_trains_with_a_scheduler_that_sets_rates():
    found = run("Your own loop", model=small(), lr=LR, steps=10)
    train(found.model, found.optimizer, found.scheduler.step, 9)


def test_another_optimizer_trains_with_a_scheduler_that_sets_rates():
    found = run("Another optimizer", model=small(), lr=LR)
    assert {group["weight_decay"] for group in found.optimizer.param_groups} == {0.0, 1e-4}
    scheduler = torch.optim.lr_scheduler.OneCycleLR(found.optimizer, LR, total_steps=20)
    train(found.model, found.optimizer, scheduler.step, 9)


# with the interface of nanoGPT's files, for what the page's file does to them
MODEL = """
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 36), nn.GELU(), nn.Linear(36, 16))

        # report number of parameters

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
        return optimizer
"""
TRAIN = """
import sys
import torch
from model import GPT

assert sys.argv[1:] == ["--device=cpu"]
torch.manual_seed(0)
model = GPT(None)
optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
x, losses = torch.randn(64, 16), []
for step in range(9):
    lr = 1e-2 * (step + 1) / 9
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    loss = (model.layers(x) - x.roll(1, -1)).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.save({"losses": losses, "optimizer": optimizer.state_dict()}, "out.pt")
"""


@pytest.mark.parametrize("way", ["a file beside", "a patch"])
def test_nanogpts_loop_trains_unchanged(way, tmp_path):
    for name, text in (("model", MODEL), ("train", TRAIN), ("structured", BLOCKS["nanoGPT"])):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    started = "structured.py"
    if way == "a patch":
        if which("git") is None:
            pytest.skip("needs git")
        patch, started = ROOT / "examples/recipes/nanogpt.patch", "train.py"
        subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    command = [sys.executable, started, "--device=cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    found = torch.load(tmp_path / "out.pt")
    assert found["losses"] == pytest.approx(losses_by_hand(found["optimizer"]), rel=1e-4)


def losses_by_hand(state):
    """Of the loop of TRAIN, with rates that are scaled by hand."""
    names = {}
    exec(MODEL, names)
    torch.manual_seed(0)
    model = convert(names["GPT"](None), BTT(rank=1))
    optimizer = torch.optim.AdamW(param_groups(model, 1e-2, weight_decay=0.1), betas=(0.9, 0.95))
    mults = {group["lr_mult"] for group in optimizer.param_groups}
    assert {group["lr_mult"] for group in state["param_groups"]} == mults
    x, losses = torch.randn(64, 16), []
    for step in range(9):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 9 * group["lr_mult"]
        losses.append(take_step(model.layers, optimizer, x))
    return losses


@OWN_WARNINGS
def test_transformers_trainer_trains_with_a_least_rate(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=24, n_positions=16)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        learning_rate=LR,
        weight_decay=0.1,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": LR / 10},
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    tokens = torch.arange(12)
    dataset = [{"input_ids": tokens, "labels": tokens}] * 8
    model = transformers.GPT2LMHeadModel(config)
    found = run("transformers' Trainer", model=model, args=args, dataset=dataset)
    require_ratios(found.optimizer)
    history = found.trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    assert losses[-1] < losses[0]
    assert max(rates) <= LR
    assert found.optimizer.param_groups[0]["lr"] == pytest.approx(LR / 10)


@OWN_WARNINGS
def test_lightning_trains(tmp_path):
    lightning = pytest.importorskip("lightning")
    configure = run("Lightning").configure_optimizers

    class Task(lightning.LightningModule):
        configure_optimizers = configure

        def __init__(self) -> None:
            super().__init__()
            self.model, self.lr, self.steps = convert(small(), BTT(rank=2)), LR, 8
            self.losses = []

        def training_step(self, x):
            require_ratios(self.optimizers())  # inside the closure of the step
            loss = loss_of(self.model, x)
            self.losses.append(loss.item())
            return loss

    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=8, accelerator="cpu", default_root_dir=tmp_path, **options
    )
    task = Task()
    trainer.fit(task, DataLoader(torch.randn(8, 16), batch_size=8))
    assert task.losses[-1] < task.losses[0]
    require_ratios(trainer.optimizers[0])


def test_timm_trains():
    pytest.importorskip("timm")
    found = run("timm", model=small(), lr=LR, epochs=8)
    epochs = iter(range(1, 9))
    found.scheduler.step(4)
    train(found.model, found.optimizer, lambda: found.scheduler.step(next(epochs)), 6)
    assert {group["weight_decay"] for group in found.optimizer.param_groups} == {0.0, 0.05}


def shard(rank, world, path):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world)
    found = run("FSDP2", model=small(), lr=LR)
    torch.manual_seed(1)
    train(found.model, found.optimizer, lambda: None, 3)
    final = [p.full_tensor().detach() for p in found.model.parameters()]
    torch.save(final, f"{path}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads abort now and then where a model outlives its process group


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_fsdp2_trains_as_one_process(tmp_path):
    mp.start_processes(shard, (2, str(tmp_path)), nprocs=2, start_method="spawn")
    found = run("Your own loop", model=small(), lr=LR, steps=9)
    model = found.model
    optimizer = torch.optim.AdamW(param_groups(model, LR))  # whose own decay holds for matrices
    torch.manual_seed(1)
    x = torch.randn(64, 16)
    for _ in range(3):
        take_step(model, optimizer, x)
    for rank in range(2):
        final = torch.load(tmp_path / f"{rank}.pt")
        for p, q in zip(model.parameters(), final, strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-4, atol=1e-5)


@OWN_WARNINGS
def test_both_exports_and_the_dense_model_have_the_function(tmp_path, monkeypatch):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    model, inputs = convert(GPT(width=32, depth=1), BTT(rank=2)), torch.arange(24).reshape(2, 12)
    expected = model(inputs).detach()
    found = run("Export", model=model, inputs=inputs)
    torch.testing.assert_close(found.exported.module()(inputs), expected)
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=1e-3)
    assert not any(isinstance(module, StructuredLinear) for module in found.dense.modules())
    torch.testing.assert_close(found.dense(inputs), expected, atol=1e-4, rtol=1e-3)
