"""How the papers' scripts decide on a claim: 95 % intervals over the seeds, and yes, no or
undecided."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

Estimate = dict[str, float]  # "value", and the ends of its interval, "low" and "high"


def student(values: Sequence[float]) -> Estimate:
    """The mean of a number for each seed, with its 95 % interval by Student's distribution.

    Raises:
        ValueError: fewer than two values.

    >>> found = student([1.0, 2.0, 3.0])
    >>> [round(found[key], 2) for key in ("value", "low", "high")]
    [2.0, -0.48, 4.48]
    """
    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"{len(values)} values have no interval; two or more seeds do")
    mean = fmean(values)
    reach = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def below(found: Estimate, limit: float = 0.0) -> bool | None:
    """Whether what was measured is below `limit`; None where the interval holds both.

    >>> [below({"value": v, "low": v - 1, "high": v + 1}) for v in (-2, 0, 2)]
    [True, None, False]
    """
    return True if found["high"] < limit else False if found["low"] >= limit else None


def above(found: Estimate, limit: float = 0.0) -> bool | None:
    """Whether what was measured is above `limit`; None where the interval holds both.

    >>> [above({"value": v, "low": v - 1, "high": v + 1}) for v in (-2, 0, 2)]
    [False, None, True]
    """
    return True if found["low"] > limit else False if found["high"] <= limit else None


def within(found: Estimate, limit: float) -> bool | None:
    """Whether what was measured lies between -`limit` and `limit`; None where the interval holds
    values of both kinds.

    >>> [within({"value": v, "low": v - 1, "high": v + 1}, 2.5) for v in (-1, 2, 5)]
    [True, None, False]
    """
    if found["low"] > limit or found["high"] < -limit:
        return False
    return True if -limit <= found["low"] and found["high"] <= limit else None


def judge(*holds: bool | None) -> str:
    """What the parts of a claim come to; None is a part that its interval does not decide.

    >>> judge(True, True), judge(True, False), judge(True, None)
    ('yes', 'in part', 'in part, else undecided')
    >>> judge(None, None), judge(False, None), judge(False, False)
    ('undecided', '**no**, in part undecided', '**no**')
    """
    found = set(holds)
    if found == {True}:
        return "yes"
    if True in found:
        return "in part" if False in found else "in part, else undecided"
    if False in found:
        return "**no**, in part undecided" if None in found else "**no**"
    return "undecided"
