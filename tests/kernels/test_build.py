"""How the engine is built, where it is kept, whom it trusts, and what happens without it."""

import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from structlin import show_config
from structlin._engine.cpu import build, library

here = pytest.mark.skipif(not library.load(), reason="there is no engine here")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A source that is compiled in a moment, and an empty cache."""
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    source = tmp_path / "tiny.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(library, "_state", None)
    monkeypatch.setenv("STRUCTLIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def libraries_in(folder):
    return [path for path in folder.iterdir() if path.name != "lock"]


def write_compiler(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


def test_it_is_built_once_and_kept_by_what_it_was_made_from(tiny, monkeypatch, capfd):
    path = build.build()
    assert [path] == libraries_in(tiny)
    assert "building its CPU engine" in capfd.readouterr().err
    before = path.stat().st_mtime_ns
    assert build.build() == path
    assert path.stat().st_mtime_ns == before
    assert not capfd.readouterr().err
    for change in ("FLAGS", (*build.FLAGS, "-DOTHER")), ("describe_cpu", lambda: "other"):
        monkeypatch.setattr(build, *change)
        assert build.build() != path
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build.build() != path
    monkeypatch.setenv("STRUCTLIN_CXXFLAGS", "-DANOTHER '-DWITH=a space'")
    assert build.build() != path
    assert len(libraries_in(tiny)) == 5


def test_of_processes_that_start_at_once_one_builds_and_the_others_wait(tiny, tmp_path):
    count = tmp_path / "count"
    slow = f'case "$*" in *--version*) ;; *) echo built >> {count}; sleep 1;; esac; exec g++ "$@"'
    compiler = write_compiler(tmp_path / "slow compiler", slow)
    program = "from structlin._engine.cpu import build; from pathlib import Path; import sys"
    program += "; build.SOURCE = Path(sys.argv[1]); print(build.build())"
    command = [sys.executable, "-c", program, str(build.SOURCE)]
    options = {"stdout": subprocess.PIPE, "env": {**os.environ, "CXX": f"'{compiler}'"}}
    running = [subprocess.Popen(command, text=True, **options) for _ in range(4)]
    found = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert found == {str(path) for path in libraries_in(tiny)}
    assert len(found) == 1
    assert count.read_text() == "built\n"


HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, 2); print(); input()"


@pytest.fixture
def held(tiny):
    """The lock of the cache, while another process holds it."""
    tiny.mkdir(mode=0o700)
    lock = tiny / "lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], **pipes) as other:
        other.stdout.readline()
        yield lock
        other.communicate("\n")


def test_a_lock_that_is_never_freed_leaves_plain_products_and_a_warning(
    held, monkeypatch, caplog, capfd
):
    monkeypatch.setattr(build, "WAIT", 3)
    assert not library.load()
    assert f"another process has held {held} for 3 s" in caplog.text
    assert "plain products instead of the compiled CPU engine" in caplog.text
    says = capfd.readouterr().err
    assert says.count("waiting for another process that builds the engine") == 1
    assert f"remove {held}" in says
    assert "building its CPU engine" not in says
    assert not libraries_in(held.parent)


def test_who_waits_for_a_lock_goes_on_once_its_file_is_removed(held, monkeypatch):
    waits, told = threading.Event(), build._tell

    def tell(text):
        told(text)
        waits.set()

    monkeypatch.setattr(build, "_tell", tell)
    thread = threading.Thread(target=build.build)
    thread.start()
    assert waits.wait(60)
    held.unlink()
    thread.join(60)
    assert len(libraries_in(held.parent)) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of fork beside threads
def test_a_child_that_is_forked_while_a_thread_builds_builds_after_it(tiny, monkeypatch):
    builds, forked, made = threading.Event(), threading.Event(), build._compile

    def compile_slowly(*arguments):
        builds.set()
        forked.wait(60)
        return made(*arguments)

    monkeypatch.setattr(build, "_compile", compile_slowly)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    thread = threading.Thread(target=library.load)
    thread.start()
    builds.wait(60)
    child = multiprocessing.get_context("fork").Process(target=library.load)
    child.start()
    forked.set()
    thread.join(60)
    child.join(60)
    code = child.exitcode
    child.kill()
    assert code == 0
    assert len(libraries_in(tiny)) == 1


def test_a_library_in_a_folder_that_cannot_be_written_to_is_used(tiny):
    path = build.build()
    (tiny / "lock").unlink()
    (tiny / "lock").mkdir()  # so that nobody, root included, can open it to write
    assert build.build() == path
    path.unlink()
    with pytest.raises(RuntimeError, match=f"no folder to keep the engine in: .*{tiny}/lock"):
        build.build()


def test_where_the_home_is_read_only_it_is_kept_under_the_temporary_folder(tiny, monkeypatch):
    home = tiny.parent / "file"
    home.write_text("no folder can be made in a file")
    monkeypatch.delenv("STRUCTLIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(tiny.parent))
    assert build.build().parent == tiny.parent / f"structlin-{os.getuid()}"


def test_a_build_that_fails_leaves_nothing_and_says_why_in_any_encoding(tiny, monkeypatch):
    script = "printf 'g\\374ltig: error\\n' >&2; test \"$1\" = --version"
    monkeypatch.setenv("CXX", str(write_compiler(tiny.parent / "compiler", script)))
    with pytest.raises(RuntimeError, match="compiler cannot build the engine: g\ufffdltig: error"):
        build.build()
    assert not libraries_in(tiny)


@pytest.mark.parametrize("command", ["", "env g++", "g++ -m64"])
def test_the_compiler_may_be_a_command_of_several_words(tiny, monkeypatch, command):
    monkeypatch.setenv("CXX", command)
    if "-m64" in command and platform.machine() != "x86_64":
        pytest.skip("-m64 is a flag of x86")
    assert build.build().is_file()


@pytest.mark.parametrize(
    ("command", "says"),
    [("no-such-compiler -O1", "set CXX, which is 'no-such-compiler -O1'"), ("g++ '", "quotation")],
)
def test_a_compiler_that_is_not_there_is_named_and_layers_run_without(
    tiny, monkeypatch, caplog, command, says
):
    monkeypatch.setenv("CXX", command)
    assert not library.load()
    assert says in caplog.text


def test_a_library_that_was_torn_is_built_again(tiny):
    path = build.build()
    whole = path.read_bytes()
    for torn in (b"", whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(torn)
        assert build.build().read_bytes() == whole
        assert len(libraries_in(tiny)) == 1


def test_the_cache_may_be_a_relative_path(tiny, monkeypatch):
    monkeypatch.chdir(tiny.parent)
    monkeypatch.setenv("STRUCTLIN_CACHE", "relative")
    path = build.build()
    assert path.parent == tiny.parent / "relative"
    assert libraries_in(path.parent) == [path]


# ---- whom it trusts ------------------------------------------------------------------------------


def refuse(path):
    with pytest.raises(RuntimeError, match=f"{path} is not trusted, for another user can change"):
        build.build()


@pytest.mark.parametrize("part", [".", ".."], ids=["the folder", "the one above"])
def test_a_folder_that_others_may_write_to_is_not_trusted(tiny, part):
    tiny.mkdir()
    part = (tiny / part).resolve()
    part.chmod(0o777)
    refuse(part)
    assert not list(tiny.iterdir())
    part.chmod(0o1777)  # sticky, as /tmp: what is ours in it stays ours
    if part == tiny:
        refuse(tiny)
    else:
        assert build.build().parent == tiny


def test_a_link_is_trusted_as_what_it_leads_to(tiny):
    outside = tiny.parent / "open"
    outside.mkdir()
    (outside / "cache").mkdir(mode=0o700)
    tiny.symlink_to(outside / "cache")
    outside.chmod(0o777)
    refuse(outside)
    outside.chmod(0o755)
    path = build.build()
    assert path.parent == outside / "cache"
    path.rename(outside / "own.so")
    path.symlink_to(outside / "own.so")
    refuse(path)


def test_a_folder_and_a_library_of_another_user_are_not_trusted(tiny, monkeypatch):
    path = build.build()
    if os.getuid():  # what is ours is another's then
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
        return refuse("")
    for owned in (path, tiny):  # what root owns is trusted
        os.chown(owned, 12345, -1)
        refuse(owned)
        os.chown(owned, 0, -1)


# ---- without it ----------------------------------------------------------------------------------

PROGRAM = """
import torch
from structlin import BTT, StructuredLinear, show_config
layer = StructuredLinear(64, 48, BTT(rank=2))
layer(torch.randn(5, 64)).sum().backward()
layer(torch.randn(5, 64))
show_config()
"""


@here
@pytest.mark.parametrize(
    ("change", "says", "warns"),
    [
        ({"STRUCTLIN_ENGINE": "off"}, "STRUCTLIN_ENGINE=off switches the engine off", 0),
        ({"PATH": "", "STRUCTLIN_CXXFLAGS": ""}, "no C++ compiler is found", 1),
    ],
)
def test_without_it_layers_run_and_one_line_at_most_says_so(tmp_path, change, says, warns):
    environment = {**os.environ, "STRUCTLIN_CACHE": str(tmp_path / "empty"), **change}
    environment.pop("CXX", None)
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"CPU: plain products of torch ({says}" in run.stdout
    assert run.stderr.count("plain products instead of the compiled CPU engine") == warns


def test_a_torch_that_is_too_old_is_told_so(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(RuntimeError, match=r"torch 2.9.1.cpu has no stable C.. interface; 2.10"):
        build.build()


ONLY_A_LAYER = """
import os
import torch
import structlin
from structlin.optim import Muon

model = torch.nn.Sequential(torch.nn.Linear(64, 80, bias=False))
model[0].weight.grad = torch.randn(80, 64)
structlin.show_config()
structlin.polar_factor(torch.randn(3, 8, 16))
Muon(model, matrices="all").step()
print("compiled:", os.path.exists(os.environ["COMPILED"]))
structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))
print("compiled:", os.path.exists(os.environ["COMPILED"]))
"""


def test_nothing_compiles_but_a_layer_that_runs(tmp_path):
    script = 'case "$*" in *--version*) echo 1;; *) : > "$COMPILED"; exit 1;; esac'
    environment = {
        **os.environ,
        "CXX": str(write_compiler(tmp_path / "compiler", script)),
        "COMPILED": str(tmp_path / "compiled"),
        "STRUCTLIN_CACHE": str(tmp_path / "empty"),
        "STRUCTLIN_CXXFLAGS": "",  # so that no library of a wheel is taken
    }
    command = [sys.executable, "-c", ONLY_A_LAYER]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "(until the first layer runs, which compiles the engine in half a minute)" in run.stdout
    assert [line for line in run.stdout.splitlines() if line.startswith("compiled:")] == [
        "compiled: False",
        "compiled: True",
    ]
    assert "plain products instead" in run.stderr


def test_what_was_built_before_is_found_without_compiling(tiny, monkeypatch):
    assert build.find_built() is None
    assert not tiny.exists()
    path = build.build()
    monkeypatch.setattr(build, "_compile", None)
    assert build.find_built() == path
    tiny.chmod(0o777)  # not trusted
    assert build.find_built() is None


@here
def test_show_config_says_what_runs(capsys):
    show_config()
    assert "CPU: compiled engine (" in capsys.readouterr().out


@here
@pytest.mark.skipif(shutil.which("getconf") is None, reason="needs getconf")
def test_it_sizes_its_tiles_by_the_caches_of_the_system():
    names = "LEVEL1_DCACHE_SIZE", "LEVEL2_CACHE_SIZE"
    runs = [subprocess.run(["getconf", name], capture_output=True, text=True) for name in names]
    l1, l2 = (int(run.stdout) if run.stdout.strip().isdecimal() else 0 for run in runs)
    if not (l1 and l2):
        pytest.skip("the system says no caches")
    assert library.describe()["caches"].startswith(f"{l1 >> 10} KB and {l2 >> 10} KB of a core")


@here
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_it_can_be_built_ahead():
    command = [sys.executable, "-W", "error", "-m", "structlin._engine.cpu.build"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(run.stdout.strip()).is_file()
