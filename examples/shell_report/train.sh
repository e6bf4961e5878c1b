#!/bin/bash
#SBATCH --job-name=shell-report
#SBATCH --gres=gpu:1
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A job under Penstock that uses neither Python nor PyTorch. It counts to STEPS and keeps its count in a file.
# Replace `step` and `save` by your solver, JAX or TensorFlow program. The script runs unchanged without Penstock.
#
#   FOLDER=... STEPS=... REPORT="penstock-report" train.sh
set -u
FOLDER=${FOLDER:-checkpoints/${SLURM_JOB_ID:-local}}
STEPS=${STEPS:-600}
REPORT=${REPORT:-penstock-report}
BATCH=32

step() { sleep "${STEP_S:-0.1}"; }
save() { echo "$count" >"$FOLDER/count.$epoch.tmp" && mv "$FOLDER/count.$epoch.tmp" "$FOLDER/count"; } # write, then rename
report() { $REPORT "$1" --checkpoints "$FOLDER" --epoch "$epoch" "${@:2}"; }
progress() { echo $((count * BATCH)); }

stopped=
trap 'stopped=1' TERM # Slurm asks to stop: finish the step, then save

mkdir -p "$FOLDER"
count=$(cat "$FOLDER/count" 2>/dev/null || echo 0)
epoch=$($REPORT begin --checkpoints "$FOLDER" --progress "$(progress)" --total $((STEPS * BATCH))) || exit 1
while [ "$count" -lt "$STEPS" ] && [ -z "$stopped" ]; do
  step
  count=$((count + 1))
  [ $((count % 10)) = 0 ] || continue
  report steps --steps 10 --step-time-s "${STEP_S:-0.1}" --atomic-batch "$BATCH" --progress "$(progress)"
  request=$(report poll)
  case $? in
    0) save && report saved --request "$request" --seconds 0.01 --progress "$(progress)" ;;
    75) report end --outcome superseded --progress "$(progress)"; exit 75 ;;
  esac
done
save || exit 1
if [ -n "$stopped" ]; then report end --outcome stopped --progress "$(progress)"; exit 143; fi
report end --outcome completed --progress "$(progress)"
