"""How the scripts for CBS say whether a claim of the paper holds: computed from the rows, shown
under the table."""

import math
from typing import Any

from rich.console import Console
from rich.table import Table

Claim = dict[str, Any]


def claim(text: str, holds: bool, measured: str) -> Claim:
    """What the paper says, whether it is so here, and the number that decided."""
    return {"claim": text, "holds": bool(holds), "measured": measured}


def show_claims(claims: list[Claim], console: Console, title: str = "claims of the paper") -> None:
    table = Table(title=title)
    for column in ("claim", "holds here", "measured"):
        table.add_column(column)
    for row in claims:
        table.add_row(row["claim"], "yes" if row["holds"] else "no", row["measured"])
    console.print(table)


def ratio(log_ratio: dict[str, float]) -> str:
    """exp of an estimate with the ends of its interval: `0.85 (0.83 to 0.87)`.

    >>> ratio({"value": 0.0, "low": -0.1, "high": 0.1})
    '1.00 (0.90 to 1.11)'
    """
    value, low, high = (math.exp(log_ratio[key]) for key in ("value", "low", "high"))
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def interval(estimate: dict[str, float]) -> str:
    """An estimate with the ends of its interval.

    >>> interval({"value": 0.25, "low": 0.2, "high": 0.3})
    '0.250 (0.200 to 0.300)'
    """
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"
