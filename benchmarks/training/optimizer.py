"""What does a step cost? AdamW, torch.optim.Muon, structlin's Muon and SOAP on a GPT of equal
width, dense and BTT.

    python -m benchmarks.training.optimizer                # the full result, results/optimizer.json
    python -m benchmarks.training.optimizer --smoke        # seconds

For each optimizer the time of `step` alone, as a share of forward + backward of the same model on
4096 tokens, and beside that of torch.optim.Muon; the optimizers take turns, so that a machine that
slows down slows all of them. A sample is five steps, so that each holds SOAP's work on its bases
once. Memory: what the optimizer keeps, and the most that one step allocates
on top, both in units of the model's parameters. Widths and threads that an earlier result in --out
has are not measured again.

On a CPU the time is that in which the thread that steps computes. On an idle machine a user waits
as long. Other processes lengthen that wait much, and this time less, through caches alone. So
shares can be compared where the command runs beside others, as

    OMP_WAIT_POLICY=passive python -m benchmarks.training.optimizer

or a thread that waits for another one counts as one that computes.
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.harness import report, timing
from benchmarks.harness.experiment import Experiment, Row

CONTEXT = 128
VOCABULARY = 256
PERIOD = 5  # steps that are timed together

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


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


def adamw(**options: Any) -> Make:
    return lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4, **options)]


def torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As its users do: Muon for the hidden matrices, AdamW for the rest."""
    hidden = [
        p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2
    ]
    rest = [p for p in model.parameters() if all(p is not q for q in hidden)]
    return [torch.optim.Muon(hidden, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4)]


def muon(make: type[structlin.optim.Muon] = structlin.optim.Muon, **options: Any) -> Make:
    return lambda model: [make(model, lr=1e-4, other_lr=1e-4, **options)]


soap = muon(structlin.optim.SOAP)


TORCH = "torch.optim.Muon"
JORDAN = ((3.4445, -4.7750, 2.0315),) * 5  # torch's coefficients of the polar factor
TORCHS_STEPS = {"method": JORDAN, "dtype": torch.bfloat16, "adjust_lr_fn": "original"}
STRUCTURES = {"BTT r=1": structlin.BTT(rank=1), "BTT r=4": structlin.BTT(rank=4)}
OPTIMIZERS: dict[str, tuple[str, Make]] = {  # name -> model, how it is made
    "AdamW": ("dense", adamw()),
    "AdamW, fused": ("dense", adamw(fused=True)),
    TORCH: ("dense", torch_muon),
    "structlin Muon": ("dense", muon()),
    "structlin Muon, torch's steps": ("dense", muon(**TORCHS_STEPS)),
    "structlin SOAP": ("dense", soap),
    "AdamW, fused, BTT r=1": ("BTT r=1", adamw(fused=True)),
    "structlin Muon, BTT r=1": ("BTT r=1", muon()),
    "structlin SOAP, BTT r=1": ("BTT r=1", soap),
    "structlin Muon, BTT r=4": ("BTT r=4", muon()),
    "structlin SOAP, BTT r=4": ("BTT r=4", soap),
}


def measure(width: int, threads: int, depth: int, tokens: int, rounds: int, device: str) -> Row:
    """The times and the memory of all optimizers, which take turns."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {"dense": GPT(width, depth).to(device)}
    for kind, structure in STRUCTURES.items():
        models[kind] = structlin.convert(copy.deepcopy(models["dense"]), structure)
    batch = torch.randint(VOCABULARY, (max(1, tokens // CONTEXT), CONTEXT + 1), device=device)
    works = {kind: partial(forward_backward, model, batch) for kind, model in models.items()}
    for work in works.values():
        work()
    made = {name: make(with_gradients(models[kind])) for name, (kind, make) in OPTIMIZERS.items()}
    for name, optimizers in made.items():
        works[name] = partial(step, optimizers)
        works[name]()  # makes the state
    clock = own_time if device == "cpu" else partial(timing.wall, device=device)
    times = timing.interleaved(works, clock, rounds=(rounds, rounds))
    for name in made:
        times[name] = [each / PERIOD for each in times[name]]

    def milliseconds(name: str) -> dict[str, float]:
        return timing.spread([1e3 * each for each in times[name]], low=10)

    found = []
    for name, (kind, _) in OPTIMIZERS.items():
        size = sum(p.nbytes for p in models[kind].parameters())
        found.append(
            {
                "optimizer": name,
                "model": kind,
                "parameters": structlin.cost(models[kind]).params,
                "step_ms": milliseconds(name),
                "forward_backward_ms": milliseconds(kind),
                "share": timing.ratio(times[name], times[kind], low=10),
                "beside_torch": timing.ratio(times[name], times[TORCH], low=10),
                "state": state_bytes(made[name]) / size,
                "peak": timing.peak_bytes(works[name], device) / size,
            }
        )
    return {"optimizers": found}


def own_time(work: Callable[[], None]) -> float:
    """Seconds in which this thread computes; torch gives it a share of every parallel operation."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def forward_backward(model: nn.Module, tokens: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def with_gradients(model: nn.Module) -> nn.Module:
    """A copy that has the gradients too."""
    own = copy.deepcopy(model)
    for p, q in zip(own.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    return own


def step(optimizers: list[torch.optim.Optimizer]) -> None:
    for _ in range(PERIOD):
        for optimizer in optimizers:
            optimizer.step()


def state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(each.nbytes for state in states for each in state.values() if torch.is_tensor(each))


def markdown(result: dict[str, Any]) -> str:
    """A column per width and number of threads: milliseconds, share of forward + backward; and one
    of memory per width."""
    rows = result["rows"]
    titles = [
        f"width {row['width']}, {row['threads']} thread{'s' * (row['threads'] > 1)}" for row in rows
    ]
    widths = list(dict.fromkeys(row["width"] for row in rows))
    lines = []
    for found in zip(*(row["optimizers"] for row in rows), strict=True):
        cells = [
            f"{each['step_ms']['median']:.1f} ({each['share']['median']:.1%})" for each in found
        ]
        for width in widths:
            mine = [each for row, each in zip(rows, found, strict=True) if row["width"] == width]
            memory = (max(each[name] for each in mine) for name in ("state", "peak"))
            cells.append(" + ".join(f"{most:.2f}" for most in memory))
        lines.append([found[0]["optimizer"], *cells])
    memories = [f"memory {width}: state + step" for width in widths]
    return report.table(["", *titles, *memories], lines)


def numbers(result: Row) -> dict[str, str]:
    """What a step costs: Muon's over torch's; on BTT, as a share of forward and backward, on one
    thread and on two; the state on BTT, over the parameters."""
    runs = [
        (row["threads"], {each["optimizer"]: each for each in row["optimizers"]})
        for row in result["rows"]
    ]
    beside = [each["structlin Muon"]["beside_torch"]["median"] for _, each in runs]
    found = report.least_and_most("step.", beside, ".2f")
    for name in ("Muon", "SOAP"):
        on_btt = []
        for threads, by_name in runs:
            on_btt += [(threads, by_name[f"structlin {name}, {kind}"]) for kind in STRUCTURES]
        for threads in dict.fromkeys(threads for threads, _ in runs):
            shares = [100 * each["share"]["median"] for count, each in on_btt if count == threads]
            found |= report.least_and_most(f"step.{name}_{threads}_", shares, ".1f")
        states = [each["state"] for _, each in on_btt]
        found |= report.least_and_most(f"step.{name}_state_", states, ".1f")
    return found


EXPERIMENT = Experiment(
    name="optimizer",
    about=__doc__,
    numbers=numbers,
    tables={"optimizer steps": markdown},
    run=measure,
    axes={"width": [256, 512], "threads": [1, 2]},
    seeds=0,
    workers=1,
    sizes={
        "depth": 4,
        "tokens": 4096,
        "rounds": 3,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    },
    note={"clock": "of the thread that steps on a CPU, of the wall on a GPU"},
    smoke={"width": [64], "threads": [1], "depth": 1, "tokens": 512, "rounds": 2},
    analyse=lambda rows: {},
    show=lambda result: [markdown(result)],
)

if __name__ == "__main__":
    EXPERIMENT.main()
