"""Structures: what is derived from the axis names, and what is refused."""

import copy
import json
import pickle
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
    apply,
    to_dense,
)
from structlin._engine import product
from structlin._engine.operators import Affine
from tests.catalogue import Drawn, drawn, silu_rms, structures

ROLES = ("batch", "fan_out", "fan_in", "repeat")


def test_an_axis_has_the_role_that_its_use_before_and_after_gives_it():
    structure = Structure("n m i -> m o n", "i m k", "o k m", n=2, m=3, i=5, k=7, o=11)
    first, second = structure.cores
    assert [getattr(first, f"{role}_axes") for role in ROLES] == [("m",), ("k",), ("i",), ("n",)]
    assert [getattr(first, role) for role in ROLES] == [3, 7, 5, 2]
    assert [getattr(second, f"{role}_axes") for role in ROLES] == [("m",), ("o",), ("k",), ("n",)]
    assert (first.shape, second.shape) == ((3, 7, 5), (3, 11, 7))
    assert (structure.in_features, structure.out_features) == (30, 66)
    assert (structure.params, structure.flops) == (
        3 * 7 * 5 + 3 * 11 * 7,
        2 * 2 * (3 * 7 * 5 + 3 * 11 * 7),
    )


@given(drawn())
def test_derived_roles_are_the_drawn_ones(case: Drawn):
    size = {
        role: [prod(case.sizes[axis] for axis in core[role]) for core in case.cores]
        for role in ROLES
    }
    for n, (core, expected) in enumerate(zip(case.structure.cores, case.cores, strict=True)):
        assert [getattr(core, role) for role in ROLES] == [size[role][n] for role in ROLES]
        assert (core.batch_axes, core.fan_out_axes, core.fan_in_axes) == tuple(
            expected[role] for role in ROLES[:3]
        )
        assert sorted(core.repeat_axes) == sorted(expected["repeat"])
    blocks = [
        b * m * n for b, m, n in zip(size["batch"], size["fan_out"], size["fan_in"], strict=True)
    ]
    assert case.structure.params == sum(blocks)
    assert case.structure.flops == sum(
        2 * block * repeat for block, repeat in zip(blocks, size["repeat"], strict=True)
    )
    assert case.structure.in_features == prod(case.sizes[axis] for axis in case.inputs)
    assert case.structure.out_features == prod(case.sizes[axis] for axis in case.outputs)


d = 1024


@pytest.mark.parametrize(
    ("family", "params", "flops"),
    [
        (Dense(), d**2, 2 * d**2),
        (LowRank(rank=8), 2 * 8 * d, 4 * 8 * d),
        (BlockDiagonal(blocks=4), d**2 / 4, 2 * d**2 / 4),
        (Kronecker(), 2 * d, 4 * d**1.5),
        (TT(rank=8), 2 * 8 * d, 4 * 8 * d**1.5),
        (BTT(rank=8), 2 * 8 * d**1.5, 4 * 8 * d**1.5),
        (Monarch(blocks=4), 2 * d**2 / 4, 4 * d**2 / 4),
        (Monarch(blocks=64), 2 * d**2 / 64, 4 * d**2 / 64),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_parameters_and_flops_of_a_square_layer_are_the_formulas_of_the_table(
    family, params, flops
):
    structure = family.structure(d, d)
    assert (structure.params, structure.flops) == (params, flops)


@pytest.mark.parametrize(
    ("strings", "sizes", "message"),
    [
        (("i -> o", "o i"), {"i": 2}, "axis 'o' has no size: pass o=<size>"),
        (
            ("i -> o", "o i"),
            {"i": 2, "o": 3, "k": 4},
            "k=4: no core and no side of the signature has an axis 'k'",
        ),
        (("i j -> o", "o i"), {"i": 2, "j": 2, "o": 3}, "axis 'j' is never consumed"),
        (("i -> o", "o k i"), {"i": 2, "k": 2, "o": 3}, "axis 'k' is never consumed"),
        (("i -> o", "r i", "o s"), {"i": 2, "r": 2, "o": 3, "s": 2}, "axis 'r' is never consumed"),
        (
            ("i -> o p", "o i"),
            {"i": 2, "o": 3, "p": 2},
            "axis 'p' of the output 'o p' is never produced",
        ),
        (("i i -> o", "o i"), {"i": 2, "o": 3}, "signature: axis 'i' appears more than once"),
        (("i -> o o", "o i"), {"i": 2, "o": 3}, "signature: axis 'o' appears more than once"),
        (
            ("i -> o", "r i", "o r r"),
            {"i": 2, "o": 3, "r": 2},
            "core 2: axis 'r' appears more than once",
        ),
        (("i -> o", "o (i)"), {"i": 2, "o": 3}, r"core 1: '\(i\)' is not an axis name"),
        (("1 -> o", "o 1"), {"o": 3}, "signature: '1' is not an axis name"),
        (("_i -> o", "o _i"), {"_i": 2, "o": 3}, "'_i' is not an axis name"),
        (("i_ -> o", "o i_"), {"i_": 2, "o": 3}, "'i_' is not an axis name"),
        (("... -> o", "o"), {"o": 3}, "'...' is not an axis name"),
        (("ä -> o", "o ä"), {"ä": 2, "o": 3}, "'ä' is not an axis name"),
        (("tokens -> o", "o tokens"), {"tokens": 2, "o": 3}, "the axis name 'tokens' is reserved"),
        (
            ("between -> o", "o between"),
            {"o": 3},
            "signature: the axis name 'between' is reserved; take another",
        ),
        (
            ("i -> o", "o i"),
            {"i": 2, "o": 3, "between": "silu"},
            "between='silu' needs two cores or more.* there is one, 'o i'",
        ),
        (("i -> o",), {"i": 2, "o": 3}, "needs at least one core"),
        (("i o", "o i"), {"i": 2, "o": 3}, "must read 'axes of x -> axes of y'"),
        (("i -> r -> o", "o i"), {"i": 2, "o": 3}, "must read 'axes of x -> axes of y'"),
    ],
)
def test_a_malformed_structure_is_refused_by_name(strings, sizes, message):
    with pytest.raises(ValueError, match=message):
        Structure(*strings, **sizes)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_a_size_that_is_no_positive_integer_is_refused(size):
    error = ValueError if type(size) is int else TypeError
    with pytest.raises(error, match=f"i={size!r}: the size of an axis is an integer of at least 1"):
        Structure("i -> o", "o i", i=size, o=3)


@pytest.mark.parametrize(
    "name", ["tensor", "pattern", "self", "cls", "axis", "in", "lambda", "x", "i1", "d_model"]
)
def test_every_axis_name_that_is_accepted_can_be_multiplied_by(name):
    try:
        structure = Structure(f"{name} -> o", f"o {name}", **{name: 3, "o": 2})
    except ValueError:
        return
    core, x = torch.randn(1, 2, 3), torch.randn(4, 3)
    torch.testing.assert_close(apply(structure, [core], x), x @ core[0].T)
    torch.testing.assert_close(to_dense(structure, [core]), core[0])


@given(structures(activated=True))
def test_a_structure_survives_json_pickle_deepcopy_and_its_own_repr(structure: Structure):
    copies = [
        Structure.from_dict(json.loads(json.dumps(structure.to_dict()))),
        pickle.loads(pickle.dumps(structure)),
        copy.copy(structure),
        copy.deepcopy(structure),
        *([eval(repr(structure))] if structure.sizes else []),
    ]
    for other in copies:
        assert other == structure
        assert hash(other) == hash(structure)
        assert (other.cores, other.between) == (structure.cores, structure.between)
        assert other.program == structure.program


def test_structures_are_equal_when_what_they_are_made_of_is():
    structure = Structure("i -> o", "r i", "o r", i=2, o=3, r=1)
    assert structure == Structure(" i->o ", " r  i ", "o r", r=1, o=3, i=2)
    different = [
        Structure("i -> o", "r i", "o r", i=2, o=3, r=2),
        Structure("i -> o", "i r", "o r", i=2, o=3, r=1),
        Structure("i -> o", "o i", i=2, o=3),
        structure.activate("silu"),
        structure.to_dict(),
    ]
    assert all(structure != other for other in different)
    assert len({structure, *different[:4]}) == 5
    assert structure.activate("silu").activate(None) == structure
    assert "between" not in structure.to_dict()  # which older versions read


def leaves(value):
    """What nested tuples hold in the end."""
    return (
        [leaf for each in value for leaf in leaves(each)] if isinstance(value, tuple) else [value]
    )


@given(structures())
def test_nothing_that_a_structure_is_multiplied_by_is_text(structure: Structure):
    program = structure.program.fit(1, 1)
    assert {type(leaf) for leaf in leaves((program, structure.matrix))} == {int}
    for name in ("signature", "subscripts", "inputs", "outputs", "sizes"):
        structure.__dict__[name] = None  # of a structure that nobody else has
    x = torch.randn(2, structure.in_features, dtype=torch.float64)
    cores = [
        torch.randn(step.batch, step.fan_out, step.fan_in, dtype=torch.float64)
        for step in structure.program.steps
    ]
    with FlopCounterMode(display=False) as counter:
        y = product.define(Affine(structure.program, cores), x)
    matrix = to_dense(structure, cores)
    torch.testing.assert_close(y, x @ matrix.mT)
    assert counter.get_total_flops() == 2 * structure.flops


def test_plain_is_a_chain_of_matrices():
    plain = [LowRank(rank=2), Dense()]
    for family in (
        *plain,
        LowRank(rank=2).activate(),
        BTT(rank=1),
        Kronecker(),
        Monarch(blocks=2),
        TT(rank=2),
        BlockDiagonal(blocks=2),
    ):
        assert family.structure(12, 12).plain == (family in plain), family
    sizes = {"i": 6, "o": 4, "r": 2, "s": 3}
    assert Structure("i -> o", "r s i", "o r s", **sizes).plain
    assert not Structure("i -> o", "r s i", "o s r", **sizes).plain
    assert not Structure("i j -> o", "r j i", "o r", i=6, j=2, o=4, r=2).plain


def test_the_activation_is_divided_by_its_rms_on_gaussian_numbers():
    assert pytest.approx(silu_rms(), rel=1e-14, abs=0) == product.SILU_RMS


def build_with_axes(number, shared):
    """A structure with so many axes, shared by x and y (where they count twice) or by neither."""
    axes = [f"a{n}" for n in range(number // 2 if shared else number - 2)]
    names = " ".join(axes)
    strings = (f"{names} -> {names}", names) if shared else ("i -> o", f"{names} i", f"o {names}")
    return Structure(*strings, **dict.fromkeys(axes if shared else [*axes, "i", "o"], 1))


@pytest.mark.parametrize(("shared", "numbers"), [(False, (53, 40_000)), (True, (54, 40_000))])
def test_a_structure_with_more_axes_than_einsum_has_letters_is_refused_at_once(shared, numbers):
    structure = build_with_axes(52, shared)
    assert to_dense(structure, [torch.ones(core.shape) for core in structure.cores]).shape == (1, 1)
    for number in numbers:
        with pytest.raises(ValueError, match=f"^{number} axes.* at most 52"):
            build_with_axes(number, shared)


def test_many_cores_are_derived_one_by_one():
    structure = Structure("i -> o", *["i"] * 4_000, "o i", i=2, o=3)
    assert [core.shape for core in structure.cores[-2:]] == [(2, 1, 1), (1, 3, 2)]
    assert structure.params == 4_000 * 2 + 6


# ---- what users write at first -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strings", "sizes", "message"),
    [
        (("bi,io->bo",), {"b": 1, "i": 2, "o": 3}, "axes are separated by spaces"),
        (("bi,io -> bo", "o i"), {"b": 1, "i": 2, "o": 3}, "'bi,io' has a comma; axes are sep"),
        (("i -> o", "o,i"), {"i": 2, "o": 3}, "core 1: 'o,i' has a comma"),
        (("bi -> bo", "b i o"), {"b": 1, "i": 2, "o": 3}, "axis 'bi' has no size.* write 'b i'"),
    ],
)
def test_the_syntax_of_torch_einsum_is_answered_by_this_one(strings, sizes, message):
    with pytest.raises(ValueError, match=message):
        Structure(*strings, **sizes)


@pytest.mark.parametrize(
    "write",
    [
        lambda: Structure("i -> o", "o i + o r", "r i", i=4, o=4, r=2),
        lambda: Structure("i -> o", "o i", "+", "r i", i=4, o=4, r=2),
    ],
)
def test_a_sum_in_a_text_is_refused_with_what_to_do(write):
    with pytest.raises(ValueError, match=r"\+.*cannot be a sum; add the outputs of two layers"):
        write()


def test_a_sum_of_structures_is_refused_with_what_to_do_and_other_operands_are_not():
    family, structure = LowRank(rank=4), Structure("i -> o", "o i", i=2, o=3)
    for left, right in ((family, BTT()), (family, structure), (structure, family)):
        with pytest.raises(TypeError, match=r"cannot be a sum; add the outputs of two layers"):
            left + right
    with pytest.raises(TypeError, match="cannot be a sum"):
        structure + structure

    class Knows:
        def __radd__(self, other):
            return "known"

    assert family + Knows() == structure + Knows() == "known"
    with pytest.raises(TypeError, match="unsupported operand"):
        family + 1


def test_sizes_may_be_numpy_integers_and_become_pythons():
    sizes = {"i": np.int64(4), "o": np.int32(3)}
    structure = Structure("i -> o", "o i", **sizes)
    assert structure == Structure("i -> o", "o i", i=4, o=3)
    assert [type(size) for size in structure.sizes.values()] == [int, int]


BLAST_SIZES = {"i": 4, "j": 4, "p": 32, "q": 32, "r": 16}
BLAST_CORES = "j r q", "r i j", "i p r"


def test_a_costly_order_of_the_cores_is_named_with_the_cheapest_one():
    costly = Structure("j q -> i p", *reversed(BLAST_CORES), **BLAST_SIZES)
    cheap = Structure("j q -> i p", *BLAST_CORES, **BLAST_SIZES)
    with pytest.warns(UserWarning, match="times as 'j r q', 'r i j', 'i p r'") as caught:
        layer = StructuredLinear(128, 128, costly)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert f"{costly.flops / (2 * 128 * 128):.1f} times dense's FLOPs" in str(caught[0].message)
    assert f" {cheap.flops / (2 * 128 * 128):.2f} times as" in str(caught[0].message)
    by_names = [
        core.detach().view(sizes)
        for core, sizes in zip(layer.cores, costly.matrix.shapes, strict=True)
    ]
    letters = [" ".join(core.axes).replace(" ", "") for core in costly.cores]
    dense = torch.einsum(f"{','.join(letters)}->ipjq", *by_names).reshape(128, 128)
    torch.testing.assert_close(layer.to_dense(), dense)


def test_orders_that_cost_little_or_have_an_activation_are_not_warned_of():
    StructuredLinear(128, 128, Structure("j q -> i p", *BLAST_CORES, **BLAST_SIZES))
    StructuredLinear(64, 64, LowRank(rank=64))  # twice dense's FLOPs in either order
    costly = Structure("j q -> i p", *reversed(BLAST_CORES), **BLAST_SIZES)
    StructuredLinear(128, 128, costly.activate())  # another order is another function
