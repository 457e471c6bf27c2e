#!/usr/bin/env bash
# scripts/run_multihost.sh - a recipe over several hosts with plain mpirun.
#
#   scripts/run_multihost.sh node1:8,node2:8 scripts/run_gpt2_1558M.sh [OPTION...]
#
# Each host is named with its number of GPUs. All hosts need the same program under the same path,
# the data shards, and ssh without a password; the output folder must be on a shared file system if
# the first host may change, since rank 0 writes and reads checkpoints. README.md beside it says
# what to do about networks; variables that begin with NCCL_ or UCX_ are passed on to all hosts.
#
#   INTERFACE   network interface for MPI and NCCL, e.g. eth0 or 10.0.0.0/16    left to them

set -euo pipefail
if [[ $# -lt 2 ]]; then
    echo "usage: $0 HOST:GPUS,HOST:GPUS,... RECIPE [OPTION...]" >&2
    exit 2
fi
hosts=$1
recipe=$2
shift 2

NP=0
for host in ${hosts//,/ }; do
    if [[ ! $host =~ ^[^:]+:[1-9][0-9]*$ ]]; then
        echo "$0: host '$host', expected NAME:GPUS" >&2
        exit 2
    fi
    NP=$((NP + ${host##*:}))
done

launch=(mpirun -np "$NP" --host "$hosts")
if [[ -n ${INTERFACE-} ]]; then
    launch+=(--mca oob_tcp_if_include "$INTERFACE" --mca btl_tcp_if_include "$INTERFACE")
    [[ $INTERFACE == */* ]] || export NCCL_SOCKET_IFNAME=$INTERFACE
fi
for name in $(compgen -e | grep -E '^(NCCL|UCX)_' || true); do
    launch+=(-x "$name")
done

# One program everywhere: another build is the commonest cause of a hang at the first collective.
programs=$(mpirun -np "$(tr ',' '\n' <<<"$hosts" | wc -l)" --map-by node --host "$hosts" \
    sha256sum "${TRAINER:-./train_gpt2cu}" | sort | uniq -c) || {
    echo "$0: sha256sum of the program failed on some host" >&2
    exit 2
}
if [[ $(wc -l <<<"$programs") != 1 ]]; then
    printf '%s: the hosts have different programs:\n%s\n' "$0" "$programs" >&2
    exit 2
fi

export NP LAUNCH="${launch[*]}"
exec "$recipe" "$@"
