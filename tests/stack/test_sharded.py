"""Sharded models (DTensor, FSDP2), in a process of its own, a group of one: weights that are
sharded already are refused, and the state of a sharded model goes through checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from structlin import (
    BTT, Structure, StructuredLinear, convert, linear_cross_entropy, plan, summary
)
from structlin._model import loss as loss_module

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/init", rank=0, world_size=1)
mesh, sizes = init_device_mesh("cpu", (1,)), dict(g=4, d=4, s=2, b=4, a=4)

# what is sharded is not converted
by_hand = nn.Sequential(nn.Linear(16, 16))
by_hand[0].weight = nn.Parameter(distribute_tensor(by_hand[0].weight.detach(), mesh, [Shard(0)]))
fsdp = fully_shard(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), mesh=mesh)
for model in (by_hand, fsdp):
    before = [(name, id(module)) for name, module in model.named_modules()]
    for options in ({}, {"include": "0"}, {"init": "project"}):
        try:
            convert(model, BTT(), **options)
        except ValueError as error:
            print("convert:", error)
    assert before == [(name, id(module)) for name, module in model.named_modules()]
part = nn.Sequential(fully_shard(nn.Linear(16, 16), mesh=mesh), nn.Linear(16, 16))
print("plan:", " ".join(str(plan(part, BTT())).split()))

# the other way round works
def build(outputs):
    structure = Structure(f"g d -> {outputs}", "g s b d", "b a g s", **sizes)
    return fully_shard(convert(nn.Sequential(nn.Linear(16, 16)), structure), mesh=mesh)

first, twin, other = build("b a"), build("b a"), build("a b")
first(torch.randn(2, 16)).sum().backward()
state = first.state_dict()
assert state.keys() == dict(first.named_parameters()).keys()
twin.load_state_dict(state)
x = torch.randn(2, 16)
assert torch.equal(twin(x), first(x))
try:
    other.load_state_dict(state)
except RuntimeError as error:
    print("state:", " ".join(str(error).split()))
dcp.save({"model": get_model_state_dict(first)}, checkpoint_id=f"{sys.argv[1]}/dcp")
again = build("b a")
found = {"model": get_model_state_dict(again)}
dcp.load(found, checkpoint_id=f"{sys.argv[1]}/dcp")
set_model_state_dict(again, found["model"])
assert torch.equal(again(x), first(x))
print("checkpoint: the same")
before = first(x)
first.reshard()  # whole parameters stay until then
same = Structure("g d -> b a", "g s b d", "b a g s", **sizes)
assert str(summary(first)) == str(summary(convert(nn.Sequential(nn.Linear(16, 16)), same)))
zeros = [torch.zeros(4, 8, 4), torch.zeros(4, 4, 8)]
for change, values in (("from_dense_", torch.zeros(16, 16)), ("set_cores_", zeros)):
    try:
        getattr(first[0], change)(values)
    except ValueError as error:
        print("values:", error)
assert torch.equal(first(x), before)

# a loss in chunks
loss_module._choose_sizes = lambda layer, rows: (64, 6)
hidden, labels = torch.randn(20, 16), torch.randint(64, (20,))

class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.head = kind(16, 64)

    def forward(self, x):
        return linear_cross_entropy(x, self.head, labels)

for kind in (nn.Linear, StructuredLinear):
    model = Model(kind)
    nn.functional.cross_entropy(model.head(hidden), labels).backward()
    for wrap in (DistributedDataParallel, fully_shard):
        wrapped = wrap(Model(kind))
        wrapped(hidden).backward()
        grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in wrapped.parameters()]
        torch.testing.assert_close(grads, [p.grad for p in model.parameters()])
fully_shard(model.head)
try:
    model(hidden)
except ValueError as error:
    print("loss:", error)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the program says, by its first words."""
    own = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("sharded"))]
    options = {"env": os.environ | own, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        found.setdefault(line.partition(":")[0], []).append(line)
    return found


def test_a_sharded_state_refuses_another_structure_and_goes_through_a_checkpoint(said):
    assert "structure." in said["state"][0]
    assert said["checkpoint"]


def test_values_are_given_to_a_layer_before_it_is_sharded(said):
    assert len(said["values"]) == 2
    for error in said["values"]:
        assert "is sharded: give it values before parallelize_module or fully_shard" in error


def test_sharded_weights_are_refused_and_the_error_says_to_convert_first(said):
    assert len(said["convert"]) == 6
    for error in said["convert"]:
        assert "has a sharded weight (DTensor): convert before fully_shard" in error
    assert "convert before fully_shard" in said["plan"][0]
    assert "BTT(rank=1)" in said["plan"][0]


def test_a_loss_in_chunks_has_its_gradients_where_the_model_is_wrapped_as_a_whole(said):
    assert "call this in the forward of the module that fully_shard got" in said["loss"][0]
