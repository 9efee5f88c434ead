#!/usr/bin/env bash
# A real SLURM of two nodes on this one machine, in a folder of its own; as root.
#
#     apt-get install -y --no-install-recommends slurm-wlm munge
#     PORT=6917 slurm_up.sh up FOLDER       then: export SLURM_CONF=FOLDER/slurm.conf
#     slurm_up.sh down FOLDER
#
# Nodes n1 and n2 are two slurmd on ports PORT+1 and PORT+2. Each has two GPUs that do not exist; n2 has fewer CPUs. Their names do not
# resolve. Nothing outside of FOLDER is changed, nothing listens beyond this machine.
set -euo pipefail
base=$(realpath -m "$2")

if [[ $1 == down ]]; then
    # slurmctld by force: it takes eight seconds to write a state that nobody reads.
    for name in slurmctld slurmd.n1 slurmd.n2 munged; do
        [[ ! -f $base/$name.pid ]] || kill $([[ $name != slurmctld ]] || echo -KILL) "$(<"$base/$name.pid")" 2>/dev/null || true
    done
    for file in "$base"/*.pid; do
        pid=$(<"$file")
        for _ in {1..100}; do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done 2>/dev/null
    # What a slurmd leaves behind: the steps' own daemons, known by their configuration's folder.
    for process in /proc/[0-9]*; do
        if [[ $(tr '\0' ' ' 2>/dev/null <"$process/cmdline") == slurmstepd:* ]] &&
            tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -qx "SLURM_CONF=$base/slurm.conf"; then
            kill -9 "${process#/proc/}" || true
        fi
    done 2>/dev/null
    exit
fi

mkdir -p "$base"/{state,n1,n2,dev}
chmod 755 "$base"
(umask 077 && head -c 64 /dev/urandom >"$base/munge.key")
# Character devices, or SLURM sets no CUDA_VISIBLE_DEVICES; these are /dev/null.
for number in 0 1; do mknod "$base/dev/gpu$number" c 1 3; done
echo "NodeName=n[1-2] Name=gpu File=$base/dev/gpu[0-1]" >"$base/gres.conf"
# cred_expire: a job that was put back waits twice as long. CommunicationParameters: listen on the loopback device alone.
cat >"$base/slurm.conf" <<END
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=$PORT
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$base/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$base/state
SlurmctldPidFile=$base/slurmctld.pid
SlurmctldLogFile=$base/slurmctld.log
SlurmdSpoolDir=$base/%n
SlurmdPidFile=$base/slurmd.%n.pid
SlurmdLogFile=$base/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=5
GresTypes=gpu
ReturnToService=2
JobRequeue=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((PORT + 1)) CPUs=2 RealMemory=2000 Gres=gpu:2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((PORT + 2)) CPUs=1 RealMemory=2000 Gres=gpu:2
PartitionName=train Nodes=n[1-2] Default=YES MaxTime=1-00:00:00
END
export SLURM_CONF=$base/slurm.conf
munged --key-file="$base/munge.key" --socket="$base/munge.socket" --pid-file="$base/munged.pid" \
    --log-file="$base/munged.log" --seed-file="$base/state/munge.seed" --num-threads=2
slurmctld -c
slurmd -N n1
slurmd -N n2
for _ in {1..200}; do
    [[ $(sinfo --noheader --format=%T 2>/dev/null | sort -u) == idle ]] && exit
    sleep 0.1
done
echo "error: the nodes must be idle, got:" >&2
sinfo >&2
exit 1
