"""Tables for people, and the short names that layers alike have in them."""

import re
from collections.abc import Iterable, Sequence
from io import StringIO

NUMBER = r"(?<![^.])\d+(?![^.])"  # a part of a dotted name that is a number


class Table:
    """A table whose text does not depend on the terminal: text left, numbers right. Needs rich."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.rows: list[tuple[str, ...]] = []

    def row(self, *cells: str) -> None:
        missing = len(self.columns) - len(cells)
        self.rows.append((*cells, *[""] * missing))

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for n, column in enumerate(self.columns):
            is_numeric = all(re.match(r"[\d.,]*%?$", row[n]) for row in self.rows)
            table.add_column(column, justify="right" if is_numeric else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        text = StringIO()
        # in a notebook rich would show HTML and leave the text empty, but for the last option
        console = Console(
            file=text, width=1000, color_system=None, markup=False, emoji=False, force_jupyter=False
        )
        console.print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def hide_numbers(name: str) -> str:
    """A layer's name with `*` for each number, which equal layers of a model share.

    >>> hide_numbers("h.11.mlp.fc1")
    'h.*.mlp.fc1'
    """
    return re.sub(NUMBER, "*", name)


def name_group(names: Sequence[str], alike: Sequence[str]) -> str:
    """A short name for layers whose names differ in numbers alone.

    Args:
        names: of the layers.
        alike: of all layers of the model whose names are the same but for numbers, `names` too.
            Where `names` are not all of them, their numbers are given.

    >>> layers = [f"h.{n}.mlp.fc1" for n in range(12)]
    >>> name_group(layers, layers), name_group([*layers[:6], layers[9]], layers)
    ('h.*.mlp.fc1', 'h.{0-5,9}.mlp.fc1')
    """
    if len(names) == 1:
        return names[0]
    if len(names) == len(alike):
        return hide_numbers(names[0])
    texts = []  # of the numbers in the name
    for numbers, possible in zip(_find_numbers(names), _find_numbers(alike), strict=True):
        texts.append("*" if numbers == possible else _shorten(numbers))
    following = iter(texts)
    return re.sub(NUMBER, lambda _: next(following), names[0])


def _find_numbers(names: Iterable[str]) -> list[set[int]]:
    """The numbers at each place of a number in these names, which differ in nothing else."""
    numbers = [map(int, re.findall(NUMBER, name)) for name in names]
    return [set(numbers_at_place) for numbers_at_place in zip(*numbers, strict=True)]


def _shorten(numbers: Iterable[int]) -> str:
    """Numbers as text, three and more in sequence as a range: `{0-5,9}`; a single one: `9`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if runs == [runs[0][:1]]:
        return str(runs[0][0])
    texts: list[str] = []
    for run in runs:
        if len(run) > 2:
            texts.append(f"{run[0]}-{run[-1]}")
        else:
            texts += map(str, run)
    return f"{{{','.join(texts)}}}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%"
