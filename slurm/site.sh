# Everything about this cluster, in one file. Source it before sbatch; every job sources it again.

# sbatch reads these; options on its command line win over them.
# export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=project SBATCH_GPUS_PER_NODE=8
# export SBATCH_EXCLUSIVE=exclusive # whole nodes with all their CPUs; on shared nodes give sbatch --cpus-per-task

# Options of every srun, for instance (--container-image=image.sqsh --container-mounts=/data --cpu-bind=cores).
SRUN_OPTIONS=()

# How often a job starts again after a crash (a killed rank, NCCL, ECC, memory) without a new checkpoint in between.
MAX_RESTARTS=${MAX_RESTARTS:-3}

# Makes `python` the project's interpreter. Runs on the first node of a job; srun hands the environment to the others.
activate_environment() {
    # module load cuda
    # export HF_HUB_OFFLINE=1 NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 # gloo: agreements, checkpoints
    if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
}
