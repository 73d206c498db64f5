#!/usr/bin/env bash
# A SLURM cluster of this machine alone, from Debian's packages, without systemd and without cgroups.
#
#   onenode.sh up [accounting]   installs what is missing and starts afresh; accounting adds slurmdbd on MariaDB
#   onenode.sh down              stops them and removes what was written, but for installed packages
#
# The node says that it has 16 CPUs, 256 GiB and two GPUs, so that the workflow's requests are granted as they are; the
# GPUs are other names of /dev/null. Everything lies in $ONENODE (/var/tmp/onenode), but for links to it in /etc/slurm,
# where a job's steps look for the configuration whatever their environment says.
set -euo pipefail

here=${ONENODE:-/var/tmp/onenode}
host=$(hostname -s)
socket=$here/mariadb/socket

main() {
  [ "$(id -u)" = 0 ] || fail "needs root"
  is_own || fail "$here is neither empty nor a cluster of onenode.sh; name another folder in ONENODE"
  case "${1:-}${2:+ $2}" in
    up) up off ;;
    "up accounting") up on ;;
    down) down ;;
    *) fail "usage: onenode.sh up [accounting] | down" ;;
  esac
}

# `down` removes the folder, so it must be one that `up` made, or may make.
is_own() {
  [ ! -e "$here" ] || { [ -d "$here" ] && { [ -f "$here/slurm.conf" ] || [ -z "$(ls -A "$here")" ]; }; }
}

up() {
  local accounting=$1 conf=/etc/slurm/slurm.conf
  [ ! -e $conf ] || [ "$(readlink $conf)" = "$here/slurm.conf" ] || fail "$conf is of another cluster"
  install_packages munge slurmctld slurmd slurm-client $([ "$accounting" = off ] || echo slurmdbd mariadb-server)
  down
  mkdir -p "$here" /etc/slurm
  touch "$here/slurm.conf" # from here on the folder is known as its own
  mkdir "$here"/{state,spool,log,run}
  for gpu in 0 1; do mknod "$here/gpu$gpu" c 1 3; done
  configure "$accounting"
  start_munge
  [ "$accounting" = off ] || start_accounts
  slurmctld
  until_true 30 scontrol ping
  slurmd -N "$host"
  until_true 30 bash -c "sinfo --noheader --format %t | grep -qx idle"
  [ "$accounting" = off ] || until_true 30 sacct --noheader --starttime now
}

down() {
  stop
  for name in slurm.conf gres.conf slurmdbd.conf; do
    [ "$(readlink /etc/slurm/$name)" != "$here/$name" ] || rm "/etc/slurm/$name"
  done
  rm -rf "$here"
}

# Ends the daemons of $here, each by the process id that it wrote.
stop() {
  local file pid
  for file in "$here"/run/{slurmd,slurmctld,slurmdbd}.pid "$here/mariadb/daemon.pid" "$here/munge/daemon.pid"; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null || true
    until_true 30 bash -c "! kill -0 $pid || grep -q 'State:.Z' /proc/$pid/status"
  done
}

install_packages() {
  local missing=()
  for name in "$@"; do
    dpkg-query --show --showformat '${Status}' "$name" 2>/dev/null | grep -q "ok installed" || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || fail "no apt-get to install ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 ||
    fail "cannot install ${missing[*]}"
}

configure() {
  cat >"$here/slurm.conf" <<CONF
ClusterName=onenode
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
StateSaveLocation=$here/state
SlurmdSpoolDir=$here/spool
SlurmctldPidFile=$here/run/slurmctld.pid
SlurmdPidFile=$here/run/slurmd.pid
SlurmctldLogFile=$here/log/slurmctld.log
SlurmdLogFile=$here/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MinJobAge=300
AccountingStorageType=accounting_storage/$([ "$1" = on ] && echo slurmdbd || echo none)
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=16 RealMemory=262144 Gres=gpu:2
PartitionName=gpu Nodes=$host Default=YES
CONF
  echo "Name=gpu File=$here/gpu[0-1]" >"$here/gres.conf"
  cat >"$here/slurmdbd.conf" <<CONF
DbdHost=localhost
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=33306
StorageUser=slurm
StoragePass=slurm
LogFile=$here/log/slurmdbd.log
PidFile=$here/run/slurmdbd.pid
CONF
  chmod 600 "$here/slurmdbd.conf"
  for name in slurm.conf gres.conf slurmdbd.conf; do
    ln -sfn "$here/$name" "/etc/slurm/$name"
  done
  getent hosts "$host" >/dev/null || echo "127.0.0.1 $host" >>/etc/hosts
}

# munged refuses to be root. One that runs already, a system's own, will do.
start_munge() {
  ! munge --no-input 2>/dev/null | unmunge >/dev/null 2>&1 || return 0
  install -d -o munge -g munge -m 755 /run/munge
  install -d -o munge -g munge -m 755 "$here/munge"
  setpriv --reuid munge --regid munge --clear-groups munged --pid-file "$here/munge/daemon.pid"
  until_true 30 bash -c "munge --no-input | unmunge"
}

# Root may submit as the account that the profile's site line names.
start_accounts() {
  local data=$here/mariadb/data
  install -d -o mysql -g mysql "$here/mariadb" "$data"
  mariadb-install-db --no-defaults --user=mysql --datadir="$data" --skip-test-db \
    --auth-root-authentication-method=normal >"$here/log/mariadb-install.log" 2>&1
  setsid mariadbd --no-defaults --user=mysql --datadir="$data" --socket="$socket" --bind-address=127.0.0.1 \
    --port=33306 --pid-file="$here/mariadb/daemon.pid" >"$here/log/mariadb.log" 2>&1 </dev/null &
  until_true 60 mariadb --no-defaults --socket="$socket" --user=root --execute "select 1"
  mariadb --no-defaults --socket="$socket" --user=root --execute "
    create database slurm_acct_db;
    create user slurm@'127.0.0.1' identified by 'slurm';
    create user slurm@localhost identified by 'slurm';
    grant all on slurm_acct_db.* to slurm@'127.0.0.1';
    grant all on slurm_acct_db.* to slurm@localhost;"
  slurmdbd
  until_true 60 sacctmgr --noheader list cluster
  sacctmgr --immediate add cluster onenode >"$here/log/sacctmgr.log"
  sacctmgr --immediate add account myproject cluster=onenode >>"$here/log/sacctmgr.log"
  sacctmgr --immediate add user root account=myproject cluster=onenode >>"$here/log/sacctmgr.log"
}

# until_true SECONDS COMMAND...
until_true() {
  local left=$(($1 * 5))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $((left -= 1)) -gt 0 ] || fail "waited in vain for: $*"
    sleep 0.2
  done
}

fail() {
  echo "onenode.sh: $*" >&2
  exit 1
}

main "$@"
