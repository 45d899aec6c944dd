"""The recipes say what is not installed. That each one runs is what `make bench` tries."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
PROGRAMS = sorted(path.name for path in RECIPES.glob("[a-z]*.py") if path.stem != "characters")
STACKS = {"accelerate", "lightning", "peft", "timm", "transformers"}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("options", "status"), [(["--smoke"], 0), ([], 1)])
def test_a_recipe_without_its_library_ends_with_what_to_install(
    program, options, status, monkeypatch, capsys
):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: name not in STACKS and found(name, *rest)
    )
    monkeypatch.delitem(sys.modules, "characters", raising=False)
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.setattr("sys.argv", [program, *options])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(RECIPES / program), run_name="__main__")
    monkeypatch.delitem(sys.modules, "characters")
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{program} needs " in line
    assert ": pip install " in line
    assert stopped.value.code == status


def test_the_page_names_every_recipe():
    page = (RECIPES.parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert PROGRAMS
    assert all(f"| `{program}` |" in page for program in [*PROGRAMS, "nanogpt.patch"])
