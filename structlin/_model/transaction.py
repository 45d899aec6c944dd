"""Changes of a model that happen whole or not at all, whatever ends them, Ctrl-C included.

Python raises KeyboardInterrupt after any line, those of an `__exit__` or a `finally` too. Nothing
here touches the process's handler of signals: what has to happen is begun again until it is done.
An error in one step keeps no other step from being taken.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from .._hosts.registry import configs_of

Step = Callable[[], object]


def complete(steps: list[Step]) -> None:
    """Take all of these steps, the last one first, off the list when it is done. Ctrl-C on the way
    is raised after all of them, or else the first error.

    A step that Ctrl-C has ended is taken again, so each is one that can be taken twice. A step that
    ends with another error is not.
    """
    interrupt: KeyboardInterrupt | None = None
    failure: Exception | None = None
    while steps:
        try:
            while steps:
                steps[-1]()
                del steps[-1]
        except KeyboardInterrupt as error:
            interrupt = error
        except Exception as error:
            failure = failure or error
            del steps[-1]
    if interrupt is not None:
        raise interrupt
    if failure is not None:
        raise failure


@contextmanager
def completed_at_end(steps: list[Step]) -> Iterator[None]:
    """At its end these steps are taken, see `complete`; the block may add more of them."""
    try:
        try:
            yield
        finally:
            complete(steps)
    finally:  # once more: Ctrl-C may have come before the first line of the first time
        complete(steps)


@contextmanager
def as_it_was_on_error(model: nn.Module) -> Iterator[list[Step]]:
    """If the block raises anything, all modules of `model` have what they had, and their configs.

    That is their attributes, parameters, buffers and submodules, not the numbers in tensors: for
    these, and for all else, the block adds a step to the list, which undoes what it is about to do.
    The last step is taken first.
    """
    registries = _list_registries(model)
    contents = [dict(registry) for registry in registries]
    restorations = [partial(_restore, *pair) for pair in zip(registries, contents, strict=True)]
    undo: list[Step] = []
    try:
        yield undo
    except BaseException:
        complete([*restorations, *undo])
        raise


def _list_registries(model: nn.Module) -> list[dict[str, Any]]:
    registries: list[Any] = []
    for module in model.modules():
        attributes = vars(module)
        registries.append(attributes)
        registries += [module._modules, module._parameters, module._buffers]
        for config in configs_of(module):
            if hasattr(config, "__dict__") and not isinstance(config, type):
                registries.append(vars(config))
    return [registry for registry in registries if isinstance(registry, dict)]


def _restore(registry: dict[str, Any], contents: dict[str, Any]) -> None:
    registry.clear()
    registry.update(contents)
