"""Atoms: the modules that have weights. Each holds an ordinary layer, which is what optimizers and
`convert` see.

The norm of a weight is that of the operator that it is: RMS -> RMS for matrices, the largest RMS of
a vector for embeddings. At initialisation it is 1, and all singular values are equal. No atom has a
bias.

The paper's atoms (appendix B.1) hold W / s, semi-orthogonal or of unit vectors, and multiply by s
in the forward pass; ours hold W. The steps of `descend_`, `Normed` and `Muon` are the same. Those
of a plain optimizer are not.

Sources: Large et al. 2024 (arXiv:2405.14813), appendix B.1; Bernstein & Newhouse 2024
(arXiv:2410.21265), section 4.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from .._layer.linear import StructuredLinear
from .._structure.arguments import checked
from .._structure.families import Family
from .._structure.structure import Structure
from ..duality import dualize, dualize_convolution, dualize_embedding, promote
from .module import Atom, Attributes, Term, Width, chain, single


class Linear(Atom):
    """y = W x, with W dense or, as `Structured` or after `convert`, structured.

    The norm is sqrt(fan_in / fan_out) |W|_2; a structured W is the composite of its cores, the norm
    of each is the largest of its blocks', and they share its mass: equally, or as `masses` says.

    Args:
        mass: its share of a network's learning; 0 freezes it.

    >>> net = Linear(64, 256)
    >>> torch.linalg.matrix_norm(net.linear.weight, 2).round(decimals=3)  # sqrt(256 / 64)
    tensor(2., grad_fn=<RoundBackward1>)
    >>> from structlin import BTT, convert
    >>> [(term.name, term.mass) for term in convert(net, BTT(rank=2)).terms()]
    [('linear.cores.0', 0.5), ('linear.cores.1', 0.5)]
    """

    linear: nn.Linear | StructuredLinear
    masses: tuple[float, ...] | None = None  #: of the cores, relative to each other

    @checked
    def __init__(self, in_features: int, out_features: int, *, mass: float = 1.0) -> None:
        super().__init__(mass)
        self.linear = nn.Linear(in_features, out_features, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if isinstance(self.linear, StructuredLinear):
            self.linear.reset_parameters()
        else:
            super().reset_parameters()

    @property
    def attributes(self) -> Attributes:
        """Composite of zero-padding x, the cores, and cropping y: the RMS of y counts its own
        features alone."""
        padding = Attributes(sensitivity=self._padding_sensitivity)
        cropping = Attributes(sensitivity=self._cropping_sensitivity)
        cores = [Attributes(term.mass, 1.0, beta=1.0) for term in self.terms()]
        return chain([padding, *cores, cropping])

    def terms(self) -> list[Term]:
        if not isinstance(self.linear, StructuredLinear):
            return super().terms()
        if self.linear.gains is not None or self.linear.bias is not None:
            raise ValueError(
                "the algebra has no norm for gains or biases: convert with weight_norm=False"
            )
        self.linear.structure.require_matrix("the algebra")
        count = len(self.linear.cores)
        masses = self.masses or (1.0,) * count
        if len(masses) != count:
            raise ValueError(
                f"masses={masses} are {len(masses)}, but the structure has {count} cores"
            )
        terms = []
        for n, mass in enumerate(masses):
            share = self._mass * mass / sum(masses)
            terms.append(Term(f"linear.cores.{n}", share, self._cropping_sensitivity, self))
        return terms

    @property
    def _padding_sensitivity(self) -> float:
        """The sensitivity of padding x with zeros."""
        if not isinstance(self.linear, StructuredLinear):
            return 1.0
        return sqrt(self.linear.in_features / self.linear.structure.in_features)

    @property
    def _cropping_sensitivity(self) -> float:
        """The sensitivity of cropping y."""
        if not isinstance(self.linear, StructuredLinear):
            return 1.0
        return sqrt(self.linear.structure.out_features / self.linear.out_features)

    def width(self, width: Width) -> Width:
        return _pass_width(self, width, self.linear.in_features, self.linear.out_features)

    def weight_norm(self, weight: Tensor) -> Tensor:
        return _operator_norm(weight)

    def weight_dual(self, gradient: Tensor, method: str) -> Tensor:
        return dualize(gradient, method=method)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Structured(Linear):
    """y = W x with a structured W: a `Linear` whose layer is a `StructuredLinear`.

    Args:
        structure: a family or a `Structure`.
        masses: of the cores, relative to each other; None: equal ones.

    >>> from structlin import Kronecker
    >>> net = Structured(64, 64, Kronecker(), mass=3, masses=(1, 2))
    >>> net.sensitivity, net.sharpness.alpha == 2 * (1 / 3) * (2 / 3)
    (1.0, True)
    >>> [term.mass for term in net.terms()]
    [1.0, 2.0]
    """

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Family | Structure,
        *,
        mass: float = 1.0,
        masses: Sequence[float] | None = None,
    ) -> None:
        Atom.__init__(self, mass)
        self.linear = StructuredLinear(
            in_features, out_features, structure, bias=False, init="orthogonal"
        )
        if masses is not None:
            if not sum(masses) > 0:
                raise ValueError(f"masses={masses!r}: their sum, which divides, must not be zero")
            self.masses = tuple(masses)
        self.terms()  # refuses masses that do not fit


class Embed(Atom):
    """Tokens -> their vectors, each of RMS 1. The norm is the largest RMS of a vector.

    >>> Embed(50, 16)(torch.tensor([3, 7])).square().mean(-1).round(decimals=3)
    tensor([1., 1.], grad_fn=<RoundBackward1>)
    """

    @checked
    def __init__(self, tokens: int, width: int, *, mass: float = 1.0) -> None:
        super().__init__(mass)
        self.embedding = nn.Embedding(tokens, width)
        self.reset_parameters()

    def width(self, width: Width) -> Width:
        if width is not None:
            raise ValueError(f"Embed takes tokens (integers), but it is given {width} features")
        return self.embedding.embedding_dim

    def weight_norm(self, weight: Tensor) -> Tensor:
        return promote(weight).square().mean(-1).sqrt().amax()

    def weight_dual(self, gradient: Tensor, method: str) -> Tensor:
        return dualize_embedding(gradient)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(tokens)
        return vectors


class Conv2D(Atom):
    """Convolution of images `(batch, channels, height, width)`; features are the channels. Zeros
    around an image keep its size where `kernel` is odd.

    The norm is k^2 sqrt(c_in / c_out) times the largest |W_ij|_2 of the k^2 slices of the kernel.
    Each slice is initialised semi-orthogonal, so that this norm is 1.

    >>> net = Conv2D(3, 8)
    >>> net(torch.ones(2, 3, 5, 5)).shape, [term.mass for term in net.terms()]
    (torch.Size([2, 8, 5, 5]), [1.0])
    """

    @checked
    def __init__(
        self, in_channels: int, out_channels: int, kernel: int = 3, *, mass: float = 1.0
    ) -> None:
        super().__init__(mass)
        padding = (kernel - 1) // 2
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, padding=padding, bias=False)
        self.reset_parameters()

    def width(self, width: Width) -> Width:
        return _pass_width(self, width, self.conv.in_channels, self.conv.out_channels, "channels")

    def weight_norm(self, weight: Tensor) -> Tensor:
        slices = weight.flatten(2).permute(2, 0, 1)  # (k^2, c_out, c_in)
        return len(slices) * _operator_norm(slices)

    def weight_dual(self, gradient: Tensor, method: str) -> Tensor:
        return dualize_convolution(gradient, method=method)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y


def _operator_norm(matrices: Tensor) -> Tensor:
    """sqrt(n / m) |W|_2, the largest of all the matrices `(..., m, n)`."""
    m, n = matrices.shape[-2:]
    spectral: Tensor = torch.linalg.matrix_norm(promote(matrices), 2)
    return sqrt(n / m) * spectral.amax()


def _pass_width(
    atom: Atom, width: Width, in_width: int, out_width: int, unit: str = "features"
) -> int:
    """`out_width`, if `width` is the input's or not known."""
    if single(atom, width) not in (None, in_width):
        name = f"{type(atom).__name__}({in_width} -> {out_width})"
        raise ValueError(f"{name} takes {in_width} {unit}, not {width}")
    return out_width
