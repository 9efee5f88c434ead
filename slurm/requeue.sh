#!/usr/bin/env bash
# Requeue a SLURM job if its run can resume from where it stopped; called by train.sbatch after the run.
#
#     slurm/requeue.sh --before OUTPUT_DIR                  print the state of the run: attempts in summary.json, newest checkpoint
#     slurm/requeue.sh [--stopped] OUTPUT_DIR BEFORE        BEFORE: the output of the line above, from before the run started
#
# The launcher turns every exit code into 1, so the `status` in summary.json decides, if this job wrote it. A run that wrote
# none was killed. With --stopped it was killed because its time was over, and the job is requeued; otherwise the cause is unknown
# and a person must look.
set -euo pipefail

field() {
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get(sys.argv[2], ""))' "$output_dir/summary.json" "$1"
}

attempts() {
    if [[ -f $output_dir/summary.json ]]; then field attempt; else echo 0; fi
}

newest() {
    printf '%s\n' "$output_dir"/checkpoints/step-*/manifest.json | sort -V | tail -n 1
}

if [[ $1 == --before ]]; then
    output_dir=$2
    echo "$(attempts):$(newest)"
    exit
fi
stopped= unwritten=unknown
if [[ $1 == --stopped ]]; then
    stopped=yes unwritten=interrupted
    shift
fi
output_dir=$1
attempts_before=${2%%:*}
newest_before=${2#*:}
status=$unwritten reason=
if [[ $(attempts) != "$attempts_before" && $(field slurm_job_id) == "$SLURM_JOB_ID" ]]; then
    status=$(field status)
    reason=$(field reason)
fi

case $status in
    preempted | interrupted | worker_lost) ;;
    *)
        echo "not requeued: the status of $output_dir is $status"
        exit
        ;;
esac
if [[ $reason == "the file STOP" ]]; then
    echo "not requeued: the file STOP asked for an end"
    exit
fi
# A process short of memory, or a time limit too short for a checkpoint, would end every turn the same way. The first turn gets the
# benefit of the doubt.
if [[ -n ${SLURM_RESTART_COUNT:-} && $(newest) == "$newest_before" && ($status == worker_lost || -n $stopped) ]]; then
    echo "not requeued: the status of $output_dir is $status, and this turn saved nothing; fix what ends it and submit the job again"
    exit
fi
# A job that was cancelled or preempted needs no requeueing here: SLURM or its user has already decided.
state=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z_]*')
if [[ $state != JobState=RUNNING ]]; then
    echo "not requeued: the job is not running any more, $state"
    exit
fi
echo "requeued: the status of $output_dir is $status"
scontrol requeue "$SLURM_JOB_ID"
