"""The version on every page, and the list of the versions whose sites lie in one folder.

A hook of mkdocs. `make site` builds into out/site/VERSION. What lies in out/site can be published
as it is: after each build `versions.js` names all versions there, and `index.html` leads to the
newest. Pages read that list, so the pages of an older release show later ones too.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}/index.html">
<title>structlin</title>
<a href="{0}/index.html">structlin {0}</a>
"""


def on_config(config: Any) -> Any:
    """The settings with the version and what the changelog says of it, for the theme."""
    code = (ROOT / "structlin" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.*)"$', code, re.MULTILINE)[0]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    config.extra["version"] = version
    config.extra["state"] = " (unreleased)" if f"## {version} (unreleased)" in changes else ""
    return config


def on_post_build(*, config: Any) -> None:
    """The list of versions, where the site is built into a folder named as its version."""
    folder = Path(config.site_dir)
    if folder.name == config.extra["version"]:
        list_versions(folder.parent)


def list_versions(folder: Path) -> None:
    """Write `versions.js` and `index.html` for the versions whose sites lie in `folder`."""
    found = [page.parent.name for page in folder.glob("*/index.html")]
    numbers = [name for name in found if re.fullmatch(r"\d+(\.\d+)*", name)]
    numbers.sort(key=lambda name: [*map(int, name.split("."))], reverse=True)
    (folder / "versions.js").write_text(f"var versions = {json.dumps(numbers)};\n")
    (folder / "index.html").write_text(REDIRECT.format(numbers[0]))
