"""A mixture of structured experts in the place of a linear layer, as BTT-MoE has it.

    logits = R x                         of every expert, in float32
    w = softmax(the top_k largest logits)
    y = sum of w_e W_e x over these top_k experts e

    balance = experts * sum_e p_e f_e + 0.1 * mean(logsumexp(logits)^2)

f_e is the share of the assignments that expert e got, p_e its mean softmax probability. The first
term is 1 where all experts get as many tokens; the second, the z-loss, keeps the logits small.

    python examples/moe.py            # half a minute
    python examples/moe.py --smoke    # seconds

The program compares a mixture of 2 of 8 BTT matrices of rank 1 with one BTT matrix of rank 2, which
has the FLOPs of the two, on vectors from 8 clusters, each with a matrix of its own. `optim.AdamW`
gives every expert's cores the rate that one BTT layer has, and the router that of a dense layer.

Source: Potapczynski et al. 2024, "Searching for Efficient Linear Layers over a Continuous Space of
Structured Matrices" (arXiv:2410.02117), and its code (AndPotap/einsum-search), for 0.1 and 0.01
too; the balance is that of Fedus et al. 2021 (arXiv:2101.03961).
"""

import argparse
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structlin import BTT, Family, StructuredLinear
from structlin.optim import AdamW

BALANCE = 0.01  # weight of the balance beside the loss
Z_LOSS = 0.1  # weight of the z-loss in the balance
WIDTH = 64
CLUSTERS = 8
LR = 4e-3
BATCH = 512
HELDOUT = 4096


class Mixture(nn.Module):
    """`y = sum_e w_e(x) W_e x`: for each token the `top_k` experts with the largest logits.

    The router starts with small random weights, as a dense layer's of its shape. Zeros, which the
    paper's code has, would send all tokens to the same experts until they differ.

    Attributes:
        balance: of the last forward pass; add it to the loss, times `BALANCE`.

    >>> layer = Mixture(64, 128, BTT(rank=1), experts=8, top_k=2)
    >>> layer(torch.randn(4, 10, 64)).shape, bool(layer.balance > 1)
    (torch.Size([4, 10, 128]), True)
    """

    balance: Tensor

    def __init__(
        self, in_features: int, out_features: int, structure: Family, *, experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.top_k = top_k
        self.experts = nn.ModuleList(
            StructuredLinear(in_features, out_features, structure, bias=False)
            for _ in range(experts)
        )
        self.router = nn.Linear(in_features, experts, bias=False)
        nn.init.normal_(self.router.weight, std=sqrt(min(in_features, experts)) / in_features)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (tokens, in_features)
        logits = self.router(rows).float()  # (tokens, experts)
        top_logits, chosen = logits.topk(self.top_k)  # (tokens, top_k), logits and expert numbers
        weights = top_logits.softmax(-1).to(x.dtype)
        self.balance = load_balancing_loss(logits, chosen)

        # y = sum_e w_e W_e x, one expert at a time: gather the tokens that chose expert e,
        # multiply them by W_e and their weights w_e, (tokens of e, out_features), and add the
        # products to the rows of y that they came from.
        y = rows.new_zeros(len(rows), self.out_features)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)  # (tokens of e,) each
            output = expert(rows[token]) * weights[token, rank, None]
            y = y.index_add(0, token, output)
        return y.view(*x.shape[:-1], self.out_features)


def load_balancing_loss(logits: Tensor, chosen: Tensor) -> Tensor:
    """`balance` above; its gradient goes through p and the z-loss.

    Args:
        logits: `(tokens, experts)`.
        chosen: numbers of each token's experts, `(tokens, top_k)`.
    """
    experts = logits.shape[-1]
    share = chosen.flatten().bincount(minlength=experts) / chosen.numel()  # f, (experts,)
    probability = logits.softmax(-1).mean(0)  # p, (experts,)
    z_loss = logits.logsumexp(-1).square().mean()
    return experts * (probability * share).sum() + Z_LOSS * z_loss


class Clusters:
    """`y = A_c x` for x in cluster c: what a mixture can do and one matrix can not."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.centres = self.draw(CLUSTERS, WIDTH)
        self.matrices = self.draw(CLUSTERS, WIDTH, WIDTH) / sqrt(WIDTH)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """x and y, `(tokens, WIDTH)` each."""
        cluster = torch.randint(CLUSTERS, (tokens,), generator=self.random)
        x = self.centres[cluster] + self.draw(tokens, WIDTH)
        y = (self.matrices[cluster] @ x[:, :, None]).squeeze(-1)
        return x, y


def train(layer: nn.Module, steps: int) -> float:
    """The mean square error on new vectors, over the mean square of y."""
    data = Clusters()
    optimizer = AdamW(layer, LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x, y = data.batch(BATCH)
        loss = F.mse_loss(layer(x), y)
        if isinstance(layer, Mixture):
            loss = loss + BALANCE * layer.balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        x, y = data.batch(HELDOUT)
        relative_error = F.mse_loss(layer(x), y) / y.square().mean()
        return relative_error.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    steps = 5 if parser.parse_args().smoke else 2000
    torch.manual_seed(0)
    layers = {
        "one BTT matrix of rank 2": StructuredLinear(WIDTH, WIDTH, BTT(rank=2), bias=False),
        "2 of 8 BTT matrices of rank 1": Mixture(WIDTH, WIDTH, BTT(rank=1), experts=8, top_k=2),
    }
    for name, layer in layers.items():
        print(f"{name:30} relative error {train(layer, steps):.2f}")


if __name__ == "__main__":
    main()
