"""Owns what a worker process gets from its surroundings: variables, and how Python finds this package and nothing else.

Knows nothing of requests.

Code that workers run is the workspace's, this package's and that of installed packages. The current folder is none of them: whatever
`json.py` lies there must not be imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_KEPT = frozenset(
    {
        # Tools and their libraries.
        "PATH",
        "LD_LIBRARY_PATH",
        "CC",
        "CXX",
        # Whose processes they are, and where they may write.
        "HOME",
        "USER",
        "LOGNAME",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "XDG_RUNTIME_DIR",
        # How text and time are read.
        "LANG",
        "LANGUAGE",
        "TZ",
        # The interpreter that this one is.
        "PYTHONHOME",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPYCACHEPREFIX",
        "PYTHONUTF8",
        "VIRTUAL_ENV",
    }
)
_KEPT_PREFIXES = ("LC_", "CUDA", "NVIDIA_", "NVCC_", "TVM_", "KERNELDECL_", "OMP_", "OPENBLAS_", "MKL_")
"""Variables of CUDA, of TVM and of libraries with threads; LD_PRELOAD, PYTHONSTARTUP and what rules may want to know are not among them."""

_SECRET = frozenset({"KERNELDECL_SIGNING_KEY"})
"""Variables that are for builds, not for what they run."""

_PACKAGE = Path(__file__).resolve().parent.parent / "__init__.py"
# The package is found by its own path: its folder may be the current one, which is not to be searched.
_BOOT = """\
import importlib.util, sys
worker, file = sys.argv[1:3]
del sys.argv[1:3]
spec = importlib.util.spec_from_file_location("kerneldecl", file)
package = sys.modules["kerneldecl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module(worker).main()
"""


def command(*arguments: str) -> list[str]:
    """Return the command of a worker: this interpreter, safe from what lies in current folders, and this package."""
    return [sys.executable, "-P", "-c", _BOOT, "kerneldecl.runners.worker", str(_PACKAGE), *arguments]


def clean_environment(environment: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a worker gets. What can change a result is in a key, and variables are in none."""
    wanted = (name for name in environment if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and name not in _SECRET)
    kept = {name: environment[name] for name in wanted}
    # An empty entry stands for the current folder, and nobody has written it on purpose.
    folders = [str(Path(folder).resolve()) for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return {**kept, **({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}), **added}
