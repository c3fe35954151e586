#!/bin/bash
# Kills of a random rank at a random moment of a fit or search under torchrun. Then the same command runs with another
# number of ranks, or, with --max-restarts, torchrun starts all ranks anew.
#
#     bash docs/runs/kill_ranks.sh [KILLS [SECONDS]]
#     bash docs/runs/kill_ranks.sh --max-restarts [KILLS [SECONDS]]
#
# In a checkout, on a CPU. A line for each: which rank was killed when, how the run ended, how many layers its checkpoint
# had, and whether the run after it, or the restarted one, wrote the bytes of a run of one process. Exit code 1 where one
# wrote others.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
elastic="" && [ "$1" = --max-restarts ] && elastic="--max-restarts 2" && shift
kills=${1:-10} span=${2:-12} bad=0
text="--model tiny --windows 12 --length 256 --holdout 3 --recent 16 --batch 2"
methods=(
    "fit aqua-kv $text"
    "fit vqkv $text --block 32 --stages 4,4,4 --sizes 256,256,256 --vectors 20000"
    "fit aqua-kv $text --predictor mlp --mlp-epochs 2"
    "tune-bits $text --objective kl --predict --codecs higgs-2,higgs-4 --max-bits 4"
    "tune-thresholds $text --block 32 --trials 6"
)
cd "$(mktemp -d)" || exit
declare -A sums
for number in $(seq 1 "$kills"); do
    given=${methods[(number - 1) % ${#methods[@]}]}
    if [ -z "${sums[$given]}" ]; then
        python -m kvcal $given --output "plain-$number.kvcal.safetensors" >"plain-$number.log" 2>&1 || exit
        sums[$given]=$(sha256sum <"plain-$number.kvcal.safetensors")
    fi
    ranks=$((RANDOM % 3 + 2)) again=$((RANDOM % 3 + 1)) after=$((RANDOM % span + 4)) to="$number.kvcal.safetensors"
    torchrun --nproc-per-node $ranks $elastic -m kvcal $given --output "$to" >"$number.log" 2>&1 &
    run=$!
    sleep "$after"
    rank=$(pgrep -P $run | shuf -n 1)
    layers=$(find ".$to.partial" -name "layer-*" 2>/dev/null | wc -l)
    [ -n "$rank" ] && kill -9 "$rank"
    from=$SECONDS
    wait $run
    ended="exit $? within $((SECONDS - from)) s, $layers layers"
    if [ -n "$elastic" ]; then
        after_it="$(grep -c "^resuming after layer" "$number.log") times resumed"
    else
        torchrun --nproc-per-node $again -m kvcal $given --output "$to" >"$number-again.log" 2>&1
        after_it="$again ranks again"
    fi
    same=same
    [ "$(sha256sum <"$to")" = "${sums[$given]}" ] || { same="OTHER BYTES" && bad=1; }
    echo "$number: ${given%% --model*} (${given##*--batch 2 }): $ranks ranks, one killed after $after s" \
        "(${rank:-none was left}): $ended; $after_it: $same"
done
exit $bad
