"""torch's FSDP2: two processes with Muon, a checkpoint by DCP, and a model that goes on from it.

    python examples/recipes/with_fsdp2.py
    python examples/recipes/with_fsdp2.py --smoke         # seconds: does it run?

The order is `convert`, `fully_shard`, optimizer.
"""

import argparse
import os
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from characters import VOCABULARY, require, windows

require("transformers")

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing import start_processes
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from structlin import BTT, convert
from structlin.optim import Muon, shard_placement_fn

PROCESSES = 2
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


def make(width: int, depth: int) -> tuple[LlamaForCausalLM, Optimizer]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=width // 16, **sizes)
    model = convert(LlamaForCausalLM(config), BTT(rank=1), init="mup", zero_init="branch-end")
    place = shard_placement_fn(model, dist.get_world_size())  # once, before the first fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=policy, shard_placement_fn=place)
    return model, Muon(model, lr=0.02, other_lr=3e-3)


def train(model: LlamaForCausalLM, optimizer: Optimizer, tokens: torch.Tensor) -> list[float]:
    losses = []
    for batch in tokens.split(4 * PROCESSES):
        own = batch[dist.get_rank() :: PROCESSES]
        loss = model(own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(rank: int, folder: str, small: bool) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    width, depth, context, steps = (32, 2, 32, 3) if small else (256, 4, 128, 30)
    before, after = windows(16 * PROCESSES * steps // 2, context).chunk(2)
    torch.manual_seed(0)
    model, optimizer = make(width, depth)
    losses = train(model, optimizer, before)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/saved")
    expected = train(model, optimizer, after)

    model, optimizer = make(width, depth)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    keys = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **keys)
    found = train(model, optimizer, after)
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {expected[-1]:.3f}, from DCP {found[-1]:.3f}")
    dist.destroy_process_group()
    if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4):
        raise SystemExit(f"from DCP the losses differ: {found}, without a break {expected}")


def main() -> None:
    small = parser.parse_args().smoke
    with TemporaryDirectory() as folder:
        start_processes(work, (folder, small), nprocs=PROCESSES, start_method="spawn")


if __name__ == "__main__":
    main()
