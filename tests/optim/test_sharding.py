"""Polar factors of matrices that lie on several processes, against those of the whole matrices; in
forked processes, which start at once."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist

from structlin import dualize
from structlin._model.parameters import Weight
from structlin.duality import dual_embedding
from structlin.optim import Muon
from structlin.optim._sharding import agree, polar_parts, require_same_gradients
from tests.faults.common import start
from tests.optim.test_muon_distributed import Collectives

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
SECONDS = 40  # after which processes are taken to wait for each other
REDUCE, EXCHANGE = "allreduce_", "alltoall_base_"
# What is cut, the shape of the whole, and the dimensions along which it is cut on a mesh.
CORE, TALL, WIDE = (Weight("matrix", *shape, core=0) for shape in ((6, 4), (12, 4), (4, 12)))
CASES = {
    "blocks": ([(CORE, (5, 6, 4), 0), (CORE, (1, 6, 4), 0)], []),
    "vectors": ([(Weight("embedding", 6), (5, 6), 0)], []),
    "long sides": ([(TALL, (2, 12, 4), 1), (WIDE, (1, 4, 12), 2)], [EXCHANGE] * 2),
    "short sides": ([(TALL, (2, 12, 4), 2), (WIDE, (1, 4, 12), 1)], [EXCHANGE] * 2),
    "linear layers": (
        [(Weight("matrix", *shape), shape, 0) for shape in ((9, 5), (7, 7), (2, 8), (5, 9))],
        [EXCHANGE] * 2,
    ),
    "columns": ([(Weight("matrix", 9, 6), (9, 6), 1)], [EXCHANGE] * 2),
    "entries": ([(Weight("embedding", 6), (5, 6), 1)], [EXCHANGE] * 2),
    "one matrix": ([(Weight("matrix", 3, 5), (3, 5), 0)], [EXCHANGE] * 2),
}


def polar(weights, updates):
    return [
        dual_embedding(update) if weight.kind == "embedding" else dualize(update)
        for weight, update in zip(weights, updates, strict=True)
    ]


def wholes_of(cases):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _, shape, _ in cases]


def find_parts(_):
    """What `polar_parts` finds for each case, made whole again, and its collectives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for name, (cases, _) in CASES.items():
        params = [
            distribute_tensor(whole, mesh, [Shard(dim)])
            for whole, (_, _, dim) in zip(wholes_of(cases), cases, strict=True)
        ]
        weights, updates = [case[0] for case in cases], [p.to_local() for p in params]
        with Collectives() as collectives:
            parts = polar_parts(params, weights, updates, polar)
        layouts = [{"shape": p.shape, "stride": p.stride()} for p in params]
        found[name] = (
            collectives.names,
            [
                DTensor.from_local(part, mesh, p.placements, **layout).full_tensor()
                for part, p, layout in zip(parts, params, layouts, strict=True)
            ],
        )
    return found


def compare_gradients(_):
    """What a process hears of a gradient that only the first has, and of one that is not finite."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    group, params = dist.group.WORLD, [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    names = {parameter: f"p{n}" for n, parameter in enumerate(params)}
    params[0].grad = torch.ones(3)
    require_same_gradients(names, [{"params": params}], group)
    if dist.get_rank() == 0:
        params[2].grad = torch.ones(3)
    try:
        require_same_gradients(names, [{"params": params}], group)
        said = ""
    except RuntimeError as error:
        said = str(error)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.ones(2)]
    return said, agree(True, cut), agree(dist.get_rank() > 0, cut), agree(False, cut[1:])


def step_by_muon(nonfinite):
    """The collectives of a step whose work is divided, and what it is without: the same bits."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 8)).double()
    alone = copy.deepcopy(model)
    optimizer = Muon(model, process_group=dist.group.WORLD, nonfinite=nonfinite)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    with Collectives() as collectives:
        optimizer.step()
    Muon(alone, nonfinite=nonfinite).step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return collectives.names, all(torch.equal(p, q) for p, q in pairs)


def enter(rank, world, path, function, argument):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives
    store = dist.FileStore(f"{path}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.save(function(argument), f"{path}/{rank}.pt")
    dist.barrier()  # or the first to end would take its connection from the others


def run(world, path, monkeypatch, function, argument=None):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    processes = [start(enter, rank, world, path, function, argument) for rank in range(world)]
    for process in processes:
        process.join(SECONDS)
        process.kill()
    return [torch.load(path / f"{rank}.pt") for rank in range(world)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_are_those_of_the_whole_factors(world, tmp_path, monkeypatch):
    for found in run(world, tmp_path, monkeypatch, find_parts):
        for name, (cases, collectives) in CASES.items():
            names, factors = found[name]
            assert names == collectives, name
            expected = polar([case[0] for case in cases], wholes_of(cases))
            torch.testing.assert_close(factors, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_processes_agree_on_what_one_of_them_sees(tmp_path, monkeypatch):
    for said, all_finite, one_not, unsharded in run(2, tmp_path, monkeypatch, compare_gradients):
        assert said.startswith("p2: some processes of process_group have no gradient")
        assert (all_finite, one_not, unsharded) == (True, False, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nonfinite", "collectives"),
    [("raise", [REDUCE, "_allgather_base_"]), ("ignore", ["_allgather_base_"])],
)
def test_muon_compares_gradients_unless_nobody_looks_at_them(
    nonfinite, collectives, tmp_path, monkeypatch
):
    for found in run(2, tmp_path, monkeypatch, step_by_muon, nonfinite):
        assert found == (collectives, True)
