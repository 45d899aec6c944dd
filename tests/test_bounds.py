"""The house stays small enough for one owner. A bound here may only go down."""

import ast
import inspect
from statistics import median, quantiles

import pytest

from tests.test_house import FILES, PACKAGE, graph_of_imports
from tests.test_public import OBJECTS

ROOT = PACKAGE.parent


@pytest.mark.parametrize(
    ("folder", "endings", "most"),
    [
        ("structlin", {".py"}, 15_000),
        ("structlin", {".cpp", ".h"}, 2_300),
        ("benchmarks", {".py"}, 11_000),
        ("tests", {".py"}, 22_000),
    ],
)
def test_a_folder_has_so_many_lines_at_most(folder, endings, most):
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in endings]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert most / 2 < lines <= most


def test_the_package_has_16_entries_at_its_top_level():
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 16


def test_imports_have_20_floors_at_most():
    graph, floors = graph_of_imports(), dict[tuple[str, ...], int]()

    def floor_of(module: tuple[str, ...]) -> int:
        if module not in floors:
            below = [each for each in graph[module] if each != module[: len(each)]]
            floors[module] = 1 + max(map(floor_of, below), default=0)
        return floors[module]

    assert 10 < max(map(floor_of, graph)) <= 20


def test_a_public_function_has_14_arguments_at_most():
    counts = {
        name: len(inspect.signature(value).parameters)
        for name, value in OBJECTS.items()
        if callable(value)
    }
    assert 10 < max(counts.values()) <= 14, counts


def test_the_kept_results_have_4_megabytes_at_most():
    kept = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in kept) <= 4e6


def count_code(function: ast.FunctionDef, lines: list[str]) -> int:
    """The lines of a function but for its docstring, comments and blank ones."""
    first = function.body[1 if ast.get_docstring(function) is not None else 0 :]
    start = first[0].lineno if first else function.end_lineno
    head = range(function.lineno - 1, function.body[0].lineno - 1)
    numbers = {*head, *range(start - 1, function.end_lineno)}
    return sum(not lines[n].lstrip().startswith(("#", "\n")) for n in numbers)


def test_functions_are_short():
    sizes = []
    for path, tree in FILES.items():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        sizes += [count_code(function, lines) for function in functions]
    assert median(sizes) <= 6
    assert quantiles(sizes, n=10)[-1] <= 20
    assert max(sizes) <= 72


def test_lines_are_saved_by_removing_and_not_by_packing():
    """The shares of blank lines and of docstrings stay."""
    lines = [line for path in FILES for line in path.read_text(encoding="utf-8").splitlines()]
    docstrings = [
        node.body[0]
        for tree in FILES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
    ]
    told = sum(text.end_lineno - text.lineno + 1 for text in docstrings)
    assert sum(not line.strip() for line in lines) >= 0.16 * len(lines)
    assert told >= 0.2 * len(lines)
