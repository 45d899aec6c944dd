"""torch's own layer."""

from benchmarks.comparison.methods import Method

METHODS = [Method("dense", lambda model: model)]
