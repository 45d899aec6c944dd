"""A mixture of structured experts in the place of one linear layer, routed token by token.

Source: Potapczynski et al. 2024, "Searching for Efficient Linear Layers over a Continuous Space of
Structured Matrices" (arXiv:2410.02117), its BTT-MoE, and its code (AndPotap/einsum-search).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import _product
from ._arguments import check_input, checked
from ._experts import split_experts
from ._families import DEFAULT, Family, label
from ._kernels import routing
from ._linear import StructuredLinear
from ._structure import Core, Structure
from .scaling import init_std

__all__ = ["Mixture", "load_balancing_loss"]
Z_LOSS = 0.1  # weight of the logits' size in `Mixture.balance`, as in the paper's code


class Router(nn.Linear):
    """Logits of the experts, without bias; starts by `init_std` of a core of its shape."""

    def reset_parameters(self) -> None:
        core = Core(1, self.out_features, self.in_features, 1, (), (), (), ())
        nn.init.normal_(self.weight, 0, init_std(core))


class Mixture(StructuredLinear):
    """`y = sum_e w_e(x) W_e x + b`: for each token the `top_k` experts with the largest logits.

    The weights are the softmax of these experts' logits, `router(x)`, in float32; they add up to 1.
    With BTT of rank 1 as experts this is BTT-MoE, meant for every linear layer of a model. An
    expert is an entry more of each core's batch axis: what a core's integers give, its initial
    scale, its learning rate and its duality map, is that of the single structure. All experts share
    the bias and, with weight normalisation, the gains and the norm of each core.

    The router has the rate of a dense layer of its shape (`param_groups`: lr, Muon: a step of norm
    lr). It starts with small random weights, as a core of its shape does; zeros, which the paper's
    code has, would send all tokens to the same experts until they differ.

    Tokens are sorted by expert, and each expert multiplies its own: no token is dropped, and a
    token costs the FLOPs of `top_k` experts and of the router. The compiled CPU engine takes all
    experts in one call, which reads the tokens where they lie and adds to their outputs, and
    torch.compile takes all of the layer. Elsewhere, with an activation between the cores, and for
    what BLAS multiplies faster (low-rank chains, blocks of 512 x 512), how many tokens an expert
    has is needed in Python: torch.compile leaves the product as it is, compiles the rest of the
    model, and refuses fullgraph=True.

    Args:
        in_features, out_features, structure, bias, weight_norm, init, zero_init: as of
            `StructuredLinear`; `structure` is that of one expert.
        experts: number of experts.
        top_k: experts per token: 2 to `experts`, or 1 of 1, which is the structured layer itself.

    Attributes:
        cores: one parameter `(experts * batch, fan_out, fan_in)` per core, expert by expert.
        structure: that of one expert.
        router: nn.Linear, in_features -> experts.
        balance: of the last forward pass in training mode: what to keep small so that all experts
            get tokens, see `load_balancing_loss`; None before.

    Raises:
        ValueError: `experts` below 1; `top_k` above `experts`, or 1 of several: its weight would
            always be 1, and the router would learn nothing from the loss; what `StructuredLinear`
            raises. Asked for one matrix (`to_dense`, `from_dense_`), which a mixture does not have.

    >>> from structlin import BTT
    >>> layer = Mixture(768, 3072, BTT(rank=1), experts=8, top_k=2)
    >>> layer(torch.randn(4, 10, 768)).shape, [tuple(core.shape) for core in layer.cores]
    (torch.Size([4, 10, 3072]), [(192, 48, 32), (384, 64, 24)])
    """

    balance: Tensor | None

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Family | Structure = DEFAULT,
        bias: bool = True,
        *,
        experts: int = 8,
        top_k: int = 2,
        weight_norm: bool = False,
        init: str = "mup",
        zero_init: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_numbers(experts, top_k)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        start: dict[str, Any] = {"weight_norm": weight_norm, "init": init, "zero_init": zero_init}
        super().__init__(in_features, out_features, structure, bias, **start, **options)
        self.experts, self.top_k, self.balance = experts, top_k, None
        self.label = f"{top_k} of {experts} {label(structure)}"
        for n, core in enumerate(self.cores):
            self.cores[n] = nn.Parameter(core.detach().repeat(experts, 1, 1))
        self.reset_parameters()
        self.router = Router(in_features, experts, bias=False, **options)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The experts' products, weighted, and a bias `(out_features,)`."""
        cores = self._stored_cores()
        check_input(x, self.in_features, cores[0])
        if x.is_nested:
            return _product.map_jagged(partial(self.multiply, bias=bias), x)
        tokens = x.reshape(-1, self.in_features)
        y = _product.run(
            self.structure,
            cores,
            tokens,
            bias,
            gains=self.gains,
            sigmas=None if self.gains is None else self.stds,
            program=self._program,
            routes=self.route(tokens),
        )
        return y.view(*x.shape[:-1], self.out_features)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the experts of tokens `(tokens, in_features)`, and their numbers.

        Both are `(tokens, top_k)`, the largest weight first.
        """
        logits = self.router(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        balanced = self.training and len(x) > 0
        weights, chosen, balance = routing.route(logits, self.top_k, Z_LOSS, balanced)
        if balanced:
            self.balance = balance
        return weights, chosen

    def split(self, cores: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """The cores of each expert."""
        return split_experts(cores, self.experts)

    def to_dense(self) -> Tensor:
        raise ValueError(
            f"a mixture of {self.experts} experts has no one matrix: each token has its own experts"
        )

    def from_dense_(self, weight: Tensor, bias: Tensor | None = None) -> StructuredLinear:
        raise ValueError(
            f"a mixture of {self.experts} experts has no one matrix: it can not take one"
        )

    def computes_with(self) -> dict[str, Any]:
        """Also how many experts there are, and how many a token uses."""
        return super().computes_with() | {"experts": self.experts, "top_k": self.top_k}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "balance": None}  # part of a graph, which can not be copied


@checked
def load_balancing_loss(model: nn.Module) -> Tensor:
    """Mean of `balance` over the mixtures of `model`, to be added to the loss, times 0.01 say.

    Of one mixture it is experts * sum_e p_e f_e + 0.1 * mean(logsumexp(logits)^2): f_e is the share
    of the assignments that expert e got in the last forward pass, p_e its mean softmax probability.
    Where all experts get as many tokens the first term is 1.

    Raises:
        ValueError: no mixture in the model, or one that made no forward pass in training mode.
    Source: Fedus et al. 2021 (arXiv:2101.03961); 0.01 and 0.1 as in the code of arXiv:2410.02117.

    >>> model = nn.Sequential(Mixture(64, 64))
    >>> _ = model(torch.randn(100, 64))
    >>> bool(load_balancing_loss(model) > 1)
    True
    """
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    if not mixtures:
        raise ValueError(
            f"model={type(model).__name__} has no structlin.moe.Mixture, whose tokens are balanced"
        )
    losses = [mixture.balance for mixture in mixtures if mixture.balance is not None]
    if len(losses) < len(mixtures):
        raise ValueError(
            f"model={type(model).__name__}: of its {len(mixtures)} mixtures {len(losses)} made a "
            "forward pass in training mode; call model.train() and the model first"
        )
    return torch.stack(losses).mean()


def _check_numbers(experts: int, top_k: int) -> None:
    if top_k > experts:
        raise ValueError(f"top_k={top_k} is more than there are experts={experts}")
    if top_k == 1 < experts:
        raise ValueError(
            f"top_k=1 of experts={experts}: the weight of one expert is always 1, and the router "
            "would learn nothing from the loss; take top_k=2"
        )
