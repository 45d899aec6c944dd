"""Muon across processes on gloo, against one process. Starting processes is slow: two worlds do
everything, once."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from structlin import BTT, Kronecker, LowRank, StructuredLinear, convert
from structlin.optim import SOAP, Muon, Normed, declare_weights, shard_placement_fn
from tests.models import GPT, perplexed

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
STEPS = 20
# Model, world, whether placed by shard_placement_fn, and how many parameters a step gathers.
LAYOUTS = [
    ("btt", 2, False, 0),
    ("btt", 3, True, 0),  # 8 blocks: uneven
    ("few", 3, False, 0),  # 2 blocks: the third process has none
    ("low-rank", 3, False, 0),  # all on the first process
    ("low-rank", 2, True, 4),
    ("kronecker", 3, True, 4),
    ("gpt", 3, True, 2),
    ("gpt float32", 2, False, 2),
    ("btt, SOAP", 3, True, 0),
    ("few, SOAP", 3, False, 0),
    ("gpt, SOAP", 2, True, 4),  # gradients and momenta of two dense matrices
    ("experts", 2, False, 0),
    ("experts", 3, False, 1),  # 4 experts: uneven, and gate and up are fused in one weight
    ("experts, SOAP", 2, False, 0),
    ("experts, SOAP", 3, False, 2),  # gradient and momentum
]
STRUCTURES = {"btt": BTT(), "few": BTT(), "low-rank": LowRank(rank=4), "kronecker": Kronecker()}
WIDTHS = {
    "experts": 8,
    "btt": 64,
    "few": 4,
    "low-rank": 48,
    "kronecker": 36,
}  # BTT of width 4 has 2 blocks


class Experts(nn.Module):
    """Four experts of a gated unit, all of which every token sees."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 16, 8) / 3)
        self.down = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x):
        gate, up = torch.einsum("emn,bn->ebm", self.gate_up, x).chunk(2, dim=-1)
        return torch.einsum("emn,ebn->bm", self.down, gate.tanh() * up)


declare_weights(Experts, gate_up="e (f m) n", down="e m n")


class Collectives(TorchDispatchMode):
    """Names of the collectives that are called inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def model_of(name):
    torch.manual_seed(0)
    name = name.removesuffix(", SOAP")
    if name.startswith("gpt"):  # 2-D weights, embeddings, norms, 3-D cores of 8 and 16 blocks
        model = convert(GPT(depth=1), BTT(), include="ffn")
    elif name == "experts":
        model = nn.Sequential(nn.Tanh(), Experts())
    else:
        width = WIDTHS[name], WIDTHS[name]
        layers = (StructuredLinear(*width, STRUCTURES[name], bias=False) for _ in range(2))
        model = nn.Sequential(next(layers), nn.Tanh(), next(layers))
    return model.float() if "float32" in name else model.double()


def train(name, model, optimizer, steps=STEPS):
    if name.startswith("gpt"):
        return perplexed(model, steps, optimizer)
    seeded = torch.Generator().manual_seed(1)
    x = torch.randn(96, WIDTHS[name.removesuffix(", SOAP")], dtype=torch.float64, generator=seeded)
    losses = []
    for _ in range(steps):
        loss = (model(x) - x.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_of(name, model):
    if name.endswith("SOAP"):
        return SOAP(model, lr=0.01, weight_decay=0.1)
    return Muon(model, lr=0.05, weight_decay=0.1)


def gathered(model):
    named = ((name, p.detach()) for name, p in model.named_parameters())
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in named}


# ---- what each process does ----------------------------------------------------------------------


def sharded(name, placed=True):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, world = model_of(name), dist.get_world_size()
    place = shard_placement_fn(model, world) if placed else None
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=place)


def trained(name, model, optimizer, steps=STEPS):
    losses, final = train(name, model, optimizer, steps), gathered(model)
    with Collectives() as collectives:
        optimizer.step()
    return {"losses": losses, "final": final, "collectives": collectives.names}


def under_fsdp(name, placed):
    model = sharded(name, placed)
    optimizer = optimizer_of(name, model)
    found = trained(name, model, optimizer)
    factors = [tuple(state["left"].shape) for state in optimizer.state.values() if "left" in state]
    sizes = [p.to_local().numel() for p in model.parameters()]
    return found | {"sizes": sizes, "factors": factors}


def one_process_has_a_nan():
    model = sharded("btt", placed=False)
    optimizer = Muon(model, lr=0.05)
    train("btt", model, optimizer, 1)
    before = gathered(model)
    if dist.get_rank() == 1:
        next(iter(model.parameters())).grad.to_local()[0, 0, 0] = float("nan")
    raised = None
    with Collectives() as collectives:
        try:
            optimizer.step()
        except FloatingPointError as error:
            raised = str(error)
    after = gathered(model)
    moved = any(not torch.equal(before[name], after[name]) for name in before)
    return {"raised": raised, "collectives": collectives.names, "moved": moved}


def cut_in_any_way():
    """A weight sharded along both dimensions, one along its columns, an embedding along its
    vectors: they move as whole ones do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    layers = [nn.Linear(12, 6, bias=False), nn.Linear(12, 6, bias=False), nn.Embedding(5, 6)]
    cuts = [Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Shard(1)]
    model = nn.ModuleList(layers).double()
    gradients = [torch.randn_like(p) for p in model.parameters()]
    twin = copy.deepcopy(model)
    for module, placements in zip(model, cuts, strict=True):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    for p, q, gradient in zip(model.parameters(), twin.parameters(), gradients, strict=True):
        p.grad, q.grad = distribute_tensor(gradient, mesh, p.placements), gradient
    for module in (model, twin):
        Muon(module, lr=0.1).step()
    return {"ours": gathered(model), "alone": gathered(twin)}


class Parallel(nn.Module):
    """A network that torch's three styles of tensor parallelism cut: square matrices of full rank,
    since rounding chooses SOAP's basis of a null space."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 16), nn.LayerNorm(16)
        self.up, self.down, self.lm_head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 40)
        nn.init.normal_(self.norm.bias)  # or what it returns has no mean, and less than full rank

    def forward(self, ids):
        return self.lm_head(self.down(self.up(self.norm(self.embed(ids))).tanh()))


def parallel(cut):
    torch.manual_seed(0)
    model = Parallel().double()
    if cut:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return model


OPTIMIZERS = {
    "Muon": lambda model: Muon(model, lr=0.05, weight_decay=0.1),
    "all": lambda model: Muon(model, lr=0.05, weight_decay=0.1, matrices="all"),
    "SOAP": lambda model: SOAP(model, lr=0.05, weight_decay=0.1, precondition_frequency=2),
    "Normed": lambda model: normed(model),
}


def train_parallel(model, optimizer):
    seeded, losses = torch.Generator().manual_seed(1), []
    for _ in range(5):
        ids = torch.randint(40, (12, 8), generator=seeded)
        loss = nn.functional.cross_entropy(model(ids).transpose(1, 2), ids.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def under_tensor_parallelism(name):
    model = parallel(cut=True)
    losses = train_parallel(model, OPTIMIZERS[name](model))
    local = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}
    copies = {n for n, p in model.named_parameters() if all(x.is_replicate() for x in p.placements)}
    return {"losses": losses, "final": gathered(model), "local": local, "copies": copies}


def misplaced():
    """What a step says of gradients that no process can read its part of, and whether anything
    moved or any process waited for another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor

    ones, other = torch.ones(16, dtype=torch.float64), init_device_mesh("cpu", (1, 2))

    def is_plain(model):
        model.norm.weight.grad = ones

    def is_on_another_mesh(model):
        model.norm.weight.grad = distribute_tensor(ones, other)

    def is_of_a_plain_parameter(model):
        mesh = model.norm.weight.device_mesh
        model.norm.weight = nn.Parameter(ones.clone())
        model.norm.weight.grad = distribute_tensor(ones, mesh)

    def is_of_a_partial_parameter(model):
        mesh = model.norm.weight.device_mesh
        value = DTensor.from_local(ones, mesh, [Partial()])
        model.norm.weight = nn.Parameter(value)
        model.norm.weight.grad = value

    found = {}
    for spoil in (
        is_plain, is_on_another_mesh, is_of_a_plain_parameter, is_of_a_partial_parameter
    ):  # fmt: skip
        for make in (Muon, SOAP, normed):
            model = parallel(cut=True)
            model(torch.arange(8)[None]).square().mean().backward()
            spoil(model)
            before = [local_of(p.detach()).clone() for p in model.parameters()]
            optimizer = make(model)
            with Collectives() as collectives, pytest.raises(RuntimeError) as raised:
                optimizer.step()
            same = map(torch.equal, before, map(local_of, model.parameters()))
            names = collectives.names
            found[spoil.__name__, make.__name__] = str(raised.value), all(same), names
    return found


def local_of(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def normed(model):
    return Normed(torch.optim.AdamW(model.parameters(), lr=0.05), model)


def normed_under_fsdp():
    model = sharded("gpt")
    return trained("gpt", model, normed(model))


def through_dcp(name, path, resumes):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(name)
    kind = SOAP if name.endswith("SOAP") else Muon
    optimizer = kind(model, lr=1.0 if resumes else 0.05)
    if not resumes:
        train(name, model, optimizer, 5)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if not resumes:
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.load(state, checkpoint_id=path)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **states)
    return trained(name, model, optimizer, 5)


def everything(path):
    world = dist.get_world_size()
    found = {each[:3]: under_fsdp(each[0], each[2]) for each in LAYOUTS if each[1] == world}
    for name in ("gpt", "gpt, SOAP"):
        found["dcp", name] = through_dcp(name, f"{path}/{name}", resumes=world == 3)
    if world == 2:
        found["normed"], found["cut"] = normed_under_fsdp(), cut_in_any_way()
        found["raise"], found["misplaced"] = one_process_has_a_nan(), misplaced()
        for name in OPTIMIZERS:
            found["parallel", name] = under_tensor_parallelism(name)
    return found


def entry(rank, world, path):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = f"file://{path}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        torch.save(everything(f"{path}/dcp"), f"{path}/{world}-{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """World size -> what each of its processes found."""
    path = tmp_path_factory.mktemp("distributed")
    found = {}
    for world in (2, 3):
        mp.start_processes(entry, (world, str(path)), nprocs=world, start_method="spawn")
        found[world] = [torch.load(path / f"{world}-{rank}.pt") for rank in range(world)]
    return found


# ---- what must be true of it ---------------------------------------------------------------------


def require_same(found, expected, tolerance=1e-6):
    options = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(found["losses"], expected["losses"], **options)
    for name, value in expected["final"].items():
        torch.testing.assert_close(found["final"][name], value, **options)


def alone(name, make=None):
    model = model_of(name)
    return trained(name, model, make(model) if make else optimizer_of(name, model))


@pytest.mark.parametrize(("name", "world", "placed", "gathers"), LAYOUTS)
def test_twenty_steps_under_fsdp2_are_those_of_one_process_and_cores_need_no_communication(
    worlds, name, world, placed, gathers
):
    expected = alone(name)
    for process in worlds[world]:
        found = process[name, world, placed]
        require_same(found, expected, 1e-4 if "float32" in name else 1e-6)
        assert len([each for each in found["collectives"] if "gather" in each]) == gathers
        assert gathers or not found["collectives"]


def test_placement_leaves_no_process_without_a_part_of_a_core_of_one_block(worlds):
    sizes = [process["low-rank", 3, False]["sizes"] for process in worlds[3]]
    assert sizes == [[192] * 4, [0] * 4, [0] * 4]
    assert [process["low-rank", 2, True]["sizes"] for process in worlds[2]] == [[96] * 4] * 2
    assert 0 in worlds[3][2]["few", 3, False]["sizes"]


def test_the_factors_of_experts_on_all_processes_are_those_of_each_gate_up_and_down(worlds):
    for process in worlds[2]:
        assert process["experts, SOAP", 2, False]["factors"] == [(8, 8, 8), (4, 8, 8)]


def test_the_process_that_has_a_nan_raises(worlds):
    raises = [process["raise"] for process in worlds[2]]
    assert [found["collectives"] for found in raises] == [[], []]
    assert raises[0]["raised"] is None
    assert raises[1]["raised"] == "gradients of 0.cores.0 are not finite; nothing was changed"


def test_weights_cut_in_any_other_way_move_as_whole_ones(worlds):
    for process in worlds[2]:
        for name, value in process["cut"]["alone"].items():
            torch.testing.assert_close(process["cut"]["ours"][name], value, rtol=1e-9, atol=1e-9)


def test_normed_under_fsdp2_makes_the_steps_of_one_process(worlds):
    expected = alone("gpt", normed)
    for process in worlds[2]:
        require_same(process["normed"], expected)


@pytest.mark.parametrize("name", ["gpt", "gpt, SOAP"])
def test_a_checkpoint_of_two_processes_continues_on_three(worlds, name):
    for process in worlds[3]:
        require_same(process["dcp", name], worlds[2][0]["dcp", name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_torchs_tensor_parallelism_steps_are_those_of_one_process_and_copies_stay_equal(
    worlds, name
):
    model = parallel(cut=False)
    expected = {"losses": train_parallel(model, OPTIMIZERS[name](model)), "final": gathered(model)}
    first, second = (process["parallel", name] for process in worlds[2])
    require_same(first, expected)
    assert first["copies"] == {"norm.weight", "norm.bias", "down.bias"}
    for copied in first["copies"]:
        assert torch.equal(first["local"][copied], second["local"][copied])


def test_a_gradient_that_is_not_where_its_parameter_is_stops_every_process_before_it_waits(worlds):
    said = {
        "is_plain": "norm.weight is a DTensor and its gradient a plain tensor: set parameter.grad",
        "is_on_another_mesh": "norm.weight is on DeviceMesh",
        "is_of_a_plain_parameter": "norm.weight is a plain tensor and its gradient a DTensor",
        "is_of_a_partial_parameter": r"norm.weight has the placements (Partial(sum),), a sum",
    }
    first, second = (process["misplaced"] for process in worlds[2])
    assert len(first) == len(said) * 3
    for (spoilt, _), (message, unchanged, collectives) in first.items():
        assert message.startswith(said[spoilt])
        assert unchanged
        assert not collectives
    assert first == second
