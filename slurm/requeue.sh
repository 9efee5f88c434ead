#!/usr/bin/env bash
# Give a SLURM job another turn if its run can go on from where it stopped; called by train.sbatch after the run.
#
#     slurm/requeue.sh --attempts OUTPUT_DIR                the attempts that summary.json counts so far
#     slurm/requeue.sh [--stopped] OUTPUT_DIR ATTEMPTS      ATTEMPTS: what the line above said before the run started
#
# The launcher turns every exit code into 1, so the `status` in summary.json decides. A run that wrote none was killed:
# with --stopped because its time was over, and it goes on; otherwise nobody knows why, and a person must look.
set -euo pipefail

field() {
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get(sys.argv[2], ""))' "$output_dir/summary.json" "$1"
}

attempts() {
    if [[ -f $output_dir/summary.json ]]; then field attempt; else echo 0; fi
}

if [[ $1 == --attempts ]]; then
    output_dir=$2
    attempts
    exit
fi
unwritten=unknown
if [[ $1 == --stopped ]]; then
    unwritten=interrupted
    shift
fi
output_dir=$1
if [[ $(attempts) == "$2" ]]; then status=$unwritten; else status=$(field status); fi

case $status in
    preempted | interrupted | worker_lost) ;;
    *)
        echo "not requeued: the status of $output_dir is $status"
        exit
        ;;
esac
# A job that was cancelled or preempted is in other hands already.
state=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z_]*')
if [[ $state != JobState=RUNNING ]]; then
    echo "not requeued: the job is not running any more, $state"
    exit
fi
echo "requeued: the status of $output_dir is $status"
scontrol requeue "$SLURM_JOB_ID"
