"""benchmarks/compression/peers.py: each peer does what its paper says, on small layers."""

import pytest
import torch
from torch import nn

from benchmarks.compression import peers

# torchao warns about itself and about what it could load on another machine
OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*"
)
PEERS = [name for name in peers.PEERS if name != "int8"]


class Encoder(nn.Module):
    """Two layers that are to be compressed, and one that is not."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))
        self.head = nn.Linear(12, 12)

    def forward(self, x, attention_mask):
        return self.head(self.encoder(x))


def batches():
    torch.manual_seed(0)
    mixing = torch.randn(12, 12)
    mask = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
    x = [torch.randn(2, 8, 12) @ mixing for _ in range(8)]
    for rows in x:
        rows[0, 5:] = 100.0  # padding
    return [{"x": rows, "attention_mask": mask} for rows in x]


def real_tokens():
    """What of the batches is no padding: `(tokens, 12)`."""
    return torch.cat([batch["x"][batch["attention_mask"].bool()] for batch in batches()]).double()


def outputs_of(model, x):
    return model.head(model.encoder(x))


def loss(model, batch):
    """A sum of squares over the tokens that count: its gradients are known."""
    y = model(**batch)[batch["attention_mask"].bool()]
    return y.square().sum() / 2


def apply(name, model, keep, data=None):
    layers = peers.layers_of(model, "encoder.")
    seen = peers.Seen(model, layers, batches() if data is None else data, loss)
    return peers.PEERS[name](model, layers, keep, seen)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_keeps_that_share_of_the_encoders_parameters_and_nothing_else_changes(name):
    model = Encoder()
    head = model.head.weight.clone()
    counts = apply(name, model, 0.5)
    assert 0.4 * 480 <= counts["params"] <= 0.5 * 480
    assert torch.equal(model.head.weight, head)
    assert all(parameter.grad is None for parameter in model.parameters())


NORMS = {  # what multiplies W from the right in the norm in which the peer is the best of its rank
    "SVD": lambda x: torch.eye(12, dtype=torch.float64),
    "ASVD": lambda x: x.abs().mean(0).sqrt().diag(),  # columns scaled by the root of their inputs
    "SVD-LLM": lambda x: x.T,  # of the outputs, without padding
}


@pytest.mark.parametrize("name", NORMS)
def test_a_pair_is_the_best_of_its_rank_in_the_norm_of_its_peer(name):
    torch.manual_seed(0)
    model, right = Encoder(), NORMS[name](real_tokens())
    weight = model.encoder[0].weight.detach().double()
    apply(name, model, 0.5)
    pair, x = model.encoder[0], torch.randn(4, 12)
    found = ((weight - pair.u.double() @ pair.v.double()) @ right).norm()
    values = torch.linalg.svdvals(weight @ right)  # Eckart and Young
    torch.testing.assert_close(found, values[pair.v.shape[0] :].norm(), rtol=1e-3, atol=0)
    torch.testing.assert_close(pair(x), x @ (pair.u @ pair.v).T + pair.bias)


def test_kfac_svd_is_the_best_of_its_rank_in_the_metric_of_inputs_and_gradients(monkeypatch):
    monkeypatch.setattr(peers, "DAMPING", 1e-9)
    torch.manual_seed(0)
    model, x = Encoder().double(), real_tokens()
    layer = model.encoder[2]
    h = model.encoder[:2](x).detach()  # the layer's inputs
    g = (outputs_of(model, x) @ model.head.weight).detach()  # the gradients for its outputs
    weight = layer.weight.detach().clone()
    data = [{**batch, "x": batch["x"].double()} for batch in batches()]
    apply("K-FAC SVD", model, 0.5, data)
    pair = model.encoder[2]
    rank = pair.v.shape[0]
    lost = weight - pair.u @ pair.v
    # ||G^1/2 (W - B) C^1/2||^2 is the trace of what K-FAC takes the loss's curvature for
    squared = torch.trace(g.T @ g @ lost @ h.T @ h @ lost.T)
    left, right = (torch.linalg.qr(rows).R for rows in (g, h))  # R^T R of their gram matrices
    values = torch.linalg.svdvals(left @ weight @ right.T)
    torch.testing.assert_close(squared, values[rank:].square().sum(), rtol=1e-2, atol=0)


def test_gradients_without_a_loss_are_refused():
    model = Encoder()
    layers = peers.layers_of(model, "encoder.")
    with pytest.raises(ValueError, match="loss=None: the gradients"):
        peers.kfac_svd(model, layers, 0.5, peers.Seen(model, layers, batches()))


def test_pruning_keeps_the_largest_entries_of_all_layers_together():
    model = Encoder()
    with torch.no_grad():
        model.encoder[2].weight.mul_(10)
    weights = [layer.weight.detach().clone() for layer in (model.encoder[0], model.encoder[2])]
    apply("pruning", model, 0.25)
    kept = sorted(torch.cat([w.abs().flatten() for w in weights]).tolist())[-120:]
    for layer, weight in zip((model.encoder[0], model.encoder[2]), weights, strict=True):
        expected = torch.where(weight.abs() >= kept[0], weight, 0.0)
        assert torch.equal(layer.weight, expected)


def test_wanda_keeps_in_each_row_the_entries_that_their_inputs_make_large():
    model, x = Encoder(), real_tokens()
    weight = model.encoder[0].weight.detach().clone()
    apply("Wanda", model, 0.25)
    scores = weight.abs() * x.norm(dim=0)
    for row, before, score in zip(model.encoder[0].weight, weight, scores, strict=True):
        best = score.argsort(descending=True)[:3]
        assert torch.equal(row.nonzero().flatten(), best.sort().values)
        assert torch.equal(row[best], before[best])


@OWN_WARNINGS
def test_int8_takes_a_quarter_of_the_bytes():
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model, data = Encoder(), batches()[0]
    expected = model(**data)
    counts = apply("int8", model, 1.0, [])
    assert counts["params"] == 480
    assert counts["bytes"] == 480 + 4 * (20 + 12)  # a scale for each output
    torch.testing.assert_close(model(**data), expected, atol=0.05, rtol=0.1)


def test_layers_get_the_ranks_that_are_given_and_the_others_stay_dense():
    model = Encoder()
    weight = model.encoder[0].weight.clone()
    counts = peers.truncate(model, peers.layers_of(model, "encoder."), 1.0, ranks={"encoder.2": 3})
    assert torch.equal(model.encoder[0].weight, weight)
    assert model.encoder[2].v.shape == (3, 20)
    assert counts["params"] == 240 + 3 * 32


def test_a_layer_that_only_zeros_reach_is_cut_as_by_its_weight_alone():
    torch.testing.assert_close(peers.take_root(torch.zeros(3, 3)), torch.eye(3).double())
    model = Encoder()
    weight = model.encoder[0].weight.detach().clone()
    data = [{"x": torch.zeros(1, 4, 12), "attention_mask": torch.ones(1, 4, dtype=torch.int)}]
    apply("SVD-LLM", model, 0.5, data)
    pair = model.encoder[0]
    lost = torch.linalg.svdvals(weight)[pair.v.shape[0] :].norm()
    torch.testing.assert_close((weight - pair.u @ pair.v).norm(), lost)


def test_inputs_that_are_not_finite_have_no_root():
    with pytest.raises(ValueError, match="the gram matrix is not finite"):
        peers.take_root(torch.full((2, 2), torch.nan))


def test_asvds_search_cuts_the_least_sensitive_layer_and_share_first():
    weight = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    assert peers.measure_stable_rank(weight) == pytest.approx(14 / 9)
    pairs = {("a", 0.5): -2.0, ("a", 0.9): -3.0, ("b", 0.5): -1.0, ("b", 0.9): -1.5}
    assert peers.choose_shares(pairs, {"a": 10, "b": 30}, 0.95) == {"a": 0.5}
    assert peers.choose_shares(pairs, {"a": 10, "b": 30}, 0.85) == {"a": 0.5, "b": 0.9}
    assert peers.choose_shares(pairs, {"a": 10, "b": 30}, 0.5) == {"a": 0.5, "b": 0.5}


def test_asvd_with_its_search_is_the_best_of_its_ranks_in_its_norm():
    torch.manual_seed(0)
    model, x = Encoder(), real_tokens()
    right = x.abs().mean(0).sqrt().diag()
    weight = model.encoder[0].weight.detach().double()
    layers = peers.layers_of(model, "encoder.")
    seen = peers.Seen(model, layers, batches(), loss)
    counts = peers.asvd_searched(model, layers, 0.5, seen)
    pair = model.encoder[0]
    assert counts["params"] <= 0.5 * 480
    lost = ((weight - pair.u.double() @ pair.v.double()) @ right).norm()
    values = torch.linalg.svdvals(weight @ right)
    torch.testing.assert_close(lost, values[pair.v.shape[0] :].norm(), rtol=1e-3, atol=0)
