"""Owns the JSON Schema of workloads.toml, the rules' attributes included, so that editors complete and check the file.

Knows nothing of how declarations are read. What a schema cannot express (names that must exist in the same file,
combinations that a rule rejects) is left to `kerneldecl check`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kerneldecl.declare.attribute_notes import summaries
from kerneldecl.declare.imports import IMPORT
from kerneldecl.declare.limits import LIMITS
from kerneldecl.declare.policies import BUDGET_KEYS, SHARED
from kerneldecl.declare.rule_attributes import Attribute, RuleAttributes, rule_attributes
from kerneldecl.declare.shared_cache import CACHE, TRUST
from kerneldecl.declare.toml_keys import ARTIFACT, ARTIFACT_REQUIRED, EDITIONS, SETTINGS, TARGET, TOOLCHAIN, WORKLOAD, Key
from kerneldecl.errors import DeclarationError
from kerneldecl.plugins.find import plugin_names

Schema = dict[str, Any]


def json_schema(root: Path) -> Schema:
    """Return the schema (draft 2020-12) for a workspace with its rules, policies and archs; raise DeclarationError for a broken rule."""
    rules = _rules(root)
    policies = _policy_schema(root)
    archs = {"enum": list(plugin_names("archs", root))}
    target = _object(_keys(TARGET, arch=archs), required=("arch",))
    # One alternative for each rule, distinguished by a constant: editors that skip if/then still complete from it.
    workload = {"oneOf": [{"$ref": f"#/$defs/{rule.name}"} for rule in rules]}
    properties = {
        "edition": {"enum": list(EDITIONS), "description": "Format of this file."},
        "artifact": _object(_keys(ARTIFACT), required=ARTIFACT_REQUIRED),
        "toolchain": _object(_keys(TOOLCHAIN)),
        "target": {"type": "object", "minProperties": 1, "propertyNames": ARTIFACT["name"].schema, "additionalProperties": target},
        "defaults": _object(_keys(SETTINGS, policy=policies, budget=_BUDGET)),
        "budget": _object(_keys(SHARED), required=SHARED),
        "limits": _object(_keys(LIMITS)),
        "cache": _object(_keys(CACHE), required=("url",)),
        "trust": _object(_keys(TRUST), required=TRUST),
        "import": {"type": "object", "additionalProperties": _object(_keys(IMPORT), required=("url",))},
        "workload": {"type": "array", "minItems": 1, "items": workload},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Workspace of kerneldecl",
        **_object(properties, required=("edition", "artifact", "target", "workload")),
        "$defs": {rule.name: _rule_schema(rule, policies) for rule in rules},
    }


def _policy_schema(root: Path) -> Schema:
    """Return the schema of `policy`: a name, a table with a name and what a budget has, or a list of them; other options are a tuner's."""
    named = {"enum": list(plugin_names("policies", root))}
    table = {"type": "object", "properties": {"name": named, **_keys(BUDGET_KEYS)}, "required": ["name"]}
    items = [named, table]
    return {"anyOf": [*items, {"type": "array", "minItems": 1, "items": {"anyOf": items}}]}


def _rules(root: Path) -> list[RuleAttributes]:
    rules: list[RuleAttributes] = []
    errors: list[DeclarationError] = []
    for name in plugin_names("rules", root):
        try:
            rules.append(rule_attributes(root, name))
        except DeclarationError as error:
            errors.append(error)
    if errors:
        raise DeclarationError(problem for error in errors for problem in error.problems)
    return rules


def _rule_schema(rule: RuleAttributes, policies: Schema) -> Schema:
    """Return the schema of a `[[workload]]` table of one rule."""
    notes = summaries(rule.rule)
    values = {name: TypeAdapter(attribute.hint).json_schema() for name, attribute in rule.attributes.items()}
    described = {name: _described(rule.attributes[name], value, notes.get(name)) for name, value in values.items()}
    expandable = {name: _expandable(value) for name, value in described.items()}
    cases = {**WORKLOAD["cases"].schema, "items": {**_object(described), "minProperties": 1}}
    common = _keys(WORKLOAD, rule={"const": rule.name}, policy=policies, budget=_BUDGET, cases=cases)
    schema = _object({**common, **expandable}, required=("name", "rule"))
    schema["description"] = inspect.getdoc(rule.rule) or ""
    if rule.required:
        # What is missing in the table may stand in every row of `cases`.
        schema["anyOf"] = [{"required": sorted(rule.required)}, {"required": ["cases"]}]
    return schema


def _described(attribute: Attribute, value: Schema, summary: str | None) -> Schema:
    schema = dict(value)
    if summary:
        schema["description"] = summary
    if not attribute.is_required:
        schema["default"] = attribute.default
    return schema


def _expandable(value: Schema) -> Schema:
    """Return the schema of one value or a list of values, with the annotations outside, where editors look for them."""
    annotations: Schema = {key: item for key, item in value.items() if key in {"description", "default"}}
    plain: Schema = {key: item for key, item in value.items() if key not in annotations}
    return {**annotations, "anyOf": [plain, {"type": "array", "minItems": 1, "items": plain}, *_at_run_time(plain)]}


def _at_run_time(plain: Schema) -> list[Schema]:
    """Return the schema of a number of rows that is known when a kernel is called, in place of an integer or among integers."""
    if plain.get("type") == "integer":
        return [_ROWS]
    if plain.get("type") == "array" and plain.get("items", {}).get("type") == "integer":
        return [{"type": "array", "items": {"anyOf": [plain["items"], _ROWS]}}]
    return []


def _keys(keys: Mapping[str, Key], **narrowed: Schema) -> Schema:
    return {name: {"description": key.summary, **narrowed.get(name, key.schema)} for name, key in keys.items()}


def _object(properties: Schema, required: Iterable[str] = ()) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    names = list(required)
    return schema | {"required": names} if names else schema


_EXTENT: Schema = {"type": "integer", "minimum": 1}
_ROWS = _object({"upto": _EXTENT, "tuned": {"type": "array", "minItems": 1, "items": _EXTENT}}, required=("upto", "tuned"))
_BUDGET = {**_object(_keys(BUDGET_KEYS)), "minProperties": 1}
