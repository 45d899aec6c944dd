#!/usr/bin/env bash
# The whole run on a machine with a GPU, in two parts of at most 10 and 4 minutes.
#
#     bash benchmarks/gpu_run.sh prepare     # without a GPU, before: out/gpu_run/launches.json, with Triton installed
#     OUT=results bash benchmarks/gpu_run.sh a    # self-test, gate, benchmarks.gpu, benchmarks.speed.layer
#     OUT=results bash benchmarks/gpu_run.sh b    # whole models, ncu
#
# Run it in the repository's root; take out/gpu_run with the tree. Everything is kept under $OUT as it is made, and
# every step has a limit. Part a stops after about 2 minutes with exit code 7 if the kernels are wrong or time nothing.
# Afterwards gpu.jsonl goes to benchmarks/results, tiles.json to
# structlin/_engine/triton, and `make pages` shows the former.
set -uo pipefail
python=${PYTHON:-python3}
if [[ ${1:-} == prepare ]]; then
    exec "$python" -m benchmarks.gpu_steps collect out/gpu_run
fi
: "${OUT:?is the folder that results are kept in}"
mkdir -p "$OUT"
# the CPU engine would only be built
export PYTHONUNBUFFERED=1 STRUCTLIN_ENGINE=off TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/structlin-triton}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

failed=()

# step LIMIT NAME COMMAND...: all output in $OUT/NAME.log, its last lines here
step() {
    local limit=$1 name=$2 code began=$SECONDS
    shift 2
    timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1
    code=$?
    grep -Ev '^(\{|tile |kernel |check      passed)' "$OUT/$name.log" | tail -n 30 | cut -c1-200
    echo "== $name: exit code $code, $((SECONDS - began)) of $limit s"
    [[ $code == 0 ]] || failed+=("$name")
}

versions() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader
    nproc
    command -v gcc g++ ptxas ncu
    env | grep -i triton
    "$python" -c "import sys, torch, triton, numpy, transformers
print(sys.version.split()[0], *(each.__version__ for each in (torch, triton, numpy, transformers)))
print(torch.cuda.get_device_name())"
}

part_a() {
    versions 2>&1 | tee "$OUT/versions.log"
    step 60 warm "$python" -m benchmarks.gpu_steps warm out/gpu_run
    step 100 smoke "$python" -m benchmarks.gpu --smoke --out "$OUT/smoke"
    "$python" -m benchmarks.gpu_steps gate "$OUT/smoke/gpu.jsonl" || exit
    step 280 gpu "$python" -m benchmarks.gpu --budget 240 --out "$OUT" # 30 s and more between budget and kill
    cp structlin/_engine/triton/tiles.json "$OUT/"
    step 120 layer "$python" -m benchmarks.speed.layer --device cuda --budget 80 --out "$OUT/layer"
}

part_b() {
    step 85 model "$python" -m benchmarks.speed.model --device cuda --budget 50 --out "$OUT/model"
    step 45 ncu ncu --clock-control none -k 'regex:^(multiply|find_gradients)' -c 3 --metrics \
        dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread,gpu__time_duration.sum \
        "$python" -c "
import torch
from benchmarks import gpu
structure = gpu.families(4096)['BTT r=1'].structure(4096, 4096)
gpu.Layer(structure, 16384, torch.bfloat16).forward_backward()
torch.cuda.synchronize()"
}

case ${1:-} in
a) part_a ;;
b) part_b ;;
*)
    echo "usage: [OUT=folder] bash benchmarks/gpu_run.sh prepare|a|b" >&2
    exit 2
    ;;
esac
echo "== failed: ${failed[*]:-nothing}"
[[ ${#failed[@]} == 0 ]]
