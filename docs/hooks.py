"""Pages from outside docs/: the README first, the project's papers, the notebooks, kept results.

A hook of mkdocs. Links are written for a reader of the repository and are turned here: `docs/x` on
the README and `../x` on a page name the same file of the site.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAPERS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
OUTSIDE = {"README.md": "index.md"} | {name: name for name in PAPERS}
SITE = OUTSIDE | {"structlin/modular": "reference/modular.md"}  # where a link leads on the site
NOTEBOOKS = "examples/notebooks/"  # a link of docs/ leads there


def on_files(files: Files, *, config: Any) -> Files:
    """The files of the site and those from outside docs/."""
    kept = [str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/results/**/*.*")]
    for source, target in [*OUTSIDE.items(), *zip(kept, kept, strict=True)]:
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with its links as the site needs them; what is typed is told from its output."""
    up = "../" * (page.file.src_uri.count("/") + 1)

    def turn(match: re.Match[str]) -> str:
        target = match[1].removeprefix("docs/" if page.file.src_uri == "index.md" else "")
        target = target.removeprefix("../") if target.startswith(up) else target
        target = target.replace(NOTEBOOKS, "notebooks/")
        path, mark, heading = target.partition("#")
        return f"]({SITE.get(path, path)}{mark}{heading})"

    markdown = re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)
    return re.sub(r"\]\((?!https://)([^)\s]+)\)", turn, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The page of a notebook with its links, which come from the repository too."""
    return re.sub(r'href="\.\./\.\./(?:docs/)?(\w+)\.md', r'href="../\1.html', html)
