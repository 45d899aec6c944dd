"""A stopwatch: how long it takes from a bare machine to a GPT that trains under transformers'
Trainer, and to a compressed language model with its figures.

    python -m benchmarks.stopwatch            # results/stopwatch.json; about 20 minutes
    python -m benchmarks.stopwatch --smoke    # seconds: the last line of each, here and small

The lines are those of docs/examples.md, as printed. They run in a fresh clone of what is committed,
with an environment of their own, without pip's cache and without a compiled engine. What remains is
what the machine itself has: Python, git, and the speed of its network, which downloads torch twice.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import report
from benchmarks.harness.record import RESULTS, save_json

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/examples.md"
BLOCK = re.compile(r"<!-- stopwatch (\w+) -->\n+```bash\n(.*?)```", re.DOTALL)
STAMP = 'echo "$EPOCHREALTIME" >> "$STAMPS"'

Row = dict[str, Any]


def read_blocks(page: str) -> dict[str, list[str]]:
    """Name -> the lines of each block that the stopwatch runs.

    >>> read_blocks("<!-- stopwatch one -->\\n```bash\\necho 1\\n# what\\necho 2\\n```")
    {'one': ['echo 1', 'echo 2']}
    """
    return {
        name: [line for line in text.splitlines() if line and not line.startswith("#")]
        for name, text in BLOCK.findall(page)
    }


def bare(environment: Mapping[str, str], work: Path) -> dict[str, str]:
    """The variables of a shell outside any virtual environment, whose caches are empty."""
    found = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    inside = found.pop("VIRTUAL_ENV", None)
    if inside:
        paths = found["PATH"].split(os.pathsep)
        found["PATH"] = os.pathsep.join(path for path in paths if not path.startswith(inside))
    return found | {"PIP_NO_CACHE_DIR": "1", "XDG_CACHE_HOME": str(work / "cache")}


def run_lines(lines: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[float]:
    """The seconds of each line, run by one shell in `folder`.

    Raises:
        subprocess.CalledProcessError: a line fails.
    """
    with tempfile.NamedTemporaryFile("r") as stamps:
        script = "\n".join(["set -e", STAMP, *(part for line in lines for part in (line, STAMP))])
        variables = {**environment, "STAMPS": stamps.name}
        subprocess.run(["bash", "-c", script], cwd=folder, env=variables, check=True)
        return [after - before for before, after in pairwise(map(float, stamps.read().split()))]


def time_block(lines: Sequence[str]) -> list[float]:
    """The seconds of each line on what a machine has that never saw us."""
    with tempfile.TemporaryDirectory() as work:
        clone = Path(work) / "structlin"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        return run_lines(lines, clone, bare(os.environ, Path(work)))


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of stopwatch.json")
    parser.add_argument("--smoke", action="store_true", help="does it run? Nothing is kept")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for name, lines in read_blocks(PAGE.read_text(encoding="utf-8")).items():
        if options.smoke:
            program, *_ = lines[-1].partition(" --")
            with tempfile.TemporaryDirectory() as out:
                kept = f" --out {out}" if "compress" in program else ""
                small = f"{program} --smoke{kept}".replace("python", sys.executable, 1)
                rows.append({"name": name, "seconds": run_lines([small], ROOT, os.environ)})
        else:
            rows.append({"name": name, "lines": lines, "seconds": time_block(lines)})
    shown = [
        {
            "": row["name"],
            "minutes": f"{sum(row['seconds']) / 60:.1f}",
            "of its lines": ", ".join(f"{each / 60:.1f}" for each in row["seconds"]),
        }
        for row in rows
    ]
    Console().print(report.grid("from a bare machine", shown))
    if not options.smoke:
        save_json(options.out / "stopwatch.json", rows=rows)
    return rows


if __name__ == "__main__":
    main()
