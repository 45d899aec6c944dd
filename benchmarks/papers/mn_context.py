"""Does the best learning rate stay where it is when a GPT's context gets longer? MN figure 8.

    python -m benchmarks.papers.mn_context            # results/papers/mn_context.{json,png}
    python -m benchmarks.papers.mn_context --smoke    # seconds

"We report good transfer of the optimal learning rate from small contexts to long contexts"
(appendix D.7, normed training of GPTs on OpenWebText). Here: the GPT of `mn_tasks` (32 features, 3
blocks, characters of pydoc's texts), normed Adam, contexts of 8, 32 and 128, 8 windows a batch,
100 steps, 3 seeds. Rates go by factors of 2 from the best of the context before until the best has
both its neighbours; optima lie between, on a parabola, for each seed. Fixed before the runs: the
transfer is good if from the shortest context to the longest the optimum moves by less than a factor
of 2.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.papers import mn_tasks, sweeps
from benchmarks.runs import keep, parser, run_all

METHOD = "normed Adam"
CONTEXTS = (8, 32, 128)
SIZE = {"width": 32, "blocks": 3}
WINDOWS, STEPS = 8, 100
START = 1.0  # of the search for rates

Run = tuple[int, float, int]  # context, lr, seed


def train(run: Run, steps: int) -> dict[str, Any]:
    context, lr, seed = run
    torch.manual_seed(seed)
    net = mn_tasks.build("GPT", **SIZE, context=context)
    found = mn_tasks.train(
        net, "GPT", METHOD, lr, steps=steps, size=WINDOWS, seed=seed, context=context
    )
    return {"method": METHOD, "size": context, "lr": lr, "seed": seed, "loss": found}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    chosen = options.parse_args(arguments)
    contexts, steps = (CONTEXTS[:2], 2) if chosen.smoke else (CONTEXTS, STEPS)

    def run(context: int, lrs: list[float]) -> list[dict[str, Any]]:
        runs = [(context, lr, seed) for lr, seed in product(lrs, range(chosen.seeds))]
        return run_all(partial(train, steps=steps), runs, chosen)

    rows = sweeps.search(run, contexts, START)
    found = sweeps.transfer(rows)
    result = {"transfer": found, "estimates": sweeps.moves(rows)}
    console = Console(width=120)
    console.print(sweeps.table(f"GPT, {steps} steps", found, "context"))
    console.print(result["estimates"])
    setting = {"contexts": contexts, "steps": steps, "windows": WINDOWS, **SIZE}
    keep(chosen, "mn_context", plot(rows), setting=setting, **result, rows=rows)
    return result


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    sweeps.plot(axes, rows, METHOD, "context")
    axes.set_ylabel("final loss (nats)")
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
