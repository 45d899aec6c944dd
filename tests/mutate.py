"""Breaks one operator at a time in the library and sees which test notices.

    python -m tests.mutate --mutants 100 --seed 0       # those that no test noticed; an hour
    python -m tests.mutate --only structlin/_product.py --mutants 20

Each mutant is one arithmetic operator, comparison, boolean, or number, changed in a copy of the
package; the tests nearest to that file run on it until one fails. The checkout is not touched.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LAYER = ("test_structure", "test_families", "test_oracles", "test_linear", "test_kernels")
NEAREST: dict[str, tuple[str, ...]] = {  # file or folder -> tests, the quickest to notice first
    "_structure.py": LAYER,
    "_product.py": LAYER,
    "_linear.py": (*LAYER, "test_traps"),
    "_families.py": LAYER,
    "_widths.py": LAYER,
    "_weight.py": ("test_families",),
    "scaling.py": ("test_scaling", "test_families", "test_optim"),
    "duality.py": ("test_duality", "test_muon"),
    "_projection": ("test_projection", "test_projected", "test_budget"),
    "_checkpoint.py": ("test_checkpoint", "faults", "test_hf"),
    "_files.py": ("test_checkpoint", "faults"),
    "_state.py": ("test_checkpoint", "test_hf"),
    "optim": ("test_optim", "test_muon", "test_normed", "test_muon_distributed"),
}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutant(NamedTuple):
    """Node number `node` of a file, in the order of `ast.walk`, changed."""

    file: Path
    line: int
    node: int
    change: str


def find_mutants(file: Path) -> Iterator[Mutant]:
    """Every mutant of a file. Annotations, messages of errors and type checks are left alone."""
    tree = ast.parse(file.read_text())
    skipped = set[int]()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.AnnAssign | ast.arg):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.Raise | ast.JoinedStr):
            parts = [node]
        for part in parts:
            skipped.update(
                id(inner) for inner in ast.walk(part) if part is not None
            ) if part else None
    for n, node in enumerate(ast.walk(tree)):
        if id(node) not in skipped and (change := change_of(node)):
            yield Mutant(file, getattr(node, "lineno", 0), n, change)


def change_of(node: ast.AST) -> str:
    """What `mutate` would do to a node, in words; nothing if it would do nothing."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        return f"{type(node.op).__name__} -> {SWAPS[type(node.op)].__name__}"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        return f"{type(node.ops[0]).__name__} -> {SWAPS[type(node.ops[0])].__name__}"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return f"{type(node.op).__name__} removed"
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        return f"{node.value!r} -> {changed_constant(node.value)!r}"
    return ""


def changed_constant(value: bool | float) -> bool | float:
    return not value if isinstance(value, bool) else value + 1


def mutate(mutant: Mutant) -> str:
    """The source of the mutant's file."""
    tree = ast.parse(mutant.file.read_text())
    (node,) = (node for n, node in enumerate(ast.walk(tree)) if n == mutant.node)
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = changed_constant(node.value)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp):
        inner = ast.unparse(node.operand)
        for parent in ast.walk(tree):
            for field, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, field, ast.parse(inner, mode="eval").body)
                elif isinstance(value, list) and node in value:
                    value[value.index(node)] = ast.parse(inner, mode="eval").body
    return ast.unparse(tree)


def nearest_tests(file: Path) -> list[str]:
    """The tests of a file, as pytest takes them; its doctests too."""
    parts = file.relative_to(ROOT / "structlin").parts
    names = next(tests for key, tests in NEAREST.items() if key in parts)
    everything = list((ROOT / "tests").rglob("test_*.py"))
    found = [
        str(path) for name in names for path in everything if name in (path.stem, path.parent.name)
    ]
    if not found:
        raise ValueError(f"{file}: no test is called {' or '.join(names)}")
    return found


def is_caught(mutant: Mutant, seconds: float) -> bool:
    """Whether a test fails on the mutant, or does not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            ROOT,
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns(".*", "results", "__pycache__"),
        )
        (Path(folder) / mutant.file.relative_to(ROOT)).write_text(mutate(mutant))
        tests = [
            str(Path(folder) / Path(test).relative_to(ROOT)) for test in nearest_tests(mutant.file)
        ]
        doctest = str(Path(folder) / mutant.file.relative_to(ROOT))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            doctest,
            *tests,
        ]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return True
        if run.returncode == 5:
            raise RuntimeError(f"no test ran: {' '.join(command)}")
        return run.returncode != 0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=Path, help="one file, or a folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=400, help="after which a mutant counts as caught"
    )
    options = parser.parse_args(argv)
    package = ROOT / "structlin"
    files = sorted(
        path
        for key in NEAREST
        for path in ([package / key] if key.endswith(".py") else (package / key).glob("*.py"))
    )
    if options.only is not None:
        files = [file for file in files if (ROOT / options.only) in (file, *file.parents)]
    mutants = [mutant for file in files for mutant in find_mutants(file)]
    chosen = random.Random(options.seed).sample(mutants, min(options.mutants, len(mutants)))
    print(
        f"# {len(chosen)} of {len(mutants)} mutants of {len(files)} files, seed {options.seed}",
        flush=True,
    )
    started = time.perf_counter()
    survivors = []
    with ThreadPoolExecutor(options.workers) as pool:
        for n, (mutant, caught) in enumerate(
            zip(
                chosen,
                pool.map(lambda mutant: is_caught(mutant, options.seconds), chosen),
                strict=True,
            ),
            start=1,
        ):
            if not caught:
                survivors.append(mutant)
                line = mutant.file.read_text().splitlines()[mutant.line - 1].strip()
                print(
                    f"{mutant.file.relative_to(ROOT)}:{mutant.line}: {mutant.change}    {line}",
                    flush=True,
                )
            if n % 10 == 0:
                print(
                    f"# {n} tried, {n - len(survivors)} caught, "
                    f"{time.perf_counter() - started:.0f} s",
                    flush=True,
                )
    print(f"# caught {len(chosen) - len(survivors)} of {len(chosen)}")


if __name__ == "__main__":
    main()
