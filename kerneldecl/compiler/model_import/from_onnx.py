"""Owns how an ONNX file becomes a Relax module.

Knows nothing of other formats, nor of what follows the import.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler.dynamic_shapes import Buckets, Sized, check_buckets, combinations, dynamic_dims
from kerneldecl.compiler.graph.named_constants import name_by_value
from kerneldecl.compiler.model_import.model_error import IMPORT_ERRORS, ModelError, last_line
from kerneldecl.compiler.model_import.onnx_constants import LARGEST, with_known_constants
from kerneldecl.compiler.model_import.onnx_dims import dims_of, shapes_of, with_named_dims, with_sizes
from kerneldecl.compiler.model_import.onnx_functions import with_functions_written_out
from kerneldecl.compiler.model_import.onnx_fused_norms import UNREGISTERED
from kerneldecl.compiler.model_import.onnx_importer import WAY_OUT, imported
from kerneldecl.compiler.model_import.onnx_loops import with_loops_unrolled
from kerneldecl.compiler.model_import.onnx_operators import OPERATORS
from kerneldecl.compiler.model_import.onnx_refusals import DOMAINS, place, refusal
from kerneldecl.compiler.model_import.onnx_stored import store_weights, with_stored_inputs
from kerneldecl.compiler.model_import.onnx_types import types_of
from kerneldecl.compiler.model_import.onnx_weights import load_weights

_KNOWN_BY_SHAPES = frozenset({"Loop", "Scan", "Shape", "Size"})


def from_onnx(path: Path, _: Sequence[str] = ()) -> tvm.IRModule:
    """Return a file's graph as a module; raise ModelError where it is none, or has an operator that cannot be imported."""
    model = _loaded(path)
    return _imported(model, path.parent, {}, {})


def sized_from_onnx(path: Path, buckets: Buckets) -> Sized:
    """Return a file's graph as a module for each combination of the sizes of dynamic dimensions, and as one for any others.

    Raise ModelError where a combination cannot be imported, or the model lacks a dimension.
    """
    model = _loaded(path)
    _check_sizes(buckets, dims_of(model))
    tensors: dict[str, Any] = {}
    copies = tuple((sizes, _imported(model, path.parent, sizes, tensors)) for sizes in combinations(buckets))
    symbols: dict[str, Any] = {}
    shapes = shapes_of(model, lambda name: symbols.setdefault(name, tvm.tirx.Var(name, "int64")))
    try:
        whole = _imported(model, path.parent, {}, tensors)
    except ModelError as error:
        return Sized(None, copies, tuple(shapes.values()), error.sentence)
    own = dynamic_dims(whole)
    if not set(own) & set(buckets):  # the model takes each of them to be another one
        _check_sizes(buckets, own)
    return Sized(whole, copies, tuple(shapes.values()))


def _check_sizes(buckets: Buckets, dims: Sequence[str]) -> None:
    try:
        check_buckets(buckets, dims)
    except ValueError as error:
        raise ModelError(str(error)) from None


def _loaded(path: Path) -> Any:
    """Return a file's model, without its large weights where these lie beside it, and with names for its dynamic dimensions."""
    try:
        import onnx
    except ImportError:
        raise ModelError("the package onnx is not installed", "pip install onnx") from None
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ModelError(f"not ONNX: {last_line(error)}", "export the model again") from None
    try:
        _check(path)
        load_weights(model, path.parent, LARGEST)
    except (onnx.checker.ValidationError, OSError, ValueError) as error:
        _refuse_unknown(model.graph, {*_known_operators(), *(each.name for each in onnx.defs.get_all_schemas())})
        raise ModelError(f"ONNX's own checker objects: {' '.join(str(error).split())}", "export the model again") from None
    return with_named_dims(model)


def _check(path: Path) -> None:
    """Have onnx check a file; an operator of onnxruntime's in ONNX's own domain ends the check, and is none of its mistakes."""
    import onnx

    try:
        # By its path: with its weights, a model may be larger than the 2 GB that protobuf takes.
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        if not any(f"No Op registered for {name} " in str(error) for name in UNREGISTERED):
            raise


def _imported(model: Any, folder: Path, sizes: Mapping[str, int], tensors: dict[str, Any]) -> tvm.IRModule:
    """Return a model with sizes for some dimensions as a module; an error says how to give sizes to those that are left."""
    try:
        return module_of_model(with_sizes(model, sizes) if sizes else model, folder, tensors)
    except ModelError as error:
        free = [dim for dim in dims_of(model) if dim not in sizes]
        options = " ".join(f"--dim {dim}=8" for dim in [*sizes, *free])
        is_of_shapes = "In relax." in error.sentence  # as TVM's inference of shapes begins
        fitting = "choose sizes that fit one another" if sizes and is_of_shapes else ""
        way_out = f"give every dynamic dimension sizes, as in {options}" if free else fitting
        raise ModelError(error.sentence, f"{error.hint}; or {way_out}" if way_out else error.hint) from None


def module_of_model(model: Any, folder: Path | None = None, tensors: dict[str, Any] | None = None) -> tvm.IRModule:
    """Return an ONNX model as a module whose constants are its weights; raise ModelError where an operator cannot be imported.

    Weights that are not in the model yet are read from files in a folder, at last: what comes before has no use for them. `tensors` are
    large weights by name, of another module of the same file: they are shared, and added to it.
    """
    import onnx

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # TVM's, of renamed inputs; its converters print what they fail on
        prepared, opset = _prepared(with_named_dims(model))
        try:
            if folder is not None:
                load_weights(prepared, folder)
            store_weights(prepared)
        except (onnx.checker.ValidationError, OSError, ValueError) as error:
            raise ModelError(f"its weights cannot be read: {last_line(error)}", "export the model again") from None
        try:
            return name_by_value(imported(prepared, opset, {} if tensors is None else tensors), _weights(prepared.graph))
        except ModelError:
            raise
        except IMPORT_ERRORS as error:
            raise ModelError(f"TVM's importer does not take it: {last_line(error)}", "replace the operator in the model") from None


def _prepared(model: Any) -> tuple[Any, int]:
    """Return a model in operators that can be converted, and its opset; raise ModelError where there is none of it."""
    import onnx

    opset = next((each.version for each in model.opset_import if each.domain in {"", "ai.onnx"}), 1)
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise ModelError(f"its opset is {opset}; onnx {onnx.__version__} knows those up to {newest}", "pip install -U onnx")
    known = _known_operators()
    try:
        prepared = _simplified(model, known)
        _refuse_unknown(prepared.graph, known)
        types = types_of(prepared)
        sentence, way_out = refusal(prepared, types)
    except ModelError:
        raise
    except IMPORT_ERRORS as error:
        raise ModelError(f"onnx cannot infer its shapes: {last_line(error)}", "export the model again") from None
    if sentence:
        raise ModelError(sentence, way_out)
    return with_stored_inputs(prepared, types), opset


def _simplified(model: Any, known: Collection[str]) -> Any:
    """Return a model without functions, known values and loops of known length, as far as one of these makes others known."""
    while True:
        simpler = with_known_constants(with_functions_written_out(model, known))
        written = with_loops_unrolled(simpler)
        # onnx infers shapes in a copy of the model, weights included: not again where that can tell nothing new.
        can_tell = len(simpler.graph.node) != len(model.graph.node) and any(node.op_type in _KNOWN_BY_SHAPES for node in simpler.graph.node)
        if written is simpler and not can_tell:
            return simpler
        model = written


def _known_operators() -> frozenset[str]:
    from tvm.relax.frontend.onnx import onnx_frontend

    return frozenset({"Constant", "If", *onnx_frontend._get_convert_map(), *OPERATORS})  # noqa: SLF001  # TVM has no public way to ask


def _refuse_unknown(graph: Any, known: Collection[str]) -> None:
    unknown = {node.op_type: node for node in reversed(graph.node) if node.op_type not in known or node.domain not in DOMAINS}
    if unknown:
        places = ", ".join(place(node) for node in reversed(unknown.values()))
        raise ModelError(f"no converter for ONNX's operator {places}", WAY_OUT)


def _weights(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each weight in the order of the nodes that read it first.

    torch keeps no name for a weight that it transposed (onnx::MatMul_123); the path of the node (/encoder/dense/MatMul) has one.
    """
    from onnx import numpy_helper

    values = {each.name: each for each in graph.initializer}
    for node in graph.node:
        for name in node.input:
            if name not in values:
                continue
            *path, _ = node.name.strip("/").split("/")
            modules = [part for part, inner in zip(path, [*path, ""][1:], strict=True) if not inner.startswith(f"{part}.")]  # mlp/mlp.0
            is_named = "::" not in name and not name.startswith("/")
            yield name if is_named else ".".join([*modules, "weight"]) if modules else "", numpy_helper.to_array(values.pop(name))
