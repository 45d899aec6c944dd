"""A progress bar that says what is being done, where somebody looks at it."""


class Bar:
    """A bar on the terminal (stderr) that counts up to `total`.

    Args:
        shown: None shows it if stderr is a terminal or a notebook.
    """

    def __init__(self, title: str, total: int, shown: bool | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        console = Console(stderr=True, force_terminal=True if shown else None)
        if shown is None:
            shown = console.is_terminal or console.is_jupyter
        text = TextColumn("{task.description}", markup=False)
        columns = text, BarColumn(), MofNCompleteColumn(), Elapsed()
        self._title = title
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

    def advance(self) -> None:
        """One more is done."""
        self._progress.advance(self._task)
