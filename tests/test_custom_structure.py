"""A structure that a user declares, BLAST (arXiv:2410.21262), works everywhere with nothing to
register."""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from structlin import Family, Structure, StructuredLinear, convert, param_groups, summary
from tests.models import GPT, perplexed


@dataclass(frozen=True, kw_only=True)
class BLAST(Family):
    """Blocks that share their factors: block (i, j) of `W` is `U_i diag(s_ij) V_j`."""

    blocks: int
    rank: int

    def structure(self, in_features: int, out_features: int) -> Structure:
        sizes = {"i": self.blocks, "j": self.blocks, "r": self.rank}
        q, p = in_features // self.blocks, out_features // self.blocks
        return Structure("j q -> i p", "j r q", "r i j", "i p r", q=q, p=p, **sizes)


def test_blast_is_the_matrix_of_its_paper():
    layer = StructuredLinear(12, 20, BLAST(blocks=4, rank=3), dtype=torch.float64)
    v, s, u = layer.cores  # (j, r, q), (r, i, j), (i, p, r)
    blocks = [[u[i] @ torch.diag(s[:, i, j]) @ v[j] for j in range(4)] for i in range(4)]
    torch.testing.assert_close(
        layer.to_dense(), torch.cat([torch.cat(row, dim=1) for row in blocks])
    )


def test_blast_is_converted_to_trained_and_counted():
    torch.manual_seed(0)
    model = convert(GPT(width=64), BLAST(blocks=4, rank=8), include="ffn")
    groups = param_groups(model, 3e-3)
    multipliers = {name: group["lr_mult"] for group in groups for name in group["param_names"]}
    assert [multipliers[f"h.0.mlp.c_fc.cores.{n}"] for n in range(3)] == [
        64 / 16 / 3,
        64 / 4 / 3,
        64 / 8 / 3,
    ]
    losses = perplexed(model, 20, torch.optim.AdamW(groups))
    assert losses[-1] < 0.7 * losses[0]
    row = next(row for row in summary(model).rows if row.name == "h.*.mlp.c_fc")
    with FlopCounterMode(display=False) as counter:
        model.h[0].mlp.c_fc(torch.randn(1, 64))
    assert row.structure == "BLAST(blocks=4, rank=8)"
    assert row.flops == 2 * counter.get_total_flops() == 2 * 2 * (4 * 8 * 16 + 8 * 16 + 4 * 64 * 8)


def test_the_weight_of_a_layer_can_be_copied_from():
    layer, target = StructuredLinear(8, 8), torch.zeros(8, 8)
    with torch.no_grad():
        target.copy_(layer.weight)
        target[:4] = layer.weight[:4]
        target.lerp_(layer.weight, 0.5)
    torch.testing.assert_close(target, layer.to_dense())
