"""Structured layers, as torch describes nn.Linear to its own tests, with nn.Linear as the baseline.

`cases` runs torch's `NewModuleTest` (non-contiguous inputs, pickles, gradients and theirs, casts)
and gradcheck with all of its switches, on nn.Linear's own inputs and a few more. `describe` puts
the layers in the place of `module_db`, for torch's test_modules.py.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.testing import make_tensor
from torch.testing._internal import common_modules as common
from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, ModuleInput
from torch.testing._internal.common_nn import NewModuleTest, NNTestCase

import structlin as s

INPUTS = common.module_inputs_torch_nn_Linear


def kind(name, structure, base=s.StructuredLinear, **own):
    """A class that is made as nn.Linear is, and that pickle finds by its name."""

    class Layer(base):
        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            factory = {"device": device, "dtype": dtype}
            super().__init__(in_features, out_features, structure, bias, **factory, **own)

    Layer.__name__ = Layer.__qualname__ = name
    globals()[name] = Layer
    return Layer


KINDS = [
    nn.Linear,
    kind("Dense", s.Dense()),
    kind("LowRank", s.LowRank(rank=2)),
    kind("Kronecker", s.Kronecker()),
    kind("TT", s.TT(rank=1, cores=3)),
    kind("Monarch", s.Monarch(blocks=1)),
    kind("BLAST", s.BLAST(blocks=1, rank=2)),
    kind("BTT", s.BTT(rank=2)),
    kind("Normed", s.BTT(), weight_norm=True),
    kind("Activated", s.BTT().activate()),
    kind("ActivatedLowRank", s.LowRank(rank=2).activate()),
]


def inputs_of(info, device, dtype, requires_grad, training, **_):
    make = partial(make_tensor, device=device, dtype=dtype, requires_grad=requires_grad)
    found = INPUTS(info, device, dtype, requires_grad, training)
    for name, shape in (("four_dims", (2, 1, 3, 6)), ("padded", (3, 7)), ("empty", (2, 0, 6))):
        found.append(ModuleInput(FunctionInput(shape[-1], 6), FunctionInput(make(shape)), name))
    for entry in found:
        entry.reference_fn = refer
    return found


def refer(layer, *args, **kwargs):
    (x,) = (*args, *kwargs.values())
    try:
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.to_dense()
    except ValueError:  # no matrix; the tests of such layers have an oracle
        return layer(x)
    return F.linear(x, weight, layer.bias)


def describe():
    common.module_db[:] = [
        ModuleInfo(each, module_inputs_func=inputs_of, train_and_eval_differ=each is KINDS[-1])
        for each in KINDS
    ]


class Case(NNTestCase):
    """What NewModuleTest asks of the class that runs it."""

    def _forward(self, module, x):
        return module(*x) if isinstance(x, tuple) else module(x)

    def _backward(self, module, x, y, dy, create_graph=False):
        y.backward(dy, retain_graph=True, create_graph=create_graph)
        return x.grad

    def _get_parameters(self, module):
        return list(module.parameters()), [value.grad for value in module.parameters()]

    def _zero_grad_parameters(self, module):
        module.zero_grad(set_to_none=False)


def check_gradients(layer, x):
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = (x, *(value.detach().clone().requires_grad_() for value in values))
    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    gradcheck(run, inputs, check_forward_ad=True, **batched)
    gradgradcheck(run, inputs, check_fwd_over_rev=True, check_batched_grad=True)


def cases():
    for each in KINDS:
        for n, entry in enumerate(inputs_of(None, "cpu", torch.double, True, True)):
            name, widths = f"{each.__name__}-{entry.desc or n}", entry.constructor_input.args
            make = partial(each, **entry.constructor_input.kwargs, dtype=torch.double)
            (x,) = (*entry.forward_input.args, *entry.forward_input.kwargs.values())
            options = {"constructor_args": widths, "input": x.detach(), "fullname": name}
            options["reference_fn"] = lambda x, _, layer: refer(layer, x)
            yield f"{name}-module", partial(NewModuleTest(make, **options), Case())
            if entry.desc in ("no_bias", "padded"):
                yield f"{name}-gradients", partial(check_gradients, make(*widths), x)
