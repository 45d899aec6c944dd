"""Breaks one operator at a time in the library and sees which test notices.

    python -m tests.mutate --mutants 100 --seed 0    # kept in benchmarks/results/mutation_0.json
    python -m tests.mutate --mutants 20 --only structlin/_product.py --results ""

Each mutant is one arithmetic operator, comparison, boolean, or number, changed in a copy of the
package; the checkout is not touched. First all tests run once under coverage: how long each takes,
and which functions it enters (kept in out/mutation_map.json; `--map` makes it anew). A mutant meets
the tests that enter its function and those nearest to its file, the quickest first, until one
fails. Tests run in forks of one process that has imported what is not ours. A run that was stopped
goes on where it was; survivors are tried again.
"""

import argparse
import ast
import faulthandler
import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MAP = ROOT / "out" / "mutation_map.json"
RESULTS = ROOT / "benchmarks" / "results"
IMPORTS = (  # what is imported once, before the forks; what is not installed is left out
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "einops",
    "numpy",
    "matplotlib.pyplot",
    "hypothesis",
    "hypothesis.stateful",
    "safetensors.torch",
    "cola",
    "rich.table",
    "transformers",
    "transformers.quantizers.auto",
    "onnx",
    "sklearn",
)
LAYER = ("test_structure", "test_families", "test_oracles", "test_linear", "test_kernels")
NEAREST: dict[str, tuple[str, ...]] = {  # file or folder -> files or folders of tests
    "_structure.py": LAYER,
    "_product.py": LAYER,
    "_linear.py": (*LAYER, "test_traps"),
    "_families.py": LAYER,
    "_widths.py": LAYER,
    "_weight.py": ("test_families",),
    "scaling.py": ("test_scaling", "test_groups"),
    "duality.py": ("test_duality", "test_muon"),
    "_projection": ("test_projection", "test_budget"),
    "_compress": ("compress",),
    "_checkpoint.py": ("test_checkpoint", "faults", "test_hf"),
    "_files.py": ("test_checkpoint", "faults"),
    "_state.py": ("test_checkpoint", "test_hf"),
    "_sharding.py": ("test_sharding", "test_muon_distributed"),
    "optim": ("optim",),
}
LEFT_OUT = ("tests/benchmarks", "tests/examples", "tests/test_readme.py")  # they test scripts
QUICK = 0.3  # seconds: tests of the nearest files that end sooner run first, by themselves
PATIENCE = 150.0  # seconds that a test may take longer than it did; more is a timeout
MEMORY = 14 << 30  # bytes of address space, or a wrong size could take the machine's memory
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
EQUIVALENT = {  # name of a mutant -> why no test can notice it
    "structlin/_compress/allocation.py:allocate: return [curve.sizes[m] for curve, m in "
    "zip(curves, found, strict=True)]: True -> False": (
        "an assertion: both have an entry for each curve"
    ),
    "structlin/_compress/distill.py:_repeat: while done < steps:: Lt -> LtE": (
        "the loop returns where it reaches `steps`"
    ),
    "structlin/_compress/distill.py:distill: judged = {steps * n // JUDGEMENTS for n in range(1, "
    "JUDGEMENTS + 1)}: 1 -> 2 (2)": "no step comes after the last",
    "structlin/optim/_transfer.py:: decay: float = 1.0: 1.0 -> 2.0": (
        "what is neither a matrix nor an embedding does not decay"
    ),
    "structlin/_linear.py:StructuredLinear.set_cores_: for n, (own, core, std) in "
    "enumerate(zip(self.cores, cores, self.stds, strict=True)):: True -> False": (
        "an assertion: `check_cores` has compared the numbers"
    ),
    "structlin/_projection/alternating.py:_blockwise: ridge = 10 * torch.finfo(x.dtype).eps * "
    "(mean_diagonal(grams).mean().item() or 1.0): 1.0 -> 2.0": (
        "where all inputs are zero, any positive ridge gives the same matrix"
    ),
}


class Mutant(NamedTuple):
    """One node of a file, changed."""

    file: str  #: relative to the checkout
    function: str  #: that has the node; empty outside of functions
    line: int
    text: str  #: of the line
    change: str
    count: int  #: of equal changes on equal lines of the function before it
    source: str  #: of the whole file, changed

    @property
    def name(self) -> str:
        """What stays where other parts of the file are edited."""
        where = f"{self.file}:{self.function}: {self.text}: {self.change}"
        return where + (f" ({self.count + 1})" if self.count else "")


# ---- mutants -------------------------------------------------------------------------------------


def find_mutants(file: Path) -> Iterator[Mutant]:
    """Every mutant of a file. Annotations, messages of errors and f-strings are left alone."""
    source = file.read_text()
    lines, tree = source.splitlines(), ast.parse(source)
    functions = find_functions(tree)
    skipped = set[ast.AST]()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.AnnAssign | ast.arg):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.Raise | ast.JoinedStr):
            parts = [node]
        for part in parts:
            skipped.update(ast.walk(part) if part else ())
    counts = Counter[tuple[str, str, str]]()
    for node in ast.walk(tree):
        if node in skipped or not (changed := change_node(node)):
            continue
        change, replacement = changed
        text, function = lines[node.lineno - 1].strip(), functions.get(node.lineno, "")  # type: ignore[attr-defined]
        key = (function, text, change)
        yield Mutant(
            str(file.relative_to(ROOT)),
            function,
            node.lineno,  # type: ignore[attr-defined]
            text,
            change,
            counts[key],
            replace_node(source, node, replacement),
        )
        counts[key] += 1


def find_functions(tree: ast.AST) -> dict[int, str]:
    """Line -> the innermost function that has it, with the classes and functions around it."""
    found = dict[int, str]()

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".removeprefix(".")
                if not isinstance(child, ast.ClassDef):
                    last = child.end_lineno or child.lineno
                    found.update(dict.fromkeys(range(child.lineno, last + 1), inner))
                visit(child, inner)
            else:
                visit(child, name)

    visit(tree, "")
    return found


def change_node(node: ast.AST) -> tuple[str, str] | None:
    """What is changed in a node, in words, and the changed node's source; None for other nodes."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        old, node.op = node.op, SWAPS[type(node.op)]()  # type: ignore[assignment]
        change, source = _name_change(old, node.op), ast.unparse(node)
        node.op = old  # type: ignore[assignment]
        return change, source if isinstance(node, ast.AugAssign) else f"({source})"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        first = node.ops[0]
        node.ops[0] = SWAPS[type(first)]()  # type: ignore[assignment]
        change, source = _name_change(first, node.ops[0]), ast.unparse(node)
        node.ops[0] = first
        return change, f"({source})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return f"{type(node.op).__name__} removed", f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
        return f"{node.value!r} -> {value!r}", f"({value!r})"
    return None


def _name_change(old: ast.AST, new: ast.AST) -> str:
    return f"{type(old).__name__} -> {type(new).__name__}"


def replace_node(source: str, node: Any, replacement: str) -> str:
    """`source` with the text of one node replaced; every other character stays."""
    lines = source.encode().splitlines(keepends=True)  # ast counts columns in bytes
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + replacement.encode() + after).decode()


def choose_mutants(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them at random. An edit of the package changes the choice of few others."""

    def draw(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    return sorted(mutants, key=draw)[:count]


# ---- running tests -------------------------------------------------------------------------------


@dataclass
class Report:
    """What one run of tests has found; a file, so that it outlives the process that writes it."""

    path: Path

    def write(self, **content: Any) -> None:
        self.path.write_text(json.dumps(content))

    def read(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.path.read_text())
        return content


class Order:
    """Has pytest run `wanted` alone, in that order, after tests that the map does not know, and
    report each; a test that does not end in time ends the process."""

    def __init__(self, report: Report, wanted: Sequence[str], tests: Mapping[str, float]) -> None:
        self.report, self.tests = report, tests
        self.places = {test: n for n, test in enumerate(wanted)}
        self.run = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        known = [item for item in items if item.nodeid in self.places]
        new = [item for item in items if item.nodeid not in self.tests]
        items[:] = [*new, *sorted(known, key=lambda item: self.places[item.nodeid])]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.report.write(failed=f"import of {report.nodeid}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.run += 1
        self.report.write(running=nodeid)
        limit = PATIENCE + 10 * self.tests.get(nodeid, 0.0)
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.report.write(failed=report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        faulthandler.cancel_dump_traceback_later()
        if "failed" not in self.report.read():
            self.report.write(passed=self.run, status=int(exitstatus))


class Times:
    """Notes how long each test takes, and which do not pass."""

    def __init__(self) -> None:
        self.seconds = dict[str, float]()
        self.failed = set[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def copy_checkout(folder: Path) -> None:
    ignored = shutil.ignore_patterns(".*", "results", "out", "__pycache__")
    shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=ignored)


def run_pytest(folder: Path, arguments: Sequence[str], plugins: Sequence[object]) -> int:
    """Run tests of the copy in `folder` in this process, which must be a fork."""
    os.chdir(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    os.environ.update(PYTHONPATH=str(folder), OMP_NUM_THREADS="1", MPLBACKEND="Agg")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    log = os.open(folder / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # as hypothesis is, before pytest starts
    options = ("-q", "-p", "no:cacheprovider", "-W", imported, "--rootdir", str(folder))
    return int(pytest.main([*options, *arguments], plugins=list(plugins)))


def start(function: Any, *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


# ---- which tests enter a function ----------------------------------------------------------------


def make_map() -> None:
    """Run every test once and keep how long it takes and which functions it enters, in `MAP`."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as name:
        folder, times = Path(name).resolve(), Times()
        copy_checkout(folder)
        os.environ["COVERAGE_FILE"] = str(folder / ".coverage")
        coverage = ("--cov=structlin", "--cov-context=test", "--cov-report=")
        run_pytest(folder, [*coverage, *(f"--ignore={path}" for path in LEFT_OUT)], [times])
        data = CoverageData(str(folder / ".coverage"))
        data.read()
        names = [test for test in times.seconds if test not in times.failed]
        numbers, enters = {test: n for n, test in enumerate(names)}, dict[str, set[int]]()
        for measured in data.measured_files():
            path = Path(measured)
            functions = find_functions(ast.parse(path.read_text()))
            for line, contexts in data.contexts_by_lineno(measured).items():
                if line not in functions:
                    continue
                key = f"{path.relative_to(folder)}:{functions[line]}"
                tests = {context.rpartition("|")[0] for context in contexts}
                enters.setdefault(key, set()).update(numbers[t] for t in tests if t in numbers)
    MAP.parent.mkdir(exist_ok=True)
    kept = {key: sorted(tests) for key, tests in enters.items()}
    seconds = {test: round(times.seconds[test], 4) for test in names}
    content = {"seconds": seconds, "enters": kept, "failed": sorted(times.failed)}
    MAP.write_text(json.dumps(content))


class TestMap:
    """What `make_map` has kept."""

    __test__ = False

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.seconds: dict[str, float] = content["seconds"]
        self.known: dict[str, float] = {**dict.fromkeys(content["failed"], 0.0), **self.seconds}
        self.enters: dict[str, list[int]] = content["enters"]
        self.names = list(self.seconds)

    def choose_tests(self, mutant: Mutant, budget: float) -> tuple[list[str], list[str], int]:
        """The quick ones of the nearest files, then all the others, as far as they take `budget`
        seconds; and how many are left out."""
        parts = Path(mutant.file).parts
        near = next(tests for key, tests in NEAREST.items() if key in parts)
        entering = {self.names[n] for n in self.enters.get(f"{mutant.file}:{mutant.function}", ())}

        def is_near(test: str) -> bool:
            path = Path(test.partition("::")[0])
            return path.stem in near or path.parent.name in near or str(path) == mutant.file

        wanted = [test for test in self.names if test in entering or is_near(test)]
        wanted.sort(key=lambda test: (test not in entering, self.seconds[test]))
        chosen, total = [], 0.0
        for test in wanted:
            total += self.seconds[test]
            if total < budget:
                chosen.append(test)
        quick = [test for test in chosen if is_near(test) and self.seconds[test] < QUICK]
        known = {test.partition("::")[0] for test in self.known}
        paths = (str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
        quick += [path for path in paths if is_near(path) and path not in known]  # new files
        others = [test for test in chosen if test not in set(quick)]
        return quick, others, len(wanted) - len(chosen)


# ---- trying mutants ------------------------------------------------------------------------------


def try_mutant(
    folder: Path, report: Report, mutant: Mutant, tests: TestMap, batches: Sequence[Sequence[str]]
) -> None:
    """Run the tests of `batches` on a mutant, in the copy in `folder`, until one fails."""
    file = folder / mutant.file
    original = file.read_text()
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
    file.write_text(mutant.source)
    passed = 0
    for batch in batches:
        files = sorted({test.partition("::")[0] for test in batch})
        if not files:
            continue
        report.write(running=f"import of {files[0]}")
        process = start(run_pytest, folder, ["-x", *files], [Order(report, batch, tests.known)])
        process.join()
        found = report.read()
        if "running" in found:
            report.write(**found, exit=process.exitcode)
        if "passed" not in found or found["status"] != 0:
            break
        passed += found["passed"]
    else:
        report.write(passed=passed)
    file.write_text(original)


def require_new_tests_pass(folder: Path, tests: TestMap) -> None:
    """Run the tests that the map does not know on the package as it is: they come first."""
    report = Report(folder / "report.json")
    report.write(running="import of the tests")
    everything = ["-x", "tests", "structlin", *(f"--ignore={path}" for path in LEFT_OUT)]
    start(run_pytest, folder, everything, [Order(report, [], tests.known)]).join()
    found = report.read()
    if "passed" not in found:
        raise RuntimeError(f"a test fails without any mutant: {found}")
    print(f"# {found['passed']} tests are new since the map was made", flush=True)


def judge(found: Mapping[str, Any]) -> tuple[str, str]:
    """What the report of a mutant says: the outcome, and the test that noticed."""
    if "failed" in found:
        return "caught", str(found["failed"])
    if "running" in found:  # no result: killed by a signal, or ended for taking too long
        return "crash" if found["exit"] < 0 else "timeout", str(found["running"])
    if "status" in found:
        raise RuntimeError(f"pytest ended with status {found['status']} and no test failed")
    return "survived", ""


def try_all(
    mutants: Sequence[Mutant], tests: TestMap, workers: int, budget: float
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Each mutant and what came of it, in the order in which they end."""
    with tempfile.TemporaryDirectory() as name:
        free, running = [Path(name).resolve() / str(n) for n in range(workers)], dict[Any, Any]()
        for folder in free:
            copy_checkout(folder)  # now: the checkout may be edited while this runs
        require_new_tests_pass(free[0], tests)
        waiting = list(mutants)
        while waiting or running:
            while waiting and free:
                mutant, folder = waiting.pop(0), free.pop()
                *batches, left_out = tests.choose_tests(mutant, budget)
                report = Report(folder / "report.json")
                process = start(try_mutant, folder, report, mutant, tests, batches)
                begun = time.perf_counter()
                running[process.sentinel] = mutant, folder, report, process, begun, left_out
            for sentinel in wait(list(running)):
                mutant, folder, report, process, begun, left_out = running.pop(sentinel)
                process.join()
                free.append(folder)
                found = report.read()
                outcome, by = judge(found)
                yield (
                    mutant,
                    {
                        "mutant": mutant.name,
                        "line": mutant.line,
                        "outcome": outcome,
                        "by": by,
                        "passed": found.get("passed", 0),
                        "left_out": left_out,
                        "seconds": round(time.perf_counter() - begun, 1),
                    },
                )


def count_outcomes(results: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts = Counter(result["outcome"] for result in results)
    counts["equivalent"] = sum(1 for result in results if result.get("equivalent"))
    return dict(counts)


def save_results(path: Path, **content: Any) -> None:
    from benchmarks.harness.record import save_json

    save_json(path, **content)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=Path, help="one file, or a folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=240, help="seconds of tests for a mutant")
    parser.add_argument("--results", help="the file kept; '' keeps none")
    parser.add_argument("--map", action="store_true", help="run all tests for the map anew")
    options = parser.parse_args(argv)
    for library in IMPORTS:
        try:
            importlib.import_module(library)
        except ImportError:
            print(f"# {library} is not installed")
    if options.map or not MAP.exists():
        print("# all tests run once, under coverage", flush=True)
        start(make_map).join()
    content = json.loads(MAP.read_text())
    tests = TestMap(content)
    print(f"# {len(tests.names)} tests, {sum(tests.seconds.values()):.0f} s", flush=True)
    for test in content["failed"]:
        print(f"# left out, for it fails or is skipped as it is: {test}")
    package = ROOT / "structlin"
    files = sorted(
        path
        for path in package.rglob("*.py")
        if not NEAREST.keys().isdisjoint(path.relative_to(package).parts)
    )
    if options.only is not None:
        files = [file for file in files if (ROOT / options.only) in (file, *file.parents)]
    mutants = [mutant for file in files for mutant in find_mutants(file)]
    chosen = choose_mutants(mutants, options.mutants, options.seed)
    kept = RESULTS / f"mutation_{options.seed}.json"
    path = kept if options.results is None else Path(options.results) if options.results else None
    known = dict[str, dict[str, Any]]()
    if path is not None and path.exists():
        known = {
            result["mutant"]: result
            for result in json.loads(path.read_text())["results"]
            if result["outcome"] != "survived"
        }
    results = {mutant.name: known[mutant.name] for mutant in chosen if mutant.name in known}
    begun = time.perf_counter()
    print(
        f"# {len(chosen)} of {len(mutants)} mutants of {len(files)} files, seed {options.seed}; "
        f"{len(results)} are known",
        flush=True,
    )
    untried = [mutant for mutant in chosen if mutant.name not in results]
    for mutant, result in try_all(untried, tests, options.workers, options.budget):
        if reason := EQUIVALENT.get(mutant.name):
            result["equivalent"] = reason
        results[mutant.name] = result
        print(
            f"{result['outcome']}: {mutant.file}:{mutant.line}: {mutant.change}    {mutant.text}"
            f"    {result['by']} {result['seconds']} s",
            flush=True,
        )
        if path is not None:
            ordered = [results[each.name] for each in chosen if each.name in results]
            counts = count_outcomes(ordered)
            start(_save, path, options.seed, len(mutants), counts, ordered).join()
    counts = count_outcomes(results.values())
    print(f"# {len(results)} mutants, {time.perf_counter() - begun:.0f} s: {counts}")


def _save(
    path: Path, seed: int, mutants: int, counts: dict[str, int], results: list[dict[str, Any]]
) -> None:
    """In a fork: what records the machine imports the package, which mutants must import anew."""
    save_results(path, seed=seed, mutants=mutants, counts=counts, results=results)


if __name__ == "__main__":
    main()
