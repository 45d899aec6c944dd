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
SIZES = {"width": 256, "depth": 4, "context": 128, "steps": 30}
SMOKE = {"width": 32, "depth": 2, "context": 32, "steps": 3}
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


def make(width: int, depth: int) -> tuple[LlamaForCausalLM, Optimizer]:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 16,
    )
    model = convert(LlamaForCausalLM(config), BTT(rank=1), init="mup", zero_init="branch-end")
    place = shard_placement_fn(model, dist.get_world_size())  # once, before the first fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy, shard_placement_fn=place)
    return model, Muon(model, lr=0.02, other_lr=3e-3)


def train(model: LlamaForCausalLM, optimizer: Optimizer, tokens: torch.Tensor) -> list[float]:
    losses = []
    for batch in tokens.split(4 * PROCESSES):
        local_batch = batch[dist.get_rank() :: PROCESSES]
        loss = model(local_batch, labels=local_batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(rank: int, folder: str, smoke: bool) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    sizes = SMOKE if smoke else SIZES
    tokens = windows(8 * PROCESSES * sizes["steps"], sizes["context"])
    tokens_before, tokens_after = tokens.chunk(2)

    torch.manual_seed(0)
    model, optimizer = make(sizes["width"], sizes["depth"])
    losses = train(model, optimizer, tokens_before)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/saved")
    expected_losses = train(model, optimizer, tokens_after)

    model, optimizer = make(sizes["width"], sizes["depth"])
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    loaded_losses = train(model, optimizer, tokens_after)
    if rank == 0:
        print(
            f"loss {losses[0]:.3f} -> {expected_losses[-1]:.3f}, from DCP {loaded_losses[-1]:.3f}"
        )
    dist.destroy_process_group()
    if not torch.allclose(torch.tensor(loaded_losses), torch.tensor(expected_losses), rtol=1e-4):
        raise SystemExit(
            f"from DCP the losses differ: {loaded_losses}, without a break {expected_losses}"
        )


def main() -> None:
    smoke = parser.parse_args().smoke
    with TemporaryDirectory() as folder:
        start_processes(work, (folder, smoke), nprocs=PROCESSES, start_method="spawn")


if __name__ == "__main__":
    main()
