"""The numbers of docs/scaling.md: GPT-3-sized layers and many GPUs, from a machine's ceilings.
Arithmetic, no timing.

    python -m benchmarks.speed.scaling    # prints the tables; `benchmarks.pages` writes them

A layer's time is `Ceilings.bound`: for every product the larger of FLOPs / rate and bytes /
bandwidth. The ceilings are those of results/layer_gpu.json where a GPU was measured, else an
H200's, assumed. The last table compares the same arithmetic with what results/layer.json measured
on its own machine.
"""

import argparse
import json
from collections.abc import Sequence
from math import inf, isclose
from statistics import median

from benchmarks.harness import report
from benchmarks.harness.race import Row
from benchmarks.harness.record import RESULTS
from benchmarks.harness.statistics import select, values
from benchmarks.harness.timing import Ceilings
from benchmarks.speed.variants import families
from structlin import Dense, Family, Structure

LAYER, LAYER_GPU = RESULTS / "layer.json", RESULTS / "layer_gpu.json"

# assumed: bfloat16 products, copy (notes of the project)
H200 = Ceilings(rate=790e12, bandwidth=4.3e12, call=2e-6)
# assumed: bytes/s of one GPU in one direction, inside a node of 8 and between nodes
NODE, NETWORK = 450e9, 50e9
WIDTH, LAYERS, CONTEXT, TOKENS = 12288, 96, 2048, 16384  # GPT-3; tokens of a GPU in a step
BF16, FP32 = 2, 4
NODE_GPUS, GPUS = 8, 1024
# q, k, v, projection, and the MLP
BLOCK = [*[(WIDTH, WIDTH)] * 4, (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
FAMILIES: dict[str, Family] = {"dense": Dense()} | {
    name: each for name, each in families(WIDTH).items() if name.startswith(("BTT", "Monarch"))
}


def kept() -> Row | None:
    """results/layer.json, if there is one."""
    return json.loads(LAYER.read_text()) if LAYER.exists() else None


def machine() -> tuple[Ceilings, str]:
    """The ceilings that the tables take to scale, and what they are, in words."""
    if LAYER_GPU.exists():
        result = json.loads(LAYER_GPU.read_text())
        ceilings = Ceilings(**result["ceilings"]["bfloat16"])
        return ceilings, f"measured on {result['environment']['machine']}"
    return H200, "assumed for an H200, not measured"


# ---- a structure on many GPUs --------------------------------------------------------------------


def middle(structure: Structure) -> int:
    """Elements for each token between the cores."""
    return sum(core.batch * core.repeat * core.fan_out for core in structure.cores[:-1])


def roles(structure: Structure, axis: str) -> list[str | None]:
    """What `axis` is to each core: "batch", "fan-in" or "fan-out"; None where the core does not
    have it.

    >>> btt = families(1024)["BTT r=1"].structure(1024, 1024)
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

    >>> cuttable(families(1024)["BTT r=1"].structure(1024, 1024))
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


def table(rows: Sequence[dict[str, str]]) -> str:
    """Rows as title -> text, all with the same titles."""
    return report.table(list(rows[0]), [list(row.values()) for row in rows])


def layers() -> str:
    """One layer on one GPU."""
    ceilings, _ = machine()
    rows = []
    for d_in, d_out in ((WIDTH, WIDTH), (WIDTH, 4 * WIDTH)):
        dense = bound([Dense().structure(d_in, d_out)], ceilings)
        for name, family in FAMILIES.items():
            structure = family.structure(d_in, d_out)
            seconds, flops = bound([structure], ceilings), 3 * TOKENS * structure.flops
            moved = bound([structure], Ceilings(rate=inf, bandwidth=1.0, call=0.0))
            row = {
                "": f"{d_in} -> {d_out}, {name}",
                "params": f"{structure.params / 1e6:.1f} M",
                "TFLOP": f"{flops / 1e12:.2f}",
                "GB moved": f"{moved / 1e9:.1f}",
                "kept per token": f"{BF16 * (d_in + middle(structure)) / 1e3:.0f} kB",
                "ms at least": f"{1e3 * seconds:.2f}",
                "limit": "FLOPs" if isclose(seconds, flops / ceilings.rate) else "memory",
                "x dense at most": f"{dense / seconds:.1f}",
            }
            rows.append(row)
    return table(rows)


def blocks() -> str:
    """A whole transformer block: the attention products and the elementwise traffic stay what they
    were."""
    ceilings, _ = machine()
    # scores and values, causal, forward + backward
    attention = 3 * TOKENS * 4 * CONTEXT / 2 * WIDTH / ceilings.rate
    # two norms, two residual sums, GELU of 4 d
    elementwise = 3 * TOKENS * 18 * WIDTH * BF16 / ceilings.bandwidth
    rest, rows = attention + elementwise, []
    for name, family in FAMILIES.items():
        linear, dense = (bound(block(kind), ceilings) for kind in (family, Dense()))
        row = {
            "": name,
            "linear layers, ms": f"{1e3 * linear:.1f}",
            "the rest, ms": f"{1e3 * rest:.1f}",
            "block, x dense at most": f"{(dense + rest) / (linear + rest):.1f}",
        }
        rows.append(row)
    return table(rows)


def fsdp() -> str:
    """All blocks, parameters sharded over all GPUs."""
    ceilings, _ = machine()
    rows = []
    for name, family in FAMILIES.items():
        params = LAYERS * sum(structure.params for structure in block(family))
        sent, seconds = fsdp_bytes(params, FP32), LAYERS * bound(block(family), ceilings)
        row = {
            "": name,
            "params": f"{params / 1e9:.1f} B",
            "state per GPU": f"{params * 3 * FP32 / GPUS / 1e9:.2f} GB",
            "sent per step, bf16 gradients": f"{fsdp_bytes(params, BF16) / 1e9:.0f} GB",
            "fp32 gradients": f"{sent / 1e9:.0f} GB",
            "s": f"{sent / NETWORK:.2f}",
            "compute s": f"{seconds:.2f}",
            "hidden from": f"{TOKENS * sent / NETWORK / seconds:,.0f} tokens",
        }
        rows.append(row)
    return table(rows)


def tensor_parallel() -> str:
    """A block on the GPUs of one node, the tokens of one GPU on all of them."""
    ceilings, _ = machine()

    def columns(seconds: float, sent: float) -> list[str]:
        wait = sent / NODE
        return [f"{sent / 1e9:.2f} GB", f"{1e3 * wait:.1f}", f"{wait / (wait + seconds):.0%}"]

    titles = ["", "products, ms", "all-reduce", "ms", "share of the step"]
    titles += ["all-to-all instead", "ms", "share"]
    rows = []
    for name, family in FAMILIES.items():
        *qkv, projection, up, down = whole = block(family)
        parts = [shared(structure, "cut", NODE_GPUS) for structure in (*qkv, up)]
        parts += [shared(structure, "summed", NODE_GPUS) for structure in (projection, down)]
        if None in parts:
            rows.append([name, *["-"] * 7])
            continue
        seconds = bound([part for part in parts if part], ceilings)
        # after attention and MLP, forward and backward
        reduced = columns(seconds, 4 * all_reduce_bytes(TOKENS * WIDTH, NODE_GPUS))
        between = TOKENS * sum(middle(structure) for structure in whole)
        sent = 2 * all_to_all_bytes(between, NODE_GPUS)
        permuted = columns(bound(whole, ceilings) / NODE_GPUS, sent) if between else ["-"] * 3
        rows.append([name, f"{1e3 * seconds:.1f}", *reduced, *permuted])
    return report.table(titles, rows)


def check() -> str:
    """The same arithmetic on the machine of results/layer.json, against what was measured there."""
    result = kept()
    found = [row for row in result["rows"] if "x_dense" in row] if result else []
    found = [row for row in select(found, backward=True) if row["d_in"] == row["d_out"]]
    found = select(found, dtype=found[0]["dtype"]) if found else []
    widths = sorted(values(found, "d_in"))
    if result is None or len(widths) < 2:
        return (
            "`benchmarks/results/layer.json` has not two square widths: "
            "run `python -m benchmarks.speed.layer`, then this."
        )
    small, large = widths[-2:]
    cells = {(row["d_in"], row["structure"], row["implementation"]): row for row in found}
    dense = {width: cells[width, "dense", "nn.Linear"]["bound_share"] for width in (small, large)}
    rows, ratios = [], []
    for name in values(select(found, implementation="auto"), "structure"):
        row = {width: cells[width, name, "auto"] for width in dense}
        share = {width: row[width]["bound_share"] / dense[width] for width in dense}
        speed = {width: row[width]["x_dense"]["median"] for width in dense}
        bounds = {width: speed[width] / share[width] for width in dense}
        expected = bounds[large] * share[small]
        ratios.append(speed[large] / expected)
        line = {
            "": name,
            f"bound, {small}": f"{bounds[small]:.1f}",
            f"measured, {small}": f"{speed[small]:.1f}",
            f"bound, {large}": f"{bounds[large]:.1f}",
            f"expected, {large}": f"{expected:.1f}",
            f"measured, {large}": f"{speed[large]:.1f}",
            "ratio": f"{ratios[-1]:.2f}",
        }
        rows.append(line)
    machine_name, threads = result["environment"]["machine"], result["setting"]["threads"]
    where = f"{machine_name}, {threads} threads, {found[0]['dtype']}"
    spread = f"median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{table(rows)}\n\nOn {where}. Measured over expected: {spread}."


def constants() -> str:
    """What everything below is computed from."""
    ceilings, words = machine()
    rate = f"{ceilings.rate / 1e12:.0f} TFLOP/s in bfloat16"
    bandwidth = f"{ceilings.bandwidth / 1e12:.1f} TB/s"
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
