"""The libraries whose models structlin knows, and what all of them answer together.

Add a library: write its `Host` in a file beside this one, and name it in `HOSTS`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .diffusers import Diffusers
from .host import Host
from .timm import Timm
from .torchtitan import Torchtitan
from .transformers import Transformers

HOSTS: tuple[Host, ...] = (Diffusers(), Transformers(), Timm(), Torchtitan())


def role_patterns() -> Iterator[tuple[str, str]]:
    """(role, regular expression) for dotted names of layers, the first that is found decides."""
    for host in HOSTS:
        yield from host.roles


def is_plain_linear(kind: type[nn.Module]) -> bool:
    """Whether this subclass of nn.Linear multiplies by its weight and does no more."""
    name = f"{kind.__module__}.{kind.__name__}"
    return any(name in host.plain_linears for host in HOSTS)


def head_methods() -> Iterator[str]:
    """The methods by which models name their heads."""
    for host in HOSTS:
        yield from host.head_methods


def is_bookkeeping(attribute: str) -> bool:
    """Whether a library leaves this attribute on layers and parameters, for itself."""
    return any(attribute in host.bookkeeping for host in HOSTS)


def padding_masks() -> dict[str, bool]:
    """Arguments of models that tell padding, and whether a true entry is a token in them."""
    masks: dict[str, bool] = {}
    for host in HOSTS:
        masks.update(host.padding_masks)
    return masks


def layouts_of(module: nn.Module) -> Mapping[str, str]:
    """How the module's weights of several matrices lie, as the first library knows that has any."""
    for host in HOSTS:
        layouts = host.layouts_of(module)
        if layouts:
            return layouts
    return {}


def configs_of(module: nn.Module) -> Iterator[Any]:
    """The configs that the module holds, which a change of the model may write to."""
    for host in HOSTS:
        yield from host.configs_of(module)


def source_of(model: nn.Module) -> str:
    """Where the model's weights were loaded from, as it says itself; empty if it does not."""
    sources = [host.source_of(model) for host in HOSTS]
    return next(filter(None, sources), "")


def require_whole(model: nn.Module) -> None:
    """Refuse a part of a model that could not say, when it is saved, what is structured.

    Raises:
        ValueError: `model` is such a part.
    """
    for host in HOSTS:
        if reason := host.explain_part(model):
            raise ValueError(reason)


def warnings_of_parts(model: nn.Module) -> list[str]:
    """What to do where `model`, which may be converted, is a part of another one."""
    warnings = [host.warn_of_part(model) for host in HOSTS]
    return list(filter(None, warnings))


def find_declare(model: nn.Module, load: Callable[[str], Any]) -> Callable[[nn.Module], None]:
    """What tells the libraries which layers are structured, so that their savers write it down.

    Args:
        load: imports a module by its name, see `Host.find_declare`.

    Raises:
        ImportError: a library cannot be told, and `model` is of it. Ask before it changes.
    """
    declarations = [host.find_declare(model, load) for host in HOSTS]

    def declare(changed: nn.Module) -> None:
        for declare_to_one in filter(None, declarations):
            declare_to_one(changed)

    return declare


def declare_untied(model: nn.Module) -> None:
    """Say in the model's configs that its embeddings are not tied any more."""
    for host in HOSTS:
        host.declare_untied(model)


def call_options(model: nn.Module, arguments: Iterable[str]) -> dict[str, Any]:
    """Keywords of a call that calibrates, beside the arguments of these names."""
    names = set(arguments)
    options: dict[str, Any] = {}
    for host in HOSTS:
        options.update(host.find_options(model, names))
    return options
