"""Bad arguments: one clear error each, by `bad_inputs`."""

from itertools import count
from typing import Annotated, Literal, NewType

import numpy as np
import pytest
import torch
from torch import nn

from structlin import (
    BTT,
    Family,
    Structure,
    StructuredLinear,
    param_groups,
    save,
)
from structlin.modular import ReLU
from structlin.optim import Muon
from structlin.scaling import lr_mult
from structlin.stability import coordinate_check
from tests.faults.bad_inputs import CALLS, converted, list_cases, try_case


@pytest.fixture
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(converted(), "kept")


@pytest.mark.usefixtures("_folder")
def test_bad_inputs_are_refused_clearly():
    cases = list_cases(list(CALLS))[::23]  # prime to the number of values: each has its turn
    found = [(case, *try_case(*case)) for case in cases]
    wrong = [each for each in found if each[1] in ("unnamed", "obscure", "accepted")]
    assert len(wrong) <= len(found) // 300, wrong
    assert sum(kind == "clear" for _, kind, _ in found) > 0.9 * len(found)


@pytest.mark.usefixtures("_folder")
def test_an_object_of_no_use_is_a_type_error_in_every_argument():
    cases = [case for case in list_cases(list(CALLS)) if case[2] == "object()"]
    outcomes = {case: try_case(*case) for case in cases}
    refused = {case: text for case, (kind, text) in outcomes.items() if kind == "clear"}
    assert len(refused) > 200
    assert {text.partition(":")[0] for text in refused.values()} == {"TypeError"}


@pytest.mark.usefixtures("_folder")
def test_every_valid_call_is_accepted():
    for function, make in CALLS.values():
        function(**make())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StructuredLinear(8, 8, bias="False"), "bias='False' is a text"),
        (lambda: StructuredLinear(8, 8, zero_init=[]), r"zero_init=\[\] is of type list"),
        (lambda: StructuredLinear(8, 8, dtype=torch.int8), "dtype=torch.int8 must be"),
        (lambda: StructuredLinear(8, 8, device="gpu"), "device='gpu' cannot be used"),
        (lambda: Muon(nn.Linear(2, 2), masses={0: 1.0}), "has a key 0; take str"),
        (lambda: lr_mult(BTT(), 8, 2), r"core=BTT\(.*\) must be a Core"),
        (lambda: ReLU() ** 10**30, "at most 10000"),
        (
            lambda: coordinate_check(
                nn.Linear, [8, 16], [1], loss=len, optimizer=len, seeds=count()
            ),
            r"seeds=count\(\d+\) has more than 10000 entries",
        ),
    ],
)
def test_an_argument_of_another_type_or_size_is_refused_by_name(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


class Static(Family):
    """Its method needs no family."""

    @staticmethod
    def structure(i: int, o: int) -> Structure:
        return Structure("i -> o", "o i", i=i, o=o)


Width = NewType("Width", int)
Even = Annotated[int, lambda value: value % 2 == 0]  # a note of another library


class Hinted(Family):
    """Hints that only a type checker understands."""

    def structure(self, in_features: Width, out_features: Literal[16]) -> Structure:
        return Static.structure(in_features, out_features)


class Noted(Family):
    """Hints with notes of another library."""

    def structure(self, in_features: Even, out_features: Even) -> Structure:
        return Static.structure(in_features, out_features)


def test_families_with_other_methods_and_hints_are_families():
    for family in (Static(), Hinted(), Noted()):
        assert StructuredLinear(16, 16, family)(torch.ones(16)).shape == (16,)
    with pytest.raises(TypeError, match=r"in_features=2\.5 must be an integer"):
        Noted().structure(2.5, 16)


@pytest.mark.slow
def test_a_checked_function_is_compiled_as_if_it_were_not():
    core = BTT().structure(64, 64).cores[0]
    scale = torch.compile(lambda x: x * lr_mult(core, 64, 2), fullgraph=True, backend="eager")
    assert torch.equal(scale(torch.ones(2)), torch.full((2,), lr_mult(core, 64, 2)))


def test_what_is_legal_is_taken():
    assert StructuredLinear(8, 8, bias=np.False_).bias is None
    model = nn.Sequential(nn.Linear(4, 4))
    model.scale = nn.Parameter(torch.tensor(1.0))
    groups = [{"params": model.scale}, {"params": model[0].weight}]
    assert len(Muon(groups, model=model).param_groups) == 2
    assert param_groups(model, torch.tensor(0.1))[0]["lr"] == 0.1
    muon = Muon(model, masses={"0": np.float64(2)})
    assert type(muon.masses["0"]) is float


def test_integers_of_numpy_become_pythons():
    family = BTT(rank=np.int64(2), cores=np.int32(2))
    layer = StructuredLinear(np.int64(16), np.int64(16), family)
    numbers = family.rank, family.cores, layer.in_features, *Family.divide(np.int64(8), 4, 2)
    assert numbers == (2, 2, 16, 4, 2)
    assert all(type(number) is int for number in numbers)
    assert BTT(rank=(np.int64(2), 3), cores=3).to_dict()["rank"] == (2, 3)
