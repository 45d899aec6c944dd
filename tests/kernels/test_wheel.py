"""The libraries that a wheel brings: which one a CPU gets, and when none is used."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from structlin import BTT, StructuredLinear
from structlin._engine.cpu import build, library

V2 = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
V3 = f"{V2} movbe xsave avx f16c abm bmi1 avx2 bmi2 fma"
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
V4_BF16 = f"{V4} avx512_bf16"
CPUS = {
    "": None,
    "fpu sse sse2 pni": None,
    V2: "x86-64-v2",
    V3: "x86-64-v3",
    V3.replace(" fma", ""): "x86-64-v2",
    V3.replace(" abm", ""): "x86-64-v2",
    V4: "x86-64-v4",
    V4.replace(" avx512vl", ""): "x86-64-v3",  # Knights Landing
    f"{V3} avx512_bf16 amx_tile amx_bf16": "x86-64-v3",  # a machine that hides AVX-512
    V4_BF16: "x86-64-v4-bf16",
    f"{V4_BF16} amx_tile": "x86-64-v4-bf16",
    f"{V4_BF16} amx_tile amx_bf16 amx_int8": "amx",
}


def name_library(folder, name, text):
    return folder / f"{build._name_variant(name)}-{build._hash(text)}.so"


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """The folder of a wheel with a text as each library, an empty cache, and a CPU that has all."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in build.VARIANTS:
        name_library(folder, name, name.encode()).write_text(name)
    monkeypatch.setattr(build, "SHIPPED", folder)
    monkeypatch.setattr(library, "_state", None)
    monkeypatch.setattr(build, "describe_cpu", lambda: f"flags\t\t: {max(CPUS, key=len)}")
    monkeypatch.setenv("STRUCTLIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STRUCTLIN_CXXFLAGS", raising=False)
    return folder


@pytest.mark.parametrize(("flags", "name"), CPUS.items(), ids=str)
def test_a_cpu_gets_the_best_library_whose_instructions_it_has(shipped, monkeypatch, flags, name):
    monkeypatch.setattr(build, "describe_cpu", lambda: f"model name\t: A CPU\nflags\t\t: {flags}")
    found = build.find_shipped()
    assert (found and found.read_text()) == name


LINUX = {  # what the compiler calls otherwise than Linux
    "AVX512BF16": "avx512_bf16",
    "BMI": "bmi1",
    "LAHF_SAHF": "lahf_lm",
    "LZCNT": "abm",
    "SSE3": "pni",
}
# what is no set of its own, or of every x86-64
OTHERS = {"AVX512", "EVEX256", "EVEX512", "SSE", "SSE2", "SSE_MATH", "SSE2_MATH"}


@pytest.mark.skipif(
    shutil.which("g++") is None or "x86_64" not in os.uname().machine, reason="needs g++ for x86-64"
)
@pytest.mark.parametrize("name", build.VARIANTS)
def test_every_instruction_set_that_the_compiler_may_use_is_asked_of_the_cpu(name):
    command = ["g++", *build.VARIANTS[name].options.split(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sets = (
        r"SSE\w*|SSSE\w+|AVX\w*|AMX\w+|FMA\w*|F16C|BMI\w*|LZCNT|ABM|MOVBE|POPCNT|LAHF_SAHF|XSAVE\w*"
    )
    more = r"|AES|VAES|PCLMUL|VPCLMULQDQ|SHA|GFNI|ADX|RDRND|RDSEED|RDPID|FSGSBASE|TBM|XOP|LWP"
    found = set(re.findall(rf"^#define __({sets}{more})__ 1$", macros, re.MULTILINE)) - OTHERS
    used = {LINUX.get(macro, macro.lower()) for macro in found}
    if "HAVE_SYNC_COMPARE_AND_SWAP_16" in macros:
        used.add("cx16")
    assert used == set(build.VARIANTS[name].needs.split())


@pytest.mark.parametrize("damage", [b"", b"am", b"amy"], ids=repr)
def test_a_damaged_library_is_refused_by_name_and_the_engine_is_sought_elsewhere(
    shipped, monkeypatch, caplog, damage
):
    path = build.find_shipped()
    path.write_bytes(damage)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not library.load()
    refused, none = (record.getMessage() for record in caplog.records)
    assert f"{path} is damaged" in refused
    assert "plain products instead" in none
    assert "no-such-compiler" in library._state.reason


def test_a_library_that_the_system_cannot_load_is_refused_by_name(shipped, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not library.load()  # texts are no libraries
    path = name_library(shipped, "amx", b"amx")
    assert f"is not used: Could not load this library: {path}" in caplog.text


@pytest.mark.parametrize("change", ["sources", "flags", "options of the user", "old torch"])
def test_a_library_of_other_sources_flags_or_torch_is_not_used(
    shipped, monkeypatch, tmp_path, change
):
    assert build.find_shipped()
    if change == "sources":
        (tmp_path / "other.cpp").write_text("int other;")
        monkeypatch.setattr(build, "SOURCE", tmp_path / "other.cpp")
    elif change == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    elif change == "options of the user":
        monkeypatch.setenv("STRUCTLIN_CXXFLAGS", "-O1")
    else:
        monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert build.find_shipped() is None


def test_one_library_serves_every_torch_with_the_stable_interface(shipped, monkeypatch):
    found = set()
    for version in ("2.10.0", "2.13.0+cpu", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", version)
        found.add(build.find_shipped())
    assert found == {name_library(shipped, "amx", b"amx")}


def test_the_engine_needs_only_the_macros_that_the_oldest_torch_has():
    """Headers of later ones add macros whatever version is targeted."""
    sources = [build.SOURCE, *build.SOURCE.parent.glob("*.h")]
    found = {name for path in sources for name in re.findall(r"\w*TORCH_\w+", path.read_text())}
    of_2_10 = {"STABLE_TORCH_LIBRARY_IMPL", "TORCH_BOX", "STD_TORCH_CHECK"}
    assert found == of_2_10 | {"TORCH_ERROR_CODE_CHECK"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_wheels_libraries_are_built_by_their_options_and_loaded(shipped, monkeypatch, tmp_path):
    shutil.rmtree(shipped)
    shipped.mkdir()
    monkeypatch.setattr(build, "SOURCE", tmp_path / "tiny.cpp")
    build.SOURCE.write_text('extern "C" int answer() { return 42; }')
    sse, avx = (build.Variant(option, "fpu") for option in ("-msse2", "-msse3"))
    monkeypatch.setattr(build, "VARIANTS", {"sse": sse, "avx": avx})
    made = build.build_variants(shipped)
    assert sorted(made) == sorted(shipped.iterdir())
    assert library.load()
    assert library._state.reason == str(made[0])


PACKAGED = """
import sys, torch, torch._inductor.codecache  # which torch 2.10 forgets
model = torch._inductor.aoti_load_package(sys.argv[1])
x, y = torch.load(sys.argv[2])
torch.testing.assert_close(model(x), y)
assert "structlin" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of what it exports
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_model_that_aotinductor_packages_runs_without_structlin(tmp_path):
    layers = (StructuredLinear(*widths, BTT(rank=2)) for widths in ((32, 64), (64, 32)))
    model, x = torch.nn.Sequential(next(layers), torch.nn.GELU(), next(layers)), torch.randn(5, 32)
    with torch.no_grad():
        torch.save((x, model(x)), tmp_path / "x.pt")
        exported = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2")
        )
    command = [sys.executable, "-c", PACKAGED, package, str(tmp_path / "x.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)
