"""Configuration of Sphinx, which makes the documentation site from this folder.

The pages are also read as files in the repository, where links lead out of this folder. The site
has the pages in the root of the checkout under ``project/``, and links to them are rewritten.
"""

import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any, get_type_hints

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from pytest_cka_memory import RegionRecord, __version__
from pytest_cka_memory.stored.json_report import report_schema

project = "pytest-cka-memory"
copyright = "pytest-cka-memory developers"
author = "pytest-cka-memory developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "README.md", "project/changes"]
default_role = "code"  # single backticks in docstrings

myst_heading_anchors = 4  # links to headings, with the anchors that GitHub makes

autoclass_content = "both"  # CKA documents its arguments in __init__
autodoc_preserve_defaults = True  # the default as it is written, not its repr
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["accelerate", "lightning", "pytorch_lightning", "transformers"]

html_theme = "furo"
html_title = f"pytest-cka-memory {version}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_show_sourcelink = False

_ROOT = Path(__file__).parents[1]
_ROOT_PAGES = re.compile(r"\]\((?:\.\./)*(CONTRIBUTING|SECURITY|CHANGELOG)\.md(#[^)]*)?\)")


def _relink(app: Sphinx, docname: str, source: list[str]) -> None:
    """Take the pages in ``project/`` from the root, have links lead there, and add the schema."""
    folder, _, name = docname.rpartition("/")
    if folder == "project":
        path = _ROOT / f"{name.upper()}.md"
        app.env.note_dependency(path, docname=docname)
        source[0] = path.read_text("utf-8").replace("](docs/", "](/")
    if docname == "api/schema":
        source[0] += (
            f"\n.. code-block:: json\n\n{indent(json.dumps(report_schema(), indent=1), '   ')}\n"
        )
    source[0] = _ROOT_PAGES.sub(
        lambda link: f"](/project/{link[1].lower()}.md{link[2] or ''})", source[0]
    )


def _read_sections(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn the sections ``Args:``, ``Returns:`` and ``Raises:`` of a docstring into fields.

    Napoleon as an extension would read the start of an attribute's docstring as a type, if a colon
    follows.
    """
    lines[:] = GoogleDocstring(lines, Config(napoleon_use_rtype=False)).lines()


for _documented in (RegionRecord, RegionRecord.__init__):
    # Without Annotated, whose metadata would fill the page.
    _documented.__annotations__ = get_type_hints(_documented)


def setup(app: Sphinx) -> None:
    """Connect the functions of this module."""
    app.connect("source-read", _relink)
    app.connect("autodoc-process-docstring", _read_sections)
