"""A bound of memory: runs that wait lie in a file, batches are read again, a line says how far."""

import copy
import ctypes
import errno
import gc
import os
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from structlin import LowRank, compress, plan_compression
from structlin._compress import memory, progress
from structlin._compress.memory import Activations, Memory, storages_in
from structlin._compress.project import _Compressed
from structlin._compress.replay import observe
from structlin._torch import find_freer_of_buffers, tree_map

CACHE: dict[str, Any] = {}  # global: runs share it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x  # in an attribute, while the layers run
        table = CACHE.setdefault("table", torch.arange(x.numel()).view_as(x) / x.numel())
        return self.norm(self.kept + self.down(self.up(x + table).relu()))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


@pytest.fixture
def batches() -> list[Tensor]:
    return [*torch.randn(10, 20, 16, generator=torch.Generator().manual_seed(1))]


@pytest.fixture(autouse=True)
def files(monkeypatch):
    """The temporary files that were made; small tensors go there too, and all are closed."""
    made = []
    make = tempfile.TemporaryFile

    def note(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", note)
    monkeypatch.setattr(memory, "SMALL", 1)
    CACHE.clear()
    threads = threading.enumerate()
    yield made
    assert all(file.closed for file in made)
    assert threading.enumerate() == threads


def compressed(model: nn.Module, batches, **options) -> list[Tensor]:
    planned = plan_compression(model, LowRank(rank=1), batches, keep=0.5, **options)
    return [value.clone() for value in planned.apply().state_dict().values()]


@pytest.mark.parametrize("refine", [0, 3])
@pytest.mark.parametrize("gigabytes", [0.0, 2e-5])
def test_with_a_bound_that_sends_runs_to_a_file_the_model_is_the_same_to_the_bit(
    model, batches, files, gigabytes, refine
):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    unbounded = compressed(model, batches, refine=refine)
    again = nn.Sequential(*(Block() for _ in range(3)))
    again.load_state_dict(state)
    assert files == []
    CACHE.clear()
    bounded = compressed(again, lambda: iter(batches), refine=refine, memory=gigabytes)
    assert len(files) >= 1
    assert all(torch.equal(*pair) for pair in zip(unbounded, bounded, strict=True))
    assert torch.equal(CACHE["table"], torch.arange(320).view(20, 16) / 320)


@torch.no_grad()
def test_over_its_bound_memory_holds_nothing_of_the_runs_that_wait(files):
    bounded = Memory(0.0)
    activations = Activations(bounded)
    with activations.watch():
        x = torch.ones(1000) + 1
        view = x[10:]
    activations.settle()
    assert x.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    with bounded.lend(view):
        assert view.sum() == 1980
    assert x.untyped_storage().nbytes() == 0
    with bounded.guard():
        assert (x + 1).sum() == 3000
    bounded.close()


@torch.no_grad()
@pytest.mark.parametrize("is_fetched", [False, True])
def test_what_dies_or_is_fetched_leaves_its_place_in_the_file_to_others(files, is_fetched):
    bounded = Memory(0.0)
    activations = Activations(bounded)
    staying = torch.zeros(1000)
    for number in range(5):
        with activations.watch():
            x = staying + number  # that of the round before is dead, in the file or in memory
        activations.settle()
        if number == 0:
            staying_away = x
        if is_fetched:
            activations.fetch()
    assert os.fstat(files[0].fileno()).st_size == 2 * 4000
    with bounded.lend(staying_away):
        assert staying_away.sum() == 0
    bounded.close()


@pytest.mark.parametrize("refine", [0, 3])
def test_after_the_inputs_of_a_layer_are_measured_all_of_them_are_in_the_file(
    model, batches, monkeypatch, refine
):
    nbytes = set()
    measure = _Compressed._measure

    def measure_and_look(self, visit):
        moments = measure(self, visit)
        for wait in visit.waits:
            for stop in (wait.dense, wait.compressed):
                (storage,) = storages_in(stop.input)
                nbytes.add(storage.nbytes())
        return moments

    monkeypatch.setattr(_Compressed, "_measure", measure_and_look)
    compressed(model, batches, memory=0.0, refine=refine)
    assert nbytes == {0}


class Hoarder(nn.Linear):
    """It keeps what it computes until the model, at its end, takes that away."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.repeat(1, 8)
        return super().forward(x) + self.kept[:, :16]


class ModelWithHoarder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Hoarder(16, 16), nn.Linear(16, 16)
        self.skip = None

    def forward(self, x: Tensor) -> Tensor:
        self.skip = x.repeat(1, 8)
        y = self.b(self.a(x)) + self.skip[:, :16]
        self.skip = self.a.kept = None
        return y


@torch.no_grad()
@pytest.mark.parametrize("leaves_early", [False, True])
def test_what_a_model_would_clear_at_its_end_is_freed_as_soon_as_its_run_ends(
    batches, monkeypatch, leaves_early
):
    kept = []
    finish = Activations.finish

    def finish_and_look(self):
        storages = WeakSet(self._storages)
        finish(self)
        kept.append(sum(storage.nbytes() for storage in storages))

    monkeypatch.setattr(Activations, "finish", finish_and_look)
    model = ModelWithHoarder()
    replay = observe(model, [model.a, model.b], batches, memory=0.0)
    visits = replay.walk([model.a, model.b], replay.calls, both=True, to_end=False)
    for visit in visits:
        if visit.module is model.b and leaves_early:
            break
    del visit
    visits.close()
    assert len(kept) >= 20
    assert max(kept) == 0


def test_compress_in_one_call_has_the_bound_too(model, batches, files):
    compress(model, LowRank(rank=1), batches, keep=0.5, memory=0.0)
    assert len(files) >= 1


class Wrapper(Tensor):
    """A subclass of its own kind: it has no memory, and another tensor for an attribute."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, Wrapper) else value

        def wrap(value):
            return Wrapper(value) if isinstance(value, Tensor) else value

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(Wrapper(2 * x)).tanh()).inner


def test_what_a_tensor_of_a_subclass_wraps_goes_to_the_file_and_comes_back(batches, files):
    model = Wraps()
    again = copy.deepcopy(model)
    unbounded = compressed(model, batches, allocation="error")
    bounded = compressed(again, batches, allocation="error", memory=0.0)
    assert all(torch.equal(*pair) for pair in zip(unbounded, bounded, strict=True))
    assert len(files) >= 1


class CallsCompiledCode(nn.Module):
    """By a global name, with a tensor that is global too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        table = CACHE.setdefault("table", torch.arange(x.numel()).view_as(x) / x.numel())
        return self.b(CACHE["compiled"](self.a(x), table))


@pytest.mark.slow
def test_with_a_bound_what_torch_compile_has_made_runs_as_it_is_written(batches, files):
    graphs = []

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=compile_graph, fullgraph=True)
    def add(x: Tensor, table: Tensor) -> Tensor:
        return (x + table).relu()

    model = CallsCompiledCode()
    again = copy.deepcopy(model)
    CACHE["compiled"] = add
    unbounded = compressed(model, batches, allocation="error")
    del CACHE["table"]
    bounded = compressed(again, batches, allocation="error", memory=0.0)
    assert all(torch.equal(*pair) for pair in zip(unbounded, bounded, strict=True))
    assert len(files) >= 1
    count = len(graphs)
    torch.compile(lambda x: x + 1, backend=compile_graph)(batches[0])  # as before
    assert len(graphs) == count + 1


def test_a_bound_that_is_not_reached_writes_nothing(model, batches, files):
    compressed(model, batches, memory=1.0)
    assert files == []


@torch.no_grad()
def test_with_a_bound_threads_that_wait_or_have_ended_keep_no_buffers_of_mkl():
    if find_freer_of_buffers() is None:
        pytest.skip("torch has no MKL here")
    free_all = find_function_of_torch("mkl_serv_free_buffers")
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    batches = [*torch.randn(8, 512, 512)]

    def count_kept_bytes(gigabytes: float | None) -> int:
        """Most bytes at any place where all runs wait, and when they have ended."""
        replay = observe(model, [*model], batches, memory=gigabytes)
        kept = []
        for visit in replay.walk([*model], replay.calls):
            assert len(visit.waits) == len(batches)
            kept.append(count_bytes_of_mkl())
        kept.append(count_bytes_of_mkl())
        free_all()
        return max(kept)

    free_all()
    unbounded = count_kept_bytes(None)
    if unbounded < len(batches) * 2**18:
        pytest.skip("MKL keeps next to nothing on this CPU")
    assert count_kept_bytes(1.0) < unbounded / len(batches)


def find_function_of_torch(name: str) -> ctypes._CFuncPtr:
    return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), name)


def count_bytes_of_mkl() -> int:
    """What MKL has allocated in this process."""
    count = find_function_of_torch("mkl_serv_mem_stat")
    count.restype = ctypes.c_int64
    return count(ctypes.byref(ctypes.c_int()))


def test_a_disk_that_fills_is_one_error_and_the_model_is_as_it_was(model, batches, monkeypatch):
    class Full:
        closed = False

        def seek(self, offset):
            pass

        def write(self, view):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            self.closed = True

    full = Full()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OSError, match=r"memory=0: .*No space left.*TMPDIR") as caught:
        compressed(model, batches, memory=0.0)
    assert caught.value.errno == errno.ENOSPC
    assert full.closed
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("is_short", [True, False])
def test_a_file_that_cannot_be_read_is_one_error_that_names_memory(
    model, batches, monkeypatch, is_short
):
    def read(view):
        if is_short:
            return 0
        raise OSError(errno.EIO, "Input/output error")

    make = tempfile.TemporaryFile

    def make_unreadable(**options):
        file = Mock(wraps=make(**options))
        file.readinto = read
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", make_unreadable)
    reason = "it is shorter" if is_short else "Input/output error"
    with pytest.raises(OSError, match=rf"memory=0: .*read from .*{reason}.*TMPDIR") as caught:
        compressed(model, batches, memory=0.0)
    assert caught.value.errno == errno.EIO  # and no thread waits, see `files`


def test_where_no_folder_can_be_written_to_the_error_names_memory_too(model, batches, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)  # as before its first use
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/such/folder"])
    with pytest.raises(OSError, match=r"memory=0: .*in any folder \(No usable temporary .*TMPDIR"):
        compressed(model, batches, memory=0.0)


def test_a_bound_may_be_a_number_of_numpys(model, batches, files):
    compressed(model, batches, memory=np.float32(1.0))
    assert files == []


@pytest.mark.parametrize("name", ["send_away", "fetch", "_fill", "_write", "close"])
def test_ctrl_c_while_runs_go_to_the_file_leaves_the_model_and_no_file(
    model, batches, monkeypatch, name
):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    method = getattr(Memory, name)
    calls = []

    def interrupt(self, *args):
        if threading.current_thread() is threading.main_thread():
            calls.append(name)
            if len(calls) == (1 if name == "close" else 20):
                monkeypatch.setattr(Memory, name, method)
                raise KeyboardInterrupt
        return method(self, *args)

    monkeypatch.setattr(Memory, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        compressed(model, batches, memory=0.0, refine=2)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    gc.collect()


def test_a_function_that_returns_an_exhausted_generator_is_refused(model, batches):
    generator = iter(batches)
    with pytest.raises(ValueError, match="gave 10 batches, and 0 when they were read again"):
        compressed(model, lambda: generator)
    with pytest.raises(ValueError, match="batches has no batch"):
        compressed(model, lambda: iter(()))


def test_batches_with_other_keys_at_another_reading_are_refused(model, batches):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = model[0].up

        def forward(self, input=None, other=None):
            return self.up(other if input is None else input)

    readings = []

    def read():
        readings.append(0)
        return [{"input": x} if len(readings) == 1 else {"other": x} for x in batches]

    with pytest.raises(ValueError, match=r"keys \['other'\].*keys \['input'\]"):
        compressed(Either(), read)


def test_what_a_function_returns_must_be_an_iterable(model):
    with pytest.raises(TypeError, match="an iterable of batches"):
        compressed(model, lambda: torch.ones(2, 16))


def test_a_dataloader_is_read_again_where_there_is_a_bound(model, batches):
    loader = torch.utils.data.DataLoader(torch.cat(batches), batch_size=20)
    read = []
    collate = loader.collate_fn
    loader.collate_fn = lambda rows: read.append(0) or collate(rows)
    planned = plan_compression(model, LowRank(rank=1), loader, keep=0.5, memory=0.0)
    plain = plan_compression(model, LowRank(rank=1), batches, keep=0.5)
    assert planned.errors == plain.errors
    assert len(read) == 30  # to count them, to take a few, to project


def test_nan_in_the_data_is_named_with_a_bound_too(model, batches):
    batches[3][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"not finite"):
        compressed(model, batches, memory=0.0)


def test_without_a_terminal_a_line_comes_every_half_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Bar("project", 3) as bar:
        for second in (10.0, 31.0, 40.0, 70.0):
            now[0] = second
            bar.show("up")
    assert capsys.readouterr().err.splitlines() == [
        "project 0/3, 31 s: up",
        "project 0/3, 70 s: up",
    ]
    with progress.Bar("project", 3, shown=False) as bar:
        now[0] = 500.0
        bar.advance()
    assert capsys.readouterr().err == ""
