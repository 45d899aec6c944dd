"""Files that were cut anywhere, or in which somebody has changed a field."""

import copy
import json
import random

import pytest
import torch

pytest.importorskip("safetensors")

from structlin import load, save
from tests.faults.common import FACTOR, FILE, build_dense, build_filled, forge_file, split_file
from tests.models import snapshot

CUTS = 100 * FACTOR
FIELDS = 300 * FACTOR
DELETED = object()
VALUES = [None, True, 0, -1, 10**30, 2.5, "", "x", [], ["x"], {}, {"x": 1}, float("nan"), "\ud800"]


@pytest.fixture
def file(tmp_path):
    save(build_filled(0.5), tmp_path)
    return tmp_path / FILE


def refuse(model, file) -> bool:
    """Whether `load` refuses the file with the error that it promises, the model as it was."""
    before = snapshot(model)
    try:
        load(model, file.parent)
    except ValueError:
        assert snapshot(model) == before
        return True
    return False


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
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in items:
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
        for new in [DELETED, *VALUES]
    ]
    refused = 0
    for part, path, new in random.Random(0).sample(changes, min(FIELDS, len(changes))):
        pair = (put(header, path, new), own) if part == "header" else (header, put(own, path, new))
        file.write_bytes(forge_file(*pair, numbers))
        model = build_dense()
        if refuse(model, file):
            refused += 1
        else:
            assert torch.equal(model.eval()(x), expected), (path, new)
    print(f"{min(FIELDS, len(changes))} fields changed, {refused} of them refused")


@pytest.mark.parametrize("convert", [build_dense, lambda: build_filled(1.0)])
def test_a_sigma_that_this_version_does_not_give_is_refused(file, convert):
    header, own, numbers = split_file(file.read_bytes())
    own["modules"]["0"]["sigma"][0] *= 1.5
    file.write_bytes(forge_file(header, own, numbers))
    with pytest.raises(ValueError, match=r"'0': sigma=.* in the model, .* in the file"):
        load(convert(), file.parent)


def test_a_forged_file_is_what_the_library_writes(file):
    forged = forge_file(*split_file(file.read_bytes()))
    assert split_file(forged) == split_file(file.read_bytes())


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


def nest(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


AXES = [f"a{n}" for n in range(20_000)]
HEAVY = {
    "nested": nest(900),  # what json still reads, and what repr and comparisons fall over
    "long": "x" * 1_000_000,
    "axes": " ".join(AXES),
    "equal axes": "i " * 20_000,
    "sides": f"{' '.join(AXES)} -> {' '.join(AXES)}",
    "cores": ["i"] * 20_000,
    "sizes": dict.fromkeys(AXES, 1),
    "number": 10**4000,
}


@pytest.mark.parametrize("value", HEAVY.values(), ids=HEAVY)
def test_a_heavy_field_is_refused_with_one_short_error_or_changes_no_number(value, file):
    header, own, numbers = split_file(file.read_bytes())
    x = torch.randn(5, 16)
    expected = load(build_dense(), file.parent).eval()(x)
    for path in list_places(own["modules"]["0"]):
        changed = put(own, ("modules", "0", *path), value)
        file.write_bytes(forge_file(header, changed, numbers))
        model = build_dense()
        if isinstance(value, str) and path == ("label",):  # any text
            assert torch.equal(load(model, file.parent).eval()(x), expected)
            continue
        with pytest.raises(ValueError, match="model differs from what was saved") as error:
            load(model, file.parent)
        assert len(str(error.value)) < 1000, path
