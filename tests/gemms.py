"""Owns GEMMs and other functions in TensorIR as people write them by hand: names, loop orders and layouts of all kinds.

Knows nothing of how they are read or scheduled.
"""

from tvm.script import tirx as T

# ruff: noqa: ANN201, N803, N806, N812, PLR1716, SIM300
# mypy: ignore-errors


@T.prim_func(s_tir=True)
def nn(A: T.Buffer((96, 128), "float16"), B: T.Buffer((128, 80), "float16"), C: T.Buffer((96, 80), "float32")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vk, vj])


@T.prim_func(s_tir=True)
def nt_with_other_names_and_loops(
    weights: T.Buffer((80, 128), "float16"), tokens: T.Buffer((96, 128), "float16"), y: T.Buffer((96, 80), "float32")
):
    for reduce, feature, token in T.grid(128, 80, 96):
        with T.sblock("dense"):
            r, f, t = T.axis.remap("RSS", [reduce, feature, token])
            with T.init():
                y[t, f] = T.float32(0)
            y[t, f] = T.Cast("float32", weights[f, r]) * T.Cast("float32", tokens[t, r]) + y[t, f]


@T.prim_func(s_tir=True)
def tn(A: T.Buffer((128, 96), "float16"), B: T.Buffer((128, 80), "float16"), C: T.Buffer((96, 80), "float16")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float16(0)
            C[vi, vj] = C[vi, vj] + A[vk, vi] * B[vk, vj]


@T.prim_func(s_tir=True)
def tt(A: T.Buffer((128, 96), "bfloat16"), B: T.Buffer((80, 128), "bfloat16"), C: T.Buffer((96, 80), "float32")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vk, vi]) * T.Cast("float32", B[vj, vk])


@T.prim_func(s_tir=True)
def attention_scores(
    Q: T.Buffer((2, 64, 4, 32), "float16"), K: T.Buffer((2, 72, 4, 32), "float16"), S: T.Buffer((2, 4, 64, 72), "float32")
):
    for b, h, q, k, d in T.grid(2, 4, 64, 72, 32):
        with T.sblock("scores"):
            vb, vh, vq, vk, vd = T.axis.remap("SSSSR", [b, h, q, k, d])
            with T.init():
                S[vb, vh, vq, vk] = T.float32(0)
            S[vb, vh, vq, vk] = S[vb, vh, vq, vk] + T.Cast("float32", Q[vb, vq, vh, vd]) * T.Cast("float32", K[vb, vk, vh, vd])


@T.prim_func(s_tir=True)
def shared_weights(X: T.Buffer((3, 32, 64), "float16"), W: T.Buffer((64, 48), "float16"), Y: T.Buffer((3, 32, 48), "float32")):
    for b, i, j, k in T.grid(3, 32, 48, 64):
        with T.sblock("gemm"):
            vb, vi, vj, vk = T.axis.remap("SSSR", [b, i, j, k])
            with T.init():
                Y[vb, vi, vj] = T.float32(0)
            Y[vb, vi, vj] = Y[vb, vi, vj] + T.Cast("float32", X[vb, vi, vk]) * T.Cast("float32", W[vk, vj])


@T.prim_func(s_tir=True)
def conv2d_nhwc(X: T.Buffer((2, 18, 18, 32), "float16"), W: T.Buffer((3, 3, 32, 64), "float16"), Y: T.Buffer((2, 16, 16, 64), "float32")):
    for n, h, w, f, r, s, c in T.grid(2, 16, 16, 64, 3, 3, 32):
        with T.sblock("conv"):
            vn, vh, vw, vf, vr, vs, vc = T.axis.remap("SSSSRRR", [n, h, w, f, r, s, c])
            with T.init():
                Y[vn, vh, vw, vf] = T.float32(0)
            Y[vn, vh, vw, vf] = Y[vn, vh, vw, vf] + T.Cast("float32", X[vn, vh + vr, vw + vs, vc]) * T.Cast("float32", W[vr, vs, vc, vf])


@T.prim_func(s_tir=True)
def conv2d_nchw(X: T.Buffer((2, 32, 18, 18), "float16"), W: T.Buffer((64, 32, 3, 3), "float16"), Y: T.Buffer((2, 64, 16, 16), "float32")):
    for n, f, h, w, c, r, s in T.grid(2, 64, 16, 16, 32, 3, 3):
        with T.sblock("conv"):
            vn, vf, vh, vw, vc, vr, vs = T.axis.remap("SSSSRRR", [n, f, h, w, c, r, s])
            with T.init():
                Y[vn, vf, vh, vw] = T.float32(0)
            Y[vn, vf, vh, vw] = Y[vn, vf, vh, vw] + T.Cast("float32", X[vn, vc, vh + vr, vw + vs]) * T.Cast("float32", W[vf, vc, vr, vs])


@T.prim_func(s_tir=True)
def padded_conv2d(X: T.Buffer((2, 16, 16, 32), "float16"), W: T.Buffer((3, 3, 32, 64), "float16"), Y: T.Buffer((2, 8, 8, 64), "float32")):
    padded = T.sblock_alloc_buffer((2, 18, 18, 32), "float16")
    for n, h, w, c in T.grid(2, 18, 18, 32):
        with T.sblock("pad"):
            vn, vh, vw, vc = T.axis.remap("SSSS", [n, h, w, c])
            padded[vn, vh, vw, vc] = T.if_then_else(1 <= vh and vh < 17 and 1 <= vw and vw < 17, X[vn, vh - 1, vw - 1, vc], T.float16(0))
    for n, h, w, f, r, s, c in T.grid(2, 8, 8, 64, 3, 3, 32):
        with T.sblock("conv"):
            vn, vh, vw, vf, vr, vs, vc = T.axis.remap("SSSSRRR", [n, h, w, f, r, s, c])
            with T.init():
                Y[vn, vh, vw, vf] = T.float32(0)
            Y[vn, vh, vw, vf] = Y[vn, vh, vw, vf] + T.Cast("float32", padded[vn, vh * 2 + vr, vw * 2 + vs, vc]) * T.Cast(
                "float32", W[vr, vs, vc, vf]
            )


@T.prim_func(s_tir=True)
def behind_a_transpose(A: T.Buffer((96, 128), "float16"), B: T.Buffer((80, 128), "float16"), C: T.Buffer((96, 80), "float32")):
    transposed = T.sblock_alloc_buffer((128, 80), "float16")
    for k, j in T.grid(128, 80):
        with T.sblock("transpose"):
            vk, vj = T.axis.remap("SS", [k, j])
            transposed[vk, vj] = B[vj, vk]
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", transposed[vk, vj])


@T.prim_func(s_tir=True)
def behind_padding(A: T.Buffer((90, 100), "float16"), B: T.Buffer((100, 80), "float16"), C: T.Buffer((90, 80), "float32")):
    wide, long = T.sblock_alloc_buffer((96, 128), "float16"), T.sblock_alloc_buffer((128, 80), "float16")
    total = T.sblock_alloc_buffer((96, 80), "float32")
    for i, k in T.grid(96, 128):
        with T.sblock("pad_rows"):
            vi, vk = T.axis.remap("SS", [i, k])
            wide[vi, vk] = T.if_then_else(vi < 90 and vk < 100, A[vi, vk], T.float16(0))
    for k, j in T.grid(128, 80):
        with T.sblock("pad_columns"):
            vk, vj = T.axis.remap("SS", [k, j])
            long[vk, vj] = T.if_then_else(vk < 100, B[vk, vj], T.float16(0))
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                total[vi, vj] = T.float32(0)
            total[vi, vj] = total[vi, vj] + T.Cast("float32", wide[vi, vk]) * T.Cast("float32", long[vk, vj])
    for i, j in T.grid(90, 80):
        with T.sblock("crop"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = total[vi, vj]


@T.prim_func(s_tir=True)
def of_casts_and_an_epilogue(
    A: T.Buffer((96, 128), "float32"), B: T.Buffer((128, 80), "float32"), bias: T.Buffer((80,), "float16"), C: T.Buffer((96, 80), "float16")
):
    a, b = T.sblock_alloc_buffer((96, 128), "float16"), T.sblock_alloc_buffer((128, 80), "float16")
    total = T.sblock_alloc_buffer((96, 80), "float32")
    for i, k in T.grid(96, 128):
        with T.sblock("narrow_a"):
            vi, vk = T.axis.remap("SS", [i, k])
            a[vi, vk] = T.Cast("float16", A[vi, vk])
    for k, j in T.grid(128, 80):
        with T.sblock("narrow_b"):
            vk, vj = T.axis.remap("SS", [k, j])
            b[vk, vj] = T.Cast("float16", B[vk, vj])
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                total[vi, vj] = T.float32(0)
            total[vi, vj] = total[vi, vj] + T.Cast("float32", a[vi, vk]) * T.Cast("float32", b[vk, vj])
    for i, j in T.grid(96, 80):
        with T.sblock("biased"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = T.Cast("float16", total[vi, vj]) + bias[vj]


@T.prim_func(s_tir=True)
def gram(A: T.Buffer((96, 128), "float16"), C: T.Buffer((96, 96), "float32")):
    for i, j, k in T.grid(96, 96, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", A[vj, vk])


@T.prim_func(s_tir=True)
def integers(A: T.Buffer((96, 128), "int8"), B: T.Buffer((80, 128), "int8"), C: T.Buffer((96, 80), "int32")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = 0
            C[vi, vj] = C[vi, vj] + T.Cast("int32", A[vi, vk]) * T.Cast("int32", B[vj, vk])


GEMMS = [
    nn,
    nt_with_other_names_and_loops,
    tn,
    tt,
    attention_scores,
    shared_weights,
    conv2d_nhwc,
    conv2d_nchw,
    padded_conv2d,
    behind_a_transpose,
    behind_padding,
    of_casts_and_an_epilogue,
    integers,
]


@T.prim_func(s_tir=True)
def max_plus(A: T.Buffer((96, 128), "float16"), B: T.Buffer((128, 80), "float16"), C: T.Buffer((96, 80), "float32")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("longest"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(-65504)
            C[vi, vj] = T.max(C[vi, vj], T.Cast("float32", A[vi, vk]) + T.Cast("float32", B[vk, vj]))


@T.prim_func(s_tir=True)
def of_three(
    A: T.Buffer((96, 128), "float16"), B: T.Buffer((128, 80), "float16"), S: T.Buffer((128,), "float16"), C: T.Buffer((96, 80), "float32")
):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vk, vj]) * T.Cast("float32", S[vk])


@T.prim_func(s_tir=True)
def prefix_sums(X: T.Buffer((96, 128), "float16"), Y: T.Buffer((96, 128), "float32")):
    for i, j, k in T.grid(96, 128, 128):
        with T.sblock("prefix"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                Y[vi, vj] = T.float32(0)
            Y[vi, vj] = Y[vi, vj] + T.if_then_else(vk <= vj, T.Cast("float32", X[vi, vk]), T.float32(0))


@T.prim_func(s_tir=True)
def triangular(A: T.Buffer((96, 128), "float16"), B: T.Buffer((128, 80), "float16"), C: T.Buffer((96, 80), "float32")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.if_then_else(vk <= vi, T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vk, vj]), T.float32(0))


@T.prim_func(s_tir=True)
def from_one(A: T.Buffer((96, 128), "float16"), B: T.Buffer((128, 80), "float16"), C: T.Buffer((96, 80), "float32")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(1)
            C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vk, vj])


@T.prim_func(s_tir=True)
def recurrence(A: T.Buffer((96, 128), "float16"), B: T.Buffer((128, 80), "float16"), C: T.Buffer((96, 80), "float16")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("horner"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float16(0)
            C[vi, vj] = A[vi, vk] + C[vi, vj] * B[vk, vj]


@T.prim_func(s_tir=True)
def wrapping_integers(A: T.Buffer((96, 128), "int8"), B: T.Buffer((80, 128), "int8"), C: T.Buffer((96, 80), "int32")):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = 0
            C[vi, vj] = C[vi, vj] + T.Cast("int32", A[vi, vk] * B[vj, vk])


@T.prim_func(s_tir=True)
def two_in_a_row(
    A: T.Buffer((96, 128), "float16"), B: T.Buffer((128, 64), "float16"), C: T.Buffer((64, 80), "float16"), D: T.Buffer((96, 80), "float16")
):
    E = T.sblock_alloc_buffer((96, 64), "float16")
    for i, j, k in T.grid(96, 64, 128):
        with T.sblock("first"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                E[vi, vj] = T.float16(0)
            E[vi, vj] = E[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j, k in T.grid(96, 80, 64):
        with T.sblock("second"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                D[vi, vj] = T.float16(0)
            D[vi, vj] = D[vi, vj] + E[vi, vk] * C[vk, vj]


@T.prim_func(s_tir=True)
def indirect(
    A: T.Buffer((96, 128), "float16"), rows: T.Buffer((96,), "int32"), B: T.Buffer((128, 80), "float16"), C: T.Buffer((96, 80), "float32")
):
    for i, j, k in T.grid(96, 80, 128):
        with T.sblock("gemm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.Cast("float32", A[rows[vi], vk]) * T.Cast("float32", B[vk, vj])


@T.prim_func(s_tir=True)
def depthwise(X: T.Buffer((2, 18, 18, 32), "float16"), W: T.Buffer((3, 3, 32), "float16"), Y: T.Buffer((2, 16, 16, 32), "float32")):
    for n, h, w, c, r, s in T.grid(2, 16, 16, 32, 3, 3):
        with T.sblock("conv"):
            vn, vh, vw, vc, vr, vs = T.axis.remap("SSSSRR", [n, h, w, c, r, s])
            with T.init():
                Y[vn, vh, vw, vc] = T.float32(0)
            Y[vn, vh, vw, vc] = Y[vn, vh, vw, vc] + T.Cast("float32", X[vn, vh + vr, vw + vs, vc]) * T.Cast("float32", W[vr, vs, vc])


REFUSED = {
    gram: "both its operands are A; a GEMM has two",
    max_plus: "its reduction is not a multiply-accumulate",
    of_three: "its reduction reads 3 operands; a GEMM has two",
    prefix_sums: "its reduction reads 1 operand; a GEMM has two",
    triangular: "its reduction is not a multiply-accumulate",
    from_one: "its reduction is not a multiply-accumulate",
    recurrence: "its reduction is not a multiply-accumulate",
    wrapping_integers: "its reduction is not a multiply-accumulate",
    two_in_a_row: "it has 2 reductions; a GEMM has one",
    indirect: "its reduction reads 3 operands; a GEMM has two",
    depthwise: "it is a matrix-vector multiplication (GEMV), which memory alone limits",
}
