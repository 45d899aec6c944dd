"""How the API reference reads the docstrings: what the house writes, as Google's style has it.

A griffe extension, named in mkdocs.yml. Doctests become blocks of code; `a, b: text` under Args or
Attributes is an entry for each of the names; `#: text` after an attribute is its docstring;
"Source:" is a paragraph. The attributes of a class are one table, and functions come before
classes.
"""

import re
from typing import Any

import griffe

GROUP = re.compile(r"(?P<indent> +)(?P<names>\w+(?:, \w+)+): ")
HEADING = re.compile(r"(?P<indent> *)(Args|Attributes|Raises|Returns|Yields|Warns):$")
SOURCE = re.compile(r" *Sources?: ")


class Docstrings(griffe.Extension):
    """Changes the docstrings of a package once all of it is read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        visit(pkg)


def visit(parent: griffe.Object) -> None:
    """Every object below `parent`, and it."""
    if parent.docstring is not None:
        parent.docstring.value = rewrite(parent.docstring.value)
    if isinstance(parent, griffe.Module) and parent.exports is not None:
        names = map(str, parent.exports)
        parent.exports = sorted(names, key=lambda name: not parent[name].is_function)
    for member in parent.members.values():
        if isinstance(member, griffe.Alias):
            continue
        if isinstance(member, griffe.Attribute) and member.docstring is None:
            comment = re.search(r"#: (.*)$", "\n".join(member.lines), re.MULTILINE)
            if comment is not None:
                member.docstring = griffe.Docstring(comment[1], parent=member)
        visit(member)
    if isinstance(parent, griffe.Class):
        tabulate(parent)


def tabulate(parent: griffe.Class) -> None:
    """Complete the section of attributes in the docstring of a class, which is shown as a table.

    A field of a dataclass about which nothing is said stands in the signature alone.
    """
    text, heading = parent.docstring.value if parent.docstring else "", "Attributes:\n"
    missing = ""
    for name, member in parent.members.items():
        known = name.startswith("_") or re.search(rf"^    {name}: ", text, re.MULTILINE)
        if known or not isinstance(member, griffe.Attribute):
            continue
        if member.docstring is not None:
            about = member.docstring.value.replace("\n", "\n        ")
        elif "dataclass" in parent.labels and "property" not in member.labels:
            continue
        else:
            about = f"`{member.value}`" if member.value is not None else ""
        missing += f"    {name}: {about}\n"
    if missing:
        before, _, after = (text if heading in text else f"{text}\n\n{heading}").partition(heading)
        parent.docstring = griffe.Docstring("", parent=parent, parser="google")
        parent.docstring.value = f"{before}{heading}{missing}{after}".strip("\n")


def rewrite(text: str) -> str:
    """A docstring of the house as Google's style has it.

    >>> rewrite("Adds.\\n\\nArgs:\\n    a, b: numbers.\\n")
    'Adds.\\n\\nArgs:\\n    a: numbers.\\n    b: numbers.\\n'
    """
    return "\n\n".join(rewrite_paragraph(paragraph) for paragraph in text.split("\n\n"))


def rewrite_paragraph(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if lines[0].lstrip().startswith(">>> "):
        indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        return "\n".join([f"{indent}```pycon", *lines, f"{indent}```"])
    source = next((n for n, line in enumerate(lines) if SOURCE.match(line)), None)
    if source is not None:  # else its second line makes it a section
        cited = " ".join(line.strip() for line in lines[source:])
        lines = [*lines[:source], *([""] if source else []), cited]
    if HEADING.match(lines[0]):
        return "\n".join(line for entry in split_entries(lines) for line in entry)
    return "\n".join(lines)


def split_entries(lines: list[str]) -> list[list[str]]:
    """The heading of a section and its entries; one that names several is one for each."""
    entries: list[list[str]] = []
    indent = len(lines[0]) - len(lines[0].lstrip()) + 4
    for line in lines:
        if entries and line.startswith(" " * (indent + 1)):
            entries[-1].append(line)
        else:
            entries.append([line])
    split = list[list[str]]()
    for first, *rest in entries:
        group = GROUP.match(first)
        names = group["names"].split(", ") if group else []
        text = first[group.end() :] if group else ""
        split += [[f"{' ' * indent}{name}: {text}", *rest] for name in names] or [[first, *rest]]
    return split
