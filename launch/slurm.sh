#!/bin/bash
# Never run on a cluster: tests parse it and try its command line.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

srun --kill-on-bad-exit=0 easypipe train run.yaml --set train.mesh=hybrid --set train.output_dir=/shared/runs/first --set train.checkpoint.every=500
code=$?
if [ "$code" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
