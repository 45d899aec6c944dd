"""Files that were cut anywhere, or in which somebody has changed a field."""

import copy
import json
import random
from functools import reduce

import pytest
import torch

pytest.importorskip("safetensors")

from structlin import load, save
from tests.faults.common import FILE, build_dense, build_filled, forge_file, split_file
from tests.models import snapshot

CUTS, FIELDS = 100, 400
DELETED = object()
AXES = " ".join(f"a{n}" for n in range(20_000))
LIGHT = [None, True, 0, -1, 10**30, 2.5, "", "x", [], ["x"], {}, {"x": 1}, float("nan"), "\ud800"]
HEAVY = [10**4000, AXES, f"{AXES} -> {AXES}", ["i"] * 20_000, dict.fromkeys(AXES.split(), 1)]
HEAVY += [reduce(lambda inner, _: [inner], range(900), 1)]  # what json still reads


@pytest.fixture
def file(tmp_path):
    save(build_filled(0.5), tmp_path)
    return tmp_path / FILE


def refuse(model, file) -> bool:
    """Whether `load` refuses the file with the error that it promises, the model as it was."""
    before, says = snapshot(model), ""
    try:
        load(model, file.parent)
    except ValueError as error:
        says = str(error)
    assert not says or snapshot(model) == before
    assert len(says) < 1000
    return bool(says)


def test_a_file_that_was_cut_anywhere_is_refused(file):
    data, choose = file.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    for n in range(CUTS):
        size = choose.randrange(header if n % 2 else len(data))  # every other one in the header
        file.write_bytes(data[:size])
        assert refuse(build_dense(), file), size
    file.write_bytes(data)
    assert not refuse(build_dense(), file)


def list_places(value, path=()):
    """The way to every field of plain data."""
    if not isinstance(value, dict | list):
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        yield from list_places(part, (*path, key))


def put(value, path, new):
    changed = copy.deepcopy(value)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if new is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return changed


def test_a_field_that_changed_is_refused_or_changes_no_number(file):
    header, own, numbers = split_file(file.read_bytes())
    x = torch.randn(5, 16)
    expected = load(build_dense(), file.parent).eval()(x)
    changes = [
        (part, path, new)
        for part, data in (("header", header), ("own", own))
        for path in list_places(data)
        for new in [DELETED, *LIGHT, *HEAVY]
    ]
    for part, path, new in random.Random(0).sample(changes, min(FIELDS, len(changes))):
        pair = (put(header, path, new), own) if part == "header" else (header, put(own, path, new))
        file.write_bytes(forge_file(*pair, numbers))
        model = build_dense()
        same = refuse(model, file) or torch.equal(model.eval()(x), expected)
        assert same, (path, repr(new)[:50])


@pytest.mark.parametrize("convert", [build_dense, lambda: build_filled(1.0)])
def test_a_sigma_that_this_version_does_not_give_is_refused(file, convert):
    header, own, numbers = split_file(file.read_bytes())
    own["modules"]["0"]["sigma"][0] *= 1.5
    file.write_bytes(forge_file(header, own, numbers))
    with pytest.raises(ValueError, match=r"'0': sigma=.* in the model, .* in the file"):
        load(convert(), file.parent)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "null", '"x"', '{"version":1,"modules":[]}'],
)
def test_json_that_nobody_meant_is_refused(text, file):
    header, _, numbers = split_file(file.read_bytes())
    whole = json.dumps(
        {"__metadata__": {"structlin": text}, **header}, separators=(",", ":")
    ).encode()
    file.write_bytes(len(whole).to_bytes(8, "little") + whole + numbers)
    assert refuse(build_dense(), file)
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + numbers)
    assert refuse(build_dense(), file)
