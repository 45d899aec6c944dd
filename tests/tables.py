"""Tables of Markdown as tests read them."""


def read_table(markdown: str) -> list[list[str]]:
    """The cells of each line; the rule below the head is left out.

    >>> read_table("| | MB |\\n|---|--:|\\n| dense | 4 |")
    [['', 'MB'], ['dense', '4']]
    """
    head, _, *lines = markdown.splitlines()
    table = []
    for line in (head, *lines):
        cells = line.removeprefix("|").removesuffix("|").split("|")
        table.append([cell.strip() for cell in cells])
    return table
