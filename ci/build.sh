#!/bin/sh
# Link the artifacts from committed records; fail where workloads.lock would change. On a machine with the GPU, KERNELDECL_TUNE=1 tunes.
set -euf
cd "${KERNELDECL_FOLDER:-.}"
locked=--locked
if [ "${KERNELDECL_TUNE:-}" = 1 ]; then locked=--require-measured; fi
kerneldecl build $locked ${KERNELDECL_PATTERNS:+$KERNELDECL_PATTERNS}
