"""structlin's structures: `convert` with weight normalisation, and `param_groups`."""

from functools import partial

import structlin
from benchmarks.comparison.methods import Method
from structlin import BLAST, BTT, TT, BlockDiagonal, Family, Kronecker, LowRank, Monarch
from structlin._structure.families import label


def ours(family: Family) -> Method:
    convert = partial(structlin.convert, structure=family, weight_norm=True)
    return Method(label(family), convert, "structlin", structlin.param_groups)


METHODS = [
    *(ours(BTT(rank=rank)) for rank in (1, 2)),
    ours(BTT(rank=1).activate()),
    ours(Monarch(blocks=4)),
    ours(BlockDiagonal(blocks=4)),
    ours(Kronecker()),
    ours(TT(rank=8)),
    ours(BLAST(blocks=4, rank=64)),
    ours(LowRank(rank=64)),
]
