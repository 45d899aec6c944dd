"""Initialisation and learning rates from a core's integers. Names no family; no torch.

Sources: Qiu et al. 2024 (arXiv:2406.06248), section 3.2 and appendices E.2, H; "Beyond MuP 2"
(2026, kexue.fm/archives/11605) for the spectral rule; Large et al. 2024 (arXiv:2405.14813) for the
orthogonal one.
"""

from collections.abc import Sequence
from math import prod, sqrt
from typing import Annotated

from ._structure.arguments import Range, checked, require_choice
from ._structure.axes import MOST_AXES
from ._structure.structure import Core

__all__ = ["init_std", "lr_mult"]

INITS = ("mup", "spectral", "orthogonal")
OPTIMIZERS = ("adam", "adamw", "sign", "sgd")


@checked
def init_std(
    core: Core, init: str = "mup", *, bottleneck_variance: bool = False, activated: bool = False
) -> float:
    """Standard deviation of the entries of `core` at initialisation.

    - "mup": sqrt(min(fan_in, fan_out)) / fan_in: a Gaussian block then has a spectral norm of order
      sqrt(fan_out / fan_in), and features stay of order 1.
    - "spectral": sqrt(fan_out / fan_in) / (sqrt(fan_in) + sqrt(fan_out)): that norm is sqrt(fan_out
      / fan_in) in the limit of large blocks.
    - "orthogonal": the RMS of a semi-orthogonal block times sqrt(fan_out / fan_in), as "mup".

    Args:
        bottleneck_variance: low-rank's V, a core that reads the whole activation and narrows it,
            gets 1 / sqrt(fan_in) (CBS, E.2). Layers ask for it under "mup", and with `zero_init`.
        activated: an activation reads what the core makes, which must have unit RMS: 1 /
            sqrt(fan_in) under every rule.

    Raises:
        ValueError: `init` is unknown.

    >>> from structlin import BTT
    >>> right, left = BTT(rank=4).structure(256, 256).cores
    >>> right.fan_in * init_std(right) ** 2, left.fan_in * init_std(left) ** 2
    (1.0, 0.25)
    """
    require_choice("init", init, INITS)
    m = core.fan_out
    n = core.fan_in
    is_bottleneck = core.batch == core.repeat == 1 and m < n
    if activated or (bottleneck_variance and is_bottleneck):
        return 1 / sqrt(n)
    if init == "spectral":
        return sqrt(m / n) / (sqrt(m) + sqrt(n))
    return sqrt(min(m, n)) / n


def expected_norm(
    cores: Sequence[Core], stds: Sequence[float], in_features: int, activated: bool = False
) -> float:
    """Frobenius norm of the matrix, in root mean square over draws of its cores.

    An entry of the matrix is a sum over paths of products of one entry per core, which are
    uncorrelated. Each input begins prod(fan_out) paths, each of variance prod(std^2). Where cores
    are `activated` there is no matrix: that of the last core, whose inputs have unit RMS.

    >>> from structlin import BTT
    >>> cores = BTT(rank=1).structure(64, 64).cores
    >>> round(expected_norm(cores, [init_std(core) for core in cores], 64), 6)  # as of 1 / sqrt(64)
    8.0
    """
    if activated:
        readout = cores[-1]
        return sqrt(readout.batch * readout.repeat * readout.fan_out * readout.fan_in) * stds[-1]
    variances = [core.fan_out * std**2 for core, std in zip(cores, stds, strict=True)]
    return sqrt(in_features * prod(variances))


@checked
def lr_mult(
    core: Core,
    in_features: int,
    cores: Annotated[int, Range(1, MOST_AXES)],
    *,
    optimizer: str = "adam",
    out_features: int | None = None,
) -> float:
    """Learning rate of `core`, relative to that of a dense layer of the same width (dimensionless).

    An Adam (or sign) update has entries of size lr, so its spectral norm is lr * sqrt(fan_in *
    fan_out); feature learning asks for sqrt(fan_out / fan_in), hence 1 / fan_in. An SGD update has
    the gradient's scale, fan_out / fan_in. Adam's step is split evenly over the layer's `cores`.

    Args:
        in_features, out_features: of the layer; `out_features` is needed for SGD alone.
        cores: number of cores of the layer.

    Raises:
        ValueError: `optimizer` is unknown; SGD without `out_features`; a number below 1.
    Source: Qiu et al. 2024 (arXiv:2406.06248), section 3.2 and appendix H.

    >>> from structlin import BTT
    >>> r, l = BTT(rank=2).structure(1024, 1024).cores
    >>> lr_mult(r, 1024, 2), lr_mult(l, 1024, 2)
    (16.0, 8.0)
    """
    require_choice("optimizer", optimizer, OPTIMIZERS)
    if optimizer != "sgd":
        return 1 / cores * in_features / core.fan_in
    if out_features is None:
        raise ValueError("out_features=None: the SGD rule needs the layer's out_features")
    return (core.fan_out / core.fan_in) / (out_features / in_features)
