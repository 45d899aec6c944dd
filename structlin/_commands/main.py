"""`structlin plan | compress | bench | info`: its arguments, exit codes and output.

A command prints its table, or with `--json` one object, on stdout. All else goes to stderr. The
exit code is 0; 2 for an argument or input that is refused, in one line; 1 for a failure later.
"""

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import __version__
from .._kernels import engine
from .._report import Table
from . import bench, compress, plan
from .arguments import fraction, natural, positive, rate, steps

PACKAGES = "einops", "safetensors", "transformers", "gguf", "timm"
MODEL = "a GGUF file or a folder of transformers"
PATTERNS = 'layers by role ("ffn"), glob ("*mlp*") or "re:" and an expression, as of convert'
INTERRUPTED = 130  # exit code, as shells have it


class Parser(argparse.ArgumentParser):
    """One whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    options = make_parser().parse_args(argv)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # others may print there
            warnings.showwarning = _show_warning
            text, found = options.run(options)
    except KeyboardInterrupt:
        return _say("interrupted; nothing was written", INTERRUPTED)
    except ValueError as error:
        return _say(f"error: {error}", 2)
    except (ArithmeticError, MemoryError, OSError, RuntimeError) as error:
        return _say(f"failed: {type(error).__name__}: {error}", 1)
    print(json.dumps(found) if options.json else text)
    return 0


def _say(says: str, code: int = 0) -> int:
    """Print one line on stderr, and return the exit code."""
    print("structlin:", " ".join(says.split()), file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _say(f"warning: {message}")


def info(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Versions, and what multiplies."""
    found: dict[str, Any] = {"structlin": __version__, "torch": torch.__version__}
    found |= {name: _find_version(name) for name in PACKAGES}
    found["Python"] = platform.python_version()
    found["platform"] = f"{platform.system()} {platform.machine()}"
    found |= engine.describe()
    table = Table("", "")
    for name, value in found.items():
        shown = "not installed" if value is None else value
        table.row(name, shown.replace(str(Path.home()), "~"))
    lines = str(table).splitlines()[2:]
    return "\n".join(lines), found


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---- arguments -----------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="structlin", description="Structured linear layers, from the shell.")
    parser.add_argument("--version", action="version", version=f"structlin {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_plan, _add_compress, _add_bench, _add_info):
        command = add(commands)
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add(commands: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    command.set_defaults(run=run)
    return command


def _add_layers(command: argparse.ArgumentParser) -> None:
    command.add_argument("--include", nargs="+", metavar="PATTERN", help=PATTERNS)
    command.add_argument("--exclude", nargs="+", metavar="PATTERN", default=[], help="the same")


def _add_plan(commands: Any) -> argparse.ArgumentParser:
    about = "Show what convert, or with --keep compress, would do to a model, without its weights."
    command = _add(commands, "plan", plan.run, about)
    command.add_argument("model", metavar="MODEL", help=f"{MODEL}, or a name of timm")
    text = "such as 'BTT(rank=1)'; with --keep the name alone (default: BTT(rank=1), LowRank)"
    command.add_argument("--structure", help=text)
    text = "fraction of the layers' parameters to keep; every layer keeps this share"
    command.add_argument("--keep", type=fraction, help=text)
    _add_layers(command)
    return command


def _add_compress(commands: Any) -> argparse.ArgumentParser:
    about = "Compress a trained model of text, heal it, measure it and save it with a model card."
    command = _add(commands, "compress", compress.run, about)
    command.add_argument("model", metavar="MODEL", help=MODEL)
    text = "fraction to keep of the parameters of the layers that are converted"
    command.add_argument("--keep", type=fraction, required=True, help=text)
    command.add_argument("--data", type=Path, required=True, help="a text file, UTF-8")
    command.add_argument("--out", type=Path, required=True, help="a new folder")
    text = "a name such as LowRank (default: %(default)s)"
    command.add_argument("--structure", default="LowRank", help=text)
    _add_layers(command)
    command.add_argument("--heal", type=steps, help="steps of distillation (default: 30, 100)")
    command.add_argument("--heal-lr", type=rate, help="their learning rate (default: 1e-4, 1e-3)")
    command.add_argument("--refine", type=steps, default=0, help="steps for each block")
    text = "batches that calibrate; 0: by the weights alone (default: 16, 8)"
    command.add_argument("--calibration", type=steps, help=text)
    text = "windows, or pairs of sentences, of a batch (default: 2, 8)"
    command.add_argument("--batch", type=positive, help=text)
    command.add_argument("--context", type=positive, help="tokens of a window (default: 256)")
    command.add_argument("--seed", type=natural, default=0, help="of the batches")
    command.epilog = (
        "Of two defaults the first is for causal language models, the second for others."
    )
    return command


def _add_bench(commands: Any) -> argparse.ArgumentParser:
    about = "Time a dense layer and structured ones in turn on this machine, for some seconds."
    command = _add(commands, "bench", bench.run, about)
    text = "in_features and out_features (default: 1024 1024)"
    command.add_argument("widths", nargs="*", type=positive, metavar="IN OUT", help=text)
    text = "such as 'BTT(rank=1)' (default: two of BTT, Monarch, low rank)"
    command.add_argument("--structures", nargs="+", metavar="STRUCTURE", help=text)
    command.add_argument("--tokens", type=positive, default=4096, help="(default: %(default)s)")
    command.add_argument("--dtype", choices=bench.DTYPES, default=bench.DTYPES[0])
    command.add_argument("--device", choices=("cpu", "cuda"), help="(default: a GPU if there is)")
    command.add_argument("--forward", action="store_true", help="no backward pass")
    return command


def _add_info(commands: Any) -> argparse.ArgumentParser:
    return _add(commands, "info", info, "Show versions, the engine and the machine as it reads it.")
