"""docs/ and the docstrings as a site: built strictly, complete, and without another host."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import structlin
from structlin import duality, modular, optim, scaling, stability

pytest.importorskip("mkdocs")
griffe = pytest.importorskip("griffe")

ROOT = Path(__file__).parents[1]
PUBLIC = [structlin, optim, modular, stability, scaling, duality]


def load_docstrings():
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs/docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    pages = "".join(page.read_text() for page in site.glob("reference/*.html"))
    for module in PUBLIC:
        own = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        ]
        assert own
        for name in own:
            if isinstance(getattr(module, name), type(os)):
                continue  # it has a page of its own
            full = f"{module.__name__}.{name}"
            found = f'id="{full}"' in pages or f'id="{full}.{name}"' in pages
            assert found, full
    assert 'id="structlin.hf.declare"' in pages


@pytest.mark.slow
def test_the_site_takes_nothing_from_another_host(site):
    assert len([*site.rglob("*.html")]) > 15
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"([^\"]+)\"", text)
        assert fetched
        assert not [url for url in fetched if url.startswith(("http:", "https:", "//"))], page
    for style in site.rglob("*.css"):
        text = style.read_text()
        assert not re.findall(r"@import\s|url\([\"']?(?:https?:)?//", text), style


@pytest.mark.slow
def test_examples_of_docstrings_are_code_and_convert_has_its_arguments(site):
    text = (site / "reference/structlin.html").read_text()
    assert text.count('<span class="gp">') > 30
    start = text.index('id="structlin.convert"')
    convert = re.sub(r"<[^>]+>", "", text[start : text.index('id="structlin.divide"')])
    for argument in ("include", "overrides", "zero_init", "split"):
        assert f"{argument}:" in convert


@pytest.mark.slow
def test_every_page_is_rendered_whole(site):
    tags = {"a", "body", "button", "code", "div", "em", "footer", "form", "h1", "h2", "h3", "h4"}
    tags |= {"h5", "h6", "head", "hr", "html", "i", "img", "input", "kbd", "li", "link", "meta"}
    tags |= {"ol", "p", "pre", "script", "small", "span", "strong", "table", "tbody", "td", "th"}
    tags |= {"thead", "title", "tr", "ul"}
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'class="err"' not in text, page  # Pygments draws a red box around it
        unknown = {*re.findall(r"<([A-Za-z][^\s>/]*)", text)} - tags  # as <G, T> is, and unseen
        assert not unknown, page
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert not re.findall(r"&gt;&gt;&gt;|```", prose), page


@pytest.mark.slow
def test_functions_come_first_and_the_attributes_of_a_class_are_one_table(site):
    text = (site / "reference/structlin.html").read_text()
    symbols = re.findall(r"doc-symbol-heading doc-symbol-(\w+)", text)
    assert set(symbols) == {"attribute", "function", "class", "method"}
    assert symbols.index("class") > len(symbols) - symbols[::-1].index("function") - 1
    core = text[text.index('id="structlin.Core"') : text.index('id="structlin.Dense"')]
    assert len(re.findall("number of independent blocks", core)) == 1
    assert core.count("<table>") == 1


@pytest.mark.slow
def test_the_contents_column_is_no_wider_than_its_box(site):
    # The theme lets its columns of entries wrap, which makes each as wide as its longest text.
    assert ".bs-sidebar .nav { flex-wrap: nowrap;" in (site / "site.css").read_text()


@pytest.mark.slow
def test_a_reader_can_choose_the_dark_scheme_and_pictures_stay_on_white(site):
    style = (site / "site.css").read_text()
    assert "[data-bs-theme=dark] img { background: #fff;" in style
    assert "[data-bs-theme=dark] .highlight .k" in style  # keywords in code
    for page in ("index.html", "results/modular_norm.html"):
        text = (site / page).read_text()
        assert set(re.findall(r'data-bs-theme-value="(\w+)"', text)) == {"light", "dark", "auto"}


@pytest.mark.slow
def test_a_number_in_a_sentence_does_not_end_its_paragraph(site):
    assert "<!-- n:" in (site / "index.html").read_text()
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r"</p>\s*<!-- n:", text), page


@pytest.mark.slow
def test_a_notebook_is_a_page_with_its_outputs_and_pictures(site):
    for path in ROOT.glob("examples/notebooks/*.ipynb"):
        page = (site / f"notebooks/{path.stem}.html").read_text()
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        drawn = sum("image/png" in output.get("data", {}) for output in outputs)
        assert page.count('output highlight">') == len(outputs) - drawn > 5
        pictures = re.findall(rf'<img alt="[\w ,:\'-]{{20,}}" src="({path.stem}/[^"]+)"', page)
        assert len(pictures) == drawn > 0
        assert all((site / "notebooks" / each).stat().st_size > 1000 for each in pictures)
        assert f'href="{path.name}"' in page
        assert (site / "notebooks" / path.name).read_bytes() == path.read_bytes()


def test_the_examples_of_the_reader_of_docstrings_give_what_they_show():
    import doctest

    results = doctest.testmod(load_docstrings())
    assert results.attempted
    assert not results.failed


def test_groups_examples_and_sources_are_read_as_googles_style_has_them():
    text = (
        "One line.\n\nArgs:\n    x: one.\n    a, b: two,\n        on two lines.\n"
        "    c: three.\nSource: A,\n    and B.\n\n>>> 1\n1"
    )
    parsed = griffe.Docstring(load_docstrings().rewrite(text)).parse("google", warnings=False)
    kinds = [section.kind.value for section in parsed]
    assert kinds == ["text", "parameters", "text"]
    entries = {entry.name: entry.description for entry in parsed[1].value}
    assert list(entries) == ["x", "a", "b", "c"]
    assert entries["a"] == entries["b"] == "two,\non two lines."
    assert parsed[2].value == "Source: A, and B.\n\n```pycon\n>>> 1\n1\n```"


def test_comments_after_attributes_are_their_docstrings(tmp_path):
    (tmp_path / "package.py").write_text(
        "class Core:\n    batch: int  #: of blocks\n    other: int\n"
    )
    extensions = griffe.load_extensions(load_docstrings().Docstrings)
    core = griffe.load("package", search_paths=[tmp_path], extensions=extensions)["Core"]
    assert core["batch"].docstring.value == "of blocks"
    assert core["other"].docstring is None


def test_attributes_of_a_class_are_a_section_of_its_docstring(tmp_path):
    (tmp_path / "package.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass Core:\n"
        "    batch: int  #: of blocks\n    other: int\n"
        "    @property\n    def size(self) -> int:\n        return 1\n\n\n"
        'class Bond:\n    """One line.\n\n    Attributes:\n        b: known.\n    """\n'
        "    b = 1\n    c = 2\n    _d = 3\n"
    )
    extensions = griffe.load_extensions(load_docstrings().Docstrings)
    package = griffe.load("package", search_paths=[tmp_path], extensions=extensions)
    found = {}
    for name in ("Core", "Bond"):
        *_, section = package[name].docstring.parse("google", warnings=False)
        found[name] = {each.name: each.description for each in section.value}
    assert found == {
        "Core": {"batch": "of blocks", "size": ""},
        "Bond": {"b": "known.", "c": "`2`"},
    }
