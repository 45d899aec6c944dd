"""timm's train.py as it is: a structured model by name, and an optimizer that keeps its ratios.

    python examples/recipes/with_timm.py train.py --model structured_vit_tiny --opt adamw ...
    python examples/recipes/with_timm.py --smoke          # seconds, without train.py: does it run?

What follows train.py are its own arguments: --layer-decay, --sched, --resume work as before.
"""

import runpy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from characters import require
from torch import nn

require("timm")

from benchmarks.zoo import import_timm
from structlin import BTT, convert, keep_ratios

import_timm()  # where torchvision is not installed; drop this line where it is

import timm
import timm.optim
from timm.models import register_model
from timm.scheduler import create_scheduler_v2

create_with_timm = timm.optim.create_optimizer_v2


@register_model
def structured_vit_tiny(pretrained: bool = False, **options: Any) -> nn.Module:
    if pretrained:
        raise ValueError("pretrained=True: a fresh structure has no trained weights; use compress")
    return convert(timm.create_model("vit_tiny_patch16_224", **options), BTT(rank=1))


def create_optimizer_v2(model: nn.Module, *args: Any, **options: Any) -> torch.optim.Optimizer:
    return keep_ratios(create_with_timm(model, *args, **options), model)


timm.optim.create_optimizer_v2 = create_optimizer_v2  # which train.py imports when it starts


def smoke() -> None:
    """What train.py does, on images whose class is their bright quarter."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 4}
    model = timm.create_model("structured_vit_tiny", **sizes)
    options = {"lr": 3e-3, "weight_decay": 0.05, "layer_decay": 0.9}
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", **options)
    schedule, _ = create_scheduler_v2(optimizer, num_epochs=20, min_lr=1e-5, warmup_epochs=2)

    classes = torch.arange(4).repeat(8)  # (32,)
    quarters = F.one_hot(classes).view(-1, 1, 2, 2) + 0.1 * torch.randn(32, 3, 2, 2)
    images = F.interpolate(quarters, scale_factor=16)  # (32, 3, 32, 32)
    losses = []
    for epoch in range(20):
        schedule.step(epoch)
        loss = F.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    lr_mults = sorted({round(group["lr_mult"], 2) for group in optimizer.param_groups})
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, rates times {lr_mults}")
    if losses[-1] > 0.8 * losses[0] or len(lr_mults) < 2:
        raise SystemExit("the loss should fall, and cores should have rates of their own")


if __name__ == "__main__":
    if sys.argv[1:] == ["--smoke"]:
        smoke()
    elif sys.argv[1:]:
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        raise SystemExit("give the path of timm's train.py and its arguments, or --smoke")
