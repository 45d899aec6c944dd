"""The stopwatch runs what the page prints, where nothing is installed."""

import subprocess

import pytest

from benchmarks import stopwatch


def test_the_page_has_both_ways_in_at_most_ten_lines_each():
    blocks = stopwatch.read_blocks(stopwatch.PAGE.read_text(encoding="utf-8"))
    assert {*blocks} == {"trainer", "compress"}
    assert all(1 < len(lines) <= 10 for lines in blocks.values())
    assert blocks["trainer"][-1].endswith("with_trainer.py")
    assert "SmolLM2" in blocks["compress"][-1]


def test_lines_share_a_shell_and_each_has_its_seconds(tmp_path):
    found = stopwatch.run_lines(
        ["there=$PWD && sleep 0.2", 'touch "$there/file"'], tmp_path, {"PATH": "/usr/bin:/bin"}
    )
    assert (tmp_path / "file").exists()
    assert found[0] > 0.2
    assert 0 <= found[1] < found[0]


def test_a_line_that_fails_ends_it(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        stopwatch.run_lines(["false", "touch file"], tmp_path, {"PATH": "/usr/bin:/bin"})
    assert not (tmp_path / "file").exists()


def test_a_bare_shell_knows_no_environment_and_no_cache(tmp_path):
    mine = {
        "PATH": "/home/me/.venv/bin:/usr/bin",
        "VIRTUAL_ENV": "/home/me/.venv",
        "PYTHONPATH": "/home/me/project",
        "LANG": "C",
    }
    found = stopwatch.bare(mine, tmp_path)
    assert found == {
        "PATH": "/usr/bin",
        "LANG": "C",
        "PIP_NO_CACHE_DIR": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


@pytest.mark.slow
def test_a_program_of_the_page_runs_small(capsys):
    pytest.importorskip("accelerate")
    rows = stopwatch.main(["--smoke"])
    assert [row["name"] for row in rows] == ["trainer", "compress"]
    assert all(row["seconds"][0] > 0 for row in rows)
