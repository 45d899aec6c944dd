"""Each argument of each public function in turn is something wrong: what does the caller see?

A valid call of each function stands in `CALLS`. One argument at a time is replaced by each of
`VALUES`, and what happens is one of these:

    clear     an error that structlin raises, whose message names the argument or its value
    python    Python's own: an unknown keyword, or a file that cannot be read or written
    theirs    an error of the given model or function, which structlin has called
    unnamed   an error that structlin raises, whose message names neither
    obscure   an error from inside of torch, einops or Python
    meant     no error: the argument may have this value, see `MEANT`
    accepted  no error, and the argument should not have this value

    python -m tests.faults.bad_inputs                   # every public function: some minutes
    python -m tests.faults.bad_inputs optim.SOAP optim.AdamW
"""

import dis
import inspect
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import structlin
from structlin import (
    BTT,
    LowRank,
    Structure,
    StructuredLinear,
    convert,
    duality,
    modular,
    stability,
)
from structlin.optim import (
    SOAP,
    AdamW,
    Depth,
    Muon,
    Normed,
    declare_weights,
    shard_placement_fn,
)

PACKAGE = os.path.dirname(structlin.__file__) + os.sep

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "3": lambda: 3,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "10**30": lambda: 10**30,
    "''": lambda: "",
    "'x'": lambda: "x",
    "[]": list,
    "{}": dict,
    "[1, 2]": lambda: [1, 2],
    "{'x': 1}": lambda: {"x": 1},
    "[1] * 20_000": lambda: [1] * 20_000,
    "object()": object,
    "a path": lambda: Path("x"),
    "len": lambda: len,
    "numpy 3": lambda: np.int64(3),
    "numpy 0.5": lambda: np.float64(0.5),
    "torch.int8": lambda: torch.int8,
    "a module": lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU()),
    "a family": lambda: BTT(rank=1),
    "tensor 1.0": lambda: torch.tensor(1.0),
    "tensor nan": lambda: torch.full((8, 8), torch.nan),
    "tensor (0,)": lambda: torch.zeros(0),
    "tensor (3, 5)": lambda: torch.ones(3, 5),
    "tensor int": lambda: torch.ones(8, 8, dtype=torch.int64),
    "tensor meta": lambda: torch.ones(8, 8, device="meta"),
}


# ---- what is no fault ----------------------------------------------------------------------------


def _say(values: str, arguments: str) -> dict[str, set[str]]:
    return {value: set(arguments.split()) for value in values.split("; ")}


_COUNTS = """
    base block_depth blocks chunk context cores d_query d_value depth every exponent fused heads
    in_channels in_features kernel multiple n out_channels out_features padding
    rank seed size split steps stride sweeps tokens vocabulary width world_size refine dim
    ignore_index precondition_frequency max_precond_dim
"""
_RATES = """
    a blocks_mass eps lr mass norm other_lr target weight_decay
"""
_POSITIVE = "tolerance seconds"
_TENSORS = "gradient matrix"
_BATCHES = "example batch batches x"
MEANT: dict[str, set[str]] = {}  # value -> arguments that may have it
for meant in (
    _say("3; numpy 3", f"{_COUNTS} {_RATES} {_POSITIVE}"),
    _say("1.5; 10**30; numpy 0.5", f"{_RATES} {_POSITIVE}"),
    _say("0", f"{_RATES} exponent refine sweeps seed dim ignore_index momentum"),
    _say("0", "beta bias epsilon gamma phi rho label_smoothing shampoo_beta"),
    _say("-1", "seed dim ignore_index a"),
    _say("None", "between bias keep"),
    _say("numpy 0.5", "alpha momentum label_smoothing keep shampoo_beta"),
    _say("10**30", "size"),  # arithmetic of integers alone
    _say("tensor 1.0", "lr other_lr"),
    _say("True", "activated bias bottleneck_variance causal logits per_vector progress"),
    _say("True", "amsgrad capturable foreach fused maximize scale_eps"),
    _say("True", "structure_aware training weight_norm zero_init"),
    _say("[]; {}; tensor (0,)", "exclude zero_init dim ends"),
    _say("{}", "base masses overrides setting split update gradients"),
    _say("{'x': 1}", "setting"),
    _say("[1, 2]", "seeds widths lrs dim masses nu psi"),
    _say("'x'; a path", "path blocks"),
    _say("''", "blocks"),
    _say("'x'; {'x': 1}; len", "ends"),  # patterns, which are read with a model
    _say("a family", "structure of"),
    _say("a module", "model base params"),
    _say("len; a module", "method"),  # a function, which is called later
    _say("tensor nan; tensor (3, 5); tensor meta; tensor (0,)", f"{_TENSORS} {_BATCHES} weight"),
):
    for label, names in meant.items():
        MEANT[label] = MEANT.get(label, set()) | names


# ---- valid calls ---------------------------------------------------------------------------------


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def converted() -> nn.Module:
    return convert(dense(), BTT(rank=1))


def build(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module, width: int = 0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows() -> Tensor:
    return torch.linspace(-1, 1, 128).view(16, 8)


def matrix() -> Tensor:
    return torch.linspace(-1, 1, 64).view(8, 8).cos()


def structure() -> Structure:
    return BTT(rank=1).structure(8, 8)


def cores() -> list[Tensor]:
    return [torch.ones(core.shape) for core in structure().cores]


def net() -> modular.Module:
    module = modular.Linear(8, 8) @ modular.ReLU() @ modular.Linear(8, 8)
    module(rows()).square().mean().backward()
    return module


def blocks() -> nn.Module:
    return nn.ModuleList([dense(), dense()])


def of(make: Callable[[], Any], method: str) -> Callable[..., Any]:
    """A method of a new object for each call."""

    def call(**arguments: Any) -> Any:
        return getattr(make(), method)(**arguments)

    call.__signature__ = inspect.signature(getattr(make(), method))  # type: ignore[attr-defined]
    return call


def add_group(optimizer: type[Muon]) -> Callable[..., Any]:
    """Adding a group that has options of its own, which are the arguments."""

    def call(**options: Any) -> None:
        model = dense()
        optimizer(model[0], model=model).add_param_group({"params": model[2], **options})

    kind = inspect.Parameter.KEYWORD_ONLY
    options = optimizer(dense()).defaults.items()
    parameters = [inspect.Parameter(name, kind, default=value) for name, value in options]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


Call = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]  # and valid arguments
widths: dict[str, Any] = {"in_features": 8, "out_features": 8}
layer = partial(StructuredLinear, 8, 8)
FAMILIES: dict[type[structlin.Family], dict[str, Any]] = {
    structlin.BLAST: {"blocks": 2, "rank": 1},
    structlin.BTT: {"rank": 1, "cores": 2},
    structlin.BlockDiagonal: {"blocks": 2},
    structlin.Dense: {},
    structlin.Kronecker: {},
    structlin.LowRank: {"rank": 1},
    structlin.Monarch: {"blocks": 2},
    structlin.Split: {"split": 2, "of": BTT(rank=1)},
    structlin.TT: {"rank": 1, "cores": 2},
}
CALLS: dict[str, Call] = {
    "family": (structlin.family, lambda: {"name": "btt"}),
    "family(rank)": (lambda rank: structlin.family("btt", rank=rank), lambda: {"rank": 1}),
    "Family.activate": (BTT().activate, lambda: {"between": "silu"}),
    "Family.divide": (structlin.Family.divide, lambda: {**widths, "blocks": 2}),
    "Structure": (
        lambda signature, core, size: Structure(signature, "r i", core, i=8, o=8, r=size),
        lambda: {"signature": "i -> o", "core": "o r", "size": 2},
    ),
    "Structure.activate": (structure().activate, lambda: {"between": "silu"}),
    "Structure.from_dict": (Structure.from_dict, lambda: {"data": structure().to_dict()}),
    "StructuredLinear": (StructuredLinear, lambda: dict(widths)),
    "StructuredLinear.forward": (lambda x: layer()(x), lambda: {"x": rows()}),
    "StructuredLinear.match_norm_": (of(layer, "match_norm_"), lambda: {"norm": 1.0}),
    "StructuredLinear.from_dense_": (
        of(layer, "from_dense_"),
        lambda: {"weight": matrix(), "bias": torch.ones(8)},
    ),
    "StructuredLinear.set_cores_": (of(layer, "set_cores_"), lambda: {"cores": cores()}),
    "apply": (
        structlin.apply,
        lambda: {"structure": structure(), "cores": cores(), "x": rows(), "bias": torch.ones(8)},
    ),
    "to_dense": (structlin.to_dense, lambda: {"structure": structure(), "cores": cores()}),
    "project": (structlin.project, lambda: {"weight": matrix(), "structure": LowRank(rank=2)}),
    "convert": (structlin.convert, lambda: {"model": dense()}),
    "plan": (structlin.plan, lambda: {"model": dense()}),
    "densify": (structlin.densify, lambda: {"model": converted()}),
    "quantize": (structlin.quantize, lambda: {"model": converted()}),
    "compress": (
        structlin.compress,
        lambda: {"model": dense(), "structure": LowRank(rank=1), "batches": [rows()]},
    ),
    "plan_compression": (
        structlin.plan_compression,
        lambda: {"model": dense(), "structure": LowRank(rank=1), "batches": [rows()]},
    ),
    "distill": (
        structlin.distill,
        lambda: {"model": converted(), "teacher": dense(), "batches": [rows()] * 2, "steps": 2},
    ),
    "cost": (structlin.cost, lambda: {"model": dense()}),
    "summary": (structlin.summary, lambda: {"model": converted()}),
    "widen": (structlin.widen, lambda: {"build": build, "dense": 16, "multiple": 8}),
    "save": (structlin.save, lambda: {"model": converted(), "path": "saved"}),
    "load": (structlin.load, lambda: {"model": dense(), "path": "kept"}),
    "linear_cross_entropy": (
        structlin.linear_cross_entropy,
        lambda: {"input": rows(), "layer": nn.Linear(8, 8), "target": torch.arange(16) % 8},
    ),
    "init_std": (structlin.scaling.init_std, lambda: {"core": structure().cores[0]}),
    "lr_mult": (
        structlin.scaling.lr_mult,
        lambda: {"core": structure().cores[0], "in_features": 8, "cores": 2},
    ),
    "lr_mult(sgd)": (
        partial(structlin.scaling.lr_mult, optimizer="sgd"),
        lambda: {"core": structure().cores[0], **widths, "cores": 2},
    ),
    "polar_factor": (structlin.polar_factor, lambda: {"matrix": matrix()}),
    "duality.dualize": (duality.dualize, lambda: {"gradient": matrix()}),
    "duality.dualize_convolution": (
        duality.dualize_convolution,
        lambda: {"gradient": matrix().view(4, 4, 2, 2)},
    ),
    "duality.dual_norm": (duality.dual_norm, lambda: {"gradient": matrix()}),
    "duality.dualize_embedding": (duality.dualize_embedding, lambda: {"gradient": matrix()}),
    "duality.spectral_bound": (duality.spectral_bound, lambda: {"matrix": matrix()}),
    "param_groups": (structlin.param_groups, lambda: {"model": converted(), "lr": 0.1}),
    "keep_ratios": (
        structlin.keep_ratios,
        lambda: {"optimizer": torch.optim.SGD(structlin.param_groups(converted(), 0.1))},
    ),
    "optim.AdamW": (AdamW, lambda: {"model": converted(), "lr": 0.1}),
    "optim.AdamW.add_param_group": (
        of(lambda: AdamW(converted()), "add_param_group"),
        lambda: {"param_group": {"params": []}},
    ),
    "optim.AdamW.load_state_dict": (
        of(lambda: AdamW(converted()), "load_state_dict"),
        lambda: {"state_dict": AdamW(converted()).state_dict()},
    ),
    "optim.Normed": (Normed, lambda: {"model": (model := converted()), "optimizer": sgd(model)}),
    "optim.Depth": (Depth, lambda: {"base": 1, "alpha": 1.0}),
    "optim.Depth.multiplier": (
        of(lambda: Depth(base=1), "multiplier"),
        lambda: {"model": blocks()},
    ),
    "optim.Depth.scale_": (
        of(lambda: Depth(base=1, ends="*2"), "scale_"),
        lambda: {"model": blocks()},
    ),
    "optim.declare_weights": (
        lambda module_class, fused, weight: declare_weights(
            module_class, fused=fused, weight=weight
        ),
        lambda: {"module_class": type("Own", (nn.Module,), {}), "fused": 2, "weight": "e m n"},
    ),
    "optim.shard_placement_fn": (
        shard_placement_fn,
        lambda: {"model": converted(), "world_size": 4},
    ),
    "modular.Linear": (modular.Linear, lambda: dict(widths)),
    "modular.Structured": (modular.Structured, lambda: {**widths, "structure": BTT(rank=1)}),
    "modular.Embed": (modular.Embed, lambda: {"tokens": 8, "width": 8}),
    "modular.Conv2D": (modular.Conv2D, lambda: {"in_channels": 2, "out_channels": 2}),
    "modular.MeanSubtract": (modular.MeanSubtract, dict),
    "modular.RMSDivide": (modular.RMSDivide, dict),
    "modular.LayerNorm": (modular.LayerNorm, dict),
    "modular.FunctionalAttention": (modular.FunctionalAttention, lambda: {"causal": True}),
    "modular.SplitHeads": (modular.SplitHeads, lambda: {"heads": 2}),
    "modular.masses": (modular.masses, lambda: {"model": net()}),
    "modular.Composite": (
        lambda part: modular.Composite(modular.ReLU(), part),
        lambda: {"part": modular.Linear(8, 8)},
    ),
    "modular.Module * a": (lambda a: modular.ReLU() * a, lambda: {"a": 2.0}),
    "modular.Module ** exponent": (
        lambda exponent: modular.ReLU() ** exponent,
        lambda: {"exponent": 2},
    ),
    "modular.Module.tare": (of(net, "tare"), lambda: {"mass": 1.0}),
    "modular.Module.norm": (of(net, "norm"), lambda: {"update": {"0.linear.weight": matrix()}}),
    "modular.Module.dualize": (of(net, "dualize"), dict),
    "modular.Module.dual_norm": (of(net, "dual_norm"), dict),
    "modular.Module.descend_": (of(net, "descend_"), lambda: {"lr": 0.1}),
    "stability.coordinate_check": (
        stability.coordinate_check,
        lambda: {
            **{"build": build, "widths": [8, 16], "batches": [rows()], "loss": loss},
            **{"optimizer": sgd, "steps": 1, "seeds": [0]},
        },
    ),
}
for optimizer in (Muon, SOAP):
    made = partial(lambda make: make(converted()), optimizer)
    CALLS |= {
        f"optim.{optimizer.__name__}": (optimizer, lambda: {"params": converted()}),
        f"optim.{optimizer.__name__}.add_param_group": (
            of(made, "add_param_group"),
            lambda: {"param_group": {"params": []}},
        ),
        f"optim.{optimizer.__name__}.add_param_group (options)": (add_group(optimizer), dict),
        f"optim.{optimizer.__name__}.load_state_dict": (
            of(made, "load_state_dict"),
            partial(lambda make: {"state_dict": make().state_dict()}, made),
        ),
    }
for kind, options in FAMILIES.items():
    CALLS[kind.__name__] = (kind, partial(dict, options))
    CALLS[f"{kind.__name__}.structure"] = (kind(**options).structure, partial(dict, widths))


# ---- what happens --------------------------------------------------------------------------------


def list_cases(functions: Sequence[str]) -> list[tuple[str, str, str]]:
    """Each argument with each value, and an unknown keyword for each function."""
    cases = []
    for name in functions:
        known = inspect.signature(CALLS[name][0]).parameters.values()
        named = [each.name for each in known if each.kind != each.VAR_KEYWORD]
        cases += [(name, argument, value) for argument in named for value in VALUES]
        cases.append((name, "unknown", "3"))
    return cases


def try_case(name: str, argument: str, label: str) -> tuple[str, str]:
    """Make the call, and say what came of it: the kind, and the error."""
    function, make = CALLS[name]
    valid, value = make(), VALUES[label]()
    known = inspect.signature(function).parameters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**{**valid, argument: value})
    except Exception as error:
        return judge(error, argument, value, [*known])
    defaults = known[argument].default, valid.get(argument, 0)
    optional = value is None and None in defaults
    return "meant" if optional or argument in MEANT.get(label, ()) else "accepted", ""


def judge(error: Exception, argument: str, value: Any, arguments: Sequence[str]) -> tuple[str, str]:
    says, text = str(error), f"{type(error).__name__}: {str(error)[:300]}"
    if "unexpected keyword argument" in says or isinstance(error, OSError):
        return "python", text
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    named = re.search(rf"\b{re.escape(argument)}\b", says)
    named = named or any(re.search(rf"\b{re.escape(each)}=", says) for each in arguments)
    shown = type(value).__name__, repr(value)[:20], "a tensor" if torch.is_tensor(value) else "\0"
    raised = frames[-1].f_code.co_filename.startswith(PACKAGE) and is_at_raise(error.__traceback__)
    if raised and (named or any(part in says for part in shown)):
        return "clear", text
    ours = [n for n, each in enumerate(frames) if each.f_code.co_filename.startswith(PACKAGE)]
    inside = frames[ours[0] :] if ours else []
    codes = [frame.f_code for frame in inside]
    given = any(code.co_name == "_call_impl" or code.co_filename == __file__ for code in codes)
    if given or not ours or (callable(value) and re.search(r"\w\(\) .*argument", says)):
        return "theirs", text
    return "unnamed" if raised else "obscure", text


def is_at_raise(found: TracebackType | None) -> bool:
    """Whether the last frame is at a `raise`, and not at an operation that failed."""
    assert found is not None
    while found.tb_next is not None:
        found = found.tb_next
    return found.tb_frame.f_code.co_code[found.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def main(prefixes: Sequence[str]) -> None:
    """Try every case of the functions whose names begin so, and count what happens."""
    names = [name for name in CALLS if name.startswith(tuple(prefixes) or "")]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        structlin.save(converted(), "kept")
        for case in list_cases(names):
            kind, text = try_case(*case)
            counts[case[0]][kind] += 1
            if kind in ("unnamed", "obscure", "accepted"):
                print(*case, kind, text, sep=" | ")
    for name, count in counts.items():
        print(f"{name:40}", ", ".join(f"{kind} {number}" for kind, number in count.items()))
    print("all", dict(sum(counts.values(), Counter())))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
