"""Builds a release into dist/ and tests its wheel in bare environments: `make release`.

    python -m tools.release                          this Python and its torch
    python -m tools.release python3.10 python3.13    each of these, with the newest torch

It needs Linux on x86-64, a C++ compiler, and the packages of `structlin[dev]`. The wheel has the
engine inside and the tag of the oldest glibc that its libraries allow. Each environment has no
compiler: the wheel is installed, trained and tested there. Nothing is dated, tagged or uploaded.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import structlin
from structlin._engine.cpu.build import VARIANTS

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/kernels/test_engine.py",
    "tests/kernels/test_build.py",
    "tests/kernels/test_wheel.py",
)
OF_TORCH = ("--exclude", "libtorch_cpu.so", "--exclude", "libc10.so")  # the user's torch has them
TRAIN = """
import tempfile, torch, structlin
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
model = structlin.convert(model, structlin.BTT(rank=1))
optimizer = structlin.optim.AdamW(model, lr=1e-2)
x, y = torch.randn(512, 64), torch.randn(512, 64)
losses = []
for _ in range(20):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.98 * losses[0], losses
torch.testing.assert_close(model[0](x), x @ model[0].to_dense().T + model[0].bias)
with tempfile.TemporaryDirectory() as folder:
    structlin.save(model, folder)
structlin.show_config()
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="(default: this one)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="(default: dist)")
    options = parser.parse_args()
    wheel = build(options.out.resolve())
    for python in options.pythons or [sys.executable]:
        with tempfile.TemporaryDirectory(prefix="release-") as folder:
            print(f"{python}: {check(python, wheel, Path(folder))}", flush=True)


def build(folder: Path) -> Path:
    """The wheel, which it puts into `folder` beside the sources, both as PyPI takes them.

    Raises:
        RuntimeError: the engine is not in the wheel.
    """
    with tempfile.TemporaryDirectory() as made:
        run(sys.executable, "-m", "hatchling", "build", "-d", made, cwd=ROOT)
        (built,), (sources,) = Path(made).glob("*.whl"), Path(made).glob("*.tar.gz")
        libraries = [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
        if len(libraries) != len(VARIANTS):
            raise RuntimeError(f"{built.name} has the libraries {libraries}; {VARIANTS} are built")
        run(sys.executable, "-m", "auditwheel", "repair", *OF_TORCH, "-w", str(folder), str(built))
        shutil.copy(sources, folder)
    (wheel,) = folder.glob(f"structlin-{structlin.__version__}-*manylinux*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(folder / sources.name))
    return wheel


def check(python: str, wheel: Path, folder: Path) -> str:
    """Install, train and test in a new environment without a compiler; what the tests say."""
    run(python, "-m", "venv", "env", cwd=folder)
    own = str(folder / "env/bin/python")
    hidden = {"CXX", "PYTHONPATH", "VIRTUAL_ENV", "STRUCTLIN_CXXFLAGS", "STRUCTLIN_ENGINE"}
    bare = {name: value for name, value in os.environ.items() if name not in hidden}
    bare |= {"PATH": str(folder / "env/bin"), "STRUCTLIN_CACHE": str(folder / "cache")}
    same = python == sys.executable
    torch = run(python, "-c", "import torch; print(torch.__version__)") if same else ""
    wanted = f"torch=={torch.split('+')[0]}" if torch else "torch"
    run(own, "-m", "pip", "install", "-q", str(wheel), wanted, "pytest", "hypothesis", env=bare)
    config = run(own, "-W", "error::DeprecationWarning", "-c", TRAIN, cwd=folder, env=bare)
    if f"compiled engine ({folder}/env" not in config:
        raise RuntimeError(f"the engine of the wheel is not used: {config}")
    run(own, "-c", TRAIN, cwd=folder, env=bare | {"STRUCTLIN_ENGINE": "off"})
    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    said = run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, cwd=folder, env=bare)
    return said.splitlines()[-1]


def run(*command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        RuntimeError: its exit code is not 0; with the end of what it said.
    """
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise RuntimeError(f"{' '.join(command)[:200]}: exit code {done.returncode}\n{said}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
