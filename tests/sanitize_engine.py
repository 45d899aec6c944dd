"""`python -m tests.sanitize_engine` runs the kernel's tests with the engine built under two
sanitizers of gcc.

AddressSanitizer finds reads and writes outside of memory, UndefinedBehaviorSanitizer what C++
leaves undefined. Both stop the tests at the first finding. Needs g++ and its libasan and libubsan.
Not one of the tests: it takes minutes.
"""

import os
import subprocess
import sys
import tempfile

FLAGS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
PROGRAM = f"""
import sys
import pytest
from structlin._kernels import engine
engine.FLAGS = (*engine.FLAGS, *{FLAGS.split()!r})
assert engine.load(), engine._state
print(engine._state.says)
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
TESTS = [
    "tests/kernels/test_engine.py",
    "-k",
    "not compiled and not build and not library and not fork and not without_it",
]


def find_library(name: str) -> str:
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    where = [find_library(name) for name in ("libasan.so", "libubsan.so")]
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(where),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
            "STRUCTLIN_CACHE": cache,
        }
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, *TESTS], env=environment, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
