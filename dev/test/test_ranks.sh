#!/usr/bin/env bash
# Everything that needs several ranks: collectives and engine with 1 to 7 of them, through shared memory,
# messages and across two (made-up) hosts; hangs and wrong collectives, each named within seconds.
#
# usage: dev/test/test_ranks.sh [BUILD_FOLDER]    TEST_TIER=quick|ci|full chooses how many
set -uo pipefail
cd "$(dirname "$0")/../.."

build=${1:-build/cpu-fp32}
tier=${TEST_TIER:-quick}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
passed=0 failed=0 skipped=0

# program NAME COMMAND...: a test program that counts its own cases on its last line.
program() {
    local name=$1 counts p f s
    shift
    timeout -k 5 200 "$@" >"$folder/log" 2>&1
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$folder/log" | tail -n 1)
    read -r p f s <<<"$(sed -E 's/[a-z,]+//g' <<<"${counts:-0 1 0}")"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ "$f" -gt 0 ]; then
        echo "FAILED $name"
        grep -v '^ok ' "$folder/log" | head -n 20 | sed 's/^/       | /'
    else
        echo "ok     $name: $p cases"
    fi
}

# fault NAME EXIT_CODE PATTERN COMMAND...: the run ends in time, with that code and that line.
fault() {
    local name=$1 expected=$2 pattern=$3 rc
    shift 3
    timeout -k 5 40 "$@" >"$folder/log" 2>&1
    rc=$?
    if [ $rc -eq "$expected" ] && grep -qE "$pattern" "$folder/log"; then
        passed=$((passed + 1))
        echo "ok     $name: $(grep -E "$pattern" "$folder/log" | head -n 1)"
    else
        failed=$((failed + 1))
        echo "FAILED $name: exit $rc, expected $expected and a line like '$pattern'"
        tail -n 10 "$folder/log" | sed 's/^/       | /'
    fi
}

in_tier() { [ "$tier" = full ] || [ "$1" = quick ] || [ "$tier" = "$1" ]; }

# ---- collectives and engine ------------------------------------------------------------------------

case $tier in quick) worlds="2 3" ;; ci) worlds="1 2 3 4" ;; *) worlds="1 2 3 4 5 6 7" ;; esac
for n in $worlds; do
    program "test_comm, $n ranks" mpirun -np "$n" "$build/test_comm"
    program "test_zero, $n ranks" mpirun -np "$n" "$build/test_zero"
    in_tier ci || continue
    program "test_comm, $n ranks, messages" mpirun -np "$n" "$build/test_comm" messages
    program "test_zero, $n ranks, poison" env ZERO_DEBUG=poison mpirun -np "$n" "$build/test_zero"
done
program "test_comm, 3 ranks, messages" mpirun -np 3 "$build/test_comm" messages
program "test_zero, 3 ranks, messages" mpirun -np 3 "$build/test_zero" messages
if in_tier ci; then # ranks that are late at every collective find missing waits
    program "test_zero, 3 ranks, one late" env ZERO_FAULT=delay:rank=1:ms=1 \
        mpirun -np 3 "$build/test_zero" late
fi

# ---- two hosts -------------------------------------------------------------------------------------

# The launcher reaches "host" nodeb through a script that runs the command here under that name.
cat >"$folder/remote" <<'SCRIPT'
#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
host=$1
shift
exec unshare --uts bash -c "hostname $host; $*"
SCRIPT
chmod +x "$folder/remote"
hosts=(mpirun -x ZERO_FAULT -np 4 --host nodea:2,nodeb:2 --mca plm_rsh_agent "$folder/remote"
    --mca btl self,vader,tcp --mca btl_tcp_if_include lo --mca oob_tcp_if_include lo --bind-to none)
export ZERO_FAULT=
two_hosts=no
if in_tier ci && [ "$(timeout -k 5 20 "${hosts[@]}" hostname 2>/dev/null | sort -u | wc -l)" = 2 ]; then
    two_hosts=yes
    program "test_comm, 2 hosts x 2 ranks" "${hosts[@]}" "$build/test_comm" two-hosts
    program "test_zero, 2 hosts x 2 ranks" "${hosts[@]}" "$build/test_zero" two-hosts
elif in_tier ci; then
    skipped=$((skipped + 1))
    echo "skip   two hosts: needs the right to change the host name (unshare --uts)"
fi

# ---- faults ----------------------------------------------------------------------------------------

head -c 20000 /dev/urandom | base64 -w 0 >"$folder/text.txt"
trainer=("$build/train_gpt2" -i "$folder/text.txt" -e L=3,NH=3,C=48,V=257,T=32 -b 2 -t 32 -d 384 -x 9
    -v 0 -s 0 --comm-timeout 2)
three=(mpirun -np 3)
fault "skipped, stage 2" 5 '^error: rank 1 has not entered seq 39 [a-z_]+\((block [0-2]|embedding)\) step 2 micro [01]; ranks 0,2 wait there' \
    env ZERO_FAULT=skip:rank=1:seq=39 "${three[@]}" "${trainer[@]}" -z 2
fault "stopped, stage 3" 5 '^error: rank 2 has not entered seq [0-9]+ [a-z_]+.* step 3 micro 0; ranks 0,1 wait there for [2-4] s' \
    env ZERO_FAULT=stop:rank=2:step=3 "${three[@]}" "${trainer[@]}" -z 3
fault "stopped at start" 5 '^error: rank 1 has not entered seq 2 message step 0 micro 0; ranks 0,2 wait there' \
    env ZERO_FAULT=stop:rank=1:seq=2 "${three[@]}" "${trainer[@]}"
if in_tier ci; then
    fault "skipped without data, stage 3" 5 '^error: rank 0 has not entered seq 41 ' \
        env ZERO_FAULT=skip:rank=0:seq=41 "${three[@]}" "${trainer[@]}" -z 3
    fault "wrong count, stage 1" 5 '^error: rank 2 entered seq 38 .* with [0-9]+ elements, ranks 0,1 entered' \
        env ZERO_FAULT=count:rank=2:seq=38 "${three[@]}" "${trainer[@]}" -z 1
    fault "late beyond the time-out, stage 0" 5 '^error: rank 1 has not entered seq ' \
        env ZERO_FAULT=delay:rank=1:step=3:ms=9000 "${three[@]}" "${trainer[@]}" -z 0
    fault "NaN, stage 2" 3 '^error: step 3: .* h.1.mlp.c_fc.weight on rank 1 ' \
        env ZERO_FAULT=nan:rank=1:step=3:tensor=h.1.mlp.c_fc.weight "${three[@]}" "${trainer[@]}" -z 2
    fault "wrong launcher" 2 '^error: OMPI_COMM_WORLD_SIZE=4, but this process sees one rank' \
        env OMPI_COMM_WORLD_SIZE=4 "${trainer[@]}"
fi
if [ $two_hosts = yes ]; then
    export ZERO_FAULT=stop:rank=3:step=3
    fault "stopped, 2 hosts" 5 '^error: rank 3 has not entered seq ' \
        "${hosts[@]}" "${trainer[@]}" -d 512 -z 3
    export ZERO_FAULT=skip:rank=2:seq=38
    fault "skipped, 2 hosts" 5 '^error: rank 2 has not entered seq 38 ' \
        "${hosts[@]}" "${trainer[@]}" -d 512 -z 3
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
