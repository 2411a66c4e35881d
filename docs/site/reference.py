"""Owns the pages of reference that are made of the code: keys, rules, policies, templates, archs, commands, exit codes, Python.

Knows nothing of the site.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from kerneldecl.cli.commands import main
from kerneldecl.declare.catalogue import archs, policy_pages, rule_page, rule_pages, template_pages
from kerneldecl.declare.json_schema import json_schema
from kerneldecl.diagnostics.signatures import signature_text
from kerneldecl.errors import ExitCode

MODULES: Mapping[str, str] = {
    "kerneldecl": "Plans, builds and artifacts.",
    "kerneldecl.api": "What the command line does, for programs.",
    "kerneldecl.rule": "What files in `rules/` import.",
    "kerneldecl.model": "The frozen values that rules, policies and templates see.",
    "kerneldecl.errors": "What is raised, and exit codes.",
    "kerneldecl.relax": "Relax models that use an artifact. Needs TVM.",
    "kerneldecl.dlight": "Schedules of TensorIR functions without a workspace. Needs TVM.",
    "kerneldecl.torch": "torch modules on tuned kernels. Needs torch.",
}
"""The public interface: what is not in one of these modules' `__all__`, or has a leading underscore, is private."""
RETURNED = {"kerneldecl": ("kerneldecl.artifact.call.Kernel", "kerneldecl.artifact.dispatch.Dispatch")}
"""Classes whose values the public interface returns."""


@functools.cache
def reference(root: Path) -> dict[str, str]:
    """Return every page as Markdown, by its path below docs/."""
    made: Mapping[str, Callable[[Path], str]] = {
        "workloads": _workloads,
        "rules": _rules,
        "policies": _policies,
        "templates": _templates,
        "archs": _archs,
        "commands": _commands,
        "exit-codes": _exit_codes,
        "python": _python,
    }
    return {f"reference/{name}.md": make(root) for name, make in made.items()}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text.replace("\n", " "))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _page(*lines: str) -> str:
    return "\n".join(lines) + "\n"


# Keys of workloads.toml


def _accepts(schema: Mapping[str, Any]) -> str:
    """Return what a key takes, in words."""
    if "const" in schema:
        return _code(str(schema["const"]))
    if "enum" in schema:
        values = schema["enum"]
        return ", ".join(map(_code, map(str, values))) if len(values) <= 12 else f"one of {len(values)} names"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return "; or ".join(dict.fromkeys(_accepts(each) for each in schema[several]))
    kind = schema.get("type", "")
    if kind == "array":
        return f"a list: {_accepts(schema['items'])}" if "items" in schema else "a list"
    if kind in {"integer", "number"}:
        return _number(schema, kind)
    return {"string": "text", "boolean": "`true` or `false`", "object": "a table", "null": "nothing"}.get(kind, "any value")


def _number(schema: Mapping[str, Any], kind: str) -> str:
    words = "a whole number" if kind == "integer" else "a number"
    if "exclusiveMinimum" in schema:
        words += f" above {schema['exclusiveMinimum']:g}"
    if "minimum" in schema:
        words += f" of at least {schema['minimum']:g}"
    return words + (f", at most {schema['maximum']:g}" if "maximum" in schema else "")


def _keys(table: Mapping[str, Any], left_out: Sequence[str] = ()) -> Iterator[str]:
    needed = table.get("required", ())
    rows = [
        (_code(name) + (" (needed)" if name in needed else ""), _accepts(key), key.get("description", ""))
        for name, key in table["properties"].items()
        if name not in left_out
    ]
    yield from _table(("key", "takes", "is"), rows)


def _workloads(root: Path) -> str:
    schema = json_schema(root)
    tables = schema["properties"]
    lines = [
        "# workloads.toml",
        "",
        "Every key, from the JSON Schema that `kerneldecl schema` prints. Editors complete the file by it.",
        "A key that stands nowhere below is a mistake, which `kerneldecl check` reports with its line.",
        "",
        f"`edition = {tables['edition']['enum'][0]}` comes first. {tables['edition'].get('description', '')}",
    ]
    named = {"target": "target.NAME", "import": "import.NAME"}
    for name, table in tables.items():
        if name in {"edition", "workload"}:
            continue
        inner = table.get("additionalProperties") if name in named else table
        lines += ["", f"## [{named.get(name, name)}]", "", *_keys(inner)]
    rule = schema["$defs"]["matmul"]
    own = {each.name for each in rule_page(root, "matmul").attributes}
    lines += [
        "",
        "## [[workload]]",
        "",
        "Besides the [attributes of its rule](rules.md), each of which may be a list of values: one entry for each.",
        "",
    ]
    lines += _keys(rule, tuple(own))
    return _page(*lines)


# The catalogue


def _attributes(attributes: Sequence[Any]) -> Iterator[str]:
    rows = [(_code(each.name), _code(each.default) or "needed", each.accepts, each.summary) for each in attributes]
    yield from _table(("attribute", "default", "takes", "is"), rows)


def _rules(root: Path) -> str:
    lines = ["# Rules", "", "What an entry can compute. `kerneldecl rules RULE` prints the same, of the rules of your workspace, too."]
    for name in [each.name for each in rule_pages(root)]:
        page = rule_page(root, name)
        lines += ["", f"## {name}", "", page.description, "", *_attributes(page.attributes), "", "```toml", page.example.strip(), "```"]
        if page.signature:
            lines += ["", f"Its kernel: {_code(signature_text(f'my_{name}', page.signature))}."]
    return _page(*lines)


def _summary(text: str) -> str:
    """Return the first sentence of a module's docstring as one about what it is for."""
    return " ".join(text.partition("\n\n")[0].split()).removeprefix("Owns ")


def _policies(root: Path) -> str:
    intro = "Who proposes candidates. `auto` asks those with a place, lowest first; a tuner searches ([tuners](../guides/tuners.md))."
    lines = ["# Policies", "", intro]
    for page in policy_pages(root):
        places = ", ".join(f"{place} for {kind}" for kind, place in page.auto.items())
        facts = [
            ("place in `auto`", places or "none"),
            ("templates", ", ".join(map(_code, page.templates)) or "those of other policies"),
            ("tuner", "yes" if page.is_tuner else "no"),
        ]
        lines += ["", f"## {page.name}", "", _sentence(page.description), "", *_table(("", ""), facts)]
        if page.options:
            lines += ["", *_attributes(page.options)]
    return _page(*lines)


def _sentence(text: str) -> str:
    found = _summary(text)
    return found[:1].upper() + found[1:]


def _templates(root: Path) -> str:
    lines = [
        "# Templates",
        "",
        "Schedules and kernels with parameters. `kerneldecl show ENTRY` lists what candidates have; the policy `configs` takes them.",
    ]
    for page in template_pages(root):
        _, found, rest = page.description.partition("Parameters:\n")
        lines += ["", f"## {page.name}", "", _sentence(page.description)]
        if found:
            lines += ["", "```text", inspect.cleandoc("\n" + rest.partition("\n\n")[0]), "```"]
    return _page(*lines)


def _archs(root: Path) -> str:
    lines = [
        "# Archs",
        "",
        "What a target's `arch` may be, besides `host`, this machine's CPU. Each is a file in `archs/`, in which comments name sources",
        "([adding one](../guides/adding-a-gpu.md)).",
        "",
    ]
    rows = []
    for arch in archs(root):
        target = dict(arch.tvm_target)
        if arch.gpu:
            gpu = arch.gpu
            rows.append(
                (_code(arch.name), arch.model, str(target["arch"]), str(gpu.sm_count), f"{gpu.dram_bytes_per_s / 1e9:.0f}", arch.cuda_min)
            )
        else:
            cpu = arch.the_cpu
            rows.append(
                (
                    _code(arch.name),
                    arch.model or "any of the level",
                    str(target["mcpu"]),
                    str(cpu.cores),
                    f"{cpu.dram_bytes_per_s / 1e9:.0f}",
                    "",
                )
            )
    return _page(*lines, *_table(("arch", "device", "compiled for", "SMs or cores", "DRAM GB/s", "CUDA from"), rows))


# The command line


def _commands(_: Path) -> str:
    lines = [
        "# Commands",
        "",
        "Every command with its options, as `--help` prints them. What they do together: [the command line](cli.md).",
    ]
    context = click.Context(main, info_name="kerneldecl")
    lines += ["", "## Options of every command", "", *_options(main, context)]
    for name in sorted(main.commands):
        lines += _command(main.commands[name], f"kerneldecl {name}", context)
    return _page(*lines)


def _command(command: click.Command, path: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _command(command.commands[name], f"{path} {name}", context)
        return
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield from ("", f"## {path}", "", f"`{usage}`", "", *_help(command.help or ""), "", *_options(command, context))


def _help(text: str) -> Iterator[str]:
    for part in inspect.cleandoc(text).split("\n\n"):
        yield from (re.sub(r"\*", r"\\*", part).replace("\b", "").strip(), "")


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    rows = []
    for option in (each for each in command.get_params(context) if isinstance(each, click.Option) and not each.hidden):
        record = option.get_help_record(context)
        if record:
            rows.append((_code(record[0]), re.sub(r"([*<])", r"\\\1", record[1])))
    yield from _table(("option", ""), rows)


def _exit_codes(_: Path) -> str:
    source = inspect.getsource(ExitCode)
    notes = dict(re.findall(r'^    ([A-Z_]+) = \d+\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL))
    rows = [(str(int(code)), _code(code.name), notes.get(code.name, _DEFAULT_NOTES.get(code.name, ""))) for code in ExitCode]
    return _page(
        "# Exit codes",
        "",
        "`kerneldecl.errors.ExitCode` has them by name. [Which command ends with which](cli.md#exit-codes).",
        "",
        *_table(("code", "name", "means"), rows),
    )


_DEFAULT_NOTES = {
    "DONE": "Done.",
    "STALE": "Something must be tuned, or the lock would change.",
    "INTERNAL": "An internal error: a bug.",
    "INTERRUPTED": "Interrupted.",
}


# Python


class Name(NamedTuple):
    """A public name: where it is defined, as what, and what is said of it there."""

    name: str
    kind: str
    """`class`, `function` or `data`."""
    text: str


def public_names(root: Path, module: str) -> Iterator[Name]:
    """Yield the public names of a module, read from sources: nothing is imported, so TVM and torch need not be there."""
    tree = _tree(root, module)
    listed = next(
        (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and _names(node) == ["__all__"]), None
    )
    defined = [name for node in tree.body for name in _names(node) if not name.startswith("_")]
    for name in listed or [name for name in defined if name not in {"TYPE_CHECKING", "annotations"}]:
        yield _found(root, module, name)._replace(name=name)


def _found(root: Path, module: str, name: str) -> Name:
    """Return a name as the module defines it, or the one that it is imported from."""
    tree = _tree(root, module)
    for at, node in enumerate(tree.body):
        if name not in _names(node):
            continue
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            return Name(name, "class" if isinstance(node, ast.ClassDef) else "function", ast.get_docstring(node) or "")
        value = getattr(node, "value", None)
        if isinstance(value, ast.Name):
            return _found(root, module, value.id)
        after = tree.body[at + 1] if at + 1 < len(tree.body) else None
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        return Name(name, "data", inspect.cleandoc(after.value.value) if is_text else _comment(root, module, node.end_lineno))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and name in [each.name for each in node.names]:
            return _found(root, node.module, name)
    raise ValueError(f"{module} has no {name}")


def _comment(root: Path, module: str, line: int) -> str:
    """Return the comment at the end of a line."""
    return _source(root, module).splitlines()[line - 1].partition("  # ")[2]


@functools.cache
def _tree(root: Path, module: str) -> ast.Module:
    return ast.parse(_source(root, module))


def _source(root: Path, module: str) -> str:
    path = root / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def _names(node: ast.AST) -> list[str]:
    """Return what a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _python(root: Path) -> str:
    lines = [
        "# Python",
        "",
        "The public interface: the names in `__all__` of these modules; where one has none, those without an underscore.",
        "It is typed (`py.typed`): `mypy --strict` checks programs that use it. What may change is [said here](../versions.md).",
    ]
    for module, what in MODULES.items():
        lines += ["", f"## {module}", "", what, "", "```{eval-rst}"]
        for each in public_names(root, module):
            lines += _directive(module, each)
        lines += [
            line
            for name in RETURNED.get(module, ())
            for line in ("", f".. autoclass:: {name}", "   :members:", "   :special-members: __call__")
        ]
        lines += ["```"]
    return _page(*lines)


def _directive(module: str, each: Name) -> Iterator[str]:
    again = ["   :no-index:"] if module == "kerneldecl.api" else []
    if each.kind == "data":
        text = " ".join(each.text.split()).replace("*", "\\*")
        yield from ("", f".. data:: {module}.{each.name}", "", f"   {text}")
        return
    yield from ("", f".. auto{each.kind}:: {module}.{each.name}", *(["   :members:"] if each.kind == "class" else []), *again)
