"""What compression of a large model would come to, before its weights are loaded: sizes, bytes,
minutes.

    python examples/plan_large.py                                # Llama with 7 billion parameters
    python examples/plan_large.py --model path/to/folder --keep 0.6       # of a config.json there
    python examples/plan_large.py --smoke

The model is made on the meta device, where it has no values. Each layer keeps the largest size of
the same share; `structlin.compress` shares out by what errors do, once there are weights. The
minutes are an estimate, of one core of this machine: the FLOPs of the passes and of the inputs'
covariances by the rate of a matrix product, and all else by the time of a small layer, which grows
with the cube of the width. Both are measured at each start and printed.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import compare
import torch
from rich.console import Console
from torch import nn

import structlin
from structlin._commands.arguments import fraction
from structlin._commands.read import build_skeleton

TRIAL = 1024  # width of the small layer
BATCH, FEW = 1024, 8  # tokens of a batch; batches where a few of them are enough
PASSES = 2, 1 + 1 + 3  # two streams; of a few batches: the order, the inputs, gradients as three
GRAMS = 1.5, 0.5  # covariances of z (half of it) and of x with z; of a few batches: of x
GB, MINUTE = 1e9, 60.0


class Estimate(NamedTuple):
    dense: int  #: parameters of the layers that are converted
    kept: int  #: of them
    rest: int  #: parameters of everything else
    passes: float  #: CPU seconds of the model's passes and of the inputs' covariances
    projections: float  #: CPU seconds
    rate: float  #: FLOPs per CPU second, measured
    layer: float  #: CPU seconds of a layer of width `TRIAL`, measured


def build(folder: Path | None, smoke: bool) -> nn.Module:
    """A causal language model on the meta device.

    Raises:
        ValueError: there is no config that transformers knows.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    if folder is not None:
        return build_skeleton(str(folder))
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**tiny if smoke else {}))


def plan(model: nn.Module, keep: float) -> structlin.Plan:
    """Low rank, of the same share of each layer."""
    options = {"keep": keep, "allocation": "error"}
    return structlin.plan_compression(model, structlin.LowRank(rank=1), None, **options)


def estimate(model: nn.Module, planned: structlin.Plan, tokens: int) -> Estimate:
    """What the plan comes to, with calibration on so many tokens."""
    chosen = [decision for decision in planned.decisions if decision.resolved is not None]
    widths = [(each.layer.in_features, each.layer.out_features) for each in chosen]
    dense = sum(a * b for a, b in widths)
    total = sum(parameter.numel() for parameter in model.parameters())
    few = min(1.0, FEW * BATCH / tokens)
    passes, grams = (every + few * some for every, some in (PASSES, GRAMS))
    flops = 2 * tokens * (passes * total + grams * sum(each[0] ** 2 for each in widths))
    work = sum(a * b * max(a, b) for a, b in widths) / TRIAL**3
    rate, layer = measure_rate(), time_layer()
    kept = sum(each.resolved.params for each in chosen)
    return Estimate(dense, kept, total - dense, flops / rate, work * layer, rate, layer)


def measure_rate() -> float:
    """FLOPs per CPU second of a square product in float32, the best of five."""
    a, seconds = torch.randn(1024, 1024), []
    for _ in range(5):
        start = time.process_time()
        a @ a
        seconds.append(time.process_time() - start)
    return 2 * 1024**3 / min(seconds)


def time_layer() -> float:
    """CPU seconds that `compress` takes for a layer of width `TRIAL` and few tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(TRIAL, TRIAL, bias=False) for _ in range(2)))
    start = time.process_time()
    batches = [torch.randn(TRIAL // 4, TRIAL)]
    structlin.plan_compression(model, structlin.LowRank(rank=1), batches, progress=False)
    return (time.process_time() - start) / len(model)


def main(argv: list[str] | None = None) -> Estimate:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder with a config.json of transformers")
    parser.add_argument("--keep", type=fraction, default=0.8, help="of the layers' parameters")
    parser.add_argument("--tokens", type=compare.positive, default=128 * 512, help="to calibrate")
    parser.add_argument("--layers", action="store_true", help="print every layer")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    options = parser.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    try:
        model = build(options.model, options.smoke)
        planned = plan(model, options.keep)
    except ValueError as error:
        parser.error(str(error))
    found = estimate(model, planned, options.tokens)
    console = Console(width=None if sys.stdout.isatty() else 150, markup=False)
    if options.layers:
        console.print(str(planned))
    lines = [
        f"{type(model).__name__}: {(found.dense + found.rest) / 1e9:.2f} billion parameters, "
        f"{found.dense / 1e9:.2f} of them in layers that are converted",
        f"kept of these: {found.kept / found.dense:.1%}",
        *(
            f"{name}: {(found.dense + found.rest) * size / GB:.1f} GB -> "
            f"{(found.kept + found.rest) * size / GB:.1f} GB; while compress runs "
            f"{(found.dense + found.kept + found.rest) * size / GB:.1f} GB and what a block needs"
            for name, size in (("float32", 4), ("bfloat16", 2))
        ),
        f"compress on {options.tokens:,} tokens, CPU minutes of one core here: about "
        f"{found.passes / MINUTE:,.0f} of passes and covariances, "
        f"{found.projections / MINUTE:,.0f} of projections",
        f"measured now: {found.rate / 1e9:.0f} GFLOPs per CPU second of a product of float32, "
        f"{found.layer:.1f} CPU seconds of a layer {TRIAL} -> {TRIAL}",
    ]
    console.print("\n".join(lines))
    return found


if __name__ == "__main__":
    main()
