#!/usr/bin/env bash
# Write the change of a predicted step as Markdown: compare.sh BASE_SOURCE NEW_SOURCE COMMENT.md
# HARDWARE is the device, OPTIONS are further options of `hespas simulate`.
set -euo pipefail
base=$1 new=$2 comment=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
read -r -a options <<< "${OPTIONS:-}"
predict() {
  hespas simulate "$1" --hardware "$HARDWARE" ${options[@]+"${options[@]}"} --json "$2" --quiet | head -n 1
}
{
  echo "### Predicted step of \`$new\` on $HARDWARE"
  echo
  if [ -e "$base" ]; then
    before=$(predict "$base" "$scratch/base.json")
    after=$(predict "$new" "$scratch/new.json")
    echo "| | |"
    echo "|---|---|"
    echo "| before | $before |"
    echo "| after | $after |"
    echo
    echo '```'
    hespas simulate --compare "$scratch/base.json" "$scratch/new.json" --quiet
    echo '```'
  else
    predict "$new" "$scratch/new.json"
    echo
    echo "The file is new."
  fi
} > "$comment"
