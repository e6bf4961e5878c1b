#!/bin/bash
# An instance that runs one job, or its part of one, without Slurm. Needs: bash, curl, tar, setpriv. The job, its results and the
# daemon's sign of life travel through S3, by links that are valid only for this run. They are set above.
# On several nodes, each instance runs the script, all from the same moment. The first node speaks for all: it ends when all have
# ended, and its exit status is the first that is not 0.
set -u
imds=${PENSTOCK_IMDS:-http://169.254.169.254}
root=${PENSTOCK_ROOT:-}
pause_s=${PENSTOCK_WATCH_S:-5}

say() { echo "penstock: $*"; }
token() { curl -sf --max-time 5 --retry 3 -X PUT "$imds/latest/api/token" -H "X-aws-ec2-metadata-token-ttl-seconds: 300"; }
ask() { curl -sf --max-time 5 --retry 3 -H "X-aws-ec2-metadata-token: $(token)" "$imds/latest/meta-data/$1"; }
end() { say "ends itself: $*"; shutdown -h now; exit 0; }
get() { curl -sf --connect-timeout 10 --retry 3 -o "$2" "$1"; }
put() { curl -sf --connect-timeout 10 --retry 5 --retry-all-errors -o /dev/null -T "$2" "$1"; }

# 1. Whatever happens below, the instance ends itself. Without its tags, it could not be found.
lifetime_s=$(ask tags/instance/penstock:lifetime_s) || end "it cannot read its tags"
home=$root/var/lib/penstock/run
mkdir -p "$home" && cd "$home" || end "$home cannot be made"
watch() {
  local began_s=$SECONDS last_word_s=$SECONDS alive_s
  while sleep "$pause_s"; do
    [ $((SECONDS - began_s)) -lt "${lifetime_s%.*}" ] || end "its longest life, $lifetime_s s, is over"
    alive_s=$(curl -sf --max-time 10 "$get_alive") || alive_s=0
    [ $(($(date +%s) - ${alive_s:-0})) -ge "$silent_s" ] || last_word_s=$SECONDS
    [ $((SECONDS - last_word_s)) -lt "$silent_s" ] || end "penstockd has been silent for $silent_s s"
  done
}
watch &

# The instances of a gang get their names once all of them exist.
count=$((${#nodes[@]} > 1 ? ${#nodes[@]} : 1)) rank=0
if [ "$count" -gt 1 ]; then
  until node=$(ask tags/instance/penstock:node); do
    [ $SECONDS -lt 300 ] || end "it has no name"
    sleep "$pause_s"
  done
  while [ "${nodes[rank]-}" != "$node" ]; do
    rank=$((rank + 1))
    [ "$rank" -lt "$count" ] || end "the run has no node $node"
  done
fi
get_nth() { local link=get_$1$2; get "${!link}" "$1$2"; }
put_nth() { local link=put_$1$2; put "${!link}" "$3"; }

mount_all

# 2. The cloud runner uploads the job.
until get "$get_input" input.tar.gz; do sleep "$pause_s"; done
# The archive is the user's, so the user unpacks it: root would write wherever the archive says. Root's own files stay in `home`.
as=()
if [ -n "$user" ] && [ "$user" != "$(id -un)" ]; then
  # Not runuser or su: they stay as parents, and kill their children 2 s after a SIGTERM.
  as=(setpriv --reuid "$user" --regid "$(id -g "$user")" --init-groups --reset-env)
fi
work=$home/job
mkdir "$work" && chmod 755 "$home" && { [ ${#as[@]} = 0 ] || chown "$user" "$work"; } || end "$work cannot be made"
"${as[@]}" tar -xzf - -C "$work" --no-same-owner <input.tar.gz && rm input.tar.gz || end "its input cannot be unpacked"
named=$("${as[@]}" cat "$work/directory")
case $named/ in *[!/]/../* | */../* | [!/]*) end "its folder $named is no absolute path" ;; esac
directory=$root$named
top=$root/$(echo "$named" | cut -d/ -f2)
case ${top#"$root"} in /home | /mnt | /srv | /media | /scratch | /data | /work | /projects) ours=1 ;; *) ours= ;; esac
if [ ! -e "$directory" ] && { [ "$ours" ] || [ ! -e "$top" ]; }; then
  mkdir -p "$directory" && { [ ${#as[@]} = 0 ] || chown "$user" "$directory"; } || end "$directory cannot be made"
fi
# Elsewhere, such as in /etc or in a folder that the image has already, only the user's own rights count.
"${as[@]}" mkdir -p "$directory" && "${as[@]}" cp -a "$work/work/." "$directory/" && "${as[@]}" rm -r "$work/work" ||
  end "$directory cannot be filled: $user may not write it"
"${as[@]}" chmod 755 "$work/script"
# In a container, if the script names its image. Without a daemon: apptainer runs it as the user.
inside=()
if image=$("${as[@]}" cat "$work/container") && [ -n "$image" ]; then
  inside=(apptainer exec --nv --pwd "$directory" --bind "$directory" --bind "$work")
  for each in ${mounts[@]+"${mounts[@]}"}; do inside+=(--bind "${each%% *}"); done
  inside+=("$image")
fi
# shellcheck disable=SC2016  # the user's shell expands it
run='set -a; . "$1/environment"; [ ! -e "$1/../gang" ] || . "$1/../gang"; set +a; cd "$2" && shift 2 || exit 1
  command -v "$1" >/dev/null || { echo "penstock: the image of the instance has no $1"; exit 127; }; exec "$@"'
sh=("${as[@]}" bash -c "$run" penstock "$work" "$directory" ${inside[@]+"${inside[@]}"} "$work/script")
# All instances of a gang begin together, and know each other's addresses.
if [ "$count" -gt 1 ]; then
  ask local-ipv4 >address && put_nth joined "$rank" address || end "it cannot tell the others its address"
  addresses=()
  for ((n = 0; n < count; n++)); do
    until get_nth joined "$n"; do sleep "$pause_s"; done
    addresses+=("$(tr -cd 0-9. <"joined$n")")
  done
  list=$(IFS=,; echo "${addresses[*]}")
  # The script runs once on each node, like a task of `srun --ntasks-per-node=1`.
  printf '%s\n' "MASTER_ADDR=${addresses[0]}" MASTER_PORT=29500 \
    "SLURM_JOB_NODELIST=$list" "SLURM_NODELIST=$list" "SLURM_JOB_NUM_NODES=$count" "SLURM_NNODES=$count" \
    "SLURM_NTASKS=$count" "SLURM_NPROCS=$count" SLURM_NTASKS_PER_NODE=1 "SLURM_TASKS_PER_NODE='1(x$count)'" \
    "SLURM_NODEID=$rank" "SLURM_PROCID=$rank" SLURM_LOCALID=0 >gang
fi
: >log
begun=$(date +@%s.%N)
# By default, bash blocks some signals for background jobs. With job control, each job has its own process group and gets them.
set -m
"${sh[@]}" >>log 2>&1 </dev/null &
job=$!
set +m
[ "$rank" -gt 0 ] || { echo "$(date +%s)" >started && put "$put_started" started; }

# 3. Watch. New output is uploaded at once, at most the last megabyte. The whole output follows at the end.
sent=0
ended=result
asked_s=
failed=0
others=() # of the first node: the other nodes that have not ended
for ((n = 1; rank == 0 && n < count; n++)); do others+=("$n"); done
tail_goes() {
  local size
  size=$(stat -c %s log)
  [ "$size" -gt "$sent" ] || return 0
  local from=$((size - sent > 1048576 ? size - 1048576 : sent > 65536 ? sent - 65536 : 0))
  { echo "$from"; tail -c +$((from + 1)) log | head -c $((size - from)); } >tail && put "$put_tail" tail && sent=$size
}
leave() {
  [ -z "$asked_s" ] || return 0
  say "$1"
  asked_s=$SECONDS
  kill -TERM -- -$job 2>/dev/null
  [ "$count" = 1 ] || { echo stop >told && put "$put_stop" told; }
}
stop() {
  [ -n "$asked_s" ] || ended=stopped
  leave "$1"
}
look() {
  if ask spot/instance-action >/dev/null; then stop "EC2 takes the instance back"; fi
  if get "$get_stop" stop; then stop "it is recalled"; fi
  local n left=()
  for n in ${others[@]+"${others[@]}"}; do
    if ! get_nth ended "$n"; then
      left+=("$n")
    elif [ -z "$asked_s" ] && [ "$(cat "ended$n")" != 0 ]; then
      failed=$(cat "ended$n")
      leave "node $n has ended with $failed"
    fi
  done
  others=(${left[@]+"${left[@]}"})
}
# A shell without a trap dies at once of the signal on which its children still save, so wait for the whole group.
alive() { kill -0 $job 2>/dev/null || { [ -n "$asked_s" ] && kill -0 -- -$job 2>/dev/null; }; }
while alive; do
  if [ -n "$asked_s" ] && [ $((SECONDS - asked_s)) -ge "$save_s" ]; then
    say "it is killed: it has not ended within $save_s s"
    kill -KILL -- -$job 2>/dev/null
    break
  fi
  sleep "$pause_s"
  [ "$rank" -gt 0 ] || tail_goes
  look
done
wait $job
code=$?

# 4. Upload everything, the exit status last, and wait for termination.
nth= new=()
[ "$rank" = 0 ] || nth=$rank
# Each node has a copy of the input, and of earlier output. An old copy must not replace what another node has made of it.
[ "$count" = 1 ] || new=(--newer "$begun")
files() {
  "${as[@]}" bash -c 'cd "$1" && xargs -0 sh -c "for each; do [ ! -e \"\$each\" ] || printf \"%s\\0\" \"\$each\"; done" sh <"$2/outputs" |
    tar -czf - "${@:3}" --null -T -' pack "$directory" "$work" ${new[@]+"${new[@]}"} >output.tar.gz
  put_nth output "$nth" output.tar.gz
}
if [ "$count" = 1 ]; then
  put "$put_log" log
  files
elif [ "$rank" -gt 0 ]; then
  put_nth log "$rank" log
  files
  echo $code >ended && put_nth ended "$rank" ended
  say "the job has ended with $code here"
  until get "$get_result" over || get "$get_stopped" over; do sleep "$pause_s"; done
  sleep "$linger_s"
  end "its job is over"
else
  [ $code = 0 ] || [ -n "$asked_s" ] || failed=$code
  [ $failed = 0 ] || leave "node 0 has ended with $failed"
  files
  # EC2 takes an instance two minutes after its notice. If all may stay, a lost one makes penstockd end the run.
  while [ ${#others[@]} -gt 0 ] && { [ $ended = result ] || [ $((SECONDS - asked_s)) -lt $((save_s + 30)) ]; }; do
    sleep "$pause_s"
    look
  done
  [ $failed = 0 ] || code=$failed
  for ((n = 1; n < count; n++)); do
    { echo "penstock: output of node $n:" && get_nth log "$n" && cat "log$n"; } >>log || echo "penstock: it is lost" >>log
  done
  put "$put_log" log
fi
echo "$code ${others[*]-}" >$ended
if [ $ended = result ]; then put "$put_result" result; else put "$put_stopped" stopped; fi
say "the job has ended with $code"
sleep "$linger_s"
end "its job is over"
