"""`make release`: what it refuses, what it checks, and when it dates; the papers of the project."""

import doctest
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import structlin
from tools import release

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
UNRELEASED = "# Changelog\n\n## 0.2.0 (unreleased)\n\n## 0.1.0 (2020-01-31)\n"
CITATION = "cff-version: 1.2.0\ndate-released: 2020-01-31\nversion: 0.2.0\n"


def test_the_examples_in_the_docstrings_give_what_they_show():
    results = doctest.testmod(release)
    assert results.attempted > 3
    assert not results.failed


# ---- refusals and the date -----------------------------------------------------------------------


@pytest.mark.parametrize(("version", "says"), [("0.1.0", "2020-01-31"), ("0.3.0", "no heading")])
def test_a_version_with_a_date_or_without_a_heading_is_refused(version, says):
    with pytest.raises(release.RefusedError, match=says):
        release.date_version(UNRELEASED, version, "2031-01-31")


def test_the_first_release_is_no_longer_said_to_be_missing():
    text = f"Nothing was released yet. This file lists changes.\n\n{UNRELEASED}"
    dated = release.date_version(text, "0.2.0", "2031-01-31")
    assert dated == f"This file lists changes.\n\n{UNRELEASED}".replace("unreleased", "2031-01-31")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_tree_with_changes_is_refused_by_the_names_of_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    release.refuse_changes()
    (tmp_path / "new.py").touch()
    with pytest.raises(release.RefusedError, match=r"new\.py"):
        release.refuse_changes()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project that is clean and built, whose checks all pass, with torch 2.10.0 and 2.13.0."""
    (tmp_path / "CHANGELOG.md").write_text(UNRELEASED)
    (tmp_path / "CITATION.cff").write_text(CITATION)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(structlin, "__version__", "0.2.0")
    for name in ("build", "compare_sdist", "refuse_changes"):
        monkeypatch.setattr(release, name, lambda *_: None)
    changes = tmp_path / "CHANGELOG.md"
    monkeypatch.setattr(release, "build_sdist", lambda _: shutil.copy(changes, tmp_path / "a.gz"))
    monkeypatch.setattr(release, "find_built", lambda folder: (folder / "a.whl", folder / "a.gz"))
    monkeypatch.setattr(release, "find_python", lambda version: f"python{version}")
    monkeypatch.setattr(release, "find_torches", lambda python: ["2.10.0", "2.13.0"])
    monkeypatch.setattr(release, "check_environment", lambda *_: "509 passed")
    monkeypatch.setattr(release.sys, "platform", "linux")
    monkeypatch.setattr(release.platform, "machine", lambda: "x86_64")
    return tmp_path


def is_dated(project):
    return "unreleased" not in (project / "CHANGELOG.md").read_text()


def test_a_release_whose_checks_pass_gets_its_date_once(project, capsys):
    assert release.main([]) == 0
    printed = capsys.readouterr().out
    assert [printed.count(f"Python {version}, torch 2.1") for version in release.PYTHONS] == [2] * 4
    assert is_dated(project)
    assert (project / "a.gz").read_text() == (project / "CHANGELOG.md").read_text()  # made after it
    (date,) = re.findall(r"0\.2\.0 \((\S+)\)", (project / "CHANGELOG.md").read_text())
    citation = (project / "CITATION.cff").read_text().splitlines()
    assert citation == ["cff-version: 1.2.0", "version: 0.2.0", f"date-released: {date}"]
    assert release.main([]) == 2
    assert "has a date" in capsys.readouterr().err


@pytest.mark.parametrize("python", release.PYTHONS)
def test_one_failed_environment_is_named_and_leaves_the_date_out(
    project, monkeypatch, capsys, python
):
    def check(program, torch, wheel, folder):
        assert folder.exists()
        if (program, torch) == (f"python{python}", "2.13.0"):
            raise release.FailedError("segmentation fault")
        return "509 passed"

    monkeypatch.setattr(release, "check_environment", check)
    assert release.main([]) == 1
    assert not is_dated(project)
    printed = capsys.readouterr().out
    assert f"the wheel failed on Python {python} with torch 2.13.0\n" in printed
    assert "segmentation fault" in printed
    assert printed.count(" 509 passed") == 7  # the others ran


def test_a_python_that_is_not_there_is_named_and_must_be_allowed(project, monkeypatch, capsys):
    monkeypatch.setattr(release, "find_python", lambda version: None if version == "3.10" else "py")
    assert release.main([]) == 1
    assert not is_dated(project)
    printed = capsys.readouterr().out
    assert "Python 3.10, torch -       MISSING" in printed
    assert "no Python 3.10; --without allows it" in printed
    assert release.main(["--without", "3.11"]) == 1
    assert not is_dated(project)
    assert release.main(["--without", "3.10"]) == 0
    assert is_dated(project)


def test_where_no_python_is_there_nothing_is_released(project, monkeypatch):
    monkeypatch.setattr(release, "find_python", lambda version: None)
    assert release.main(["--without", *release.PYTHONS]) == 1
    assert not is_dated(project)


@pytest.mark.parametrize(
    "part", [["--smoke"], ["--reuse"], ["--pythons", "3.11"], ["--torches", "2.13"]], ids=str
)
def test_a_part_of_the_checks_dates_nothing(project, part):
    assert release.main(part) == 0
    assert not is_dated(project)


def test_another_machine_than_the_engines_is_refused(project, monkeypatch, capsys):
    monkeypatch.setattr(release.platform, "machine", lambda: "arm64")
    assert release.main([]) == 2
    assert "Linux on x86-64" in capsys.readouterr().err


# ---- what is found and compared ------------------------------------------------------------------


def write_program(path, line):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")
def test_a_python_is_sought_on_the_path_and_in_pyenv_and_must_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    write_program(tmp_path / "python3.10", "echo 3.10")
    write_program(tmp_path / "python3.12", "exit 127")  # as pyenv's names of what is not chosen
    write_program(tmp_path / "python3.13", "echo 3.11")
    write_program(tmp_path / "pyenv/versions/3.12.1/bin/python", "echo 3.12")
    found = {version: release.find_python(version) for version in release.PYTHONS}
    assert found == {
        "3.10": "python3.10",
        "3.11": None,
        "3.12": str(tmp_path / "pyenv/versions/3.12.1/bin/python"),
        "3.13": None,
    }


def write_wheel(path, **files):
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir("structlin") if hasattr(archive, "mkdir") else None
        for name, text in files.items():
            archive.writestr(f"structlin/{name.replace('_', '.')}", text)


@pytest.mark.parametrize(
    ("theirs", "differ"),
    [
        ({"a_py": "1", "b_h": "2"}, None),
        ({"a_py": "1", "b_h": "3"}, "b.h"),
        ({"a_py": "1"}, "b.h"),
        ({"a_py": "1", "b_h": "2", "c_py": "3"}, "c.py"),
    ],
    ids=["same", "changed", "missing", "more"],
)
def test_the_sources_must_give_the_files_of_the_wheel_but_its_libraries(
    tmp_path, monkeypatch, theirs, differ
):
    write_wheel(tmp_path / "ours.whl", a_py="1", b_h="2", engine_so="binary")

    def run(*command, cwd, env=None):
        if "wheel" in command:
            write_wheel(cwd / "structlin-0.2.0-py3-none-any.whl", **theirs)

    monkeypatch.setattr(release, "run", run)
    paths = tmp_path / "ours.whl", tmp_path / "structlin-0.2.0.tar.gz"
    if differ is None:
        release.compare_sdist(*paths)
    else:
        with pytest.raises(release.RefusedError, match=rf"\['structlin/{re.escape(differ)}'\]"):
            release.compare_sdist(*paths)


def test_a_command_that_fails_says_what_it_said_last():
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    with pytest.raises(release.FailedError, match=r"exit code 3\none\ntwo"):
        release.run(sys.executable, "-c", code)


@pytest.mark.slow
def test_the_training_step_of_the_checks_runs_and_notices_a_model_that_learns_nothing():
    assert "trains: " in release.run(sys.executable, "-c", release.TRAIN)
    with pytest.raises(release.FailedError, match="AssertionError"):
        release.run(sys.executable, "-c", release.TRAIN.replace("lr=1e-2", "lr=1e-9"))


# ---- the project's papers ------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_citation_is_of_this_version_and_of_one_repository():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what is required
    assert citation["version"] == structlin.__version__
    assert citation["license"] == PROJECT["license"]
    repository = PROJECT["urls"]["Repository"]
    assert citation["repository-code"] == repository
    assert all(url.startswith(repository) for url in PROJECT["urls"].values())
    assert f"{repository}/security/advisories/new" in (ROOT / "SECURITY.md").read_text()


def test_the_policy_the_package_and_the_release_name_the_same_versions():
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    prefix = "Programming Language :: Python :: 3."
    named = [line for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert tuple(f"3.{line.removeprefix(prefix)}" for line in named) == release.PYTHONS
    assert f"| Python | {release.PYTHONS[0]} to {release.PYTHONS[-1]} |" in policy
    assert PROJECT["requires-python"] == f">={release.PYTHONS[0]}"
    assert f"from {'.'.join(map(str, release.OLDEST))} on" in policy
    (torch,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"{torch.removeprefix('torch>=')} or newer" in policy
