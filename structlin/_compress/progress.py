"""A progress bar that says what is being done, where somebody looks at it."""

from typing import Any

from .._model.interrupts import let_interrupts_in


class Bar:
    """A bar on the terminal (stderr) that counts up to `total`.

    Args:
        shown: None shows it if stderr is a terminal or a notebook.
    """

    def __init__(self, title: str, total: int, shown: bool | None = None) -> None:
        self._title, self._total, self._shown = title, total, shown
        self._progress: Any = None

    def __enter__(self) -> "Bar":
        if self._shown is False:
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        console = Console(stderr=True, force_terminal=True if self._shown else None)
        if self._shown or console.is_terminal or console.is_jupyter:
            text = TextColumn("{task.description}", markup=False)
            columns = text, BarColumn(), MofNCompleteColumn(), Elapsed()
            self._progress = Progress(*columns, console=console)
            self._progress.start()
            self._task = self._progress.add_task(self._title, total=self._total)
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, what: str) -> None:
        """What is being done now."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"{self._title}: {what}")

    def advance(self) -> None:
        """One more is done. Ctrl-C, if it had to wait, comes now."""
        with let_interrupts_in():
            pass
        if self._progress is not None:
            self._progress.advance(self._task)
