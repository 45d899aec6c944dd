"""Every warning points at the line of the user that led to it."""

import inspect
import warnings

import pytest
import torch
from torch import nn

from structlin import (
    BTT,
    LowRank,
    StructuredLinear,
    compress,
    convert,
    distill,
    plan_compression,
)

X = torch.randn(40, 16)


class Model(nn.Module):
    """One layer is called twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.idle = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return self.again(self.again(self.first(x)).tanh())


LEFT = {"keep": None, "exclude": "idle", "progress": False}
ERROR = {"allocation": "error", "include": "first"}
CASES = {  # what warns, and of what
    "convert grows": (lambda m: convert(m, LowRank(rank=16)), "these layers grow"),
    "compress grows": (
        lambda m: compress(m, LowRank(rank=16), [X], include="first", keep=None),
        "these layers grow",
    ),
    "convert pads": (lambda m: convert(nn.Linear(16, 13), BTT()), "is padded to"),
    "a layer pads": (lambda m: StructuredLinear(16, 13, BTT()), "is padded to"),
    "no input": (lambda m: compress(m, BTT(), [X], exclude="again", keep=None), "no input"),
    "one token": (lambda m: compress(m, BTT(), [X[:1]], **ERROR), "no input"),
    "its plan": (lambda m: plan_compression(m, BTT(), [X[:1]], **ERROR), "no input"),
    "twice": (lambda m: compress(m, BTT(), [X], **LEFT), "one pass calls these layers"),
    "distill": (
        lambda m: distill(m, Model(), [X], steps=1, lr=1e3, progress=False),
        "distill",
    ),
}


def test_code_of_no_module_is_warned_as_well():
    with pytest.warns(UserWarning, match="is padded to"):
        exec("StructuredLinear(16, 13)", {"StructuredLinear": StructuredLinear})


@pytest.mark.parametrize("case", CASES)
def test_a_warning_names_the_line_that_called(case):
    call, text = CASES[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(Model())
    assert any(text in str(warning.message) for warning in caught)
    lines, first = inspect.getsourcelines(call)
    for warning in caught:
        assert warning.filename == __file__
        assert first <= warning.lineno < first + len(lines)
