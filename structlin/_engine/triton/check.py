"""May the Triton products be used? Only where they have just passed their own test; it is untested
on GPU, as they are.

The test runs once for a device and dtype: permuted views against float64, twice for the same bits,
in buffers of NaN that must neither be read nor overwritten. If it fails, or Triton is missing, or a
layer's kernel cannot be launched, one warning says so, and the plain products serve.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import nan, prod

import torch
from torch import Tensor

from .stages import supported

# relative, in norm; float32 may be tf32
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BORDER = 2**14  # elements of NaN before and after a tensor under test
# The sizes z, m, k and n of a product, and in which order the dimensions of a, b and out are
# stored: row-major to tokens-fastest, as the first stage of BTT; then ragged in every way.
CASES = (
    (((6, 1), (150, 1), (3, 8), (2, 16)), ((2, 3, 0, 1, 4, 5), *2 * ((0, 1, 4, 5, 2, 3),))),
    (
        ((2, 3), (13, 3), (3, 3), (2, 7)),
        ((1, 4, 3, 5, 0, 2), (3, 5, 0, 2, 1, 4), (2, 4, 1, 3, 5, 0)),
    ),
)

Layer = tuple[torch.device, torch.dtype, tuple[int, ...]]  # the last is its program

_passed: dict[tuple[torch.device, torch.dtype], bool] = {}
refused: set[Layer] = set()  # of which a kernel could not be launched


def usable(device: torch.device, dtype: torch.dtype, program: tuple[int, ...]) -> bool:
    """May this layer use the products? The first call tests them; one warning says if they fail.

    While a CUDA graph is captured nothing can be tested, and the answer is no: run a layer once
    before.
    """
    if (device, dtype) not in _passed:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        try:
            faults = self_test(device, dtype)
        except Exception as error:  # whatever Triton, its compiler or the driver may raise
            faults = [f"{type(error).__name__}: {error}"]
        _passed[device, dtype] = not faults
        if faults:
            _warn(f"{dtype} on {device}", "; ".join(faults))
    allowed = _passed[device, dtype] and (device, dtype, program) not in refused
    return allowed and supported(program)


# torch.compile calls it while it traces, and sees its answer
usable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse(layer: Layer, error: Exception) -> None:
    """Leave this layer to PyTorch's products from now on."""
    refused.add(layer)
    device, dtype, (d_in, d_out, cores, *_) = layer
    _warn(f"a layer {d_in} -> {d_out} of {cores} cores in {dtype} on {device}", str(error))


def _warn(what: str, why: str) -> None:
    text = f"the Triton kernels are not used for {what}, PyTorch's products are: {why}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)


@torch.no_grad()
def self_test(device: torch.device, dtype: torch.dtype) -> list[str]:
    """What is wrong with the products on this device, in words; nothing if all is well.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401

    from .gemm import block_gemm

    random, faults = torch.Generator("cpu").manual_seed(0), list[str]()
    for (z, m, k, n), orders in CASES:
        shapes, like = (z + m + k, z + k + n, z + m + n), torch.empty(0, dtype=dtype, device=device)
        stored = [_scatter(*each, like, random) for each in zip(shapes, orders, strict=True)]
        (_, a), (_, b), (buffer, out) = stored
        bias = torch.randn(n, generator=random, device="cpu").to(out).expand(out.shape)
        product = torch.einsum("uvmMkK,uvkKnN->uvmMnN", a.double(), b.double())
        split = partial(block_gemm, a, b, rows="k", splits=3)
        biased = partial(block_gemm, a, b, bias=bias)
        faults += _faults("a product with a bias", biased, buffer, out, product + bias)
        faults += _faults("a split product", split, buffer, out, product)
    return faults


def _scatter(
    shape: Sequence[int], order: Sequence[int], like: Tensor, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A buffer of NaN, and in it random numbers of this shape: the dimensions are stored in the
    given order, with gaps between the rows."""
    *outer, last = (shape[d] for d in order)
    buffer = like.new_full((2 * BORDER + prod(outer) * (last + 3),), nan)
    stored = buffer[BORDER:-BORDER].view(*outer, last + 3)[..., :last]
    stored.copy_(torch.randn(stored.shape, generator=random, device="cpu"))
    return buffer, stored.permute([order.index(d) for d in range(len(order))])


def _faults(
    name: str, call: Callable[..., None], buffer: Tensor, out: Tensor, expected: Tensor
) -> list[str]:
    """What is wrong after `call` was to write `expected` into `out`, a part of `buffer`; twice."""
    faults, results = list[str](), list[Tensor]()
    for _ in range(2):
        buffer.fill_(nan)
        call(out=out)
        results.append(out.clone())
        error = float((out.double() - expected).norm() / expected.norm())
        if not error <= TOLERANCE[out.dtype]:
            faults.append(f"{name} has a relative error of {error:.2g}")
        if int(buffer.isfinite().sum()) != expected.numel():
            faults.append(f"{name} wrote past its output")
    if not torch.equal(*results):
        faults.append(f"{name} gives other bits at the second run")
    return faults
