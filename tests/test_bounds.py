"""The house stays small enough for one owner: its imports, functions and kept results."""

import ast

from tests.test_house import FILES, PACKAGE, graph_of_imports

ROOT = PACKAGE.parent


def test_imports_have_20_floors_at_most():
    graph, floors = graph_of_imports(), dict[tuple[str, ...], int]()

    def floor_of(module: tuple[str, ...]) -> int:
        if module not in floors:
            below = [each for each in graph[module] if each != module[: len(each)]]
            floors[module] = 1 + max(map(floor_of, below), default=0)
        return floors[module]

    assert 10 < max(map(floor_of, graph)) <= 20


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


def test_a_function_has_72_lines_of_code_at_most():
    sizes = []
    for path, tree in FILES.items():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        sizes += [count_code(function, lines) for function in functions]
    assert 30 < max(sizes) <= 72
