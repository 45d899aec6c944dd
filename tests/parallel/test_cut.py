"""A structure cut along an axis: the parts of all processes together are the whole einsum."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from structlin import BTT, TT, Family, LowRank, Monarch, Structure, StructuredLinear, save, to_dense
from structlin._model.parameters import parameters_of
from structlin._structure.cut import _find_obstacle, axis_of, cut
from structlin.parallel import store_as_declared_, store_outermost_
from tests.parallel.families import FAMILIES


def contract(structure, cores, x):
    """y by one torch.einsum over all cores."""
    number = {axis: n for n, axis in enumerate(structure.sizes)}

    def split(tensor, axes, leading=()):
        shape = [structure.sizes[axis] for axis in axes]
        return tensor.reshape(*leading, *shape), [number[axis] for axis in axes]

    tokens = len(number)
    operand, axes = split(x, structure.inputs, [len(x)])
    operands = [operand, [tokens, *axes]]
    for core, tensor in zip(structure.cores, cores, strict=True):
        operands += split(tensor, core.axes)
    result = [tokens, *(number[axis] for axis in structure.outputs)]
    return torch.einsum(*operands, result).reshape(len(x), -1)


def random_cores(structure):
    return [torch.randn(core.shape, dtype=torch.float64) for core in structure.cores]


def multiply_in_parts(found, cores, x):
    """y as so many processes make it, one after the other."""
    parts = found.parts
    pieces = [
        [core] * parts if dim is None else core.chunk(parts, dim)
        for core, dim in zip(cores, found.dims, strict=True)
    ]

    def apply(structure, start, stop, part, h):
        own = [pieces[n][part] for n in range(start, stop)]
        return h @ to_dense(structure, own).T

    ys = []
    for part in range(parts):
        h = x.chunk(parts, -1)[part] if found.cuts_x else x
        if found.head is not None:
            h = apply(found.head, 0, found.start, part, h)
        ys.append(apply(found.body, found.start, found.stop, part, h))
    if found.cuts_y:
        return torch.cat(ys, -1)
    y = sum(ys)
    if found.tail is not None:
        y = apply(found.tail, found.stop, len(cores), 0, y)
    return y


def dividing(structure):
    """Every cut of the structure in 2, 3 or 4 parts."""
    for axis in structure.sizes:
        for parts in (2, 3, 4):
            if not _find_obstacle(structure, axis, parts):
                yield cut(structure, axis, parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_all_processes_are_the_whole_einsum_along_every_axis(family):
    structure = FAMILIES[family]
    if isinstance(structure, Family):
        structure = structure.structure(64, 144)
    structure = structure.activate(None)
    found = list(dividing(structure))
    assert len(found) >= 2
    for each in found:
        cores = random_cores(each.structure)
        x = torch.randn(3, structure.in_features, dtype=torch.float64)
        expected = contract(each.structure, cores, x)
        torch.testing.assert_close(multiply_in_parts(each, cores, x), expected)


@given(st.data())
def test_the_parts_of_a_random_structure_are_the_whole_einsum(data):
    axes = "abcdef"
    inputs = data.draw(st.permutations("abc"))
    middle = data.draw(st.permutations(["a", "b", "d", "e"]))
    last = data.draw(st.permutations(["a", "d", "e", "f"]))
    first = data.draw(st.permutations(["c", "b", "d"]))
    outputs = data.draw(st.permutations(["a", "d", "f"]))
    sizes = {axis: data.draw(st.sampled_from([1, 2, 4])) for axis in axes}
    texts = [" ".join(text) for text in (first, middle, last)]
    structure = Structure(f"{' '.join(inputs)} -> {' '.join(outputs)}", *texts, **sizes)
    for found in dividing(structure):
        cores = random_cores(found.structure)
        x = torch.randn(3, structure.in_features, dtype=torch.float64)
        expected = contract(found.structure, cores, x)
        torch.testing.assert_close(multiply_in_parts(found, cores, x), expected)


def test_btt_is_cut_in_all_its_cores_both_ways_and_each_part_is_one_slice():
    for rank, cores in ((1, 2), (2, 2), (2, 3)):
        structure = BTT(rank=rank, cores=cores).structure(64, 64)
        for role in ("colwise", "rowwise"):
            found = cut(structure, axis_of(structure, role), 2)
            assert None not in found.dims
            assert found.head is found.tail is None
            for core, dim in zip(found.structure.cores, found.dims, strict=True):
                axes = (core.batch_axes, core.fan_out_axes, core.fan_in_axes)[dim]
                before = [found.structure.sizes[axis] for axis in axes[: axes.index(found.axis)]]
                assert set(before) <= {1}


def test_storing_an_axis_outermost_changes_no_matrix_and_renames_what_moves():
    for family in (BTT(rank=2), BTT(rank=2, cores=3), TT(rank=2), Monarch()):
        layer = StructuredLinear(64, 64, family)
        structure, before = layer.structure, copy.deepcopy(layer)
        x = torch.randn(3, 64)
        for axis in structure.sizes:
            store_outermost_(layer, axis)
            stored = zip(before.cores, layer.cores, layer.core_names, strict=True)
            for n, (old, new, name) in enumerate(stored):
                assert new.shape == old.shape
                assert name == (str(n) if torch.equal(old, new) else f"{n}_{axis}")
            torch.testing.assert_close(layer.to_dense(), before.to_dense())
            torch.testing.assert_close(layer(x), before(x))
            names = [name for name, _ in layer.named_parameters()]
            assert [info.name for info in parameters_of(layer)] == [*names[1:], "bias"]
            assert next(info.weight.core for info in parameters_of(layer)) == 0
        store_as_declared_(layer)
        assert layer.structure == structure
        assert layer.state_dict().keys() == before.state_dict().keys()
        assert all(map(torch.equal, layer.parameters(), before.parameters()))


def test_a_state_of_one_order_of_cores_is_refused_by_a_layer_of_the_other():
    layer = StructuredLinear(64, 64, BTT(rank=2))
    moved = store_outermost_(copy.deepcopy(layer), "i2")
    for source, taking in ((layer, moved), (moved, layer)):
        with pytest.raises(RuntimeError, match=r"structure\."):
            taking.load_state_dict(source.state_dict())
        with pytest.raises(RuntimeError, match=r"Missing key.*cores\.0"):  # metadata is lost
            taking.load_state_dict(dict(source.state_dict()))
    twin = copy.deepcopy(moved)
    twin.load_state_dict(moved.state_dict())
    moved.cores[0] = nn.Parameter(torch.zeros_like(moved.cores[0]))
    assert list(moved.state_dict()) == list(twin.state_dict())
    assert not moved(torch.ones(64)).sub(moved.bias).any()


def test_save_refuses_cores_in_another_order_before_it_writes(tmp_path):
    model = nn.Sequential(store_outermost_(StructuredLinear(64, 64, BTT(rank=2)), "i2"))
    with pytest.raises(ValueError, match=r"layer '0' stores its cores in another order.*declared_"):
        save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_sum_of_parts_is_made_before_an_activation_and_where_it_is_narrow():
    narrow, wide = (LowRank(rank=rank).structure(64, 48) for rank in (8, 48))
    assert cut(narrow, "i", 2).tail == Structure("r -> o", "o r", r=8, o=48)
    assert (
        cut(wide, "i", 2).tail is not None
    )  # no wider than y: the same message, less to sum later
    wide = Structure("i -> o", "r i", "o r", i=64, o=48, r=60)
    assert cut(wide, "i", 2).tail is None
    assert cut(wide.activate(), "i", 2).tail is not None


def test_an_axis_that_cannot_be_divided_is_refused_with_the_axes_that_can():
    structure = BTT(rank=2).structure(4096, 11008)  # 86 x 128
    with pytest.raises(ValueError, match=r"its size is 86, which is no multiple of 4; .* 'j1'"):
        cut(structure, "i2", 4)
    with pytest.raises(ValueError, match="it is not the outermost axis of y, so that its part"):
        cut(structure, "i1", 4)
    with pytest.raises(ValueError, match="none of its axes can be"):
        cut(structure, "i2", 5)
    with pytest.raises(ValueError, match=r"axis='k' is no axis of .*: it has 'i1', 'i2'"):
        cut(structure, "k", 2)
