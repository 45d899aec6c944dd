"""The numbers of docs/scaling.md: GPT-3-sized layers and many GPUs, from a machine's ceilings.
Arithmetic, no timing.

    python -m benchmarks.speed.scaling    # prints the tables; `benchmarks.pages` writes them

A layer's time is `Ceilings.bound`: for every product the larger of FLOPs / rate and bytes /
bandwidth. The ceilings are those of results/layer.json if that was measured on a GPU, else an
H200's, assumed. The last table compares the same arithmetic with what results/layer.json measured
on its own machine.
"""

import argparse
import json
from collections.abc import Sequence
from math import inf, isclose
from statistics import median
from typing import Any

from benchmarks.harness.record import RESULTS
from benchmarks.harness.timing import Ceilings
from structlin import BTT, Dense, Family, Monarch, Structure

LAYER = RESULTS / "layer.json"

# assumed: bfloat16 products, copy (notes of the project)
H200 = Ceilings(rate=790e12, bandwidth=4.3e12, call=2e-6)
NODE, NETWORK = (
    450e9,
    50e9,
)  # assumed: bytes/s of one GPU in one direction, inside a node of 8 and between nodes
WIDTH, LAYERS, CONTEXT, TOKENS = 12288, 96, 2048, 16384  # GPT-3; tokens of a GPU in a step
BF16, FP32 = 2, 4
NODE_GPUS, GPUS = 8, 1024
BLOCK = [(WIDTH, WIDTH)] * 4 + [
    (WIDTH, 4 * WIDTH),
    (4 * WIDTH, WIDTH),
]  # q, k, v, projection, and the MLP
FAMILIES: dict[str, Family] = {
    "dense": Dense(),
    "BTT r=1": BTT(rank=1),
    "BTT r=2": BTT(rank=2),
    "BTT r=4": BTT(rank=4),
    "Monarch 4": Monarch(blocks=4),
    "Monarch 16": Monarch(blocks=16),
    "Monarch 64": Monarch(blocks=64),
}


def kept() -> dict[str, Any] | None:
    """results/layer.json, if there is one."""
    return json.loads(LAYER.read_text()) if LAYER.exists() else None


def machine() -> tuple[Ceilings, str]:
    """The ceilings that the tables take to scale, and what they are, in words."""
    result = kept()
    if result and result["setting"]["device"] == "cuda":
        return Ceilings(
            **result["ceilings"]["bfloat16"]
        ), f"measured on {result['environment']['machine']}"
    return H200, "assumed for an H200, not measured"


# ---- a structure on many GPUs --------------------------------------------------------------------


def middle(structure: Structure) -> int:
    """Elements for each token between the cores."""
    return sum(core.batch * core.repeat * core.fan_out for core in structure.cores[:-1])


def roles(structure: Structure, axis: str) -> list[str | None]:
    """What `axis` is to each core: "batch", "fan-in" or "fan-out"; None where the core does not
    have it.

    >>> btt = BTT().structure(1024, 1024)
    >>> [roles(btt, axis) for axis in ("i2", "j1", "j2")]
    [['fan-out', 'batch'], ['batch', 'fan-in'], ['fan-in', None]]
    """
    names = {"batch": "batch_axes", "fan-out": "fan_out_axes", "fan-in": "fan_in_axes"}
    return [
        next((role for role, field in names.items() if axis in getattr(core, field)), None)
        for core in structure.cores
    ]


def cuttable(structure: Structure) -> dict[str, tuple[str, str]]:
    """Axes that cut every core into equal parts, and what each GPU then needs of x and has of y.

    An axis is a plain loop of the einsum, so cutting it needs no communication between the cores: a
    GPU runs the structure with a smaller axis. x is cut if the axis is one of x's; if it is none of
    y's, the GPUs' y are summed.

    >>> cuttable(BTT().structure(1024, 1024))
    {'i2': ('whole', 'cut'), 'j1': ('cut', 'summed')}
    """
    inputs, outputs = structure.inputs, structure.outputs
    return {
        axis: ("cut" if axis in inputs else "whole", "cut" if axis in outputs else "summed")
        for axis in structure.sizes
        if structure.sizes[axis] > 1 and None not in roles(structure, axis)
    }


def cut(structure: Structure, axis: str, parts: int) -> Structure:
    """What one of `parts` GPUs runs.

    >>> cut(Dense().structure(64, 64), "o", 4).params
    1024
    """
    sizes = {**structure.sizes, axis: structure.sizes[axis] // parts}
    return Structure(structure.signature, *structure.subscripts, **sizes)


def shared(structure: Structure, y: str, parts: int) -> Structure | None:
    """What one of `parts` GPUs runs of a layer whose y is to be "cut" or "summed"; None if no axis
    divides."""
    fits = [
        axis
        for axis, (_, found) in cuttable(structure).items()
        if found == y and not structure.sizes[axis] % parts
    ]
    return cut(structure, fits[0], parts) if fits else None


def block(family: Family) -> list[Structure]:
    """The matrices of a transformer block of GPT-3."""
    return [family.structure(*widths) for widths in BLOCK]


def bound(structures: Sequence[Structure], ceilings: Ceilings, tokens: int = TOKENS) -> float:
    """Seconds of forward + backward in bfloat16, no less."""
    return sum(ceilings.bound(structure, tokens, BF16, backward=True) for structure in structures)


def fsdp_bytes(params: int, gradients: int) -> float:
    """Sent, and as many received, by a GPU in a step: two all-gathers in bfloat16, one
    reduce-scatter of gradients."""
    return (GPUS - 1) / GPUS * params * (2 * BF16 + gradients)


def all_reduce_bytes(elements: int, parts: int) -> float:
    """Sent by a GPU: a reduce-scatter and an all-gather."""
    return 2 * (parts - 1) / parts * elements * BF16


def all_to_all_bytes(elements: int, parts: int) -> float:
    """Sent by a GPU that holds 1 / `parts` of the elements."""
    return (parts - 1) / parts**2 * elements * BF16


# ---- tables --------------------------------------------------------------------------------------


def table(*rows: Sequence[object]) -> str:
    """Markdown; the first row is the head, the first column text."""
    lines = [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(rows[0]) - 1), *lines[1:]])


def layers() -> str:
    """One layer on one GPU."""
    ceilings, _ = machine()
    head = [
        "",
        "params",
        "TFLOP",
        "GB moved",
        "kept per token",
        "ms at least",
        "limit",
        "x dense at most",
    ]
    rows: list[Sequence[object]] = [head]
    for d_in, d_out in ((WIDTH, WIDTH), (WIDTH, 4 * WIDTH)):
        for name, family in FAMILIES.items():
            structure = family.structure(d_in, d_out)
            seconds, flops = bound([structure], ceilings), 3 * TOKENS * structure.flops
            rows.append([
                f"{d_in} -> {d_out}, {name}",
                f"{structure.params / 1e6:.1f} M",
                f"{flops / 1e12:.2f}",
                f"{bound([structure], Ceilings(rate=inf, bandwidth=1.0, call=0.0)) / 1e9:.1f}",
                f"{BF16 * (d_in + middle(structure)) / 1e3:.0f} kB",
                f"{1e3 * seconds:.2f}",
                "FLOPs" if isclose(seconds, flops / ceilings.rate) else "memory",
                f"{bound([Dense().structure(d_in, d_out)], ceilings) / seconds:.1f}",
            ])  # fmt: skip
    return table(*rows)


def blocks() -> str:
    """A whole transformer block: the attention products and the elementwise traffic stay what they
    were."""
    ceilings, _ = machine()
    # scores and values, causal, forward + backward
    attention = 3 * TOKENS * 4 * CONTEXT / 2 * WIDTH / ceilings.rate
    # two norms, two residual sums, GELU of 4 d
    elementwise = 3 * TOKENS * 18 * WIDTH * BF16 / ceilings.bandwidth
    rest = attention + elementwise
    rows: list[Sequence[object]] = [
        ["", "linear layers, ms", "the rest, ms", "block, x dense at most"]
    ]
    for name, family in FAMILIES.items():
        linear = bound(block(family), ceilings)
        speed = (bound(block(Dense()), ceilings) + rest) / (linear + rest)
        rows.append([name, f"{1e3 * linear:.1f}", f"{1e3 * rest:.1f}", f"{speed:.1f}"])
    return table(*rows)


def fsdp() -> str:
    """All blocks, parameters sharded over all GPUs."""
    ceilings, _ = machine()
    head = [
        "",
        "params",
        "state per GPU",
        "sent per step, bf16 gradients",
        "fp32 gradients",
        "s",
        "compute s",
        "hidden from",
    ]
    rows: list[Sequence[object]] = [head]
    for name, family in FAMILIES.items():
        params = LAYERS * sum(structure.params for structure in block(family))
        sent, seconds = fsdp_bytes(params, FP32), LAYERS * bound(block(family), ceilings)
        hidden = TOKENS * sent / NETWORK / seconds
        rows.append([
            name,
            f"{params / 1e9:.1f} B",
            f"{params * 3 * FP32 / GPUS / 1e9:.2f} GB",
            f"{fsdp_bytes(params, BF16) / 1e9:.0f} GB",
            f"{sent / 1e9:.0f} GB",
            f"{sent / NETWORK:.2f}",
            f"{seconds:.2f}",
            f"{hidden:,.0f} tokens",
        ])  # fmt: skip
    return table(*rows)


def tensor_parallel() -> str:
    """A block on the GPUs of one node, the tokens of one GPU on all of them."""
    ceilings, _ = machine()

    def columns(seconds: float, sent: float) -> list[str]:
        wait = sent / NODE
        return [
            f"{1e3 * seconds:.1f}",
            f"{sent / 1e9:.2f} GB",
            f"{1e3 * wait:.1f}",
            f"{wait / (wait + seconds):.0%}",
        ]

    head = [
        "",
        "products, ms",
        "all-reduce",
        "ms",
        "share of the step",
        "all-to-all instead",
        "ms",
        "share",
    ]
    rows: list[Sequence[object]] = [head]
    for name, family in FAMILIES.items():
        *qkv, projection, up, down = whole = block(family)
        parts = [shared(structure, "cut", NODE_GPUS) for structure in (*qkv, up)]
        parts += [shared(structure, "summed", NODE_GPUS) for structure in (projection, down)]
        if None in parts:
            rows.append([name, *["-"] * 7])
            continue
        seconds = bound([part for part in parts if part], ceilings)
        # after attention and MLP, forward and backward
        reduced = 4 * all_reduce_bytes(TOKENS * WIDTH, NODE_GPUS)
        row = [name, *columns(seconds, reduced)]
        if name == "dense":
            row += ["-"] * 3
        else:
            permuted = 2 * all_to_all_bytes(
                TOKENS * sum(middle(structure) for structure in whole), NODE_GPUS
            )
            row += columns(bound(whole, ceilings) / NODE_GPUS, permuted)[1:]
        rows.append(row)
    return table(*rows)


def check() -> str:
    """The same arithmetic on the machine of results/layer.json, against what was measured there."""
    result = kept()
    rows_of = (
        [row for row in result["rows"] if row["backward"] and row["d_in"] == row["d_out"]]
        if result
        else []
    )
    found = [row for row in rows_of if row["dtype"] == rows_of[0]["dtype"] and "x_dense" in row]
    widths = sorted({row["d_in"] for row in found})
    if result is None or len(widths) < 2:
        return (
            "`benchmarks/results/layer.json` has not two square widths: "
            "run `python -m benchmarks.speed.layer`, then this."
        )
    small, large = widths[-2:]
    cells = {(row["d_in"], row["structure"], row["implementation"]): row for row in found}
    dense = {width: cells[width, "dense", "nn.Linear"]["bound_share"] for width in (small, large)}
    head = [
        "",
        f"bound, {small}",
        f"measured, {small}",
        f"bound, {large}",
        f"expected, {large}",
        f"measured, {large}",
        "ratio",
    ]
    rows: list[Sequence[object]] = [head]
    ratios = []
    for name in dict.fromkeys(row["structure"] for row in found if row["implementation"] == "auto"):
        speed, share = (
            {width: cells[width, name, "auto"][key] for width in dense}
            for key in ("x_dense", "bound_share")
        )
        bounds = {width: speed[width]["median"] * dense[width] / share[width] for width in dense}
        expected = bounds[large] * share[small] / dense[small]
        ratios.append(speed[large]["median"] / expected)
        speeds = [
            bounds[small],
            speed[small]["median"],
            bounds[large],
            expected,
            speed[large]["median"],
        ]
        rows.append([name, *(f"{value:.1f}" for value in speeds), f"{ratios[-1]:.2f}"])
    machine_name, threads = result["environment"]["machine"], result["setting"]["threads"]
    where = f"{machine_name}, {threads} threads, {found[0]['dtype']}"
    spread = f"median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{table(*rows)}\n\nOn {where}. Measured over expected: {spread}."


def constants() -> str:
    """What everything below is computed from."""
    ceilings, words = machine()
    rate, bandwidth = (
        f"{ceilings.rate / 1e12:.0f} TFLOP/s in bfloat16",
        f"{ceilings.bandwidth / 1e12:.1f} TB/s",
    )
    node, network = f"{NODE / 1e9:.0f} GB/s", f"{NETWORK / 1e9:.0f} GB/s"
    return (
        f"- {rate} and {bandwidth} of memory: {words}.\n"
        f"- {node} per GPU and direction inside a node of {NODE_GPUS}, {network} between nodes: "
        "assumed.\n"
        f"- {TOKENS:,} tokens per GPU and step, context {CONTEXT}, bfloat16, forward + backward, "
        f"{GPUS} GPUs."
    )


TABLES = {
    "constants": constants,
    "layers": layers,
    "blocks": blocks,
    "fsdp": fsdp,
    "tensor parallel": tensor_parallel,
    "check": check,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="the same: it takes no time")
    parser.parse_args(argv)
    for name, make in TABLES.items():
        print(f"# {name}: {make.__doc__ or ''}\n\n{make()}\n")


if __name__ == "__main__":
    main()
