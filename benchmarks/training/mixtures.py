"""A mixture of structured experts in the place of a linear layer, all experts in one product.

It computes what `examples/moe.py` computes. The experts are one structure with a leading axis for
their number: the experts' axis is a batch axis of every core. Tokens are sorted by their expert, so
that the layer makes one batched product for each core, whatever the number of experts.
"""

from math import sqrt

import torch
from torch import Tensor, nn

from examples.moe import load_balancing_loss
from structlin import Family, Structure, StructuredLinear

EXPERTS_AXIS = "expert"


def repeat_structure(structure: Structure, experts: int) -> Structure:
    """The block-diagonal structure of so many independent ones.

    >>> from structlin import LowRank
    >>> repeat_structure(LowRank(rank=2).structure(4, 6), 3)
    Structure('expert i -> expert o', 'expert r i', 'expert o r', expert=3, i=4, o=6, r=2)
    """
    inputs, outputs = structure.signature.split(" -> ")
    signature = f"{EXPERTS_AXIS} {inputs} -> {EXPERTS_AXIS} {outputs}"
    cores = [f"{EXPERTS_AXIS} {core}" for core in structure.subscripts]
    sizes = {EXPERTS_AXIS: experts, **structure.sizes}
    return Structure(signature, *cores, between=structure.between, **sizes)


class Mixture(nn.Module):
    """`y = sum_e w_e(x) W_e x` over the `top_k` experts with the largest logits of each token.

    Attributes:
        balance: of the last forward pass, see `examples.moe`; add it to the loss, times its
            `BALANCE`.

    >>> from structlin import BTT
    >>> layer = Mixture(64, 128, BTT(rank=1), experts=8, top_k=2, weight_norm=False)
    >>> layer(torch.randn(4, 10, 64)).shape, bool(layer.balance > 1)
    (torch.Size([4, 10, 128]), True)
    """

    balance: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        family: Family,
        *,
        experts: int,
        top_k: int,
        weight_norm: bool,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.experts_count = experts
        self.top_k = top_k
        self.structure = family.structure(in_features, out_features)
        self.experts = StructuredLinear(
            experts * in_features,
            experts * out_features,
            repeat_structure(self.structure, experts),
            bias=False,
            weight_norm=weight_norm,
        )
        self.router = nn.Linear(in_features, experts, bias=False)
        nn.init.normal_(self.router.weight, std=sqrt(min(in_features, experts)) / in_features)

    @property
    def flops(self) -> int:
        """Per token, 2 per multiply-add."""
        return self.top_k * self.structure.flops + 2 * self.in_features * self.experts_count

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)  # (tokens, in_features)
        logits = self.router(rows).float()  # (tokens, experts)
        top_logits, chosen = logits.topk(self.top_k)  # (tokens, top_k), logits and expert numbers
        weights = top_logits.softmax(-1).to(x.dtype)
        self.balance = load_balancing_loss(logits, chosen)

        # An assignment is a token with one of its experts. Assignments are numbered by their place
        # in `chosen`; sorted by expert, the n-th of expert e takes the slot (n, e) of a table
        # (most assignments of an expert, experts, in_features), whose other slots are zero.
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=self.experts_count)
        first = counts.cumsum(0) - counts
        sorted_expert = expert[order]
        number = torch.arange(len(order), device=x.device) - first[sorted_expert]
        slot = number * self.experts_count + sorted_expert
        token = order // self.top_k

        most = int(counts.max())
        table = rows.new_zeros(most * self.experts_count, self.in_features)
        table = table.index_copy(0, slot, rows[token])
        products = self.experts(table.view(most, -1)).view(-1, self.out_features)
        weighted = products[slot] * weights.flatten()[order, None]
        y = rows.new_zeros(len(rows), self.out_features).index_add(0, token, weighted)
        return y.view(*x.shape[:-1], self.out_features)


def balance_of(model: nn.Module) -> Tensor | float:
    """The sum of the balances of all mixtures, 0 where there is none."""
    balance: Tensor | float = 0.0
    for module in model.modules():
        if isinstance(module, Mixture):
            balance = balance + module.balance
    return balance
