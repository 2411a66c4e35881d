#!/bin/sh
# Fail with 3 where committed records do not hold what is declared, and say what a GPU would have to measure. Needs no GPU and no compiler.
set -euf
kerneldecl -C "${KERNELDECL_FOLDER:-.}" check --stale ${KERNELDECL_PATTERNS:+$KERNELDECL_PATTERNS}
