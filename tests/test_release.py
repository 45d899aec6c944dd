"""What a release is checked with, and the papers of the project."""

import sys
from pathlib import Path

import pytest

import structlin
from structlin._engine.cpu.build import OLDEST
from tools import release

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_a_command_that_fails_says_what_it_said_last():
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"exit code 3\none\ntwo"):
        release.run(sys.executable, "-c", code)


@pytest.mark.slow
def test_the_training_step_of_the_checks_runs_and_notices_a_model_that_learns_nothing():
    assert "CPU: " in release.run(sys.executable, "-c", release.TRAIN)
    with pytest.raises(RuntimeError, match="AssertionError"):
        release.run(sys.executable, "-c", release.TRAIN.replace("lr=1e-2", "lr=1e-9"))


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


def test_the_policy_and_the_package_name_the_same_versions():
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    prefix = "Programming Language :: Python :: 3."
    pythons = [line[len(prefix) - 2 :] for line in PROJECT["classifiers"] if prefix in line]
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in policy
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert all(f'"{python}"' in workflow for python in (pythons[0], pythons[-1]))
    assert f"from {'.'.join(map(str, OLDEST))} on" in policy
    (torch,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"{torch.removeprefix('torch>=')} or newer" in policy
