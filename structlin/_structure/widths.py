"""Widths as products of factors.

A width that factors badly (a prime, 50257 = 29 x 1733) is padded to the next one that factors well.
"""

from functools import lru_cache
from math import gcd, isqrt

from .arguments import checked


@lru_cache(maxsize=4096)
def factorise(width: int, factors: int) -> tuple[int, ...]:
    """`factors` integers, ascending and as even as possible, whose product is `width`, or the next
    width that factors well if the largest is over 4 times the smallest.

    A padded width has a largest factor of at most twice the smallest, and multiples of 8 where they
    are 32 and more.

    >>> factorise(20, 2), factorise(30, 2), factorise(1024, 3), factorise(50257, 2), factorise(7, 2)
    ((4, 5), (5, 6), (8, 8, 16), (192, 264), (2, 4))
    """
    even = _most_even(width, factors)
    if even[-1] <= 4 * even[0]:
        return even
    align = 8 if width >= 32**factors else 1
    quotient = -(-width // align**factors)
    while True:
        even = _most_even(quotient, factors)
        if even[-1] <= 2 * even[0]:
            return tuple(align * factor for factor in even)
        quotient += 1


def _most_even(n: int, factors: int, smallest: int = 1) -> tuple[int, ...]:
    """Ascending factors of n, none below `smallest`, with the least sum: the geometric mean is
    given, so the most even."""
    if factors == 1:
        return (n,)
    best: tuple[int, ...] = ()
    largest = round(n ** (1 / factors)) + 1
    for first in range(min(largest, n), smallest - 1, -1):
        if n % first == 0 and first**factors <= n:
            rest = _most_even(n // first, factors - 1, first)
            if rest and (not best or first + sum(rest) < sum(best)):
                best = (first, *rest)
            if factors == 2:
                break
    return best


def divisors(n: int) -> list[int]:
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


@checked
def divide(in_features: int, out_features: int, blocks: int) -> tuple[int, int]:
    """Both widths by the number of blocks.

    Raises:
        ValueError: one is not divisible; the message names the nearest numbers that divide both.

    >>> divide(12, 20, 4)
    (3, 5)
    """
    for side, width in (("in_features", in_features), ("out_features", out_features)):
        if width % blocks:
            fits = name_nearest(blocks, divisors(gcd(in_features, out_features)))
            raise ValueError(f"blocks={blocks} does not divide {side}={width}; {fits}")
    return in_features // blocks, out_features // blocks


def name_nearest(value: int, fits: list[int]) -> str:
    low, high = [n for n in fits if n < value], [n for n in fits if n > value]
    names = [str(n) for n in [*low[-1:], *high[:1]]]
    return f"the nearest that {'do are' if len(names) == 2 else 'does is'} {' and '.join(names)}"
