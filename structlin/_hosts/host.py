"""What structlin asks about a library whose models users bring."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

ROWS = "e m n"  # each expert as nn.Linear stores its weight
COLUMNS = "e n m"  # and transposed


class Host:
    """A library of models. A subclass says what differs from plain modules of torch.

    Nothing here imports the library: a model of its classes exists only where it is imported.
    """

    #: (role, regular expression) for dotted names of layers, searched before the general ones
    roles: tuple[tuple[str, str], ...] = ()
    #: subclasses of nn.Linear, by qualified name, that multiply by their weight and do no more
    plain_linears: tuple[str, ...] = ()
    #: methods by which a model names its head
    head_methods: tuple[str, ...] = ()
    #: attributes that the library leaves on layers and parameters, for itself
    bookkeeping: tuple[str, ...] = ()
    #: arguments of models that tell padding, and whether a true entry is a token in them
    padding_masks: Mapping[str, bool] = MappingProxyType({})

    def layouts_of(self, module: nn.Module) -> Mapping[str, str]:
        """How weights of several matrices lie: attribute name -> text, see `declare_weights`."""
        return {}

    def configs_of(self, module: nn.Module) -> Iterable[Any]:
        """The configs that the module holds, which a change of the model may write to."""
        return ()

    def source_of(self, model: nn.Module) -> str:
        """Where the model's weights were loaded from, as it says itself; empty if it does not."""
        return ""

    def explain_part(self, model: nn.Module) -> str:
        """Why a part of a model is not converted alone; empty where it may be."""
        return ""

    def warn_of_part(self, model: nn.Module) -> str:
        """What to do where `model`, which may be converted, is a part of another one."""
        return ""

    def find_declare(
        self, model: nn.Module, load: Callable[[str], Any]
    ) -> Callable[[nn.Module], None] | None:
        """What tells the library which layers are structured, once they are; None: nothing does.

        Args:
            load: imports a module by its name. What declares layers stands above this folder, so
                only what stands above both may import it.

        Raises:
            ImportError: it cannot be told, and `model` is of the library.
        """
        return None

    def declare_untied(self, model: nn.Module) -> None:
        """Say in the model's configs that its embeddings are not tied any more."""

    def find_options(self, model: nn.Module, arguments: Iterable[str]) -> dict[str, Any]:
        """Keywords of a call that calibrates.

        Args:
            arguments: the names of those that the call has already.
        """
        return {}


def find_by_class_name(
    module: nn.Module, layouts: Mapping[str, Mapping[str, str]]
) -> Mapping[str, str]:
    """The layouts of the module's class, or of the nearest class that it inherits from."""
    for kind in type(module).__mro__:
        if kind.__name__ in layouts:
            return layouts[kind.__name__]
    return {}
