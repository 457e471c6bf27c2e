# shellcheck shell=bash
# scripts/recipe.sh - what every recipe does with its options: plan, check, run, start again.
#
# The run_*.sh beside it source this file, fill `options` and end with: recipe "$@". The caller's
# arguments come last, so they win; with --dry-run it stops after the check. From the environment:
#   TRAINER     the program                                  ./train_gpt2cu
#   NP          number of ranks                              8
#   LAUNCH      the command that starts NP ranks             mpirun -np $NP, nothing for NP=1
#   GPU_GB      memory of one GPU, for the plan's advice     80
#   RESTART_S   pause before it starts again                 10
#
# A run that fails (exit codes 1 and 5, or killed) is started again and resumes from its newest
# checkpoint, three times in a row without a new one. Wrong options or data (2), non-finite numbers
# (3) and file errors (4) would only fail again. Interrupt, SIGTERM and SIGUSR1 reach the trainer as
# SIGUSR1, the one signal for which mpirun leaves time to save. Exit code 75: stopped before the
# end; the same command goes on.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

TRAINER=${TRAINER:-./train_gpt2cu}
NP=${NP:-8}
GPU_GB=${GPU_GB:-80}
RESTART_S=${RESTART_S:-10}
MAX_FAILURES=3
STOPPED=75
options=()

# The value of option $1, the last one where it is given twice.
recipe_option() {
    local i value=
    for ((i = 0; i + 1 < ${#options[@]}; i++)); do
        [[ ${options[i]} == "$1" ]] && value=${options[i + 1]}
    done
    echo "$value"
}

# Runs the trainer once and returns its exit code; signals are passed on until it ends.
recipe_run_once() {
    local launch code=0
    read -ra launch <<<"${LAUNCH-$([[ $NP == 1 ]] || echo "mpirun -np $NP")}"
    "${launch[@]}" "$TRAINER" "${options[@]}" &
    pid=$!
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do  # a trap ends wait early
        code=0
        wait "$pid" || code=$?
    done
    return "$code"
}

# Runs until the end, starting again after failures that another try may cure.
recipe_run() {
    local code failures=0 out before stopped=
    out=$(recipe_option -o)
    trap 'stopped=1; kill -USR1 "$pid" 2>/dev/null' INT TERM USR1
    while true; do
        before=$(readlink "$out/latest")
        code=0
        recipe_run_once || code=$?
        if [[ $code == 0 ]]; then
            compgen -G "$out/DONE_*" >/dev/null && return 0
            return "$STOPPED"
        fi
        [[ -n $stopped ]] && return "$STOPPED"
        [[ $code == 1 || $code == 5 || $code -ge 128 ]] || return "$code"
        failures=$((failures + 1))
        [[ $(readlink "$out/latest") == "$before" ]] || failures=1
        if [[ $failures == "$MAX_FAILURES" ]]; then
            echo "recipe: exit code $code, $failures times without a new checkpoint: given up" >&2
            return "$code"
        fi
        echo "recipe: exit code $code; starting again from the newest checkpoint" >&2
        sleep "$RESTART_S"
    done
}

recipe() {
    local argument only_check=
    for argument in "$@"; do
        if [[ $argument == --dry-run ]]; then only_check=1; else options+=("$argument"); fi
    done
    if [[ ! -x $TRAINER ]]; then
        echo "recipe: no program $TRAINER: make builds it, or TRAINER=./train_gpt2 for the CPU" >&2
        exit 2
    fi
    # A Slurm job script has the variable of its ranks, but is none of them.
    local alone=(env -u SLURM_NTASKS "$TRAINER")
    "${alone[@]}" --plan --ranks "$NP" --memory-gb "$GPU_GB" "${options[@]}" || exit
    "${alone[@]}" --dry-run --ranks "$NP" "${options[@]}" || exit
    [[ -z $only_check ]] || exit 0
    recipe_run
    exit
}
