"""kerneldecl: a declarative, incremental build for tuned kernels.

`plan`, `build` and `load` are imported when they are first asked for: importing the package costs next to nothing.
"""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # `python -m kerneldecl` has Python search the current folder first. What lies there may be anybody's json.py: from here on, even
    # before the standard library is asked for anything, it is searched no more.
    del sys.path[0]

TYPE_CHECKING = False  # typing itself would be a quarter of a null build's imports
if TYPE_CHECKING:
    from kerneldecl.api import build, plan
    from kerneldecl.artifact.graph_starts import plain_starts
    from kerneldecl.artifact.load import Artifact, load

__all__ = ["Artifact", "build", "load", "plain_starts", "plan"]
_MODULES = {
    "Artifact": "kerneldecl.artifact.load",
    "build": "kerneldecl.api",
    "load": "kerneldecl.artifact.load",  # needs neither planner nor linker
    "plain_starts": "kerneldecl.artifact.graph_starts",
    "plan": "kerneldecl.api",
}
__version__ = "0.1.0"


if not TYPE_CHECKING:  # or a type checker would believe that every name is there

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'kerneldecl' has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
