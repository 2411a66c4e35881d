#!/bin/sh
# Compare with KERNELDECL_AGAINST (a git revision, a lock or an artifact): gate.md is for a comment, gate.xml for the CI's page of tests.
# Fails with 1 where an entry is slower than KERNELDECL_BUDGET allows, is missing or unverified. Without the revision's lock there is no gate.
set -eu
cd "${KERNELDECL_FOLDER:-.}"
against=${KERNELDECL_AGAINST:?"set it to what to compare with, such as origin/main"}
out=${KERNELDECL_OUT:-.}
if git rev-parse --quiet --verify "$against^{commit}" > /dev/null 2>&1 && ! git cat-file -e "$against:./workloads.lock" 2> /dev/null; then
  echo "no workloads.lock in $against: nothing to compare with" | tee "$out/gate.md"
  exit 0
fi
status=0
kerneldecl gate --against "$against" --budget "${KERNELDECL_BUDGET:-2%}" --format markdown > "$out/gate.md" || status=$?
kerneldecl gate --against "$against" --budget "${KERNELDECL_BUDGET:-2%}" --format junit > "$out/gate.xml" || true
cat "$out/gate.md"
exit $status
