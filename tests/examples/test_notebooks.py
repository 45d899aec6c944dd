"""examples/notebooks: each runs, and what is stored in it is whole, of a full run and of no
machine."""

import re
from pathlib import Path

import pytest

pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("transformers")

import execute
import nbformat

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 400_000
PLACES = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|work|mnt|var|private|Users|content)/\w"
    r"|[A-Z]:\\\\|site-packages|0x[0-9a-f]{6,}"
)

named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output):
    return output.text if output.output_type == "stream" else output.data.get("text/plain", "")


@named
def test_a_notebook_runs_and_gives_output_wherever_the_stored_one_has_some(path):
    before = path.read_bytes()
    ran = [cell for cell in execute.execute(path, smoke=True).cells if cell.cell_type == "code"]
    assert path.read_bytes() == before
    stored = cells_of(path)
    assert [bool(cell.outputs) for cell in ran] == [bool(cell.outputs) for cell in stored]
    assert "SMOKE" in text_of(ran[0].outputs[0])  # it was the short run


@named
def test_what_is_stored_comes_from_one_full_run_without_errors(path):
    cells = cells_of(path)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    kinds = {output.output_type for output in outputs}
    assert kinds <= {"stream", "execute_result", "display_data"}  # and no error
    assert all(execute.is_kept(output) for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "SMOKE" not in "".join(map(text_of, outputs))
    assert all(cell.outputs for cell in cells if re.search(r"print\(|plt\.show", cell.source))


@named
def test_a_notebook_is_small_names_no_place_and_describes_its_pictures(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    assert not PLACES.findall(text)
    for cell in cells_of(path):
        drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
        assert drawn == ("alt" in cell.metadata)


def test_a_place_is_found():
    for text in ("File /home/me/x.py", r"C:\\Users", "lib/site-packages/torch", "at 0x7f00aabbcc"):
        assert PLACES.search(text)


def write(path, source):
    cell = nbformat.v4.new_code_cell(source)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    return path


def test_an_error_in_a_cell_is_an_error_and_the_file_stays(tmp_path):
    path = write(tmp_path / "broken.ipynb", "1 / 0")
    before = path.read_bytes()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute.execute(path, smoke=True)
    assert path.read_bytes() == before


def test_logs_and_bars_are_shown_and_not_kept(tmp_path, capsys):
    source = (
        "import sys; from IPython.display import HTML, display\n"
        "print('said'); print('logged', file=sys.stderr); display(HTML('<b>bar</b>')); 6 * 7"
    )
    (cell,) = execute.execute(write(tmp_path / "loud.ipynb", source), smoke=True).cells
    assert [text_of(output).strip() for output in cell.outputs] == ["said", "42"]
    assert "logged" in capsys.readouterr().out
