"""A progress bar that says what is being done; without a terminal, a line now and then."""

import sys
import time

INTERVAL = 30.0  # seconds between two lines


class Bar:
    """A bar on the terminal (stderr) that counts up to `total`.

    Args:
        shown: None shows it if stderr is a terminal or a notebook, and otherwise prints a line on
            stderr every half minute.
    """

    def __init__(self, title: str, total: int, shown: bool | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        console = Console(stderr=True, force_terminal=True if shown else None)
        is_watched = console.is_terminal or console.is_jupyter
        self._prints_lines = shown is None and not is_watched
        if shown is None:
            shown = is_watched
        text = TextColumn("{task.description}", markup=False)
        columns = text, BarColumn(), MofNCompleteColumn(), Elapsed()
        self._title = title
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._printed = self._started
        self._progress = Progress(*columns, console=console, disable=not shown)
        self._task = self._progress.add_task(title, total=total)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._progress.disable:  # or it would end a line
            self._progress.stop()

    def show(self, what: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=f"{self._title}: {what}")
        self._print_line(what)

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        self._progress.advance(self._task)
        self._print_line("")

    def _print_line(self, what: str) -> None:
        now = time.monotonic()
        if not self._prints_lines or now < self._printed + INTERVAL:
            return
        self._printed = now
        seconds = round(now - self._started)
        what = f": {what}" if what else ""
        print(f"{self._title} {self._done}/{self._total}, {seconds} s{what}", file=sys.stderr)
