"""Owns which declarations of C++ headers a source needs: of 1.5 MB that CUDA's headers are, a kernel uses less than a fifth.

Knows nothing of CUDA, compilers or files. Headers come as the preprocessor leaves them: declarations, with the macros that are defined
(`-dD`). A declaration is needed if the source, or another one that is needed, has a word that it declares. All declarations of a
name come together, so calls choose among the same overloads; an operator comes as soon as all types in its signature do. What
is cut wrongly therefore either does not compile or is not missed.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_WORD = re.compile(r"(?<!\w)[A-Za-z_]\w*")
_NO_CODE = re.compile(r"""(?P<literal>"(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/""", re.DOTALL)
"""Literals, such as instructions in assembly, and comments: words in them name no declaration."""
_KEYWORDS = frozenset(
    _WORD.findall(
        """asm auto bool break case catch char class const constexpr continue decltype default delete do double else enum explicit extern
        false float for friend if inline int long mutable namespace new noexcept nullptr operator private protected public return short
        signed sizeof static static_cast struct switch template this throw true try typedef typename union unsigned using virtual void
        volatile while __alignof __alignof__ __asm__ __attribute__ __extension__ __inline __inline__ __restrict__ __volatile__"""
    )
)
"""Words that are no names, though declarations that are cut wrongly count them among theirs."""
_TOKEN = re.compile(r"""[;{}()\[\]]|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^;{}()\[\]"']+""")
_DIRECTIVE = re.compile(r"^[ \t]*#.*\n?", re.MULTILINE)
_PLACE = re.compile(r'#\s*\d+\s+"(?P<file>[^"]*)"')
_MACRO = re.compile(r"#\s*(?P<kind>define|undef)\s+(?P<name>\w+)")
_COMPILERS_OWN = frozenset({"<built-in>", "<command-line>"})
"""Where macros come from that are defined again for the source."""
_BLOCK = re.compile(r'\s*(?:extern\s*"C(?:\+\+)?"|(?:inline\s+)?namespace\b[^(){};=]*)\s*')
"""Head of a block of declarations, without attributes."""
_ATTRIBUTE = re.compile(r"\[\[[^\]]*\]\]|\b(?:__attribute__|__attribute|alignas|__declspec|__asm__|asm|noexcept|decltype|throw)\s*\(")
_TEMPLATE = re.compile(r"\s*(?:__extension__\s+)?template\s*<")
_KIND = re.compile(
    r"\s*(?:(?:static|inline|constexpr|const|extern|__extension__|friend)\s+)*(?P<kind>struct|class|union|enum|typedef|using)\b"
)
_OPERATOR = re.compile(r"\boperator\b")
_BASES = re.compile(r"(?<!:):(?!:)")
_QUALIFIED = re.compile(r"((?:\w+\s*(?:<[^()]*>)?\s*::\s*)*~?\w+)\s*(?:<[^()]*>)?\s*$")
_CONSTANT = re.compile(r"[{,]\s*([A-Za-z_]\w*)")
_POINTER = re.compile(r"\(\s*\*\s*(\w+)\s*\)")
_NO_NAMES = frozenset({"sizeof", "typename", "operator", "void", "const", "return"})
_NOTHING = re.compile(r"\s*(?:;|static_assert\b|_Static_assert\b)")
_TYPES = frozenset({"struct", "class", "union", "enum"})
_NAMESPACE = re.compile(r"namespace\s+(\w+)")
"""One that has to be named: not an inline one."""


_SETS = 64
"""Sets of words of which the declarations are kept, each some hundred kilobytes."""


@dataclass(frozen=True)
class Declaration:
    """A declaration, as it stands in the headers."""

    text: str = field(repr=False)
    blocks: tuple[str, ...]
    """Heads of the blocks that it stands in, outermost first: namespaces and linkage."""
    names: frozenset[str]
    """What it declares; of an operator, the words of its signature."""
    is_type: bool = False
    is_operator: bool = False


@dataclass(frozen=True)
class Headers:
    """What some headers declare, in their order, and the macros that they define, by name."""

    declarations: tuple[Declaration, ...] = field(repr=False)
    macros: Mapping[str, str] = field(repr=False)

    @functools.cached_property
    def places(self) -> Mapping[str, Sequence[int]]:
        """Places of the declarations of each name."""
        found: dict[str, list[int]] = {}
        for place, each in enumerate(self.declarations):
            for name in () if each.is_operator else each.names - _KEYWORDS:
                found.setdefault(name, []).append(place)
        return found

    @functools.cached_property
    def operators(self) -> Mapping[int, frozenset[str]]:
        """Types in the signature of each operator, by its place."""
        types = frozenset(name for each in self.declarations if each.is_type for name in each.names) - _KEYWORDS
        return {place: types & each.names for place, each in enumerate(self.declarations) if each.is_operator and types & each.names}

    @functools.cached_property
    def known(self) -> frozenset[str]:
        """Words that may need a declaration or a macro: those that declare one, and namespaces."""
        return frozenset([*self.places, *self.macros, *itertools.chain.from_iterable(map(_namespaces, self.declarations))])

    @functools.cached_property
    def words_of(self) -> Callable[[int], frozenset[str]]:
        """The known words of the declaration at a place, which are looked for once."""
        return functools.cache(lambda place: self.known.intersection(_WORD.findall(self.declarations[place].text)))

    @functools.cached_property
    def text_for(self) -> Callable[[frozenset[str]], str]:
        """What known words need, in the headers' order: for the last few sets of words, since candidates of one template have the same."""
        return functools.lru_cache(maxsize=_SETS)(functools.partial(_text_for, self))


class _Part(NamedTuple):
    """A declaration's text, or the head of a block and what is in it."""

    text: str
    inside: tuple[_Part, ...] | None = None


def parsed(preprocessed: str) -> Headers:
    """Return what headers declare, from the preprocessor's output with `-dD`."""
    parts = _parts(_DIRECTIVE.sub("", preprocessed))
    return Headers(tuple(_declarations(parts, ())), dict(_macros(preprocessed)))


def needed(headers: Headers, source: str) -> str:
    """Return the declarations and macros that a source needs, in the headers' order."""
    return headers.text_for(headers.known.intersection(_WORD.findall(_NO_CODE.sub(_blank, source))))


def _blank(found: re.Match[str]) -> str:
    return '""' if found["literal"] else " "


def _text_for(headers: Headers, words: frozenset[str]) -> str:
    macros = _needed_macros(headers.macros, words)
    found = _Search(headers).declarations([*words, *(word for text in macros for word in _WORD.findall(text))])
    return "\n".join([*_joined(found), *macros, ""])


def _needed_macros(macros: Mapping[str, str], words: Iterable[str]) -> list[str]:
    """Return the definitions of macros that words name, and of those that these name."""
    wanted, found = [word for word in words if word in macros], set[str]()
    while wanted:
        if (name := wanted.pop()) not in found:
            found.add(name)
            wanted.extend(word for word in _WORD.findall(macros[name]) if word in macros)
    return [text for name, text in macros.items() if name in found]


class _Search:
    """The search for the declarations that words need."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self._operators = dict(headers.operators)
        self._known: set[str] = set()
        self._found: set[int] = set()
        self._waiting: dict[str, set[str]] = {}
        """Words by the namespace that must be named before what they name in it is needed."""
        self._todo: list[str] = []

    def declarations(self, words: Iterable[str]) -> list[Declaration]:
        """Return what the words need, in the headers' order."""
        self._todo.extend(words)
        while self._todo:
            while self._todo:
                self._learn(self._todo.pop())
            for place in [place for place, types in self._operators.items() if types <= self._known]:
                del self._operators[place]
                self._take(place)
        return [self._headers.declarations[place] for place in sorted(self._found)]

    def _learn(self, word: str) -> None:
        if word in self._known:
            return
        self._known.add(word)
        again = self._waiting.pop(word, set())
        self._known -= again
        self._todo.extend(again)
        for place in self._headers.places.get(word, ()):
            unnamed = next((name for name in _namespaces(self._headers.declarations[place]) if name not in self._known), None)
            if unnamed is None:
                self._take(place)
            else:  # most of the standard library
                self._waiting.setdefault(unnamed, set()).add(word)

    def _take(self, place: int) -> None:
        if place not in self._found:
            self._found.add(place)
            self._todo.extend(self._headers.words_of(place))


def _namespaces(declaration: Declaration) -> Iterator[str]:
    return (found[1] for head in declaration.blocks if (found := _NAMESPACE.match(head)))


def _joined(declarations: Iterable[Declaration]) -> Iterator[str]:
    """Yield the text of declarations, each in its blocks."""
    for blocks, group in itertools.groupby(declarations, key=lambda each: each.blocks):
        yield from (f"{head} {{" for head in blocks)
        yield from (each.text for each in group)
        yield from ("}" for _ in blocks)


def _macros(preprocessed: str) -> Iterator[tuple[str, str]]:
    """Yield the macros that are defined at the end, but for the compiler's own."""
    defined, file = dict[str, str](), ""
    for line in preprocessed.splitlines():
        if not line.startswith("#"):
            continue
        if place := _PLACE.match(line):
            file = place["file"]
        elif (found := _MACRO.match(line)) and file not in _COMPILERS_OWN:
            defined.pop(found["name"], None)
            if found["kind"] == "define":
                defined[found["name"]] = line
    yield from defined.items()


def _parts(text: str) -> tuple[_Part, ...]:
    """Cut a text at the ends of its declarations."""
    parts, begin = [], 0
    for end, opening in _ends(text):
        head = "" if opening is None else _plain(text[begin:opening])
        if opening is not None and _BLOCK.fullmatch(head):
            parts.append(_Part(text[begin:opening].strip(), _parts(text[opening + 1 : end - 1])))
        elif opening is None or _is_function(head):
            parts.append(_Part(text[begin:end]))
        else:
            continue
        begin = end
    return tuple(parts)


def _ends(text: str) -> Iterator[tuple[int, int | None]]:
    """Yield the places behind semicolons and blocks that stand in no brackets, and where such a block opens."""
    depth, opening = 0, 0
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in "([{":
            opening = token.start() if mark == "{" and not depth else opening
            depth += 1
        elif mark in ")]}":
            depth -= 1
        if not depth and mark in ";}":
            yield token.end(), (opening if mark == "}" else None)


def _declarations(parts: Iterable[_Part], blocks: tuple[str, ...]) -> Iterator[Declaration]:
    for part in parts:
        if part.inside is not None:
            yield from _declarations(part.inside, (*blocks, part.text))
        elif not _NOTHING.match(part.text):
            yield _declaration(part.text, blocks)


def _plain(text: str) -> str:
    """Return a declaration without its attributes and the parameters of its template."""
    pieces, at = list[str](), 0
    while found := _ATTRIBUTE.search(text, at):
        pieces.append(text[at : found.start()])
        at = found.end() if found[0].endswith("]") else _closed(text, found.end(), "(", ")")
    plain = "".join(pieces) + text[at:]
    while found := _TEMPLATE.match(plain):
        plain = plain[_closed(plain, found.end(), "<", ">") :]
    return plain.strip()


def _closed(text: str, at: int, opening: str, closing: str) -> int:
    """Return the place behind the bracket that closes one before `at`; angles inside parentheses are comparisons."""
    depth, parentheses = 1, 0
    while depth and at < len(text):
        mark = text[at]
        if not parentheses or opening == "(":
            depth += (mark == opening) - (mark == closing)
        parentheses += (mark == "(") - (mark == ")")
        at += 1
    return at


def _is_function(head: str) -> bool:
    """Say whether a declaration ends with the block in front of which its head, without attributes, stands."""
    kind = _KIND.match(head)
    if kind and kind["kind"] in {"typedef", "using"}:
        return False
    return "(" in (_BASES.split(head)[0] if kind else head)


def _declaration(text: str, blocks: tuple[str, ...]) -> Declaration:
    plain = _plain(text)
    kind = (_KIND.match(plain) or {"kind": ""})["kind"]
    if kind == "using":
        alias = re.match(r"using\s+(\w+)\s*=", plain)
        return Declaration(text, blocks, frozenset({alias[1] if alias else _WORD.findall(plain)[-1]}), is_type=True)
    if kind == "typedef":
        return Declaration(text, blocks, _of_typedef(plain), is_type=True)
    head = plain.split("{", 1)[0]
    if kind in _TYPES and "(" not in _BASES.split(head)[0]:
        return Declaration(text, blocks, _of_type(plain, kind), is_type=True)
    if _OPERATOR.search(head.split("(", 1)[0]):
        return Declaration(text, blocks, frozenset(_WORD.findall(head)), is_operator=True)
    return Declaration(text, blocks, _of_function_or_variable(head))


def _of_typedef(plain: str) -> frozenset[str]:
    outside = re.sub(r"\{.*\}", " ", plain, flags=re.DOTALL)
    tag = re.match(r"typedef\s+(?:struct|union|enum|class)\s+(\w+)", outside)
    constants = _CONSTANT.findall(plain) if re.match(r"typedef\s+enum\b", plain) else []
    return frozenset([*_WORD.findall(outside)[-1:], *_POINTER.findall(outside), *constants, *([tag[1]] if tag else [])])


def _of_type(plain: str, kind: str) -> frozenset[str]:
    """Return the name of a class or enumeration, of its constants, and of variables that are declared with it."""
    head, _, rest = plain.partition("{")
    name = _WORD.findall(_BASES.split(head)[0].split("<", 1)[0])[1:]
    constants = _CONSTANT.findall(plain) if kind == "enum" else []
    return frozenset([*name, *_WORD.findall(rest.rpartition("}")[2]), *constants])


def _of_function_or_variable(head: str) -> frozenset[str]:
    """Return the name of a function or variable, of a member with its class; all words where parentheses are those of its type."""
    before, parenthesis, _ = head.partition("(")
    if parenthesis and "=" not in before:
        names = _WORD.findall(found[1]) if (found := _QUALIFIED.search(before)) else []
        return frozenset(names if names and not _NO_NAMES.intersection(names) else _WORD.findall(head))
    variable = re.split(r"[=\[;(]", head)[0].strip()
    while variable.endswith(">") and "<" in variable:  # a specialisation
        variable = variable[: variable.rindex("<") if variable.count(">") == 1 else variable.index("<")].strip()
    return frozenset(_WORD.findall(variable)[-1:])
