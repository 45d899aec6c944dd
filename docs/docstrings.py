"""What griffe does not read in the house's docstrings: bare doctests, long sources, `#:` comments.

A griffe extension, named in mkdocs.yml.
"""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Changes the docstrings of a package once all of it is read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        visit(pkg)


def visit(parent: griffe.Object) -> None:
    """Every object below `parent`, and it."""
    if parent.docstring is not None:
        parent.docstring.value = rewrite(parent.docstring.value)
    for member in parent.members.values():
        if isinstance(member, griffe.Attribute) and member.docstring is None:
            for comment in re.findall(r"(?m)#: (.*)$", "\n".join(member.lines)):
                member.docstring = griffe.Docstring(comment, parent=member)
        if not isinstance(member, griffe.Alias):
            visit(member)


def rewrite(text: str) -> str:
    """The docstring with its doctests as blocks of code, and each source in one line.

    The first paragraph is one line too: tables of a module's names show the first line alone.
    """
    first, blank, others = text.partition("\n\n")
    if ">>>" not in first and not re.search(r"(?m)^\w+:$", first):
        text = " ".join(first.split()) + blank + others
    text = re.sub(r"(?m)^( *)(>>> (?:.+\n?)+)", r"\1```pycon\n\1\2\n\1```\n", text)
    return re.sub(r"(?m)^( *)(Sources?: .*)\n +(?=\S)", r"\n\1\2 ", text)
