"""Owns functions that are given as TensorIR, in TVMScript or as saved IR.

Knows nothing of what they compute. Only this rule's `signature` needs TVM, since it is in the file; attributes and problems do not.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneldecl.arrays import Array, integers_between, random_array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Rule, Signature, WorkspaceFile

NO_FILE = WorkspaceFile("")
RUN_NAME = "kerneldecl_tensor_ir"


@dataclass(frozen=True, kw_only=True)
class TensorIr(Rule):
    """A PrimFunc from a file; the arguments that it writes come last."""

    file: WorkspaceFile
    """TVMScript (.py), or what tvm.ir.save_json wrote (.json)."""
    function: str = ""
    """Name of the PrimFunc, where the file has several."""
    reference_file: WorkspaceFile = NO_FILE
    """Python file with a NumPy reference; by default the function itself is the reference, at a higher precision on the CPU."""
    reference_function: str = "reference"
    """Name of the function in reference_file: it takes the inputs and returns the output, or a sequence of outputs."""

    def problems(self) -> Iterator[str]:
        if Path(self.file).suffix not in {".py", ".json"}:
            yield f"file {self.file} is neither TVMScript (.py) nor saved IR (.json); write a path that ends so"
        if self.reference_file and Path(self.reference_file).suffix != ".py":
            yield f"reference_file {self.reference_file} is not a Python file (.py); write a path that ends so"

    def signature(self) -> Signature:
        """Return the function's parameters; raise ValueError unless they are inputs of fixed shapes, then outputs."""
        from kerneldecl.compiler.canonical import signature_of

        func = self.lower()
        args = [Arg(param.name, shape, dtype) for param, (shape, dtype) in zip(func.params, signature_of(func), strict=True)]
        written = _written(func)
        inputs = [arg for arg in args if arg.name not in written]
        if not written or args[: len(inputs)] != inputs:
            raise ValueError(f"{self.file}: the arguments that the function writes, {sorted(written)}, are not its last ones")
        return Signature(tuple(inputs), tuple(args[len(inputs) :]))

    def lower(self) -> Any:
        funcs = _prim_funcs(self.file, Path(self.file).read_bytes())
        if self.function in funcs:
            return funcs[self.function]
        if self.function or len(funcs) != 1:
            asked = f"function {self.function} is not in it" if self.function else "function is not said"
            raise ValueError(f"{self.file}: {asked}; the file has {', '.join(sorted(funcs)) or 'none'}")
        return next(iter(funcs.values()))

    def reference(self, *inputs: Array) -> Array | Sequence[Array]:
        if self.reference_file:
            found: Array | Sequence[Array] = runpy.run_path(self.reference_file, run_name=RUN_NAME)[self.reference_function](*inputs)
            return found
        from kerneldecl.compiler.reference import expected_outputs

        return expected_outputs(self.lower(), inputs, self.signature().outputs)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return random inputs: indices that are inside of what they index, divisors that are not zero, else as other rules."""
        from kerneldecl.compiler.input_values import allowed_values

        args, allowed = self.signature().inputs, allowed_values(self.lower())
        return [
            integers_between(rng, arg, allowed[at].low, allowed[at].high, allowed[at].without) if at in allowed else random_array(rng, arg)
            for at, arg in enumerate(args)
        ]

    def takes_special_values(self) -> bool:
        from kerneldecl.compiler.input_values import rounds_to_integers

        return super().takes_special_values() and not rounds_to_integers(self.lower())

    def tolerance(self) -> float:
        """Return the tolerance of the least precise argument plus the rounding of accumulations in the function's own dtypes."""
        from kerneldecl.compiler.reference import rounding

        return super().tolerance() + rounding(self.lower())

    def flops(self) -> int:
        """Return TVM's estimate."""
        import tvm
        from tvm.s_tir.analysis import estimate_tir_flops

        return int(estimate_tir_flops(tvm.IRModule({"main": self.lower()})))


@functools.lru_cache(maxsize=64)
def _prim_funcs(path: str, content: bytes) -> dict[str, Any]:
    """Return the PrimFuncs of a file by name, those inside its modules included; `content` tells versions of the file apart."""
    import tvm

    holders = {"main": tvm.ir.load_json(content.decode())} if path.endswith(".json") else runpy.run_path(path, run_name=RUN_NAME)
    modules = [value for value in holders.values() if isinstance(value, tvm.IRModule)]
    named = dict(holders) | {var.name_hint: func for module in modules for var, func in module.functions.items()}
    return {name: func for name, func in named.items() if isinstance(func, tvm.tirx.PrimFunc)}


def _written(func: Any) -> set[str]:
    """Return the names of the parameters that the function writes."""
    from tvm.s_tir import SBlockRealize
    from tvm.s_tir.analysis import get_sblock_read_write_region

    if not isinstance(func.body, SBlockRealize):
        raise ValueError("the function is not schedulable: it is made of blocks (T.sblock) under @T.prim_func(s_tir=True)")  # noqa: TRY004
    _, writes = get_sblock_read_write_region(func.body.block, {param: param for param in func.params})
    return {write.source.name for write in writes}
