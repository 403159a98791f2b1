# From here on the same for every run. One Ray cluster lives as long as this job: its head on the
# first machine, one Slurm step for it and one for the others; then the run, on the first machine.
# Whichever ends first ends all. Ray listens with a token that exists in this job alone.
set -euo pipefail

fail() {
  echo "areal: error: $*" >&2
  exit 1
}

# Whether the process $1 ends by itself within half a minute.
ends() {
  for ((i = 0; i < 60; i++)); do
    kill -0 "$1" 2>/dev/null || return 0
    sleep 0.5
  done
  return 1
}

run=
steps=()
end_all() {
  trap - EXIT
  trap '' TERM INT
  if [[ -n $run ]] && kill -TERM "$run" 2>/dev/null; then
    ends "$run" || kill -KILL "$run"
  fi
  # To the tasks of the steps, not to this script: Ray then ends its own children, which Slurm need
  # not know. What is left ends with the job.
  scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true # a cancelled job has had it
  for step in "${steps[@]}"; do ends "$step" || true; done
}

# on_nodes COUNT [srun options] COMMAND...: one task on each machine.
on_nodes() {
  local count=$1
  shift
  srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1 "$@"
}

# ray_step COUNT NODE-CHOICE [ray options]: Ray on those machines, in the background.
ray_step() {
  local count=$1 choice=$2
  shift 2
  on_nodes "$count" "$choice" bash -c '
    exec >"$0/ray-$SLURMD_NODENAME.log" 2>&1
    mkdir -p -m 700 -- "$RAY_TMPDIR"
    [[ -O $RAY_TMPDIR ]] || exit 1
    trap : TERM # is for Ray, which Slurm tells too
    "$@" --num-cpus="$SLURM_CPUS_ON_NODE" &
    wait $! || wait $! || code=$?
    rm -rf -- "$RAY_TMPDIR"
    exit "${code:-0}"
  ' "$logs" "$python" -m ray.scripts.scripts start --block --disable-usage-stats "$@" &
  steps+=($!)
}

# The address by which the other machines reach the first one. Asked on the last machine: a
# machine's own name often means its loopback device.
find_head_ip() {
  local name
  name=$(scontrol show node --oneliner "${nodes[0]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  on_nodes 1 --nodelist="${nodes[-1]}" getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }'
}

wait_for_head() {
  until (exec 3<>"/dev/tcp/$head_ip/$port") 2>/dev/null; do
    kill -0 "${steps[0]}" 2>/dev/null || fail "the Ray head ended: see $logs/ray-${nodes[0]}.log"
    ((SECONDS < join_timeout)) || fail "the Ray head was not up within $join_timeout s"
    sleep 0.5
  done
}

cd -- "$folder"
mkdir -p -- "$logs"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
unset RAY_ADDRESS
RAY_TMPDIR=/tmp/areal-$SLURM_JOB_ID # short: Ray keeps sockets there
RAY_AUTH_TOKEN=$("$python" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_TMPDIR RAY_AUTH_TOKEN RAY_AUTH_MODE=token PYTHONUNBUFFERED=1
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # when Ray is told to end, its work is over

trap end_all EXIT
trap 'exit 143' TERM INT

head_ip=$(find_head_ip)
[[ -n $head_ip ]] || fail "no IPv4 address of ${nodes[0]} is known on ${nodes[-1]}"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

ray_step 1 --nodelist="${nodes[0]}" \
  --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false \
  --num-gpus="$num_gpus"
wait_for_head
if ((${#nodes[@]} > 1)); then
  ray_step $((${#nodes[@]} - 1)) --exclude="${nodes[0]}" --address="$head_ip:$port" \
    --num-gpus="$num_gpus"
fi

"$python" -m areal.cli.main launch ray --address "$head_ip:$port" \
  --join-timeout "$join_timeout" "${arguments[@]}" &
run=$!
wait -n "$run" "${steps[@]}" || true
if kill -0 "$run" 2>/dev/null; then
  fail "Ray ended on a machine of the job, or the job was cancelled: see $logs/ray-*.log"
fi
wait "$run"
