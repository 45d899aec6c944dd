"""What each process of the tests with torchtitan does: its own trainer, and a plain loop beside.

`python -m tests.parallel.in_torchtitan` prints the losses of both.
"""

import logging
import os
import socket
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

STEPS = 10
BTT_MLPS = ("structlin.torchtitan.feed_forward", {"structure": "btt", "rank": 2})
LOW_RANK = ("structlin.torchtitan.layers", {"structure": "lowrank", "rank": 8})
NORMED = ("structlin.torchtitan.layers", {"structure": "btt", "rank": 1, "weight_norm": True})
RATES = {"AdamW": 0.001, "Muon": 0.02, "SOAP": 0.003}
CASES = {  # name -> overrides of layers, and structlin's optimizer; None: torchtitan's AdamW
    "BTT MLPs": ([BTT_MLPS], None),
    "BTT MLPs, Muon": ([BTT_MLPS], "Muon"),
    "low-rank blocks, AdamW": ([LOW_RANK], "AdamW"),
    "BTT blocks, normed, Muon": ([NORMED], "Muon"),
    "BTT MLPs, SOAP": ([BTT_MLPS], "SOAP"),
}
ON = {1: tuple(CASES), 2: tuple(CASES), 4: ("BTT MLPs", "BTT MLPs, Muon")}  # processes -> cases
RESUMED = {
    1: ("BTT MLPs, Muon", "BTT MLPs, SOAP"),
    2: ("BTT MLPs", "BTT MLPs, SOAP"),
    4: ("BTT MLPs, Muon",),
}
BACKEND = {"spmd_backend": "partial_dtensor"}
WORLDS = {  # processes -> replicas and options of parallelism
    1: (1, {}),
    2: (1, {"tensor_parallel_degree": 2, **BACKEND}),
    4: (2, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2, **BACKEND}),
}


def overrides_of(case):
    layers, name = CASES[case]
    if name is None:
        return layers
    return [*layers, ("structlin.torchtitan.optimizer", {"name": name, "lr": RATES[name]})]


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


@torch.no_grad()
def draw_(model):
    """Write the same weights on any number of processes: each is drawn whole, in turn."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # a norm, a gain or a bias
            continue
        drawn = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        if isinstance(parameter, DTensor):
            drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
        parameter.copy_(drawn)


def free_port():
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def run_trainer(case, world, folder, port, **options):
    """torchtitan's trainer: its losses, rates, and weights at the end."""
    from tests.parallel.torchtitan_on_a_cpu import configure

    os.environ["MASTER_PORT"] = str(port)
    replicas, parallelism = WORLDS[world]
    config = configure(folder, overrides_of(case), replicas=replicas, **(parallelism | options))
    trainer = config.build()
    (model,) = trainer.model_parts
    draw_(model)
    first = {name: whole(p) for name, p in model.named_parameters()}
    losses, rates = [], []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(loss)
    step = trainer.optimizers.step

    def watched():
        rates.append(trainer.lr_schedulers.schedulers[0].get_last_lr())
        step()

    trainer.optimizers.step = watched
    trainer.train()
    final = {name: whole(p) for name, p in model.named_parameters()}
    local = [getattr(p, "_local_tensor", p).numel() for p in model.parameters()]
    trainer.close()
    dist.destroy_process_group()
    return {
        "losses": losses,
        "rates": rates,
        "first": first,
        "final": final,
        "numbers": sum(local),
    }


def run_plain(case, weights):
    """The same model, data, clipping and optimizer, with nothing of torchtitan's runtime."""
    from torchtitan.config.override import apply_overrides

    from structlin import optim
    from tests.parallel.torchtitan_on_a_cpu import BATCH, LR, Counting, configure

    config = configure("", [*overrides_of(case)])
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.to_empty(device="cpu")
    model.init_states()
    model.load_state_dict(weights, strict=True)
    name = CASES[case][1]
    if name is None:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
    else:
        optimizer = getattr(optim, name)(model, lr=RATES[name])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    batches = iter(Counting(None, dp_world_size=1, dp_rank=0, local_batch_size=BATCH))
    losses = []
    for _ in range(STEPS):
        inputs, labels = next(batches)
        logits = model(inputs["input"], positions=inputs["positions"])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return {"losses": losses, "final": {name: whole(p) for name, p in model.named_parameters()}}


def rate_at(step):
    """Two steps of warm-up, then down along a line, of ten steps in all."""
    return min((step + 1) / 2, 1, (10 - step) / 8)


def refuse(case):
    """What is said of bad input, by configs alone."""
    from torchtitan.components.quantization.float8 import Float8LinearConverter
    from torchtitan.config.override import apply_overrides

    from tests.parallel.torchtitan_on_a_cpu import configure

    overrides = [BTT_MLPS]
    if case == "an option":
        overrides = [(BTT_MLPS[0], {"structure": "btt", "ranks": 2})]
    if case == "an optimizer":
        overrides = [("structlin.torchtitan.optimizer", {"name": "Lion"})]
    config = configure("", overrides)
    model = config.model_spec.model
    if case == "Float8":
        config.model_spec.model = model = (
            Float8LinearConverter.Config(emulate=True).build().convert(model)
        )
    model.update_from_config(config=config)
    try:
        apply_overrides(config.override, config)
    except ValueError as error:
        return str(error)
    return ""


def refuse_backend(world, port):
    """What is said of torchtitan's default backend on several processes."""
    from tests.parallel.torchtitan_on_a_cpu import configure

    os.environ["MASTER_PORT"] = str(port)
    config = configure("", [BTT_MLPS], tensor_parallel_degree=world, spmd_backend="spmd_types")
    try:
        config.build()
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def count_experts():
    """What kind of parameter each of a mixture of experts of torchtitan is to our optimizers."""
    import torchtitan.models.qwen3 as qwen3

    from structlin._model.parameters import parameters_of
    from tests.parallel.torchtitan_on_a_cpu import configure

    config = configure("", [])
    config.model_spec = qwen3.model_registry("debugmodel_moe")
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    with torch.device("meta"):
        model = config.model_spec.model.build()
    return {info.name: info.weight.kind for info in parameters_of(model)}


def work(rank, world, ports, path):
    """All cases on so many processes, each in a process group of its own."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torchtitan's and torchao's own
    logging.disable(logging.WARNING)
    ports = iter(ports)
    found = {"cases": {}, "resumed": {}}
    for case in ON[world]:
        folder = f"{path}/{world}/{case}"
        interval = 5 if case in RESUMED[world] else 0
        run = run_trainer(case, world, folder, next(ports), interval=interval)
        found["cases"][case] = run
        if world == 1:
            run["plain"] = run_plain(case, run["first"])
    for case in RESUMED[world]:
        folder = f"{path}/{world}/{case}"
        found["resumed"][case] = run_trainer(case, world, folder, next(ports), interval=100, stop=5)
    if world == 1:
        found["refused"] = {name: refuse(name) for name in ("Float8", "an option", "an optimizer")}
        found["experts"] = count_experts()
        if Path(f"{path}/2").exists():
            folder = f"{path}/2/BTT MLPs"
            run = run_trainer("BTT MLPs", 1, folder, next(ports), interval=100, stop=5)
            found["moved"] = run
    if world == 2:
        found["backend"] = refuse_backend(world, next(ports))
    torch.save(found, f"{path}/{world}-{rank}.pt")


def run_worlds(path, worlds=(2, 4, 1)):
    """World size -> what each of its processes found."""
    found = {}
    for world in worlds:
        ports = [free_port() for _ in range(len(CASES) + len(RESUMED[world]) + 1)]
        arguments = (world, ports, str(path))
        mp.start_processes(work, arguments, nprocs=world, start_method="spawn")
        found[world] = [torch.load(f"{path}/{world}-{rank}.pt") for rank in range(world)]
    return found


def main():
    with tempfile.TemporaryDirectory() as path:
        worlds = run_worlds(path)
    for case in CASES:
        plain = worlds[1][0]["cases"][case]["plain"]
        print(f"\n{case}")
        for label, run in [("plain loop", plain)] + [
            (f"torchtitan, {world} processes", processes[0]["cases"][case])
            for world, processes in sorted(worlds.items())
            if case in ON[world]
        ]:
            losses = " ".join(f"{loss:.5f}" for loss in run["losses"][::3])
            furthest = max(
                (value - plain["final"][name]).abs().max() for name, value in run["final"].items()
            )
            print(f"  {label:24} {losses}   parameters differ by {furthest:.1e}")


if __name__ == "__main__":
    main()
