#!/bin/bash
# Two commits on one warm machine, in turns: old, new, old, new. Each measurement is the commit's own script.
#
#     bash docs/runs/old_and_new.sh OLD_TREE NEW_TREE OUT [attention quantise steps host eager]
#
# OLD_TREE and NEW_TREE are two checkouts. Compiled kernels are kept apart, so the first turn of each compiles.
# docs/benchmarks/old_and_new.py OUT prints the cells; host (docs/benchmarks/host_steps.py) prints its own.
# Eight minutes on an H100 without quantise, which alone takes as long:
# each of its turns first compares every kernel with the CPU's reference, one thread a process. SCHEMES: parts of the names
# that quantise measures. STEPS: seconds after which generation begins no row; GENERATION: more of its options, such as
# "--model llama-3.2-1b --schemes inner-4,kivi-2-g128,higgs-2". EAGER: options of eager, such as "--steps 120". PIN: a
# command before each python, such as "taskset -c 4,5". TURNS: more turns than 1 and 2, such as "3 4 5".
set -o pipefail
export OMP_NUM_THREADS=1
SCHEMES=${SCHEMES:-"uniform 4/4,InnerQ Hybrid,KIVI 2/2 G=32,HIGGS 2,TurboQuant,SQuat,MixKVQ"}
old=$(realpath "$1") new=$(realpath "$2") out=$3
shift 3
for tree in "$old" "$new"; do
    [ -f "$tree/docs/benchmarks/decode_attention.py" ] || { echo "$tree is no checkout of kvcal" >&2 && exit 2; }
done
mkdir -p "$out" && out=$(realpath "$out") || exit
run() { # TREE NAME SCRIPT OPTIONS...
    local tree=$1 to="$out/$(basename "$1")-$2" script=$3
    shift 3
    mkdir -p "$to"
    (cd "$tree" && PYTHONPATH=.:kernels:artifacts TRITON_CACHE_DIR="/tmp/triton-$(basename "$tree")" PYTHONUNBUFFERED=1 \
        ${PIN} python "docs/benchmarks/$script.py" --out "$to" "$@") >"$to/$script.log" 2>&1
    echo "$(basename "$to") $script: exit $?, $SECONDS s since the start"
}
[ $# -gt 0 ] || set -- attention quantise steps host
for what in "$@"; do
    if [ "$what" = host ]; then
        ${PIN} python "$new/docs/benchmarks/host_steps.py" "$old" "$new" --out "$out" ${HOST}
        continue
    fi
    for turn in 1 2 ${TURNS}; do
        for tree in "$old" "$new"; do
            case $what in
                attention) run "$tree" "$turn" decode_attention --passes 3 --cell-seconds 4 --seconds 100 ;;
                quantise) run "$tree" "$turn" quantise --seconds 135 --schemes "$SCHEMES" ;;
                steps) run "$tree" "$turn" generation --only steps --seconds ${STEPS:-60} ${GENERATION} ;;
                eager) run "$tree" "$turn" eager --model llama-3.2-1b --schemes innerq-base,higgs-2 ${EAGER} ;;
                *) echo "$what: must be attention, quantise, steps, host or eager" >&2 && exit 2 ;;
            esac
        done
    done
done
