# Sourced by the job files, in the project's root: how jobs start Python.
. slurm/site.sh
activate_environment
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # which srun does not take over from the job

# run_once PROGRAM ARGUMENT...: one process on the first node.
run_once() {
    srun --nodes=1 --ntasks=1 --ntasks-per-node=1 "${SRUN_OPTIONS[@]}" python -u "$@"
}

# export_rendezvous: MASTER_ADDR, by which Slurm itself reaches the first node, and MASTER_PORT, which follows from the
# job's number and lies below the ports that the system hands out.
export_rendezvous() {
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_ADDR=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
    export MASTER_ADDR MASTER_PORT
}

# train_on_all_tasks FOLDER SETTING...: one rank per task; what each prints goes to FOLDER/ranks/JOB-RANK.log.
train_on_all_tasks() {
    local folder=$1
    shift
    export_rendezvous
    export HYDRA_FULL_ERROR=1 # of an error after hours the ranks' logs keep the stack
    mkdir -p "$folder/ranks"
    echo "$(date -Is) job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, $SLURM_JOB_NODELIST: $folder"
    srun --kill-on-bad-exit=1 --open-mode=append --output="$folder/ranks/%j-%t.log" "${SRUN_OPTIONS[@]}" \
        python -u scripts/train.py "$@" output_dir="$folder" \
        trainer.num_nodes="$SLURM_JOB_NUM_NODES" trainer.devices="$SLURM_NTASKS_PER_NODE"
}
