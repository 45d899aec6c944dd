"""The experts of a mixture, one after the other: what its products are where no engine takes all of
them in one call."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo


def each_expert(
    product: Callable[[Sequence[Tensor], Tensor], Tensor],
    cores: Sequence[Tensor],
    x: Tensor,
    loads: Tensor,
) -> Tensor:
    """`product(cores, tokens)` of every expert, one after the other.

    Args:
        cores: `(experts * batch, fan_out, fan_in)` each.
        x: `(tokens, in_features)`, expert by expert.
        loads: `(experts,)`, how many tokens are each expert's.

    Raises:
        RuntimeError: under vmap, where that number is another for each sample.
    """
    if torch.compiler.is_compiling():  # a literal, or fullgraph=True does not print it
        torch._dynamo.graph_break(
            "structlin: no engine takes all experts of this mixture in one call "
            "(see Mixture): leave fullgraph=True out"
        )
    return _multiply_each(product, cores, x, loads)


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
