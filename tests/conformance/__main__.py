"""torch's own conformance tests on structlin: `python -m tests.conformance [modules ...]`.

What torch's wheel ships (`torch.testing._internal`) needs expecttest alone. --pytorch FOLDER also
runs test_modules.py and test_optim.py of a checkout of PyTorch at the version that is installed.
"""

import argparse
import importlib
import sys
import traceback
import unittest
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from .expected import EXPECTED

SUITES = ("modules", "optimizers", "operators")
FILES = {"test_modules.py": "modules", "test_optim.py": "optimizers"}
CLASSES = ("TestModuleCPU", "TestOptimRenewedCPU")  # what torch makes of those files
SKIPPED = 77


def run_cases(cases):
    """The names, and what the failures say."""
    names, failures = [], {}
    for name, case in cases:
        names.append(name)
        torch.manual_seed(0)
        try:
            case()
        except (Exception, pytest.fail.Exception) as error:
            failures[name] = "".join(traceback.format_exception(error)[-3:])
    return names, failures


def run_file(path):
    """The same of a file of a checkout, over what a suite describes."""
    sys.path.insert(0, str(path.parent))
    names = {"__name__": path.stem}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)
    classes = [names[name] for name in CLASSES if name in names]
    tests = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, classes))
    every = [test.id().rpartition(".")[2] for each in tests for test in each]
    result = unittest.TextTestRunner(warnings="ignore").run(tests)
    told = [*result.failures, *result.errors]
    return every, {test.id().rpartition(".")[2]: text for test, text in told}


def compare(suite, names, failures):
    """Say what differs and is not expected, and what is expected and does not differ."""
    expected = EXPECTED[suite]
    met = {name: [key for key in expected if fnmatchcase(name, key)] for name in failures}
    unknown = [name for name, keys in met.items() if not keys]
    gone = [key for key in expected if not any(key in keys for keys in met.values())]
    for name in unknown:
        print(f"\n{suite}: {name} is a new difference\n{failures[name]}")
    for key in gone:
        print(f"\n{suite}: {key!r} is expected to differ and does not: {expected[key]}")
    print(f"{suite}: {len(names)} tests, {len(failures)} differ, {len(unknown)} unexpectedly")
    return bool(names) and not unknown and not gone


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; all, if none is named")
    parser.add_argument("--pytorch", type=Path, help="a checkout of PyTorch")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    asked = [(suite, suite) for suite in options.suites or ([] if options.pytorch else SUITES)]
    for name, suite in asked + (list(FILES.items()) if options.pytorch else []):
        try:
            module = importlib.import_module(f"{__package__}.{suite}")
        except (ImportError, AttributeError) as error:
            print(f"{name} cannot be run with torch {torch.__version__}: {error}")
            continue
        if name == suite:
            results.append(compare(name, *run_cases(module.cases())))
        else:
            module.describe()
            results.append(compare(name, *run_file(options.pytorch / "test" / name)))
    return SKIPPED if not results else 1 - all(results)


if __name__ == "__main__":
    sys.exit(main())
