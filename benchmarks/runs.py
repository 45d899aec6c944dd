"""How a script that is no `Experiment` keeps its result."""

import argparse
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness.record import save_json


def keep(options: argparse.Namespace, name: str, figure: Figure, **content: Any) -> None:
    """`name.json` with machine, versions and command, and `name.png`, in `--out`; a smoke run needs
    it given."""
    if options.smoke and options.out == options.kept:
        return
    save_json(options.out / f"{name}.json", **content)
    figure.savefig(options.out / f"{name}.png", dpi=90)
