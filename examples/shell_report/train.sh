#!/bin/bash
#SBATCH --job-name=shell-report
#SBATCH --gres=gpu:1
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A job that is neither Python nor PyTorch, with Penstock: counts to STEPS, a step at a time, and keeps its count in a file.
# In place of `step` and `save` stands your solver, JAX or TensorFlow program. Runs unchanged without Penstock.
#
#   FOLDER=... STEPS=... REPORT="penstock-report" train.sh
set -u
FOLDER=${FOLDER:-checkpoints/${SLURM_JOB_ID:-local}}
STEPS=${STEPS:-600}
REPORT=${REPORT:-penstock-report}
BATCH=32

step() { sleep "${STEP_S:-0.1}"; }
save() { echo "$count" >"$FOLDER/count.$epoch.tmp" && mv "$FOLDER/count.$epoch.tmp" "$FOLDER/count"; } # beside, then renamed
say() { $REPORT "$1" --checkpoints "$FOLDER" --epoch "$epoch" "${@:2}"; }
progress() { echo $((count * BATCH)); }

stopped=
trap 'stopped=1' TERM # Slurm's word to stop: finish the step, save

mkdir -p "$FOLDER"
count=$(cat "$FOLDER/count" 2>/dev/null || echo 0)
epoch=$($REPORT begin --checkpoints "$FOLDER" --progress "$(progress)" --total $((STEPS * BATCH))) || exit 1
while [ "$count" -lt "$STEPS" ] && [ -z "$stopped" ]; do
  step
  count=$((count + 1))
  [ $((count % 10)) = 0 ] || continue
  say steps --steps 10 --step-time-s "${STEP_S:-0.1}" --atomic-batch "$BATCH" --progress "$(progress)"
  request=$(say poll)
  case $? in
    0) save && say saved --request "$request" --seconds 0.01 --progress "$(progress)" ;;
    75) say end --outcome superseded --progress "$(progress)"; exit 75 ;;
  esac
done
save || exit 1
if [ -n "$stopped" ]; then say end --outcome stopped --progress "$(progress)"; exit 143; fi
say end --outcome completed --progress "$(progress)"
