"""Which structure trains best? A search over all einsums of two cores, on your model and data.

`Einsum` is a point of a continuous space that holds low-rank, Kronecker, TT, BTT, Monarch and dense
matrices: how each axis of two cores grows with the width. `sample` draws points, `run` trains them
with the learning rates that `param_groups` derives from dense's, and keeps every run. What it
returns compares structures at equal FLOPs or seconds, fits the frontier, and tells how three
measures of a structure go with its loss:

    omega   parameter sharing   d^omega multiplications use a parameter once for each token
    psi     rank                the matrix has rank d^psi
    nu      compute             d^(1 + nu) multiplications a token

Source: Potapczynski et al. 2024, "Searching for Efficient Linear Layers over a Continuous Space of
Structured Matrices" (arXiv:2410.02117), and its authors' code for the axes of the cores.
"""

from ._run import run
from ._search import Search, Trial
from ._space import Einsum, measure, sample

__all__ = [
    "Einsum",
    "Search",
    "Trial",
    "measure",
    "run",
    "sample",
]
