"""benchmarks/compression/experts.py: what peers see and do, on a tiny mixture."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("matplotlib")

from benchmarks.compression import experts


@pytest.fixture
def mixture():
    return experts.build(width=16, layers=1, experts=4).eval()


@pytest.fixture
def ids():
    return torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))


def test_grams_of_all_experts_add_up_to_those_of_all_tokens_that_are_sent(mixture, ids):
    seen = []
    mlp = mixture.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1).double()))
    routed = experts.Routed(mixture, [ids])
    name = "model.layers.0.mlp.experts"
    # each token goes to two experts
    assert sum(routed.tokens[name]) == 2 * ids.numel()
    total = torch.stack(routed.grams[name]["up"]).sum(0)
    torch.testing.assert_close(total, 2 * seen[0].mT @ seen[0])


def test_an_expert_that_no_token_reaches_is_pruned_without_a_change(ids):
    mixture = experts.build(width=16, layers=1, experts=5).eval()
    direction = torch.randn(16, generator=torch.Generator().manual_seed(0))
    # two experts are above the third one's 0 for each token, whatever its sign
    scales = torch.tensor([1.0, 1.5, 0.0, -1.0, -1.5])
    with torch.no_grad():
        mixture.model.layers[0].mlp.gate.weight.copy_(torch.outer(scales, direction))
        before = mixture(input_ids=ids).logits
    tokens = experts.Routed(mixture, [ids]).tokens["model.layers.0.mlp.experts"]
    assert tokens[2] == 0
    left = experts.prune_experts(mixture, 0.8, lambda *_: [float(n) for n in tokens])
    assert left == 4 * 3 * 16 * 16
    with torch.no_grad():
        torch.testing.assert_close(mixture(input_ids=ids).logits, before)


def test_whitening_keeps_what_the_inputs_span(mixture):
    weight = mixture.model.layers[0].mlp.experts.down_proj
    before = weight.detach().clone()
    basis = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q[:, :4]
    root = experts.take_root(basis @ basis.mT)
    experts.truncate_experts(mixture, 0.5, lambda *_: root)
    inputs = basis.float()
    torch.testing.assert_close(weight.data @ inputs, before @ inputs, atol=1e-4, rtol=1e-3)
    assert int(torch.linalg.matrix_rank(weight.data[0], rtol=1e-4)) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:compress")  # so few tokens
def test_smoke_runs_every_method(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = experts.EXPERIMENT.main(["--smoke", "--out", str(tmp_path)])
    methods = {row["method"] for row in result["rows"]}
    assert methods == {"dense", *experts.PEERS, *experts.OURS}
    assert all(row["share"] <= 0.5 for row in result["rows"] if row["keep"] < 1)
