"""What does a step cost? AdamW, torch.optim.Muon and structlin's Muon on a GPT of equal width,
dense and BTT.

    python -m benchmarks.optimizer                        # the full result, results/optimizer.json
    python -m benchmarks.optimizer --widths 256 512 --rounds 5
    python -m benchmarks.optimizer --smoke                # seconds

For each optimizer the time of `step` alone, as a share of forward + backward of the same model on
4096 tokens; the optimizers take turns, so that a machine that slows down slows all of them. Memory:
what the optimizer keeps, and the most that one step allocates on top, both in units of the model's
parameters.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks import timing
from benchmarks.record import RESULTS, save_json

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


# Name -> model, optimizers.
ROWS: dict[str, tuple[str, Callable[[nn.Module], list[torch.optim.Optimizer]]]] = {
    "AdamW": ("dense", lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4)]),
    "AdamW, fused": (
        "dense",
        lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)],
    ),
    "torch.optim.Muon": ("dense", torch_muon),
    "structlin Muon": ("dense", muon()),
    "structlin Muon, fast": ("dense", muon(method="fast")),
    "structlin Muon, torch's steps": (
        "dense",
        muon(method="jordan", dtype=torch.bfloat16, scale="original"),
    ),
    "AdamW on BTT": ("BTT r=1", lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4)]),
    "structlin Muon on BTT": ("BTT r=1", muon()),
    "structlin Muon on BTT, fast": ("BTT r=1", muon(method="fast")),
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


def measure(width: int, depth: int, tokens: int, rounds: int, device: str) -> list[dict[str, Any]]:
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
                "width": width,
                "parameters": sum(p.numel() for p in models[kind].parameters()),
                "step_ms": timing.spread([1e3 * value for value in times[name]], low=10),
                "forward_backward_ms": timing.spread(
                    [1e3 * value for value in times[kind]], low=10
                ),
                "share": timing.spread(
                    [a / b for a, b in zip(times[name], times[kind], strict=True)], low=10
                ),
                "state": state_bytes(makes[name]) / size,
                "peak": timing.peak_bytes(lambda name=name: step(name), device) / size,
            }
        )
    return found


def show(rows: list[dict[str, Any]], setting: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"optimizer steps, {setting['depth']} layers, {setting['tokens']} tokens, float32, "
        f"{setting['device']}, {setting['threads']} threads: "
        f"median of {setting['rounds']} interleaved rounds (p10-p90)"
    )
    table.add_column("optimizer")
    for title in (
        "width",
        "step ms",
        "(p10-p90)",
        "fwd+bwd ms",
        "% of fwd+bwd",
        "(p10-p90)",
        "state",
        "peak",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        step, share = row["step_ms"], row["share"]
        table.add_row(
            row["optimizer"],
            str(row["width"]),
            f"{step['median']:.1f}",
            f"({step['p10']:.1f}-{step['p90']:.1f})",
            f"{row['forward_backward_ms']['median']:.0f}",
            f"{100 * share['median']:.1f}",
            f"({100 * share['p10']:.1f}-{100 * share['p90']:.1f})",
            f"{row['state']:.2f}",
            f"{row['peak']:.2f}",
        )
    console.print(table)
    console.print(
        "state: kept between steps; peak: allocated by a step on top; both / the model's parameters"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="two rounds of a tiny model, kept only if --out is given",
    )
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.widths, arguments.depth, arguments.tokens, arguments.rounds = [64], 1, 512, 2
    setting = {name: getattr(arguments, name) for name in ("depth", "tokens", "rounds", "device")}
    setting["threads"] = torch.get_num_threads()
    rows = [
        row
        for width in arguments.widths
        for row in measure(
            width, arguments.depth, arguments.tokens, arguments.rounds, arguments.device
        )
    ]
    show(rows, setting, Console(width=140))
    if arguments.smoke and arguments.out == RESULTS:
        return
    save_json(arguments.out / "optimizer.json", setting=setting, rows=rows)


if __name__ == "__main__":
    main()
