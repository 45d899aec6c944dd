"""What the pages show of a kept result: numbers in sentences, tables, and claims of papers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import report
from benchmarks.harness.record import Row
from benchmarks.harness.statistics import below, judge, student

Holds = Sequence[bool | None]  # of the parts of a claim; None: its interval does not decide


def judge_changes(percents: Mapping[str, Sequence[float]]) -> tuple[Holds, str]:
    """Whether each change, in percent for every seed, is below zero; and the changes in words.

    >>> judge_changes({"GPTs": [-2.0, -3.0, -2.5], "ViTs": [-1.0, 1.0]})
    ([True, None], 'GPTs: -2.5 (-3.7 to -1.3) %; ViTs: 0.0 (-12.7 to 12.7) %')
    """
    changes = {name: student(by_seed) for name, by_seed in percents.items()}
    words = [f"{name}: {report.number(change, 1)} %" for name, change in changes.items()]
    return [below(change) for change in changes.values()], "; ".join(words)


@dataclass(frozen=True)
class Claim:
    """What a paper says.

    Args:
        where: its figure or section, as "CBS 2a".
        short: the claim in few words, for docs/results.md.
        words: the paper's.
        test: the result -> whether each part holds, and the numbers that decide.
        runs: what a verdict without seeds rests on, as "one run"; it stands beside the verdict.
    """

    where: str
    short: str
    words: str
    test: Callable[[Row], tuple[Holds, str]]
    runs: str = ""

    def verdict(self, result: Row) -> dict[str, str]:
        """As verdicts.json has it."""
        holds, deciding_numbers = self.test(result)
        verdict = judge(*holds)
        if self.runs:
            verdict += f" ({self.runs})"
        return {
            "where": self.where,
            "claim": self.words,
            "verdict": verdict,
            "found": deciding_numbers,
        }


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A kept result, and what is shown of it.

    Args:
        name: of the result under results/, as "papers/md_width".
        numbers: the result -> the numbers that templates name, as text.
        tables: their names in templates, each made from the result.
        claims: those that it decides, and below which heading of docs/ its table stands.
    """

    name: str
    numbers: Callable[[Row], Mapping[str, str]] = lambda result: {}
    tables: Mapping[str, Callable[[Row], str]] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    place: str = ""
