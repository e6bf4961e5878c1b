#!/bin/bash
# A cloud node of a site with Penstock. Needs: bash, curl, slurmd; `share` is the site's, mounted by the image.
set -u
imds=${PENSTOCK_IMDS:-http://169.254.169.254}
export SLURM_CONF=${SLURM_CONF:-/etc/slurm/slurm.conf} # the image may have it elsewhere

say() { echo "penstock: $*"; }
token() { curl -sf --max-time 5 --retry 3 -X PUT "$imds/latest/api/token" -H "X-aws-ec2-metadata-token-ttl-seconds: 300"; }
ask() { curl -sf --max-time 5 --retry 3 -H "X-aws-ec2-metadata-token: $(token)" "$imds/latest/meta-data/$1"; }
end() { say "ends itself: $*"; shutdown -h now; exit 0; }

# 1. Whatever happens below, the instance ends itself. Without its tags, it could not be found.
lifetime_s=$(ask tags/instance/penstock:lifetime_s) || end "it cannot read its tags"
began_s=$SECONDS
# The instances of a gang get their names once all of them exist.
until node=$(ask tags/instance/penstock:node); do
  [ $((SECONDS - began_s)) -lt 300 ] || end "it has no name"
  sleep "${PENSTOCK_WATCH_S:-5}"
done

mount_all

# 2. Join Slurm, once Slurm wakes the node: slurmctld ignores one that registers before that, also while a job holds it already.
slurmd=
join() {
  until scontrol show node "$node" 2>/dev/null | grep -v POWERED_DOWN | grep -q "POWERING_UP\|ALLOCATED\|MIXED"; do sleep 1; done
  # slurmctld also ignores a node that says to have booted before that. Both times are whole seconds, of two clocks.
  sleep 2
  # On some sites, slurmctld starts this script with signals blocked; slurmd must be able to end.
  exec slurmd -D -N "$node" -b
}
join &
slurmd=$!
trap 'kill $slurmd 2>/dev/null' EXIT

# 3. Watch. An unreadable folder counts as silence, since the job's files are not safe then either.
while sleep "${PENSTOCK_WATCH_S:-5}"; do
  now_s=$(date +%s)
  [ $((SECONDS - began_s)) -lt "${lifetime_s%.*}" ] || end "its longest life, $lifetime_s s, is over"
  alive_s=$(stat -c %Y "$share/alive" 2>/dev/null || echo 0)
  [ $((now_s - alive_s)) -lt "$silent_s" ] || [ $((SECONDS - began_s)) -lt "$silent_s" ] ||
    end "penstockd has been silent for $silent_s s"
  kill -0 $slurmd 2>/dev/null || end "slurmd has ended"
  # EC2 reclaims a spot instance two minutes after its notice.
  if notice=$(ask spot/instance-action); then
    mkdir -p "$share/notices" && echo "$notice" >"$share/notices/.$node" && mv "$share/notices/.$node" "$share/notices/$node"
  fi
done
