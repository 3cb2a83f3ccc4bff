#!/bin/bash
# The part of a job's script that brings Turnout up: the services on this node, which is the trainer's, and an engine agent
# on each node of ROLLOUT_NODES, a list as Slurm writes it. The next job of the same name goes on with what this one left.
#SBATCH --signal=B:TERM@60
set -eu
: "${ROLLOUT_NODES:?a list of nodes}"
run=${RUN:-my-run}
here=$(hostname)

# On nodes that others can reach or log in to, TLS and tokens in place of --insecure: docs/security.md.
turnout up --data-dir "/local/$SLURM_JOB_NAME/turnout" --insecure \
    --buffer "$here:50051" --engine "$here:50052" --scheduler "$here:50053" &
services=$!
# At the end of the job's time the services get to end in order.
trap 'kill "$services" 2>/dev/null || true; wait "$services" || true' EXIT
trap 'exit 143' TERM

# shellcheck disable=SC2016  # each node has a name of its own
srun --overlap --ntasks-per-node=1 --nodelist="$ROLLOUT_NODES" --nodes="$(scontrol show hostnames "$ROLLOUT_NODES" | wc -l)" \
    sh -c 'exec turnout engine serve --agent --insecure --no-replica-weights --listen "$(hostname):50061" \
        --replica "$(hostname)-0:standalone" --vllm-config vllm.yaml' &

for node in $(scontrol show hostnames "$ROLLOUT_NODES"); do
    until turnout engine register "$run" --engine "$here:50052" --agent "$node:50061"; do
        kill -0 "$services"  # else nobody is there to register with, ever
        sleep 2
    done
done

# The trainer, told of $here:50051, :50052 and :50053; not exec, which would forget the services.
"$@" &
wait $!
