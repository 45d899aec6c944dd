"""What is public: at most 73 names, each with an example, each module with a page."""

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import structlin

MODULES = ["structlin"] + [
    f"structlin.{module.name}"
    for module in pkgutil.iter_modules(structlin.__path__)
    if not module.name.startswith("_") and module.name != "cli"  # docs/commands.md
]
RETURNED_BY = {  # the function whose example shows this result
    "structlin.stability.CoordinateCheck": "structlin.stability.coordinate_check",
}


def load(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"{name} needs a package that is not installed")


def public_objects():
    """Qualified name -> object, once for each object."""
    found = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # structlin.hf without transformers
        for public in module.__all__:
            value = getattr(module, public)
            if not inspect.ismodule(value) and all(value is not other for other in found.values()):
                found[f"{name}.{public}"] = value
    return found


OBJECTS = public_objects()


def test_at_most_73_names_are_public():
    assert len(OBJECTS) <= 73


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_says_which_names_are_public(name):
    module = load(name)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_every_public_name_has_an_example(name):
    text = inspect.getdoc(OBJECTS[RETURNED_BY.get(name, name)]) or ""
    assert doctest.DocTestParser().get_examples(text), name


@pytest.mark.parametrize("name", MODULES)
def test_every_public_module_has_a_page_of_the_reference(name):
    page = Path(__file__).parents[1] / f"docs/reference/{name.rpartition('.')[2]}.md"
    assert f"::: {name}" in page.read_text()
