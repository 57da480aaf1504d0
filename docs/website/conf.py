"""Sphinx's settings; it runs on what build.py has put together."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

project = "minddp"
author = "minddp"
project_copyright = "minddp"
html_title = "minddp"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
highlight_language = "text"
root_doc = "readme"
exclude_patterns = ["files/**"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_static_path = [str(Path(__file__).with_name("static"))]
html_favicon = str(Path(__file__).with_name("static") / "icon.svg")
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False


PLACES = re.compile(r"::|[/_](?=\w)|(?<=[a-z])(?=[A-Z])")


def break_long_names(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """A path in a heading may break behind a slash, a name between its words, and neither anywhere else."""

    def with_breaks(heading: re.Match[str]) -> str:
        return re.sub(r"(?<=>)[^<]+", lambda text: PLACES.sub(r"\g<0><wbr>", text[0]), heading[0])

    context["master_doc"] = "index"  # the brand leads to the site's first page, which Sphinx does not make
    context["body"] = re.sub(r"<h[123]>.*?</h[123]>", with_breaks, context.get("body", ""), flags=re.DOTALL)


def setup(app: Any) -> None:
    app.connect("html-page-context", break_long_names)
