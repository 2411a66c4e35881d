"""Owns the text in which lists of candidates are frozen: how it is written and read, and the names that it goes by.

Knows nothing of policies, of TVM or of what differs.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
SPACES = FOLDER / "spaces.jsonl"
NAMES = FOLDER / "names.toml"
ABSENT = "-"
"""In the place of a parameter that a candidate does without."""
SAME = "same as "


class Line(NamedTuple):
    """A candidate, and what came of it: predicted seconds, or a digest."""

    candidate: str
    """The template and the values of its parameters, both as `Names` has them."""
    outcome: str


Lists = dict[tuple[str, str], tuple[Line, ...]]
"""By workload and policy. Lists without candidates are left out."""


@dataclass(frozen=True)
class Names:
    """Which names the frozen text uses for what is called otherwise by now: where nothing was renamed, the same ones."""

    policies: Mapping[str, str]
    """Frozen name: present name."""
    templates: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]
    """Frozen name of a template: its parameters' present names, in the order of values."""

    def frozen_policy(self, name: str) -> str:
        return next((frozen for frozen, present in self.policies.items() if present == name), name)

    def frozen_template(self, name: str) -> str:
        return next((frozen for frozen, present in self.templates.items() if present == name), name)

    def text_of(self, template: str, params: Mapping[str, Any]) -> str:
        """Return a candidate as it is frozen; parameters without a place come last, with their names."""
        frozen = self.frozen_template(template)
        order = self.parameters.get(frozen, ())
        placed = [_text(params[name]) if name in params else ABSENT for name in order]
        return " ".join([frozen, *placed, *(f"{name}={_text(params[name])}" for name in sorted(params.keys() - set(order)))])

    def candidate_of(self, text: str) -> tuple[str, dict[str, Any]]:
        """Return the present template and parameters of a candidate."""
        frozen, *values = text.split()
        named = zip(self.parameters[frozen], values, strict=True)
        return self.templates.get(frozen, frozen), {name: _value(value) for name, value in named if value != ABSENT}

    def spelled(self, text: str) -> str:
        """Return a candidate for people: with the names of its parameters."""
        frozen, *values = text.split()
        order = self.parameters.get(frozen, ())
        return " ".join([frozen, *(f"{name}={value}" for name, value in zip(order, values, strict=False)), *values[len(order) :]])


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else repr(value).replace(" ", "")


def _value(text: str) -> Any:
    return text if text.isidentifier() and text not in {"True", "False"} else ast.literal_eval(text)


def read_names() -> Names:
    if not NAMES.is_file():
        return Names({}, {}, {})
    held = tomllib.loads(NAMES.read_text(encoding="utf-8"))
    return Names(held["policies"], held["templates"], {name: tuple(words.split()) for name, words in held["parameters"].items()})


def write_names(names: Names) -> None:
    tables = {
        "policies": names.policies,
        "templates": names.templates,
        "parameters": {name: " ".join(words) for name, words in names.parameters.items()},
    }
    lines = ["# Frozen name = present name; of parameters the present names, in the order in which values are frozen."]
    for title, table in tables.items():
        lines += ["", f"[{title}]", *(f'{name} = "{text}"' for name, text in sorted(table.items()))]
    NAMES.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def lists_file(kind: str, arch: str) -> Path:
    return FOLDER / f"{kind}-{arch}.txt"


def read_lists(kind: str, arch: str) -> Lists:
    """Return what `write_lists` wrote, nothing where there is no such file yet."""
    found: dict[tuple[str, str], list[Line]] = {}
    workload, policy, path = "", "", lists_file(kind, arch)
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        text = line.lstrip()
        if line.startswith("  "):
            candidate, _, outcome = text.rpartition(" ")
            found[workload, policy].append(Line(candidate, outcome))
        elif line.startswith(" "):
            policy, _, other = text.partition(f" {SAME}")
            found[workload, policy] = list(found[workload, other]) if other else []
        else:
            workload = text
    return {key: tuple(lines) for key, lines in found.items()}


def write_lists(kind: str, arch: str, lists: Lists) -> None:
    """Write each workload with its policies; of a policy that has another one's list, the other's name."""
    out: list[str] = []
    workload, earlier = "", {}
    for (of, policy), lines in lists.items():
        if of != workload:
            out.append(of)
            workload, earlier = of, {}
        same = earlier.setdefault(lines, policy)
        out.append(f" {policy}" if same == policy else f" {policy} {SAME}{same}")
        out += [f"  {line.candidate} {line.outcome}" for line in lines] if same == policy else []
    lists_file(kind, arch).write_text("".join(f"{line}\n" for line in out), encoding="utf-8")


def read_spaces() -> dict[str, Any]:
    """Return the iteration space of each workload, as JSON."""
    lines = SPACES.read_text(encoding="utf-8").splitlines() if SPACES.is_file() else ()
    return dict(json.loads(line) for line in lines)


def write_spaces(spaces: Mapping[str, Any]) -> None:
    lines = (json.dumps(pair, separators=(",", ":")) for pair in spaces.items())
    SPACES.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def with_places(names: Names, policies: Iterable[str], templates: Mapping[str, Sequence[str]]) -> Names:
    """Return names in which each policy, each template and each of its parameters has a place, those that are new the last ones."""
    of_policies = {name: present for name, present in names.policies.items() if present in set(policies)}
    of_policies |= {name: name for name in policies if name not in of_policies.values()}
    of_templates = {name: present for name, present in names.templates.items() if present in templates}
    of_templates |= {name: name for name in templates if name not in of_templates.values()}
    parameters = {}
    for frozen, present in of_templates.items():
        kept = [name for name in names.parameters.get(frozen, ()) if name in templates[present]]
        parameters[frozen] = (*kept, *sorted(set(templates[present]) - set(kept)))
    return Names(of_policies, of_templates, parameters)
