"""docs/models.md, the table of what a conversion survives, model by model."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks import models
from benchmarks.harness.record import read


@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles and exports
@pytest.mark.parametrize("name", ["gpt2", "vit", "TransformerEncoder", "beit_base_patch16_224"])
def test_a_row_made_anew_says_what_the_kept_one_says(name):
    (kept,) = (row for row in read("models")["rows"] if row["model"] == name)
    if find_spec(kept["package"]) is None or not version(kept["package"]).startswith(
        kept["version"]
    ):
        pytest.skip(f"{kept['package']} {kept['version']} is not installed")
    # without rounding errors: another CPU may round where this one does not
    made = {key: value.replace("< 1e-5", "0") for key, value in models.run(name).items()}
    assert made == {key: kept[key].replace("< 1e-5", "0") for key in made}


def test_every_model_is_kept_once_with_all_cells():
    rows = read("models")["rows"]
    assert [row["model"] for row in rows] == [*models.CASES]
    assert all({*models.COLUMNS} <= {*row} for row in rows)


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_fails_fills_its_cell_with_the_error():
    class Stuck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            if x.sum().item() > 1e9:  # no graph holds this
                return x
            return self.layer(x)

    cells = models.try_all("stuck", "torch", Stuck, {"x": torch.ones(2, 16)})
    assert cells["compile"].startswith("**no**: ")
    assert cells["compile"].endswith("; so does dense")
    assert cells["train step"] == "loss falls"
    assert cells["save/load diff"] == "0"
