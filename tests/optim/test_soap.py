"""SOAP against the algorithm of its paper, written down plainly, and on gradients that break it."""

import copy
import math

import pytest
import torch
from torch import nn

from structlin import BTT, Structure, StructuredLinear, convert
from structlin.optim import SOAP, Muon
from structlin.stability import coordinate_check
from tests.models import GPT, perplexed


def plainly(gradients, lr, every, momentum=0.9, beta=0.95):
    """The sum of the steps that these gradients `(m, n)` make, in float64, one matrix by itself."""
    m, n = gradients[0].shape
    average, squares, total = (torch.zeros(m, n, dtype=torch.float64) for _ in range(3))
    for t, g in enumerate(gradients, start=1):
        if t == 1:
            pairs = (g[None], g.T[None], 1 / n), (g.T[None], g[None], 1 / m)
            # by the operation that SOAP calls: rounding chooses where a basis has no gradient
            left, right = (torch.baddbmm(x @ y, x, y, beta=0, alpha=by)[0] for x, y, by in pairs)
            bases = [torch.linalg.qr(x)[0] for x in (left, right)]
        average = momentum * average + (1 - momentum) * g
        update = (1 - momentum) * g + momentum * average
        squares = beta * squares + (1 - beta) * (bases[0].T @ g @ bases[1]) ** 2
        root = (squares / (1 - beta**t)).sqrt()
        inner = bases[0].T @ update @ bases[1] / root.clamp(min=1e-4 * root.max())
        direction = bases[0] @ inner @ bases[1].T
        total -= lr * math.sqrt(m / n) * direction / (0.2 * math.sqrt(max(m, n)))
        left = beta * left + (1 - beta) * g @ g.T / n
        right = beta * right + (1 - beta) * g.T @ g / m
        if t % every == 0:
            for side, factor in enumerate((left, right)):
                order = (bases[side].T @ factor @ bases[side]).diagonal().argsort(descending=True)
                bases[side] = torch.linalg.qr(factor @ bases[side][:, order])[0]
                squares = squares[order] if side == 0 else squares[:, order]
    return total


@pytest.mark.parametrize("kind", ["dense", "structured", "Conv1D"])
def test_each_block_makes_the_steps_of_the_paper(kind):
    layer = {"dense": nn.Linear, "structured": StructuredLinear}.get(kind)
    if layer is None:
        conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
        layer = lambda columns, rows, **_: conv1d(rows, columns).double()  # noqa: E731
    model = nn.ModuleDict({"attn": layer(24, 60, bias=False, dtype=torch.float64)})
    before = copy.deepcopy(model.state_dict())
    optimizer = SOAP(model, 0.1, precondition_frequency=3)
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    gradients = {name: [torch.randn_like(p) for _ in range(8)] for name, p in matrices}
    for n in range(8):
        for name, p in matrices:
            p.grad = gradients[name][n].clone()
        optimizer.step()
    share = 1 if len(matrices) == 1 else 1 / len(matrices)
    for name, p in matrices:
        turned = [g.mT if kind == "Conv1D" else g for g in gradients[name]]
        blocks = zip(*(g.reshape(-1, *g.shape[-2:]) for g in turned), strict=True)
        wanted = torch.stack([plainly(list(each), 0.1 * share, 3) for each in blocks])
        wanted = (wanted.mT if kind == "Conv1D" else wanted).reshape(p.shape)
        torch.testing.assert_close(p.detach() - before[name], wanted, rtol=1e-6, atol=1e-8)


def test_a_large_side_has_no_basis_and_two_large_sides_step_as_muon():
    model = nn.ModuleDict({"attn": nn.Linear(8, 32, bias=False), "mlp": nn.Linear(32, 32)})
    twin = copy.deepcopy(model)
    optimizer = SOAP(model, 0.1, max_precond_dim=16, momentum=0.95)
    muon = Muon(twin, 0.1)
    for _ in range(2):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        muon.step()
    assert torch.equal(model["mlp"].weight, twin["mlp"].weight)
    state = optimizer.state[model["attn"].weight]
    assert state["right"].shape == (1, 8, 8)
    assert "left" not in state
    assert not torch.allclose(model["attn"].weight, twin["attn"].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "gradient",
    [
        torch.zeros_like,
        torch.ones_like,  # of rank one
        lambda p: torch.ones_like(p).triu(),
        lambda p: 1e-6 * torch.ones_like(p).tril(),
        lambda p: torch.eye(*p.shape[-2:]).to(p).expand_as(p).clone(),  # a repeated spectrum
    ],
)
def test_gradients_without_a_clear_spectrum_make_finite_steps_of_at_most_their_length(
    gradient, dtype
):
    model = nn.ModuleDict({"attn": StructuredLinear(16, 36, BTT(rank=1), dtype=dtype)})
    row = nn.ModuleDict({"attn": nn.Linear(24, 1, bias=False, dtype=dtype)})  # blocks of 1 x n
    for each in (model, row):
        before = copy.deepcopy(each.state_dict())
        optimizer = SOAP(each, 0.01, precondition_frequency=1)
        for _ in range(4):
            for p in each.parameters():
                p.grad = gradient(p) if p.ndim > 1 else torch.zeros_like(p)
            optimizer.step()
        for name, p in each.named_parameters():
            step = (p - before[name]).float()
            assert step.isfinite().all()
            if p.ndim > 1:
                m, n = p.shape[-2:]
                most = 4 * 0.01 * math.sqrt(m / n * min(m, n))
                assert (torch.linalg.matrix_norm(step) <= 1.1 * most).all()


@pytest.mark.parametrize("rank", [1, 4, None])
def test_on_cores_a_rate_carries_over_widths_and_on_dense_matrices_steps_grow(rank):
    def build(width):
        hidden = nn.Linear(width, width, bias=False), nn.LayerNorm(width)
        model = nn.Sequential(nn.Linear(16, width), *hidden, nn.Linear(width, 10))
        nn.init.zeros_(model[3].weight)
        return convert(model, BTT(rank=rank), include="1", init="mup") if rank else model

    check = coordinate_check(
        build,
        [64, 256, 1024] if rank else [64, 128, 256],
        [(torch.randn(128, 16), torch.randint(10, (128,))) for _ in range(10)],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model, width: SOAP(model, 0.03, base={width: 64}),
        steps=10,
    )
    slopes = {each.layer: each.slope for each in check.steepest if each.quantity == "change"}
    assert abs(slopes["1"]) < 0.15 if rank else slopes["1"] > 0.2, slopes


def test_a_gpt_learns_and_bad_options_are_refused():
    model = GPT(depth=1)
    losses = perplexed(model, 30, SOAP(model, 0.05, other_lr=1e-2))
    assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(ValueError, match=r"shampoo_beta=1\.5 must be at least 0 and below 1"):
        SOAP(model, shampoo_beta=1.5)
    with pytest.raises(ValueError, match="precondition_frequency=0"):
        SOAP(model, precondition_frequency=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, dtype):
    def train(model, optimizer, steps):
        for n in steps:
            torch.manual_seed(n)
            optimizer.zero_grad()
            model(torch.randint(50, (2, 6))).square().mean().backward()
            if n == 2:  # a layer gets no gradient for a step
                model.h[0].mlp.c_fc.cores[0].grad = None
            optimizer.step()

    torch.manual_seed(0)
    model = convert(GPT(depth=1), BTT(), include="ffn").to(dtype)
    whole, optimizer = copy.deepcopy(model), SOAP(model, precondition_frequency=2)
    train(whole, SOAP(whole, precondition_frequency=2), range(6))
    train(model, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again = SOAP(model, precondition_frequency=2)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(model, again, range(3, 6))
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own, other)
    muon = Muon(model)
    perplexed(model, 1, muon)
    again.load_state_dict(muon.state_dict())  # whose momenta go on, with bases that start afresh
    perplexed(model, 1, again)
    assert again.param_groups[0]["precondition_frequency"] == 2
    other = convert(GPT(depth=1), BTT(rank=2), include="ffn")
    with pytest.raises(ValueError, match="is of another model"):
        SOAP(other).load_state_dict(again.state_dict())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_that_are_not_finite_change_nothing(value):
    model = convert(GPT(depth=1), BTT(), include="ffn")
    optimizer = SOAP(model)
    perplexed(model, 2, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.lm_head.weight.grad[0, 0] = value
    with pytest.raises(FloatingPointError, match=r"lm_head\.weight are not finite"):
        optimizer.step()
    after = (model.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def lonely(m, n, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleDict({"attn": nn.Linear(n, m, bias=False, dtype=dtype)})


def one_huge(t, g):
    return g * (1e30 if t == 5 else 1.0)


def row_sparse(t, g):
    return g * (torch.arange(len(g)) == t % len(g))[:, None]


GRADIENTS = {
    "of 1e-38": lambda t, g: 1e-38 * g,
    "of 1e-22": lambda t, g: 1e-22 * g,
    "of 1e30": lambda t, g: 1e30 * g,
    "zero": lambda t, g: 0 * g,
    "zero, then some": lambda t, g: g * (t > 3),
    "one of 1e30": one_huge,
    "one of 1e19": lambda t, g: g * (1e19 if t == 5 else 1.0),
    "one of 1e-30": lambda t, g: g * (1e-30 if t == 5 else 1.0),
    "vanishing": lambda t, g: g * (t < 10),
    "row-sparse": row_sparse,
    "of rank one": lambda t, g: torch.ones_like(g),
    "from 1e-36 to 1e30": lambda t, g: g * 10.0 ** (t - 36 if t < 66 else 30),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.9, 0.99])
@pytest.mark.parametrize("name", GRADIENTS)
def test_whatever_the_gradients_no_step_is_longer_than_that_of_signs(name, momentum, dtype):
    m, n, lr = 36, 24, 0.01
    # as long as the direction whose entries are 1 / ADAM_RMS sqrt(36), and what bfloat16 rounds
    most = lr * math.sqrt(m / n) * math.sqrt(m * n) / (0.2 * math.sqrt(m)) * 1.02
    model = lonely(m, n, dtype)
    weight = model["attn"].weight
    optimizer = SOAP(model, lr, momentum=momentum)
    norms = []
    for t in range(70):
        weight.grad = GRADIENTS[name](t, torch.randn(m, n)).to(dtype)
        weight.data.zero_()  # or rounding of its entries would be most of a step
        optimizer.step()
        norms.append(weight.detach().double().norm().item())
    assert max(norms) <= most
    assert all(value.isfinite().all() for value in optimizer.state[weight].values())
    goes_on = norms[5] if name.startswith("one of") else norms[-1]
    assert goes_on > 0 or name == "zero"


@pytest.mark.parametrize("power", [-100, -60, 60, 100])
def test_steps_do_not_depend_on_the_size_of_the_gradients(power):
    sizes, twins = (0, power), []
    for size in sizes:
        model = lonely(12, 12)
        optimizer = SOAP(model, 0.1, precondition_frequency=2)
        for _ in range(6):
            model["attn"].weight.grad = torch.randn(12, 12) * 2.0**size
            optimizer.step()
        twins.append(model["attn"].weight)
    assert torch.equal(*twins)


def test_gradients_that_grow_by_forty_digits_make_the_steps_of_the_paper():
    model = lonely(24, 24, torch.float64)
    before = model["attn"].weight.detach().clone()
    optimizer = SOAP(model, 0.1, precondition_frequency=3)
    gradients = [torch.randn(24, 24).double() * 10.0 ** (5 * n) for n in range(-4, 5)]
    units = set()
    for gradient in gradients:
        model["attn"].weight.grad = gradient.clone()
        optimizer.step()
        units.add(optimizer.state[model["attn"].weight]["exponent"].item())
    step = model["attn"].weight.detach() - before
    torch.testing.assert_close(step, plainly(gradients, 0.1, 3), rtol=1e-6, atol=1e-8)
    assert len(units) == 3


def test_a_state_in_another_unit_is_saved_copied_and_loaded_bit_for_bit(tmp_path):
    def train(model, optimizer, steps):
        for n in steps:
            torch.manual_seed(n)
            model["attn"].weight.grad = torch.randn(12, 12) * 10.0 ** (6 * n - 30)
            optimizer.step()

    whole = lonely(12, 12)
    train(whole, SOAP(whole, precondition_frequency=2), range(10))
    model = lonely(12, 12)
    optimizer = SOAP(model, precondition_frequency=2)
    train(model, optimizer, range(5))
    assert optimizer.state[model["attn"].weight]["exponent"].item() != 0
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again = SOAP(model, precondition_frequency=2)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(model, again, range(5, 10))
    train(copied, its_optimizer, range(5, 10))
    assert torch.equal(model["attn"].weight, whole["attn"].weight)
    assert torch.equal(copied["attn"].weight, whole["attn"].weight)


def test_a_state_of_a_version_without_units_goes_on():
    twins = [lonely(12, 12) for _ in range(2)]
    for twin in twins:
        optimizer = SOAP(twin)
        for t in range(4):
            torch.manual_seed(t)
            twin["attn"].weight.grad = torch.randn(12, 12)
            optimizer.step()
            if t == 1 and twin is twins[0]:
                saved = optimizer.state_dict()
                del saved["state"][0]["exponent"]
                optimizer = SOAP(twin)
                optimizer.load_state_dict(saved)
    assert torch.equal(twins[0]["attn"].weight, twins[1]["attn"].weight)


def test_a_state_that_is_not_finite_is_an_error_that_says_what_to_do_and_changes_nothing():
    model = nn.ModuleDict({"attn": nn.Linear(8, 8), "mlp": nn.Linear(8, 8)})
    optimizer = SOAP(model)
    model["attn"].weight.grad = torch.randn(8, 8)
    optimizer.step()
    optimizer.state[model["attn"].weight]["left_basis"][0, 0, 0] = math.nan
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with pytest.raises(FloatingPointError, match=r"attn\.weight has norm nan by SOAP.*state\.pop"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "left" not in optimizer.state[model["mlp"].weight]
    optimizer.state.pop(model["attn"].weight)
    optimizer.step()


def test_the_count_of_steps_stays_on_the_cpu_where_nobody_waits_to_read_it():
    model = lonely(8, 8)
    optimizer = SOAP(model)
    model["attn"].weight.grad = torch.randn(8, 8)
    optimizer.step()
    model.zero_grad()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to("meta")  # the second device of a machine without one
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[model["attn"].weight]
    assert state["left"].is_meta
    assert state["step"].item() == 1


def test_alike_blocks_step_in_one_stack_as_each_does_alone_whatever_steps_with_them():
    def build(names):
        return nn.ModuleDict({name: nn.Linear(12, 12, bias=False) for name in names})

    names = ["a_attn", "b_attn", "c_attn"]  # square: rounding chooses the basis of a null space
    together = build(names).double()
    singles = {name: build([name]).double() for name in names}
    for name in names:
        singles[name].load_state_dict({f"{name}.weight": together[name].weight})
    one = SOAP(together, 0.1, precondition_frequency=2)
    alone = {name: SOAP(singles[name], 0.1, precondition_frequency=2) for name in names}
    missing = {2: {"b_attn"}, 3: {"a_attn", "c_attn"}, 7: {"c_attn"}}
    for t in range(12):
        if t == 5:
            one.load_state_dict(copy.deepcopy(one.state_dict()))
        if t == 9:
            together, one = copy.deepcopy((together, one))
        for name in names:
            gradient = torch.randn(12, 12).double() * (1e25 if (t, name) == (8, "a_attn") else 1)
            absent = name in missing.get(t, set())
            together[name].weight.grad = None if absent else gradient.clone()
            singles[name][name].weight.grad = None if absent else gradient.clone()
        one.step()
        for each in alone.values():
            each.step()
    for name in names:
        weight = singles[name][name].weight
        torch.testing.assert_close(together[name].weight, weight, rtol=1e-9, atol=1e-12)
        own, other = one.state[together[name].weight], alone[name].state[weight]
        assert own["step"] == other["step"]
        torch.testing.assert_close(own["left"], other["left"], rtol=1e-9, atol=1e-12)


def test_states_of_alike_blocks_lie_together_so_that_a_step_copies_none():
    model = nn.ModuleDict({f"attn{n}": nn.Linear(12, 20, bias=False) for n in range(3)})
    optimizer = SOAP(model)
    places = []
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        states = [optimizer.state[p]["left"] for p in model.parameters()]
        places.append([state.data_ptr() for state in states])
    assert places[0] == places[1] == places[2]
    assert len({state.untyped_storage().data_ptr() for state in states}) == 1


def turn_bases(gradients, steps=4):
    """SOAP's state after some steps by the same gradients `(blocks, m, n)`, a turn in each."""
    blocks, m, n = gradients.shape
    layer = StructuredLinear(
        blocks * n, blocks * m, Structure("b n -> b m", "b m n", b=blocks, m=m, n=n), bias=False
    )
    model = nn.ModuleDict({"attn": layer})
    optimizer = SOAP(model, precondition_frequency=1)
    for _ in range(steps):
        layer.cores[0].grad = gradients.clone()
        optimizer.step()
    return optimizer.state[layer.cores[0]]


def test_bases_have_the_same_bits_on_any_number_of_threads():
    gradients = torch.randn(53, 12, 20)
    threads = torch.get_num_threads()
    states = {}
    try:
        for count in (1, 2, 3, 64):
            torch.set_num_threads(count)
            states[count] = turn_bases(gradients)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for state in states.values():
        for name, value in states[1].items():
            assert torch.equal(state[name], value), name
    first = turn_bases(gradients[:1])  # no block depends on its company
    torch.testing.assert_close(first["left_basis"][0], states[3]["left_basis"][0], rtol=0, atol=0)


@pytest.mark.parametrize("zeros", [0, 5])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e12])
def test_bases_are_orthonormal_and_span_the_leading_eigenvectors_whatever_the_condition_number(
    condition, zeros
):
    blocks, m = 3, 24
    left, right = (torch.linalg.qr(torch.randn(blocks, m, m).double()).Q for _ in range(2))
    values = torch.logspace(0, -math.log10(condition) / 2, m).double()
    gradients = (left * values) @ right
    gradients[:, :, m - zeros :] = 0
    state = turn_bases(gradients.float(), steps=30)
    for side, factors in (("left", gradients @ gradients.mT), ("right", gradients.mT @ gradients)):
        basis = state[f"{side}_basis"].double()
        identity = torch.eye(m).double().expand(blocks, m, m)
        torch.testing.assert_close(basis.mT @ basis, identity, rtol=0, atol=1e-5)
        eigenvalues, vectors = torch.linalg.eigh(factors)  # ascending
        for n in range(blocks):
            ratios = eigenvalues[n, 1:] / eigenvalues[n, :-1].clamp(min=1e-30)
            gaps = (ratios > 1.5).nonzero() + 1
            gaps = gaps[eigenvalues[n, gaps] > 1e-4 * eigenvalues[n, -1]].tolist()
            assert gaps or condition < 1e6
            for gap in gaps:
                leading = vectors[n, :, gap:]
                residual = leading - basis[n, :, : m - gap] @ (basis[n, :, : m - gap].T @ leading)
                assert residual.norm() < 1e-3
