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
from tvm import relax

from kerneldecl.compiler.graph.named_constants import name_by_value
from kerneldecl.compiler.model_import.model_error import IMPORT_ERRORS, ModelError, last_line
from kerneldecl.compiler.model_import.onnx_constants import LARGEST, with_known_constants
from kerneldecl.compiler.model_import.onnx_functions import with_functions_written_out
from kerneldecl.compiler.model_import.onnx_loops import with_loops_unrolled
from kerneldecl.compiler.model_import.onnx_operators import CORRECTED, OPERATORS, PREPARED
from kerneldecl.compiler.model_import.onnx_refusals import DOMAINS, place, refusal
from kerneldecl.compiler.model_import.onnx_stored import store_weights, with_stored_inputs
from kerneldecl.compiler.model_import.onnx_types import types_of
from kerneldecl.compiler.model_import.onnx_weights import load_weights

_WAY_OUT = "write it with other operators"
_KNOWN_BY_SHAPES = frozenset({"Loop", "Scan", "Shape", "Size"})


def from_onnx(path: Path, _: Sequence[str] = ()) -> tvm.IRModule:
    """Return a file's graph as a module; raise ModelError where it is none, or has an operator that cannot be imported."""
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
        # By its path: with its weights, a model may be larger than the 2 GB that protobuf takes.
        onnx.checker.check_model(str(path))
        load_weights(model, path.parent, LARGEST)
    except (onnx.checker.ValidationError, OSError, ValueError) as error:
        _refuse_unknown(model.graph, {*_known_operators(), *(each.name for each in onnx.defs.get_all_schemas())})
        raise ModelError(f"ONNX's own checker objects: {' '.join(str(error).split())}", "export the model again") from None
    try:
        return module_of_model(model, path.parent)
    except ModelError as error:
        raise _with_dims(error, model.graph) from None


def _with_dims(error: ModelError, graph: Any) -> ModelError:
    """Return the error with the way out that most importers' errors have where inputs are of dynamic extent: other extents."""
    extents = (dim for value in graph.input for dim in value.type.tensor_type.shape.dim)
    dims = list(dict.fromkeys(dim.dim_param for dim in extents if dim.dim_param))
    if not dims:
        return error
    one = dims[0]
    tool = f"python -m onnxruntime.tools.make_dynamic_shape_fixed --dim_param {one} --dim_value 8 in.onnx out.onnx"
    return ModelError(error.sentence, f"{error.hint}; or fix its dynamic dimensions, {', '.join(dims)}, one by one: `{tool}`")


def module_of_model(model: Any, folder: Path | None = None) -> tvm.IRModule:
    """Return an ONNX model as a module whose constants are its weights; raise ModelError where an operator cannot be imported.

    Weights that are not in the model yet are read from files in a folder, at last: what comes before has no use for them.
    """
    import onnx

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # TVM's, of renamed inputs; its converters print what they fail on
        prepared, opset = _prepared(model)
        try:
            if folder is not None:
                load_weights(prepared, folder)
            store_weights(prepared)
        except (onnx.checker.ValidationError, OSError, ValueError) as error:
            raise ModelError(f"its weights cannot be read: {last_line(error)}", "export the model again") from None
        try:
            importer = _importer(_empty_inputs(prepared.graph))
            return name_by_value(importer.from_onnx(prepared.graph, opset), _weights(prepared.graph))
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


def _importer(shapes: Mapping[str, Sequence[int]]) -> Any:
    """Return TVM's importer, with converters of ours; a function, since TVM's module needs onnx."""
    from tvm.relax.frontend.onnx import onnx_frontend

    class Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]  # TVM is untyped
        def _check_for_unsupported_ops(self, graph: Any) -> None:
            """Do nothing: what is unknown is refused before."""

        def _convert_operator(self, operator: str, inputs: Any, attrs: dict[str, Any], opset: int) -> Any:
            convert = OPERATORS.get(operator) or CORRECTED.get(operator)
            found = convert(self.bb, list(inputs), attrs) if convert is not None else None
            if found is not None:
                return self.bb.normalize(found)
            given, written = PREPARED.get(operator, _as_given)(list(inputs), attrs)
            return super()._convert_operator(operator, onnx_frontend.onnx_input(given), dict(written), opset)

        def _construct_nodes(self, graph: Any) -> None:
            for node in graph.node:
                with _naming(node):
                    super()._construct_nodes(_Nodes([node]))
            for output in graph.output:
                found = self._nodes[output.name]
                if isinstance(found.ty, relax.ShapeType):  # a model returns tensors
                    self._nodes[output.name] = self.bb.emit(relax.op.shape_to_tensor(found))

    return Importer(shapes, "float32")


def _known_operators() -> frozenset[str]:
    from tvm.relax.frontend.onnx import onnx_frontend

    return frozenset({"Constant", "If", *onnx_frontend._get_convert_map(), *OPERATORS})  # noqa: SLF001  # TVM has no public way to ask


def _as_given(inputs: list[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    return inputs, attrs


def _empty_inputs(graph: Any) -> dict[str, list[int]]:
    """Return the shapes of static inputs without elements: TVM takes an extent of 0 for an unknown one."""
    shapes = {each.name: each.type.tensor_type.shape.dim for each in graph.input}
    static = {name: [dim.dim_value for dim in dims] for name, dims in shapes.items() if all(dim.HasField("dim_value") for dim in dims)}
    return {name: shape for name, shape in static.items() if 0 in shape}


def _refuse_unknown(graph: Any, known: Collection[str]) -> None:
    unknown = {node.op_type: node for node in reversed(graph.node) if node.op_type not in known or node.domain not in DOMAINS}
    if unknown:
        places = ", ".join(place(node) for node in reversed(unknown.values()))
        raise ModelError(f"no converter for ONNX's operator {places}", _WAY_OUT)


@contextlib.contextmanager
def _naming(node: Any) -> Iterator[None]:
    """Make a failure at a node a sentence that names it."""
    try:
        yield
    except ModelError:
        raise
    except IMPORT_ERRORS as error:
        raise ModelError(f"TVM's importer does not take ONNX's operator {place(node)}: {last_line(error)}", _WAY_OUT) from None


class _Nodes:
    """A part of a graph, as TVM's importer reads one."""

    def __init__(self, node: Sequence[Any]) -> None:
        self.node = node


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
