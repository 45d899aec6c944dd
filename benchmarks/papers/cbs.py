"""What the experiments on "Compute Better Spent" share: an MLP on a teacher or on digits."""

from typing import Any

import torch

import structlin
from benchmarks.harness import training
from benchmarks.harness.models import BASE_WIDTH, STRUCTURES, structured_mlp
from benchmarks.harness.tasks import Digits, Teacher

TASKS: dict[str, type[Teacher] | type[Digits]] = {"teacher": Teacher, "digits": Digits}
RULES = ("naive", "aware")  # cores at the rate of a dense layer, or at that of their shape
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def rules(job: dict[str, Any]) -> tuple[str, ...]:
    """The rules that a structure is trained by; for dense both are the same."""
    return RULES[1:] if job["structure"] == "dense" else RULES


def train_mlp(
    task: str,
    structure: str,
    width: int,
    lr: float,
    seed: int,
    steps: int,
    *,
    rule: str = "aware",
    others: float = 1.0,
    optimizer: str = "adam",
    batch: int = 256,
) -> dict[str, Any]:
    """Train an MLP of three hidden layers, the two square ones structured; its loss on new samples
    (None: diverged), parameters and FLOPs per sample.

    Args:
        lr: of the dense model at `BASE_WIDTH`; muP takes it to `width`.
        others: factor on the rate of all that is no core.
    """
    torch.manual_seed(seed)
    data = TASKS[task](seed)
    model = structured_mlp(data.inputs, width, data.outputs, STRUCTURES[structure](width))
    groups = structlin.param_groups(
        model, lr, optimizer=optimizer, base={width: BASE_WIDTH}, structure_aware=rule == "aware"
    )
    if others != 1:
        groups = [
            {"params": [parameter], "lr": group["lr"] * (1 if ".cores." in name else others)}
            for group in groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        ]
    descent = OPTIMIZERS[optimizer](groups, lr)
    loss = training.train(model, descent, data, steps, batch=batch)
    return {
        "loss": loss,
        "params": training.count_params(model),
        "flops": training.forward_flops(model, torch.zeros(1, data.inputs)),
    }
