"""Owns choosing among the kernels that one declaration was expanded to, by the arguments of a call.

Knows nothing of artifacts' files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kerneldecl.artifact.call import Kernel
from kerneldecl.artifact.kernels import tensor
from kerneldecl.diagnostics.signatures import signature_text

_Shapes = tuple[tuple[int, ...], ...]


class Dispatch:
    """The kernels of one declaration, called as one: inputs choose the kernel whose shapes and dtypes they have.

    Where none has them, `fallback` is called with the same arguments; without a fallback that is a ValueError that lists the kernels.
    """

    def __init__(self, name: str, kernels: Sequence[Kernel], fallback: Callable[..., Any] | None = None) -> None:
        self.__name__ = name
        self.kernels = tuple(kernels)
        self.fallback = fallback
        self._by_shapes: dict[_Shapes, list[Kernel]] = {}
        for kernel in kernels:
            self._by_shapes.setdefault(tuple(arg.shape for arg in kernel.signature.given), []).append(kernel)
        self._inputs = {len(kernel.signature.given) for kernel in kernels}

    def chosen(self, *args: Any) -> Kernel | None:
        """Return the kernel for inputs, which outputs may follow; None where there is none."""
        for count in self._inputs:
            fitting = self._by_shapes.get(tuple([getattr(arg, "shape", ()) for arg in args[:count]]), ())
            if len(fitting) == 1:
                return fitting[0]  # a wrong dtype is then the kernel's own sentence
            if fitting:
                dtypes = [str(tensor(arg).dtype) for arg in args[:count]]
                return next((each for each in fitting if [arg.dtype for arg in each.signature.given] == dtypes), None)
        return None

    def __call__(self, *args: Any) -> Any:
        kernel = self.chosen(*args) or self.fallback
        if kernel is None:
            known = "; ".join(signature_text(each.__name__, each.signature) for each in self.kernels)
            given = ", ".join(str(list(getattr(arg, "shape", ()))) for arg in args)
            raise ValueError(f"no kernel of {self.__name__} takes arrays of shapes {given}, and there is no fallback; there are {known}")
        return kernel(*args)

    def __repr__(self) -> str:
        fallback = f", else {getattr(self.fallback, '__qualname__', self.fallback)}" if self.fallback else ""
        return f"<{self.__name__}: {len(self.kernels)} kernels by the arguments' shapes{fallback}>"
