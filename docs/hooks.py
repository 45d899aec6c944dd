"""What mkdocs does beyond mkdocs.yml: pages and results from outside docs/, and colours for code.

README.md is the first page; CONTRIBUTING.md, CHANGELOG.md, SECURITY.md, LICENSE and what is under
benchmarks/results keep their places. The notebooks of examples/notebooks become pages. Links are
written for a reader of the repository and are turned here: `docs/x` on the README and `../x` on a
page name the same file of the site.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md"} | {
    name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
}
NOTEBOOKS = sorted(ROOT.glob("examples/notebooks/*.ipynb"))
CODE = {"structlin/modular": "reference/modular.md"} | {  # links to code, on the site
    str(path.relative_to(ROOT)): f"notebooks/{path.stem}.md" for path in NOTEBOOKS
}
CSS = """
img { max-width: 100%; }
table { display: block; overflow-x: auto; }
td, th { padding: 0.2em 0.6em; }
td:first-child { min-width: 7rem; } /* of text, where a page is narrow */
[role=main] { overflow-wrap: break-word; }
.bs-sidebar .nav { flex-wrap: nowrap; overflow-wrap: anywhere; } /* no wider than its box */
.bs-sidebar .navbar-collapse { max-height: calc(100vh - 6rem); overflow-y: auto; }
.output { border-left: 3px solid #3fa0dd; } /* of a notebook's cell */
.highlight { position: relative; }
.highlight pre { padding: 0.5rem; }
.copy { position: absolute; top: 0.4rem; right: 0.4rem; padding: 0 0.4rem; font-size: 0.75rem;
  color: var(--bs-secondary-color); background: var(--bs-body-bg); border: 1px solid currentcolor;
  border-radius: 0.25rem; }
.copy:hover, .copy:focus { color: var(--bs-body-color); }
.navbar > .container { max-width: 90rem; } /* one row of entries on usual screens */
#version { margin-right: 1rem; font-size: 0.8rem; white-space: nowrap; }
.gallery ul { display: grid; gap: 1.5rem; list-style: none; padding: 0;
  grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr)); }
.gallery img { display: block; width: 100%; height: 14rem; object-fit: contain; margin: 0 0 0.5rem;
  background: #fff; }
[data-bs-theme=dark] {
  --doc-symbol-class-fg-color: #79c0ff; --doc-symbol-class-bg-color: #79c0ff1a;
  --doc-symbol-function-fg-color: #d2a8ff; --doc-symbol-function-bg-color: #d2a8ff1a;
  --doc-symbol-method-fg-color: #d2a8ff; --doc-symbol-method-bg-color: #d2a8ff1a;
}
[data-bs-theme=dark] img { background: #fff; padding: 0.5rem; border-radius: 0.5rem; }
"""
DARK = "[data-bs-theme=dark] .highlight"  # code where the reader has the dark scheme


def on_files(files: Files, *, config: Any) -> Files:
    """The files of the site and those from outside docs/."""
    results = (ROOT / "benchmarks" / "results").rglob("*.*")
    outside = OUTSIDE | {
        str(path.relative_to(ROOT)): str(path.relative_to(ROOT)) for path in results
    }
    for source, target in outside.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for path in NOTEBOOKS:
        for file in make_notebook(path, config):
            files.append(file)
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(DARK)
    style = "\n".join([CSS, light, dark])
    files.append(File.generated(config, "site.css", content=style))
    return files


def make_notebook(path: Path, config: Any) -> list[File]:
    """The page of a notebook, its pictures and the notebook itself, to download."""
    exporter = MarkdownExporter(template_file=str(ROOT / "docs/templates/notebook.md.j2"))
    names = {"unique_key": path.stem, "output_files_dir": path.stem}
    page, found = exporter.from_filename(str(path), names)
    title, rest = page.split("\n\n", 1)
    page = f"{title}\n\n[Download this notebook]({path.name})\n\n{rest}"
    page = page.replace("](../../docs/", "](../").replace("](../../", "](../")
    contents = {f"{path.stem}.md": page, path.name: path.read_text(encoding="utf-8")}
    return [
        File.generated(config, f"notebooks/{name}", content=content)
        for name, content in (contents | found["outputs"]).items()
    ]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with its links as the site needs them; what is typed is told from its output."""
    depth = page.file.src_uri.count("/")

    def turn(match: re.Match[str]) -> str:
        target = match[1]
        if page.file.src_uri == "index.md":
            target = target.removeprefix("docs/")
        elif target.startswith("../" * (depth + 1)):
            target = target.removeprefix("../")
        return f"]({CODE.get(target, target)})"

    markdown = re.sub(r"(?m)(?<=\d) -> (?=\d+\b.*\|)", "\u00a0\u2192\u00a0", markdown)  # unbroken
    markdown = re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)
    return re.sub(r"\]\((?!https://)([^)\s]+)\)", turn, markdown)


def on_post_build(*, config: Any) -> None:
    """The index of the search as a script, for a browser that shows the site from a disk."""
    folder = Path(config.site_dir) / "search"
    index = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))
    script = f"var searchIndex = {json.dumps(index)};\n"
    (folder / "search_index.js").write_text(script, encoding="utf-8")
