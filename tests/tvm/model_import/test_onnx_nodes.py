"""Owns the test that ONNX's own node tests give the expected outputs, for operators with converters of our own, and which are refused.

Knows nothing of kernels: TVM alone compiles the models.
"""

from __future__ import annotations

import onnx
import pytest
from support.onnx_nodes import cases, difference, with_constants

from kerneldecl.compiler.model_import.from_onnx import module_of_model
from kerneldecl.compiler.model_import.model_error import ModelError

OPERATORS = {
    "Attention": ("test_attention_4d_gqa", "test_attention_4d_causal"),
    "ConvInteger": ("test_convinteger_with_padding", "test_convinteger_without_padding"),
    "GRU": ("test_gru_defaults", "test_gru_with_initial_bias"),
    "LSTM": ("test_lstm_defaults", "test_lstm_with_initial_bias"),
    "OneHot": ("test_onehot_negative_indices", "test_onehot_out_of_range_indices", "test_onehot_with_axis", "test_onehot_without_axis"),
    "QLinearConv": ("test_qlinearconv",),
    "QLinearMatMul": ("test_qlinearmatmul_2D_uint8_float32", "test_qlinearmatmul_3D_int8_float32"),
    "RNN": ("test_simple_rnn_defaults", "test_simple_rnn_with_initial_bias"),
    "ReduceSum": ("test_reduce_sum_keepdims_example", "test_reduce_sum_negative_axes_keepdims_example"),
    "RotaryEmbedding": ("test_rotary_embedding", "test_rotary_embedding_3d_input", "test_rotary_embedding_interleaved"),
    "SwiGLU": ("test_swiglu", "test_swiglu_alpha"),
    "Swish": ("test_swish",),
}
REFUSED = {
    "test_center_crop_pad_crop": "Sub (node that gives sh_diff__1): Node  cannot handle ShapeExpr inputs.",
    "test_gru_batchwise": "GRU (node that gives Y, Y_h): GRU with layout 1",
    "test_lstm_with_peepholes": "LSTM with sequence_lens, peepholes",
    "test_det_2d": "no converter for ONNX's operator Det (node that gives y)",
}
"""Node tests that cannot be imported, and the sentence that says why. Who closes a gap takes its line away."""


@pytest.mark.parametrize("name", [name for names in OPERATORS.values() for name in names])
def test_a_node_gives_what_onnx_expects(name: str) -> None:
    assert not difference(cases()[name], *with_constants(cases()[name]))


def test_an_axis_may_be_a_number() -> None:
    """As torch's exporter writes it, which runtimes accept."""
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", (2, 3)), ("y", (2, 1, 3)))]
    axis = onnx.helper.make_tensor("axis", onnx.TensorProto.INT64, [], [1])
    node = onnx.helper.make_node("Unsqueeze", ["x", "axis"], ["y"])
    graph = onnx.helper.make_graph([node], "net", ends[:1], ends[1:], [axis])
    mod = module_of_model(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]))
    assert [int(extent) for extent in mod["main"].ret_ty.shape] == [2, 1, 3]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_imported_names_operator_and_node(name: str) -> None:
    with pytest.raises(ModelError) as refusal:
        module_of_model(with_constants(cases()[name])[0])
    assert REFUSED[name] in refusal.value.sentence
    assert refusal.value.hint
