"""Owns TVM's importer of ONNX graphs with converters of ours, and with what shapes are computed by followed through a graph.

Knows nothing of files, nor of what is refused before.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax

from kerneldecl.compiler.graph.named_constants import array_of, is_array
from kerneldecl.compiler.model_import import extents
from kerneldecl.compiler.model_import.model_error import IMPORT_ERRORS, ModelError, last_line
from kerneldecl.compiler.model_import.onnx_constants import LARGEST, branch_of, evaluated
from kerneldecl.compiler.model_import.onnx_dims import shapes_of
from kerneldecl.compiler.model_import.onnx_dynamic import DYNAMIC, Emitter, fitted, shape_of, tensor_of, unknowns
from kerneldecl.compiler.model_import.onnx_extents import MOST_ELEMENTS, Known, computed, known_constant, objects
from kerneldecl.compiler.model_import.onnx_operators import CORRECTED, OPERATORS, PREPARED
from kerneldecl.compiler.model_import.onnx_refusals import place
from kerneldecl.compiler.model_import.onnx_types import graphs_of

WAY_OUT = "write it with other operators"


def imported(model: Any, opset: int, tensors: dict[str, Any]) -> tvm.IRModule:
    """Return a prepared model's graph as a module.

    `tensors` are those of large weights by their names, which are added to it: modules of one file share them. What is computed when a
    model is read is smaller, and may differ between modules of different sizes.
    """
    symbols: dict[str, Any] = {}
    same: dict[str, Any] = {}
    while True:
        shapes = shapes_of(model, lambda name: same.get(name, symbols.setdefault(name, tvm.tirx.Var(name, "int64"))))
        importer = _importer(model, shapes, bool(symbols), tensors)
        mod = importer.from_onnx(model.graph, opset)
        if not _unified(same, importer.emitter.equal):
            break
    # TVM's importer makes no dataflow of a graph with branches, and nothing is fused outside of one.
    return relax.transform.ConvertToDataflow()(mod) if symbols and any(node.op_type == "If" for node in model.graph.node) else mod


def _unified(same: dict[str, Any], equal: Sequence[tuple[Any, Any]]) -> bool:
    """Have dimensions that a graph takes to be equal be one dimension, or an expression of others; say whether there are new ones."""
    for symbol, other in (found for pair in equal for found in unknowns(*pair)):
        if symbol.name not in same:
            same.update({name: extents.substituted(each, symbol, other) for name, each in same.items()})
            same[symbol.name] = other
            return True
    return False


def _importer(model: Any, shapes: Mapping[str, Sequence[Any]], is_dynamic: bool, tensors: dict[str, Any]) -> Any:
    """Return TVM's importer with converters of ours; a function, since TVM's module needs onnx."""
    from tvm.relax.frontend.onnx import onnx_frontend

    class Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]  # TVM is untyped
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.emitter = Emitter(self.bb)

        def _check_for_unsupported_ops(self, graph: Any) -> None:
            """Do nothing: what is unknown is refused before."""

        def _parse_array(self, tensor_proto: Any) -> Any:
            return _shared(tensor_proto, tensors, super()._parse_array)

        def _convert_operator(self, operator: str, inputs: Any, attrs: dict[str, Any], opset: int) -> Any:
            inputs = list(fitted(self.emitter, operator, inputs) if is_dynamic else inputs)
            convert = OPERATORS.get(operator) or CORRECTED.get(operator)
            found = convert(self.bb, inputs, attrs) if convert is not None else None
            if found is not None:
                return self.bb.normalize(found)
            given, written = PREPARED.get(operator, _as_given)(inputs, attrs)
            return super()._convert_operator(operator, onnx_frontend.onnx_input(given), dict(written), opset)

        def _construct_nodes(self, graph: Any) -> None:
            known = _Extents(self, model)
            for node in known.left(graph.node) if is_dynamic else graph.node:
                with _naming(node):
                    super()._construct_nodes(_Nodes([node]))
            known.make_outputs(graph.output)

    return Importer(shapes, "float32")


def _shared(weight: Any, tensors: dict[str, Any], read: Callable[[Any], Any]) -> Any:
    """Return the tensor of a weight, which modules of one file share where it is large."""
    found = tensors[weight.name] if weight.name in tensors else read(weight)
    tensors.update({weight.name: found} if math.prod(weight.dims) > LARGEST else {})
    return found


class _Extents:
    """What is known of the values of a graph that is being imported: small tensors whose elements are extents."""

    def __init__(self, importer: Any, model: Any) -> None:
        self._importer, self._model = importer, model
        self._known: dict[str, Known] = {}
        self._folded: set[str] = set()

    def _follow(self, node: Any) -> bool:
        """Note what a node gives where it computes extents, or convert it where its result's are dynamic; else make what it reads."""
        if node.domain in {"", "ai.onnx"} and (self._is_known(node) or self._is_converted(node)):
            return True
        for name in _read(node):
            self.make(name)
        return False

    @property
    def _values(self) -> dict[str, Any]:
        """TVM's values by name: another dictionary after each branch."""
        found: dict[str, Any] = self._importer._nodes  # noqa: SLF001  # the importer is ours
        return found

    def left(self, nodes: Iterable[Any]) -> Iterator[Any]:
        """Yield the nodes that TVM's importer converts, one after the other; of an If whose condition is known, those of its branch."""
        waiting = deque(nodes)
        while waiting:
            node = waiting.popleft()
            condition = self._elements(node.input[0]) if node.op_type == "If" else None
            if condition is not None and condition.is_constant:
                waiting.extendleft(reversed(branch_of(node, bool(condition.elements.item()))))
                continue
            with _naming(node):
                is_done = self._follow(node)
            if not is_done:
                yield node

    def make(self, name: str) -> None:
        """Make a tensor of a value whose elements are known, for operators that read it as data."""
        if name in self._known and name not in self._values:
            self._values[name] = tensor_of(self._importer.bb, self._known[name])

    def make_outputs(self, outputs: Iterable[Any]) -> None:
        """Make tensors of a graph's results that are extents: a model returns tensors."""
        for output in outputs:
            self.make(output.name)
            found = self._values[output.name]
            if isinstance(found.ty, relax.ShapeType):
                self._values[output.name] = self._importer.bb.emit(relax.op.shape_to_tensor(found))

    def _is_known(self, node: Any) -> bool:
        """Say whether the elements of what a node gives are known; note them then."""
        given = [name for name in node.input if name]
        if node.op_type in {"Shape", "Size"}:
            found = self._extents(node)
        elif any(name in self._known for name in given):
            found = computed(node.op_type, [self._elements(name) for name in node.input], self._attrs(node))
        elif self._folded.intersection(given) and all(is_array(self._values.get(name)) for name in given):
            arrays = evaluated(node, {name: array_of(self._values[name]) for name in given}, self._model)
            self._values.update((name, relax.const(array, array.dtype.name)) for name, array in zip(node.output, arrays, strict=False))
            self._folded.update(node.output if arrays else ())
            return bool(arrays)
        else:
            return False
        for name, value in zip(node.output, found or (), strict=False):
            self._note(name, value)
        return bool(found)

    def _extents(self, node: Any) -> list[Known] | None:
        """Return the extents of a tensor, or their product."""
        name, attrs = node.input[0], self._attrs(node)
        elements = self._known.get(name)
        shape: list[Any] | None = list(elements.elements.shape) if elements else shape_of(self._values[name])
        if shape is None:
            return None
        if node.op_type == "Size":
            return [Known(objects([extents.product(shape)], []), "int64")]
        chosen = shape[attrs.get("start", 0) : attrs.get("end")]
        return [Known(objects(chosen, [len(chosen)]), "int64")]

    def _is_converted(self, node: Any) -> bool:
        """Convert a node whose data or result has dynamic extents; say whether that was done."""
        convert = DYNAMIC.get(node.op_type)
        if convert is None:
            return False
        known = [self._elements(name) for name in node.input]
        for name in node.input if node.op_type.startswith("Gather") else node.input[:1]:
            self.make(name)
        inputs = [self._values.get(name) for name in node.input]
        is_dynamic = any(name in self._known for name in node.input) or any(map(_is_dynamic, inputs))
        found = convert(self._importer.emitter, inputs, known, self._attrs(node)) if is_dynamic else None
        if found is not None:
            self._values[node.output[0]] = found
        return found is not None

    def _elements(self, name: str) -> Known | None:
        """Return what is known of a value's elements, as of a small constant."""
        if not name or name in self._known:
            return self._known.get(name)
        value: Any = self._values.get(name)
        if not is_array(value) or math.prod(value.value.shape) > MOST_ELEMENTS:
            return None
        array = array_of(value)
        return None if array is None else known_constant(array)

    def _note(self, name: str, value: Known) -> None:
        if value.is_constant:
            self._values[name] = tensor_of(self._importer.bb, value)
            self._folded.add(name)
        else:
            self._known[name] = value

    def _attrs(self, node: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._importer._parse_attr(node.attribute)  # noqa: SLF001  # the importer is ours
        return found


def _is_dynamic(value: Any) -> bool:
    extents_of = shape_of(value) if isinstance(getattr(value, "ty", None), relax.TensorType) else None
    return any(not isinstance(extent, int) for extent in extents_of or ())


def _read(node: Any) -> Iterator[str]:
    """Yield the names of the values that a node reads, those of the graphs in it among them."""
    yield from node.input
    for attribute in node.attribute:
        if attribute.HasField("g"):
            for graph in graphs_of(attribute.g):
                yield from (name for each in graph.node for name in each.input)
                yield from (output.name for output in graph.output)


def _as_given(inputs: list[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    return inputs, attrs


@contextlib.contextmanager
def _naming(node: Any) -> Iterator[None]:
    """Make a failure at a node a sentence that names it."""
    try:
        yield
    except ModelError:
        raise
    except IMPORT_ERRORS as error:
        raise ModelError(f"TVM's importer does not take ONNX's operator {place(node)}: {last_line(error)}", WAY_OUT) from None


class _Nodes:
    """A part of a graph, as TVM's importer reads one."""

    def __init__(self, node: Sequence[Any]) -> None:
        self.node = node
