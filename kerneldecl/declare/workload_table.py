"""Owns how one `[[workload]]` table becomes workloads: every key and value is checked, every combination makes a rule.

Knows nothing of the rest of the document, nor of the line of the table.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from kerneldecl.declare.expansion import MOST_ENTRIES, Attrs, Axis, combinations, count, label_findings, size_findings, split
from kerneldecl.declare.operator_names import operator_names
from kerneldecl.declare.policies import budget_findings, kind_findings, policy_findings
from kerneldecl.declare.policy_values import dispatched, key_of, policy_of
from kerneldecl.declare.rows import declared_rows, library_findings, rows_findings
from kerneldecl.declare.rule_attributes import RuleAttributes, expected, rule_attributes
from kerneldecl.declare.sizes import is_plainly_small, size_mistake
from kerneldecl.declare.toml_keys import (
    FILE,
    LONGEST_PATH,
    WORKLOAD,
    Finding,
    Settings,
    is_name,
    is_policy,
    missing_keys,
    settings,
    unknown_targets,
    wrong_values,
)
from kerneldecl.diagnostics.messages import cut, nearest, show, unknown
from kerneldecl.errors import DeclarationError
from kerneldecl.limits import Budget
from kerneldecl.model import Policy, Value, Workload
from kerneldecl.plugins.check import specialize_problem
from kerneldecl.plugins.load import blamed, kind_of
from kerneldecl.rows import top_k_between
from kerneldecl.rule import Rule
from kerneldecl.timing import DEFAULT_TIMING

MOST_FINDINGS = 100
"""Mistakes of a kind that are reported of one table: who has made more has made one mistake many times."""
OPERATIONS_IN_TILES = 16
"""Operations for each element of all arguments from which on a kernel computes its rows in tiles; norms and functions take fewer."""
_REQUIRED = {key: WORKLOAD[key] for key in ("name", "rule")}


@dataclass(frozen=True)
class Scope:
    """Names that a table may refer to, and the defaults. Rules are loaded when the first table names them."""

    root: Path
    targets: tuple[str, ...]
    policies: tuple[str, ...]
    rules: tuple[str, ...]
    defaults: Settings
    archs: Mapping[str, str] = field(default_factory=dict)
    """Arch of each target."""
    shared_budget: Budget = ()
    """What all entries together may take."""
    timings: Mapping[str, str] = field(default_factory=dict)
    """How kernels are timed for the targets that say so."""
    dispatches: Mapping[str, str] = field(default_factory=dict)
    """What may win for the targets that say so."""
    loaded: dict[str, RuleAttributes | DeclarationError] = field(default_factory=dict, compare=False)
    fits: dict[tuple[Policy, str], tuple[Finding, ...]] = field(default_factory=dict, compare=False)
    """What is wrong with a policy for a target, as far as anybody has asked."""

    def timing(self, table: Attrs, target: str) -> str:
        """Return how an entry's kernels are timed: as its own table says, else its target's, else the defaults."""
        return str(table.get("timing") or self.timings.get(target) or self.defaults.timing or DEFAULT_TIMING)

    def policy(self, table: Attrs, target: str, policy: Policy) -> Policy:
        """Return the policies that an entry asks, given those that are declared: `dispatch` is looked for where `timing` is."""
        return dispatched(policy, str(table.get("dispatch") or self.dispatches.get(target) or self.defaults.dispatch))

    def rule(self, name: str) -> RuleAttributes | DeclarationError:
        """Return a rule's attributes, or why there are none; a broken rule is imported once."""
        if name not in self.loaded:
            try:
                self.loaded[name] = rule_attributes(self.root, name)
            except DeclarationError as error:
                self.loaded[name] = error
        return self.loaded[name]

    def settings_findings(self, table: Attrs) -> Iterator[Finding]:
        """Yield the targets and policies of a table that do not exist, and the mistakes of policies and of a budget."""
        yield from unknown_targets(table, self.targets)
        if "budget" in table:
            yield from budget_findings(table["budget"])
        if "policy" in table:
            yield from policy_findings(table["policy"], self.root, self.policies)

    def kind_findings(self, table: Attrs) -> Iterator[Finding]:
        """Yield the policies of an entry that are not for the arch of one of its targets; what is wrong in itself is left out."""
        policy = policy_of(table["policy"]) if is_policy(table.get("policy")) else self.defaults.policy
        named = table.get("targets", self.defaults.targets)
        names = (name for name in (named if isinstance(named, list | tuple) else ()) if isinstance(name, str))
        for target in (name for name in names if name in self.archs):
            if (policy, target) not in self.fits:
                self.fits[policy, target] = tuple(self._kind_findings(policy, target))
            yield from self.fits[policy, target]

    def _kind_findings(self, policy: Policy, target: str) -> Iterator[Finding]:
        try:
            kind = kind_of(self.root, self.archs[target])
        except DeclarationError:
            return  # reported where the target is declared
        yield from kind_findings(policy, self.root, self.policies, {target: kind})


@dataclass(frozen=True)
class Expansion:
    """The workloads of a table, or its mistakes."""

    workloads: tuple[Workload, ...]
    findings: tuple[Finding, ...] = ()


def expand_table(table: Attrs, scope: Scope, line: int = 0) -> Expansion:
    """Return the workloads of one table: the last list's values change fastest, the targets of an entry follow each other."""
    findings = [*missing_keys(table, _REQUIRED), *wrong_values(table, WORKLOAD)]
    cases_are_right = not any(finding.path == ("cases",) for finding in findings)
    findings += scope.settings_findings(table)
    findings += scope.kind_findings(table)
    findings += _specialize_findings(table.get("specialize"), scope.root)
    rule = _rule(table, scope, findings)
    if rule is None or not cases_are_right:
        return _wrong(findings, table)
    varying = declared_rows(table, rule.depths)
    if wrong := tuple(rows_findings(varying, rule.depths)):
        return _wrong([*findings, *wrong], table)
    fixed, axes = split({key: value for key, value in table.items() if key not in {rows.key for rows in varying}}, rule.depths)
    axes += [rows.axis() for rows in varying]
    findings += islice(_key_findings(table, fixed, axes, rule), MOST_FINDINGS)
    findings += size_findings(axes)
    if count(axes) > MOST_ENTRIES:
        return _wrong(findings, table)  # a million values are not read one by one
    findings += islice(label_findings(table.get("name", ""), axes), MOST_FINDINGS)
    values = _read(rule, fixed, "", scope.root, findings)
    items = [list(_read_items(rule, axis, scope.root, findings)) for axis in axes]
    if findings:
        return _wrong(findings, table)
    chosen, tags = settings(table, scope.defaults), tuple(table.get("tags", ()))
    findings += library_findings(varying, [scope.policy(table, target, chosen.policy) for target in chosen.targets])
    if "policy" in table:
        findings += (_unknown_key(name, rule) for name in key_of(chosen.policy) if name not in rule.attributes)
    workloads: list[Workload] = []
    for name, attrs, rows_name in combinations(table["name"], axes, items):
        instance = _instance(rule, values | attrs, name, scope.root, findings)
        rows = varying[0].named(rows_name) if varying else None
        is_between = rows is not None and rows.is_between(values | attrs)
        if instance is None or (is_between and not _is_in_tiles(instance)):
            continue
        workloads += [
            Workload(
                name=name,
                target=target,
                rule=rule.name,
                attrs=tuple(zip(rule.names, rule.values(instance), strict=True)),
                policy=scope.policy(table, target, chosen.policy),
                top_k=min(chosen.top_k, top_k_between(rows.of(values | attrs))) if rows and is_between else chosen.top_k,
                tolerance=chosen.tolerance,
                tags=tags,
                line=line,
                generation=table.get("generation", 0),
                specialize=table.get("specialize", ""),
                budget=tuple(sorted((*chosen.budget, *scope.shared_budget))),
                nan=table["nan"] if table.get("nan") == "ignore" else "",
                timing=scope.timing(table, target),
                rows=rows,
            )
            for target in chosen.targets
        ]
    return _wrong(findings, table) if findings else Expansion(tuple(workloads))


def _unknown_key(name: str, rule: RuleAttributes) -> Finding:
    return Finding.of(("policy",), *unknown("attribute", name, rule.attributes, where=f"of rule {rule.name} in the key of policy configs"))


def _wrong(findings: list[Finding], table: Attrs) -> Expansion:
    entry = table["name"] if isinstance(table.get("name"), str) else ""
    return Expansion((), tuple(dict.fromkeys(finding.below((), entry) for finding in findings)))


_NO_SUCH_RULE = (
    "for another operator write rules/{name}.py (`kerneldecl new rule {name}`), use rule tensor_ir, or `kerneldecl extract` a model"
)


def _rule(table: Attrs, scope: Scope, findings: list[Finding]) -> RuleAttributes | None:
    name = table.get("rule")
    if not is_name(name):
        return None
    if name not in scope.rules:
        sentence, hint = unknown("rule", name, scope.rules)
        if other := operator_names().get(str(name)):
            hint = "rule {} computes it, with {}".format(*other)
        findings.append(Finding.of(("rule",), sentence, cut(hint or _NO_SUCH_RULE.format(name=name))))
        return None
    rule = scope.rule(name)
    if isinstance(rule, DeclarationError):
        findings += [Finding(("rule",), problem) for problem in rule.problems]
        return None
    return rule


def _key_findings(table: Attrs, fixed: Attrs, axes: Iterable[Axis], rule: RuleAttributes) -> Iterator[Finding]:
    """Yield unknown attributes, duplicate ones, and missing ones."""
    names = rule.attributes
    single = {*fixed, *(axis.key for axis in axes if axis.key != "cases")}
    cases = next((axis.items for axis in axes if axis.key == "cases"), ())
    missing = [] if cases else [name for name in rule.required if name not in single]
    for key in table:
        if key not in names and key not in WORKLOAD:
            sentence, hint = unknown("attribute", key, names, where=f"of rule {rule.name}", also=WORKLOAD)
            meant = _meant_for(key, table[key], rule, missing)
            single |= {meant} & names.keys()
            yield Finding.of((key,), sentence, f'did you mean "{meant}"?' if meant else hint)
    for position, case in enumerate(cases):
        where = f"of rule {rule.name} in cases[{position}]"
        yield from (Finding.of(("cases",), *unknown("attribute", key, names, where=where)) for key in case if key not in names)
        doubled = (f"attribute {key} {where} stands in the table as well; expected one of them" for key in case if key in single)
        yield from (Finding.of(("cases",), sentence) for sentence in doubled)
        yield from _missing(rule, single | case.keys(), where)
    if not cases:
        yield from _missing(rule, single, f"of rule {rule.name}")


_LIKENESS_OF_SLIPS = 0.7
"""Likeness of names above which one is the other, misspelt: "layuot" has 0.83, "size" and "specialize" 0.57."""


def _meant_for(key: str, value: object, rule: RuleAttributes, missing: list[str]) -> str:
    """Return the one attribute that is missing where an unknown key was meant for it; empty where that cannot be told."""
    if len(missing) != 1 or nearest(key, (*rule.attributes, *WORKLOAD), _LIKENESS_OF_SLIPS):
        return ""
    wanted = expected(rule.attributes[missing[0]].hint)
    fits = (type(value) is int and wanted.startswith("an integer")) or (isinstance(value, list) and wanted.startswith("a list"))
    return missing[0] if fits else ""


def _missing(rule: RuleAttributes, given: Collection[str], where: str) -> Iterator[Finding]:
    for name in rule.attributes:
        if name in rule.required and name not in given:
            yield Finding.of((), f"attribute {name} {where} is missing; expected {expected(rule.attributes[name].hint)}")


def _read(rule: RuleAttributes, attrs: Attrs, key: str, root: Path, findings: list[Finding]) -> dict[str, Value]:
    """Return the validated values of known attributes. Mistakes are located at `key`, else at the attribute's own key."""
    values: dict[str, Value] = {}
    for name, value in attrs.items():
        attribute = rule.attributes.get(name)
        if attribute is None:
            continue
        values[name], mistakes = attribute.read(value)
        if not mistakes and attribute.is_file:
            mistakes = tuple(_file_mistakes(name, values[name], root))
        findings += [Finding.of((key or name,), *mistake) for mistake in mistakes]
    return values


def _read_items(rule: RuleAttributes, axis: Axis, root: Path, findings: list[Finding]) -> Iterator[dict[str, Value]]:
    """Yield the validated values of an axis, up to so many mistakes that no more are read."""
    for item in axis.items:
        yield _read(rule, item, axis.key, root, findings)
        if len(findings) > MOST_FINDINGS:
            return


def _specialize_findings(path: object, root: Path) -> Iterator[Finding]:
    if not isinstance(path, str) or not WORKLOAD["specialize"].is_right(path):
        return  # reported by `wrong_values`, or not given
    mistakes = [Finding.of(("specialize",), *mistake) for mistake in _file_mistakes("specialize", path, root)]
    yield from mistakes
    if not mistakes and (problem := specialize_problem(root, path)):
        yield Finding(("specialize",), problem)


def _file_mistakes(name: str, value: Value, root: Path) -> Iterator[tuple[str, str]]:
    for path in value if isinstance(value, tuple) else (value,):
        if not isinstance(path, str):
            yield from _file_mistakes(name, path, root)
            continue
        if len(path) > LONGEST_PATH or "\0" in path:
            yield f"{name} is {show(path)}; expected a path of at most {LONGEST_PATH} characters", ""
        elif not _is_inside(root / path, root):
            yield f"{name} is {show(path)}, which is outside the workspace; expected a path relative to the folder of {FILE}", ""
        elif not _is_file(root / path):
            folder = (root / path).parent
            others = folder.glob("*") if _is_inside(folder, root) else ()  # for an empty path, it is the workspace's own
            near = nearest(path, (str(other.relative_to(root)) for other in others if other.is_file()))
            yield f"{name} is {show(path)}; no such file in the workspace", f'did you mean "{near}"?' if near else ""


def _is_inside(path: Path, root: Path) -> bool:
    return Path(os.path.normpath(path.absolute())).is_relative_to(os.path.normpath(root.absolute()))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example where the name is too long
        return False


def _instance(rule: RuleAttributes, attrs: Attrs, name: str, root: Path, findings: list[Finding]) -> Rule | None:
    """Return a rule with its attributes, None where it refuses them: its own problems become findings."""
    try:
        with blamed(rule.file, root, f"rule {rule.name} fails"):
            instance = rule.rule(**attrs)
            found = [Finding.of((), cut(sentence), entry=name) for sentence in instance.problems()]
            if not (found or rule.has_files or is_plainly_small(attrs)) and (mistake := size_mistake(instance, attrs)):
                found = [Finding.of((mistake[0],), mistake[1], entry=name)]
            findings += found
    except DeclarationError as error:
        findings += [Finding((), replace(problem, entry=name)) for problem in error.problems]
        return None
    return instance


def _is_in_tiles(rule: Rule) -> bool:
    """Say whether rows share operands, so that kernels compute tiles of them, whose size depends on their number."""
    return rule.flops() >= OPERATIONS_IN_TILES * sum(math.prod(arg.shape) for arg in rule.signature().args)
