"""benchmarks/compression/experts.py: what peers see and do, on a tiny mixture."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("matplotlib")

from benchmarks.compression import experts

EXPERTS = "model.layers.0.mlp.experts"  # of a mixture of one layer


def build_mixture(count):
    """One layer of width 16 with `count` experts, two for each token."""
    return experts.build(width=16, layers=1, experts=count).eval()


@pytest.fixture
def mixture():
    return build_mixture(4)


@pytest.fixture
def ids():
    """`(2, 12)`, two windows."""
    return torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def find_logits(mixture, ids):
    return mixture(input_ids=ids).logits


def test_grams_of_all_experts_add_up_to_those_of_all_tokens_that_are_sent(mixture, ids):
    inputs = []

    def keep_inputs(mlp, args):
        x = args[0].flatten(0, 1)  # (tokens, width)
        inputs.append(x.double())

    mixture.model.layers[0].mlp.register_forward_pre_hook(keep_inputs)
    routed = experts.Routed(mixture, [ids])

    # each token goes to two experts, so X^T X is counted twice
    (x,) = inputs
    assert sum(routed.tokens[EXPERTS]) == 2 * ids.numel()
    total = torch.stack(routed.grams[EXPERTS]["up"]).sum(0)
    torch.testing.assert_close(total, 2 * x.T @ x)


def test_an_expert_that_no_token_reaches_is_pruned_without_a_change(ids):
    mixture = build_mixture(5)
    # the router scores an expert by its scale times d^T x: whatever the sign of d^T x, two experts
    # are above the third one's 0
    direction = torch.randn(16, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([1.0, 1.5, 0.0, -1.0, -1.5])
    router = mixture.model.layers[0].mlp.gate
    with torch.no_grad():
        router.weight.copy_(torch.outer(scales, direction))
    before = find_logits(mixture, ids)

    counts = experts.Routed(mixture, [ids]).tokens[EXPERTS]
    assert counts[2] == 0
    uses = [float(count) for count in counts]
    params = experts.prune_experts(mixture, 0.8, lambda name, module: uses)
    assert params == 4 * 3 * 16 * 16  # four experts of three matrices
    torch.testing.assert_close(find_logits(mixture, ids), before)


def test_whitening_keeps_what_the_inputs_span(mixture):
    weight = mixture.model.layers[0].mlp.experts.down_proj
    before = weight.detach().clone()
    # the gram matrix of inputs that span 4 of 16 dimensions: Q Q^T with orthonormal Q (16, 4)
    basis = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q[:, :4]
    root = experts.take_root(basis @ basis.T)
    experts.truncate_experts(mixture, 0.5, lambda name, part, expert: root)

    inputs = basis.float()
    torch.testing.assert_close(weight.data @ inputs, before @ inputs, atol=1e-4, rtol=1e-3)
    rank = torch.linalg.matrix_rank(weight.data[0], rtol=1e-4)
    assert rank == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:compress")  # so few tokens
def test_smoke_runs_every_method(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = experts.EXPERIMENT.main(["--smoke", "--out", str(tmp_path)])
    methods = {row["method"] for row in result["rows"]}
    assert methods == {"dense", *experts.PEERS, *experts.OURS}
    for row in result["rows"]:
        if row["keep"] < 1:
            assert row["share"] <= 0.5
