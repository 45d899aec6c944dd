"""Executes the notebooks of this folder, and stores in them what they print and draw.

    python examples/notebooks/execute.py              # all three; 20 minutes of CPU time
    python examples/notebooks/execute.py train_vit    # one
    python examples/notebooks/execute.py --smoke      # seconds each: do they run? Stores nothing

What a cell writes to stderr, such as a progress bar or a package's log, is shown here and not
stored. An error in a cell ends the program, and the notebook stays as it was.
"""

import argparse
import os
import time
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient
from nbformat import NotebookNode

import structlin

FOLDER = Path(__file__).parent
SMOKE = "STRUCTLIN_SMOKE"  # the notebooks read this variable


def execute(path: Path, *, smoke: bool) -> NotebookNode:
    """The notebook with the outputs of a fresh kernel; the file stays as it is.

    Raises:
        CellExecutionError: a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": None, "record_timing": False, "coalesce_streams": True}
    options["resources"] = {"metadata": {"path": str(path.parent)}}
    options["extra_arguments"] = ["--IPKernelApp.log_level=40"]  # not that it talks over TCP
    client = NotebookClient(notebook, **options)
    environment = {name: value for name, value in os.environ.items() if name != SMOKE}
    environment |= {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    client.execute(env=environment | ({SMOKE: "1"} if smoke else {}))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if is_kept(output)]
    notebook.metadata.language_info = {"name": "python"}  # no version, which would change the file
    return notebook


def is_kept(output: NotebookNode) -> bool:
    """Whether an output is a text, a value or a picture, and no log or progress bar."""
    if output.output_type == "display_data":
        return "image/png" in output.data
    if output.output_type == "stream" and output.name == "stderr":
        print(output.text)
        return False
    return True


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; nothing is stored")
    options = parser.parse_args(argv)
    structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))  # builds the engine before times
    structlin.show_config()
    for name in options.names or names:
        path, start = FOLDER / f"{name}.ipynb", time.perf_counter()
        notebook = execute(path, smoke=options.smoke)
        if not options.smoke:
            nbformat.write(notebook, path)
        cells = sum(cell.cell_type == "code" for cell in notebook.cells)
        print(f"{path.name}: {cells} cells ran in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
