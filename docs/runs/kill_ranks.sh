#!/bin/bash
# kill -9 of a random rank at a random moment of a fit or search under torchrun. Then the same command runs again with
# another number of ranks, or, with --max-restarts, torchrun starts all ranks anew. With --stop the rank is not killed but
# stopped (SIGSTOP): it hangs, and the others wait for KVCAL_RANK_TIMEOUT seconds, 15 here.
#
#     bash docs/runs/kill_ranks.sh [--max-restarts] [--stop] [KILLS [SEED [FIRST]]]
#
# In a checkout, on a CPU. FIRST: number of the first kill, where the ten are done in several calls. SEED decides which
# ranks and which moments. A moment is a share of the time that one process takes from its checkpoint's folder to its
# end, counted from the folder of the ranks; every fifth is a share of the time before, while they start. A line for each
# kill: the rank and moment, how the run ended and with which line, how many files its checkpoint had, and whether the
# run after it, or the restarted one, wrote the bytes of a run of one process. Exit code 1 where one wrote others.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
elastic="" name=KILL
while [ "${1#--}" != "$1" ]; do
    case $1 in
    --max-restarts) elastic="--max-restarts 2" ;;
    --stop) name=STOP && export KVCAL_RANK_TIMEOUT=15 ;;
    *) echo "$1: give --max-restarts, --stop or both" >&2 && exit 2 ;;
    esac
    shift
done
kills=${1:-10} seed=${2:-0} first=${3:-1} bad=0
text="--model tiny --windows 12 --length 256 --holdout 3 --recent 16 --batch 2"
methods=(
    "fit aqua-kv $text"
    "fit vqkv $text --block 32 --stages 4,4,4 --sizes 256,256,256 --vectors 20000"
    "fit aqua-kv $text --predictor mlp --mlp-epochs 2"
    "tune-bits $text --objective kl --predict --codecs higgs-2,higgs-4 --max-bits 4"
    "tune-thresholds $text --block 32 --trials 6"
    "fit squat $text"
    "fit innerq $text"
    "tune-bits $text --block 32 --max-bits 5"
    "fit aqua-kv $text --layerwise --spill disk"
    "fit aqua-kv $text --residual vq-2-k256 --first-layer higgs-4"
)
cd "$(mktemp -d)" || exit
declare -A sums before work

folder_of() { # process, output: waits for the checkpoint's folder, or for the process to end
    while kill -0 "$1" 2>/dev/null && [ ! -e ".$2.partial" ]; do sleep 0.02; done
}

for number in $(seq "$first" $((first + kills - 1))); do
    RANDOM=$((1000 * seed + number))
    given=${methods[(number - 1) % ${#methods[@]}]} to="$number.kvcal.safetensors" plain="plain-$number.kvcal.safetensors"
    ranks=$((RANDOM % 3 + 2)) again=$((RANDOM % 3 + 1)) victim=$((RANDOM % ranks)) share=$((RANDOM % 100))
    if [ -z "${sums[$given]}" ]; then
        from=$EPOCHREALTIME
        python -m kvcal $given --output "$plain" >"plain-$number.log" 2>&1 &
        run=$!
        folder_of $run "$plain"
        before[$given]=$(echo "$from $EPOCHREALTIME" | awk '{print $2 - $1}') from=$EPOCHREALTIME
        wait $run || exit
        work[$given]=$(echo "$from $EPOCHREALTIME" | awk '{print $2 - $1}')
        sums[$given]=$(sha256sum <"$plain")
    fi
    torchrun --nproc-per-node $ranks $elastic -m kvcal $given --output "$to" >"$number.log" 2>&1 &
    run=$!
    if [ $((number % 5)) = 0 ]; then
        after=${before[$given]} when="start"
    else
        after=${work[$given]} when="work"
        folder_of $run "$to"
    fi
    sleep "$(echo "$after $share" | awk '{print $1 * $2 / 100}')"
    process=$(pgrep -P $run | sed -n "$((victim + 1))p") # torchrun starts them in order
    files=$(find ".$to.partial" -name "*.safetensors" 2>/dev/null | wc -l)
    hit="rank $victim of $ranks after $share % of its $when"
    [ -n "$process" ] && kill -s "$name" "$process" || hit="none left after $share % of the $when"
    from=$EPOCHREALTIME
    wait $run
    code=$?
    ended="exit $code $(echo "$from $EPOCHREALTIME" | awk '{printf "%.1f", $2 - $1}') s later, $files files"
    grep -q "^sha256" "$number.log" && [ $code != 0 ] && ended="$ended, its bundle had been written"
    if [ -n "$elastic" ]; then
        then="$(grep -c "resuming" "$number.log") times resumed"
    else
        line=$(grep -h "^kvcal: " "$number.log" | head -n 1)
        [ -n "$line" ] && ended="$ended, \`$line\`"
        torchrun --nproc-per-node $again -m kvcal $given --output "$to" >"$number-again.log" 2>&1
        then="$again ranks again, exit $?, $(grep -c "resuming" "$number-again.log") times resumed"
    fi
    same=same
    [ "$(sha256sum <"$to")" = "${sums[$given]}" ] || { same="OTHER BYTES" && bad=1; }
    echo "$number. ${given%% --model*}${given##*--batch 2}: $hit: $ended; $then: $same"
done
exit $bad
