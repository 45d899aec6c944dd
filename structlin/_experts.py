"""The routing of a mixture and its experts, one after the other: what an engine does in one call
each."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ._structure import Program

Routing = tuple[Tensor, Tensor, Tensor]  # weights and numbers (tokens, top_k), and balance ()


def define_routing(
    logits: Tensor, top_k: int, z: float, balanced: bool, chosen: Tensor | None = None
) -> Routing:
    """The weights of the experts of tokens, their numbers, and what is small where all experts get
    tokens.

    Args:
        logits: `(tokens, experts)`.
        z: weight of the logits' size in the balance, see `load_balancing_loss`.
        balanced: whether the balance is asked for; it is 0 otherwise.
        chosen: the numbers, if they are known.
    """
    if chosen is None:
        largest, chosen = logits.topk(top_k, dim=-1)
    else:
        largest = logits.gather(-1, chosen)
    balance = logits.new_zeros(())
    if balanced:
        experts = logits.shape[-1]
        share = count_loads(chosen, experts) / chosen.numel()  # (experts,)
        size = logits.logsumexp(-1, keepdim=True)  # (tokens, 1)
        # not logits.softmax: beside logsumexp inductor of torch 2.13 loses gradients of logits
        probabilities = (logits - size).exp().mean(0)  # (experts,)
        balance = experts * (probabilities * share).sum() + z * size.square().mean()
    return largest.softmax(-1), chosen, balance


def each_expert(
    product: Callable[[Sequence[Tensor], Tensor], Tensor],
    program: Program,
    cores: Sequence[Tensor],
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
) -> Tensor:
    """`sum_k weights[t, k] W_chosen[t, k] x_t`, one expert after the other.

    Args:
        product: of the cores of one expert and the tokens that chose it.
        cores: `(experts * batch, fan_out, fan_in)` each.
        x: `(tokens, in_features)`.
        weights, chosen: of each token's experts, and their numbers: `(tokens, top_k)`.

    Raises:
        RuntimeError: under vmap, where how many tokens an expert has is another for each sample.
    """
    order = chosen.flatten().argsort(stable=True)  # expert by expert
    token = order // chosen.shape[1]
    weights = weights.flatten().index_select(0, order)[:, None]
    rows = x.index_select(0, token)  # (tokens * top_k, in)
    # linear experts commute with their weights: weigh what is narrower
    early = program.in_features < program.out_features and not program.between
    rows = rows * weights.to(rows.dtype) if early else rows
    loads = count_loads(chosen, len(cores[0]) // program.steps[0].batch)
    if torch.compiler.is_compiling():  # a literal, or fullgraph=True does not print it
        torch._dynamo.graph_break(
            "structlin: no engine takes all experts of this mixture in one call "
            "(see Mixture): leave fullgraph=True out"
        )
    made = _multiply_each(product, cores, rows, loads)  # (tokens * top_k, out)
    made = made if early else made * weights.to(made.dtype)
    return made.new_zeros(len(x), program.out_features).index_add(0, token, made)


def count_loads(chosen: Tensor, experts: int) -> Tensor:
    """How many tokens each expert has: `(experts,)`."""
    numbers = torch.arange(experts, device=chosen.device)
    return (chosen.flatten()[:, None] == numbers).sum(0)


@_disable_dynamo  # torch.compiler.disable would load the compiler now
def _multiply_each(
    product: Callable[[Sequence[Tensor], Tensor], Tensor],
    cores: Sequence[Tensor],
    x: Tensor,
    loads: Tensor,
) -> Tensor:
    own = split_experts(cores, len(loads))
    try:
        parts = x.tensor_split(len(loads)) if loads.is_meta else torch.split(x, loads.tolist())
    except RuntimeError as error:
        if not torch._C._are_functorch_transforms_active():
            raise
        raise RuntimeError(
            "a mixture cannot run under torch.func.vmap: how many tokens each expert has differs "
            "from sample to sample; give it all samples at once, (..., in_features)"
        ) from error
    return torch.cat([product(*each) for each in zip(own, parts, strict=True)])


def split_experts(cores: Sequence[Tensor], experts: int) -> list[tuple[Tensor, ...]]:
    """The cores of each expert."""
    return list(zip(*(core.chunk(experts) for core in cores), strict=True))
