#!/bin/bash
# A command of kvcal on several nodes under Slurm, a rank for each GPU:
#
#     sbatch docs/scale/slurm.sh fit aqua-kv --model NAME --output /shared/NAME.kvcal.safetensors
#
# All nodes see the same folders: the model's, the output's, and $HF_HOME. RANKS_PER_NODE=N starts N ranks on each node
# instead of one for each GPU; a fit takes 24 in all. After a failure all ranks are started anew, up to RESTARTS times
# (3), and go on from the last layer; `--requeue` does the same where a node is lost. RESTARTS=0 is for commands with
# gates, as `eval --max-kl`, which would be run again only to fail them again.
#SBATCH --job-name=kvcal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --requeue
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # which srun does not take from sbatch since Slurm 22.05
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS_PER_NODE:-gpu}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:${PORT:-29500}" -m kvcal "$@"
