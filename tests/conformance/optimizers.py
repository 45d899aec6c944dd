"""Muon and SOAP, as torch describes its Muon to its own tests, with torch's as the baseline.

`cases` trains in each of torch's configurations, stores and restores, and wants torch's errors.
`describe` puts torch's Muon and ours in the place of `optim_db`, for torch's test_optim.py.
"""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    optim_db,
    optim_error_inputs_func_muon,
    optim_inputs_func_muon,
)

from structlin import optim


def own(params):
    """A model that owns what a torch optimizer is given: matrices as linear layers."""
    model = nn.Module()
    for group in params if isinstance(params, list) else []:
        members = group["params"] if isinstance(group, dict) else [group]
        for entry in [members] if isinstance(members, Tensor) else members:
            tensor = entry[1] if isinstance(entry, tuple) else entry
            if all(tensor is not other for other in model.parameters()):
                owner = nn.Linear(*tensor.shape[::-1]) if tensor.ndim == 2 else nn.Module()
                owner._parameters = {"weight": tensor}
                model.add_module(f"p{len(model._modules)}", owner)
    return model


class Muon(optim.Muon):
    def __init__(self, params, lr=0.02, **options):
        params = [nn.Parameter(torch.zeros(2, 2))] if params is None else params
        params = params if isinstance(params, Tensor) else list(params)
        super().__init__(params, lr, model=own(params), **options)


class SOAP(optim.SOAP):
    def __init__(self, params, lr=0.02, **options):
        params = [nn.Parameter(torch.zeros(2, 2))] if params is None else params
        params = params if isinstance(params, Tensor) else list(params)
        super().__init__(params, lr, model=own(params), **options)


class Ours(OptimizerInfo):
    """Muon's class has the name that torch's tests go by, for Muon takes matrices alone there."""

    @property
    def name(self):
        return f"structlin_{super().name}"


def describe(kinds=(Muon,)):
    theirs = next(info for info in optim_db if info.optim_cls.__name__ == "Muon")
    inputs = {"optim_inputs_func": optim_inputs_func_muon}
    errors = {"optim_error_inputs_func": optim_error_inputs_func_muon}
    options = {"supported_impls": (), "not_og_supported_flags": (), "supports_complex": False}
    ours = (Ours(kind, **inputs, **errors, **options) for kind in kinds)
    optim_db[:] = [theirs, *ours]


def train(cls, kwargs):
    """The loss falls, and what is restored goes on alike."""
    weight, x = nn.Parameter(torch.randn(10, 5)), torch.randn(5)
    optimizer = cls([weight], **kwargs)

    def step(optimizer, weight):
        optimizer.zero_grad()
        loss = weight.mv(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [step(optimizer, weight) for _ in range(20)]
    assert losses[-1] < losses[0], losses
    again = nn.Parameter(weight.detach().clone())
    other = cls([again], **kwargs)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert step(optimizer, weight) == step(other, again)
    assert_close(again, weight, rtol=0, atol=0)


def refuse(cls, wanted):
    def run():
        made = cls(wanted.optimizer_error_input.params, **wanted.optimizer_error_input.kwargs)
        if wanted.error_on is OptimizerErrorEnum.STEP_ERROR:
            made.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(wanted.error_type, match=wanted.error_regex):
            run()


def cases():
    describe((Muon, SOAP))
    for info in optim_db:
        for entry in info.optim_inputs_func(device="cpu"):
            yield f"{info.name}-train-{entry.desc}", partial(train, info.optim_cls, entry.kwargs)
        for entry in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            said = entry.optimizer_error_input.desc
            yield f"{info.name}-error-{said}", partial(refuse, info.optim_cls, entry)
