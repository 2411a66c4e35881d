"""Owns the commands that say what there is to declare: rules, policies, templates, archs.

Knows nothing of workspaces' entries: a folder without workloads.toml has the standard ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from kerneldecl.cli.completion import complete_plugin
from kerneldecl.cli.options import Settings, json_option, print_result
from kerneldecl.cli.table import table, window, wrapped
from kerneldecl.diagnostics.signatures import signature_text

if TYPE_CHECKING:
    from kerneldecl.declare.catalogue import AttributePage, PolicyPage, RulePage, TemplatePage
    from kerneldecl.model import Arch

_KINDS = {"cpu": "CPUs", "cuda": "GPUs"}
_OTHER_OPERATORS = """\
next: `kerneldecl rules RULE` shows attributes and an entry to paste
another operator: `kerneldecl new rule NAME` starts a rule, rule tensor_ir takes TensorIR, `kerneldecl extract MODEL` a model"""
_EVERY_ENTRY = """\
an attribute may be a list of values: one entry for each
every entry also takes targets, policy, budget, top_k, timing, tolerance, tags"""
_POLICIES_END = """
`policy = "auto"` asks those with a place, lowest first
next: `kerneldecl policies POLICY` shows one, `kerneldecl new policy NAME` starts one"""
_ARCHS_END = """
and host: this machine's CPU, detected
next: `kerneldecl archs ARCH` shows all figures, `kerneldecl doctor --propose-arch` describes this machine's GPU"""


@click.command()
@click.argument("rule", required=False, shell_complete=complete_plugin("rules"))
@json_option
@click.pass_obj
def rules(settings: Settings, rule: str | None, as_json: bool) -> None:
    """List the rules, or show one: its attributes, its kernel's arguments, an entry to paste."""
    from kerneldecl.declare.catalogue import rule_descriptions, rule_page, rule_pages

    if not rule and not as_json:
        print_result(as_json, rule_descriptions(settings.root), _rules_text)
        return
    pages = (rule_page(settings.root, rule),) if rule else rule_pages(settings.root)
    _print(as_json, pages, _rule_text if rule else None, lambda _: "")


@click.command()
@click.argument("policy", required=False, shell_complete=complete_plugin("policies"))
@json_option
@click.pass_obj
def policies(settings: Settings, policy: str | None, as_json: bool) -> None:
    """List the policies in the order in which `auto` asks them, or show one: what it is for, its options, its templates."""
    from kerneldecl.declare.catalogue import policy_page, policy_pages

    pages = (policy_page(settings.root, policy),) if policy else policy_pages(settings.root)
    _print(as_json, pages, _policy_text if policy else None, _policies_text)


@click.command()
@click.argument("template", required=False, shell_complete=complete_plugin("templates"))
@json_option
@click.pass_obj
def templates(settings: Settings, template: str | None, as_json: bool) -> None:
    """List the templates, or show one: what it schedules, and its parameters, which the policy `configs` takes."""
    from kerneldecl.declare.catalogue import template_page, template_pages

    pages = (template_page(settings.root, template),) if template else template_pages(settings.root)
    _print(as_json, pages, _template_text if template else None, _templates_text)


@click.command()
@click.argument("arch", required=False, shell_complete=complete_plugin("archs"))
@json_option
@click.pass_obj
def archs(settings: Settings, arch: str | None, as_json: bool) -> None:
    """List the archs that targets may have, or show one with all its figures."""
    from kerneldecl.declare.catalogue import archs as all_archs
    from kerneldecl.plugins.load import load_arch

    pages = (load_arch(settings.root, arch),) if arch else all_archs(settings.root)
    _print(as_json, pages, _arch_text if arch else None, _archs_text)


def _print(as_json: bool, pages: Sequence[Any], one: Callable[[Any], str] | None, several: Callable[[Sequence[Any]], str]) -> None:
    fields = [dataclasses.asdict(page) for page in pages]
    text = one(pages[0]) if one else several(pages)
    print_result(as_json, {"schema": 1, "found": fields}, lambda _: text)


def _rules_text(found: Sequence[tuple[str, str]]) -> str:
    rows = [(name, _first_sentence(description)) for name, description in found]
    return "\n".join([*table(("rule", "computes"), rows, window()), "", _OTHER_OPERATORS])


def _rule_text(page: RulePage) -> str:
    lines = [f"{page.name}, in {page.file}", "", page.description, "", *_attributes(page.attributes, "attribute"), "", page.example]
    if page.signature:
        lines += ["", "its kernel:", *wrapped(signature_text(f"my_{page.name}", page.signature), window())]
    return "\n".join([*lines, "", _EVERY_ENTRY])


def _attributes(attributes: Sequence[AttributePage], noun: str) -> list[str]:
    rows = [(each.name, each.default or "required", f"{each.accepts}. {each.summary}".rstrip()) for each in attributes]
    return table((noun, "default", "is"), [(name, default.ljust(1), text) for name, default, text in rows], window()) if rows else []


def _policies_text(pages: Sequence[PolicyPage]) -> str:
    rows = [(page.name, _kinds(page.kinds), _asked(page), _subject(page.description)) for page in pages]
    return "\n".join([*table(("policy", "for", "in auto", "chooses"), rows, window()), _POLICIES_END])


def _policy_text(page: PolicyPage) -> str:
    lines = [f"{page.name}, in {page.file}", "", _shown(page.description), ""]
    lines += [f"for: {_kinds(page.kinds)}", f"in auto: {_asked(page)}"]
    lines += [f"templates: {', '.join(page.templates)}"] if page.templates else []
    if page.is_tuner:
        lines += ["", "a tuner: it takes a budget (trials, seconds, stop_at)" + (", and" if page.options else "")]
    return "\n".join([*lines, *_attributes(page.options, "option")])


def _templates_text(pages: Sequence[TemplatePage]) -> str:
    rows = [(page.name, _subject(page.description)) for page in pages]
    return "\n".join([*table(("template", "schedules"), rows, window()), "", "next: kerneldecl templates TEMPLATE shows its parameters"])


def _template_text(page: TemplatePage) -> str:
    return f"{page.name}, in {page.file}\n\n{_shown(page.description)}"


def _archs_text(found: Sequence[Arch]) -> str:
    head = ("arch", "capability", "SMs", "DRAM TB/s", "L2 MB", "float16 TFLOP/s", "device")
    rows = [_arch_row(arch) for arch in found]
    return "\n".join([*table(head, rows, window()), _ARCHS_END])


def _arch_row(arch: Arch) -> tuple[str, ...]:
    if arch.gpu is None:
        return (arch.name, "CPU", *["-"] * 4, arch.model or "any with its instructions")
    gpu = arch.gpu
    tensor = dict(gpu.tensor_flops_per_s).get("float16", 0)
    figures = (f"{gpu.dram_bytes_per_s / 1e12:.3g}", f"{gpu.l2_bytes / 1e6:.3g}", f"{tensor / 1e12:.0f}" if tensor else "-")
    return (arch.name, ".".join(map(str, gpu.compute_capability)), str(gpu.sm_count), *figures, arch.model)


def _arch_text(arch: Arch) -> str:
    figures = [(field.name, _figure(getattr(arch.device, field.name))) for field in dataclasses.fields(arch.device)]
    target = [(f"target {name}", _figure(value)) for name, value in arch.tvm_target]
    return "\n".join([f"{arch.name}: {arch.model or 'any device that runs the target'}", "", *table((), [*target, *figures], window())])


def _figure(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return ", ".join(f"{name} {_figure(each)}" for name, each in value)
    if isinstance(value, tuple):
        return ", ".join(map(_figure, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _kinds(kinds: Sequence[str]) -> str:
    return " and ".join(_KINDS.get(kind, kind) for kind in kinds) or "all"


def _asked(page: PolicyPage) -> str:
    return ", ".join(map(str, page.auto.values())) or "-"


def _first_sentence(description: str) -> str:
    return " ".join(description.partition("\n\n")[0].split())


def _subject(description: str) -> str:
    """Return the first sentence of a module's description, which says what the module owns, without that verb."""
    sentence = _first_sentence(description).removeprefix("Owns ")
    return sentence[:1].upper() + sentence[1:]


def _shown(description: str) -> str:
    """Return a module's description for those who use it: without what the module owns and does not know as such."""
    paragraphs = [each for each in description.split("\n\n") if not each.startswith("Knows nothing")]
    return "\n\n".join([_subject(description), *paragraphs[1:]])
