"""Ctrl-C while something has to be undone: it waits, or comes in where that is sure to be undone.

An interrupt can end any line of Python, the first one of an `__exit__` or a `finally` too, so that
no `with` surely undoes what it did. Within `hold_interrupts` an interrupt waits. Within
`let_interrupts_in`, inside of it, one comes in, and those after it wait until all is undone.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Handler:
    """SIGINT's, as long as somebody holds interrupts."""

    def __init__(self) -> None:
        self.holders = 0
        self.open = self.waiting = False
        self.before: Callable[..., Any] = signal.default_int_handler

    def __call__(self, *given: Any) -> None:
        if self.holders and not self.open:
            self.waiting = True
            return
        was_open, self.open = self.open, False  # if this one raises, no other stops what it unwinds
        self.before(*given)
        self.open = was_open

    def deliver(self) -> None:
        if self.waiting:
            self.waiting = False
            signal.raise_signal(signal.SIGINT)


_HANDLER = _Handler()


def _is_main() -> bool:
    """Whether this is the thread in which Python raises KeyboardInterrupt."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Within it Ctrl-C waits, except in `let_interrupts_in`; what waits comes when all is left."""
    current = signal.getsignal(signal.SIGINT)
    if not _is_main() or not callable(current):
        yield
        return
    handler, was_open = _HANDLER, _HANDLER.open
    if not isinstance(current, _Handler):
        handler.before = current
    handler.holders, handler.open = handler.holders + 1, False
    try:
        signal.signal(signal.SIGINT, handler)
        yield
    finally:
        handler.holders, handler.open = handler.holders - 1, was_open
        if not handler.holders and isinstance(signal.getsignal(signal.SIGINT), _Handler):
            signal.signal(signal.SIGINT, handler.before)
        if was_open or not handler.holders:
            handler.deliver()


class let_interrupts_in:  # noqa: N801
    """Within it Ctrl-C comes in, as one that has waited does at once: nothing here is to be undone.

    It is a class, for a generator that an interrupt leaves behind would be closed any time later.
    """

    def __enter__(self) -> None:
        self._was_open, self._held = _HANDLER.open, _HANDLER.holders > 0 and _is_main()
        if self._held:
            _HANDLER.open = True
            _HANDLER.deliver()

    def __exit__(self, *error: object) -> None:
        if self._held:
            _HANDLER.open = self._was_open
