#!/bin/bash
# Runs mine.yaml over two nodes. Not run on a cluster yet. See docs/how-to/schedulers.md.
#SBATCH --job-name=temper
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@180
set -eo pipefail

source env/bin/activate
export RAY_AUTH_MODE=token

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
head_address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address)

# --overlap: these steps stay, and share their nodes with the steps after them.
srun --overlap --nodes=1 --ntasks=1 -w "$head" \
    ray start --head --node-ip-address="$head_address" --port=6379 --num-gpus=8 --block &
for _ in $(seq 60); do
    ray status --address="$head_address:6379" && break
    sleep 2
done
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 -w "$node" \
        ray start --address="$head_address:6379" --num-gpus=8 --block &
done

# In the background, so that bash can pass on the SIGTERM that Slurm sends before the time limit.
temper-train --config-dir . --config-name mine run.resume=auto &
driver=$!
trap 'kill -TERM "$driver"' TERM
code=0
wait "$driver" || code=$?
# A trapped signal ends `wait` while the driver still saves.
while kill -0 "$driver" 2>/dev/null; do
    code=0
    wait "$driver" || code=$?
done
exit "$code"
