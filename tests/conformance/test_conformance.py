"""structlin differs from what torch's own conformance tests want where that is expected alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conformance import __main__ as program

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", "tests.conformance", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == program.SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("suite", program.SUITES)
def test_what_the_wheel_of_torch_ships_finds_the_differences_that_are_expected(suite):
    run(suite)


@pytest.mark.slow
def test_the_files_of_a_checkout_of_pytorch_find_the_differences_that_are_expected():
    if not (folder := os.environ.get("STRUCTLIN_PYTORCH")):
        pytest.skip("STRUCTLIN_PYTORCH names no checkout of PyTorch")
    run("--pytorch", folder)


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("b", "1 differ, 0 unexpectedly"),
        ("bc", "c is a new difference\nwhy"),
        ("", "'b*' is expected to differ and does not: reason"),
    ],
)
def test_a_new_difference_fails_and_so_does_one_that_is_gone(failing, said, monkeypatch, capsys):
    monkeypatch.setitem(program.EXPECTED, "suite", {"b*": "reason"})
    good = program.compare("suite", [*"abc"], dict.fromkeys(failing, "why"))
    assert good == (failing == "b")
    assert said in capsys.readouterr().out


def test_a_torch_that_lacks_a_name_is_skipped_with_the_reason(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.common_modules", None)
    monkeypatch.setattr(sys, "argv", ["conformance", "modules"])
    assert program.main() == program.SKIPPED
    assert f"modules cannot be run with torch {torch.__version__}: " in capsys.readouterr().out
