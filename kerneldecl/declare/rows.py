"""Owns rows at run time as a table declares them: `m = { upto = 4096, tuned = [1, 16, 128] }`, alone or as an item of a list.

Knows nothing of rules, nor of how kernels come to take any number of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.declare.expansion import Attrs, Axis
from kerneldecl.declare.policy_values import LIBRARY
from kerneldecl.declare.toml_keys import Finding
from kerneldecl.diagnostics.messages import nearest, show
from kerneldecl.model import Policy, uses
from kerneldecl.rows import Rows, considered_numbers

EXAMPLE = "{ upto = 4096, tuned = [1, 16, 128] }"
MOST_ROWS = 2**24
"""Rows of a call at most: kernels are verified and timed with so many."""
_LIKENESS_OF_SLIPS = 0.7
"""Likeness of a key to `upto` or `tuned` above which it is one, misspelt: "up_to" has 0.89."""


@dataclass(frozen=True)
class DeclaredRows:
    """The one attribute of a table whose number is known when kernels are called."""

    key: str
    place: int
    """Place in the attribute's list; -1 where the attribute is the number."""
    value: Any
    """The attribute as it stands in the table."""

    @property
    def table(self) -> Mapping[str, Any]:
        return self.value if self.place < 0 else self.value[self.place]  # type: ignore[no-any-return]

    @property
    def tuned(self) -> tuple[int, ...]:
        return tuple(self.table["tuned"])

    def axis(self) -> Axis:
        """Return the entries that are tuned, and those that may join them. That for one row takes no other number; it has a plain name."""
        numbers = sorted((*self.tuned, *considered_numbers(self.tuned, self.table["upto"])))
        return Axis(self.key, tuple({self.key: self._with(rows)} for rows in numbers), texts=tuple(map(self._text, numbers)))

    def named(self, name: str) -> Rows:
        """Return the rows of the kernel with this name."""
        return Rows(name, self.key, self.place, self.table["upto"], self.tuned)

    def _with(self, item: Any) -> Any:
        return item if self.place < 0 else [*self.value[: self.place], item, *self.value[self.place + 1 :]]

    def _text(self, rows: int) -> str:
        number = str(rows) if rows == 1 else f"{rows}of{self.table['upto']}"
        shown = self._with(number)
        return f"{self.key}={number if self.place < 0 else 'x'.join(map(str, shown))}"


def declared_rows(table: Attrs, attributes: Collection[str]) -> list[DeclaredRows]:
    """Return the numbers of rows in a table that are known when kernels are called; `attributes` are those of its rule."""
    found: list[DeclaredRows] = []
    for key, value in table.items():
        if key in attributes:
            items = enumerate(value) if isinstance(value, list) else [(-1, value)]
            found += [DeclaredRows(key, place, value) for place, item in items if isinstance(item, dict) and _is_meant(item)]
    return found


def _is_meant(table: Mapping[str, Any]) -> bool:
    return any(nearest(key, ("upto", "tuned"), _LIKENESS_OF_SLIPS) for key in table)


def rows_findings(found: list[DeclaredRows], attributes: Mapping[str, int]) -> Iterator[Finding]:
    """Yield what is wrong with them; `attributes` gives how deep the lists are that a rule's attributes take."""
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(rows.key for rows in found))
        yield Finding.of((found[1].key,), f"{names} have {len(found)} numbers that are known at run time; expected one")
    for rows in found:
        if rows.place >= 0 and attributes.get(rows.key) == 0:  # the list is one of values, each of which makes an entry
            yield Finding.of(
                (rows.key,),
                f"{rows.key} lists {show(rows.table)} among values; expected it alone",
                f"write {rows.key} = {show(rows.table)}",
            )
            continue
        yield from (Finding.of((rows.key,), sentence, hint) for sentence, hint in _mistakes(rows.key, rows.table))


def library_findings(found: Iterable[DeclaredRows], asked: Sequence[Policy]) -> Iterator[Finding]:
    """Yield that an entry with rows asks libraries alone, of whose calls none takes any number of them."""
    if any({use.name for use in uses(policy)} == {LIBRARY} for policy in asked):
        for rows in found:
            sentence = f"{rows.key} is known at run time, and no call of a library takes any number of rows"
            yield Finding.of((rows.key,), sentence, 'write dispatch = "fastest" or "tuned", or a number for each entry')


def _mistakes(key: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if table.keys() != {"upto", "tuned"}:
        yield f"{key} is {show(table)}; expected {EXAMPLE}", ""
        return
    upto, tuned = table["upto"], table["tuned"]
    if type(upto) is not int or upto < 2:
        yield f"upto of {key} is {show(upto)}; expected an integer above 1", ""
    elif upto > MOST_ROWS:
        yield f"upto of {key} is {show(upto)}; kernels are verified at so many rows: expected {MOST_ROWS} or fewer", ""
    elif not isinstance(tuned, list) or not tuned or not all(type(rows) is int and rows > 0 for rows in tuned):
        yield f"tuned of {key} is {show(tuned)}; expected a list of integers above 0", ""
    elif sorted(set(tuned)) != tuned:
        yield f"tuned of {key} is {show(tuned)}; expected different integers in ascending order", ""
    elif tuned[-1] > upto:
        yield f"tuned of {key} has {tuned[-1]}, which is above upto = {upto}", ""
    elif tuned == [1]:
        yield f"tuned of {key} is [1], and a kernel for one row takes no more; expected a larger number as well", ""
