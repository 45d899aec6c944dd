"""`python -m tests.engine_variants` runs the kernel's tests with the engine built in other ways.

    sanitized      AddressSanitizer finds reads and writes outside of memory,
                   UndefinedBehaviorSanitizer what C++ leaves undefined (g++, libasan, libubsan)
    pairs          no matrix unit: bfloat16 in pairs
    x86-64-v3      AVX2, no AVX-512; bfloat16 is widened
    x86-64-v2      SSE alone
    clang          the other compiler

Each stops at its first finding. Not one of the tests: they take minutes. `--only NAME` runs one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

PROGRAM = """
import sys
import pytest
from structlin._kernels import engine
flags = sys.argv.pop(1).split()
engine.FLAGS = tuple(flag for flag in engine.FLAGS if not flag.startswith("-march"))
engine.FLAGS = (*engine.FLAGS, *flags)
engine.SECONDS = 600  # sanitizers take long to compile
assert engine.load(), engine._state
print(engine._state.says)
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
TESTS = [
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_engine.py",
    "tests/kernels/test_polar.py",
    "-k",
    "not compiled and not build and not library and not fork and not without_it",
]


class Variant(NamedTuple):
    """A compiler and what is added to its flags."""

    flags: str
    compiler: str = "g++"
    preload: tuple[str, ...] = ()


VARIANTS = {
    "sanitized": Variant(
        "-march=native -O1 -g -fno-omit-frame-pointer "
        "-fsanitize=address,undefined -fno-sanitize-recover=all",
        preload=("libasan.so", "libubsan.so"),
    ),
    "pairs": Variant("-march=native -mno-amx-tile"),
    "x86-64-v3": Variant("-march=x86-64-v3"),
    "x86-64-v2": Variant("-march=x86-64-v2"),
    "clang": Variant("-march=native", compiler="clang++"),
}


def find_library(name: str) -> str:
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(variant: Variant) -> int:
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "CXX": variant.compiler,
            "LD_PRELOAD": " ".join(map(find_library, variant.preload)),
            # leaks are Python's own; of what is freed little is held back, which looks like a loss
            "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16",
            "STRUCTLIN_CACHE": cache,
        }
        command = [sys.executable, "-c", PROGRAM, variant.flags, *TESTS]
        return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=tuple(VARIANTS))
    options = parser.parse_args()
    chosen = [options.only] if options.only else list(VARIANTS)
    failed = []
    for name in chosen:
        print(f"== {name}", flush=True)
        if run(VARIANTS[name]):
            failed.append(name)
    print(f"failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
