"""Warnings that point at the user's line."""

import sys
import warnings


def warn(text: str) -> None:
    """Warn, as of the line outside of structlin and torch that led here."""
    level, frame, ours = 1, sys._getframe(), ("structlin", "torch")
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
