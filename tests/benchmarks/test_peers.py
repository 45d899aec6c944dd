"""benchmarks.speed.peers: a peer is judged by the right matrix, left out where it is missing, not
timed where it is wrong."""

import json
import sys

import pytest
import torch
from einops import rearrange

pytest.importorskip("matplotlib")

from benchmarks.harness import timing
from benchmarks.harness.race import Heat
from benchmarks.harness.statistics import select
from benchmarks.speed import peers
from benchmarks.speed.variants import TOLERANCE, Job
from structlin import TT, Family, Kronecker, Monarch, Structure

PACKAGES = {
    "pyfastkron": "pyfastkron.fastkrontorch",
    "tensorly-torch": "tltorch",
    "torchTT": "torchtt.nn",
    "torch-structured": "torch_structured.monarch.monarch_linear",
}
WRITTEN_HERE = {
    "nn.Linear",
    "structlin",
    "strided products",
    "batched products and sums",
    "two linear maps",
}


@pytest.fixture
def no_packages(monkeypatch):
    for module in PACKAGES.values():
        monkeypatch.setitem(sys.modules, module, None)


# ---- what a peer has to compute ------------------------------------------------------------------


def cores_of(family: Family, width: int = 16) -> tuple[Structure, list[torch.Tensor]]:
    structure = family.structure(width, width)
    return structure, [torch.randn(core.shape, dtype=torch.float64) for core in structure.cores]


def stored(structure: Structure, cores: list[torch.Tensor], n: int, axes: str) -> torch.Tensor:
    """The n-th core with its axes in the order of `axes`."""
    core = structure.cores[n]
    own = [*core.batch_axes, *core.fan_out_axes, *core.fan_in_axes]
    shaped = cores[n].reshape([structure.sizes[axis] for axis in own])
    return rearrange(shaped, f"{' '.join(own)} -> {axes}")


def test_fastkron_is_judged_by_the_matrix_of_kronecker():
    structure, cores = cores_of(Kronecker(), width=64)
    x = torch.randn(3, 64, dtype=torch.float64)
    factors = [stored(structure, cores, 1, "g a"), stored(structure, cores, 0, "d b")]
    torch.testing.assert_close(
        peers.kronecker(structure, factors, x), timing.oracle(structure, cores, x)
    )


def test_tensor_trains_are_judged_by_the_matrix_of_tt():
    structure, cores = cores_of(TT(rank=3))
    x = torch.randn(3, 16, dtype=torch.float64)
    (r,) = (axis for axis in structure.sizes if axis.startswith("r"))
    first, last = (
        stored(structure, cores, 1, f"i1 j1 {r}")[None],
        stored(structure, cores, 0, f"{r} i2 j2")[..., None],
    )
    torch.testing.assert_close(
        peers.tensor_train(structure, [first, last], x), timing.oracle(structure, cores, x)
    )


@pytest.mark.parametrize("blocks", [2, 8])
def test_monarchs_are_judged_by_the_matrix_of_monarch(blocks):
    structure, cores = cores_of(Monarch(blocks=blocks))
    x = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(
        peers.monarch(structure, cores, x), timing.oracle(structure, cores, x)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_peer_has_the_matrix_and_the_parameters_of_its_family(dtype):
    found, left_out = peers.variants(Job(64, 64, 40, dtype, True))
    assert len(found) + len(left_out) == 1 + sum(
        1 + len(builds) for _, builds in peers.structures(64).values()
    )
    for variant in found:
        params = sum(parameter.numel() for parameter in variant.parameters)
        assert params == variant.structure.params
        assert variant.error() < TOLERANCE[dtype]


# ---- the run -------------------------------------------------------------------------------------


def test_a_run_measures_every_layer_and_keeps_the_rows(tmp_path, capsys):
    rows = peers.BENCH.main(["--smoke", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "peers.json").read_text())
    _, left_out = peers.variants(Job(64, 64, 1, "float32", False))
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert kept["rows"] == rows == lines
    assert kept["left_out"] == list(dict.fromkeys(left_out))
    assert printed.count("# left out: ") == len(kept["left_out"])
    for name, (_, builds) in peers.structures(64).items():
        assert name in printed
        missing = sum(line.startswith(f"{name}: ") for line in left_out)
        for backward in (True, False):
            found = select(rows, structure=name, backward=backward)
            assert len(found) == 1 + len(builds) - missing
            assert ["structlin_x" in row for row in found] == [n > 0 for n in range(len(found))]


def test_missing_packages_are_left_out_with_a_line_each(no_packages, capsys):
    rows = peers.BENCH.main(["--smoke"])
    assert {row["implementation"] for row in rows} == WRITTEN_HERE
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if line.startswith("# left out: ")]
    left_out = ["Kronecker", "TT r=8", "TT r=8", "Monarch 4", "Monarch 16"]
    assert [line.split(": ")[1] for line in lines] == left_out
    assert all(any(module in line for module in PACKAGES.values()) for line in lines)


def test_speeds_are_ratios_within_a_round(monkeypatch):
    btt = peers.BTT().structure(64, 64)
    monkeypatch.setattr(peers, "structures", lambda width: {"BTT": (btt, (peers.strided,))})
    # dense, structlin, strided, dense again
    rounds = [[4.0, 8.0], [1.0, 4.0], [0.5, 3.0], [6.0, 8.0]]
    monkeypatch.setattr(
        timing, "interleaved", lambda works, *_, **__: dict(zip(works, rounds, strict=True))
    )
    job = Job(64, 64, 300, "float32", False)
    first, structlin, strided, _ = peers.measure(job, Heat())
    assert first["x_dense"]["median"] == pytest.approx((5 / 4 + 8 / 8) / 2)
    assert structlin["x_dense"]["median"] == pytest.approx((5 / 1 + 8 / 4) / 2)
    assert strided["structlin_x"]["median"] == pytest.approx((0.5 / 1 + 3 / 4) / 2)
    assert strided["ms"]["median"] == pytest.approx(1750)
    assert "structlin_x" not in structlin


def test_everything_that_is_slower_than_a_peer_is_counted():
    def row(structure, implementation, speed, low=0.0, **more):
        where = {"structure": structure, "implementation": implementation, "dtype": "float32"}
        where |= {"tokens": 4096, "backward": True} | more
        return where | {"structlin_x": {"median": speed, "p20": low}}

    rows = [
        row("Kronecker", "pyfastkron 1.1.0", 1.04, 0.9),  # level
        row("Kronecker", "pyfastkron 1.1.0", 2.0, 1.5, tokens=16),
        row("BTT r=1", "strided products", 4.0),
        row("Monarch 4", "strided products", 0.875),
        row("Monarch 4", "strided products", 0.75, tokens=16),
        row("low-rank d/4", "two linear maps", 0.625, tokens=16),
        row("low-rank d/4", "two linear maps", 1.5, tokens=16, backward=False),
        row("low-rank d/4", "two linear maps", 0.9),
        row("TT r=8", "tensorly reconstructed", 0.5, dtype="bfloat16", backward=False),
    ]
    found = peers.numbers({"rows": rows, "environment": {"date": "2026-11-03"}})
    assert (found["peers.cases"], found["peers.behind"]) == ("9", "5")
    assert (found["peers.fastkron"], found["peers.fastkron_ahead"]) == ("2", "1")
    assert found["peers.low_few_least"] == found["peers.low_few_most"] == "0.62"
    assert (found["peers.low_many_most"], found["peers.monarch"]) == ("0.900", "0.88")
    assert found["peers.few_least"] == "0.75"
