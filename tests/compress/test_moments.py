"""Means and covariances of pairs of rows, against torch.cov in float64."""

import pytest
import torch

from structlin._compress import moments
from structlin._compress.moments import Moments


@pytest.mark.parametrize("rows", [3, 100])
def test_they_are_those_of_all_rows_however_they_come(rows, monkeypatch):
    monkeypatch.setattr(moments, "ROWS", rows)
    x, z = torch.randn(2, 50, 4, dtype=torch.float64) + 3
    found = Moments(centred=True)
    for part in (slice(0, 7), slice(7, 7), slice(7, 50)):
        found.add(x[part], z[part])
    joint = torch.cov(torch.cat([x, z], dim=1).mT, correction=0)
    assert found.count == 50
    torch.testing.assert_close(found.cross(torch.eye(4)), joint[:4, 4:])
    torch.testing.assert_close(found.zz, joint[4:, 4:])
    torch.testing.assert_close(found.mean_output(torch.eye(4)), x.mean(0))
    torch.testing.assert_close(found.mean_z, z.mean(0))


def test_around_zero_they_are_mean_products_and_alone_x_is_z():
    x, z = torch.randn(2, 50, 4, dtype=torch.float64) + 3
    pairs, alone = (Moments(centred=False) for _ in range(2))
    pairs.add(x, z)
    alone.add(z)
    torch.testing.assert_close(pairs.cross(torch.eye(4)), x.mT @ z / 50)
    torch.testing.assert_close(alone.cross(torch.eye(4)), z.mT @ z / 50)
    torch.testing.assert_close(alone.mean_output(torch.eye(4)), z.mean(0))


def test_a_mean_that_is_far_from_zero_costs_no_digits():
    x = torch.randn(4000, 4) + 3000
    found = Moments(centred=True)
    for part in x.split(500):
        found.add(part)
    torch.testing.assert_close(found.zz, torch.cov(x.double().mT, correction=0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("centred", [True, False])
def test_the_ridge_grows_with_the_variance_as_rows_get_few_and_is_zero_without_one(centred):
    x = torch.randn(50, 4, dtype=torch.float64) + 3
    found, constant = Moments(centred=centred), Moments(centred=centred)
    found.add(x)
    constant.add(x[:1].expand(50, 4) * centred)
    assert found.ridge == pytest.approx(moments.RIDGE * 4 / 50 * found.zz.diagonal().mean().item())
    assert constant.ridge == 0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("in_x", [True, False])
def test_a_number_that_is_not_finite_is_seen(bad, in_x):
    x, z = torch.randn(2, 9, 4)
    found = Moments(centred=True)
    found.add(x, z)
    found.require_finite("first")
    (x if in_x else z)[2, 3] = bad
    found.add(x, z)
    with pytest.raises(ValueError, match="the inputs of layer 'first' are not finite"):
        found.require_finite("first")


def test_autocast_does_not_round_the_products():
    x = torch.randn(100, 4)
    found = Moments(centred=True)
    with torch.autocast("cpu", torch.bfloat16):
        found.add(x)
    expected = torch.cov(x.double().mT, correction=0)
    torch.testing.assert_close(found.zz, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("centred", [True, False])
def test_with_a_weight_they_are_those_of_its_outputs(centred):
    x, z = torch.randn(2, 50, 4, dtype=torch.float64) + 3
    weight = torch.randn(2, 4, dtype=torch.float64)
    whole, short = (Moments(centred=centred, weight=each) for each in (None, weight))
    for found in (whole, short):
        found.add(x, z)
    torch.testing.assert_close(short.cross(weight), whole.cross(weight))
    torch.testing.assert_close(short.mean_output(weight), weight @ x.mean(0))


def test_a_wide_covariance_is_whole(monkeypatch):
    monkeypatch.setattr(moments, "WIDTH", 3)
    x = torch.randn(50, 8, dtype=torch.float64)
    found = Moments(centred=True)
    found.add(x)
    torch.testing.assert_close(found.zz, torch.cov(x.mT, correction=0))
