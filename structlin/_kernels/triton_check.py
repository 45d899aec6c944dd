"""May the Triton products be used? Only on a CUDA device on which they have just passed their own
test.

The test runs once for a device and dtype, in the few seconds that the kernels take to compile:
permuted views against float64, twice for the same bits, in buffers of NaN that must neither be read
nor overwritten. If it fails, or Triton is missing, one warning says so and the answer stays no.
Untested on GPU, as the products themselves.
"""

import warnings
from math import nan, prod

import torch
from einops import rearrange
from torch import Tensor

TOLERANCE = {
    torch.float32: 2e-3,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}  # relative, in norm; float32 may be tf32
BORDER = 2**14  # elements of NaN before and after a tensor under test

_usable: dict[tuple[torch.device, torch.dtype], bool] = {}


def available(tensor: Tensor) -> bool:
    """Do `block_gemm` and `block_gemm_weight` take tensors such as this one? Cheap but for the
    first of its kind.

    >>> available(torch.ones(1)), available(torch.ones(1, dtype=torch.float64))
    (False, False)
    """
    return tensor.is_cuda and tensor.dtype in TOLERANCE and usable(tensor.device, tensor.dtype)


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Have the products passed their test on this device? Tested at the first call; warns once if
    they fail.

    While a CUDA graph is captured nothing can be tested, and the answer is no: run a layer once
    before.
    """
    if (device, dtype) not in _usable:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        try:
            faults = self_test(device, dtype)
        except Exception as error:  # whatever Triton, its compiler or the driver may raise
            faults = [f"{type(error).__name__}: {error}"]
        _usable[device, dtype] = not faults
        if faults:
            warnings.warn(
                f"the Triton kernels are not used for {dtype} on {device}, PyTorch's products are: "
                f"{'; '.join(faults)}",
                RuntimeWarning,
                stacklevel=3,
            )
    return _usable[device, dtype]


@torch.no_grad()
def self_test(device: torch.device, dtype: torch.dtype) -> list[str]:
    """What is wrong with the products on this device, in words; nothing if all is well.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401

    from .triton_gemm import block_gemm, block_gemm_weight

    z, m, k, n = "za zb", "ma mb", "ka kb", "na nb"
    generator = torch.Generator("cpu").manual_seed(0)
    faults = []
    for sizes, a_order, b_order, y_order in (
        # row-major to tokens-fastest, as the first stage of BTT; then ragged in every way
        (
            {"za": 6, "ma": 150, "ka": 3, "kb": 24, "na": 2, "nb": 16},
            f"{m} {z} {k}",
            f"{z} {n} {k}",
            f"{z} {n} {m}",
        ),
        (
            {"za": 2, "zb": 3, "ma": 37, "mb": 5, "ka": 3, "kb": 3, "na": 5, "nb": 7},
            "zb ka mb kb za ma",
            "kb nb za ka zb na",
            "ma na zb mb nb za",
        ),
    ):
        a, b, y = (
            _Poisoned(order, sizes, dtype, device, generator)
            for order in (a_order, b_order, y_order)
        )
        a_view, b_view, y_view = a.view(z, m, k), b.view(z, k, n), y.view(z, m, n)
        gradient = torch.einsum("uvmMnN,uvmMkK->uvkKnN", y_view.double(), a_view.double())
        bias = _Poisoned(n, sizes, dtype, device, generator).view("na", "nb").expand(y_view.shape)
        product = (
            torch.einsum("uvmMkK,uvkKnN->uvmMnN", a_view.double(), b_view.double()) + bias.double()
        )
        db = _Poisoned(b_order, sizes, dtype, device, generator)
        for _ in range(2):
            block_gemm_weight(a_view, y_view, db.clear().view(z, k, n), splits=3)
            faults += db.faults("block_gemm_weight", db.view(z, k, n), gradient)
        for _ in range(2):
            block_gemm(a_view, b_view, y.clear().view(z, m, n), bias=bias)
            faults += y.faults("block_gemm", y_view, product)
    return faults


class _Poisoned:
    """A tensor of random numbers, its axes stored in the given order with gaps between the rows, in
    a buffer of NaN."""

    def __init__(
        self,
        order: str,
        sizes: dict[str, int],
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        *outer, last = (sizes.get(axis, 1) for axis in order.split())
        self.order = order
        self.buffer = torch.full(
            (2 * BORDER + prod(outer) * (last + 3),), nan, dtype=dtype, device=device
        )
        self.stored = self.buffer[BORDER:-BORDER].view(*outer, last + 3)[..., :last]
        self.stored.copy_(torch.randn(self.stored.shape, generator=generator, device="cpu"))
        self.before: Tensor | None = None

    def view(self, *axes: str) -> Tensor:
        return rearrange(self.stored, f"{self.order} -> {' '.join(axes)}")

    def clear(self) -> "_Poisoned":
        self.buffer.fill_(nan)
        return self

    def faults(self, name: str, found: Tensor, expected: Tensor) -> list[str]:
        """After `name` was to write `expected` into this tensor: what is wrong."""
        faults = []
        error = float((found.double() - expected).norm() / expected.norm())
        if not error <= TOLERANCE[found.dtype]:
            faults.append(f"{name} has a relative error of {error:.2g}")
        if int(self.buffer.isfinite().sum()) != expected.numel():
            faults.append(f"{name} wrote past its output")
        if self.before is not None and not torch.equal(self.before, self.stored):
            faults.append(f"{name} gives other bits at the second run")
        self.before = self.stored.clone()
        return faults
