"""The structures that are cut in the tests of this folder."""

from structlin import (
    BLAST,
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    Split,
    Structure,
)

FAMILIES = {
    "dense": Dense(),
    "low-rank": LowRank(rank=8),
    "low-rank, SiLU": LowRank(rank=8).activate(),
    "block-diagonal": BlockDiagonal(blocks=4),
    "Kronecker": Kronecker(),
    "TT": TT(rank=2),
    "TT, 3 cores, SiLU": TT(rank=2, cores=3).activate(),
    "Monarch": Monarch(blocks=4),
    "Monarch, 16 blocks": Monarch(blocks=16),
    "BTT": BTT(),
    "BTT, rank 2": BTT(rank=2),
    "BTT, rank 2, SiLU": BTT(rank=2).activate(),
    "BTT, 3 cores": BTT(rank=2, cores=3),
    "BLAST": BLAST(blocks=4, rank=8),
    "BLAST, wide": BLAST(blocks=4, rank=48),
    "two BTT": Split(split=2, of=BTT(rank=2)),
    "repeated": Structure("b i -> b o", "o i", b=4, i=16, o=36),  # no core has axis b
}
