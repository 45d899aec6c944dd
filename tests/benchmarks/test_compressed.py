"""benchmarks/speed/compressed.py: the sizes that are timed, what a call computes, what is shown."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import structlin
from benchmarks.compression import smollm2
from benchmarks.harness import timing
from benchmarks.harness.race import Heat
from benchmarks.speed import compressed
from tests.tables import read_table

# the shapes of SmolLM2's blocks: (in_features, out_features)
SHAPES = [(576, 576), (576, 192), (576, 1536), (1536, 576)]
FAMILIES = [structlin.LowRank(rank=1), structlin.BTT(), structlin.Monarch()]
# torchao warns about itself and about what it could load on another machine
ignore_torchao_warnings = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*"
)


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.8, 0.6])
@pytest.mark.parametrize(("in_features", "out_features"), [(8, 8), (12, 40), (40, 12)])
def test_low_rank_gets_the_largest_rank_that_its_share_of_the_parameters_pays_for(
    in_features, out_features, keep
):
    limit = keep * in_features * out_features
    size = compressed.find_largest(structlin.LowRank(rank=1), in_features, out_features, limit)
    # U (out, rank) and V (rank, in)
    assert size.rank == math.floor(limit / (in_features + out_features))


def count_params(size, in_features, out_features):
    """The numbers in the cores of a layer of that size; infinite where it does not fit."""
    try:
        cores = size.structure(in_features, out_features).cores
    except ValueError:
        return math.inf
    return sum(math.prod(core.shape) for core in cores)


@pytest.mark.parametrize("keep", [0.8, 0.6])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_no_size_of_a_family_within_the_limit_has_more_parameters(
    family, in_features, out_features, keep
):
    limit = keep * in_features * out_features
    most = 0
    for size in family.sizes(in_features, out_features):
        params = count_params(size, in_features, out_features)
        if params <= limit:
            most = max(most, params)

    largest = compressed.find_largest(family, in_features, out_features, limit)
    assert count_params(largest, in_features, out_features) == most > 0


def test_a_size_at_the_limit_itself_is_taken():
    # rank 2 of 8 -> 8 has 2 * 16 parameters
    assert compressed.find_largest(structlin.LowRank(rank=1), 8, 8, 32.0).rank == 2
    assert compressed.find_largest(structlin.LowRank(rank=1), 8, 8, 31.0).rank == 1


class Toy(nn.Module):
    """Two layers in a block, one that is too narrow for any size, and a head outside the blocks."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        block = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        block["narrow"] = nn.Linear(1, 1)
        self.model.layers = nn.ModuleList([block])
        self.head = nn.Linear(8, 16)


def test_layers_of_the_blocks_get_sizes_and_a_layer_without_one_stays_dense():
    sizes = compressed.choose_sizes(Toy(), structlin.LowRank(rank=1), 0.8)
    # .8 * 128 = 102 numbers pay for rank 4 of 24 numbers each
    assert sizes == {
        "model.layers.0.up": structlin.LowRank(rank=4),
        "model.layers.0.down": structlin.LowRank(rank=4),
    }


def test_a_structured_model_has_those_sizes_and_the_dense_one_is_left_alone():
    dense = Toy()
    names = [name for name, _ in dense.named_parameters()]
    model = compressed.structured(dense, "low-rank", 0.8)
    assert [name for name, _ in dense.named_parameters()] == names
    block = model.model.layers[0]
    assert block["up"].structure.sizes["r"] == 4
    assert block["down"].structure.sizes["r"] == 4
    assert type(block["narrow"]) is nn.Linear
    assert type(model.head) is nn.Linear


# ---- models --------------------------------------------------------------------------------------


def read_cores(model):
    """The cores of every structured layer."""
    return {name: core for name, core in model.state_dict().items() if ".cores." in name}


def count_block_weights(model):
    """The numbers in the matrices and cores of the blocks."""
    count = 0
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers.") and parameter.dim() > 1:
            count += parameter.numel()
    return count


@ignore_torchao_warnings
def test_each_model_is_what_its_name_says():
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    models = compressed.models("tiny")
    # the reference comes first
    assert list(models) == [
        "dense",
        "low-rank, keep 0.8",
        "BTT, keep 0.8",
        "Monarch, keep 0.8",
        "low-rank, keep 0.6",
        "BTT, keep 0.6",
        "Monarch, keep 0.6",
        "low-rank, int8, keep 0.8",
        "dense, int8",
        "int8",
    ]
    assert not any(model.training for model in models.values())

    dense = models["dense"]
    for keep in (0.8, 0.6):
        for family in ("low-rank", "BTT", "Monarch"):
            count = count_block_weights(models[f"{family}, keep {keep}"])
            share = count / count_block_weights(dense)
            assert keep - 0.25 < share <= keep

    up = "model.layers.0.mlp.up_proj"
    assert type(dense.get_submodule(up)) is nn.Linear
    assert models["int8"].get_submodule(up).weight.qdata.dtype == torch.int8
    dense_cores = read_cores(models["dense, int8"])
    assert len(dense_cores) == 2 * 7  # seven layers in each of two blocks
    assert dense_cores[f"{up}.cores.0"].shape == (1, 96, 48)
    low_rank_cores = read_cores(models["low-rank, int8, keep 0.8"])
    assert low_rank_cores[f"{up}.cores.1"].shape == (1, 96, 24)
    for core in (*dense_cores.values(), *low_rank_cores.values()):
        assert core.dtype == torch.int8


# ---- one call ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    model, _ = smollm2.make_tiny()
    return model


@torch.no_grad()
def find_logits(model, ids):
    return model(input_ids=ids).logits


def test_prefill_computes_the_logits_of_the_text(tiny):
    ids = torch.randint(128, (1, 16))
    prefill = compressed.work_of(tiny, ids, "prefill")
    assert torch.equal(prefill(), find_logits(tiny, ids))


def test_every_call_of_decode_computes_the_logits_of_one_token_after_the_text(tiny):
    ids = torch.randint(128, (1, 16))
    decode = compressed.work_of(tiny, ids, "decode")
    # the token that is decoded is the text's last one, once more
    longer = torch.cat([ids, ids[:, -1:]], 1)
    expected = find_logits(tiny, longer)[:, -1:]
    for _ in range(3):
        torch.testing.assert_close(decode(), expected)


def test_the_text_is_the_first_tokens_of_held_out_wikipedia():
    _, texts = smollm2.make_tiny()
    ids = compressed.read_tokens_of("tiny")
    assert ids.tolist() == [texts["wiki"][:16].tolist()]


def test_each_task_is_timed_on_one_thread_and_on_all(set_threads):
    set_threads(3)
    jobs = compressed.jobs("cpu", smoke=False)
    assert [job.title for job in jobs] == [
        "prefill, 1 thread",
        "decode, 1 thread",
        "prefill, 3 threads",
        "decode, 3 threads",
    ]
    assert [job.tokens for job in jobs] == [512, 1, 512, 1]
    assert {job.model for job in jobs} == {"SmolLM2-135M-Instruct, Q4_1"}
    assert {job.model for job in compressed.jobs("cpu", smoke=True)} == {"tiny"}


def test_a_job_is_timed_on_its_threads_and_the_process_gets_its_own_back(set_threads, monkeypatch):
    set_threads(3)

    def time_models(job, heat):
        return [{"threads": torch.get_num_threads()}]

    monkeypatch.setattr(compressed, "time_models", time_models)
    job = compressed.Job("tiny", "decode", threads=2)
    assert compressed.measure(job, Heat()) == [{"threads": 2}]
    assert torch.get_num_threads() == 3


# ---- rows ----------------------------------------------------------------------------------------


@pytest.fixture
def scripted_seconds(monkeypatch):
    """Two models by a script: BTT takes 1 s, dense 2 s, and dense right after BTT 4 s."""
    calls = []

    def make_work(model, ids, task):
        return lambda: calls.append(model)

    def take_seconds(work, device):
        model_before = calls[-1]
        work()
        if calls[-1] == "BTT":
            return 1.0
        return 4.0 if model_before == "BTT" else 2.0

    monkeypatch.setattr(compressed, "models", lambda name: {"dense": "dense", "BTT": "BTT"})
    monkeypatch.setattr(compressed, "work_of", make_work)
    monkeypatch.setattr(timing, "wall", take_seconds)
    return calls


def test_speeds_are_against_the_mean_of_denses_first_and_last_run(scripted_seconds):
    job = compressed.Job("tiny", "prefill", threads=1)  # of 16 tokens
    rows = compressed.time_models(job, Heat(rounds=(3, 3)))
    assert scripted_seconds[:2] == ["dense", "BTT"]  # the first calls, which are slower
    assert scripted_seconds[-9:] == ["dense", "BTT", "dense"] * 3

    shown = {}
    for row in rows:
        assert (row["model"], row["task"], row["threads"]) == ("tiny", "prefill", 1)
        assert row["rounds"] == 3
        shown[row["variant"]] = (row["tokens_per_s"]["median"], row["x_dense"]["median"])
    mean = (2 + 4) / 2
    assert shown == {
        "dense": (16 / 2, mean / 2),
        "BTT": (16 / 1, mean / 1),
        "dense again": (16 / 4, 2 / 4),  # the first run's seconds over the last run's
    }


# ---- what is shown -------------------------------------------------------------------------------


def make_row(variant, threads, task, tokens_per_s, x_dense):
    return {
        "model": "tiny",
        "task": task,
        "threads": threads,
        "variant": variant,
        "rounds": 5,
        "tokens_per_s": {"median": tokens_per_s, "p20": tokens_per_s, "p80": tokens_per_s},
        "x_dense": {"median": x_dense, "p20": x_dense - 0.25, "p80": x_dense + 0.5},
    }


RESULT = {
    "rows": [
        make_row("dense", 1, "prefill", 1280.4, 1.01),
        make_row("low-rank, keep 0.8", 1, "prefill", 1500.0, 1.251),
        make_row("BTT, keep 0.8", 1, "prefill", 1500.0, 1.118),
        make_row("Monarch, keep 0.8", 1, "prefill", 1500.0, 1.302),
        make_row("BTT, keep 0.6", 1, "prefill", 1500.0, 1.9),
        make_row("low-rank, int8, keep 0.8", 1, "prefill", 1500.0, 0.5),
        make_row("dense again", 1, "prefill", 1290.0, 0.98),
        make_row("dense", 2, "decode", 15.4, 0.99),
        make_row("BTT, keep 0.8", 2, "decode", 15.0, 3.0),
        make_row("dense again", 2, "decode", 15.0, 1.02),
        make_row("BTT, keep 0.8", 1, "decode", 15.0, 1.4),
    ]
}


def test_the_page_has_denses_tokens_per_second_and_the_spread_of_dense_again():
    assert read_table(compressed.markdown(RESULT)) == [
        ["", "prefill, 1 thread", "decode, 2 threads", "decode, 1 thread"],
        ["dense", "1,280 tokens/s", "15 tokens/s", "-"],
        ["low-rank, keep 0.8", "1.25", "-", "-"],
        ["BTT, keep 0.8", "1.12", "3.00", "1.40"],
        ["Monarch, keep 0.8", "1.30", "-", "-"],
        ["BTT, keep 0.6", "1.90", "-", "-"],
        ["low-rank, int8, keep 0.8", "0.50", "-", "-"],
        ["dense again", "0.98 (0.73-1.48)", "1.02 (0.77-1.52)", "-"],
    ]


def test_the_pages_numbers_are_of_low_rank_at_keep_80_and_of_int8_on_one_thread():
    rows = [
        *RESULT["rows"],
        make_row("dense, int8", 1, "decode", 60.0, 2.354),
        make_row("dense, int8", 2, "decode", 60.0, 4.0),
        make_row("low-rank, keep 0.6", 1, "decode", 60.0, 3.0),
    ]
    assert compressed.numbers({"rows": rows}) == {
        "compressed.prefill_low_rank": "1.25",
        "compressed.decode_int8": "2.35",
    }


def test_a_terminal_shows_tokens_per_second_and_the_multiple_of_dense():
    table = compressed.show(RESULT["rows"][:2])
    assert table.title == "prefill, 1 thread: median of 5 rounds (p20-p80)"
    assert [list(column.cells) for column in table.columns] == [
        ["dense", "low-rank, keep 0.8"],
        ["1,280 (1,280-1,280)", "1,500 (1,500-1,500)"],
        ["1.01 (0.76-1.51)", "1.25 (1.00-1.75)"],
    ]
