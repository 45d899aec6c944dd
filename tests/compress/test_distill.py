"""Healing by distillation: its loss by hand, what it leaves as it was, its errors."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from structlin import BTT, LowRank, convert, distill, param_groups

BATCHES = [torch.randn(32, 16, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def dense(width=16, out=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, out))


def converted(model, structure=None):
    return convert(copy.deepcopy(model), structure or LowRank(rank=4), init="project")


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


class Named(nn.Module):
    """A model that returns what it is given, scaled, under the names that it is given."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.full((), scale))

    def forward(self, attention_mask=None, decoder_attention_mask=None, **tensors):
        return {name: self.scale * value for name, value in tensors.items()}


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, *_, **__):
        return self.value


def loss_of(student, teacher, batch, **options):
    """The loss of a batch before the first step."""
    options = {"steps": 1, "lr": 1e-12, "held_out": [batch], "progress": False} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so small a rate changes nothing
        return distill(student, teacher, [batch], **options).before


def _interrupted():
    """Ctrl-C while the third batch is made."""
    yield from BATCHES[:2]
    raise KeyboardInterrupt("stop")


# ---- the loss ------------------------------------------------------------------------------------


def test_the_loss_of_logits_is_the_divergence_and_of_anything_else_the_relative_square():
    torch.manual_seed(0)
    s, t = torch.randn(2, 2, 5, 7, dtype=torch.float64)
    expected = 0.0
    for row, other in zip(s.flatten(0, 1).tolist(), t.flatten(0, 1).tolist(), strict=True):
        p, q = ([math.exp(x) for x in logits] for logits in (other, row))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        expected += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 10
    found = loss_of(Named(), Constant({"y": t}), {"y": s}, logits=True)
    assert found == pytest.approx(expected, rel=1e-12)
    assert loss_of(Named(0.7), Named(1.0), {"y": s}) == pytest.approx(0.09, rel=1e-5)


def test_outputs_whose_name_ends_with_logits_are_logits_and_a_single_number_is_no_output():
    x = torch.randn(3, 4)
    both = {"logits": x, "hidden": x, "loss": torch.ones(())}
    parts = [{"logits": x}, {"hidden": x}]
    loss, *each = (loss_of(Named(0.5), Named(), batch) for batch in (both, *parts))
    assert loss == pytest.approx(sum(each), rel=1e-6)
    assert each[1] == pytest.approx(0.25, rel=1e-5)
    assert each[0] != pytest.approx(0.25, rel=0.1)


def test_tuples_and_mappings_are_searched_for_floating_tensors():
    class Nested(Named):
        def forward(self, x):
            y = self.scale * x
            return y, {"a": [y, None, "text"], "ids": x.long()}, y.sum()

    assert loss_of(Nested(0.5), Nested(), torch.ones(2, 2)) == pytest.approx(2 * 0.25)


@pytest.mark.parametrize("name", ["logits", "last_hidden_state"])
def test_masked_tokens_do_not_count(name):
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 7), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    garbage = torch.where(mask[..., None] > 0, x, 1e6)
    kept = {name: x[mask.bool()]}
    expected = loss_of(Named(0.5), Named(), kept)
    found = loss_of(Named(0.5), Named(), {name: garbage, "attention_mask": mask})
    assert found == pytest.approx(expected)


def test_the_masks_of_an_encoder_and_its_decoder_are_not_confused():
    torch.manual_seed(0)
    states, encoded = torch.randn(1, 3, 4), torch.randn(1, 5, 4)
    masks = {
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0]]),
        "decoder_attention_mask": torch.tensor([[1, 0, 0]]),
    }
    only = {"states": states[:, :1], "encoder_last_hidden_state": encoded[:, :3]}
    both = {"states": states, "encoder_last_hidden_state": encoded}
    expected = loss_of(Named(0.5), Named(), only, logits=True)
    found = loss_of(Named(0.5), Named(), both | masks, logits=True)
    assert found == pytest.approx(expected)


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [False, True])
def test_a_model_that_is_its_teacher_has_no_loss_and_does_not_change(logits):
    teacher = converted(dense(), BTT(rank=2))
    student = copy.deepcopy(teacher)
    found = distill(student, teacher, BATCHES, steps=6, lr=0.1, logits=logits, progress=False)
    assert (found.losses, found.before, found.after) == ([0.0] * 6, 0, 0)
    for name, value in state(teacher).items():
        assert torch.equal(student.state_dict()[name], value)


def test_the_steps_are_adamws_on_param_groups_with_warmup_and_cosine():
    teacher, steps, lr = dense(), 20, 0.01
    student = converted(teacher, BTT(rank=2))
    expected = copy.deepcopy(student)
    optimizer = torch.optim.AdamW(param_groups(expected, lr, weight_decay=0.0), betas=(0.9, 0.95))
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        rise = min(1, (step + 1) / 2)
        fall = (1 + math.cos(math.pi * max(0, step - 2) / 18)) / 2
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * rise * fall
        x = BATCHES[step % 4]
        y = teacher(x).detach()
        loss = (expected(x) - y).norm().square() / y.norm().square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    options = {"held_out": BATCHES, "progress": False}
    assert distill(student, teacher, BATCHES, steps=steps, lr=lr, **options).kept == steps
    for one, other in zip(student.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_modes_and_what_is_frozen_stay_and_no_gradient_is_left():
    teacher = nn.Sequential(dense(), nn.Dropout(0.5), nn.BatchNorm1d(8))
    student = converted(teacher)
    student[1].eval()
    student[0][0].bias.requires_grad_(False)
    frozen = {name: value for name, value in state(student).items() if "running" in name}
    bias, modes = student[0][0].bias.clone(), [module.training for module in student.modules()]
    assert distill(student, teacher, BATCHES, steps=3, lr=1e-3, progress=False).kept
    assert [module.training for module in student.modules()] == modes
    assert all(module.training for module in teacher.modules())
    assert torch.equal(student[0][0].bias, bias)
    assert all(torch.equal(student.state_dict()[name], value) for name, value in frozen.items())
    assert all(parameter.grad is None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_an_iterator_with_enough_batches_is_read_and_no_further_than_needed():
    teacher, stream = dense(), iter(BATCHES)
    distill(converted(teacher), teacher, stream, steps=3, held_out=BATCHES[3:], progress=False)
    assert next(stream) is BATCHES[3]


# ---- what judges, and what is kept ---------------------------------------------------------------


class Recording(nn.Module):
    """A model that notes the first number of each batch that trains it, or judges it."""

    def __init__(self, model):
        super().__init__()
        self.model, self.trained, self.judged = model, [], []

    def forward(self, x):
        noted = self.trained if torch.is_grad_enabled() else self.judged
        noted.append(x[0, 0].item())
        return self.model(x)


def numbered(count):
    return [torch.full((2, 16), float(n)) for n in range(count)]


@pytest.mark.filterwarnings("ignore:distill")  # what is learned here does not matter
@pytest.mark.parametrize(
    ("batches", "steps", "trained", "judged"),
    [
        (numbered(3), 4, [0, 2, 0, 2], [1]),  # the middle one of a few
        (numbered(30), 80, None, [7, 22]),  # a batch for 40 steps, evenly spread
        (numbered(30), 200, None, [5, 15, 25]),  # a batch in 10
        (numbered(1), 2, [0, 0], [0]),  # the only one trains and judges
    ],
)
def test_batches_that_judge_do_not_train(batches, steps, trained, judged):
    teacher = dense()
    student = Recording(converted(teacher))
    distill(student, teacher, batches, steps=steps, progress=False)
    times = len(student.judged) // len(judged)
    assert student.judged == judged * times
    assert times == 1 + min(10, steps)
    if trained is None:
        rest = [n for n in range(30) if n not in judged]
        trained = (rest * steps)[:steps]
    assert student.trained == trained


@pytest.mark.filterwarnings("ignore:distill")
def test_batches_held_out_by_the_caller_judge_and_all_others_train():
    teacher = dense()
    student = Recording(converted(teacher))
    *batches, last = numbered(4)
    distill(student, teacher, iter(batches), steps=3, held_out=[last], progress=False)
    assert student.trained == [0, 1, 2]
    assert set(student.judged) == {3}


@pytest.mark.parametrize("structure", [LowRank(rank=4), BTT(rank=2)])
def test_a_rate_that_harms_changes_no_bit_and_warns_once(structure):
    teacher = dense()
    student = converted(teacher, structure)
    before = state(student)
    with pytest.warns(UserWarning, match="as it was: try a lower lr than 10,") as caught:
        found = distill(student, teacher, BATCHES, steps=4, lr=10.0, progress=False)
    assert len(caught) == 1
    assert (found.kept, found.after) == (0, found.before)
    assert all(torch.equal(student.state_dict()[name], value) for name, value in before.items())


class OneNumber(nn.Module):
    """s (x1 + x2): it cannot be x1 + 3 x2, its teacher, for two inputs at once."""

    def __init__(self, s, seen):
        super().__init__()
        self.s, self.seen = nn.Parameter(torch.tensor(s)), seen

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.seen.append(self.s.item())  # as it is judged
        return self.s * x.sum(-1, keepdim=True)


def distill_one_number(s, seen=None, **options):
    """Train to s = 3, and be judged by the distance from s = 2."""
    teacher, student = nn.Linear(2, 1, bias=False), OneNumber(s, [] if seen is None else seen)
    teacher.weight.data = torch.tensor([[1.0, 3.0]])
    trains, judges = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    options = {"steps": 40, "held_out": [judges], "progress": False} | options
    return distill(student, teacher, [trains], **options), student.s.item()


def test_the_best_state_on_the_way_is_the_one_that_stays():
    found, s = distill_one_number(0.0, lr=0.2)
    assert s == pytest.approx(2, abs=0.1)
    assert 0 < found.kept < 40
    assert found.before == pytest.approx(1)
    assert found.after == pytest.approx((s / 2 - 1) ** 2, abs=1e-6)


def test_after_a_step_back_the_rate_is_a_quarter_and_adam_begins_anew():
    seen = []
    with pytest.warns(UserWarning, match="no state on the way"):
        distill_one_number(2.0001, lr=0.4, steps=10, seen=seen)
    moves = [s - 2.0001 for s in seen[1:5]]  # each from there, by the whole rate: Adam's first step
    falls = [1.0, 1.0, *((1 + math.cos(math.pi * n / 9)) / 2 for n in (1, 2))]
    expected = [0.4 / 4**n * fall for n, fall in enumerate(falls)]
    assert moves == pytest.approx(expected, rel=1e-3)


class Doubling(nn.Module):
    """A model that changes its input in place."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x.mul_(2))


@pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}])
def test_a_model_that_changes_its_input_changes_no_batch(pack):
    teacher = Doubling(dense())
    student = Doubling(converted(teacher.model))
    given = [x.clone() for x in BATCHES]
    batches = [pack(x) for x in given]
    found = distill(student, teacher, batches, steps=3, held_out=batches, progress=False)
    for one, other in zip(given, BATCHES, strict=True):
        assert torch.equal(one, other)
    plain = converted(teacher.model)
    doubled = [2 * x for x in BATCHES]
    expected = distill(plain, teacher.model, doubled, steps=3, held_out=doubled, progress=False)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)


# ---- errors --------------------------------------------------------------------------------------


class Rooted(nn.Sequential):
    """Its outputs are those of its layers, and their gradients are not numbers."""

    def forward(self, x):
        y = super().forward(x)
        return y + (0 * y).sqrt()


CASES = {
    "no batch": ({"batches": []}, ValueError, "batches has no batch"),
    "an iterator that ends": (
        {"batches": iter(BATCHES[:2]), "held_out": BATCHES[2:]},
        ValueError,
        r"batches ended after 2 of steps=5 and cannot be read again: give a list",
    ),
    "an iterator alone": (
        {"batches": iter(BATCHES)},
        ValueError,
        r"batches=list_iterator is no list, .* held_out=\[batch, \.\.\.\]",
    ),
    "nothing held out": ({"held_out": []}, ValueError, "held_out has no batch"),
    "one batch held out": (
        {"held_out": BATCHES[0]},
        TypeError,
        r"held_out=Tensor .* for example \[batch\]",
    ),
    "held out, not finite": (
        {"held_out": [BATCHES[0] * torch.inf]},
        FloatingPointError,
        "the loss of the held-out batches is nan",
    ),
    "pairs": (
        {"batches": [(batch, batch) for batch in BATCHES]},
        TypeError,
        r"batches: Sequential\.forward does not take .* give the inputs alone",
    ),
    "one batch": ({"batches": BATCHES[0]}, TypeError, r"batches=Tensor .* for example \[batch\]"),
    "a mapping": ({"batches": {"x": BATCHES[0]}}, TypeError, "batches=dict must be an iterable"),
    "steps": ({"steps": 0}, ValueError, "steps=0 must be at least 1"),
    "huge steps": ({"steps": 10**9}, ValueError, "steps=1000000000 must be at most 1000000"),
    "steps as a share": ({"steps": 0.5}, TypeError, "steps=0.5 must be an integer of at least 1"),
    "lr": ({"lr": -1.0}, ValueError, "lr=-1.0 must be finite and not negative"),
    "no teacher": ({"teacher": "bert"}, TypeError, "teacher='bert' must be a torch.nn.Module"),
    "shapes": (
        {"teacher": dense(out=4)},
        ValueError,
        r"output is \(32, 8\) from the model and \(32, 4\) from the teacher",
    ),
    "nothing in common": (
        {"teacher": Constant({"ids": torch.ones(2).long()})},
        ValueError,
        r"the model returns \[''\] and the teacher no floating tensor: there is nothing to compare",
    ),
    "meta": ({"teacher": dense().to("meta")}, ValueError, r"teacher: '0.weight' has no values"),
    "not finite": (
        {"batches": [*BATCHES, BATCHES[0] * torch.inf]},
        FloatingPointError,
        r"the loss of step 4 is nan: lr=0.001 is too large, or",
    ),
    "gradients, not finite": (
        {"student": Rooted},
        FloatingPointError,
        "the norm of the gradients of step 1 is nan",
    ),
    "Ctrl-C": (
        {"batches": _interrupted(), "held_out": BATCHES},
        KeyboardInterrupt,
        "stop",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_names_what_is_wrong_and_leaves_the_model_as_it_was(case):
    changed, kind, message = CASES[case]
    teacher = dense()
    options = {"teacher": teacher, "batches": BATCHES, "steps": 5, "lr": 1e-3} | changed
    student = options.pop("student", nn.Sequential)(*converted(teacher))
    before, modes = state(student), [module.training for module in student.modules()]
    with pytest.raises(kind, match=message):
        distill(student, **options, progress=False)
    assert all(torch.equal(student.state_dict()[name], value) for name, value in before.items())
    assert [module.training for module in student.modules()] == modes
    assert all(parameter.grad is None for parameter in student.parameters())


def test_a_teacher_that_would_change_is_refused():
    teacher = dense()
    with pytest.raises(ValueError, match=r"teacher shares '0\.weight' with the model"):
        distill(teacher, teacher, BATCHES, steps=1, lr=1e-3)
    shallow = nn.Sequential(*teacher)
    with pytest.raises(ValueError, match=r"teacher shares '0\.weight' with the model"):
        distill(shallow, teacher, BATCHES, steps=1, lr=1e-3)
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        distill(converted(dense()), teacher, BATCHES, steps=1, lr=1e-3)


def test_a_model_without_gradients_is_named_and_stays_as_it_was():
    class Off(nn.Sequential):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    student = Off(*converted(dense()))
    before = state(student)
    with pytest.raises(ValueError, match=r"^model: what it returns has no gradient; it turns"):
        distill(student, dense(), BATCHES, steps=4, lr=1e-3, progress=False)
    assert all(torch.equal(student.state_dict()[name], value) for name, value in before.items())


def test_a_teacher_in_the_same_memory_is_refused():
    teacher, student = dense(), dense()
    student.load_state_dict(teacher.state_dict(), assign=True)  # other parameters, the same numbers
    student[2] = nn.Linear(32, 8)
    assert not {*map(id, teacher.parameters())} & {*map(id, student.parameters())}
    with pytest.raises(ValueError, match=r"teacher shares '0\.weight' with the model"):
        distill(student, teacher, BATCHES, steps=4, lr=1e-3)
    student[0].requires_grad_(False)
    distill(student, teacher, BATCHES, steps=4, lr=1e-3, progress=False)


class Counting(nn.Linear):
    """It writes into a buffer, and sets another one and an attribute."""

    def __init__(self):
        super().__init__(16, 16)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(2))
        self.kept = None

    def forward(self, x):
        self.calls += 1
        self.seen, self.kept = x.detach(), x
        return super().forward(x)


def test_after_an_error_gradients_buffers_and_attributes_are_what_they_were():
    teacher = nn.Sequential(Counting(), nn.Linear(16, 8))
    student = converted(teacher)
    student(BATCHES[0]).sum().backward()
    before = [(parameter.grad, parameter.grad.clone()) for parameter in student.parameters()]
    states, kept = [state(student), state(teacher)], [student[0].kept, teacher[0].kept]
    batches = [*BATCHES[:3], BATCHES[3] * torch.nan]
    with pytest.raises(FloatingPointError):
        distill(student, teacher, batches, steps=8, held_out=BATCHES[:1], lr=1e-3, progress=False)
    for parameter, (gradient, values) in zip(student.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, values)
    for model, values in zip((student, teacher), states, strict=True):
        assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    assert [student[0].kept, teacher[0].kept] == kept
