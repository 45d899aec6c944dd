"""Is training stable, and does a learning rate transfer? For any model, dense or structured.

A layer `y = W x`, from d_in to d_out features, is stable if three numbers stay of order 1 over
training, at every width:

    forward     RMS(y) / RMS(x)             measured on the live batch, bias included
    dependency  sqrt(d_in / d_out) |W|_2    the most that RMS(y) can be, or change by, at unit RMS
    update      sqrt(d_in / d_out) |dW|_2   the most that a step changes RMS(y), x of unit RMS

(Over all x of unit RMS the first is the second; on one batch it shows how well inputs and weights
are aligned.) `watch` measures them on a live model, `coordinate_check` what they lead to across
widths.

Sources: "Beyond MuP 2" (2026, kexue.fm/archives/11605) for the three numbers; Yang et al. 2022
(arXiv:2203.03466), appendix D.1, for the coordinate check. Spectral norms by randomised block
Krylov iteration: Musco & Musco 2015 (arXiv:1504.05477).
"""

from ._coordinates import CoordinateCheck, coordinate_check
from ._live import Log, watch

__all__ = ["CoordinateCheck", "Log", "coordinate_check", "watch"]
