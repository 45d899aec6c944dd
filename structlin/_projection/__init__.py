"""A dense matrix -> the cores of a structure; the inputs' covariance; sizes under a budget."""

from .solve import project, relative_error

__all__ = ["project", "relative_error"]
