"""Builds a release into dist/ and checks it: `make release`.

    python -m tools.release                                    all, and then the date
    python -m tools.release --pythons 3.11 --torches 2.13      these alone; nothing is dated
    python -m tools.release --smoke                            this Python and torch, in minutes

It needs Linux on x86-64, git, a C++ compiler, and the packages of `structlin[dev]`. It refuses a
tree with changes and a version that has a date. The wheel gets the engine and the tag of the oldest
glibc that its libraries allow. Then each pair of a Python of this machine and a torch gets a bare
environment in a temporary folder, without a compiler. There the wheel is installed, imported,
trained and tested. The source distribution must give the same files. A pair takes minutes and up to
8 GB, which are freed after it.

CHANGELOG.md and CITATION.cff get the date if every pair passed and every Python is there;
`--without 3.10` says which one may be missing. Nothing is tagged or uploaded.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlin
from structlin._kernels.engine import OLDEST, VARIANTS

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TESTS = ("tests/kernels/test_engine.py", "tests/kernels/test_wheel.py")
TOOLS = ("pytest", "hypothesis")  # what the tests need beside the wheel
OF_TORCH = ("libtorch_cpu.so", "libc10.so")  # what the engine takes from the user's torch
TRAIN = """
import tempfile, torch, structlin
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
model = structlin.convert(model, structlin.BTT(rank=1))
optimizer = torch.optim.AdamW(structlin.param_groups(model, lr=1e-2))
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
    structlin.save(model, f"{folder}/model.safetensors")
print("trains:", losses[0], "to", losses[-1])
"""


class RefusedError(Exception):
    """A reason not to release."""


class FailedError(Exception):
    """A command that failed, with the end of what it said."""


@dataclass(frozen=True)
class Check:
    """A Python, a torch, and what became of the wheel there."""

    python: str
    torch: str
    passed: bool
    says: str


def main(argv: Sequence[str] | None = None) -> int:
    """Build, check, and date the version; the exit code is 0 if nothing failed or is missing."""
    options = make_parser().parse_args(argv)
    partial = options.smoke or options.reuse or options.pythons or options.torches
    folder = options.out.resolve()
    try:
        if not options.smoke:
            refuse_changes()
            date_version(read("CHANGELOG.md"), structlin.__version__, "a date")
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise RefusedError("the wheel's engine is for Linux on x86-64: build it there")
        if not options.reuse:
            build(folder)
        wheel, sdist = find_built(folder)
        print(f"{wheel}\n{sdist}", flush=True)
        compare_sdist(wheel, sdist)
        checks = [check for pair in find_pairs(options) for check in check_pair(*pair, wheel)]
    except (RefusedError, FailedError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    wrong = find_wrong(checks, options.without)
    if wrong:
        print(f"not released: {wrong}")
        return 1
    if partial:
        print("all of it passed; nothing is dated, for this was a part of the release's checks")
        return 0
    write_date(datetime.date.today().isoformat())
    build_sdist(folder)  # with the date
    print(f"dated. Commit it, tag it v{structlin.__version__}, and upload {wheel} and {sdist}")
    return 0


def find_wrong(checks: Sequence[Check], without: Sequence[str]) -> str:
    """Why these checks allow no release; "" if they do.

    >>> find_wrong([Check("3.10", "-", False, ""), Check("3.11", "2.13.0", True, "")], ["3.10"])
    ''
    """
    failed = [f"{check.python} with torch {check.torch}" for check in checks
              if check.torch != "-" and not check.passed]  # fmt: skip
    if failed:
        return f"the wheel failed on Python {', '.join(failed)}"
    missing = [check.python for check in checks if check.torch == "-"]
    missing = [version for version in missing if version not in without]
    if missing:
        return f"this machine has no Python {', '.join(missing)}; --without allows it"
    return "" if any(check.passed for check in checks) else "nothing was checked"


def make_parser() -> argparse.ArgumentParser:
    about = "Build a release, check it in bare environments, and date it."
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=about)
    text = "this Python and this torch alone, with changes in the tree too; nothing is dated"
    parser.add_argument("--smoke", action="store_true", help=text)
    text = "check these only, and date nothing, such as 3.11"
    parser.add_argument("--pythons", nargs="+", choices=PYTHONS, metavar="X.Y", help=text)
    parser.add_argument("--torches", nargs="+", metavar="X.Y", help="the same, such as 2.13")
    text = "check what an earlier run has built, and date nothing"
    parser.add_argument("--reuse", action="store_true", help=text)
    text = "Pythons that this machine may lack"
    parser.add_argument("--without", nargs="+", choices=PYTHONS, default=[], help=text)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="(default: dist)")
    return parser


# ---- what is refused, and the date ---------------------------------------------------------------


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def refuse_changes() -> None:
    """Raises:
    RefusedError: the tree is not what is committed.
    """
    changed = run("git", "status", "--porcelain", cwd=ROOT)
    if changed:
        raise RefusedError(f"commit or undo these changes first:\n{changed}")


def date_version(text: str, version: str, date: str) -> str:
    """The changelog with a date instead of "unreleased".

    >>> date_version("# Changes\\n\\n## 0.3.0 (unreleased)\\n", "0.3.0", "2031-01-31")
    '# Changes\\n\\n## 0.3.0 (2031-01-31)\\n'

    Raises:
        RefusedError: the version is dated already, or has no heading.
    """
    heading = re.search(rf"^## {re.escape(version)} \((.*)\)$", text, re.MULTILINE)
    if heading is None:
        raise RefusedError(f"CHANGELOG.md has no heading '## {version} (unreleased)'")
    if heading[1] != "unreleased":
        raise RefusedError(f"{version} has a date, {heading[1]}: raise structlin.__version__ first")
    dated = f"{text[: heading.start(1)]}{date}{text[heading.end(1) :]}"
    return dated.replace("Nothing was released yet. ", "")


def write_date(date: str) -> None:
    """The date in the changelog and in the citation."""
    changes = date_version(read("CHANGELOG.md"), structlin.__version__, date)
    (ROOT / "CHANGELOG.md").write_text(changes, encoding="utf-8")
    lines = [line for line in read("CITATION.cff").splitlines() if "date-released" not in line]
    (ROOT / "CITATION.cff").write_text("\n".join([*lines, f"date-released: {date}", ""]))


# ---- the files of the release --------------------------------------------------------------------


def build(folder: Path) -> None:
    """Put the wheel, with the engine inside and the tag of its glibc, and the sources into
    `folder`.

    Raises:
        RefusedError: the engine is not in the wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"structlin-{structlin.__version__}[-.]*"):
        old.unlink()
    build_sdist(folder)
    with tempfile.TemporaryDirectory() as made:
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", made, cwd=ROOT)
        (built,) = Path(made).glob("*.whl")
        libraries = [name for name in archive_names(built) if name.endswith(".so")]
        if len(libraries) != len(VARIANTS):
            raise RefusedError(
                f"{built.name} has {len(libraries)} libraries instead of {len(VARIANTS)}"
            )
        repair = (sys.executable, "-m", "auditwheel", "repair", "-w", str(folder), str(built))
        run(*repair, *(word for name in OF_TORCH for word in ("--exclude", name)))


def build_sdist(folder: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT)


def find_built(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution of this version.

    Raises:
        RefusedError: they are not there.
    """
    version = structlin.__version__
    wheels = [*folder.glob(f"structlin-{version}-*manylinux*.whl")]
    sources = folder / f"structlin-{version}.tar.gz"
    if len(wheels) != 1 or not sources.exists():
        raise RefusedError(f"{folder} has no wheel and sources of {version}: run without --reuse")
    return wheels[0].resolve(), sources.resolve()


def archive_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def compare_sdist(wheel: Path, sdist: Path) -> None:
    """Build a wheel from the source distribution, where there is no torch, and compare.

    Raises:
        RefusedError: it has other files than the wheel, the engine's libraries aside.
    """
    with tempfile.TemporaryDirectory() as made:
        run(sys.executable, "-m", "venv", "env", cwd=Path(made))
        build = (f"{made}/env/bin/python", "-m", "pip", "wheel", "-q", "--no-deps", str(sdist))
        run(*build, cwd=Path(made), env=hide_checkout(os.environ))
        (plain,) = Path(made).glob("*-py3-none-any.whl")
        theirs, ours = read_package(plain), read_package(wheel)
    differ = {name for name in theirs | ours if theirs.get(name) != ours.get(name)}
    if not ours or differ:
        raise RefusedError(f"{sdist.name} and {wheel.name} differ in {sorted(differ)}")


def read_package(wheel: Path) -> dict[str, bytes]:
    """The package's files, without the engine's libraries."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("structlin/")]
        return {name: archive.read(name) for name in names if not name.endswith((".so", "/"))}


# ---- bare environments ---------------------------------------------------------------------------


def find_pairs(options: argparse.Namespace) -> list[tuple[str, str | None, list[str]]]:
    """Each Python, its program if it is there, and the torches to check it with."""
    if options.smoke:
        torch = run(sys.executable, "-c", "import torch; print(torch.__version__)").split("+")[0]
        version = ".".join(platform.python_version_tuple()[:2])
        return [(version, sys.executable, [torch])]
    return [
        (version, find_python(version), options.torches or [])
        for version in options.pythons or PYTHONS
    ]


def find_python(version: str) -> str | None:
    """A program of this Python, on the path or among those of pyenv, that runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    ask = "import sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
    for program in filter(shutil.which, found):
        done = subprocess.run([program, "-c", ask], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return program
    return None


def find_torches(python: str) -> list[str]:
    """The newest patch of every torch since `OLDEST` that pip offers to this Python."""
    listed = run(python, "-m", "pip", "index", "versions", "torch")
    return select_torches(listed)


def select_torches(listed: str) -> list[str]:
    """
    >>> select_torches("Available versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.9.1, 1.13.0")
    ['2.13.0', '2.14.1', '2.15.0']
    """
    newest: dict[tuple[int, ...], tuple[int, ...]] = {}
    for version in re.findall(r"\b\d+\.\d+\.\d+", listed):
        numbers = tuple(map(int, version.split(".")))
        if numbers >= OLDEST:
            newest[numbers[:2]] = max(numbers, newest.get(numbers[:2], numbers))
    return [".".join(map(str, newest[minor])) for minor in sorted(newest)]


def check_pair(version: str, program: str | None, torches: list[str], wheel: Path) -> list[Check]:
    """The wheel with every torch in environments of one Python."""
    if program is None:
        checks = [Check(version, "-", False, "this Python is not on this machine")]
        print(show_checks(checks), flush=True)
        return checks
    checks = []
    for torch in torches or find_torches(program):
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="release-") as folder:
            try:
                passed, says = True, check_environment(program, torch, wheel, Path(folder))
            except FailedError as error:
                passed, says = False, str(error)
        says = f"{says} ({time.monotonic() - start:.0f} s)"
        checks.append(Check(version, torch, passed, says))
        print(show_checks(checks[-1:]), flush=True)
    return checks


def check_environment(program: str, torch: str, wheel: Path, folder: Path) -> str:
    """Install, import, train and test in a new environment; what its torch and engine are.

    Raises:
        FailedError: one of these did.
    """
    run(program, "-m", "venv", "env", cwd=folder)
    python = str(folder / "env/bin/python")
    bare = hide_checkout(os.environ)
    bare |= {"PATH": str(folder / "env/bin"), "STRUCTLIN_CACHE": str(folder / "cache")}
    bare["COLUMNS"] = "300"  # pytest says why a test failed where there is room
    wanted = torch if torch.count(".") == 2 else f"{torch}.*"
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        str(wheel),
        f"torch=={wanted}",
        *TOOLS,
        cwd=folder,
        env=bare,
    )

    found = json.loads(run(str(folder / "env/bin/structlin"), "info", "--json", env=bare))
    lies = str(folder / "env/lib")
    if (
        found["structlin"] != structlin.__version__
        or f"compiled engine ({lies}" not in found["CPU"]
    ):
        raise FailedError(
            f"structlin info says {found}, and not {structlin.__version__} from {lies}"
        )
    run(python, "-W", "error::DeprecationWarning", "-c", TRAIN, cwd=folder, env=bare)
    plain = bare | {"STRUCTLIN_ENGINE": "off"}
    run(python, "-c", TRAIN, cwd=folder, env=plain)

    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    tests = run(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, cwd=folder, env=bare
    )
    return f"torch {found['torch']}, {tests.splitlines()[-1]}"


def hide_checkout(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that lead to other code or to a compiler."""
    hidden = ("CXX", "PYTHONPATH", "VIRTUAL_ENV", "STRUCTLIN_CXXFLAGS", "STRUCTLIN_ENGINE")
    return {name: value for name, value in environment.items() if name not in hidden}


def run(*command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        FailedError: its exit code is not 0.
    """
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise FailedError(f"{' '.join(command)[:200]}: exit code {done.returncode}\n{said}")
    return done.stdout.strip()


def show_checks(checks: Sequence[Check]) -> str:
    """A line for each check.

    >>> print(show_checks([Check("3.10", "-", False, "no"), Check("3.11", "2.13.0", True, "ok")]))
    Python 3.10, torch -       MISSING   no
    Python 3.11, torch 2.13.0  passed    ok
    """
    lines = []
    for check in checks:
        word = "passed" if check.passed else "MISSING" if check.torch == "-" else "FAILED"
        lines.append(f"Python {check.python}, torch {check.torch:<7} {word:<8}  {check.says}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
