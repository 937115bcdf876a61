#!/usr/bin/env bash
# One ramp, and from each of its milestones a run that solidifies there, each a job that waits for the ramp's:
# slurm/branches.sh --nodes=4 experiment=llama2_7b_ramp
# Words with -- are sbatch's options, the others settings. Submit it again at any time: what is finished is reused.
set -euo pipefail
. slurm/launch.sh
options=()
while [[ ${1-} == --* ]]; do
    options+=("$1")
    shift
done
values=$(python slurm/setting.py output_dir,training.milestones.ratios "$@")
{ read -r folder; read -r ratios || true; } <<< "$values"
ramp=$(sbatch --parsable --job-name=ramp "${options[@]}" slurm/train.sbatch "$@")
echo "$ramp $folder"
for ratio in $ratios; do
    job=$(sbatch --parsable --job-name="cr$ratio" --dependency="afterok:$ramp" --kill-on-invalid-dep=yes \
        "${options[@]}" slurm/train.sbatch "$@" compression.target_ratio="$ratio" \
        training.branch_from="$folder/milestones/cr$ratio" 'training.milestones.ratios=[]' \
        'training.snapshot_ratios=[]' output_dir="$folder/branches/cr$ratio")
    echo "$job $folder/branches/cr$ratio"
done
