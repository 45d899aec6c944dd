"""The order in which cores are applied: W is the same in each, and the FLOPs are not."""

from collections.abc import Sequence
from itertools import permutations

from .arguments import warn
from .families import Family, label
from .structure import Structure, derive_cores

MOST_CORES = 5  # whose 120 orders are tried


def warn_of_order(declared: Family | Structure, structure: Structure) -> None:
    if text := explain_order(structure):
        warn(f"{label(declared)}: {text}")


def explain_order(structure: Structure) -> str:
    """Which order of the cores, whose matrix is the same, has less than half of the FLOPs of a
    structure that has more than a dense matrix; empty if there is none.

    >>> sizes = {"i": 8, "j": 8, "p": 8, "q": 8, "r": 2}
    >>> explain_order(Structure("j q -> i p", "i p r", "r i j", "j r q", **sizes))
    "the cores have 6.0 times dense's FLOPs in this order, 0.09 times as 'j r q', 'r i j', 'i p r'"
    """
    if structure.density <= 1:
        return ""
    if structure.between is not None or len(structure.cores) > MOST_CORES:
        return ""

    def count_flops(order: Sequence[str]) -> int:
        inputs = list(structure.inputs)
        outputs = list(structure.outputs)
        axes_of_cores = [core.split() for core in order]
        cores = derive_cores(inputs, outputs, axes_of_cores, structure.sizes)
        return sum(core.flops for core in cores)

    cheapest_order = min(permutations(structure.subscripts), key=count_flops)
    flops = count_flops(cheapest_order)
    if 2 * flops >= structure.flops:
        return ""
    density = structure.density * flops / structure.flops
    return (
        f"the cores have {structure.density:.1f} times dense's FLOPs in this order, {density:.2f} "
        f"times as {', '.join(map(repr, cheapest_order))}"
    )
