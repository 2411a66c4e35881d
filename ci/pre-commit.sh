#!/bin/sh
# Refuse a commit whose declarations are wrong, or whose lock and records do not hold what it declares. Runs nothing of TVM's, tunes nothing.
set -eu
kerneldecl check
kerneldecl check --stale
