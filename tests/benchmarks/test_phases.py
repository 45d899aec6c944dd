"""benchmarks/compression/phases.py: what a look at the stack says, and what is shown."""

import sys
import threading

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import phases, smollm2
from structlin import LowRank, compress
from tests.tables import read_table


def test_every_phase_is_found_on_the_stack_of_compress():
    """So a function that gets another name is noticed."""
    model, texts = smollm2.make_tiny()
    batches = [{"input_ids": smollm2.cut(texts["known"], 32, 24)}]
    found = set()

    def look(frame, event, argument):
        if event == "call":
            found.add(phases.find_phase(frame))

    sys.setprofile(look)
    try:
        compress(model, LowRank(rank=1), batches, keep=0.6, include="model.layers.*", memory=0)
    finally:
        sys.setprofile(None)
    assert found == {*phases.PHASES.values(), phases.OTHER}


def test_the_innermost_function_says_the_phase_and_only_structlins_do():
    scope = {"__name__": "structlin.part"}
    source = "def observe(look): return add(look)\ndef add(look): return other(look)\n"
    exec(source + "def other(look): return look()", scope)
    assert phases.find_phase(scope["observe"](lambda: sys._getframe(0))) == "moments of inputs"
    assert phases.find_phase(scope["other"](lambda: sys._getframe(0))) == phases.OTHER
    scope["__name__"] = "another.part"
    assert phases.find_phase(scope["observe"](lambda: sys._getframe(0))) == phases.OTHER


def test_samples_have_the_shares_of_looks_and_the_most_memory(monkeypatch):
    scope = {"__name__": "structlin.part"}
    exec("def project(look): return look()\ndef resume(look): return look()", scope)
    samples = phases.Samples()
    for name, gigabytes in [("resume", 3), ("project", 1), ("resume", 2), ("resume", 1)]:
        monkeypatch.setattr(phases, "read_memory", lambda held=gigabytes: held * 10**9)
        samples.look(scope[name](lambda: sys._getframe(0)))
    assert [*samples.summary().items()] == [
        ("runs of both models", {"share": 0.75, "peak_gb": 3.0}),
        ("projection", {"share": 0.25, "peak_gb": 1.0}),
    ]


def test_the_calling_thread_is_looked_at_at_once_and_until_the_end():
    samples = phases.Samples()
    threads = threading.active_count()
    with samples.take():
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    assert samples.counts == {phases.OTHER: sum(samples.counts.values())}
    assert samples.counts


@pytest.mark.skipif(not phases.STATUS.exists(), reason="Linux alone says so")
def test_memory_is_that_of_the_process():
    before = phases.read_memory()
    held = torch.ones(25_000_000)  # 100 MB
    assert 90e6 < phases.read_memory() - before < 150e6
    del held


def test_a_page_has_the_phases_of_the_run_with_the_most_tokens():
    def make_row(count, share):
        seen = {"projection": {"share": share, "peak_gb": 1.26}}
        return {"tokens": count, "keep": 0.6, "seconds": 150.0, "peak_gb": 1.26, "phases": seen}

    result = {"rows": [make_row(16384, 0.25), make_row(4096, 0.5)]}
    assert read_table(phases.show_phases(result)) == [
        ["phase", "share of the time", "memory of the process at most, GB"],
        ["projection", "25 %", "1.3"],
    ]
    assert phases.numbers(result) == {
        "phases.tokens": "16,384",
        "phases.keep": "0.6",
        "phases.minutes": "2",
        "phases.gigabytes": "1.3",
    }
