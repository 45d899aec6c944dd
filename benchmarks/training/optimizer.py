"""What does a step cost? AdamW, torch.optim.Muon and structlin's Muon on a GPT of equal width,
dense and BTT.

    python -m benchmarks.training.optimizer                # the full result, results/optimizer.json
    python -m benchmarks.training.optimizer --smoke        # seconds

For each optimizer the time of `step` alone, as a share of forward + backward of the same model on
4096 tokens, and beside that of torch.optim.Muon; the optimizers take turns, so that a machine that
slows down slows all of them. Memory: what the optimizer keeps, and the most that one step allocates
on top, both in units of the model's parameters. Widths and threads that an earlier result in --out
has are not measured again.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.harness import report, timing
from benchmarks.harness.experiment import Runs, combinations, parser, result_path
from benchmarks.harness.record import RESULTS
from benchmarks.papers.polar_factors import PAPERS

CONTEXT = 128
VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return self.lm_head(self.ln_f(self.blocks(x)))


def torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As its users do: Muon for the hidden matrices, AdamW for the rest."""
    hidden = [
        p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2
    ]
    rest = [p for p in model.parameters() if all(p is not q for q in hidden)]
    return [torch.optim.Muon(hidden, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4)]


def muon(**options: Any) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [structlin.optim.Muon(model, lr=1e-4, other_lr=1e-4, **options)]


TORCH = "torch.optim.Muon"
# Name -> model, optimizers.
ROWS: dict[str, tuple[str, Callable[[nn.Module], list[torch.optim.Optimizer]]]] = {
    "AdamW": ("dense", lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4)]),
    "AdamW, fused": (
        "dense",
        lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)],
    ),
    TORCH: ("dense", torch_muon),
    "structlin Muon": ("dense", muon()),
    "structlin Muon, ns": ("dense", muon(method="ns")),
    "structlin Muon, torch's steps": (
        "dense",
        muon(method=PAPERS["jordan"], dtype=torch.bfloat16, adjust_lr_fn="original"),
    ),
    "AdamW on BTT": ("BTT r=1", lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4)]),
    "structlin Muon on BTT": ("BTT r=1", muon()),
    "structlin Muon on BTT, ns": ("BTT r=1", muon(method="ns")),
}


def forward_backward(model: nn.Module, tokens: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    tensors = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return sum(value.nbytes for value in tensors if isinstance(value, Tensor))


def measure(
    width: int, threads: int, depth: int, tokens: int, rounds: int, device: str
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dense = GPT(width, depth)
    structured = structlin.convert(copy.deepcopy(dense), structlin.BTT(rank=1))
    models = {"dense": dense.to(device), "BTT r=1": structured.to(device)}
    batch = torch.randint(VOCABULARY, (max(1, tokens // CONTEXT), CONTEXT + 1), device=device)
    for model in models.values():
        forward_backward(model, batch)
    makes = {}
    for name, (kind, make) in ROWS.items():
        own = copy.deepcopy(models[kind])
        for p, q in zip(own.parameters(), models[kind].parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        makes[name] = make(own)

    def step(name: str) -> None:
        for optimizer in makes[name]:
            optimizer.step()

    for name in ROWS:
        step(name)  # makes the state
    times: dict[str, list[float]] = {name: [] for name in (*models, *ROWS)}
    for _ in track(range(rounds), f"width {width}"):
        for kind, model in models.items():
            times[kind].append(
                timing.wall(lambda model=model: forward_backward(model, batch), device)
            )
        for name in ROWS:
            times[name].append(timing.wall(lambda name=name: step(name), device))
    found = []
    for name, (kind, _) in ROWS.items():
        size = sum(p.nbytes for p in models[kind].parameters())
        found.append(
            {
                "optimizer": name,
                "model": kind,
                "parameters": sum(p.numel() for p in models[kind].parameters()),
                "step_ms": timing.spread([1e3 * value for value in times[name]], low=10),
                "forward_backward_ms": timing.spread(
                    [1e3 * value for value in times[kind]], low=10
                ),
                "share": timing.spread(
                    [a / b for a, b in zip(times[name], times[kind], strict=True)], low=10
                ),
                "beside_torch": timing.spread(
                    [a / b for a, b in zip(times[name], times[TORCH], strict=True)], low=10
                ),
                "state": state_bytes(makes[name]) / size,
                "peak": timing.peak_bytes(lambda name=name: step(name), device) / size,
            }
        )
    return {"optimizers": found}


def show(rows: list[dict[str, Any]], setting: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"optimizer steps, {setting['depth']} layers, {setting['tokens']} tokens, float32, "
        f"{setting['device']}: median of {setting['rounds']} interleaved rounds (p10-p90)"
    )
    table.add_column("optimizer")
    for title in (
        "width",
        "threads",
        "step ms",
        "(p10-p90)",
        "x torch's Muon",
        "fwd+bwd ms",
        "% of fwd+bwd",
        "(p10-p90)",
        "state",
        "peak",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        for found in row["optimizers"]:
            step, share = found["step_ms"], found["share"]
            table.add_row(
                found["optimizer"],
                str(row["width"]),
                str(row["threads"]),
                f"{step['median']:.1f}",
                f"({step['p10']:.1f}-{step['p90']:.1f})",
                f"{found['beside_torch']['median']:.2f}",
                f"{found['forward_backward_ms']['median']:.0f}",
                f"{100 * share['median']:.1f}",
                f"({100 * share['p10']:.1f}-{100 * share['p90']:.1f})",
                f"{found['state']:.2f}",
                f"{found['peak']:.2f}",
            )
    console.print(table)
    console.print(
        "state: kept between steps; peak: allocated by a step on top; both / the model's parameters"
    )


def markdown(result: dict[str, Any]) -> str:
    """A column per width and number of threads: milliseconds, share of forward + backward."""
    rows = result["rows"]
    titles = [
        f"width {row['width']}, {row['threads']} thread{'s' * (row['threads'] > 1)}" for row in rows
    ]
    lines = []
    for found in zip(*(row["optimizers"] for row in rows), strict=True):
        cells = [
            f"{each['step_ms']['median']:.1f} ({each['share']['median']:.1%})" for each in found
        ]
        memory = (max(each[name] for each in found) for name in ("state", "peak"))
        lines.append([found[0]["optimizer"], *cells, " + ".join(f"{most:.2f}" for most in memory)])
    return report.table(["", *titles, "memory: state + step"], lines)


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--depth", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=4096, help="of a step")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = arguments.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    options.workers = 1  # or the times are those of a busy machine
    if options.smoke:
        options.widths, options.threads, options.rounds = [64], [1], 2
        options.depth, options.tokens = 1, 512
    setting = {name: getattr(options, name) for name in ("depth", "tokens", "rounds", "device")}
    path = result_path(options, "optimizer")
    names = ("width", "threads")
    runs = Runs(measure, names, options, path=path, setting=setting, sizes=setting)
    rows = runs.of(combinations({"width": options.widths, "threads": options.threads}))
    runs.save()
    show(rows, setting, Console(width=150))


if __name__ == "__main__":
    main()
