"""Owns how a torch.export program becomes a Relax module.

Knows nothing of other formats, nor of what follows the import.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler.graph.named_constants import bind_params
from kerneldecl.compiler.model_import.model_error import IMPORT_ERRORS, ModelError, last_line
from kerneldecl.compiler.model_import.torch_arithmetic import ARITHMETIC
from kerneldecl.compiler.model_import.torch_attention import attention
from kerneldecl.compiler.model_import.torch_bags import BAGS
from kerneldecl.compiler.model_import.torch_caches import CACHES
from kerneldecl.compiler.model_import.torch_constants import constant_values
from kerneldecl.compiler.model_import.torch_contractions import CONTRACTIONS
from kerneldecl.compiler.model_import.torch_dims import named_dims
from kerneldecl.compiler.model_import.torch_dtypes import with_torch_dtypes
from kerneldecl.compiler.model_import.torch_images import IMAGES
from kerneldecl.compiler.model_import.torch_indices import INDICES
from kerneldecl.compiler.model_import.torch_pools import POOLS
from kerneldecl.compiler.model_import.torch_recurrent import RECURRENT
from kerneldecl.compiler.model_import.torch_reductions import REDUCTIONS
from kerneldecl.compiler.model_import.torch_scatters import SCATTERS
from kerneldecl.compiler.model_import.torch_slices import SLICES

_CUSTOM = re.compile(r"failed to resolve (torch\.ops\.\S+) to an operator")
"""What torch says of an operator that a package registers, which is not imported here."""
_KEPT = ("scaled_dot_product_attention", "_scaled_dot_product_attention_math", "rms_norm")
_OWN = {
    **ARITHMETIC,
    **BAGS,
    **CACHES,
    **CONTRACTIONS,
    **IMAGES,
    **INDICES,
    **POOLS,
    **RECURRENT,
    **REDUCTIONS,
    **SCATTERS,
    **SLICES,
    "scaled_dot_product_attention.default": attention,
}


def from_torch(path: Path, dims: Sequence[str] = ()) -> tvm.IRModule:
    """Return a saved program as a module; `dims` name the dynamic dimensions, as `named_dims` says."""
    with _no_collections():
        return _read(path, dims)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Pause the collector of reference cycles: torch's modules and graphs are hundreds of thousands of objects that stay, and that it
    would traverse again and again while more are made."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _read(path: Path, dims: Sequence[str]) -> tvm.IRModule:
    try:
        import torch
    except ImportError:
        raise ModelError("the package torch is not installed", "pip install torch, or export the model as ONNX") from None
    way_out = "save it with torch.export.save of this torch"
    if not zipfile.is_zipfile(path):
        raise ModelError("not a zip archive, or not a whole one", way_out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own deprecated functions
        with _logged() as errors:
            try:
                program = torch.export.load(path)
            except (zipfile.BadZipFile, *IMPORT_ERRORS) as error:
                reason = last_line(errors[0] if errors else error).partition(". This is an internal")[0]
                if custom := _CUSTOM.search(reason):
                    way_out = "export the module with an implementation that is written in torch's own operators"
                    raise ModelError(f"it calls {custom[1]}, which is no operator of torch but of a package", way_out) from None
                raise ModelError(f"not a program that torch {torch.__version__} can read: {reason}", way_out) from None
        return module_of_program(program, dims)


@contextlib.contextmanager
def _logged() -> Iterator[list[Any]]:
    """Collect the errors that torch logs with a traceback, before it raises one that says no more than that it has logged one."""
    errors: list[Any] = []

    def keep(record: logging.LogRecord) -> bool:
        errors.extend([record.exc_info[1]] if record.exc_info else [])
        return False

    logger = logging.getLogger("torch.export")
    logger.addFilter(keep)
    try:
        yield errors
    finally:
        logger.removeFilter(keep)


def module_of_program(program: Any, dims: Sequence[str] = ()) -> tvm.IRModule:
    """Return a torch.export program as a module whose constants are its weights; raise ModelError where an operator is unknown."""
    return bound(*module_with_parameters(program, dims))


def module_with_parameters(program: Any, dims: Sequence[str] = ()) -> tuple[tvm.IRModule, dict[str, tvm.runtime.Tensor], dict[str, str]]:
    """Return a program's module whose weights are parameters of `main`, their values, and the names that torch gives them.

    Values and names (`layer1.0.conv1.weight`) are by the names of the function's parameters (`p_layer1_0_conv1_weight`), which
    follow its inputs.
    """
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    try:
        lowered = _decomposed(program)
        importer = ExportedProgramImporter()
        importer.update_convert_map({name: _with(importer, convert, importer.convert_map.get(name)) for name, convert in _OWN.items()})
        known = constant_values(lowered)
        _refuse_unknown(lowered, importer.convert_map, known)
        importer.update_convert_map({name: _reported(importer, name, convert, known) for name, convert in importer.convert_map.items()})
        mod = importer.from_exported_program(
            lowered, keep_params_as_input=True, unwrap_unit_return_tuple=False, no_bind_return_tuple=False, custom_convert_map=None
        )
    except ModelError:
        raise
    except IMPORT_ERRORS as error:
        raise ModelError(f"TVM's importer does not take it: {last_line(error)}", "export the model as ONNX") from None
    function = mod["main"]
    held = dict(zip(dict(lowered.named_parameters()), function.attrs.get("params", ()), strict=True))
    names = {spec.arg.name: spec.target for spec in lowered.graph_signature.input_specs if spec.target in held}
    mod["main"] = function.without_attr("params")
    values = {parameter: held[name] for parameter, name in names.items()}
    return named_dims(mod, lowered, dims), values, names


def bound(mod: tvm.IRModule, values: Mapping[str, tvm.runtime.Tensor], names: Mapping[str, str] | None = None) -> tvm.IRModule:
    """Return the module with its weights as constants, which keep their names in the model."""
    return bind_params(mod, values, names or {})


def _decomposed(program: Any) -> Any:
    """Return the program in torch's core operators, attention aside."""
    import torch

    table = torch.export.default_decompositions()
    for operator in _KEPT:
        table.pop(getattr(torch.ops.aten, operator).default, None)
    for operator in RECURRENT:
        name, _, overload = operator.partition(".")
        table.pop(getattr(getattr(torch.ops.aten, name), overload), None)
    return program.run_decompositions(table)


def _refuse_unknown(program: Any, converters: dict[str, Any], known: Mapping[Any, Any]) -> None:
    """Raise ModelError for operators without converter; those of known values need none."""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and node.target.__name__ not in converters]
    converters.update({node.target.__name__: _no_converter for node in calls if node in known})
    calls = [node for node in calls if node not in known]
    unknown = {str(node.target): node.name for node in reversed(calls)}
    if unknown:
        places = ", ".join(f"{target} (node {name})" for target, name in reversed(unknown.items()))
        raise ModelError(f"no converter for torch's operator {places}", "write it with other operators, or export the model as ONNX")


def _with(importer: Any, convert: Callable[[Any, Any], Any], theirs: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return our converter of nodes, and TVM's of those for which ours returns NotImplemented; the result raises ModelError without it."""

    def converted(node: Any) -> Any:
        result = convert(node, importer)
        if result is not NotImplemented:
            return result
        if theirs is None:
            sentence = f"no converter for torch's operator {node.target} (node {node.name}) of these shapes and attributes"
            raise ModelError(sentence, "make its shapes static, or leave out what is no default")
        return theirs(node)

    return converted


def _no_converter(_: Any) -> Any:
    raise NotImplementedError("no converter")


def _reported(importer: Any, name: str, convert: Callable[[Any], Any], known: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Return a converter whose results have torch's dtypes and whose failure names operator and node."""
    typed = with_torch_dtypes(importer, name, convert)

    def converted(node: Any) -> Any:
        if node in known:
            return tvm.relax.const(tvm.runtime.from_dlpack(known[node].detach().contiguous().clone()))
        try:
            return typed(node)
        except ModelError:
            raise
        except IMPORT_ERRORS as error:
            sentence = f"TVM's importer does not take torch's operator {node.target} (node {node.name}): {last_line(error)}"
            raise ModelError(sentence, "write it with other operators, or export the model as ONNX") from None

    return converted
