"""Tensor parallelism on gloo against one process. Starting processes is slow: one world of two and
one of four do everything, once."""

import copy
import itertools
import os
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

from structlin import BTT, Family, StructuredLinear, quantize
from structlin._engine.cpu import library
from structlin.optim import SOAP, Muon, shard_placement_fn
from tests.parallel.families import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
]
IN, OUT, STEPS = 64, 144, 10
WORLDS = (2, 4)
CASES = [  # family, role, weight normalisation; the layer has a bias where it has no normalisation
    *((family, role, False) for family in FAMILIES for role in ("colwise", "rowwise")),
    *((family, role, True) for family in FAMILIES for role in ("colwise", "rowwise")),
    ("low-rank, SiLU", "r", True),
    ("BTT, rank 2, SiLU", "r1", False),
    ("Monarch, 16 blocks", "r", False),
]
CASES = [case for case in CASES if case[:2] != ("Monarch, 16 blocks", "colwise")]  # 9 blocks
ON_FOUR = ("BTT, rank 2, SiLU", "BTT, 3 cores", "low-rank, SiLU", "Kronecker", "BLAST, wide")
NORMED = ", normed"  # what the name of a model ends in whose layers have weight normalisation
TRAINED = [
    ("BTT, rank 2, SiLU", "AdamW"),
    ("BTT, rank 2, SiLU", "Muon"),
    ("BTT, rank 2, SiLU", "SOAP"),
    ("low-rank", "Muon"),
    ("BTT, rank 2, SiLU, normed", "AdamW"),
    ("BTT, rank 2, SiLU, normed", "Muon"),
]
PLACED = [("BTT, rank 2, SiLU", "Muon"), ("low-rank", "Muon")]  # by shard_placement_fn
LAYOUTS = [  # family, widths, role, x, y: a placement's dimension; None: whole
    ("BTT, rank 2", (64, 144), "colwise", 1, -1),
    ("BTT, rank 2", (64, 144), "rowwise", -1, 1),
    ("BTT, rank 2", (64, 144), "rowwise", None, None),
    ("BTT, rank 2", (64, 144), "rowwise", -1, -1),
    ("BTT, rank 2", (64, 144), "colwise", None, None),
    ("BTT, rank 2", (64, 144), "colwise", -1, 2),
    ("low-rank", (64, 144), "colwise", 1, 1),
    ("low-rank", (64, 144), "rowwise", -1, 1),
    ("low-rank", (64, 144), "r", 1, 1),
    ("block-diagonal", (64, 144), "b", -1, -1),
    ("BTT, rank 2", (26, 58), "colwise", None, -1),  # both padded
    ("BTT, rank 2", (26, 58), "colwise", 1, 1),
    ("BTT, rank 2", (26, 58), "colwise", -1, None),
    ("BTT, rank 2", (26, 58), "rowwise", -1, None),
    ("BTT, rank 2", (26, 58), "rowwise", None, 1),
    ("Kronecker", (26, 58), "rowwise", 1, -1),
]


class Sizes(TorchDispatchMode):
    """The collectives that are called inside: name and numbers; and what the engine multiplies."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.products = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.namespace == "structlin":
            self.products.add(function._opname)
        name = function._opname.removesuffix("_into_tensor").removesuffix("_tensor")
        if name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all_single"):
            self.calls.append((name, max(args[0].numel(), found.numel())))
        return found


def layer_of(family, widths=(IN, OUT), bias=True, weight_norm=False, dtype=torch.float64):
    torch.manual_seed(0)
    structure = FAMILIES[family] if isinstance(family, str) else family
    options = {"bias": bias, "weight_norm": weight_norm, "dtype": dtype}
    layer = StructuredLinear(*widths, structure, **options)
    with torch.no_grad():
        for parameter in layer.parameters():  # no gain of 1, no bias of 0, norms over their bounds
            parameter.add_(torch.rand_like(parameter), alpha=0.5)
    return layer


def tokens_of(width=IN, dtype=torch.float64, shape=(2, 6)):
    return torch.randn(*shape, width, dtype=dtype, generator=torch.Generator().manual_seed(1))


def loss_of(y, weights=None):
    """A loss whose gradient is another at every entry of y."""
    return (y * (slopes_of(y) if weights is None else weights)).sum()


def slopes_of(y):
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


class MLP(nn.Module):
    def __init__(self, family, weight_norm=False):
        super().__init__()
        self.norm = nn.LayerNorm(IN)
        self.up = StructuredLinear(IN, 4 * IN, family, weight_norm=weight_norm)
        self.down = StructuredLinear(4 * IN, IN, family, weight_norm=weight_norm)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(family):
    torch.manual_seed(0)
    weight_norm = family.endswith(NORMED)
    family = FAMILIES[family.removesuffix(NORMED)]
    blocks = (MLP(family, weight_norm) for _ in range(2))
    return nn.Sequential(*blocks).double()


def stored(model):
    """The model, with cores in the order in which the cuts store them."""
    from structlin._structure.cut import axis_of
    from structlin.parallel import store_outermost_

    for block in model:
        store_outermost_(block.up, axis_of(block.up.structure, "colwise"))
        store_outermost_(block.down, axis_of(block.down.structure, "rowwise"))
    return model


def optimizer_of(kind, model):
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"Muon": Muon, "SOAP": SOAP}[kind](model, lr=0.01)


def train(model, optimizer, x, total, steps=STEPS):
    """Losses and norms of gradients; `total` is how many numbers a replica of the model reads."""
    losses = []
    for _ in range(steps):
        loss = (model(x) - x.roll(1, -1)).square().sum() / total
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(torch.stack([loss.detach(), whole(norm)]))
    return torch.stack(losses)


def state_of(model):
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


# ---- what each process does ----------------------------------------------------------------------


def style_of(role, **layouts):
    from structlin.parallel import AxisParallel, ColwiseParallel, RowwiseParallel

    kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    return kinds[role](**layouts) if role in kinds else AxisParallel(role, **layouts)


def divide(model, mesh, placed=False):
    """Tensor parallel in the last dimension of the mesh, tokens cut between the layers, and FSDP2
    in the first of two."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": style_of("colwise", input_layouts=Shard(1)),
        "down": style_of("rowwise", output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh["tp"] if mesh.ndim > 1 else mesh, plan)
    if mesh.ndim > 1:
        place = shard_placement_fn(model, mesh.size(0)) if placed else None
        for block in model:
            fully_shard(block, mesh=mesh["dp"], shard_placement_fn=place)
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=place)
    return model


def own_tokens(mesh):
    """This process's part of the tokens, and how many numbers its replica of the model reads."""
    x, (*replica, part) = tokens_of(shape=(4, 6)), mesh.get_coordinate()
    if replica:
        x = x.chunk(mesh.size(0))[replica[0]]
    return x.chunk(mesh.size(-1), 1)[part].clone(), x.numel()


def trained(family, kind, mesh, placed=False):
    model = divide(model_of(family), mesh, placed)
    x, total = own_tokens(mesh)
    optimizer = optimizer_of(kind, model)
    losses = train(model, optimizer, x, total)
    dist.all_reduce(losses)
    replicas = mesh.size(0) if mesh.ndim > 1 else 1
    world = dist.get_world_size()
    losses[:, 0] /= replicas
    losses[:, 1] /= world
    final = state_of(model)
    with Sizes() as sent:
        optimizer.step()
    numbers = count_state(optimizer)
    return {"losses": losses, "final": final, "sent": sent.calls, "numbers": numbers}


def count_state(optimizer):
    """The numbers of an optimizer's state that this process holds."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    return sum(getattr(t, "_local_tensor", t).numel() for t in tensors)


def gather(tensor, layout):
    """What all processes have: joined where they have parts, the same where they do not."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor.detach())
    if layout.is_shard():
        return torch.cat(found, layout.dim)
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def split(tensor, layout, part):
    """This process's part."""
    if not layout.is_shard():
        return tensor.clone()
    parts = [*tensor.split(part, layout.dim), tensor.narrow(layout.dim, 0, 0)]
    return parts[min(dist.get_rank(), len(parts) - 1)].clone()


def run_divided(layer, role, x, mesh, **layouts):
    """y, dx and all gradients, whole, of a layer that is parallel; and what was communicated."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(layer, mesh, style_of(role, **layouts))
    divided, world = layer.divided, dist.get_world_size()
    is_last = getattr(divided.x_layout, "dim", 0) in (-1, x.ndim - 1)
    chunk = -(-x.shape[getattr(divided.x_layout, "dim", 0)] // world)
    part = divided.columns if is_last and divided.cut.cuts_x else chunk
    own = split(x, divided.x_layout, part).requires_grad_()
    with CommDebugMode() as counted, Sizes() as sent:
        y = layer(own)
    joined = gather(y, divided.y_layout)
    largest = torch.tensor(y.shape[getattr(divided.y_layout, "dim", 0)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    slopes = split(slopes_of(joined), divided.y_layout, largest.item())
    with CommDebugMode() as counted_back, Sizes() as sent_back:
        loss_of(y, slopes).backward()
    assert all(p.grad.placements == p.placements for p in layer.parameters())
    return {
        "y": joined,
        "dx": gather(own.grad, divided.x_layout),
        "gradients": {name: whole(p.grad) for name, p in layer.named_parameters()},
        "forward": sent.calls,
        "backward": sent_back.calls,
        "products": sent.products | sent_back.products,
        "counts": [sum(mode.get_comm_counts().values()) for mode in (counted, counted_back)],
        "numbers": sum(p.to_local().numel() for p in layer.parameters()),
    }


def every_case(mesh):
    found = {}
    for case in CASES:
        family, role, weight_norm = case
        layer = layer_of(family, bias=not weight_norm, weight_norm=weight_norm)
        if mesh.size() == 4 and (family not in ON_FOUR or role.startswith("r1")):
            continue
        found[case] = run_divided(layer, role, tokens_of(), mesh)
    return found


def every_layout(mesh):
    from torch.distributed.tensor import Replicate, Shard

    found = {}
    for case in LAYOUTS:
        family, widths, role, *dims = case
        x, y = (Replicate() if dim is None else Shard(dim) for dim in dims)
        layer = layer_of(family, widths)
        layouts = {"input_layouts": x, "output_layouts": y}
        found[case] = run_divided(layer, role, tokens_of(widths[0]), mesh, **layouts)
    return found


def in_bfloat16(mesh):
    """y and gradients in bfloat16, and under autocast."""
    found = {}
    for family, role in itertools.product(
        ("BTT, rank 2, SiLU", "low-rank"), ("colwise", "rowwise")
    ):
        layer = layer_of(family, dtype=torch.bfloat16, weight_norm=True)
        x = tokens_of(dtype=torch.bfloat16)
        found[family, role] = run_divided(layer, role, x, mesh)
        layer = layer_of(family, dtype=torch.float32)
        with torch.autocast("cpu"):
            x = tokens_of(dtype=torch.float32)
            found[family, role, "autocast"] = run_divided(layer, role, x, mesh)
    return found


def a_block(mesh, change):
    """A block whose x and y are whole, after `change`: y, dx and gradients."""
    from torch.distributed.tensor.parallel import parallelize_module

    block = model_of("BTT, rank 2, SiLU")[0]
    plan = {"up": style_of("colwise"), "down": style_of("rowwise")}
    parallelize_module(block, mesh, plan)
    x = tokens_of().requires_grad_()
    y = change(block)(x)
    loss_of(y).backward()
    gradients = {name: whole(parameter.grad) for name, parameter in block.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "gradients": gradients}


def compiled(block):
    return torch.compile(block, backend="aot_eager", fullgraph=True)


def checkpointed(block):
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(block, x, use_reentrant=False)


def frozen_twin(block):
    """A deep copy beside the block, whose own weights it must not read."""
    twin = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(torch.ones(1, 1, IN, dtype=torch.float64)).sub(1).any()
    return block


def hooked(block):
    block.up.register_forward_hook(lambda layer, args, y: 2 * y)
    block.down.register_forward_pre_hook(lambda layer, args: (args[0] / 2,))
    return block


def without_tokens(mesh):
    found = {}
    for role in ("colwise", "rowwise"):
        layer, x = layer_of("BTT"), tokens_of(shape=(0, 6))
        found[role] = run_divided(layer, role, x, mesh)
    return found


def with_uneven_tokens(mesh):
    """Two layers whose x and y are DTensors cut by tokens: 5 of them, and 1, so that the last
    process has fewer or none."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    found = {}
    for tokens in (5, 1):
        pair = pair_of_layers()
        plan = {
            "0": style_of("colwise", input_layouts=Shard(1)),
            "1": style_of("rowwise", output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(pair, mesh, plan)
        x = distribute_tensor(tokens_of(shape=(2, tokens)), mesh, [Shard(1)]).requires_grad_()
        y = pair(x)
        slopes = distribute_tensor(slopes_of(whole(y)), mesh, [Shard(1)])
        (y * slopes).sum().backward()
        gradients = {name: whole(p.grad) for name, p in pair.named_parameters()}
        found[tokens] = {"y": whole(y), "dx": whole(x.grad), "gradients": gradients}
    return found


def pair_of_layers():
    return nn.Sequential(layer_of("BTT, rank 2"), layer_of("BTT", (OUT, IN)))


def half_of_the_replicas_have_no_tokens(mesh):
    """FSDP2 x tensor parallelism; the second replica reads an empty batch."""
    model = divide(model_of("BTT"), mesh)
    x, _ = own_tokens(mesh)
    if mesh.get_coordinate()[0] == 1:
        x = x[:0]
    model(x).square().sum().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def by_ddp():
    """Gradients of a model that is whole on every process, which reads its share of the batch."""
    model = nn.parallel.DistributedDataParallel(model_of("BTT, rank 2, SiLU"))
    x = tokens_of(shape=(4, 6)).chunk(dist.get_world_size())[dist.get_rank()]
    (model(x) - x.roll(1, -1)).square().mean().backward()
    return {name: whole(p.grad) for name, p in model.module.named_parameters()}


def by_pipeline():
    """Gradients of this process's block: one of two stages, 1F1B, two microbatches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, x = dist.get_rank(), tokens_of(shape=(4, 6))
    block = model_of("BTT, rank 2, SiLU")[rank]
    stage = PipelineStage(block, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.roll(1, -1))
    return {f"{rank}.{name}": whole(p.grad) for name, p in block.named_parameters()}


BAD = {
    "5 blocks": lambda: layer_of("BTT", (25, 25)),
    "an inner axis": lambda: layer_of("BTT"),
    "a mesh of two dimensions": lambda: layer_of("BTT"),
    "already parallel": lambda: layer_of("BTT"),
    "int8": lambda: quantize(nn.Sequential(layer_of("BTT", dtype=torch.float32)))[0],
    "parametrised": lambda: parametrised(layer_of("BTT")),
    "pruned": lambda: pruned(layer_of("BTT")),
    "a hook on a core": lambda: hooked_core(layer_of("BTT")),
    "a sum as layout": lambda: layer_of("BTT"),
    "nothing but padding": lambda: layer_of(BTT().structure(64, 144), (64, 70)),
    "dense": lambda: nn.Linear(4, 4),
    "x whole where a part is due": lambda: layer_of("BTT"),
    "a part where x whole is due": lambda: layer_of("BTT"),
    "a bias of somebody else": lambda: layer_of("BTT"),
    "x on another mesh": lambda: layer_of("BTT"),
    "an order of cores": lambda: layer_of("BTT, rank 2"),
    "x without tokens where a part of them is due": lambda: layer_of("BTT"),
}


def parametrised(layer):
    parametrize.register_parametrization(layer.cores, "0", nn.Identity())
    return layer


def pruned(layer):
    prune.l1_unstructured(layer.cores, "0", 0.5)
    return layer


def hooked_core(layer):
    layer.cores[0].register_hook(torch.neg)
    return layer


def refuse(name, mesh):
    """What is said of one bad input, and whether anything was communicated or changed before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    from structlin.parallel import store_as_declared_

    layer, x = BAD[name](), tokens_of()
    role, options = "colwise", {}
    calls = name.startswith(("x ", "a part", "a bias"))
    if name == "an inner axis":
        role = "i1"
    elif name == "dense":
        role = "r"
    elif name == "x whole where a part is due":
        role = "rowwise"
    elif name == "a part where x whole is due":
        x = x[..., : IN // 2]
    elif name == "x without tokens where a part of them is due":
        x, options = x[:, :0], {"input_layouts": Shard(1)}
    elif name == "a sum as layout":
        options = {"output_layouts": Partial()}
    other = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    if name == "a mesh of two dimensions":
        mesh = other
    elif name == "x on another mesh":
        x = DTensor.from_local(x, other, [Replicate(), Replicate()], run_check=False)
    if calls or name in ("already parallel", "an order of cores"):
        parallelize_module(layer, mesh, style_of(role, **options))
    before = copy.deepcopy(layer.state_dict())
    with CommDebugMode() as counted:
        try:
            if name == "a bias of somebody else":
                layer.multiply(x, torch.zeros(OUT))
            elif name == "an order of cores":
                store_as_declared_(layer)
            elif calls:
                layer(x)
            else:
                parallelize_module(layer, mesh, style_of(role, **options))
            said = ""
        except (TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
    after = layer.state_dict()
    same = [*before] == [*after] and all(
        map(torch.equal, map(whole, before.values()), map(whole, after.values()))
    )
    return {"said": said, "sent": counted.get_total_counts(), "same": same}


def through_dcp(mesh, path, saves):
    """Ten steps, saved; or the file read, and what is then held."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = divide(model_of("BTT, rank 2"), mesh)
    optimizer = optimizer_of("AdamW", model)
    if saves:
        train(model, optimizer, *own_tokens(mesh))
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if saves:
        dcp.save(states, checkpoint_id=path)
    else:
        dcp.load(states, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
    moments = [whole(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
    return {"model": state_of(model), "moments": moments}


def on_two(mesh):
    return {
        "layouts": every_layout(mesh),
        "bfloat16": in_bfloat16(mesh),
        "no tokens": without_tokens(mesh),
        "uneven": with_uneven_tokens(mesh),
        "blocks": {
            change.__name__: a_block(mesh, change)
            for change in (compiled, checkpointed, frozen_twin, hooked)
        },
        "bad": {name: refuse(name, mesh) for name in BAD},
        "ddp": by_ddp(),
        "pipeline": by_pipeline(),
        "steps": {each: trained(*each, mesh) for each in TRAINED},
    }


def on_four(path):
    from torch.distributed.device_mesh import init_device_mesh

    meshes = {
        sizes: init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        for sizes in ((2, 2), (4, 1), (1, 4))
    }
    mesh = meshes[2, 2]
    return {
        "steps": {each: trained(*each, mesh) for each in TRAINED},
        "placed": {each: trained(*each, mesh, placed=True) for each in PLACED},
        "no tokens": half_of_the_replicas_have_no_tokens(mesh),
        "dcp": {
            sizes: through_dcp(each, f"{path}/dcp", saves=sizes == (2, 2))
            for sizes, each in meshes.items()
        },
    }


def everything(world, path):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    found = on_two(mesh) if world == 2 else on_four(path)
    return found | {"cases": every_case(mesh)}


def entry(rank, world, path):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = f"file://{path}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        torch.save(everything(world, path), f"{path}/{world}-{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def worlds(path):
    """World size -> what each of its processes found."""
    found = {}
    for world in WORLDS:
        mp.start_processes(entry, (world, str(path)), nprocs=world, start_method="spawn")
        found[world] = [torch.load(path / f"{world}-{rank}.pt") for rank in range(world)]
    return found


# ---- layers --------------------------------------------------------------------------------------


def run_alone(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    loss_of(y).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "gradients": gradients}


def require_alike(found, expected, **options):
    options = {"rtol": 1e-9, "atol": 1e-9} | options
    for name in ("y", "dx"):
        torch.testing.assert_close(found[name], expected[name], **options)
    torch.testing.assert_close(found["gradients"], expected["gradients"], **options)


def alone(family, role, widths=(IN, OUT), **options):
    """One process, with cores in the order in which the cut stores them."""
    from structlin._structure.cut import axis_of
    from structlin.parallel import store_outermost_

    layer = layer_of(family, widths, **options)
    store_outermost_(layer, axis_of(layer.structure, role))
    return run_alone(layer, tokens_of(widths[0], layer.cores[0].dtype))


@pytest.mark.parametrize("case", CASES)
def test_y_dx_and_all_gradients_of_a_layer_that_is_parallel_are_those_of_one_process(worlds, case):
    family, role, weight_norm = case
    expected = alone(family, role, bias=not weight_norm, weight_norm=weight_norm)
    for processes in worlds.values():
        for process in processes:
            if case in process["cases"]:
                require_alike(process["cases"][case], expected)


@pytest.mark.parametrize("case", CASES)
def test_what_is_communicated_is_what_the_structure_says_and_no_more_than_megatrons(worlds, case):
    from structlin.parallel import list_collectives

    family, role, weight_norm = case
    structure = FAMILIES[family]
    if isinstance(structure, Family):
        structure = structure.structure(IN, OUT)
    tokens = tokens_of()[..., 0].numel()
    for world, processes in worlds.items():
        if case not in processes[0]["cases"]:
            continue
        listed = list_collectives(structure, role, world, weight_norm=weight_norm)
        for process in processes:
            found = process["cases"][case]
            for when, number in zip(("forward", "backward"), found["counts"], strict=True):
                said = Counter(
                    (each.name, each.per_token * tokens + each.per_call)
                    for each in listed
                    if each.when == when
                )
                assert Counter(found[when]) == said
                assert number == said.total()


@pytest.mark.parametrize("case", LAYOUTS)
def test_other_layouts_of_x_and_y_and_padding_change_no_result(worlds, case):
    family, widths, role = case[:3]
    expected = alone(family, role, widths)
    for process in worlds[2]:
        require_alike(process["layouts"][case], expected)


@pytest.mark.parametrize("family", ["BTT, rank 2, SiLU", "low-rank"])
@pytest.mark.parametrize("role", ["colwise", "rowwise"])
def test_bfloat16_and_autocast_give_what_one_process_gives_up_to_their_rounding(
    worlds, family, role
):
    dtypes = {"dtype": torch.bfloat16, "weight_norm": True}
    for process in worlds[2]:
        expected = alone(family, role, **dtypes)
        require_near(process["bfloat16"][family, role], expected)
        with torch.autocast("cpu"):
            expected = alone(family, role, dtype=torch.float32)
        require_near(process["bfloat16"][family, role, "autocast"], expected)


def require_near(found, expected):
    """Equal up to 2 % of each tensor's largest entry."""
    pairs = {name: (found[name], expected[name]) for name in ("y", "dx")}
    own = found["gradients"]
    pairs |= {name: (own[name], value) for name, value in expected["gradients"].items()}
    for one, other in pairs.values():
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= 0.02 * other.abs().max()


def test_a_batch_without_tokens_has_no_y_and_zero_gradients(worlds):
    for process in worlds[2]:
        for found in process["no tokens"].values():
            assert found["y"].shape == (0, 6, OUT)
            assert not any(value.any() for value in found["gradients"].values())


def test_tokens_that_are_cut_are_gathered_and_scattered_and_no_more(worlds):
    """Sequence parallelism: where a whole x or y would have one sum."""
    sent = [("all_gather", 768)], [("reduce_scatter", 768)]  # x, 64 wide
    for process in worlds[2]:
        found = process["layouts"]["BTT, rank 2", (64, 144), "colwise", 1, -1]
        assert (found["forward"], found["backward"]) == sent
        found = process["layouts"]["BTT, rank 2", (64, 144), "rowwise", -1, 1]
        assert found["forward"] == [("reduce_scatter", 1728)]
        assert found["backward"] == [("all_gather", 1728), ("all_reduce", OUT)]  # y and bias


@pytest.mark.skipif(not library.load(), reason="needs the compiled engine")
def test_the_engine_multiplies_the_parts(worlds):
    for process in worlds[2]:
        for role in ("colwise", "rowwise"):
            found = process["cases"]["BTT", role, False]
            assert found["products"] >= {"multiply", "gradients"}


@pytest.mark.parametrize("tokens", [5, 1])
def test_dtensors_with_fewer_tokens_or_none_on_one_process_give_what_one_process_gives(
    worlds, tokens
):
    from structlin.parallel import store_outermost_

    pair = pair_of_layers()
    store_outermost_(pair[0], "i2")
    expected = run_alone(pair, tokens_of(shape=(2, tokens)))
    for process in worlds[2]:
        require_alike(process["uneven"][tokens], expected)


# ---- blocks and models ---------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["compiled", "checkpointed", "frozen_twin", "hooked"])
def test_a_block_that_is_parallel_is_compiled_checkpointed_copied_and_hooked(worlds, change):
    block = stored(nn.Sequential(model_of("BTT, rank 2, SiLU")[0]))[0]
    expected = run_alone(hooked(block) if change == "hooked" else block, tokens_of())
    for process in worlds[2]:
        require_alike(process["blocks"][change], expected)


def train_alone(family, kind):
    model, x = stored(model_of(family)), tokens_of(shape=(4, 6))
    losses = train(model, optimizer_of(kind, model), x, x.numel())
    return losses, state_of(model)


@pytest.mark.parametrize(("family", "kind"), TRAINED)
def test_ten_steps_on_tensor_parallelism_and_fsdp2_with_it_are_those_of_one_process(
    worlds, family, kind
):
    """SOAP's basis of a factor without full rank is rounding, so its weights differ after a step,
    and its losses do not."""
    losses, final = train_alone(family, kind)
    found = [process["steps"][family, kind] for world in worlds.values() for process in world]
    if (family, kind) in PLACED:
        found += [process["placed"][family, kind] for process in worlds[4]]
    for each in found:
        tolerance = 1e-2 if kind == "SOAP" else 1e-7
        torch.testing.assert_close(each["losses"], losses, rtol=tolerance, atol=tolerance)
        assert each["final"].keys() == final.keys()
        if kind != "SOAP":
            torch.testing.assert_close(each["final"], final, rtol=1e-6, atol=1e-6)


def test_an_optimizer_gathers_the_core_of_each_layer_whose_blocks_are_cut_and_no_other(worlds):
    """Of the two cores of BTT one is cut between its blocks, so that they stay where they are."""
    family = "BTT, rank 2, SiLU"
    core = 2048  # numbers of the other one
    for world, gathered in ((2, core), (4, core // 2)):
        for process in worlds[world]:
            for kind, rounds in (("Muon", 1), ("SOAP", 2)):
                sent = process["steps"][family, kind]["sent"]
                gathers = [numbers for name, numbers in sent if name == "all_gather"]
                assert gathers == [gathered] * 4 * rounds
            assert not process["steps"][family, "AdamW"]["sent"]


def test_soap_keeps_no_state_of_blocks_that_are_on_other_processes(worlds):
    """On 2 x 2 half of them are: those of the cores that tensor parallelism cuts through."""
    family = "BTT, rank 2, SiLU"
    model, x = stored(model_of(family)), tokens_of(shape=(4, 6))
    optimizer = optimizer_of("SOAP", model)
    train(model, optimizer, x, x.numel(), steps=1)
    for process in worlds[4]:
        print(process["steps"][family, "SOAP"]["numbers"], count_state(optimizer))
        assert process["steps"][family, "SOAP"]["numbers"] < 0.5 * count_state(optimizer)


def test_a_replica_without_tokens_adds_nothing_to_the_gradients_of_the_others(worlds):
    model, x = stored(model_of("BTT")), tokens_of(shape=(4, 6)).chunk(2)[0]
    model(x).square().sum().backward()
    expected = {name: p.grad / 2 for name, p in model.named_parameters()}  # FSDP2's mean
    for process in worlds[4]:
        torch.testing.assert_close(process["no tokens"], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_2_x_2_is_read_on_4_x_1_on_1_x_4_and_on_one_process(worlds, path):
    import torch.distributed.checkpoint as dcp

    _, final = train_alone("BTT, rank 2", "AdamW")
    saved = worlds[4][0]["dcp"][2, 2]
    torch.testing.assert_close(saved["model"], final, rtol=1e-6, atol=1e-6)
    for process in worlds[4]:
        for sizes in ((4, 1), (1, 4)):
            found = process["dcp"][sizes]
            assert all(torch.equal(found["model"][name], saved["model"][name]) for name in final)
            assert all(map(torch.equal, found["moments"], saved["moments"]))
    model = stored(model_of("BTT, rank 2"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=path / "dcp", no_dist=True)
    assert all(torch.equal(value, saved["model"][name]) for name, value in state_of(model).items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_never_fills_cores_that_lie_in_another_order(worlds, path):
    import torch.distributed.checkpoint as dcp

    model = model_of("BTT, rank 2")
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .*up\.cores\.0\."):
        dcp.load({"model": model.state_dict()}, checkpoint_id=path / "dcp", no_dist=True)


def test_ddp_and_a_pipeline_give_the_gradients_of_one_process(worlds):
    model, x = model_of("BTT, rank 2, SiLU"), tokens_of(shape=(4, 6))
    (model(x) - x.roll(1, -1)).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for process in worlds[2]:
        torch.testing.assert_close(process["ddp"], expected, rtol=1e-9, atol=1e-9)
    staged = worlds[2][0]["pipeline"] | worlds[2][1]["pipeline"]
    torch.testing.assert_close(staged, expected, rtol=1e-9, atol=1e-9)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("5 blocks", r"ValueError: axis='i2' .*: its size is 5, which is no multiple of 2; none"),
        (
            "an inner axis",
            r"it is not the outermost axis of y.*: it can be cut along|'i2' \(size 12",
        ),
        ("a mesh of two dimensions", r"device_mesh has 2 dimensions, .* device_mesh\['tp'\]"),
        ("already parallel", r"is parallel or sharded already"),
        ("int8", r"TypeError: a QuantizedLinear multiplies in its own way"),
        ("parametrised", r"cores\.0, cores\.parametrizations\.0\.original: it is param"),
        ("pruned", r"other parameters than .*, cores\.0, cores\.0_orig: it is parametrised, pr"),
        (
            "a hook on a core",
            r"cores\.0 of StructuredLinear\(in.*\) has hooks, which would be lost",
        ),
        ("a sum as layout", r"output_layouts=Partial\(sum\) must be Replicate\(\) or Shard\(dim\)"),
        ("nothing but padding", r"leaves the last one nothing but padding of y: 70 in parts of 72"),
        ("dense", r"TypeError: axis='r': a Linear has no axes; take torch's styles"),
        ("x whole where a part is due", r"x has shape \(2, 6, 64\), and input_layouts=.*is 32"),
        ("a part where x whole is due", r"x has shape \(2, 6, 32\), and input_layouts=.*is 64"),
        ("a bias of somebody else", r"adds its own bias, layer\.bias, or none"),
        ("an order of cores", r"the cores lie on several processes: store them before they are"),
        (
            "x without tokens where a part of them is due",
            r"x has shape \(2, 0, 64\), no tokens, and .*pass a DTensor, which may have none",
        ),
        ("x on another mesh", r"x lies on DeviceMesh.*, the layer on DeviceMesh"),
    ],
)
def test_bad_input_is_refused_by_every_process_before_anything_is_sent_or_changed(
    worlds, name, says
):
    for process in worlds[2]:
        refused = process["bad"][name]
        assert re.search(says, refused["said"])
        assert refused["sent"] == 0
        assert refused["same"]
