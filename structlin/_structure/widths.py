"""Widths as products of factors.

A width that factors badly (a prime, 50257 = 29 x 1733) is padded to the next one that factors well.
"""

from functools import lru_cache
from math import isqrt


@lru_cache(maxsize=4096)
def factorise(width: int, factors: int) -> tuple[int, ...]:
    """`factors` integers, ascending and as even as possible, whose product is `width`, or the next
    width that factors well if the largest is over 4 times the smallest.

    A padded width has a largest factor of at most twice the smallest, and multiples of 8 where they
    are 32 and more.

    >>> factorise(20, 2), factorise(30, 2), factorise(1024, 3), factorise(50257, 2), factorise(7, 2)
    ((4, 5), (5, 6), (8, 8, 16), (192, 264), (2, 4))
    """
    ascending = _most_even(width, factors)
    if ascending[-1] <= 4 * ascending[0]:
        return ascending
    # Each factor is `align` times a factor of `quotient`, so the width becomes the first product
    # align**factors * quotient, from `width` on, whose factors are even enough.
    align = 8 if width >= 32**factors else 1
    quotient = ceil_divide(width, align**factors)
    while True:
        ascending = _most_even(quotient, factors)
        if ascending[-1] <= 2 * ascending[0]:
            return tuple(align * factor for factor in ascending)
        quotient += 1


def ceil_divide(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def _most_even(n: int, factors: int, smallest: int = 1) -> tuple[int, ...]:
    """Ascending factors of n, none below `smallest`, with the least sum: the geometric mean is
    given, so the most even."""
    if factors == 1:
        return (n,)
    best: tuple[int, ...] = ()
    largest = round(n ** (1 / factors)) + 1  # the root may be rounded down
    for factor in range(min(largest, n), smallest - 1, -1):
        if n % factor != 0 or factor**factors > n:
            continue
        larger_factors = _most_even(n // factor, factors - 1, factor)
        if larger_factors and (not best or factor + sum(larger_factors) < sum(best)):
            best = (factor, *larger_factors)
        if factors == 2:
            break  # of two factors, the largest first one has the least sum
    return best


def divisors(n: int) -> list[int]:
    up_to_root = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    from_root_on = [n // k for k in up_to_root]
    return sorted({*up_to_root, *from_root_on})


def name_nearest(value: int, fits: list[int]) -> str:
    """The nearest of `fits`, which ascend, below `value` and above."""
    below = [n for n in fits if n < value]
    above = [n for n in fits if n > value]
    nearest = [*below[-1:], *above[:1]]
    verbs = "do are" if len(nearest) == 2 else "does is"
    return f"the nearest that {verbs} {' and '.join(map(str, nearest))}"
