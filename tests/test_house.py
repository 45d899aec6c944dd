"""The house: one place splits a signature, imports run downwards, calls are few."""

import ast
import re
from pathlib import Path

import pytest

import structlin
from structlin import BTT, StructuredLinear
from structlin._engine.cpu import library
from tests.calls import calls_to_the_first_product, count_calls

PACKAGE = Path(structlin.__file__).parent
FILES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def module_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE.parent).with_suffix("").parts


def imports_of(path: Path) -> set[tuple[str, ...]]:
    """Modules of ours that a file imports anywhere: in functions and for type checkers too."""
    package, found = module_of(path)[:-1], set()
    for node in ast.walk(FILES[path]):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
        base = tuple(part for part in base if part)
        for name in node.names:
            for module in ((*base, name.name), base):
                if any(module_of(other) in (module, (*module, "__init__")) for other in FILES):
                    found.add(module)
                    break
    return found


def graph_of_imports() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """Each module of ours -> the modules that it imports; a package is a module too."""
    names = {path: module_of(path) for path in FILES}
    return {
        name[:-1] if name[-1] == "__init__" else name: imports_of(path)
        for path, name in names.items()
    }


def test_nothing_imports_what_imports_it_not_even_lazily():
    graph = graph_of_imports()
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], way: list[tuple[str, ...]]) -> None:
        assert module not in way, " -> ".join(
            ".".join(each) for each in [*way[way.index(module) :], module]
        )
        if module not in done:
            for other in graph.get(module, ()):
                if other != module[: len(other)]:  # a file may name its own package
                    visit(other, [*way, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    assert len(done) == len(graph) > 40


def test_the_mathematics_of_one_matrix_knows_nothing_of_models():
    files = [path for path in FILES if "_projection" in path.parts]
    found = {module[1] for path in files for module in imports_of(path)}
    assert found == {"_engine", "_projection", "_structure", "_tensors"}


def test_what_names_axes_and_families_imports_no_torch():
    for path, tree in FILES.items():
        if "_structure" not in path.parts:
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            assert not any(name.split(".")[0] == "torch" for name in names), path
    own = {module[1] for path in FILES if "_structure" in path.parts for module in imports_of(path)}
    assert own == {"_structure"}


def test_one_file_splits_a_signature():
    splitting = [
        path.name
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("split", "partition")
        and any(
            isinstance(argument, ast.Constant) and "->" in str(argument.value)
            for argument in node.args
        )
    ]
    assert splitting == ["structure.py"]
    assert {path.name for path in FILES if re.search(r"\bTOKENS\b", path.read_text())} == {
        "structure.py"
    }


@pytest.mark.parametrize("tokens", [1, 16, 4096])
@pytest.mark.parametrize("training", [True, False])
def test_a_call_enters_few_functions_before_its_first_product(tokens, training):
    layer = StructuredLinear(256, 256, BTT())
    # without the engine many tokens are worth the calls that make views
    most = 12 if tokens < 256 or library.load() else 24
    assert 1 <= calls_to_the_first_product(layer, tokens, training=training) <= most


def test_a_function_of_another_package_is_not_ours_wherever_it_is_installed():
    names: dict = {}
    torch_there = f"{PACKAGE.parent}/.venv/structlin/lib/torch/functional.py"
    for file in (torch_there, f"{PACKAGE}/_layer/linear.py"):
        exec(compile(f"def work_{len(names)}(): pass", file, "exec"), names)
    works = [work for name, work in names.items() if name.startswith("work")]
    other, own = (count_calls(work) for work in works)
    assert (other, own) == (0, 1)
