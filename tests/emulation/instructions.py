"""Owns the PTX instructions that the emulator knows: the call of a model in machine.h that stands for each of them.

Knows nothing of how they are found in CUDA source, or of what the models do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class UnknownInstructionError(Exception):
    """The emulator has no model of an instruction; the message names it and the function that it stands in."""


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction with C++ expressions in place of its operands."""

    name: str
    operands: tuple[str, ...]
    """Braces and brackets removed, but those of vectors, which stay as `{a, b}`."""

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")


def split(text: str, separator: str) -> list[str]:
    """Return the parts of a text between separators outside of strings and brackets."""
    parts, depth, at, begin = [], 0, 0, 0
    while at < len(text):
        if text[at] == '"':
            at = STRING.match(text, at).end()  # type: ignore[union-attr]
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        if depth == 0 and text[at] == separator:
            parts.append(text[begin:at].strip())
            begin = at + 1
        at += 1
    return [*parts, text[begin:].strip()]


def model(instruction: Instruction) -> str:
    """Return the C++ that stands for an instruction; raise UnknownInstructionError if there is no model of it."""
    for pattern, call in _MODELS:
        if pattern.fullmatch(instruction.name):
            return call(instruction)
    raise UnknownInstructionError(instruction.name)


def _call(function: str, *extra: str) -> Callable[[Instruction], str]:
    return lambda i: f"machine::{function}({', '.join((*i.operands, *extra))})"


def _nothing(_: Instruction) -> str:
    return ""


def _vector(operand: str) -> list[str]:
    return split(operand.strip()[1:-1], ",") if operand.startswith("{") else [operand]


def _arrive(i: Instruction) -> str:
    state, address, *count = i.operands
    if state != "_":
        raise UnknownInstructionError(f"{i.name} with a state")
    if "expect_tx" in i.parts:
        return f"machine::barrier_arrive({address}, 1, {count[0]})"
    return f"machine::barrier_arrive({address}, {count[0] if count else 1}, 0)"


def _tensor(i: Instruction) -> tuple[int, str, str, list[str]]:
    """Return rank, map, coordinates, and the other operands in order."""
    at = next(place for place, operand in enumerate(i.operands) if "{" in operand)
    tensor, place = split(i.operands[at], ",")
    rank = int(next(part for part in i.parts if re.fullmatch(r"[1-5]d", part))[0])
    assert len(_vector(place)) == rank
    return rank, tensor, place, [*i.operands[:at], *i.operands[at + 1 :]]


def _tensor_load(i: Instruction) -> str:
    rank, tensor, place, (to, barrier, *more) = _tensor(i)
    mask = more[0] if "multicast::cluster" in i.name else "-1"
    return f"machine::tensor_load({rank}, {to}, {tensor}, {place}, {barrier}, {mask})"


def _tensor_prefetch(i: Instruction) -> str:
    rank, tensor, place, _ = _tensor(i)
    return f"machine::tensor_prefetch({rank}, {tensor}, {place})"


def _tensor_store(i: Instruction) -> str:
    rank, tensor, place, (source, *_) = _tensor(i)
    return f"machine::tensor_store({rank}, {tensor}, {place}, {source}, {'true' if 'reduce' in i.parts else 'false'})"


def _bulk_load(i: Instruction) -> str:
    to, source, size, barrier, *more = i.operands
    mask = more[0] if "multicast::cluster" in i.name else "-1"
    return f"machine::bulk_load({to}, (const void*){source}, {size}, {barrier}, {mask})"


def _wgmma(i: Instruction) -> str:
    shape, accum_type, a_type, b_type = i.parts[-4:] if i.parts[-1] != "satfinite" else i.parts[-5:-1]
    n, k = re.fullmatch(r"m64n(\d+)k(\d+)", shape).groups()  # type: ignore[union-attr]
    accumulators, a, b, accumulates, *more = i.operands
    is_rs = a.startswith("{")
    signs = more[:2] if a_type not in {"s8", "u8"} else ["1", "1"]
    orders = more[2:] if a_type not in {"s8", "u8"} else []
    if is_rs:
        orders = ["0", *orders]
        a = "std::array<uint32_t, 4>{" + ", ".join(f"machine::bits({value})" for value in _vector(a)) + "}"
    else:
        a = f"(uint64_t){a}"
    a_by_mn, b_by_mn = (*orders, "0", "0")[:2]
    regs = ", ".join(f"&{value}" for value in _vector(accumulators))
    types = ", ".join(f"machine::Type::{t}" for t in (accum_type, a_type, b_type))
    mma = f"machine::Mma{{{n}, {k}, {types}, bool({accumulates}), bool({a_by_mn}), bool({b_by_mn}), {signs[0]}, {signs[1]}}}"
    return f"machine::wgmma({mma}, {{{regs}}}, {a}, (uint64_t){b})"


def _mma(i: Instruction) -> str:
    d, a, b, c = (", ".join(_vector(operand)) for operand in i.operands)
    m, k = re.fullmatch(r"m(\d+)n8k(\d+)", i.parts[3]).groups()  # type: ignore[union-attr]
    shape = f"{{{m}, {k}, machine::Type::{i.parts[-2]}, machine::Type::{i.parts[-1]}}}"
    multiplied = f"machine::mma_sync({shape}, machine::packed({a}), machine::packed({b}), sums)"
    return f"auto sums = machine::packed({c}); {multiplied}; machine::unpack(sums, {d})"


def _dot(i: Instruction) -> str:
    signs = ", ".join("true" if part == "s32" else "false" for part in i.parts[1:])
    return f"{i.operands[0]} = machine::dot_of_bytes({', '.join(i.operands[1:])}, {signs})"


def _matrix_store(i: Instruction) -> str:
    row, parts = i.operands
    return f"machine::matrix_store({row}, {{{', '.join(_vector(parts))}}}, {'true' if 'trans' in i.parts else 'false'})"


def _matrix_load(i: Instruction) -> str:
    parts, row = i.operands
    return (
        f"machine::matrix_load({{{', '.join(f'&{part}' for part in _vector(parts))}}}, {row}, {'true' if 'trans' in i.parts else 'false'})"
    )


def _copy(i: Instruction) -> str:
    to, source, size, *rest = i.operands
    return f"machine::copy_async({to}, (const void*){source}, {size}, {rest[0] if rest else size})"


def _narrow(i: Instruction) -> str:
    """cvt of one or two float32 to a narrower type; of two, the first becomes the upper half."""
    kind = i.parts[-2] if i.parts[-1] == "f32" else ""
    narrow = {"f16": "__half", "bf16": "__nv_bfloat16", "e4m3": "__nv_fp8_e4m3", "e5m2": "__nv_fp8_e5m2"}.get(kind.removesuffix("x2"))
    if narrow is None or ("relu" in i.parts and not kind.endswith("x2")):
        raise UnknownInstructionError(i.name)
    sources = [f"std::max(0.0f, {source})" for source in i.operands[1:]] if "relu" in i.parts else i.operands[1:]
    packed = [f"{narrow}({source})" for source in sources]
    return f"{i.operands[0]} = machine::{'pack' if len(packed) == 2 else 'bits'}({', '.join(packed)})"


def _widen(i: Instruction) -> str:
    """cvt of two float8 to float16: the lower half comes from the lower byte."""
    narrow = {"e4m3x2": "__nv_fp8_e4m3", "e5m2x2": "__nv_fp8_e5m2"}[i.parts[-1]]
    to, source = i.operands
    return f"{to} = machine::widened<{narrow}>({source})"


def _move(i: Instruction) -> str:
    to, source = i.operands
    special = {
        "_cluster_ctarank": "machine::self->rank_in_cluster",
        "_cluster_nctarank": "machine::self->ctas_in_cluster",
        "_cluster_ctaid.x": "machine::self->rank_in_cluster",
        "_cluster_nctaid.x": "machine::self->ctas_in_cluster",
        "_laneid": "(machine::self->rank_in_cta % 32)",
    }
    if source.startswith("_") and source in special:
        source = special[source]
    elif re.match(r"_\w+\.|_(clock|smid|nsmid|warpid|globaltimer)", source):
        raise UnknownInstructionError(f"{i.name} of {source.replace('_', '%', 1)}")
    return f"{to} = {source}"


def _compare(i: Instruction) -> str:
    sign = {"ne": "!=", "eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[i.parts[1]]
    to, a, b = i.operands
    return f"{to} = ({a}) {sign} ({b})"


_WIDTH = {
    "b8": "uint8_t",
    "u8": "uint8_t",
    "b16": "uint16_t",
    "u16": "uint16_t",
    "b32": "uint32_t",
    "u32": "uint32_t",
    "s32": "int32_t",
    "f32": "float",
    "b64": "uint64_t",
    "u64": "uint64_t",
    "f64": "double",
}


def _load_shared(i: Instruction) -> str:
    to, address = i.operands
    size = f"sizeof({_WIDTH[i.parts[-1]]})"
    return " ".join(f"machine::load({address} + {n} * {size}, &{part}, {size});" for n, part in enumerate(_vector(to)))


def _store_shared(i: Instruction) -> str:
    address, source = i.operands
    kind = _WIDTH[i.parts[-1]]
    return " ".join(
        f"{{ {kind} value = ({kind})({part}); machine::store({address} + {n} * sizeof({kind}), &value, sizeof({kind})); }}"
        for n, part in enumerate(_vector(source))
    )


def _store_async(i: Instruction) -> str:
    address, source, barrier = i.operands
    kind = _WIDTH[i.parts[-1]]
    return " ".join(
        f"{{ {kind} value = ({kind})({part}); machine::store_async({address} + {n} * sizeof({kind}), &value, sizeof({kind}), {barrier}); }}"
        for n, part in enumerate(_vector(source))
    )


def _load_global(i: Instruction) -> str:
    to, address = i.operands[:2]
    kind = _WIDTH[i.parts[-1]]
    where = f"({kind}*)({address})"
    load = (
        "machine::strong_load({0}, &{1}, sizeof({2}));"
        if _STRONG & set(i.parts)
        else "machine::touch_global({0}, sizeof({2}), false); std::memcpy(&{1}, {0}, sizeof({2}));"
    )
    reads = " ".join(load.format(f"{where} + {n}", part, kind) for n, part in enumerate(_vector(to)))
    return f"machine::give_way(); {reads}{f' machine::acquire({where});' if 'acquire' in i.parts else ''}"


def _store_global(i: Instruction) -> str:
    address, source = i.operands[:2]
    kind = _WIDTH[i.parts[-1]]
    where = f"({kind}*)({address})"
    store = (
        "machine::strong_store({0}, &value, sizeof({2}));"
        if _STRONG & set(i.parts)
        else "machine::touch_global({0}, sizeof({2}), true); std::memcpy({0}, &value, sizeof({2}));"
    )
    writes = " ".join(
        f"{{ {kind} value = ({kind})({part}); {store.format(f'{where} + {n}', part, kind)} }}" for n, part in enumerate(_vector(source))
    )
    return f"{writes}{f' machine::release({where});' if 'release' in i.parts else ''}"


_STRONG = {"relaxed", "acquire", "release", "volatile"}
"""Accesses that may race with others."""


def _atomic(i: Instruction) -> str:
    kind = _WIDTH[i.parts[-1]]
    to, address, value = i.operands if i.parts[0] == "atom" else ("", *i.operands)
    change = {"add": "before + value", "exch": "value", "inc": "before >= value ? 0 : before + 1", "or": "before | value"}
    operation = next(part for part in i.parts if part in change)
    call = f"machine::atomic(({kind}*)({address}), [value = ({kind})({value})]({kind} before) -> {kind} {{ return {change[operation]}; }})"
    return f"{to} = {call}" if to else call


def _math(expression: str) -> Callable[[Instruction], str]:
    return lambda i: f"{i.operands[0]} = " + expression.format(*i.operands[1:])


def _named(i: Instruction, *, is_waiting: bool) -> str:
    number, *count = i.operands
    return f"machine::sync_named({number}, {count[0] if count else 0}, {'true' if is_waiting else 'false'})"


def _binary(i: Instruction) -> str:
    to, a, b = i.operands
    if i.parts[0] in {"max", "min"}:
        return f"{to} = std::f{i.parts[0]}({a}, {b})"
    return f"{to} = ({a}) {_SIGNS[i.parts[0]]} ({b})"


_SIGNS = {"add": "+", "sub": "-", "mul": "*"}
_SCOPES = r"(\.(relaxed|release|acquire|acq_rel|sc|weak|volatile|cta|cluster|gpu|sys|aligned|nc|cs|L1::\w+|L2::\w+))*"
_HINTS = r"(\.(L2::cache_hint|L2::\w+|bulk_group|tile|cta_group::1))*"
_MODELS: list[tuple[re.Pattern[str], Callable[[Instruction], str]]] = [
    (re.compile(pattern), call)
    for pattern, call in (
        (r"mbarrier\.init\.shared(::cta)?\.b64", _call("barrier_init")),
        (r"mbarrier\.inval\.shared(::cta)?\.b64", _call("barrier_invalidate")),
        (rf"mbarrier\.arrive(\.expect_tx)?{_SCOPES}\.shared(::cta|::cluster)?\.b64", _arrive),
        (
            rf"mbarrier\.expect_tx{_SCOPES}\.shared(::cta|::cluster)?\.b64",
            lambda i: f"machine::barrier_arrive({i.operands[0]}, 0, {i.operands[1]})",
        ),
        (
            rf"mbarrier\.try_wait\.parity{_SCOPES}\.shared(::cta)?\.b64",
            lambda i: f"{i.operands[0]} = machine::barrier_wait({', '.join(i.operands[1:3])})",
        ),
        (
            rf"mbarrier\.test_wait\.parity{_SCOPES}\.shared(::cta)?\.b64",
            lambda i: f"{i.operands[0]} = machine::barrier_test({', '.join(i.operands[1:3])})",
        ),
        (r"bar\.warp\.sync", lambda _: "machine::sync_warp()"),
        (r"elect\.sync", lambda i: f"{i.operands[0].split('|')[1]} = machine::elected()"),
        (r"bar(rier)?(\.cta)?\.sync(\.aligned)?", lambda i: _named(i, is_waiting=True)),
        (r"bar(rier)?(\.cta)?\.arrive(\.aligned)?", lambda i: _named(i, is_waiting=False)),
        (rf"barrier\.cluster\.arrive{_SCOPES}", lambda i: f"machine::cluster_arrive({'true' if 'aligned' in i.parts else 'false'})"),
        (rf"barrier\.cluster\.wait{_SCOPES}", _call("cluster_wait")),
        (r"fence\.proxy\.async(\.shared::(cta|cluster)|\.global)?", _call("fence_proxy")),
        (rf"fence(\.mbarrier_init|\.proxy\.tensormap::generic)?{_SCOPES}(\.cluster)?|membar\.\w+", _nothing),
        (r"griddepcontrol\.wait", _call("wait_for_preceding")),
        (r"griddepcontrol\.launch_dependents", _nothing),
        (
            r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32",
            lambda i: f"machine::set_registers({i.operands[0]}, {'true' if 'inc' in i.parts else 'false'})",
        ),
        (
            rf"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cluster|cta)\.global(\.tile)?\.mbarrier::complete_tx::bytes(\.multicast::cluster)?{_HINTS}",
            _tensor_load,
        ),
        (rf"cp(\.reduce)?\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(\.add)?(\.tile)?\.bulk_group{_HINTS}", _tensor_store),
        (rf"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes(\.multicast::cluster)?{_HINTS}", _bulk_load),
        (
            rf"cp\.async\.bulk\.global\.shared::cta\.bulk_group{_HINTS}",
            lambda i: f"machine::bulk_store((const void*){i.operands[0]}, {i.operands[1]}, {i.operands[2]})",
        ),
        (r"cp\.async\.bulk\.commit_group", _call("bulk_commit")),
        (r"cp\.async\.bulk\.wait_group", _call("bulk_wait", "false")),
        (r"cp\.async\.bulk\.wait_group\.read", _call("bulk_wait", "true")),
        (r"prefetch\.global\.L2", lambda i: f"machine::prefetch((const void*)({i.operands[0]}), 1, 1)"),
        (r"cp\.async\.bulk\.prefetch\.L2\.global", lambda i: f"machine::prefetch((const void*)({i.operands[0]}), {i.operands[1]}, 16)"),
        (r"ld\.param\.u64", lambda i: f"{i.operands[0]} = machine::parameters[{i.operands[1].rpartition('_')[2]}]"),
        (r"prefetch\.tensormap|prefetchu?(\.global)?\.L[12](::\w+)?", _nothing),
        (rf"cp\.async\.bulk\.prefetch\.tensor\.[1-5]d\.L2\.global(\.tile)?{_HINTS}", _tensor_prefetch),
        (rf"cp\.async\.c[ag]\.shared(::cta)?\.global{_HINTS}", _copy),
        (r"cp\.async\.commit_group", _call("copy_commit")),
        (r"cp\.async\.wait_group", _call("copy_wait")),
        (r"cp\.async\.wait_all", lambda _: "machine::copy_commit(); machine::copy_wait(0)"),
        (
            r"cp\.async\.mbarrier\.arrive(\.noinc)?\.shared(::cta)?\.b64",
            lambda i: f"machine::copy_arrive({i.operands[0]}, {'true' if 'noinc' in i.parts else 'false'})",
        ),
        (r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.\w+\.\w+\.\w+(\.satfinite)?", _wgmma),
        (r"wgmma\.fence\.sync\.aligned", _call("wgmma_fence")),
        (r"wgmma\.commit_group\.sync\.aligned", _call("wgmma_commit")),
        (r"wgmma\.wait_group\.sync\.aligned", _call("wgmma_wait")),
        (r"mma\.sync\.aligned\.(m16n8k16\.row\.col\.f32\.(f16\.f16|bf16\.bf16)|m16n8k8\.row\.col\.f32\.tf32\.tf32)\.f32", _mma),
        (r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.(f16\.f16\.f16\.f16|f32\.f16\.f16\.f32)", _mma),
        (r"mma\.sync\.aligned\.(m16n8k32|m8n8k16)\.row\.col\.s32\.(s8\.s8|u8\.u8)\.s32", _mma),
        (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.(e4m3\.e4m3|e5m2\.e5m2)\.f32", _mma),
        (r"mma\.sync\.aligned\.m8n8k4\.row\.col\.f64\.f64\.f64\.f64", _mma),
        (r"dp4a\.[us]32\.[us]32", _dot),
        (r"prmt\.b32", lambda i: f"{i.operands[0]} = machine::permuted({', '.join(i.operands[1:])})"),
        (r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16", _matrix_store),
        (r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16", _matrix_load),
        (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", lambda i: f"{i.operands[0]} = matrix_transposed({i.operands[1]})"),
        (r"mapa\.shared::cluster\.u32", lambda i: f"{i.operands[0]} = machine::map_shared({', '.join(i.operands[1:])})"),
        (r"mapa\.u64", lambda i: f"{i.operands[0]} = machine::map_generic((uint64_t){i.operands[1]}, {i.operands[2]})"),
        (rf"ld{_SCOPES}\.shared(::cta|::cluster)?(\.v[24])?\.\w+", _load_shared),
        (r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(\.v[24])?\.\w+", _store_async),
        (rf"st{_SCOPES}\.shared(::cta|::cluster)?(\.v[24])?\.\w+", _store_shared),
        (rf"ld{_SCOPES}\.global{_SCOPES}(\.v[24])?\.\w+", _load_global),
        (rf"st{_SCOPES}\.global{_SCOPES}(\.v[24])?\.\w+", _store_global),
        (rf"(atom|red){_SCOPES}\.global{_SCOPES}\.(add|exch|inc|or)\.\w+", _atomic),
        (r"nanosleep\.u32", lambda _: "machine::give_way()"),
        (r"cvt\.rn(\.satfinite)?(\.relu)?\.\w+\.f32", _narrow),
        (r"cvt\.rn\.f16x2\.e[45]m[32]x2", _widen),
        (r"mov\.\w+", _move),
        (r"setp\.(ne|eq|lt|le|gt|ge)\.\w+", _compare),
        (r"lop3\.b32", lambda i: f"{i.operands[0]} = machine::look_up({', '.join(i.operands[1:])})"),
        (r"selp\.\w+", _math("{2} ? {0} : {1}")),
        (r"tanh\.approx\.f32", _math("std::tanh({0})")),
        (r"ex2\.approx(\.ftz)?\.f32", _math("std::exp2({0})")),
        (r"lg2\.approx(\.ftz)?\.f32", _math("std::log2({0})")),
        (r"rcp\.(approx(\.ftz)?|rn)\.f32", _math("1.0f / ({0})")),
        (r"fma\.rn(\.ftz)?\.f32", _math("std::fma({0}, {1}, {2})")),
        (r"max\.NaN\.f32", _math("std::isunordered({0}, {1}) ? {0} + {1} : std::fmax({0}, {1})")),
        (r"min\.NaN\.f32", _math("std::isunordered({0}, {1}) ? {0} + {1} : std::fmin({0}, {1})")),
        (r"(add|sub|mul|max|min)(\.rn)?(\.ftz)?\.f32", _binary),
    )
]
