mount_all() {
  # A folder that cannot be mounted ends the instance: its job would not find its files. Nothing else may watch it yet, so no
  # mount may hang.
  local each at what rest where
  # Objects have no owner, and by default only root could write them. The role decides who may write the bucket.
  local all_users=(--allow-other --allow-delete --allow-overwrite --dir-mode 0777 --file-mode 0666)
  for each in "${mounts[@]}"; do
    read -r at what <<<"$each"
    rest=${what#*://} where=
    mkdir -p "$at"
    case $what in
    s3://*/*) where=(mount-s3 "${all_users[@]}" --prefix "${rest#*/}/" "${rest%%/*}" "$at") ;;
    s3://*) where=(mount-s3 "${all_users[@]}" "$rest" "$at") ;;
    efs://*) where=(mount -t efs -o tls "$rest:/" "$at") ;;
    fsx://*) where=(mount -t lustre -o relatime,flock "${rest%%/*}@tcp:/${rest#*/}" "$at") ;;
    esac
    timeout 300 "${where[@]}" || end "it cannot mount $what at $at"
  done
}
