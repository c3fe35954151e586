#!/bin/bash
# Everything that docs/ says of a GPU, in one call, in the order given; output goes to OUT:
#
#     bash docs/runs/gpu.sh OUT few racecheck memcheck tests attention shared programs quantise registers reconstruct vectors aqua generation compiled
#
# few to tests: docs/runs/gpu-tests.md. shared, programs, registers: what launches were chosen by. The others write a JSON each.
# WHEELS: a folder of packages to install first, for a machine without a network (flashinfer-python 0.6.7, apache-tvm-ffi,
# flash-kmeans 0.3.1, optimum-quanto 0.2.7: peers). H200, 16 cores: 47, 67, 38, 366, 71, 30, 60, 120, 60, 58, 30, 200, 420 and 330 s.
set -o pipefail
cd "$(dirname "$0")/../.." || exit
out=$1
shift
mkdir -p "$out"
if [ -n "$WHEELS" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/site "$WHEELS"/*.whl || exit
fi
export PYTHONPATH="/tmp/site:.:kernels:artifacts" TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton} PYTHONUNBUFFERED=1
few="python docs/runs/gpu_tests.py --out $out --few --jobs 15 --seconds 90"
of="python docs/benchmarks"
for what in "$@"; do
    case $what in
        few) $few ;;
        racecheck | memcheck) $few --tool "$what" ;;
        tests) python docs/runs/gpu_tests.py --out "$out" --jobs 16 --seconds 420 ;;
        attention) $of/decode_attention.py --out "$out" ;;
        shared) $of/decode_attention.py --shared=-1,50,75,100 ;;
        programs) $of/decode_attention.py --programs 2,3,4,5,6,7,8,9,10,11,12,14,16,18 ;;
        quantise) $of/quantise.py --out "$out" --seconds 200 ;;
        registers) $of/quantise.py --step-registers 240,160,128 ;;
        reconstruct) $of/reconstruct.py --out "$out" ;;
        vectors) $of/vq_attention.py --out "$out" ;;
        aqua) $of/aqua_tokens.py --out "$out" ;;
        generation) $of/generation.py --out "$out" --seconds 420 ;;
        compiled) mkdir -p "$out/compiled" && $of/generation.py --only steps --out "$out/compiled" --seconds 420 ;;
        *) echo "$what: must be one of those in the head of this script" >&2 && exit 2 ;;
    esac 2>&1 | tee "$out/$what.log"
    echo "== $what: $SECONDS s since the start"
done
