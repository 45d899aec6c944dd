"""Layers of other libraries, against their documented formulas, written out as one einsum each."""

import pytest
import torch
from einops import rearrange
from importers import from_cbs_btt, from_fly_monarch, from_lokr, from_tltorch_tt


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def close(layer, expected, bias=None):
    torch.testing.assert_close(layer.to_dense(), expected, atol=1e-12, rtol=1e-12)
    x = random(3, expected.shape[1])
    y = x @ expected.mT if bias is None else x @ expected.mT + bias
    torch.testing.assert_close(layer(x), y, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("r", [1, 3])
def test_btt_of_compute_better_spent(r):
    g, a, f, e = 3, 4, 5, 2
    A, B, bias = random(g, a, f * r), random(f, g * r, e), random(f * e)
    parts = A.reshape(g, a, f, r), B.reshape(f, g, r, e)
    formula = torch.einsum("gafr,fgre->fega", *parts).reshape(f * e, g * a)
    close(from_cbs_btt({"op_params.0": A, "op_params.1": B, "b": bias}), formula, bias)

    below = from_cbs_btt({"h.0.fc.op_params.0": A, "h.0.fc.op_params.1": B}, prefix="h.0.fc.")
    close(below, formula)


@pytest.mark.parametrize(("k", "p", "s"), [(2, 8, 8), (4, 8, 12), (4, 12, 8), (6, 2, 5), (4, 2, 4)])
def test_monarch_of_fly(k, p, s):
    q = min(p, s)
    w1, w2 = random(k, q, p), random(k, s, q)

    def multiply(x):  # as their reference does it
        y = torch.einsum("kqp,nkp->nkq", w1, x.reshape(-1, k, p))
        y = rearrange(rearrange(y, "n k q -> n (k q)"), "n (r l) -> n l r", l=k)
        return rearrange(torch.einsum("lsr,nlr->nls", w2, y), "n l s -> n (s l)")

    x, bias = random(5, k * p), random(k * s)
    layer = from_fly_monarch({"blkdiag1": w1, "blkdiag2": w2, "bias": bias})
    torch.testing.assert_close(layer(x), multiply(x) + bias)
    state = {"blkdiag1": w1, "blkdiag2": w2, "bias": bias[:-1]}
    padded = from_fly_monarch(state, in_features=k * p - 1)
    zero = torch.cat([x[:, :-1], torch.zeros(5, 1)], dim=1)
    torch.testing.assert_close(padded(x[:, :-1]), (multiply(zero) + bias)[:, :-1])


# of so small sizes: the reversed order of three cores has fewer FLOPs
@pytest.mark.filterwarnings("ignore:.*dense's FLOPs in this order")
@pytest.mark.parametrize("ranks", [(1, 1), (1, 3, 1), (1, 2, 4, 1)])
def test_tt_matrix_of_tensorly_torch(ranks):
    o, i = (2, 3, 4)[: len(ranks) - 1], (5, 2, 3)[: len(ranks) - 1]
    factors = [random(ranks[t], o[t], i[t], ranks[t + 1]) for t in range(len(o))]
    W = torch.ones(1, 1, 1, dtype=torch.float64)
    for factor in factors:
        W = torch.einsum("abr,roic->aobic", W.reshape(*W.shape), factor)
        W = W.reshape(W.shape[0] * W.shape[1], W.shape[2] * W.shape[3], -1)
    state = {f"weight.factors.factor_{t}": factor for t, factor in enumerate(factors)}
    state["bias"] = torch.ones(W.shape[0], dtype=torch.float64)
    close(from_tltorch_tt(state), W[..., 0], 1.0)


def test_lokr_is_the_kronecker_product():
    w1, w2, a, b = random(2, 3), random(4, 5), random(4, 2), random(2, 5)
    close(from_lokr({"lokr_w1": w1, "lokr_w2": w2}, scale=0.5), 0.5 * torch.kron(w1, w2))
    state = {"q.lokr_w1.default": w1, "q.lokr_w2_a.default": a, "q.lokr_w2_b.default": b}
    close(from_lokr(state, prefix="q."), torch.kron(w1, a @ b))


def btt(*shapes):
    return {f"op_params.{n}": random(*shape) for n, shape in enumerate(shapes)}


@pytest.mark.parametrize(
    ("importer", "state", "message"),
    [
        (from_cbs_btt, {}, r"no 'op_params\.0'; below prefix='' it has \[\]"),
        (from_cbs_btt, btt((2, 2, 3), (2, 2, 2)), "not the two cores"),
        (from_cbs_btt, btt((2, 2), (2, 2, 2)), "must have 3 dimensions"),
        (from_cbs_btt, btt(*[(1,)] * 3), "without normalisation"),
        (from_fly_monarch, {"blkdiag1": random(2, 4, 8)}, "no 'blkdiag2'"),
        (from_fly_monarch, {f"blkdiag{n}": random(2, n * n, 8) for n in (1, 2)}, "not the factors"),
        (from_tltorch_tt, {}, "are no chain from 1 to 1"),
        (from_tltorch_tt, {"factor_0": random(1, 2, 2, 3)}, "are no chain"),
        (from_lokr, {"lokr_w1": random(2, 2)}, "no 'lokr_w2_a'"),
        (from_lokr, {"lokr_t2": random(2, 2)}, "belongs to a convolution"),
    ],
)
def test_states_that_do_not_fit_are_refused(importer, state, message):
    with pytest.raises(ValueError, match=message):
        importer(state)
