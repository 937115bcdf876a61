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
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
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

# start_ranks FOLDER SETTING...: one rank per task, in the background, as process `step`. What each prints goes to
# FOLDER/ranks/JOB-RANK.log, and what srun says of them to the file `said`.
start_ranks() {
    local folder=$1
    shift
    export_rendezvous
    export HYDRA_FULL_ERROR=1 # of an error after hours the ranks' logs keep the stack
    mkdir -p "$folder/ranks"
    echo "$(date -Is) job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, $SLURM_JOB_NODELIST," \
        "CPUs per node: $SLURM_JOB_CPUS_PER_NODE: $folder"
    said=$folder/ranks/$SLURM_JOB_ID-srun.log
    srun --kill-on-bad-exit=1 --open-mode=append --output="$folder/ranks/%j-%t.log" "${SRUN_OPTIONS[@]}" \
        python -u scripts/train.py "$@" output_dir="$folder" \
        trainer.num_nodes="$SLURM_JOB_NUM_NODES" trainer.devices="$SLURM_NTASKS_PER_NODE" 2>"$said" &
    step=$!
}

# first_failure FILE: what srun reported first, such as "node1: task 3: Killed"; nothing if it reported no rank.
first_failure() {
    sed -nE 's/^srun: error: (.*: tasks? [0-9].*|Node failure.*)$/\1/p' "$1" | sed -n 1p
}

# is_refused FILE: a rank ended with status 1, as after wrong settings: another start would end like this one.
is_refused() {
    grep -qE ': tasks? [0-9,-]+: Exited with exit code 1$' "$1"
}

# is_crash FILE: a rank was killed, or ended with status 70 (a failure of the machine, see dmc/commands/train.py).
is_crash() {
    case $(first_failure "$1") in
        *'Exited with exit code 70') ! is_refused "$1" ;;
        '' | *'Exited with exit code'* | *Terminated*) false ;; # ended from outside
        *) true ;;
    esac
}

# describe_failure FOLDER FILE: why ranks ended, in one line: what srun reported first in FILE, and that rank's last line.
describe_failure() {
    local failure rank last=""
    failure=$(first_failure "$2")
    rank=$(sed -nE 's/.*: tasks? ([0-9]+).*/\1/p' <<<"$failure")
    [ -z "$rank" ] || last=$(tail -n 1 "$1/ranks/$SLURM_JOB_ID-$rank.log" 2>/dev/null | tr '\r' '\n' | tail -n 1) || true
    echo "${failure:-srun: $(tail -n 1 "$2")}${last:+; last line of its log: $last}"
}

# name_traces FOLDER: where ranks of this start left their last collectives, the command that compares them.
name_traces() {
    local traces
    for traces in "$1"/logs/flight_recorder/*/; do
        [ -z "$(find "$traces" -name 'rank_*' -newer "$1/starts.jsonl" 2>/dev/null)" ] ||
            echo "to compare the last collectives of the ranks: torchfrtrace --allow-incomplete-ranks ${traces%/}"
    done
}

# restart_after_a_crash FOLDER FILE: requeue after a crash, at most MAX_RESTARTS times from one checkpoint.
restart_after_a_crash() {
    local folder=$1 checkpoint crashes=$1/crashes.log before
    if ! is_crash "$2" || [ -d "$folder/final" ]; then return 0; fi
    checkpoint=$(find "$folder/checkpoints" -maxdepth 1 -name 'step_*[0-9]' 2>/dev/null | sort | tail -n 1) || true
    checkpoint=${checkpoint:-no checkpoint yet}
    before=$(grep -cF "job $THIS_JOB from $checkpoint: " "$crashes" 2>/dev/null) || true
    echo "$(date -Is) job $THIS_JOB from $checkpoint: $(describe_failure "$@")" >>"$crashes"
    if [ "${before:-0}" -ge "$MAX_RESTARTS" ]; then
        echo "not restarted: $before restarts from the same place (MAX_RESTARTS); last good checkpoint: $checkpoint"
    else
        echo "restart $((${before:-0} + 1)) of $MAX_RESTARTS from the last good checkpoint: $checkpoint"
        requeue || true
    fi
}

# train_on_all_tasks FOLDER SETTING...: train with one rank per task. SIGUSR1, which Slurm sends to this shell before the
# limit, is passed on; then the job is requeued, unless the run is done.
train_on_all_tasks() {
    local folder=$1 signaled="" timer="" status=0 step said
    start_ranks "$@"
    trap 'signaled=yes; kill -USR1 "$step"; [ -n "$timer" ] || { requeue_before_the_limit & timer=$!; }' USR1
    wait "$step" || status=$?
    while [ -n "$signaled" ] && kill -0 "$step" 2>/dev/null; do # a signal ends a wait
        status=0
        wait "$step" || status=$?
    done
    [ -z "$timer" ] || kill "$timer" 2>/dev/null || true # or it might requeue the next turn
    cat "$said"
    [ "$status" -ne 0 ] || return 0
    echo "$(date -Is) ended: $(describe_failure "$folder" "$said")"
    name_traces "$folder"
    if [ -n "$signaled" ] && ! is_refused "$said"; then requeue || true; else restart_after_a_crash "$folder" "$said"; fi
    return "$status"
}
