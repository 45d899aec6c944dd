"""Runs that wait at a model's layers side by side, on replicas that leave the model as it is."""

import threading
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from structlin import LowRank, plan_compression
from structlin._compress import replay as replays
from structlin._compress.replay import Replay, observe, prepare_call
from structlin._compress.replica import Replica


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def replay_of(model: nn.Module, layers, *batches) -> Replay:
    return Replay(model, [prepare_call(model, batch) for batch in batches], order=[*layers])


@pytest.fixture(autouse=True)
def _nothing_stays():
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


ENDS: list[Tensor] = []  # global: a list that a hook holds is one run's alone


def note_ends(model: nn.Module) -> list[Tensor]:
    """What runs of the model return."""
    ENDS.clear()
    model.register_forward_hook(lambda module, args, output: ENDS.append(output))
    return ENDS


def test_a_run_stops_before_each_layer_goes_on_with_an_answer_and_runs_to_its_end():
    model, x = build(), torch.randn(3, 2)
    expected, ends = 3 * model[1](model[0](x)), note_ends(model)
    places = []
    for visit in replay_of(model, model, x).walk([model[0], model[2]], [prepare_call(model, x)]):
        ((wait,),) = (visit.waits,)
        places.append(visit.module)
        assert ends == []
        if visit.module is model[0]:
            assert torch.equal(wait.dense.input, x)
        else:
            wait.dense.answer = lambda x: 3 * x
    assert places == [model[0], model[2]]
    torch.testing.assert_close(ends, [expected])
    assert all("forward" not in vars(module) for module in model)


def test_a_block_is_left_by_all_runs_after_its_layers_and_with_another_output():
    model = nn.Sequential(build(), nn.ReLU())
    block, layer, ends = model[0], model[0][1], note_ends(model)
    replay = replay_of(model, [layer], *(torch.full((1, 2), n) for n in (1.0, 2.0, 3.0)))
    visits = replay.walk([layer], replay.calls, both=True, blocks={block: [layer]})
    places = []
    for visit in visits:
        places.append((visit.module, len(visit.waits)))
        for wait in visit.waits:
            stop = wait.compressed
            assert stop.forward(*stop.args, **stop.kwargs).shape == (1, 2)
            if visit.module is block:
                torch.testing.assert_close(stop.output, block(*wait.call.args))
                stop.output = torch.full((1, 2), 7.0)
    assert places == [(layer, 3), (block, 3)]
    assert [end.tolist() == [[7.0, 7.0]] for end in ends] == [False, True] * 3


def test_what_the_model_raises_is_raised_once_and_the_other_runs_end():
    left = []

    class Model(nn.Sequential):
        def forward(self, x):
            try:
                return super().forward(x)
            finally:
                left.append(x[0, 0].item())

    def fail(x):
        raise RuntimeError("a layer that fails")

    model = Model(*build())
    replay = replay_of(model, model, *(torch.full((1, 2), n) for n in (1.0, 2.0, 3.0)))

    def run_all():
        for visit in replay.walk([model[0], model[1]], replay.calls):
            visit.waits[1].dense.answer = fail

    with pytest.raises(RuntimeError, match="a layer that fails"):
        run_all()
    assert sorted(left) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("place", ["before the run goes on", "after it has stopped again"])
def test_an_interrupt_anywhere_in_resume_leaves_no_run_that_waits_for_ever(place):
    model, x = build(), torch.ones(1, 2)
    with closing(replay_of(model, model, x).walk(model, [prepare_call(model, x)])) as visits:
        run = next(visits).waits[0].dense.run
        turn, back = run._turn, run._back

        def interrupt(*given):
            if place == "after it has stopped again":
                back.get()
            raise KeyboardInterrupt

        if place == "after it has stopped again":
            run._back = SimpleNamespace(get=interrupt, put=back.put)
        else:
            run._turn = SimpleNamespace(get=turn.get, put=interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.resume()
        run._turn, run._back = turn, back
        end = threading.Thread(target=run.cancel, daemon=True)
        end.start()
        end.join(timeout=600)
        waits_for_ever = run.thread.is_alive()
        turn.put(None)  # so that the test ends if it does
    assert not waits_for_ever


def test_a_model_that_swallows_every_exception_ends_all_the_same():
    tried = []

    class Model(nn.Sequential):
        def forward(self, x):
            for _ in range(3):
                try:
                    super().forward(x)
                except BaseException:
                    tried.append(1)

    model, x = Model(*build()), torch.ones(1, 2)
    with closing(replay_of(model, model, x).walk(model, [prepare_call(model, x)])) as visits:
        next(visits)
    assert len(tried) == 3


def test_runs_have_the_modes_of_the_thread_that_starts_them_and_no_gradients():
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            device = torch.empty(1).device.type
            seen.append((torch.is_grad_enabled(), device, super().forward(x).dtype))

    model, x = Model(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert [*replay_of(model, [], x).walk([], [prepare_call(model, x)])] == []
    assert [*replay_of(model, [], x).walk([], [prepare_call(model, x)])] == []
    assert seen == [(False, "meta", torch.bfloat16), (False, "cpu", torch.float32)]
    assert torch.is_grad_enabled()


def test_a_thread_of_the_models_own_does_not_stop():
    class Model(nn.Sequential):
        def forward(self, x):
            thread = threading.Thread(target=super().forward, args=(x,))
            thread.start()
            thread.join()

    model, x = Model(*build()), torch.ones(1, 2)
    assert [*replay_of(model, model, x).walk(model, [prepare_call(model, x)])] == []


def test_many_runs_compute_with_few_threads_each_and_the_caller_with_its_own(
    monkeypatch, set_threads
):
    monkeypatch.setattr(replays, "MAX_WORKERS", 4)
    seen, model = [], nn.Linear(2, 2)
    replay = replay_of(model, [model], *torch.ones(4, 1, 2))
    set_threads(3)
    for visit in replay.walk([model], replay.calls):
        assert torch.get_num_threads() == 3
        visit.waits[0].dense.answer = lambda x: seen.append(torch.get_num_threads())
    assert seen == [1]


def test_too_many_batches_for_the_machine_are_said_to_be_too_many(monkeypatch):
    started, start = [], threading.Thread.start

    def refuse(self):
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(start(self))

    monkeypatch.setattr(threading.Thread, "start", refuse)
    batches = torch.randn(12, 2).split(2)
    with pytest.raises(RuntimeError, match=r"no thread could be started .* give fewer batches"):
        plan_compression(build(), LowRank(rank=1), batches, keep=None)


def test_a_hook_may_make_the_models_arguments_of_another_batch():
    model = build()
    model.register_forward_pre_hook(lambda module, args: args[:1])
    replay = observe(model, [*model], [(torch.ones(1, 2), torch.zeros(1))])
    assert replay.order == [*model]


class Skips(nn.ModuleDict):
    def forward(self, x: Tensor, way: str) -> Tensor:
        for name in way:
            x = self[name](x)
        return x


@pytest.mark.parametrize(
    ("ways", "order", "repeated"),
    [
        (["ac", "abc"], "abc", ""),
        (["ca", "cab"], "cab", ""),
        (["ab", "ba"], "ab", "ab"),  # no order agrees with both
        (["cab", "cba"], "cab", "ab"),
        (["ab", "bc", "ca"], "abc", "abc"),
        (["aba", "ab"], "ab", "a"),
        (["ab"] * 9, "ab", ""),
        (["ab"] * 4 + ["acb"] + ["ab"] * 4, "acb", ""),  # among a few that are run first
    ],
)
def test_the_order_agrees_with_that_of_all_calls(ways, order, repeated):
    model = Skips({name: nn.Linear(2, 2) for name in "abc"})
    found = observe(model, [*model.values()], [(torch.ones(1, 2), way) for way in ways])
    assert found.order == [model[name] for name in order]
    assert found.repeated == {model[name] for name in repeated}


class OneByOne(nn.Module):
    """A row at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(torch.vmap(self.table)(ids))


class LinearOneByOne(OneByOne):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.vmap(self.linear)(self.table(ids))


def test_ids_within_vmap_are_not_looked_at():
    model = OneByOne()
    assert observe(model, [model.linear], [torch.zeros(3, 2).long()]).order == [model.linear]


def test_a_layer_within_vmap_is_named():
    model = LinearOneByOne()
    with pytest.raises(ValueError, match=r"layer 'linear' is called within torch\.vmap.*exclude"):
        observe(model, [model.linear], [torch.zeros(3, 2).long()])


def test_a_batch_with_another_keyword_is_named_wherever_it_stands():
    model = nn.Linear(2, 2)
    batches = [{"input": torch.ones(1, 2)} for _ in range(20)]
    batches[1] |= {"label": torch.ones(1)}
    message = r"^batches: Linear\.forward does not take a batch: .*'label'"
    with pytest.raises(TypeError, match=message):
        observe(model, [model], batches)
    with pytest.raises(TypeError, match=message):
        observe(model, [model], lambda: iter(batches))


# ---- replicas ------------------------------------------------------------------------------------


class Owner:
    def __init__(self, part):
        self.part, self.seen = part, []


class Keeping(nn.Module):
    """It keeps what it computes in places of every kind, and has every kind of way to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer = nn.Linear(2, 2)
        self.register_buffer("small", torch.zeros(2))
        self.register_buffer("large", torch.zeros(100, 100))
        self.kept, self.features, self.pair = {"n": []}, [], (nn.Identity(), [])
        self.owner, self.context = Owner(self.layer), SimpleNamespace(n=0)
        self.ways = [self.call, partial(self.call), lambda x: layer(x), self.owner.part]
        self.last = None

    def call(self, x):
        return self.layer(x)

    def forward(self, x):
        for way in self.ways:
            x = way(x)
        self.small.data.add_(1)
        self.large.add_(1)
        self.context.n, self.last = self.context.n + 1, x
        for kept in (self.kept["n"], self.features, self.pair[1], self.owner.seen):
            kept.append(x)
        return x, self.context.n, len(self.features)


def test_a_replica_reaches_its_own_layers_and_leaves_nothing_in_the_model():
    model = Keeping().train()
    model.layer.compile(backend=lambda graph, inputs: pytest.fail("it is compiled"))
    found = observe(model, [model.layer], [torch.ones(1, 2)] * 3)
    assert found.repeated == {model.layer}
    visits = [len(visit.waits) for visit in found.walk([model.layer], found.calls)]
    assert visits == [3] * 4
    ends = []
    for _ in range(2):
        ends += [found.run(call, [], lambda *_: None)[1:] for call in found.calls]
    assert ends == [(1, 1)] * 6
    assert model.training
    assert not model.small.any()
    assert not model.large.any()
    assert model.last is None
    assert not any([model.kept["n"], model.features, model.pair[1], model.owner.seen])
    assert model.context.n == 0


def test_a_replica_shares_parameters_and_the_memory_of_large_tensors_until_it_writes():
    model = Keeping()
    original = Replica(model)
    first, other = original.replicate(), original.replicate()
    for replica in (original, first, other):
        assert replica.model.layer.weight is model.layer.weight
        assert replica.model.layer is replica[model.layer] is not model.layer
        for name in ("small", "large"):
            assert getattr(replica.model, name) is not getattr(model, name)
    for tensor in (first.model.large, other.model.large, original.model.large):
        assert torch._C._is_cow_tensor(tensor)  # copied when it is written
    assert not torch._C._is_cow_tensor(first.model.small)
    assert not torch._C._is_cow_tensor(model.large)  # the caller's is as it was
    first.model.large.data[0, 0] = 1
    other.model.large.numpy()[0, 0] = 2
    tensors = [replica.model.large for replica in (first, other, original)]
    assert [tensor[0, 0].item() for tensor in (*tensors, model.large)] == [1, 2, 0, 0]


def test_torchs_encoder_calls_its_layers_one_by_one():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    layers = [layer.linear1 for layer in model.layers]
    assert observe(model, layers, [torch.ones(2, 3, 8)]).order == layers
