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

TESTS = [
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_engine.py",
    "tests/kernels/test_int8.py",
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
        "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
        preload=("libasan.so", "libubsan.so"),
    ),
    "pairs": Variant("-mno-amx-tile"),
    "x86-64-v3": Variant("-march=x86-64-v3"),
    "x86-64-v2": Variant("-march=x86-64-v2"),
    "clang": Variant("", compiler="clang++"),
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
            "STRUCTLIN_CXXFLAGS": variant.flags,
            "LD_PRELOAD": " ".join(map(find_library, variant.preload)),
            # leaks are Python's own; of what is freed little is held back, which looks like a loss
            "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16",
            "STRUCTLIN_CACHE": cache,
        }
        build = [sys.executable, "-m", "structlin._engine.cpu.build"]
        tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
        return (
            subprocess.run(build, env=environment, check=False).returncode
            or subprocess.run(tests, env=environment, check=False).returncode
        )


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
