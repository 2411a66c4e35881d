"""Which declarations of headers a source needs: overloads together, operators with their types, nothing else."""

from __future__ import annotations

import re

import pytest

from kerneldecl.toolchain.declarations import needed, parsed

HEADERS = parsed(
    """\
# 1 "<built-in>"
#define __BUILT_IN 1
# 1 "<command-line>"
#define GIVEN 1
# 1 "limits.h"
#define MOST 7
#define TWICE (MOST * 2)
#define GONE 1
#undef GONE
#define __global__ __attribute__((global))
# 20 "numbers.h" 1 3
extern "C" {
struct __attribute__((device_builtin)) __attribute__((aligned(2*sizeof(long int)))) pair_t
{
  int x, y;
};
typedef __attribute__((device_builtin)) struct pair_t pair_t;
extern __attribute__((device)) float tame(float x) noexcept(true);
}
typedef enum outcome_enum { OUTCOME_GOOD = 0x0, OUTCOME_BAD = (1 << 4), } outcome;
enum plain { FIRST, SECOND };
typedef void (*callback)(pair_t *);
static __inline__ int round_up(int a);
static __inline__ int round_up(int a) { return a + 1; }
static __inline__ int round_up(float a) { return (int)tame(a); }
struct __attribute__((aligned(2))) half_t {
  half_t() = default;
  half_t(float f);
  operator float() const;
  unsigned short bits;
};
inline half_t::half_t(float f) : bits(narrowed(f)) {}
inline half_t::operator float() const { return widened(bits); }
static inline unsigned short narrowed(float f) { return f > 0 ? '{' : ';'; }
static inline float widened(unsigned short bits) { asm("{ cvt; }"); return bits; }
__attribute__((device)) inline half_t operator+(const half_t &a, const half_t &b) { return half_add(a, b); }
inline half_t half_add(half_t a, half_t b) { return a; }
inline pair_t operator+(const pair_t &a, const half_t &b) { return a; }
static_assert(sizeof(half_t) == 2, "two bytes");
namespace far __attribute__ ((__visibility__ ("default"))) {
inline namespace v1 {
template<typename T> struct limits { static constexpr bool is_known = false; };
template<> struct limits<int> { static constexpr bool is_known = true; };
__extension__ template<> struct limits<__int128> { };
template<typename T, bool = (sizeof(T) > 2)> struct chosen : public limits<T> { };
inline int tame(int x) { return x; }
}
}
using far::chosen;
template <typename T> inline typename chosen<sizeof(T)>::type loaded(const T *from) { return *from; }
template <typename T> inline constexpr bool is_chosen<chosen<T>> = true;
const int table[2] = { 1, 2 }, other = 3;
"""
)


def words(source: str) -> set[str]:
    return set(re.findall(r"\w+", needed(HEADERS, source)))


def test_a_source_without_their_words_needs_nothing() -> None:
    assert needed(HEADERS, "void f(int *a) { a[0] += 1; }").strip() == ""


def test_all_overloads_of_a_name_come_with_what_their_bodies_call() -> None:
    text = needed(HEADERS, "round_up(1)")
    assert text.count("round_up") == 3
    assert "float tame(float x)" in text
    assert "half_t" not in text


def test_what_stands_in_a_linkage_block_stays_in_one() -> None:
    text = needed(HEADERS, "tame(1.0f);")
    assert re.fullmatch(r'extern "C" \{\s*extern __attribute__\(\(device\)\) float tame\(float x\) noexcept\(true\);\s*\}\s*', text)


@pytest.mark.parametrize("word", ["OUTCOME_GOOD", "OUTCOME_BAD", "outcome", "outcome_enum"])
def test_an_enumeration_comes_with_each_of_its_words(word: str) -> None:
    assert {"OUTCOME_GOOD", "OUTCOME_BAD", "outcome"} <= words(f"int x = {word};")


def test_constants_of_a_plain_enumeration_name_it_and_numbers_name_nothing() -> None:
    assert "FIRST" in words("SECOND")
    assert words("int x = 0x0 + 4;") == set()


def test_a_class_comes_with_members_that_are_defined_outside_and_with_what_they_call() -> None:
    assert {"narrowed", "widened", "bits"} <= words("half_t h;")


def test_an_operator_comes_as_soon_as_all_its_types_do() -> None:
    text = needed(HEADERS, "half_t h = a + b;")
    assert "half_t operator+" in text
    assert "half_add" in text
    assert "pair_t operator+" not in text
    assert "pair_t operator+" in needed(HEADERS, "half_t h; pair_t p;")


def test_what_a_namespace_holds_comes_once_the_namespace_is_named() -> None:
    assert "namespace far" not in needed(HEADERS, "tame(1); limits")
    text = needed(HEADERS, "far::tame(1)")
    assert "inline int tame(int x)" in text
    assert text.count("inline namespace v1 {") == 1


def test_specialisations_come_with_their_template() -> None:
    text = needed(HEADERS, "far::limits<int>::is_known")
    assert text.count("struct limits") == 3


def test_a_using_declaration_brings_what_it_names() -> None:
    text = needed(HEADERS, "chosen<int> c;")
    assert "using far::chosen;" in text
    assert "struct chosen" in text
    assert "struct limits<int>" in text
    assert text.index("struct limits") < text.index("struct chosen") < text.index("using far::chosen")


def test_a_function_is_found_whose_type_has_parentheses() -> None:
    assert "loaded" in words("loaded(p)")


def test_variables_and_pointers_to_functions_are_found() -> None:
    assert "table" in words("table[0]")
    assert "callback" in words("callback f;")
    assert "is_chosen" in words("is_chosen<int>")


def test_braces_and_semicolons_in_literals_end_nothing() -> None:
    assert "return f > 0 ? '{' : ';'; }" in needed(HEADERS, "narrowed(1)")
    assert 'asm("{ cvt; }"); return bits; }' in needed(HEADERS, "widened(1)")


def test_macros_come_with_those_that_they_name_but_for_the_compilers_own() -> None:
    assert needed(HEADERS, "TWICE").splitlines() == ["#define MOST 7", "#define TWICE (MOST * 2)", ""][:2]
    assert words("#ifdef GONE\n#if GIVEN + __BUILT_IN") == set()
    assert "#define __global__ __attribute__((global))" in needed(HEADERS, "__global__ void f() {}")


def test_words_of_literals_and_comments_need_nothing() -> None:
    assert words('asm volatile("tame \\" other;" :: "r"(0)); // round_up\n/* half_t\n*/') == set()
    assert "tame" in words('asm("a" : "=f"(tame(1.0f)));')


def test_a_function_is_not_found_by_the_keywords_of_its_type() -> None:
    assert "loaded" not in words("inline typename mine(const int *);")
