#!/usr/bin/env bash
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
#
# scripts/run_slurm.sh - a recipe as a Slurm job that goes on over its time limit and lost nodes.
#
#   sbatch scripts/run_slurm.sh scripts/run_gpt2_1558M.sh [OPTION...]
#   sbatch --nodes=4 --time=8:00:00 scripts/run_slurm.sh ...        another size
#
# 180 seconds before the time limit Slurm sends SIGUSR1 to every rank; they save after the same step
# and end, and the job puts itself into the queue again. A lost node or a preemption has Slurm do
# the same (--requeue). The recipes resume by themselves (-y 1). Saving must take less than these
# 180 seconds: the checkpoint events of log.jsonl say how long it takes. The output folder must be
# on a file system that all nodes share.
#
#   SRUN   how to start the ranks    srun --mpi=pmix --kill-on-bad-exit=1

set -u
if [[ $# -lt 1 ]]; then
    echo "usage: sbatch $0 RECIPE [OPTION...]" >&2
    exit 2
fi
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

export NP=${SLURM_NTASKS:?run_slurm.sh is a job script: sbatch starts it}
export LAUNCH="${SRUN:-srun --mpi=pmix --kill-on-bad-exit=1}"

trap 'exit 143' TERM # scancel: no way back into the queue
code=0
"$@" || code=$?
if [[ $code == 75 ]]; then # stopped before the end
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
exit "$code"
