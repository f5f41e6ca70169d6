#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
set -euo pipefail

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun does not take over by itself
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((29500 + SLURM_JOB_ID % 1000)) # another one for each job

# One torchrun on each node, which starts a rank for each GPU.
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$port" train.py
