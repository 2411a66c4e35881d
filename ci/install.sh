#!/bin/sh
# Install kerneldecl: KERNELDECL_INSTALL is what pip gets (default: kerneldecl), KERNELDECL_EXTRAS its extras.
set -eu
if command -v kerneldecl > /dev/null; then exit 0; fi
python3 -m pip install --quiet --disable-pip-version-check "${KERNELDECL_INSTALL:-kerneldecl}${KERNELDECL_EXTRAS:+[$KERNELDECL_EXTRAS]}"
