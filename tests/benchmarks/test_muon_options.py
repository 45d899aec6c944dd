"""benchmarks.training.muon_options: each option by hand, and what counts as a win."""

import torch
from torch import nn

from benchmarks.training import muon_options
from benchmarks.training.muon_options import Changed


def matrices(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


def test_normuon_gives_rows_one_rms_at_first_and_keeps_the_norm_of_the_step():
    weight, step = matrices(2, 4, 8), matrices(2, 4, 8).cos()
    moved = muon_options.row_scale(weight, step, step, 0.1, {}) - weight
    rms = moved.square().mean(-1)
    torch.testing.assert_close(rms, rms[:, :1].expand_as(rms))
    torch.testing.assert_close(moved.square().sum((1, 2)), step.square().sum((1, 2)))


def test_cautious_decay_is_of_the_entries_that_the_step_shrinks():
    weight, step = torch.tensor([[1.0, -2.0]]), torch.tensor([[-0.5, -0.5]])
    moved = muon_options.cautious_decay(weight, step, step, 0.5, {})
    decay = 0.5 * muon_options.DECAY
    torch.testing.assert_close(moved, torch.tensor([[0.5 - decay, -2.5]]))


def test_a_cautious_step_leaves_out_what_climbs():
    weight, gradient = torch.zeros(1, 4), torch.ones(1, 4)
    step = torch.tensor([[-1.0, -1.0, 1.0, 1.0]])
    moved = muon_options.cautious_step(weight, step, gradient, 0.1, {})
    torch.testing.assert_close(moved, torch.tensor([[-2.0, -2.0, 0.0, 0.0]]))


def test_on_the_sphere_a_matrix_keeps_its_norm_and_one_of_zero_is_free():
    weight, step = matrices(2, 3, 5), matrices(2, 3, 5).cos()
    weight[1] = 0
    moved = muon_options.sphere(weight, step, step, 0.1, {})
    torch.testing.assert_close(moved[0].norm(), weight[0].norm())
    torch.testing.assert_close(moved[1], step[1])


def test_regularize_shrinks_what_is_above_norm_1_alone():
    weight = torch.stack([3 * torch.eye(4), 0.5 * torch.eye(4)])
    moved = muon_options.regularize(weight, torch.zeros_like(weight), weight, 0.5, {})
    assert moved[0, 0, 0] < 3
    torch.testing.assert_close(moved[1], weight[1])


def test_soap_at_first_is_the_polar_factor():
    gradient = matrices(5, 5)
    u, _, vh = torch.linalg.svd(gradient)
    found = muon_options.soap(gradient, {})
    torch.testing.assert_close(
        (u.mT @ found @ vh.mT).abs(), torch.eye(5).double(), atol=0.01, rtol=0
    )


def test_tail_averaging_ends_at_the_mean_of_the_last_steps():
    def descend(tail):
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        optimizer, weights = Changed(model, 0.1, steps=5, tail=tail), []
        for _ in range(5):
            model.weight.grad = torch.randn(8, 8)
            optimizer.step()
            weights.append(model.weight.detach().clone())
        return weights

    plain, averaged = descend(0.0), descend(0.4)
    assert all(map(torch.equal, plain[:4], averaged[:4]))
    torch.testing.assert_close(averaged[4], (plain[3] + plain[4]) / 2)


def test_a_win_is_less_loss_than_plain_and_who_loses_clearly_goes():
    def rows(option, losses):
        return [
            {"structure": each, "option": option, "lr": 0.1, "seed": seed, "loss": loss}
            for each in muon_options.STRUCTURES
            for seed, loss in enumerate(losses)
        ]

    others = (option for option in muon_options.OPTIONS if option != "sphere")
    made = [row for option in others for row in rows(option, [2.0, 2.0])]
    for losses, wins in (([1.9, 1.99], 2), ([1.9, 2.01], 1)):
        table = muon_options.summarise([*made, *rows("sphere", losses)])
        assert {row["option"]: row["wins"] for row in table if row["wins"]} == {"sphere": wins}
    assert "sphere" in muon_options.survivors([*made, *rows("sphere", [2.02, 2.0])])
    assert "sphere" not in muon_options.survivors([*made, *rows("sphere", [2.1, 2.0])])
