"""GPT loss against compute, with and without the head's: figure 9 of "Compute Better Spent".

    python -m benchmarks.papers.cbs_gpt            # the full result, fifteen core-minutes
    python -m benchmarks.papers.cbs_gpt --smoke    # seconds

The paper trains GPT-2 on OpenWebText, dense and with normalised BTT of rank 4 in every matrix, the
language modelling head included; BTT's attention has 6 heads at widths 1024 to 2048, those of the
narrowest dense model, "since otherwise we would spend too much compute in the attention layers
relative to the FFN layers" (G.2). "(a) When including language modeling head compute, BTT is more
efficient than dense. (b) When excluding language modeling head compute, BTT and dense perform
similarly"; "the improvement primarily comes from reducing the compute spent in the language
modeling head".

Here: the GPT of examples/ on the text of the Python standard library in words, with a vocabulary of
2048 so that the head is a large part of these small models too; two blocks, widths 64 to 256 dense,
with as many heads of 32 features as fill the width, and 144 to 576 with normalised BTT of rank 4
and the 2 heads of the narrowest dense model; 300 steps of AdamW with a fifth of warm-up and a
cosine, 3 seeds. One base learning rate, 2^-7, is carried to every model by muP, as in the paper;
dense also has the best of three at each width, half and twice that too. FLOPs are those of a
forward pass per token, attention included. Losses are compared at equal FLOPs as in cbs_scaling,
seed by seed, with Student's intervals. Fixed before the runs: "similarly" is within 2 % of each
other, and the gain comes primarily from the head if less than half of its logarithm is left where
the head's FLOPs are not counted.

A batch has 512 tokens, a thousandth of the paper's, and most words are in none of them. At Adam's
usual eps of 1e-8 the rows of a dense head that belong to such words then move at full rate on
noise; a BTT head, whose cores are shared by many words, does not. To compare structures and not
that, eps is 1e-4 for all; the models of width 64 are also trained with 1e-8, to show how much it
matters.
"""

from math import log

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, tasks, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.models import BASE_WIDTH
from benchmarks.harness.statistics import (
    Curve,
    Estimate,
    best_points,
    curve_of,
    gap,
    seeds_of,
    select,
    student,
)

WIDTHS = {"dense": [64, 128, 256], "BTT": [144, 256, 400, 576]}
SETTING = {"batch": 8, "context": 64, "depth": 2, "vocabulary": 2048, "rank": 4, "heads": 2}
LR = 2.0**-7
RATES = {"dense": (LR / 2, LR, 2 * LR), "BTT": (LR,)}
EPS, USUAL_EPS = 1e-4, 1e-8
EQUAL = log(1.02)  # losses perform similarly if the logarithm of their ratio is closer to 0


def build(task: tasks.Words, structure: str, width: int) -> nn.Module:
    if structure == "BTT":
        task.heads = SETTING["heads"]  # else as many as fill the width
    model = task.model(width)
    if structure == "BTT":
        zero = ["*c_proj", "lm_head"]
        btt = structlin.BTT(rank=SETTING["rank"])
        include = ["*c_attn", "*c_fc", *zero]
        structlin.convert(model, btt, include=include, init="mup", zero_init=zero, weight_norm=True)
    return model


def train(structure: str, width: int, eps: float, lr: float, seed: int, steps: int) -> Row:
    task = tasks.Words(
        seed, SETTING["batch"], SETTING["context"], SETTING["depth"], SETTING["vocabulary"]
    )
    torch.manual_seed(seed)
    model = build(task, structure, width)
    groups = structlin.param_groups(model, lr, base=task.model(BASE_WIDTH))

    def loss(step: int) -> Tensor:
        return training.cross_entropy(model, *task.batch(step))

    descent = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=eps)
    training.descend(descent, loss, steps, warmup=steps // 5)
    final, _ = tasks.compare.evaluate(model, task.heldout, "cpu")
    head = training.forward_flops(model.lm_head, torch.zeros(1, width))
    total = training.forward_flops(model, task.heldout[0][0][:1]) // SETTING["context"]
    return {"loss": final, "flops": total, "head_flops": head, "body_flops": total - head}


def compare(rows: list[Row]) -> dict[str, Estimate]:
    """log(BTT's loss / dense's) at equal FLOPs of the whole model, at equal FLOPs without the
    head's, by how much the second exceeds half of the first, the first with dense at BTT's rate,
    and the log ratio of the models of the base width at the usual eps."""
    seeds = seeds_of(rows)

    def gaps(flops: str, **rate: float) -> list[float]:
        mine = [select(rows, structure=name, eps=EPS, **rate) for name in ("BTT", "dense")]
        return [gap(*(curve_of(found, [seed], flops) for found in mine)) for seed in seeds]

    def usual(structure: str, seed: int) -> float:
        found: Curve = curve_of(select(rows, structure=structure, eps=USUAL_EPS), [seed])
        return found[0][1]

    total, body = gaps("flops"), gaps("body_flops")
    left = [b - t / 2 for t, b in zip(total, body, strict=True)]
    return {
        "all FLOPs": student(total),
        "without the head's FLOPs": student(body),
        "beyond half of the gain": student(left),
        "all FLOPs, one rate": student(gaps("flops", lr=LR)),
        "same width, usual eps": student(
            [usual("BTT", seed) - usual("dense", seed) for seed in seeds]
        ),
    }


def widths_of(job: Row) -> list[int]:
    return sorted({BASE_WIDTH, *WIDTHS[job["structure"]]})


def draw(result: Row) -> figures.Figure:
    rows = select(result["rows"], eps=EPS)
    points = [
        row | {"counted": counted}
        for counted, of in {"all": "flops", "without the head's": "body_flops"}.items()
        for row in best_points([row | {"flops": row[of]} for row in rows], "structure")
    ]
    return figures.curves(points, "flops", panel=["counted"], line=["structure"])


EXPERIMENT = Experiment(
    name="papers/cbs_gpt",
    about=__doc__,
    run=train,
    axes={
        "structure": [*WIDTHS],
        "width": widths_of,
        "eps": lambda job: [
            *([EPS] if job["width"] in WIDTHS[job["structure"]] else []),
            *([USUAL_EPS] if job["width"] == BASE_WIDTH else []),
        ],
        "lr": lambda job: RATES[job["structure"] if job["eps"] == EPS else "BTT"],
    },
    sizes={"steps": 300},
    note=SETTING | {"eps": EPS, "optimizer": "AdamW, cosine"},
    smoke={
        "steps": 1,
        "width": lambda job: widths_of(job)[: 2 + (job["structure"] == "BTT")],
        "lr": [LR],
    },
    analyse=lambda rows: {"log_ratios": compare(rows)},
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
