"""Owns the test that ONNX's own node tests give the expected outputs, for operators with converters of our own, and which are refused.

Knows nothing of kernels: TVM alone compiles the models.
"""

from __future__ import annotations

import itertools

import onnx
import pytest
from support.onnx_nodes import case_of, difference, with_constants
from support.thinned import only

from kerneldecl.compiler.model_import.from_onnx import module_of_model
from kerneldecl.compiler.model_import.model_error import ModelError

OPERATORS = {
    "Adagrad": ("test_adagrad_multiple",),
    "Adam": ("test_adam_multiple",),
    "AffineGrid": ("test_affine_grid_3d",),
    "Attention": ("test_attention_4d_gqa", "test_attention_4d_causal"),
    "BitCast": ("test_bitcast_bool_to_uint8", "test_bitcast_float32_to_int32"),
    "Cast": (
        "test_cast_FLOAT16_to_FLOAT4E2M1",
        "test_cast_FLOAT_to_FLOAT8E5M2FNUZ",
        "test_cast_INT4_to_FLOAT",
        "test_cast_e8m0_FLOAT_to_FLOAT8E8M0",
        "test_cast_no_saturate_FLOAT_to_FLOAT8E4M3FNUZ",
    ),
    "CastLike": ("test_castlike_FLOAT_to_UINT2",),
    "CenterCropPad": ("test_center_crop_pad_crop",),
    "ConvInteger": ("test_convinteger_with_padding", "test_convinteger_without_padding"),
    "CumProd": ("test_cumprod_1d_reverse_exclusive",),
    "DequantizeLinear": ("test_dequantizelinear_blocked", "test_dequantizelinear_int2", "test_dequantizelinear_e4m3fn_float16"),
    "GRU": ("test_gru_batchwise", "test_gru_defaults", "test_gru_with_initial_bias"),
    "LinearAttention": ("test_linear_attention_gated_delta",),
    "Loop": ("test_loop11",),
    "LpNormalization": ("test_l1normalization_axis_0", "test_lpnormalization_default"),
    "LSTM": ("test_lstm_defaults", "test_lstm_with_initial_bias"),
    "Momentum": ("test_momentum_multiple", "test_nesterov_momentum"),
    "OneHot": ("test_onehot_negative_indices", "test_onehot_out_of_range_indices", "test_onehot_with_axis", "test_onehot_without_axis"),
    "QLinearConv": ("test_qlinearconv",),
    "QLinearMatMul": ("test_qlinearmatmul_2D_uint8_float32", "test_qlinearmatmul_3D_int8_float32"),
    "QuantizeLinear": ("test_quantizelinear_blocked_asymmetric", "test_quantizelinear_e5m2", "test_quantizelinear_int4"),
    "RNN": ("test_simple_rnn_defaults", "test_simple_rnn_with_initial_bias"),
    "ReduceSum": ("test_reduce_sum_keepdims_example", "test_reduce_sum_negative_axes_keepdims_example"),
    "ReverseSequence": ("test_reversesequence_time",),
    "RotaryEmbedding": ("test_rotary_embedding", "test_rotary_embedding_3d_input", "test_rotary_embedding_interleaved"),
    "Scan": ("test_scan9_multi_state",),
    "SwiGLU": ("test_swiglu", "test_swiglu_alpha"),
    "Swish": ("test_swish",),
    "TopK": ("test_top_k_uint64",),
}
LONG = ("Adagrad", "LinearAttention")
"""Operators that are hundreds of TVM's: seconds each. Adam and Attention are built as they are."""
REFUSED = {
    "test_det_2d": "no converter for ONNX's operator Det (node that gives y)",
    "test_lstm_with_peepholes": "LSTM with sequence_lens, peepholes",
    "test_range_float_type_positive_delta_expanded": "no converter for ONNX's operator Loop (node that gives Range_",
    "test_sequence_insert_at_back": "its input sequence is a sequence, not a tensor",
    "test_string_concat": "no converter for ONNX's operator StringConcat (node that gives result)",
}
"""Node tests that cannot be imported, and the sentence that says why. Who closes a gap takes its line away."""


@pytest.mark.parametrize(
    "name", only([names[0] for operator, names in OPERATORS.items() if operator not in LONG], itertools.chain(*OPERATORS.values()))
)
def test_a_node_gives_what_onnx_expects(name: str) -> None:
    case = case_of(name)
    assert not difference(case, *with_constants(case))


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
        module_of_model(with_constants(case_of(name))[0])
    assert REFUSED[name] in refusal.value.sentence
    assert refusal.value.hint
