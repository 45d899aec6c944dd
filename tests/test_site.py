"""docs/ and the docstrings as a site: built strictly, complete, and without another host."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import structlin
from structlin import duality, modular, optim, parallel, scaling, stability

for package in ("material", "mkdocs_jupyter", "mkdocstrings", "mike"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[1]
PUBLIC = [structlin, optim, parallel, modular, stability, scaling, duality]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_has_every_public_name_with_its_example_as_code(site):
    pages = "".join(page.read_text() for page in site.glob("reference/*.html"))
    for module in PUBLIC:
        for name in module.__all__:
            full = f"{module.__name__}.{name}"
            submodule = f'id="{full}.' in pages
            assert f'id="{full}"' in pages or submodule, full
    assert 'id="structlin.hf.declare"' in pages
    assert pages.count('<span class="gp">') > 60
    for page in site.rglob("*.html"):
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        assert not re.findall(r"&gt;&gt;&gt;|```", prose), page


def test_summaries_are_whole_sentences_and_returns_is_one_row(site):
    summaries, returns = [], []
    for page in site.glob("reference/*.html"):
        rows = re.findall(r'<tr class="doc-section-item">(.*?)</tr>', page.read_text(), re.DOTALL)
        linked = [row for row in rows if '<code><a class="autorefs' in row]
        summaries += [re.findall(r"<p>(.*?)</p>", row, re.DOTALL) for row in linked]
        tables = re.findall(r"Returns:</span>.*?</table>", page.read_text(), re.DOTALL)
        returns += [table.count('<tr class="doc-section-item"') for table in tables]
    texts = [text[0] for text in summaries if text]
    assert len(texts) > 60
    assert not [text for text in texts if not text.endswith((".", "?", ".</a>"))]
    assert len(returns) > 10
    assert set(returns) == {1}


def test_the_header_leads_to_the_repository_and_asks_it_for_nothing(site):
    header = re.findall(r"<header.*?</header>", (site / "index.html").read_text(), re.DOTALL)[0]
    link = re.findall(r'<a href="https://github.com/[^>]*class="md-source"[^>]*>', header)
    assert len(link) == 1
    assert "data-md-component" not in link[0]  # by which material's script fetches its stars


def test_links_lead_to_files_of_the_site_and_nothing_comes_from_another_host(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"([^\"]+)\"", text)
        assert not [url for url in fetched if re.match(r"(https?:)?//", url)], page
        links = {*re.findall(r"<(?:a|img)\b[^>]*(?:src|href)=\"([^\":#?]+)[\"#?]", text)}
        here = [link for link in links if not link.startswith("/") and page.name != "404.html"]
        assert not [link for link in here if not (page.parent / unquote(link)).exists()], page
