"""benchmarks/compression/peers.py: each peer does what its paper says, on small layers."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.compression import peers

# torchao warns about itself and about what it could load on another machine
ignore_torchao_warnings = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*"
)
PEERS = [name for name in peers.PEERS if name != "int8"]
SIZE = 2 * 12 * 20  # weights of the encoder's two layers


class Encoder(nn.Module):
    """Two layers that are to be compressed, and one that is not."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))
        self.head = nn.Linear(12, 12)

    def forward(self, x, attention_mask):
        return self.head(self.encoder(x))


def make_batches():
    """Eight batches of two sequences; the first sequence ends in three tokens of padding."""
    torch.manual_seed(0)
    mixing = torch.randn(12, 12)
    mask = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
    batches = []
    for _ in range(8):
        x = torch.randn(2, 8, 12) @ mixing
        x[0, 5:] = 100.0  # padding
        batches.append({"x": x, "attention_mask": mask})
    return batches


def read_tokens():
    """What of the batches is no padding: `(tokens, 12)`, in float64."""
    tokens = [batch["x"][batch["attention_mask"].bool()] for batch in make_batches()]
    return torch.cat(tokens).double()


def find_loss(model, batch):
    """Half the sum of squares over the tokens that count; its gradient for `y` is `y`."""
    y = model(**batch)[batch["attention_mask"].bool()]
    return y.square().sum() / 2


def see(model, batches=None):
    """What the batches say of the layers of the encoder."""
    layers = peers.layers_of(model, "encoder.")
    batches = make_batches() if batches is None else batches
    return peers.Seen(model, layers, batches, find_loss)


def apply(name, model, keep, batches=None):
    """Compress the encoder by a peer, and return its counts."""
    seen = see(model, batches)
    peer = (peers.PEERS | peers.SEARCHED)[name]
    return peer(model, seen.layers, keep, seen)


def read_weight(layer):
    return layer.weight.detach().double()


def read_product(pair):
    """The matrix that a pair of factors stands for."""
    return pair.u.detach().double() @ pair.v.detach().double()


def find_tail(values, rank):
    """By Eckart and Young: how far a matrix of these singular values is from any of that rank."""
    return values[rank:].norm()


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_keeps_that_share_of_the_encoders_parameters_and_nothing_else_changes(name):
    model = Encoder()
    head = model.head.weight.clone()
    counts = apply(name, model, 0.5)
    assert 0.4 * SIZE <= counts["params"] <= 0.5 * SIZE
    assert torch.equal(model.head.weight, head)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_was_seen_stays_the_same_when_the_model_runs_again():
    model = Encoder().requires_grad_(False)
    seen = see(model)
    gram = seen.grams["encoder.0"].clone()
    size = seen.sizes["encoder.0"].clone()
    gradient = seen.gradients["encoder.2"].clone()
    y = model(**make_batches()[0])
    assert not y.requires_grad
    assert torch.equal(seen.grams["encoder.0"], gram)
    assert torch.equal(seen.sizes["encoder.0"], size)
    assert torch.equal(seen.gradients["encoder.2"], gradient)


def test_grams_and_sizes_are_those_of_all_tokens_but_padding():
    model = Encoder()
    x = read_tokens()
    seen = peers.Seen(model, {"first": model.encoder[0]}, make_batches())
    torch.testing.assert_close(seen.grams["first"].double(), x.T @ x, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(seen.sizes["first"], x.abs().sum(0), rtol=1e-5, atol=1e-3)


# ---- pairs of factors ----------------------------------------------------------------------------


def scale_by_nothing(x):
    return torch.eye(12, dtype=torch.float64)


def scale_by_mean_inputs(x):
    """ASVD scales each column by the root of its inputs' mean absolute value."""
    return x.abs().mean(0).sqrt().diag()


def multiply_by_inputs(x):
    """SVD-LLM looks at the outputs `W X^T`."""
    return x.T


# R, where a peer's pair is the best of its rank in the norm ||(W - U V) R||
NORMS = {
    "SVD": scale_by_nothing,
    "ASVD": scale_by_mean_inputs,
    "SVD-LLM": multiply_by_inputs,
}


@pytest.mark.parametrize("name", NORMS)
def test_a_pair_is_the_best_of_its_rank_in_the_norm_of_its_peer(name):
    torch.manual_seed(0)
    model = Encoder()
    right = NORMS[name](read_tokens())
    weight = read_weight(model.encoder[0])
    apply(name, model, 0.5)

    pair = model.encoder[0]
    rank = pair.v.shape[0]
    error = ((weight - read_product(pair)) @ right).norm()
    expected = find_tail(torch.linalg.svdvals(weight @ right), rank)
    torch.testing.assert_close(error, expected, rtol=1e-3, atol=0)

    x = torch.randn(4, 12)
    torch.testing.assert_close(pair(x), x @ (pair.u @ pair.v).T + pair.bias)


def test_kfac_svd_is_the_best_of_its_rank_in_the_metric_of_inputs_and_gradients(monkeypatch):
    monkeypatch.setattr(peers, "DAMPING", 1e-9)
    torch.manual_seed(0)
    model = Encoder().double()
    x = read_tokens()
    layer = model.encoder[2]
    weight = read_weight(layer)  # W
    # H (tokens, 20), the layer's inputs; Y (tokens, 12), the outputs of the model, which are
    # the gradients of the loss for themselves; G = Y head (tokens, 12), those for the layer's
    h = model.encoder[:2](x).detach()
    y = model.head(layer(h)).detach()
    g = y @ model.head.weight.detach()

    batches = [{**batch, "x": batch["x"].double()} for batch in make_batches()]
    apply("K-FAC SVD", model, 0.5, batches)

    pair = model.encoder[2]
    rank = pair.v.shape[0]
    # K-FAC takes tr(G^T G D H^T H D^T) for the loss's curvature along D = W - U V. With the QR
    # factors G = Q_1 A and H = Q_2 B this is ||A D B^T||^2, which Eckart and Young bound
    difference = weight - read_product(pair)
    curvature = torch.trace(g.T @ g @ difference @ h.T @ h @ difference.T)
    a = torch.linalg.qr(g).R
    b = torch.linalg.qr(h).R
    expected = find_tail(torch.linalg.svdvals(a @ weight @ b.T), rank)
    torch.testing.assert_close(curvature, expected.square(), rtol=1e-2, atol=0)


def test_gradients_without_a_loss_are_refused():
    model = Encoder()
    layers = peers.layers_of(model, "encoder.")
    seen = peers.Seen(model, layers, make_batches())
    with pytest.raises(ValueError, match="loss=None: the gradients"):
        peers.kfac_svd(model, layers, 0.5, seen)


def test_layers_get_the_ranks_that_are_given_and_the_others_stay_dense():
    model = Encoder()
    weight = model.encoder[0].weight.clone()
    layers = peers.layers_of(model, "encoder.")
    counts = peers.truncate(model, layers, 1.0, ranks={"encoder.2": 3})
    assert torch.equal(model.encoder[0].weight, weight)
    assert model.encoder[2].v.shape == (3, 20)
    assert counts["params"] == 12 * 20 + 3 * (12 + 20)


def test_a_layer_that_only_zeros_reach_is_cut_as_by_its_weight_alone():
    torch.testing.assert_close(peers.take_root(torch.zeros(3, 3)), torch.eye(3).double())
    model = Encoder()
    weight = read_weight(model.encoder[0])
    mask = torch.ones(1, 4, dtype=torch.int)
    apply("SVD-LLM", model, 0.5, [{"x": torch.zeros(1, 4, 12), "attention_mask": mask}])

    pair = model.encoder[0]
    rank = pair.v.shape[0]
    error = (weight - read_product(pair)).norm()
    expected = find_tail(torch.linalg.svdvals(weight), rank)
    torch.testing.assert_close(error, expected, rtol=1e-5, atol=0)


def test_inputs_that_are_not_finite_have_no_root():
    with pytest.raises(ValueError, match="the gram matrix is not finite"):
        peers.take_root(torch.full((2, 2), torch.nan))


# ---- ASVD's search -------------------------------------------------------------------------------


def test_asvds_search_cuts_the_least_sensitive_layer_and_share_first():
    sizes = {"a": 10, "b": 30}
    sensitivity = {
        ("a", 0.9): -3.0,  # first: 39 of 40 are left
        ("a", 0.5): -2.0,  # then 35
        ("b", 0.9): -1.5,  # then 32
        ("b", 0.5): -1.0,  # then 20
    }
    shares_of = partial(peers.choose_shares, sensitivity, sizes)
    assert shares_of(keep=0.95) == {"a": 0.5}
    assert shares_of(keep=0.85) == {"a": 0.5, "b": 0.9}
    assert shares_of(keep=0.5) == {"a": 0.5, "b": 0.5}


def test_asvds_search_stops_as_soon_as_the_share_is_reached():
    sensitivity = {("a", 0.5): 1.0, ("b", 0.5): 2.0}
    # a .5 leaves exactly 30 of 40
    assert peers.choose_shares(sensitivity, {"a": 20, "b": 20}, keep=0.75) == {"a": 0.5}


def test_a_layer_keeps_the_least_share_that_the_search_has_cut_it_to():
    sensitivity = {("a", 0.2): 1.0, ("a", 0.6): 2.0, ("b", 0.5): 3.0}
    shares = peers.choose_shares(sensitivity, {"a": 10, "b": 10}, keep=0.5)
    assert shares == {"a": 0.2, "b": 0.5}


class TwoLayers(nn.Module):
    """Two layers of 20 -> 20, whose weights are diagonal."""

    def __init__(self, *diagonals):
        super().__init__()
        self.encoder = nn.Sequential(*[nn.Linear(20, 20) for _ in diagonals])
        for layer, diagonal in zip(self.encoder, diagonals, strict=True):
            layer.weight.data = torch.diag(diagonal)

    def forward(self, x):
        return self.encoder(x)


@pytest.mark.parametrize("keep", [0.9, 0.75, 0.6, 0.45])
def test_the_ranks_of_asvds_search_are_those_of_the_authors_sensitivities(keep):
    """Their code sorts -sqrt(stable rank) * share^0.1 and takes the first cut-off that is enough.

    A layer of 400 weights has 40 per rank, so the share s is rank 10 s.
    """
    # the largest singular value is 1, so the stable ranks are 4 and 3
    first = torch.full((20,), (3 / 19) ** 0.5).index_fill(0, torch.tensor(0), 1.0)
    second = torch.full((20,), (2 / 19) ** 0.5).index_fill(0, torch.tensor(0), 1.0)
    sensitivities = {}
    for layer, stable_rank in enumerate((4, 3)):
        for tenths in range(1, 10):
            sensitivities[layer, tenths] = -(stable_rank**0.5) * (tenths / 10) ** 0.1

    def find_tenths(layer, cut_off):
        """The least share of the layer among the pairs up to the cut-off; ten tenths if none."""
        tenths = [10]
        for pair, sensitivity in sensitivities.items():
            if pair[0] == layer and sensitivity <= cut_off:
                tenths.append(pair[1])
        return min(tenths)

    for cut_off in sorted(sensitivities.values()):
        expected = [find_tenths(layer, cut_off) for layer in (0, 1)]
        if sum(expected) <= 20 * keep:
            break

    model = TwoLayers(first, second)
    apply("ASVD, its search", model, keep, [{"x": torch.randn(1, 30, 20)}])
    ranks = []
    for layer in model.encoder:
        ranks.append(10 if isinstance(layer, nn.Linear) else layer.v.shape[0])
    assert ranks == expected


def test_asvd_with_its_search_is_the_best_of_its_ranks_in_its_norm():
    torch.manual_seed(0)
    model = Encoder()
    right = scale_by_mean_inputs(read_tokens())
    weight = read_weight(model.encoder[0])
    counts = apply("ASVD, its search", model, 0.5)
    assert counts["params"] <= 0.5 * SIZE

    pair = model.encoder[0]
    rank = pair.v.shape[0]
    error = ((weight - read_product(pair)) @ right).norm()
    expected = find_tail(torch.linalg.svdvals(weight @ right), rank)
    torch.testing.assert_close(error, expected, rtol=1e-3, atol=0)


def test_the_stable_rank_of_a_matrix_is_its_squared_norms_ratio():
    weight = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    assert peers.measure_stable_rank(weight) == pytest.approx((9 + 4 + 1) / 9)
    for shape in ((4, 9), (9, 4)):
        weight = torch.randn(shape)
        values = torch.linalg.svdvals(weight)
        expected = float(values.square().sum() / values[0] ** 2)
        assert peers.measure_stable_rank(weight) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["ASVD", "ASVD, its search"])
def test_asvd_knows_no_unit_of_the_inputs(name):
    products = []
    for unit in (1.0, 1e-8):
        torch.manual_seed(0)
        model = Encoder()
        batches = make_batches()
        for batch in batches:
            batch["x"] *= unit
        apply(name, model, 0.5, batches)
        products.append(read_product(model.encoder[0]))
    torch.testing.assert_close(*products, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["SVD", "ASVD, its search"])
def test_a_layer_keeps_rank_one_at_least(name):
    model = Encoder()
    apply(name, model, 0.01)
    assert model.encoder[0].v.shape == (1, 12)


# ---- fewer numbers, fewer bits -------------------------------------------------------------------


def test_pruning_keeps_the_largest_entries_of_all_layers_together():
    model = Encoder()
    first, _, second = model.encoder
    with torch.no_grad():
        second.weight.mul_(10)
    before = [first.weight.detach().clone(), second.weight.detach().clone()]
    apply("pruning", model, 0.25)

    sizes = torch.cat([weight.abs().flatten() for weight in before])
    least_kept = sizes.sort(descending=True).values[SIZE // 4 - 1]
    for layer, weight in zip((first, second), before, strict=True):
        expected = torch.where(weight.abs() >= least_kept, weight, 0.0)
        assert torch.equal(layer.weight, expected)


def test_wanda_keeps_in_each_row_the_entries_that_their_inputs_make_large():
    model = Encoder()
    x = read_tokens()
    layer = model.encoder[0]
    before = layer.weight.detach().clone()
    apply("Wanda", model, 0.25)

    scores = before.abs() * x.norm(dim=0)  # |w| times the norm of its input feature
    for row, row_before, row_scores in zip(layer.weight, before, scores, strict=True):
        best = row_scores.argsort(descending=True)[:3].sort().values
        assert torch.equal(row.nonzero().flatten(), best)
        assert torch.equal(row[best], row_before[best])


@ignore_torchao_warnings
def test_int8_takes_a_quarter_of_the_bytes():
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model = Encoder()
    batch = make_batches()[0]
    expected = model(**batch)
    counts = apply("int8", model, 1.0, [])
    assert counts["params"] == SIZE
    assert counts["bytes"] == SIZE + 4 * (20 + 12)  # a scale for each output
    torch.testing.assert_close(model(**batch), expected, atol=0.05, rtol=0.1)
