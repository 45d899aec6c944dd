"""torch.library.opcheck on the calls that layers and an optimizer make of structlin's operators."""

from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import structlin as s
from structlin._engine.cpu import library
from structlin.optim import Muon

if not library.load():
    raise ImportError("structlin's compiled engine is off")

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")
COMPILED = (*TESTS, "test_aot_dispatch_dynamic")


class Recorder(TorchDispatchMode):
    """Keeps one call of each operator with each kind of arguments."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("structlin"):
            shapes = tree_map(lambda a: (a.dtype, *a.shape) if isinstance(a, Tensor) else a, args)
            own = tree_map(lambda a: a.detach().clone() if isinstance(a, Tensor) else a, args)
            self.calls.setdefault(f"{func}{shapes}", (func, own))
        return func(*args, **kwargs or {})


def record():
    layers = [
        s.StructuredLinear(97, 101, s.BTT(rank=2)),
        s.StructuredLinear(24, 30, s.TT(rank=2, cores=3), bias=False, weight_norm=True),
        s.StructuredLinear(64, 64, s.BTT().activate(), dtype=torch.float64),
        s.quantize(s.StructuredLinear(64, 64, s.BTT())),
    ]
    with Recorder() as recorder:
        for layer in layers:
            for shape in ((1,), (2, 3), (), (0,)):
                x = torch.randn(*shape, layer.in_features, dtype=layer.compute_dtype)
                with torch.no_grad():
                    layer(x)
                layer(x.requires_grad_()).sum().backward()
        Muon(layers[0]).step()
    return list(recorder.calls.values())


def cases():
    seen = set()
    for n, (func, args) in enumerate(record()):
        tests = TESTS if func in seen else COMPILED  # one call of each operator is compiled
        if "choose" in str(func):  # gives a number, and is not traced
            tests = TESTS[:2]
        seen.add(func)
        yield f"{func}-{n}", partial(torch.library.opcheck, func, args, test_utils=tests)
        if func is torch.ops.structlin.multiply.default:  # `layer` is what autograd knows
            gains = None if args[3] is None else args[3].double()
            given = tree_map(require_gradient, (*args[:3], gains, *args[4:]))
            layer = torch.ops.structlin.layer.default
            yield f"{layer}-{n}", partial(torch.library.opcheck, layer, given, test_utils=tests)


def require_gradient(value):
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.clone().requires_grad_() if floats else value
