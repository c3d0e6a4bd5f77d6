"""The site: `sphinx-build -W -b html docs OUT`; docs/site_pages.py writes the pages that follow from the code."""

import re
import sys
from functools import cache
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import api_pages  # noqa: E402 - modules of this folder
import build_cache  # noqa: E402
import recipe_cards  # noqa: E402
import site_pages  # noqa: E402

from manyformer.base import VERSION  # noqa: E402

project = "manyformer"
author = "the maintainers of manyformer"
copyright = author
version = release = VERSION

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["OUT", "_build", "generated/parts", "generated/pictures"]
highlight_language = "none"
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
# outputs of notebooks are kept while neither the notebook nor the package changes
nb_execution_mode = "cache"
nb_execution_cache_path = str(build_cache.notebook_cache(HERE / "_build" / "notebooks"))
nb_execution_in_temp = True
# against notebooks that hang; a busy machine needs minutes for what takes seconds
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/html", 0)]

autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False

# a name that several classes have, such as `bytes`, is not linked
suppress_warnings = ["ref.python"]

html_theme = "pydata_sphinx_theme"
html_title = f"manyformer {VERSION}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# drawings are wide; a page of a name links to its module, instead of a navigation of hundreds of names
html_sidebars = {"architecture": [], "generated/api/names/*": []}
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": [],
}


def link_files_of_the_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Show links to files outside of docs/ by their names: the site stands alone."""
    up = page.count("/") + 1
    source[0] = re.sub(rf"\[([^\]]+)\]\((?:\.\./){{{up}}}(?!\.\.)([^)]+)\)", _file_name, source[0])


def _file_name(match: re.Match[str]) -> str:
    label, path = match.groups()
    label = label.strip("`")
    return f"`{path}`" if label in path else f"{label} (`{path}`)"


class RecipeCards(SphinxDirective):
    """The cards of the recipes whose names match these patterns, a pattern a line."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Read the cards as if they stood in the page."""
        root = "../" * self.env.docname.count("/")
        return self.parse_text_to_nodes("\n".join(recipe_cards.cards(list(self.content), root)))


def restructure_docstring(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Docstrings are written in Markdown: code in single backticks, lists with dashes, no other marks."""
    paragraphs = "\n".join(lines).strip().split("\n\n")
    lines[:] = [*"\n\n".join(map(_restructure, paragraphs)).splitlines(), ""]


def _restructure(paragraph: str) -> str:
    if paragraph.startswith(("    ", ">>> ")):
        return paragraph if paragraph.startswith(">>> ") else f"::\n\n{paragraph}"
    items = re.split(r"\n(?=- )", paragraph)
    return "\n\n".join(api_pages.escape(" ".join(item.split())) for item in items)


def link_public_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make code in a text that is the name of something public a link to its page."""
    links = public_links()
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext().removesuffix("()")
        is_linked = isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref)
        target = links.get(text)
        if target is None or is_linked or target == page:
            continue
        uri = app.builder.get_relative_uri(page, target)
        literal.replace_self(nodes.reference("", "", literal.deepcopy(), internal=True, refuri=uri))


@cache
def public_links() -> dict[str, str]:
    """The pages of modules by their paths, and those of names that can mean nothing else."""
    names = api_pages.public_names()
    links = {module: f"generated/api/{module}" for module in api_pages.public_modules()}
    for name in names:
        page = f"generated/api/{name.page}"
        links[f"{name.module}.{name.name}"] = page
        if name.module == "manyformer":
            links[f"mf.{name.name}"] = page
        is_single = sum(other.name == name.name for other in names) == 1
        if is_single and api_pages.is_telling(name.name):
            links[name.name] = page
    return links


def write_math(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """MathML, which browsers draw without a script."""
    block = isinstance(node, nodes.math_block)
    element = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="math">{element}</div>' if block else str(element))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect what this file defines."""
    app.connect("builder-inited", lambda app: site_pages.write(HERE / "generated"))
    app.connect("autodoc-process-docstring", restructure_docstring)
    app.connect("doctree-resolved", link_public_names)
    app.connect("source-read", link_files_of_the_repository)
    app.add_directive("recipe-cards", RecipeCards)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))


html_math_renderer = "mathml"
