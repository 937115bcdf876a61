# Sourced by the job files, in the project's root: how jobs start Python.
. slurm/site.sh
activate_environment
# srun does not take --cpus-per-task over from the job; where it was not given, a step has the CPUs of its job: one for
# each task, unless the job has whole nodes (--exclusive).
[ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Of an array one task has the number of the whole array, which would stand for all its tasks.
THIS_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-${SLURM_JOB_ID-}}

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

# requeue: ask for another turn of this job, or of this task of an array; here, for a container has no scontrol.
requeue() {
    scontrol requeue "$THIS_JOB"
}

# requeue_before_the_limit: what does not end in time, such as an export, begins again from the last checkpoint.
requeue_before_the_limit() {
    local end
    end=$(squeue --noheader --jobs="$THIS_JOB" --format=%e)
    end=$(date -d "$end" +%s 2>/dev/null) || return 0 # there is no limit
    end=$((end - $(date +%s) - 20))
    sleep $((end > 0 ? end : 0))
    requeue
}

# train_on_all_tasks FOLDER SETTING...: one rank per task; what each prints goes to FOLDER/ranks/JOB-RANK.log. SIGUSR1,
# which Slurm sends to this shell before the limit, is passed on; then the job is requeued, unless the run is done.
train_on_all_tasks() {
    local folder=$1
    shift
    export_rendezvous
    export HYDRA_FULL_ERROR=1 # of an error after hours the ranks' logs keep the stack
    mkdir -p "$folder/ranks"
    echo "$(date -Is) job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, $SLURM_JOB_NODELIST," \
        "CPUs per node: $SLURM_JOB_CPUS_PER_NODE: $folder"
    local told="" timer="" status=0
    srun --kill-on-bad-exit=1 --open-mode=append --output="$folder/ranks/%j-%t.log" "${SRUN_OPTIONS[@]}" \
        python -u scripts/train.py "$@" output_dir="$folder" \
        trainer.num_nodes="$SLURM_JOB_NUM_NODES" trainer.devices="$SLURM_NTASKS_PER_NODE" &
    local step=$!
    trap 'told=yes; kill -USR1 "$step"; [ -n "$timer" ] || { requeue_before_the_limit & timer=$!; }' USR1
    wait "$step" || status=$?
    while [ -n "$told" ] && kill -0 "$step" 2>/dev/null; do # a signal ends a wait
        status=0
        wait "$step" || status=$?
    done
    [ -z "$timer" ] || kill "$timer" 2>/dev/null || true # or it might requeue the next turn
    if [ -n "$told" ] && [ "$status" -ne 0 ]; then requeue || true; fi
    return "$status"
}
