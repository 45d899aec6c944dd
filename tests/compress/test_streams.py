"""Runs of a model that stop at its modules, in lockstep."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from structlin import LowRank, plan_compression
from structlin._compress.streams import Place, Streams, capture_state


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.fixture(autouse=True)
def _nothing_stays():
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


def test_a_stream_stops_before_each_place_and_runs_to_its_end():
    model, x, ends = build(), torch.randn(3, 2), []
    with Streams(model, [Place(model[0]), Place(model[2])]) as streams:
        stream = streams.start(lambda: ends.append(model(x)))
        assert stream.stop.place == Place(model[0])
        assert stream.stop.args[0] is x
        stream.resume()
        assert stream.stop.place == Place(model[2])
        assert ends == []
        stream.resume()
        assert stream.stop is None
    torch.testing.assert_close(ends, [model(x)])
    assert all("forward" not in vars(module) for module in model)


def test_another_function_takes_the_place_of_a_module_and_another_output_that_of_its_own():
    model, x, ends = build(), torch.randn(3, 2), []
    with Streams(model, [Place(model[0]), Place(model[1], leaving=True)]) as streams:
        stream = streams.start(lambda: ends.append(model(x)))
        stream.resume(lambda x: 3 * x)
        assert stream.stop.place == Place(model[1], leaving=True)
        torch.testing.assert_close(stream.stop.args[0], 3 * x)
        torch.testing.assert_close(stream.stop.output, model[1](3 * x))
        stream.resume(lambda x: 5 * x)
    torch.testing.assert_close(ends, [model[2](15 * x)])


def test_a_block_is_left_after_its_layers_by_all_streams():
    model, ends = nn.Sequential(build(), nn.ReLU()), []
    block, layer = Place(model[0], leaving=True), Place(model[0][1])
    with Streams(model, [block, layer], 3) as streams:
        some = [
            streams.start(lambda n=n: ends.append((n, model(torch.full((2,), n)))))
            for n in (1.0, 2.0, 3.0)
        ]
        assert [stream.stop.place for stream in some] == [layer] * 3
        for stream in some:
            stream.resume()
        assert [stream.stop.place for stream in some] == [block] * 3
        some[1].resume()
        assert [n for n, _ in ends] == [2.0]
    assert [n for n, _ in ends] == [2.0]  # the others were cancelled


def test_a_module_that_had_a_forward_of_its_own_has_it_again():
    model = nn.Linear(2, 2)
    own = model.forward = lambda x: x + 1
    with Streams(model, [Place(model)]) as streams:
        streams.start(lambda: model(torch.ones(2))).resume()
    assert model.forward is own


def test_what_the_model_raises_is_raised_once_and_the_other_streams_end():
    model, left = build(), []

    def run(n):
        try:
            model(torch.ones(2))
        finally:
            left.append(n)

    def fail(x):
        raise RuntimeError("a layer that fails")

    def run_all():
        with Streams(model, [Place(model[0]), Place(model[1])]) as streams:
            some = [streams.start(lambda n=n: run(n)) for n in range(3)]
            some[0].resume()
            some[1].resume(fail)

    with pytest.raises(RuntimeError, match="a layer that fails"):
        run_all()
    assert sorted(left) == [0, 1, 2]


@pytest.mark.parametrize("place", ["before the stream goes on", "after it has stopped again"])
def test_an_interrupt_anywhere_in_resume_leaves_no_stream_that_waits_for_ever(place):
    model = build()
    with Streams(model, [Place(model[0]), Place(model[1])]) as streams:
        stream = streams.start(lambda: model(torch.ones(2)))
        turn, back = stream._turn, stream._back

        def interrupt(*given):
            if place == "after it has stopped again":
                back.get()
            raise KeyboardInterrupt

        if place == "after it has stopped again":
            stream._back = SimpleNamespace(get=interrupt, put=back.put)
        else:
            stream._turn = SimpleNamespace(get=turn.get, put=interrupt)
        with pytest.raises(KeyboardInterrupt):
            stream.resume()
        stream._turn, stream._back = turn, back
        end = threading.Thread(target=stream.cancel, daemon=True)
        end.start()
        end.join(timeout=600)
        waits_for_ever = stream.thread.is_alive()
        turn.put(None)  # so that the test ends if it does
    assert not waits_for_ever


def test_a_model_that_swallows_every_exception_ends_all_the_same():
    model, tried = build(), []

    def run():
        for _ in range(3):
            try:
                model(torch.ones(2))
            except BaseException:
                tried.append(1)

    with Streams(model, [Place(model[0])]) as streams:
        streams.start(run)
    assert len(tried) == 3


def test_streams_have_the_modes_of_the_thread_that_starts_them():
    model, seen = nn.Linear(2, 2), []

    def run():
        device = torch.empty(1).device.type
        dtype = model(torch.ones(1, 2, device="cpu")).dtype
        seen.append((torch.is_grad_enabled(), device, dtype))

    with Streams(model, []) as streams:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            streams.start(run)
            state = capture_state()
        streams.start(run)
        streams.start(run, state)
    own = True, "cpu", torch.float32
    assert seen == [(False, "meta", torch.bfloat16), own, (False, "meta", torch.bfloat16)]
    assert torch.is_grad_enabled()


def test_a_thread_of_the_models_own_does_not_stop():
    model, ends = build(), []

    def run():
        thread = threading.Thread(target=lambda: ends.append(model(torch.ones(2))))
        thread.start()
        thread.join()

    with Streams(model, [Place(model[1])]) as streams:
        assert streams.start(run).stop is None
    assert len(ends) == 1


def test_many_streams_compute_with_few_threads_each_and_the_caller_with_its_own(monkeypatch):
    monkeypatch.setattr("structlin._compress.streams.MAX_WORKERS", 4)
    threads, seen = torch.get_num_threads(), []
    model = nn.Linear(2, 2)
    try:
        torch.set_num_threads(3)
        with Streams(model, [Place(model)], 4) as streams:
            stream = streams.start(lambda: model(torch.ones(2)))
            assert torch.get_num_threads() == 3
            stream.resume(lambda x: seen.append(torch.get_num_threads()))
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert seen == [1]


def test_too_many_batches_for_the_machine_are_said_to_be_too_many(monkeypatch):
    started, start = [], threading.Thread.start

    def refuse(self):
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(start(self))

    monkeypatch.setattr(threading.Thread, "start", refuse)
    batches = torch.randn(12, 2).split(2)
    with pytest.raises(RuntimeError, match=r"stream 4 of 12, .* give fewer batches"):
        plan_compression(build(), LowRank(rank=1), batches, keep=None)
