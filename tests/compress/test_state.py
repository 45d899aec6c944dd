"""What a model keeps while it runs is one run's alone, wherever it keeps it, and so is a batch.

The oracle: the same model that keeps it in a plain attribute, where each run's is its own.
"""

import copy
import dataclasses
import sys
import threading
import types
import warnings
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from structlin import LowRank, compress, plan_compression
from structlin._compress.replica import Replica

WIDTH = 16
BATCHES = [10.0**n * torch.randn(20, WIDTH, generator=torch.manual_seed(n)) for n in range(4)]

# a module that is no file of any model
foreign = types.ModuleType("foreign")
exec("class Context:\n    pass\n", vars(foreign))
sys.modules["foreign"] = foreign
Pair = namedtuple("Pair", "names values")


class Hook:
    """As fastai's: what a module returned is stored in the hook."""

    def __init__(self, module: nn.Module) -> None:
        self.stored = None
        module.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.stored = output


class Slotted:
    __slots__ = ("value",)


class Keeping(nn.Module):
    """The last layer reads what was kept before the first one; `home` is where."""

    def __init__(self, home: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, 32)
        self.last, self.entry = nn.Linear(32 + WIDTH, WIDTH), nn.Identity()
        self.home, self.skip = home, None
        self.context, self.slotted = foreign.Context(), Slotted()
        self.pair, self.names, self.fields = Pair([], {}), set(), [{"tuple": ([],)}]
        store, (box,) = {}, ([],)
        self.put, self.get = (lambda value: store.update(kept=value)), lambda: store["kept"]
        self.push, self.hook = box.append, Hook(self.entry)
        self.pop = lambda: box[-1]
        self.default = lambda *value, held=[None]: held.__setitem__(0, *value) if value else held[0]
        self.register_buffer("large", torch.zeros(20, 1000))
        self.register_buffer("small", torch.zeros(20, WIDTH))
        self.array = np.zeros((20, WIDTH), dtype=np.float32)
        self.view = self.small.view(-1)
        self.seen = self.small.numpy()

    def keep(self, x: Tensor) -> None:
        home = self.home
        if home == "an attribute":
            self.skip = x
        elif home == "a foreign object":
            self.context.kept = x
        elif home == "an object with slots":
            self.slotted.value = x
        elif home == "a namedtuple":
            self.pair.values["kept"] = x
        elif home == "a set":
            self.names.clear()
            self.names.add(x)
        elif home == "a list in a tuple in a dict":
            self.fields[0]["tuple"][0][:] = [x]
        elif home == "a closure":
            self.put(x)
        elif home == "a method of a list":
            self.push(x)
        elif home == "a default":
            self.default(x)
        elif home == "the data of a large buffer":
            self.large.data[:, :WIDTH] = x
        elif home == "numpy's view of a large buffer":
            self.large.numpy()[:, :WIDTH] = x.numpy()
        elif home == "numpy's view of a small buffer":
            self.small.numpy()[:] = x.numpy()
        elif home == "a view of a buffer":
            self.view.copy_(x.flatten())
        elif home == "an array":
            self.array[:] = x.numpy()
        elif home == "an array that is a view of a buffer":
            self.seen[:] = x.numpy()

    def recall(self) -> Tensor:
        home = self.home
        places = {
            "an attribute": lambda: self.skip,
            "a foreign object": lambda: self.context.kept,
            "an object with slots": lambda: self.slotted.value,
            "a namedtuple": lambda: self.pair.values["kept"],
            "a set": lambda: next(iter(self.names)),
            "a list in a tuple in a dict": lambda: self.fields[0]["tuple"][0][0],
            "a closure": self.get,
            "a method of a list": self.pop,
            "a default": self.default,
            "a hook": lambda: self.hook.stored,
            "an array": lambda: torch.tensor(self.array),
        }
        if home in places:
            return places[home]()
        return (self.large if "large" in home else self.small)[:, :WIDTH].clone()

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        self.keep(x)
        y = self.second(self.first(x).relu()).relu()
        return self.last(torch.cat([y, self.recall()], dim=-1))


HOMES = [
    *("a foreign object", "an object with slots", "a namedtuple", "a set", "a closure"),
    *("a list in a tuple in a dict", "a method of a list", "a default", "a hook"),
    *("the data of a large buffer", "numpy's view of a large buffer", "a view of a buffer"),
    *("numpy's view of a small buffer", "an array", "an array that is a view of a buffer"),
]


def plan_for(model: nn.Module, batches=BATCHES, **options):
    options = {"keep": 0.5, "refine": 4, "allocation": "error", **options}
    return plan_compression(model, LowRank(rank=1), batches, **options)


@pytest.mark.parametrize("home", HOMES)
def test_what_a_run_keeps_no_other_run_sees(home):
    plain, model = Keeping("an attribute"), Keeping(home)
    model.load_state_dict(plain.state_dict())
    expected, planned = plan_for(plain), plan_for(model)
    assert planned.errors == expected.errors
    assert planned.blocks == expected.blocks
    assert not model.small.any()
    assert not model.large.any()
    assert not model.array.any()
    assert not vars(model.context)
    assert not model.pair.values
    assert not model.names
    assert not model.fields[0]["tuple"][0]
    assert model.hook.stored is None


@dataclasses.dataclass
class Batch:
    x: Tensor


class Rolling(nn.Module):
    """It changes its batch, as networks of graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, batch):
        batch = batch if isinstance(batch, Batch | foreign.Context) else Batch(batch)
        batch.x = batch.x.roll(1, -1) * 2
        return self.last(self.first(batch.x).relu())


@pytest.mark.parametrize("kind", [Batch, foreign.Context])
def test_a_batch_that_is_an_object_is_each_runs_own(kind):
    model, batches = Rolling(), []
    for x in BATCHES:
        batch = object.__new__(kind)
        batch.x = x.clone()
        batches.append(batch)
    planned, expected = (plan_for(model, each, refine=0) for each in (batches, BATCHES))
    assert planned.errors == expected.errors
    for batch, x in zip(batches, BATCHES, strict=True):
        assert torch.equal(batch.x, x)


class Child(nn.Module):
    def __init__(self, parent, refer) -> None:
        super().__init__()
        vars(self)["parent"], self.layer = refer(parent), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parent = self.parent() if isinstance(self.parent, weakref.ref) else self.parent
        parent.scale = x.abs().mean()
        return self.layer(x) * parent.scale


class Parent(nn.Module):
    def __init__(self, refer) -> None:
        super().__init__()
        self.scale = None
        self.first, self.last = Child(self, refer), Child(self, refer)

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize("refer", [weakref.proxy, weakref.ref])
def test_a_weak_reference_to_a_module_is_to_the_replicas_own(refer):
    model, strong = Parent(refer), Parent(lambda parent: parent)
    model.load_state_dict(strong.state_dict())
    assert plan_for(model).errors == plan_for(strong).errors
    assert model.scale is None


def test_what_a_model_refers_to_weakly_and_nobody_in_it_holds_is_not_copied():
    owner = foreign.Context()
    owner.lock = open(__file__)  # noqa: SIM115 - it cannot be copied
    model = nn.Sequential(nn.Linear(2, 2))
    model.owner, model.owners = weakref.proxy(owner), weakref.ref(owner)
    replica = Replica(model).replicate()
    assert replica.model.owners() is owner
    owner.lock.close()


def test_what_cannot_be_copied_is_one_error_that_names_its_path():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    model[1][0].cache = {"pages": [foreign.Context()]}
    model[1][0].cache["pages"][0].reader = (n for n in range(3))
    state = copy.copy(vars(model[1][0]))
    with pytest.raises(TypeError, match=r"model\.1\.0\.cache\['pages'\]\[0\]\.reader: a generator"):
        plan_for(model, [BATCHES[0]])
    assert vars(model[1][0]) == state
    with pytest.raises(TypeError, match=r"batches: a generator .* at \[0\]\.reader"):
        plan_for(nn.Linear(WIDTH, WIDTH), [model[1][0].cache["pages"][0]])


def test_locks_and_generators_of_random_numbers_are_each_runs_own():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.lock, model.random = threading.Lock(), torch.Generator().manual_seed(3)
    first, other = Replica(model), Replica(model)
    assert first.model.lock.acquire(blocking=False)
    assert other.model.lock.acquire(blocking=False)
    assert not model.lock.locked()
    drawn = [torch.rand(2, generator=each.model.random) for each in (first, other)]
    assert torch.equal(*drawn)
    assert torch.equal(drawn[0], torch.rand(2, generator=model.random))


def test_modules_that_have_a_deepcopy_of_their_own_are_copied_all_the_same():
    class Single(Keeping):
        def __deepcopy__(self, memo):
            return self

    plain, model = Keeping("an attribute"), Single("an attribute")
    model.load_state_dict(plain.state_dict())
    assert plan_for(model).errors == plan_for(plain).errors
    assert model.skip is None


def test_a_method_that_torch_compiled_runs_by_its_python_in_the_replica():
    def fail(graph, inputs):
        raise AssertionError("it is compiled")

    class Compiled(Keeping):
        def __init__(self, home):
            super().__init__(home)
            self.run = torch.compile(self.call, backend=fail)
            self.entry.compile(backend=fail)

        def call(self, x):
            return super().forward(x)

        def forward(self, x):
            return self.run(x)

    plain, model = Keeping("an attribute"), Compiled("an attribute")
    model.load_state_dict(plain.state_dict())
    assert plan_for(model).errors == plan_for(plain).errors


def test_tensors_that_have_a_graph_are_copied_without_it():
    model = nn.Sequential(nn.Linear(2, 2))
    model.kept = model[0](torch.ones(1, 2))
    copied = Replica(model).model.kept
    assert torch.equal(copied, model.kept)
    assert copied.grad_fn is None


@pytest.mark.parametrize("build", [torch.jit.script, torch.fx.symbolic_trace])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_part_that_torch_has_scripted_or_traced_runs_in_the_replicas(build):
    model = nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Linear(32, WIDTH)
    )
    options = {"include": ["0", "2"], "refine": 0}
    expected = plan_for(model, **options)
    model[1] = build(model[1])
    assert plan_for(model, **options).errors == expected.errors


# ---- models that checkpoint their activations ----------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("trains", [True, False])
def test_a_model_that_checkpoints_its_activations_has_the_same_sensitivities(reentrant, trains):
    plain, model = Checkpointed(None), Checkpointed(reentrant)
    model.load_state_dict(plain.state_dict())
    model.requires_grad_(trains)
    batches = [0.1 * batch for batch in BATCHES[:2]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch, of inputs without a gradient
        planned = plan_for(model, batches, allocation="sensitivity", keep=0.4)
    expected = plan_for(plain, batches, allocation="sensitivity", keep=0.4)
    assert planned.errors.keys() == expected.errors.keys()
    for name, error in expected.errors.items():
        assert planned.errors[name] == pytest.approx(error, rel=1e-4)
    assert [str(decision.structure) for decision in planned.decisions] == [
        str(decision.structure) for decision in expected.decisions
    ]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_compress_leaves_nothing_of_its_runs_in_a_model_that_it_changes():
    model = Keeping("a closure")
    compress(model, LowRank(rank=1), BATCHES, keep=0.5, allocation="error")
    with pytest.raises(KeyError):
        model.get()
