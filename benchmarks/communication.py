"""What structured layers send when they are tensor parallel: on paper, from their structures.

    python -m benchmarks.communication    # the tables of docs/many_gpus.md

Nothing runs here. tests/parallel holds `list_collectives` to what gloo's processes send.
"""

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.harness.report import table
from structlin import BTT, TT, Dense, Family, Kronecker, LowRank, Monarch, Structure
from structlin._structure.cut import axis_of, cut
from structlin.parallel import Collective, list_collectives

NUMBER_BYTES = 2  # of bfloat16
# Mistral 7B's sizes
WIDTH = 4096
HIDDEN = 14336
GROUPED = 1024  # width of keys and of values
LAYERS = 32
VOCABULARY = 32000

NODE = 8  # GPUs that are tensor parallel
REPLICAS = 128  # groups of such GPUs
# attention's four matrices, the embedding and the head
DENSE_PARAMETERS = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * GROUPED) + 2 * VOCABULARY * WIDTH
TOKENS = 8192  # of a replica in a step


class Roles(NamedTuple):
    """How the layers of an MLP are cut."""

    up: str  #: the layers that read the block's x
    down: str  #: the one that makes its y


MEGATRON = Roles("colwise", "rowwise")
PAIRS = Roles("r", "r")  # each low-rank layer as two nn.Linear, colwise and rowwise

LAYERS_OF_AN_MLP: list[tuple[str, Family, Roles]] = [
    ("dense", Dense(), MEGATRON),
    ("BTT, rank 1", BTT(rank=1), MEGATRON),
    ("BTT, rank 4", BTT(rank=4), MEGATRON),
    ("Monarch, 32 blocks", Monarch(blocks=32), MEGATRON),
    ("Kronecker", Kronecker(), MEGATRON),
    ("TT, rank 4", TT(rank=4), MEGATRON),
    ("low-rank 256, factors as two nn.Linear", LowRank(rank=256), PAIRS),
    ("low-rank 256", LowRank(rank=256), MEGATRON),
]


@dataclass(frozen=True)
class Traffic:
    """What a set of layers sends between the processes of a node."""

    forward: int  #: collectives
    backward: int
    forward_bytes: int  #: for each token
    backward_bytes: int
    step_bytes: int  #: for each step, whatever its tokens
    parameters: int  #: of the layers
    local_parameters: int  #: those of them that a process holds


def traffic_of(structure: Structure, role: str) -> Traffic:
    """One layer's."""
    collectives = list_collectives(structure, role, NODE)

    def select(when: str) -> list[Collective]:
        return [collective for collective in collectives if collective.when == when]

    def count_bytes(when: str) -> int:
        return NUMBER_BYTES * sum(collective.per_token for collective in select(when))

    local_parameters = 0
    cut_dims = cut(structure, axis_of(structure, role), NODE).dims
    for core, dim in zip(structure.cores, cut_dims, strict=True):
        local_parameters += core.params if dim is None else core.params // NODE
    return Traffic(
        forward=len(select("forward")),
        backward=len(select("backward")),
        forward_bytes=count_bytes("forward"),
        backward_bytes=count_bytes("backward"),
        step_bytes=NUMBER_BYTES * sum(collective.per_call for collective in collectives),
        parameters=structure.params,
        local_parameters=local_parameters,
    )


def traffic_of_mlp(family: Family, roles: Roles) -> Traffic:
    """Up and down of an MLP, WIDTH -> HIDDEN -> WIDTH."""
    up = traffic_of(family.structure(WIDTH, HIDDEN), roles.up)
    down = traffic_of(family.structure(HIDDEN, WIDTH), roles.down)
    return Traffic(
        forward=up.forward + down.forward,
        backward=up.backward + down.backward,
        forward_bytes=up.forward_bytes + down.forward_bytes,
        backward_bytes=up.backward_bytes + down.backward_bytes,
        step_bytes=up.step_bytes + down.step_bytes,
        parameters=up.parameters + down.parameters,
        local_parameters=up.local_parameters + down.local_parameters,
    )


def show_collectives() -> str:
    """An MLP by structure: collectives, and bytes for each token."""
    titles = ["MLP", "parameters", "of a process"]
    titles += ["forward", "KB / token", "backward", "KB / token", "KB / step"]
    rows = []
    for name, family, roles in LAYERS_OF_AN_MLP:
        traffic = traffic_of_mlp(family, roles)
        rows.append(
            [
                name,
                f"{traffic.parameters / 1e6:.2f} M",
                f"{traffic.local_parameters / 1e6:.2f} M",
                str(traffic.forward),
                f"{traffic.forward_bytes / 1000:,.1f}",
                str(traffic.backward),
                f"{traffic.backward_bytes / 1000:,.1f}",
                f"{traffic.step_bytes / 1000:,.1f}",
            ]
        )
    return table(titles, rows)


# ---- a model on 8 x 128 GPUs ---------------------------------------------------------------------


def parameters_of_model(family: Family) -> int:
    """Of a model of Mistral 7B's shape whose MLPs have this structure; norms left out."""
    gate_and_up = 2 * family.structure(WIDTH, HIDDEN).params
    down = family.structure(HIDDEN, WIDTH).params
    return LAYERS * (gate_and_up + down) + DENSE_PARAMETERS


def node_bytes(family: Family, roles: Roles) -> float:
    """What a GPU sends to those of its node in a step, by a ring.

    Queries, keys and values read one x, as gate and up do: where they need the sum of dx, one sum
    is for all of them. Sums between the cores of gate and of up are two.
    """
    messages = 2 * WIDTH * NUMBER_BYTES  # attention: y forward, dx backward
    up = traffic_of(family.structure(WIDTH, HIDDEN), roles.up)
    down = traffic_of(family.structure(HIDDEN, WIDTH), roles.down)
    sums_dx = up.backward_bytes == WIDTH * NUMBER_BYTES
    messages += 2 * up.forward_bytes + (1 if sums_dx else 2) * up.backward_bytes
    messages += down.forward_bytes + down.backward_bytes
    step_bytes = 2 * up.step_bytes + down.step_bytes
    return LAYERS * (TOKENS * messages + step_bytes) * 2 * (NODE - 1) / NODE


def replica_bytes(family: Family, roles: Roles) -> float:
    """What a GPU sends to the other nodes in a step of FSDP2: parameters are gathered forward and
    backward, gradients summed and scattered, all in bfloat16."""
    up = traffic_of(family.structure(WIDTH, HIDDEN), roles.up)
    down = traffic_of(family.structure(HIDDEN, WIDTH), roles.down)
    local_mlps = LAYERS * (2 * up.local_parameters + down.local_parameters)
    local = local_mlps + DENSE_PARAMETERS / NODE
    return 3 * local * NUMBER_BYTES * (REPLICAS - 1) / REPLICAS


def show_model() -> str:
    """A model of 7 B by the structure of its MLPs: what a GPU sends in a step."""
    titles = ["MLPs", "parameters", "in its node", "to other nodes"]
    chosen = ("dense", "BTT, rank 1", "BTT, rank 4", "low-rank 256")
    rows = []
    for name, family, roles in LAYERS_OF_AN_MLP:
        if name.startswith(chosen):
            billions = f"{parameters_of_model(family) / 1e9:.2f} B"
            in_node = f"{node_bytes(family, roles) / 1e9:.1f} GB"
            to_nodes = f"{replica_bytes(family, roles) / 1e9:.2f} GB"
            rows.append([name, billions, in_node, to_nodes])
    return table(titles, rows)


if __name__ == "__main__":
    print(show_collectives(), show_model(), sep="\n\n")
