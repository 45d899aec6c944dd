"""Each argument of each public function in turn is something wrong: what does the caller see?

    python -m tests.faults.bad_inputs [word ...]    functions whose names contain one of the words

A valid call of each function stands in `CALLS`. One argument at a time is replaced by each of
`VALUES`, and what happens is one of these:

    clear     an error that structlin raises, whose message names the argument or its value
    python    Python's own: an unknown keyword, or a file that cannot be read or written
    theirs    an error of the given model or function, which structlin has called
    unnamed   an error that structlin raises, whose message names neither
    obscure   an error from inside of torch, einops or Python
    meant     no error: the argument may have this value, see `MEANT`
    accepted  no error, and the argument should not have this value
    hang      more than `LIMIT` seconds, or a process that dies

What the library makes and nobody else, such as a `Core` or a `Plan`, is left out.
"""

import dis
import inspect
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import structlin
from structlin import BTT, LowRank, StructuredLinear, convert, duality, modular, stability
from structlin.optim import Depth, Muon, Normed, shard_placement_fn
from tests.faults.common import start

LIMIT = 10.0  # seconds of one call
MEMORY = 8 * 2**30  # bytes that all calls may take
KINDS = ("clear", "python", "theirs", "meant", "unnamed", "obscure", "accepted", "hang")
PACKAGE = os.path.dirname(structlin.__file__) + os.sep

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "3": lambda: 3,
    "1.5": lambda: 1.5,
    "-0.5": lambda: -0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "10**30": lambda: 10**30,
    "1j": lambda: 1j,
    "''": lambda: "",
    "'x'": lambda: "x",
    "b'x'": lambda: b"x",
    "[]": list,
    "{}": dict,
    "()": tuple,
    "set()": set,
    "[1, 2]": lambda: [1, 2],
    "('x', None)": lambda: ("x", None),
    "{'x': 1}": lambda: {"x": 1},
    "[1] * 20_000": lambda: [1] * 20_000,
    "object()": object,
    "a path": lambda: Path("x"),
    "len": lambda: len,
    "int": lambda: int,
    "an error": lambda: ValueError("x"),
    "numpy 3": lambda: np.int64(3),
    "numpy 0.5": lambda: np.float64(0.5),
    "numpy array": lambda: np.ones((2, 2)),
    "torch.int8": lambda: torch.int8,
    "a module": lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU()),
    "a family": lambda: BTT(rank=1),
    "tensor 1.0": lambda: torch.tensor(1.0),
    "tensor nan": lambda: torch.full((8, 8), torch.nan),
    "tensor (0,)": lambda: torch.zeros(0),
    "tensor (3, 5)": lambda: torch.ones(3, 5),
    "tensor int": lambda: torch.ones(8, 8, dtype=torch.int64),
    "tensor complex": lambda: torch.ones(8, 8, dtype=torch.complex64),
    "tensor meta": lambda: torch.ones(8, 8, device="meta"),
}


# ---- what is no fault ----------------------------------------------------------------------------


def _say(values: str, arguments: str) -> dict[str, set[str]]:
    return {value: set(arguments.split()) for value in values.split("; ")}


_COUNTS = """
    base block_depth blocks chunk context cores d_query d_value depth every exponent heads
    in_channels in_features kernel measure multiple n ns_steps out_channels out_features padding
    rank seed size split steps stride sweeps tokens vocabulary width world_size refine dim
    ignore_index
"""
_RATES = """
    a blocks_mass eps lr mass norm other_lr share target weight_decay
"""
_POSITIVE = "temperature tolerance max_spectral_norm seconds"
_TENSORS = "gradient matrix"
_BATCHES = "example batch batches x"
_NAMES = "mode cost between init where"
MEANT: dict[str, set[str]] = {}  # value -> arguments that may have it
for meant in (
    _say("3; numpy 3", f"{_COUNTS} {_RATES} {_POSITIVE}"),
    _say("1.5; 10**30; numpy 0.5", f"{_RATES} {_POSITIVE}"),
    _say("0", f"{_RATES} exponent refine sweeps padding seed tokens dim ignore_index momentum"),
    _say("0", "beta epsilon gamma phi rho label_smoothing"),
    _say("-1", "seed dim ignore_index a"),
    _say("-0.5", "a"),
    _say("None", "between keep share"),
    _say("numpy 0.5", "alpha momentum label_smoothing keep"),
    _say("10**30", "size"),  # arithmetic of integers alone
    _say("tensor 1.0", "lr other_lr"),
    _say("True", "activated bias bottleneck_variance causal logits nesterov per_vector progress"),
    _say("True", "structure_aware training weight_norm zero_init"),
    _say("[]; (); set(); {}; tensor (0,)", "exclude zero_init dim ends"),
    _say("{}", "base masses overrides setting split update gradients"),
    _say("{'x': 1}", "setting"),
    _say("[1, 2]", "seeds widths lrs dim masses nu psi"),
    _say("'x'; a path", "path blocks"),
    _say("''", "blocks"),
    _say("'x'; {'x': 1}; len", "ends"),  # patterns, which are read with a model
    _say("a family", "structure of"),
    _say("a module", "model base params"),
    _say("len; int; a module", "method"),  # a function, which is called later
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


def train(model: nn.Module, rate: Any, width: int) -> float:
    return 1.0


def sgd(model: nn.Module, width: int = 0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows() -> Tensor:
    return torch.linspace(-1, 1, 128).view(16, 8)


def matrix() -> Tensor:
    return torch.linspace(-1, 1, 64).view(8, 8).cos()


def structure() -> structlin.Structure:
    return BTT(rank=1).structure(8, 8)


def cores() -> list[Tensor]:
    return [torch.ones(core.shape) for core in structure().cores]


def core() -> structlin.Core:
    return structure().cores[0]


def net() -> modular.Module:
    module = modular.Linear(8, 8) @ modular.ReLU() @ modular.Linear(8, 8)
    module(rows()).square().mean().backward()
    return module


def blocks() -> nn.Module:
    return nn.ModuleList([dense(), dense()])


def make_structure(signature: Any, core: Any, between: Any, size: Any) -> structlin.Structure:
    return structlin.Structure(signature, "r i", core, between=between, i=8, o=8, r=size)


def call_layer(x: Any) -> Tensor:
    return StructuredLinear(8, 8)(x)


def family(rank: Any) -> structlin.Family:
    return structlin.family("btt", rank=rank)


def lr_mult_sgd(core: Any, in_features: Any, cores: Any, out_features: Any, share: Any) -> float:
    widths = {"out_features": out_features, "share": share}
    return structlin.lr_mult(core, in_features, cores, optimizer="sgd", **widths)


def watch(model: Any, every: Any) -> None:
    with stability.watch(model, every=every):
        model(rows())


def compose(part: Any) -> modular.Module:
    return modular.Composite(modular.ReLU(), part)


def scale(a: Any) -> modular.Module:
    return modular.ReLU() * a


def repeat(exponent: Any) -> modular.Module:
    return modular.ReLU() ** exponent


def of(make: Callable[[], Any], method: str) -> Callable[..., Any]:
    """A method of a new object for each call."""

    def call(**arguments: Any) -> Any:
        return getattr(make(), method)(**arguments)

    call.__signature__ = inspect.signature(getattr(make(), method))  # type: ignore[attr-defined]
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
    "family(rank)": (family, lambda: {"rank": 1}),
    "Family.activate": (BTT().activate, lambda: {"between": "silu"}),
    "divide": (structlin.divide, lambda: {**widths, "blocks": 2}),
    "Structure": (
        make_structure,
        lambda: {"signature": "i -> o", "core": "o r", "between": None, "size": 2},
    ),
    "Structure.activate": (structure().activate, lambda: {"between": "silu"}),
    "Structure.from_dict": (structlin.Structure.from_dict, lambda: {"data": structure().to_dict()}),
    "StructuredLinear": (StructuredLinear, lambda: dict(widths)),
    "StructuredLinear.forward": (call_layer, lambda: {"x": rows()}),
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
    "init_std": (structlin.init_std, lambda: {"core": core()}),
    "lr_mult": (structlin.lr_mult, lambda: {"core": core(), "in_features": 8, "cores": 2}),
    "lr_mult(sgd)": (
        lr_mult_sgd,
        lambda: {"core": core(), **widths, "cores": 2, "share": 0.5},
    ),
    "dualize": (structlin.dualize, lambda: {"matrix": matrix()}),
    "duality.dual_core": (duality.dual_core, lambda: {"gradient": matrix()}),
    "duality.dual_conv": (duality.dual_conv, lambda: {"gradient": matrix().view(4, 4, 2, 2)}),
    "duality.dual_norm": (duality.dual_norm, lambda: {"gradient": matrix()}),
    "duality.dual_embedding": (duality.dual_embedding, lambda: {"gradient": matrix()}),
    "duality.spectral_bound": (duality.spectral_bound, lambda: {"matrix": matrix()}),
    "param_groups": (structlin.param_groups, lambda: {"model": converted(), "lr": 0.1}),
    "keep_ratios": (
        structlin.keep_ratios,
        lambda: {"optimizer": torch.optim.SGD(structlin.param_groups(converted(), 0.1))},
    ),
    "optim.Muon": (Muon, lambda: {"params": converted()}),
    "optim.Muon.add_param_group": (
        of(lambda: Muon(converted()), "add_param_group"),
        lambda: {"param_group": {"params": []}},
    ),
    "optim.Muon.load_state_dict": (
        of(lambda: Muon(converted()), "load_state_dict"),
        lambda: {"state_dict": Muon(converted()).state_dict()},
    ),
    "optim.Normed": (Normed, lambda: {"model": (model := converted()), "base": sgd(model)}),
    "optim.Depth": (Depth, lambda: {"base": 1, "alpha": 1.0}),
    "optim.Depth.multiplier": (
        of(lambda: Depth(base=1), "multiplier"),
        lambda: {"model": blocks(), "base": None},
    ),
    "optim.Depth.scale_": (
        of(lambda: Depth(base=1, ends="*2"), "scale_"),
        lambda: {"model": blocks(), "base": None},
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
    "modular.Composite": (compose, lambda: {"part": modular.Linear(8, 8)}),
    "modular.Module * a": (scale, lambda: {"a": 2.0}),
    "modular.Module ** exponent": (repeat, lambda: {"exponent": 2}),
    "modular.Module.tare": (of(net, "tare"), lambda: {"mass": 1.0}),
    "modular.Module.norm": (of(net, "norm"), lambda: {"update": {"0.linear.weight": matrix()}}),
    "modular.Module.dualize": (of(net, "dualize"), dict),
    "modular.Module.dual_norm": (of(net, "dual_norm"), dict),
    "modular.Module.descend_": (of(net, "descend_"), lambda: {"lr": 0.1}),
    "modular.Module.normalize": (
        of(net, "normalize"),
        lambda: {"update": {"0.linear.weight": matrix()}},
    ),
    "stability.metrics": (
        stability.metrics,
        lambda: {"model": dense(), "batch": rows(), "before": dense()},
    ),
    "stability.watch": (watch, lambda: {"model": dense(), "every": 1}),
    "stability.coordinate_check": (
        stability.coordinate_check,
        lambda: {
            **{"build": build, "widths": [8, 16], "batches": [rows()], "loss": loss},
            **{"optimizer": sgd, "steps": 1, "seeds": [0]},
        },
    ),
}
for kind, options in FAMILIES.items():
    CALLS[kind.__name__] = (kind, partial(dict, options))
    CALLS[f"{kind.__name__}.structure"] = (kind(**options).structure, partial(dict, widths))


# ---- what happens --------------------------------------------------------------------------------


class Case(NamedTuple):
    function: str
    argument: str
    value: str


class Seen(NamedTuple):
    """What a case has led to."""

    kind: str
    text: str = ""


def list_cases(functions: Sequence[str]) -> list[Case]:
    """Each argument with each value, and an unknown keyword for each function."""
    cases = []
    for name in functions:
        known = inspect.signature(CALLS[name][0]).parameters.values()
        named = [each.name for each in known if each.kind not in (each.VAR_KEYWORD,)]
        cases += [Case(name, argument, value) for argument in named for value in VALUES]
        cases.append(Case(name, "unknown", "3"))
    return cases


def try_case(case: Case) -> Seen:
    """Make the call, and say what came of it."""
    function, make = CALLS[case.function]
    valid, value = make(), VALUES[case.value]()
    known = inspect.signature(function).parameters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**{**valid, case.argument: value})
    except Exception as error:
        return judge(error, case.argument, value, [*known])
    defaults = known[case.argument].default, valid.get(case.argument, 0)
    optional = value is None and None in defaults
    return Seen("meant" if optional or case.argument in MEANT.get(case.value, ()) else "accepted")


def judge(error: Exception, argument: str, value: Any, arguments: Sequence[str]) -> Seen:
    says, text = str(error), f"{type(error).__name__}: {str(error)[:300]}"
    if "unexpected keyword argument" in says or isinstance(error, OSError):
        return Seen("python", text)
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename for frame, _ in frames]
    raised = files[-1].startswith(PACKAGE) and is_at_raise(error.__traceback__)
    named = re.search(rf"\b{re.escape(argument)}\b", says)
    named = named or any(re.search(rf"\b{re.escape(each)}=", says) for each in arguments)
    shown = type(value).__name__, repr(value)[:20], "a tensor" if torch.is_tensor(value) else "\0"
    if raised and (named or any(part in says for part in shown)):
        return Seen("clear", text)
    first = next((n for n, file in enumerate(files) if file.startswith(PACKAGE)), len(files))
    given = [frame.f_code.co_name for frame, _ in frames[first:] if is_of_caller(frame)]
    if given or first == len(files) or (callable(value) and re.search(r"\w\(\) .*argument", says)):
        return Seen("theirs", text)
    return Seen("unnamed" if raised else "obscure", text)


def is_at_raise(found: TracebackType | None) -> bool:
    """Whether the last frame is at a `raise`, and not at an operation that failed."""
    assert found is not None
    while found.tb_next is not None:
        found = found.tb_next
    return found.tb_frame.f_code.co_code[found.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def is_of_caller(frame: FrameType) -> bool:
    """Whether it is one of a function of this file, or of the call of a module."""
    return frame.f_code.co_filename == __file__ or frame.f_code.co_name == "_call_impl"


def work(cases: Sequence[Case], first: int, pipe: Any) -> None:
    """Send what each case from the `first` on leads to."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, -1))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        os.chdir(folder)
        structlin.save(converted(), "kept")
        for case in cases[first:]:
            pipe.send(try_case(case))


def try_all(cases: Sequence[Case]) -> Iterator[tuple[Case, Seen]]:
    """What each case leads to, in a process; where that hangs or dies, another goes on behind."""
    done = 0
    while done < len(cases):
        here, there = multiprocessing.Pipe(duplex=False)
        process = start(work, cases, done, there)
        there.close()
        text = f"more than {LIMIT:g} s"
        try:
            while done < len(cases) and here.poll(LIMIT):
                yield cases[done], here.recv()
                done += 1
        except EOFError:
            text = "the process died"
        process.kill()
        process.join()
        if done < len(cases):
            yield cases[done], Seen("hang", text)
            done += 1


def report(found: Sequence[tuple[Case, Seen]]) -> str:
    """The counts of each function and of all."""
    counts: dict[str, Counter[str]] = {}
    for case, seen in found:
        counts.setdefault(case.function, Counter())[seen.kind] += 1
    counts["all"] = sum(counts.values(), Counter())
    lines = [f"{'function':30}" + "".join(f"{kind:>9}" for kind in KINDS)]
    for name, each in counts.items():
        lines.append(f"{name:30}" + "".join(f"{each[kind] or '':>9}" for kind in KINDS))
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    functions = [name for name in CALLS if not words or any(word in name for word in words)]
    found = []
    for case, seen in try_all(list_cases(functions)):
        found.append((case, seen))
        if seen.kind in KINDS[-4:]:
            print(f"{seen.kind}: {case.function}({case.argument}={case.value}) {seen.text!r}")
    print(report(found))


if __name__ == "__main__":
    main(sys.argv[1:])
