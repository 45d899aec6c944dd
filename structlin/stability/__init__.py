"""Is training stable, and does a learning rate transfer? For any model, dense or structured.

`coordinate_check` trains a model at several widths for a few steps, and says which layers' outputs
and changes grow or shrink with the width.

Source: Yang et al. 2022 (arXiv:2203.03466), appendix D.1.
"""

from ._coordinates import CoordinateCheck, coordinate_check

__all__ = ["CoordinateCheck", "coordinate_check"]
