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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_healed_run_of_the_trainer_ends_as_one_without_a_break(optimizer, monkeypatch, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sys.modules.pop("characters", None)  # of a test above, which finds no library
    monkeypatch.syspath_prepend(RECIPES)
    program = "heal_with_trainer.py"
    monkeypatch.setattr("sys.argv", [program, "--smoke", "--optimizer", optimizer])
    recipe = runpy.run_path(str(RECIPES / program))
    recipe["main"]()  # which ends the program if a weight differs
    monkeypatch.delitem(sys.modules, "characters")
    *_, line = capsys.readouterr().out.splitlines()
    before, after = (float(number) for number in line.replace(",", "").split()[1:4:2])
    assert 0 < after != before
    assert line.endswith(f"resumed {after:.4f}")


def test_the_page_names_every_recipe():
    page = (RECIPES.parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert PROGRAMS
    assert all(f"| `{program}` |" in page for program in [*PROGRAMS, "nanogpt.patch"])
