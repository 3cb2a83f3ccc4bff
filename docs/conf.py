"""How Sphinx builds docs/ into a site: `make docs`."""

project = "Turnout"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Turnout"
html_show_copyright = False
root_doc = "contents"
# index.md is the list of pages for those who read the repository.
exclude_patterns = ["_build", "index.md"]
# Anchors as GitHub makes them, so that links work in both places.
myst_heading_anchors = 4
