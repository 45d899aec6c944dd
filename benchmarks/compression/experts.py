"""Compression of a mixture of experts: does a small Qwen3-MoE keep its function?

    python -m benchmarks.compression.experts               # results/experts.{json,png}
    python -m benchmarks.compression.experts --smoke       # seconds: a tiny mixture, few steps

A Qwen3-MoE of transformers is trained on bytes of the standard library's source, and kept in the
folder for temporary files. Then its experts alone get smaller, in several ways of the same size:

- SVD: the nearest matrix of the same rank for each matrix of each expert;
- SVD-LLM, shared: whitened by the inputs of all experts of a layer together;
- SVD-LLM, routed: whitened by the inputs that reach each expert;
- pruned by size, pruned by use: whole experts go, with their row of the router: those of the least
  norm, or those that the router sends the fewest tokens;
- low-rank and BTT by `structlin.compress`: calibrated; low-rank with each block refined too.

All get the same windows to calibrate. Perplexity (per byte) and divergence from the dense mixture
are of files that neither training nor calibration has seen, with the standard error over windows.
"""

import copy
import hashlib
import json
import math
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import structlin
from benchmarks.compression.peers import cut_rank, take_root
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment
from benchmarks.harness.record import Row

FAMILIES: dict[str, Any] = {"low-rank": structlin.LowRank(rank=1), "BTT": structlin.BTT(rank=1)}
PEERS = ("SVD", "SVD-LLM, shared", "SVD-LLM, routed", "pruned by size", "pruned by use")
OURS = ("low-rank, calibrated", "BTT, calibrated", "low-rank, refined")
HELD_OUT_EVERY = 10  # files


# ---- the text and the model ----------------------------------------------------------------------


@cache
def read_bytes(held_out: bool) -> Tensor:
    """The bytes of the modules of the standard library; of each tenth file, or of the others."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [file for n, file in enumerate(files) if (n % HELD_OUT_EVERY == 0) == held_out]
    text = b"".join(file.read_bytes() for file in chosen)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_windows(count: int, length: int, *, held_out: bool, seed: int) -> Tensor:
    """`(count, length)` bytes, from anywhere in the text."""
    text = read_bytes(held_out)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def list_batches(windows: Tensor) -> list[Tensor]:
    """Windows in batches of 8."""
    return [*torch.split(windows, 8)]


def build(width: int, layers: int, experts: int) -> Any:
    """A Qwen3-MoE of random weights, two experts for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": width,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": width // 4,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
    }
    options: dict[str, Any] = {
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "experts_implementation": "eager",
    }
    config = Qwen3MoeConfig(**sizes, **options)
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def train(sizes: Row) -> Any:
    """The trained mixture; from the folder for temporary files, if it is there."""
    model = build(sizes["width"], sizes["layers"], sizes["experts"])
    names = ("width", "layers", "experts", "length", "steps", "batch", "lr")
    key = {name: sizes[name] for name in names}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"structlin-experts-{digest}"
    if (folder / "structlin.safetensors").exists():
        return structlin.load(model, folder).eval()
    windows = draw_windows(sizes["steps"] * sizes["batch"], sizes["length"], held_out=False, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes["lr"], weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, sizes["lr"], total_steps=sizes["steps"], pct_start=0.1
    )
    model.train()
    for step, ids in enumerate(torch.split(windows, sizes["batch"])):
        loss = model(input_ids=ids, labels=ids, output_router_logits=True).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    structlin.save(model, folder)
    return model.eval()


# ---- peers ---------------------------------------------------------------------------------------


class Routed:
    """What the experts of a dense mixture get on some windows, by a loop of its own."""

    def __init__(self, model: Any, windows: Sequence[Tensor]) -> None:
        # Gram matrices of the inputs and of what the down projection reads, and tokens: by layer,
        # one for each expert
        self.grams: dict[str, dict[str, list[Tensor]]] = {}
        self.tokens: dict[str, list[int]] = {}
        hooks = []
        for name, experts in find_experts(model).items():
            count = experts.num_experts
            self.grams[name] = {part: [torch.zeros(())] * count for part in ("up", "down")}
            self.tokens[name] = [0] * count
            hooks.append(experts.register_forward_pre_hook(self._collect(name)))
        with torch.no_grad():
            for ids in windows:
                model(input_ids=ids)
        for hook in hooks:
            hook.remove()

    def find_root(self, name: str, part: str, expert: int) -> Tensor | None:
        """R, R R^T = X^T X of what reaches an expert; None where no token does."""
        if not self.tokens[name][expert]:
            return None
        return take_root(self.grams[name][part][expert])

    def _collect(self, name: str) -> Callable[..., None]:
        def add(experts: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
            hidden, chosen, _ = args  # (tokens, width), (tokens, 2)
            for expert in range(experts.num_experts):
                x = hidden[(chosen == expert).any(-1)]
                gate, up = (x @ experts.gate_up_proj[expert].mT).chunk(2, -1)
                inside = F.silu(gate) * up
                for part, rows in (("up", x), ("down", inside)):
                    rows = rows.double()
                    self.grams[name][part][expert] = self.grams[name][part][expert] + rows.mT @ rows
                self.tokens[name][expert] += len(x)

        return add


def find_experts(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == "Qwen3MoeExperts"
    }


def truncate_experts(
    model: Any, keep: float, roots: Callable[[str, str, int], Tensor | None]
) -> int:
    """Give each matrix of each expert the nearest one of the same rank, and return the numbers that
    its factors have.

    Args:
        roots: layer, "up" or "down", expert -> R, so that ||(W - B) R|| is least.
    """
    params = 0
    for name, experts in find_experts(model).items():
        for expert in range(experts.num_experts):
            gate, up = experts.gate_up_proj.data[expert].chunk(2)
            down = experts.down_proj.data[expert]
            for part, weight in (("up", gate), ("up", up), ("down", down)):
                rank = max(1, int(keep * weight.numel() / sum(weight.shape)))
                root = roots(name, part, expert)
                w = weight.double() if root is None else weight.double() @ root
                u, v = cut_rank(w, rank)
                if root is not None:
                    v = torch.linalg.solve_triangular(root, v, upper=False, left=False)
                weight.copy_((u @ v).to(weight))
                params += u.numel() + v.numel()
    return params


def prune_experts(model: Any, keep: float, scores: Callable[[str, Any], list[float]]) -> int:
    """Keep the experts of the highest scores in each layer, and return their numbers."""
    params = 0
    for name, experts in find_experts(model).items():
        left = max(2, int(keep * experts.num_experts))
        order = torch.tensor(scores(name, experts)).argsort(descending=True)
        kept = order[:left].sort().values
        router = model.get_submodule(name.rpartition(".")[0]).gate
        for module, attribute in (
            (experts, "gate_up_proj"),
            (experts, "down_proj"),
            (router, "weight"),
        ):
            parameter = getattr(module, attribute)
            setattr(module, attribute, nn.Parameter(parameter.data[kept].clone()))
            module.num_experts = left
        params += experts.gate_up_proj.numel() + experts.down_proj.numel()
    return params


def norm_of_experts(name: str, experts: Any) -> list[float]:
    squares = experts.gate_up_proj.data.square().sum((1, 2))
    squares = squares + experts.down_proj.data.square().sum((1, 2))
    scores: list[float] = squares.tolist()
    return scores


def apply_peer(model: Any, method: str, keep: float, routed: Routed) -> int:
    """Change the experts of the model, and return their numbers."""
    if method == "SVD":
        return truncate_experts(model, keep, lambda *_: None)
    if method == "SVD-LLM, shared":
        return truncate_experts(
            model,
            keep,
            lambda name, part, _: take_root(torch.stack(routed.grams[name][part]).sum(0)),
        )
    if method == "SVD-LLM, routed":
        return truncate_experts(model, keep, routed.find_root)
    if method == "pruned by size":
        return prune_experts(model, keep, norm_of_experts)
    return prune_experts(model, keep, lambda name, _: [float(n) for n in routed.tokens[name]])


# ---- one run -------------------------------------------------------------------------------------


@cache
def prepare(sizes: str) -> tuple[Any, list[Tensor], list[Tensor], Routed, list[Tensor]]:
    """What all runs of a process share: the mixture, the windows that calibrate and those that
    measure, what the experts get, and the mixture's log probabilities."""
    settings = json.loads(sizes)
    model = train(settings)
    length = settings["length"]
    known = list_batches(draw_windows(settings["calibration"], length, held_out=False, seed=2))
    new = list_batches(draw_windows(settings["windows"], length, held_out=True, seed=3))
    with torch.no_grad():
        before = [model(input_ids=ids).logits.log_softmax(-1) for ids in new]
    return model, known, new, Routed(model, known), before


def run(method: str, keep: float, **sizes: Any) -> Row:
    """One mixture: compressed and measured."""
    dense, known, new, routed, before = prepare(json.dumps(sizes, sort_keys=True))
    model = copy.deepcopy(dense)
    whole = sum(
        experts.gate_up_proj.numel() + experts.down_proj.numel()
        for experts in find_experts(model).values()
    )
    params = whole
    start = time.process_time()
    if method in PEERS:
        params = apply_peer(model, method, keep, routed)
    elif method != "dense":
        family, way = method.split(", ")
        structlin.compress(
            model,
            FAMILIES[family],
            [{"input_ids": ids} for ids in known],
            keep=keep,
            include="*.experts.*",
            refine=sizes["refine"] if way == "refined" else 0,
            progress=False,
        )
        inside = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
        params = sum(parameter.numel() for parameter in inside)
    seconds = time.process_time() - start
    return {"share": params / whole, "cpu_seconds": seconds, **measure(model, new, before)}


@torch.no_grad()
def measure(model: Any, windows: Sequence[Tensor], before: Sequence[Tensor]) -> Row:
    """Perplexity and divergence in nats per byte, over windows."""
    losses = []
    divergences = []
    for ids, log_p in zip(windows, before, strict=True):
        log_q = model(input_ids=ids).logits.log_softmax(-1)  # (windows, bytes, 256)
        surprise = F.nll_loss(log_q[:, :-1].mT, ids[:, 1:], reduction="none")
        losses.append(surprise.mean(-1))
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).mean(-1))
    loss = torch.cat(losses)
    divergence = torch.cat(divergences)
    root = math.sqrt(len(loss))
    return {
        "perplexity": loss.mean().exp().item(),
        "perplexity_error": (loss.std() / root * loss.mean().exp()).item(),
        "divergence": divergence.mean().item(),
        "divergence_error": (divergence.std() / root).item(),
    }


# ---- what is shown -------------------------------------------------------------------------------


def list_keeps(job: Row) -> list[float]:
    return [1.0] if job["method"] == "dense" else [0.5, 0.25]


def show_table(result: Row) -> str:
    """Perplexity and divergence by what the experts keep."""
    rows = result["rows"]
    keeps = sorted({row["keep"] for row in rows if row["keep"] < 1}, reverse=True)
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [method]
        of_method = {row["keep"]: row for row in rows if row["method"] == method}
        for keep in keeps:
            row = of_method[keep if keep in of_method else 1.0]
            line.append(f"{row['share']:.1%}")
            line.append(f"{row['perplexity']:.2f} ± {row['perplexity_error']:.2f}")
            line.append(f"{row['divergence']:.4f} ± {row['divergence_error']:.4f}")
        line.append(f"{of_method.get(keeps[-1], row)['cpu_seconds']:.0f}")
        lines.append(line)
    heads = [""]
    for keep in keeps:
        heads += [f"kept ({keep:.0%})", "perplexity", "divergence"]
    return report.table([*heads, "CPU s"], lines)


def find_numbers(result: Row) -> dict[str, str]:
    """What the page says: the sizes, and our divergence over the best peer's, by what is kept."""
    setting = result["setting"]
    texts = []
    for keep in sorted({row["keep"] for row in result["rows"] if row["keep"] < 1}, reverse=True):
        divergences = {
            row["method"]: row["divergence"] for row in result["rows"] if row["keep"] == keep
        }
        best = min(PEERS, key=divergences.__getitem__)
        shares = [f"{method} {divergences[method] / divergences[best]:.2f}" for method in OURS]
        texts.append(f"at {keep:.0%} (best peer: {best}) {'; '.join(shares)}")
    return {
        "experts.steps": str(setting["steps"]),
        "experts.tokens": f"{setting['calibration'] * setting['length']:,}",
        "experts.verdict": ". ".join(text[0].upper() + text[1:] for text in texts),
    }


def plot(result: Row) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in result["rows"] if row["keep"] < 1]
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [(row["share"], row["divergence"]) for row in rows if row["method"] == method]
        is_ours = method in OURS
        axes.plot(*zip(*points, strict=True), marker="o", ls="-" if is_ours else "--", label=method)
    axes.set(xlabel="share of the experts' parameters", ylabel="divergence, nats per byte")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    return figure


EXPERIMENT = Experiment(
    name="experts",
    about=__doc__,
    tables={"mixture of experts": show_table},
    numbers=find_numbers,
    run=run,
    axes={"method": ["dense", *PEERS, *OURS], "keep": list_keeps},
    seeds=0,
    sizes={
        "width": 128,
        "layers": 4,
        "experts": 8,
        "length": 128,
        "steps": 600,
        "batch": 16,
        "lr": 3e-3,
        "calibration": 64,
        "windows": 64,
        "refine": 50,
    },
    note={"text": "the standard library's modules, bytes"},
    smoke={
        "width": 32,
        "layers": 2,
        "experts": 4,
        "length": 32,
        "steps": 4,
        "batch": 4,
        "calibration": 16,
        "windows": 16,
        "refine": 2,
    },
    analyse=lambda rows: {},
    show=lambda result: [show_table(result)],
    draw=plot,
    workers=1,
)

if __name__ == "__main__":
    EXPERIMENT.main()
