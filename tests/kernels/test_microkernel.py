"""The microkernel itself, for every instruction set of this CPU (tests/kernels/microkernel.cpp)."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from structlin._engine.cpu import build

SOURCE = Path(__file__).with_name("microkernel.cpp")
CPU = Path("/proc/cpuinfo")
FLAGS = set(CPU.read_text().split()) if CPU.exists() else set()
NEEDS = {
    "x86-64-v2": {"sse4_2"},
    "x86-64-v3": {"avx2", "fma", "f16c"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "native": set(),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.parametrize("march", NEEDS)
def test_products_are_those_of_scalar_loops_at_every_size_stride_and_alignment(march, tmp_path):
    if not NEEDS[march] <= FLAGS and march != "native":
        pytest.skip(f"this CPU has no {march}")
    torch_folder, program = Path(torch.__file__).parent, tmp_path / "microkernel"
    flags = [flag for flag in build.FLAGS if flag not in ("-march=native", "-fPIC", "-shared")]
    command = ["g++", *flags, "-O2", f"-march={march}", f"-I{torch_folder / 'include'}"]
    command += [f"-I{build.SOURCE.parent}", str(SOURCE), "-o", str(program)]
    library = torch_folder / "lib"
    command += [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 10_000
