"""hatchling's hook: it puts the CPU engine into the wheel, where this machine can build it.

    pip wheel --no-deps --no-build-isolation .    needs torch, hatchling and a compiler
    pip wheel --no-deps .                         sees no torch: the engine is built at first use

The engine is no Python extension and takes torch 2.10 and later, so one wheel serves every Python.
"""

import importlib.util
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EngineHook(BuildHookInterface):
    """The libraries of `build.VARIANTS`, for Linux on x86-64."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        self.folder = tempfile.TemporaryDirectory()  # until hatchling has read what lies there
        try:
            libraries = load_engine(Path(self.root)).build_variants(Path(self.folder.name))
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"the CPU engine will be built at its first use: {error}")
            return
        for path in libraries:
            build_data["force_include"][str(path)] = f"structlin/_engine/cpu/lib/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"


def load_engine(root: Path) -> Any:
    """build.py alone, for the build needs no other module of the package nor what those need."""
    path = root / "structlin" / "_engine" / "cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None
    assert spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    return engine
