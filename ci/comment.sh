#!/bin/sh
# Write gate.md as the pull request's one comment: a later run edits it. Needs the forge's own client (gh), and GH_TOKEN with pull-requests: write.
set -eu
out=${KERNELDECL_OUT:-.}
number=${KERNELDECL_PULL_REQUEST:?"set it to the pull request's number"}
mark="<!-- kerneldecl gate ${KERNELDECL_FOLDER:-.} -->"
{ echo "$mark"; cat "$out/gate.md"; } > "$out/comment.md"
found=$(gh api --paginate "repos/{owner}/{repo}/issues/$number/comments" --jq ".[] | select(.body | startswith(\"$mark\")) | .id" | head -n 1)
if [ -n "$found" ]; then
  gh api --method PATCH "repos/{owner}/{repo}/issues/comments/$found" --field "body=@$out/comment.md" > /dev/null
else
  gh api --method POST "repos/{owner}/{repo}/issues/$number/comments" --field "body=@$out/comment.md" > /dev/null
fi
