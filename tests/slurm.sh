#!/usr/bin/env bash
# slurm.sh FOLDER PACKAGES NUMBER COUNT: SLURM 22.05 on machine NUMBER of COUNT (experiments/machines.py); the controller is on
# the first. Nothing is installed: PACKAGES holds the unpacked packages (slurmctld, slurmd, slurm-client, munge and what
# they need), which lie over /usr and /etc in the machine's own mounts. FOLDER holds munge.key.
set -euo pipefail
folder=$1 packages=$2 number=$3 count=$4
over=/tmp/over; mkdir -p $over; mount -t tmpfs over $over; mkdir -p $over/{usr,etc}{,.work}
for each in usr etc; do
    mount -t overlay $each -o "lowerdir=$packages/$each:/$each,upperdir=$over/$each,workdir=$over/$each.work" /$each
done
for each in $(seq "$count"); do echo "10.77.0.$each node$each"; done >> /etc/hosts
for each in slurmd slurmctld slurmstepd; do ln -sf $each-wlm /usr/sbin/$each; done
mkdir -p /etc/munge /etc/slurm /run/munge; chmod 700 /etc/munge
mount -t tmpfs munge /run/munge; chmod 755 /run/munge
install -m 400 "$folder/munge.key" /etc/munge/munge.key
cat > /etc/slurm/slurm.conf <<C
ClusterName=fresco
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile=/tmp/slurmctld.log
SlurmdLogFile=/tmp/slurmd.log
ReturnToService=2
$(for i in $(seq "$count"); do echo "NodeName=node$i NodeAddr=10.77.0.$i NodeHostname=node$i CPUs=2 RealMemory=1000"; done)
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
C
printf "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n" > /etc/slurm/cgroup.conf
# `ip netns exec` mounts /sys anew, which hides the cgroups that slurmd looks for.
mountpoint -q /sys/fs/cgroup || {
    mount -t tmpfs cgroups /sys/fs/cgroup; mkdir /sys/fs/cgroup/freezer
    mount -t cgroup -o freezer freezer /sys/fs/cgroup/freezer
}
mkdir -p /tmp/slurmctld /tmp/slurmd
munged --key-file=/etc/munge/munge.key --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
    --log-file=/tmp/munged.log --seed-file=/tmp/munge.seed --force
[ "$number" != 1 ] || slurmctld
slurmd -N "node$number"
