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

from structlin import BTT, Kronecker, LowRank, StructuredLinear, convert, dualize
from structlin.optim import Muon, Normed, shard_placement_fn
from structlin.optim._sharding import divide_stacks
from tests.models import GPT, perplexed

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
STEPS = 20
TWO_EXCHANGES = ["alltoall_base_", "alltoall_base_"]
# Model, world, whether placed by shard_placement_fn, and the collectives of a step.
LAYOUTS = [
    ("btt", 2, False, []),
    ("btt", 3, True, []),  # 8 blocks: uneven
    ("few", 3, False, []),  # 2 blocks: the third process has none
    ("low-rank", 3, False, []),  # all on the first process
    ("low-rank", 2, True, TWO_EXCHANGES),
    ("kronecker", 3, True, TWO_EXCHANGES),
    ("gpt", 2, True, TWO_EXCHANGES),
    ("gpt", 3, True, TWO_EXCHANGES),
    ("gpt float32", 2, False, TWO_EXCHANGES),
    ("one dense", 2, False, TWO_EXCHANGES),  # the second process owns no whole matrix
]
EXACT = ("svd", "own")  # which the engine does not take
WIDTHS = {  # BTT of width 4 has 2 blocks
    "btt": 64,
    "few": 4,
    "low-rank": 48,
    "kronecker": 36,
    "one dense": 16,
}


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
    if name.startswith("gpt"):  # 2-D weights, embeddings, norms, 3-D cores of 8 and 16 blocks
        model = convert(GPT(depth=1), BTT(), include="ffn")
    else:
        structure = {
            "btt": BTT(),
            "few": BTT(),
            "low-rank": LowRank(rank=4),
            "kronecker": Kronecker(),
            "one dense": BTT(),
        }[name]
        first, second = (
            StructuredLinear(WIDTHS[name], WIDTHS[name], structure, bias=False) for _ in range(2)
        )
        if name == "one dense":
            second = nn.Linear(WIDTHS[name], WIDTHS[name], bias=False)
        model = nn.Sequential(first, nn.Tanh(), second)
    return model.float() if "float32" in name else model.double()


def train(name, model, optimizer, steps=STEPS):
    if name.startswith("gpt"):
        return perplexed(model, steps, optimizer)
    x = torch.randn(
        96, WIDTHS[name], dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    losses = []
    for _ in range(steps):
        loss = (model(x) - x.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gathered(model):
    named = ((name.removeprefix("module."), p.detach()) for name, p in model.named_parameters())
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in named}


# ---- what each process does ----------------------------------------------------------------------


def sharded(name, placed=True):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, world = model_of(name), dist.get_world_size()
    place = shard_placement_fn(model, world) if placed else None
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=place)


def under_fsdp(name, placed, method=None):
    model = sharded(name, placed)
    method = dualize if method == "own" else method
    optimizer = Muon(model, lr=0.05, weight_decay=0.1, method=method)
    losses, final = train(name, model, optimizer), gathered(model)
    with Collectives() as collectives:
        optimizer.step()
    sizes = [p.to_local().numel() for p in model.parameters()]
    return {"losses": losses, "final": final, "collectives": collectives.names, "sizes": sizes}


def under_ddp(divided):
    wrapped = nn.parallel.DistributedDataParallel(model_of("gpt"))
    optimizer = Muon(
        wrapped, lr=0.05, weight_decay=0.1, process_group=dist.group.WORLD if divided else None
    )
    losses, final = train("gpt", wrapped, optimizer), gathered(wrapped)
    with Collectives() as collectives:
        optimizer.step()
    return {
        "losses": losses,
        "final": final,
        "collectives": collectives.names,
        "state": optimizer.state_dict(),
    }


def one_process_has_a_nan(nonfinite):
    model = sharded("btt", placed=False)
    optimizer = Muon(model, lr=0.05, nonfinite=nonfinite)
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


def cut_in_two_dimensions():
    """One weight sharded along both, an embedding along its vectors: they move as whole ones do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    model = nn.ModuleList([nn.Linear(12, 6, bias=False), nn.Embedding(5, 6)]).double()
    gradients = [torch.randn_like(p) for p in model.parameters()]
    twin = copy.deepcopy(model)
    for module, placements in zip(model, ([Shard(0), Shard(1)], [Shard(1), Shard(1)]), strict=True):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    for p, q, gradient in zip(model.parameters(), twin.parameters(), gradients, strict=True):
        p.grad, q.grad = distribute_tensor(gradient, mesh, p.placements), gradient
    for module in (model, twin):
        Muon(module, lr=0.1).step()
    return {"ours": gathered(model), "alone": gathered(twin)}


def normed_under_fsdp():
    model = sharded("gpt")
    optimizer = Normed(torch.optim.AdamW(model.parameters(), lr=0.05), model)
    return {"losses": train("gpt", model, optimizer), "final": gathered(model)}


def saved_by_dcp(path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = sharded("gpt")
    optimizer = Muon(model, lr=0.05)
    train("gpt", model, optimizer, 5)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=path)
    return {"losses": train("gpt", model, optimizer, 5), "final": gathered(model)}


def resumed_by_dcp(path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded("gpt")
    optimizer = Muon(model, lr=1.0)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return {"losses": train("gpt", model, optimizer, 5), "final": gathered(model)}


def one_process_has_no_gradient():
    model = model_of("gpt")
    optimizer = Muon(model, lr=0.05, process_group=dist.group.WORLD)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.lm_head.weight.grad = None  # on all of them: it stays as it is
    optimizer.step()
    if dist.get_rank() == 1:
        model.wte.weight.grad = None
    before = gathered(model)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), all(
            torch.equal(value, before[name]) for name, value in gathered(model).items()
        )
    return None


def refusals():
    from torch.distributed.fsdp import fully_shard

    late = model_of("btt")
    too_early = Muon(late)
    fully_shard(late)
    messages = []
    for attempt in (
        lambda: Muon(sharded("btt"), process_group=dist.group.WORLD),
        lambda: train("btt", late, too_early, 1),
    ):
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def everything(path):
    world = dist.get_world_size()
    found = {
        (name, placed): under_fsdp(name, placed) for name, n, placed, _ in LAYOUTS if n == world
    }
    found["dcp"] = saved_by_dcp(path) if world == 2 else resumed_by_dcp(path)
    found["ddp"] = {divided: under_ddp(divided) for divided in (True, False)}
    if world == 2:
        found["nan"] = {
            nonfinite: one_process_has_a_nan(nonfinite) for nonfinite in ("skip", "raise")
        }
        found["methods"] = {method: under_fsdp("one dense", False, method) for method in EXACT}
        found["missing"] = one_process_has_no_gradient()
        found["cut"], found["normed"], found["refusals"] = (
            cut_in_two_dimensions(),
            normed_under_fsdp(),
            refusals(),
        )
    return found


def entry(rank, world, path):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/store{world}", rank=rank, world_size=world
    )
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


def alone(name, make=lambda model: Muon(model, lr=0.05, weight_decay=0.1)):
    model = model_of(name)
    return train(name, model, make(model)), gathered(model)


def same(found, expected, **tolerance):
    losses, final = expected
    torch.testing.assert_close(found["losses"], losses, **tolerance)
    for name, value in final.items():
        torch.testing.assert_close(found["final"][name], value, **tolerance)


@pytest.mark.parametrize(("name", "world", "placed", "collectives"), LAYOUTS)
def test_twenty_steps_under_fsdp2_are_those_of_one_process_and_cores_need_no_communication(
    worlds, name, world, placed, collectives
):
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if "float32" in name else {"rtol": 1e-6, "atol": 1e-6}
    expected = alone(name)
    for process in worlds[world]:
        same(process[name, placed], expected, **tolerance)
        assert process[name, placed]["collectives"] == collectives


@pytest.mark.parametrize("method", EXACT)
def test_a_process_that_owns_no_whole_matrix_steps_by_every_method(worlds, method):
    own = dualize if method == "own" else method
    expected = alone("one dense", lambda model: Muon(model, lr=0.05, weight_decay=0.1, method=own))
    for process in worlds[2]:
        same(process["methods"][method], expected, rtol=1e-6, atol=1e-6)


def test_placement_leaves_no_process_without_a_part_of_a_core_of_one_block(worlds):
    assert [process["low-rank", False]["sizes"] for process in worlds[3]] == [
        [192] * 4,
        [0] * 4,
        [0] * 4,
    ]
    assert [process["low-rank", True]["sizes"] for process in worlds[2]] == [[96] * 4] * 2
    assert 0 in worlds[3][2]["few", False]["sizes"]


@pytest.mark.parametrize("world", [2, 3])
def test_under_ddp_the_divided_work_gives_every_process_the_bits_of_undivided_work(worlds, world):
    expected = alone("gpt")
    for process in worlds[world]:
        divided, redundant = process["ddp"][True], process["ddp"][False]
        assert divided["losses"] == redundant["losses"]
        for name, value in divided["final"].items():
            assert torch.equal(value, redundant["final"][name])
            assert torch.equal(value, worlds[world][0]["ddp"][True]["final"][name])
        assert divided["collectives"] == ["allreduce_", "_allgather_base_"]
        assert redundant["collectives"] == []
        # DDP averages the gradients, in another order
        same(divided, expected, rtol=1e-6, atol=1e-6)
    # without DDP's names
    Muon(model_of("gpt")).load_state_dict(worlds[world][0]["ddp"][True]["state"])


def test_a_step_is_skipped_by_all_processes_when_one_has_a_nan_and_raised_by_that_one_alone(worlds):
    skips, raises = (
        [process["nan"][choice] for process in worlds[2]] for choice in ("skip", "raise")
    )
    assert [found["collectives"] for found in skips] == [["allreduce_"]] * 2
    assert not any(found["moved"] or found["raised"] for found in skips)
    assert [found["collectives"] for found in raises] == [[], []]
    assert raises[0]["raised"] is None
    assert raises[1]["raised"] == "gradients of 0.cores.0 are not finite; nothing was changed"


def test_a_gradient_that_one_process_lacks_is_refused_by_all_of_them_and_nothing_moves(worlds):
    for process in worlds[2]:
        message, unchanged = process["missing"]
        assert message.startswith("wte.weight: some processes of process_group have no gradient")
        assert unchanged


def test_weights_cut_in_any_other_way_move_as_whole_ones(worlds):
    for process in worlds[2]:
        for name, value in process["cut"]["alone"].items():
            torch.testing.assert_close(process["cut"]["ours"][name], value, rtol=1e-9, atol=1e-9)


def test_normed_under_fsdp2_makes_the_steps_of_one_process(worlds):
    expected = alone(
        "gpt", lambda model: Normed(torch.optim.AdamW(model.parameters(), lr=0.05), model)
    )
    for process in worlds[2]:
        same(process["normed"], expected, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_of_two_processes_continues_on_three(worlds):
    straight = worlds[2][0]["dcp"]
    for process in worlds[3]:
        same(process["dcp"], (straight["losses"], straight["final"]), rtol=1e-6, atol=1e-6)


def test_what_does_not_go_together_is_refused_by_name(worlds):
    for process in worlds[2]:
        group, early = process["refusals"]
        assert "process_group=" in group
        assert "0.cores.0 is sharded, which divides the work itself" in group
        assert "0.cores.0" in early
        assert "was converted (or sharded) after this optimizer was made" in early


@pytest.mark.parametrize("world", [2, 3])
def test_stacks_are_divided_evenly_and_come_back_in_their_order(world, monkeypatch):
    """The processes in turns, in this one: first all of them send, then all of them receive."""
    stacks = [torch.randn(7, 3, 4), torch.randn(1, 2, 2), torch.randn(6, 4, 4)]
    sent: dict[int, torch.Tensor] = {}
    lengths = []

    def gather(target, part, group):
        sent[dist.get_rank()] = part.clone()
        if len(sent) == world:
            target.copy_(torch.cat([sent[rank] for rank in range(world)]))

    def double(stack):
        lengths.append(len(stack))
        return 2 * stack

    monkeypatch.setattr(dist, "get_world_size", lambda group: world)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    for rank in 2 * [*range(world)]:
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        lengths.clear()
        found = divide_stacks(stacks, double, None)
        assert all(
            0 <= length <= -(-len(stack) // world)
            for length, stack in zip(lengths, stacks, strict=True)
        )
    assert all(torch.equal(x, 2 * stack) for x, stack in zip(found, stacks, strict=True))


def test_a_placement_for_no_process_is_refused():
    with pytest.raises(ValueError, match="world_size=0 must be at least 1"):
        shard_placement_fn(nn.Linear(3, 3), 0)
    with pytest.raises(TypeError, match=r"model=Parameter must be .*shard_placement_fn\(model, "):
        shard_placement_fn(nn.Linear(3, 3).weight)  # as fully_shard calls what it is given
