"""The run on a machine with a GPU, in two commands of at most ten minutes. No GPU has run it yet.

    export STRUCTLIN_ENGINE=off                # the CPU's engine would only be built
    python -m benchmarks.gpu a --out "$OUT"    # the gate, then layers
    python -m benchmarks.gpu b --out "$OUT"    # whole models, then one training run
    python -m benchmarks.gpu a --smoke         # without a GPU: the same on tiny layers of a CPU

The gate compares every structure with float64 on the card, in bfloat16, float16 and float32, also
padded, on x and dy that are not contiguous, past 2**31 elements and in a CUDA graph; and it counts
products and copies. If something is wrong, the run ends there with exit code 7, and nothing is
timed. Files, each written as it is measured: gate.json, products_gpu.json, model_gpu.json and
training_gpu.json. `benchmarks.speed.products` says how layers are timed and what is predicted of
them. Afterwards the files go to benchmarks/results, and `make pages` shows them.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.harness import record, timing
from benchmarks.harness.experiment import parser
from benchmarks.speed import model, products
from structlin._engine import operators, views
from structlin._engine.product import define
from structlin._structure.structure import Program, Structure

# relative, in norm; two products that round to 8, 11 and 24 bits
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3, "float32": 1e-5}
STOP = 7  # exit code of the gate
BUDGET = {"a": 480.0, "b": 480.0}  # seconds
SHARE = 0.6  # of b's seconds, for whole models
FAR_TOKENS = 2**21 + 77  # times 1,024 features is past 2**31 elements
VOCABULARY = 512
LEARNING_RATE = 1e-3


# ---- the gate ------------------------------------------------------------------------------------


def draw(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def largest_error(
    structure: Structure, program: Program, tokens: int, dtype: torch.dtype, device: str
) -> float:
    """The largest relative error of y, dx, dcores and dbias against float64; x and dy are turned,
    so that neither is contiguous."""
    cores = []
    for core in structure.cores:
        drawn = draw(*core.shape, device=device, dtype=dtype).div_(core.fan_in**0.5)
        cores.append(drawn.requires_grad_())
    bias = draw(program.out_features, device=device, dtype=dtype).requires_grad_()
    x = draw(program.in_features, tokens, device=device, dtype=dtype).mT.requires_grad_()
    dy = draw(program.out_features, tokens, device=device, dtype=dtype).mT
    with timing.poisoned():
        y = operators.multiply_views(define, program, cores, bias, x)
        results = [y, *torch.autograd.grad(y, [x, *cores, bias], dy)]

    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, *cores, bias)]
    exact_x, *exact_cores, exact_bias = leaves
    padded = F.pad(exact_x, (0, program.padding[0]))
    exact_y = timing.oracle(structure, exact_cores, padded)[:, : program.out_features]
    exact_y = exact_y + exact_bias
    exact_results = [exact_y, *torch.autograd.grad(exact_y, leaves, dy.double())]
    return max(map(timing.relative_error, results, exact_results))


def check_structures(device: str, smoke: bool) -> Iterator[tuple[str, Callable[[], float], float]]:
    """Name, error, and what it has to be below: small layers, then large ones."""
    sizes = [(48, 131), (768, 4096), (1024, 16384)]
    if smoke:
        sizes = [(48, 131), (64, 131)]
    for width, tokens in sizes:
        for name, family in products.families(width).items():
            try:
                structure = family.structure(width, width)
            except ValueError:
                continue  # Monarch with 16 blocks has no width 48
            program = structure.program
            narrow = program.fit(width - 5, width - 3)
            for dtype, tolerance in TOLERANCE.items():
                if device == "cpu" and dtype != "float32":
                    continue
                error = partial(
                    largest_error, structure, dtype=getattr(torch, dtype), device=device
                )
                title = f"{name}, {width}, {tokens} tokens, {dtype}"
                yield title, partial(error, program, tokens), tolerance
                if width < 768:
                    yield f"{title}, padded", partial(error, narrow, tokens), tolerance
                    yield f"{title}, one token", partial(error, program, 1), tolerance


def count_products(device: str) -> dict[str, int]:
    """How many products and copies forward and backward of BTT r=1 are, by torch's profiler."""
    structure = products.families(64)["BTT r=1"].structure(64, 64)
    cores = [torch.randn(core.shape, device=device, requires_grad=True) for core in structure.cores]
    x = torch.randn(128, 64, device=device, requires_grad=True)
    dy = torch.randn(128, 64, device=device)

    def work() -> None:
        y = operators.multiply_views(define, structure.program, cores, None, x)
        torch.autograd.grad(y, [x, *cores], dy)

    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    counts = Counter({event.key: event.count for event in profile.key_averages()})
    return {name: counts[f"aten::{name}"] for name in ("bmm", "copy_", "contiguous", "clone")}


def error_past_32_bits() -> float:
    """The error of the last tokens of an x of more than 2**31 elements, relative to float64."""
    structure = products.families(1024)["BTT r=1"].structure(1024, 1024)
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    cores = [draw(*core.shape, **kind).div_(core.fan_in**0.5) for core in structure.cores]
    x = torch.empty(FAR_TOKENS, 1024, **kind).normal_()
    y = operators.multiply_views(define, structure.program, cores, None, x)
    return timing.relative_error(y[-256:], timing.oracle(structure, cores, x[-256:]))


def error_in_a_graph() -> float:
    """The largest difference of a CUDA graph's result from the same call's."""
    structure = products.families(1024)["BTT r=1"].structure(1024, 1024)
    layer = structlin.StructuredLinear(1024, 1024, structure, device="cuda")
    x = torch.randn(4096, 1024, device="cuda")
    with torch.no_grad():
        wanted = layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
    return float((y - wanted).abs().max())


def gate(path: Path, device: str, smoke: bool) -> bool:
    """Whether all is right; `path` has a row for each check."""
    checks = list(check_structures(device, smoke))
    if device == "cuda":
        checks.append(("past 2**31 elements", error_past_32_bits, TOLERANCE["bfloat16"]))
        checks.append(("a CUDA graph", error_in_a_graph, 1e-6))
    checks.append(("products", lambda: abs(count_products(device)["bmm"] - 6), 0.5))
    checks.append(("copies", lambda: sum(count_products(device).values()) - 6, 0.5))
    checks.append(("results into views", lambda: float(not views.writes_views(device)), 0.5))
    rows = []
    for title, measure, tolerance in checks:
        row = {"check": title, "tolerance": tolerance}
        try:
            error = float(measure())
            row |= {"error": error if math.isfinite(error) else None, "passed": error < tolerance}
        except Exception as failure:  # is a row too, and the other checks go on
            row |= {"error": str(failure)[:300], "passed": False}
        rows.append(row)
        if not row["passed"] or title == checks[-1][0] or len(rows) % 50 == 0:
            record.save_json(path, rows=rows)
    wrong = [row for row in rows if not row["passed"]]
    for row in wrong[:10]:
        print(f"WRONG {row}")
    print(f"gate: {len(rows)} checks, {len(wrong)} wrong")
    return not wrong


# ---- one training run ----------------------------------------------------------------------------


class Text:
    """Sequences of a random Markov chain: a loss that a model has to learn, without a file."""

    def __init__(self, shape: model.Shape) -> None:
        torch.manual_seed(1)
        self.shape = shape
        logits = 3 * torch.randn(VOCABULARY, VOCABULARY, device=shape.device)
        self.chances = logits.softmax(1)

    @property
    def entropy(self) -> float:
        """Nats per token of the chain after its first tokens, which no model goes below."""
        tokens = torch.full((VOCABULARY,), 1 / VOCABULARY, device=self.shape.device)
        for _ in range(50):
            tokens = tokens @ self.chances
        return float(-(tokens[:, None] * self.chances * self.chances.log()).sum())

    def draw(self) -> Tensor:
        tokens = [torch.randint(VOCABULARY, (self.shape.batch,), device=self.shape.device)]
        for _ in range(self.shape.context - 1):
            tokens.append(self.chances[tokens[-1]].multinomial(1).squeeze(1))
        return torch.stack(tokens, 1)


def train(path: Path, device: str, seconds: float, smoke: bool) -> None:
    """GPT-2 small, dense and with BTT in all layers but the head, on the same text for the same
    time each: a row for every tenth step."""
    shape = model.shape_of("GPT-2, tiny" if smoke else "GPT-2 small", device)
    rows: list[dict[str, Any]] = []
    text = Text(shape)
    batches = [text.draw() % shape.classes for _ in range(2 if smoke else 32)]
    for name, structure in (("dense", structlin.Dense()), ("BTT r=1", structlin.BTT())):
        network = structlin.convert(shape.build().float(), structure).train()
        groups = structlin.param_groups(network, lr=LEARNING_RATE)
        optimizer = torch.optim.AdamW(groups, fused=True)
        steps = 0
        started = time.perf_counter()
        deadline = started + seconds / 2
        while time.perf_counter() < deadline and (not smoke or steps < 3):
            loss = _step(network, optimizer, batches[steps % len(batches)], device)
            steps += 1
            if steps % 10 == 0 or smoke:
                elapsed = time.perf_counter() - started
                tokens_per_s = steps * shape.batch * shape.context / elapsed
                row = {"model": name, "step": steps, "loss": float(loss), "seconds": elapsed}
                rows.append(row | {"tokens_per_s": tokens_per_s})
                record.save_json(path, entropy=text.entropy, rows=rows)
        print(f"training: {rows[-1] if rows else name}")


def _step(
    network: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, device: str
) -> Tensor:
    optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = network(input_ids=tokens).logits[:, :-1]
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---- the two commands ----------------------------------------------------------------------------


def show_results() -> str:
    """What was measured on a GPU; until then, that nothing was."""
    path = record.RESULTS / "products_gpu.json"
    if not path.exists():
        return (
            "**No GPU has run any of this.** `python -m benchmarks.gpu a` checks and measures it."
        )
    result = record.read("products_gpu")
    machine = result["environment"]["machine"]
    return f"Measured on {machine}, speed over the loop:\n\n{products.markdown(result)}"


def main(argv: list[str] | None = None) -> None:
    about = parser(__doc__, workers=None)
    about.add_argument("part", nargs="?", choices=("a", "b"), default="a")
    about.add_argument("--budget", type=float, help="seconds, of which nothing is begun after")
    options = about.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.smoke:
        print("no GPU: nothing to measure; --smoke needs none")
        return
    deadline = time.perf_counter() + (options.budget or BUDGET[options.part])
    if options.smoke and options.out == options.kept:
        options.out = Path("out") / "gpu"
    common = ["--out", str(options.out), "--device", device]
    if options.smoke:
        common.append("--smoke")
    if options.part == "a":
        if not gate(options.out / "gate.json", device, options.smoke):
            sys.exit(STOP)
        seconds_left = deadline - time.perf_counter()
        products.BENCH.main([*common, "--budget", f"{seconds_left:.0f}"])
    else:
        seconds_left = SHARE * (deadline - time.perf_counter())
        model.BENCH.main([*common, "--budget", f"{seconds_left:.0f}"])
        seconds_left = deadline - time.perf_counter()
        train(options.out / "training_gpu.json", device, seconds_left, options.smoke)


if __name__ == "__main__":
    main()
