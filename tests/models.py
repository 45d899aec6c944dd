"""Small models that the tests convert: a GPT in nanoGPT's manner and an MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unsqueeze(-3).chunk(3, dim=-1)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(-3))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(width),
            Attention(width),
            nn.LayerNorm(width),
            MLP(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(
        self, width: int = 64, depth: int = 2, vocabulary: int = 50, tied: bool = False
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def linear_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is nn.Linear}


def snapshot(model: nn.Module) -> list[tuple[str, int, bytes]]:
    """Names, identities and values of everything in a model, to see that nothing changed."""
    modules = [(name, id(module), b"") for name, module in model.named_modules()]
    return modules + [
        (name, id(p), p.detach().numpy().tobytes()) for name, p in model.named_parameters()
    ]


def perplexed(
    model: nn.Module, steps: int, optimizer: torch.optim.Optimizer, vocabulary: int = 50
) -> list[float]:
    """Losses of training on one fixed batch of tokens."""
    tokens = torch.arange(64).reshape(4, 16) * 7 % vocabulary
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
