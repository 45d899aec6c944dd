"""docs/models.md, the table of what a conversion survives, model by model."""

import importlib.util
import warnings

import pytest

pytest.importorskip("transformers")

from benchmarks import models

DOCUMENT = models.DOCUMENT.read_text(encoding="utf-8")


def rounded(text: str) -> str:
    """Without rounding errors: another CPU may round where this one does not."""
    return text.replace("< 1e-5", "0")


@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles and exports
@pytest.mark.parametrize("name", ["gpt2", "vit", "TransformerEncoder", "beit_base_patch16_224"])
def test_a_row_made_anew_says_what_the_file_says(name):
    (case,) = (case for case in models.cases() if case.name == name)
    if not case.installed:
        pytest.skip(f"{case.package} is not installed")
    if not all(version in DOCUMENT for version in models.versions(case.package).split(", ")):
        pytest.skip(f"the file was made with other versions than {models.versions(case.package)}")
    made = models.line(models.row(case))
    assert rounded(made) in rounded(DOCUMENT)


def test_the_file_lists_every_model_once():
    rows = [line.split(" | ")[1:] for line in DOCUMENT.splitlines() if line.endswith(" |")][1:]
    expected = [case.package for case in models.cases()]
    assert [row[0] for row in rows] == expected
    assert all(len(row) == 1 + len(models.COLUMNS) for row in rows)


def test_a_step_that_fails_fills_its_cell_with_the_error():
    class Stuck(models.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = models.nn.Linear(16, 16)

        def forward(self, x):
            if x.sum().item() > 1e9:  # no graph holds this
                return x
            return self.layer(x)

    case = models.Case("stuck", "torch", Stuck, lambda: {"x": models.torch.ones(2, 16)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells = models.row(case)
    assert cells["compile"].startswith("**no**: ")
    assert cells["compile"].endswith("; so does dense")
    assert cells["train step"] == "loss falls"
    assert cells["save/load diff"] == "0"


def test_a_document_is_not_written_when_a_package_is_missing(monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name) if name == "torch" else None
    )
    monkeypatch.setattr(models, "row", lambda case: {})
    with pytest.raises(SystemExit):
        models.main(["--out", str(tmp_path / "models.md")])
    assert "install timm, transformers first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
