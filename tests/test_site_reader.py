"""What a reader does on the site: see every plot, copy code, search from a disk, choose a version
and a colour scheme."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import structlin

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[1]
VERSION = structlin.__version__
NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium")


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gallery, versions = load("gallery"), load("versions")
PLOTS = {name: about for plots in gallery.PLOTS.values() for name, about in plots.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where versions lie side by side: this one, and an older one that has a page only."""
    folder = tmp_path_factory.mktemp("versions")
    (folder / "0.0.1").mkdir()
    (folder / "0.0.1/index.html").write_text("<title>old</title>")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder / VERSION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


# ---- the gallery ---------------------------------------------------------------------------------


def test_every_kept_plot_stands_in_the_gallery_or_is_left_out_with_a_reason():
    results = ROOT / "benchmarks/results"
    kept = {str(path.relative_to(results).with_suffix("")) for path in results.rglob("*.png")}
    assert len(kept) > 5
    assert PLOTS.keys() | gallery.LEFT_OUT.keys() == kept
    assert not PLOTS.keys() & gallery.LEFT_OUT.keys()
    assert all(gallery.LEFT_OUT.values())


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_has_one_short_sentence_of_its_own(name):
    sentence, _ = PLOTS[name]
    assert re.fullmatch(r"[A-Z][^.!?]*\.", sentence)
    assert len(sentence.split()) <= 18
    assert [other for other, _ in PLOTS.values()].count(sentence) == 1


@pytest.mark.slow
def test_the_gallery_shows_every_plot_with_a_link_to_the_heading_that_explains_it(folder):
    text = (folder / VERSION / "gallery.html").read_text()
    for name, (_, page) in PLOTS.items():
        source = f"benchmarks/results/{name}.png"
        assert f'src="{source}"' in text
        assert (folder / VERSION / source).exists()
        target, _, anchor = page.partition("#")
        target = target.replace(".md", ".html")
        assert f'href="{target}{"#" if anchor else ""}{anchor}"' in text
        assert not anchor or f'id="{anchor}"' in (folder / VERSION / target).read_text()


# ---- code ----------------------------------------------------------------------------------------

BLOCKS = {
    "pycon": (
        ">>> def f(x):\n...     if x:\n...         return 1\n...\n>>> f(1)  # >>> no prompt\n1\n"
        ">>> print('''a\n... b''')\na\nb\n",
        "def f(x):\n    if x:\n        return 1\n\nf(1)  # >>> no prompt\nprint('''a\nb''')\n",
    ),
    "console": (
        "$ cd a\n$ make \\\n    site\nBuilding $ 3\n$ ls\n",
        "cd a\nmake \\\n    site\nls\n",
    ),
    "bash": ("echo $HOME\n\n$ no prompt\n", "echo $HOME\n\n$ no prompt\n"),
    "python": ("x = 1\n\nprint(x)\n\n\n", "x = 1\n\nprint(x)\n"),
}


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("language", BLOCKS)
def test_a_click_copies_what_is_typed_without_prompts_and_output(language):
    text, typed = BLOCKS[language]
    call = f"require('./docs/site.js').findTyped({json.dumps(text)}, {json.dumps(language)})"
    command = [NODE, "-e", f"process.stdout.write({call})"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == typed


@pytest.mark.slow
def test_a_block_of_code_says_its_language(folder):
    text = (folder / VERSION / "index.html").read_text()
    assert {"language-pycon", "language-python", "language-bash"} <= {
        *re.findall(r'<div class="(language-\w+) highlight">', text)
    }
    assert (
        '<div class="language-console highlight">'
        in (folder / VERSION / "commands.html").read_text()
    )


# ---- the scheme of colours -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_page_has_what_the_themes_script_looks_for_lest_it_stop_before_its_menu_works(folder):
    script = (folder / VERSION / "js/darkmode.js").read_text()
    looked_for = set(re.findall(r"getElementById\('([\w-]+)'\)", script))
    assert looked_for
    for page in (folder / VERSION).rglob("*.html"):
        assert looked_for <= set(re.findall(r'id="([\w-]+)"', page.read_text())), page


# ---- search --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_index_of_the_search_is_a_script_too(folder):
    search = folder / VERSION / "search"
    script = (search / "search_index.js").read_text()
    index = json.loads(script.removeprefix("var searchIndex = ").removesuffix(";\n"))
    assert index == json.loads((search / "search_index.json").read_text())
    assert len(index["docs"]) > 200


@pytest.mark.slow
def test_a_page_replaces_the_worker_before_the_search_asks_for_it(folder):
    for page in ("index.html", "results/modular_norm.html"):
        text = (folder / VERSION / page).read_text()
        assert text.index("versions.js") < text.index("site.js") < text.index("search/main.js")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_that_opens_a_page_from_a_disk_searches_copies_and_offers_versions(
    folder, tmp_path
):
    page = (folder / VERSION / "reference/structlin.html").as_uri()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command = [CHROMIUM, *flags, "--virtual-time-budget=20000", "--dump-dom", f"{page}?q=bfloat16"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = text[text.index('id="mkdocs-search-results"') :]
    assert results.count("<article>") > 3
    assert 'href="../speed.html' in results
    assert text.count('class="copy"') == len(re.findall(r'class="language-pycon highlight"', text))
    assert re.findall(r"<option [^>]*value=\"([^\"]+)\"", text) == [VERSION, "0.0.1"]


# ---- versions ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_page_shows_its_version_and_the_folder_leads_to_the_newest(folder):
    for page in (folder / VERSION).rglob("*.html"):
        assert f'data-version="{VERSION}"' in page.read_text(), page
    assert f'["{VERSION}", "0.0.1"]' in (folder / "versions.js").read_text()
    assert f"url={VERSION}/index.html" in (folder / "index.html").read_text()


def test_versions_are_ordered_as_numbers_and_other_folders_are_none(tmp_path):
    for name in ("0.9.1", "0.10.0", "0.9", "images", "1.0rc1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    (tmp_path / "2.0").mkdir()  # an empty folder
    versions.list_versions(tmp_path)
    listed = (tmp_path / "versions.js").read_text()
    assert listed == 'var versions = ["0.10.0", "0.9.1", "0.9"];\n'
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()
