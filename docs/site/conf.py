"""Sphinx's configuration. `build.py` assembles the folder of sources that this file is copied into."""

import importlib.util
import re

project = "kerneldecl"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "kerneldecl"
html_show_sphinx = False
html_copy_source = False
nitpicky = False  # annotations name types of TVM and NumPy, which have no pages here
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
default_role = "code"  # docstrings are written as Markdown: `name` is code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = [name for name in ("torch",) if importlib.util.find_spec(name) is None]
suppress_warnings = ["myst.strikethrough"]


def setup(app):
    app.connect("autodoc-process-docstring", escape)


def escape(_app, _what, _name, _value, _options, lines):
    """Have a docstring read as plain text with `code`: what reStructuredText would take for markup is escaped."""
    lines[:] = map(plain, lines)


def plain(line):
    parts = line.split("`")
    return "`".join(part if at % 2 else re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\g<0>", part) for at, part in enumerate(parts))
