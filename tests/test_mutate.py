"""The script that breaks the library: each mutant is the file with one thing changed."""

import ast
from collections import Counter

from tests.mutate import ROOT, choose_mutants, find_functions, find_mutants, judge

FILE = ROOT / "structlin" / "_widths.py"
MUTANTS = list(find_mutants(FILE))


def test_a_mutant_is_the_file_with_one_node_changed():
    source = FILE.read_text()
    nodes = Counter(type(node) for node in ast.walk(ast.parse(source)))
    for mutant in MUTANTS:
        changed = Counter(type(node) for node in ast.walk(ast.parse(mutant.source)))
        assert (nodes - changed).total() <= 2, mutant.name  # an operator, and what it made
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(source))
        before, after = source.splitlines(), mutant.source.splitlines()
        assert [*before[: mutant.line - 1]] == after[: mutant.line - 1]
        assert before[mutant.line - 1].strip() == mutant.text


def test_the_changes_are_those_of_the_table_and_errors_are_left_alone():
    changes = {(mutant.function, mutant.text, mutant.change) for mutant in MUTANTS}
    line = "return in_features // blocks, out_features // blocks"
    assert ("divide", line, "FloorDiv -> Mult") in changes
    assert ("factorise", "if even[-1] <= 4 * even[0]:", "LtE -> Lt") in changes
    line = "if rest and (not best or first + sum(rest) < sum(best)):"
    assert ("_most_even", line, "Not removed") in changes
    assert not any(mutant.text.startswith("raise") for mutant in MUTANTS)


def test_an_edit_elsewhere_leaves_the_choice_as_it_was():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    chosen = choose_mutants(MUTANTS, 10, 0)
    moved = [mutant._replace(line=mutant.line + 7, source="") for mutant in reversed(MUTANTS)]
    assert [mutant.name for mutant in choose_mutants(moved, 10, 0)] == [m.name for m in chosen]
    assert choose_mutants(MUTANTS, 10, 1) != chosen


def test_a_line_belongs_to_the_innermost_function():
    source = "class A:\n def f(self):\n  def g():\n   return 1\n  return g\nx = 2\n"
    assert find_functions(ast.parse(source)) == {2: "A.f", 3: "A.f.g", 4: "A.f.g", 5: "A.f"}


def test_no_result_is_a_hang_or_a_crash_and_no_failed_test():
    assert judge({"failed": "test"}) == ("caught", "test")
    assert judge({"running": "test", "exit": 1}) == ("timeout", "test")
    assert judge({"running": "test", "exit": -9}) == ("crash", "test")
    assert judge({"passed": 3}) == ("survived", "")
