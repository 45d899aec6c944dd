"""structlin in torchtitan's own trainer, on gloo, against a plain loop on one process.

Skipped where torchtitan is not installed, unless STRUCTLIN_TORCHTITAN=required.
"""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist

from tests.parallel.in_torchtitan import CASES, ON, RESUMED, run_worlds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("STRUCTLIN_TORCHTITAN") != "required"
        and (importlib.util.find_spec("torchtitan") is None or not dist.is_gloo_available()),
        reason="needs torchtitan and gloo",
    ),
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return run_worlds(tmp_path_factory.mktemp("torchtitan"))


@pytest.mark.parametrize("case", CASES)
def test_torchtitans_trainer_on_one_process_is_a_plain_loop_to_the_bit(worlds, case):
    run = worlds[1][0]["cases"][case]
    assert run["losses"] == run["plain"]["losses"]
    assert run["losses"][-1] < run["losses"][0] - 0.5
    assert run["final"].keys() == run["plain"]["final"].keys()
    assert all(
        torch.equal(run["final"][name], run["plain"]["final"][name]) for name in run["final"]
    )


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world in (2, 4) for case in ON[world]]
)
def test_tensor_parallelism_and_fsdp2_with_it_train_as_a_plain_loop_does(worlds, world, case):
    """Adam divides by the size of a gradient, so rounding of a small one shows in the weights;
    SOAP's basis of a factor without full rank is rounding, and shows in the losses."""
    plain = worlds[1][0]["cases"][case]["plain"]
    tolerance = 1e-2 if "SOAP" in case else 1e-5
    of_weights = 1e-4 if CASES[case][1] in (None, "AdamW") else tolerance
    for process in worlds[world]:
        run = process["cases"][case]
        assert run["losses"] == pytest.approx(plain["losses"], rel=0, abs=tolerance)
        assert run["final"].keys() == plain["final"].keys()
        for name, value in run["final"].items():
            torch.testing.assert_close(value, plain["final"][name], rtol=0, atol=of_weights)


def test_each_process_of_tensor_parallelism_holds_about_its_part_of_the_numbers(worlds):
    whole = worlds[1][0]["cases"]["BTT MLPs"]["numbers"]
    for world in (2, 4):
        for process in worlds[world]:
            held = process["cases"]["BTT MLPs"]["numbers"]
            assert whole <= held * world < 1.05 * whole  # norms are whole


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world in RESUMED for case in RESUMED[world]]
)
def test_a_run_that_resumes_from_torchtitans_checkpoint_ends_as_the_uninterrupted(
    worlds, world, case
):
    for process in worlds[world]:
        run, resumed = process["cases"][case], process["resumed"][case]
        assert resumed["losses"] == run["losses"][5:]
        assert all(torch.equal(resumed["final"][name], run["final"][name]) for name in run["final"])


def test_a_checkpoint_of_two_processes_of_tensor_parallelism_goes_on_on_one(worlds):
    expected = worlds[1][0]["cases"]["BTT MLPs"]["losses"][5:]
    assert worlds[1][0]["moved"]["losses"] == pytest.approx(expected, rel=0, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Float8", "a Float8Linear.Config (64 -> 256) multiplies in its own way"),
        ("an option", "BTT has no option 'ranks'"),
        ("an optimizer", "name='Lion' is unknown; there are AdamW, Muon, SOAP"),
    ],
)
def test_a_config_that_structlin_cannot_serve_is_refused_by_name(worlds, name, says):
    assert says in worlds[1][0]["refused"][name]


def test_torchtitans_default_backend_is_refused_by_every_process(worlds):
    for process in worlds[2]:
        assert "--parallelism.spmd_backend partial_dtensor" in process["backend"]


def test_the_experts_of_torchtitans_qwen3_are_matrices_to_our_optimizers(worlds):
    kinds = worlds[1][0]["experts"]
    experts = [kind for name, kind in kinds.items() if "inner_experts" in name]
    assert experts == ["matrix"] * 3
