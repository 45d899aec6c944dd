"""Savers that race, savers that are killed at any moment, and a disk that is full."""

import os
import random
import resource
import time

import pytest

pytest.importorskip("safetensors")

from structlin import save
from tests.faults.common import FILE, build_filled, read_value, start

KILLS = 40
PATIENCE = 600  # seconds, after which a process hangs, however busy the machine is


def save_often(folder, value: float, times: int) -> None:
    for n in range(times):
        save(build_filled(value + n), folder)


def save_until_gone(folder, stop) -> None:
    while not stop.exists():
        save(build_filled(-1.0), folder)


def test_a_saver_that_is_killed_leaves_the_old_model_or_the_new_one(tmp_path):
    """A second saver lives on all the time."""
    folder, stop = tmp_path / "m", tmp_path / "stop"
    save(build_filled(-1.0), folder)
    survivor, wait, killed = start(save_until_gone, folder, stop), random.Random(0), 0
    for n in range(KILLS):
        victim = start(save_often, folder, 1000.0 * n, 10_000)
        time.sleep(wait.uniform(0, 0.05))
        victim.kill()
        victim.join(PATIENCE)
        killed += victim.exitcode == -9
        value = read_value(folder)
        assert value == -1.0 or value <= 1000.0 * n + 999
    stop.touch()
    survivor.join(PATIENCE)
    assert survivor.exitcode == 0
    assert killed == KILLS
    save(build_filled(7.0), folder)
    assert read_value(folder) == 7.0
    assert [file.name for file in folder.iterdir() if not file.name.startswith(".")] == [FILE]


def fill_disk(folder, size: int, told) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        save(build_filled(2.0), folder)
    except OSError as error:
        os.write(told, str(error).encode())


@pytest.mark.parametrize("size", [0, 8, 1000, 3000])
def test_a_full_disk_is_an_error_and_the_old_model_stays(size, tmp_path):
    folder = tmp_path / "m"
    save(build_filled(1.0), folder)
    read, write = os.pipe()
    process = start(fill_disk, folder, size, write)
    process.join(PATIENCE)
    os.close(write)
    with os.fdopen(read) as told:
        assert "could not be written" in told.read()
    assert read_value(folder) == 1.0
    assert [file.name for file in folder.iterdir()] == [FILE]
