"""The site, put together from the repository's own files: ``make docs``, or ``python -m docs.website``.

Nothing that is said elsewhere is written here. Prose comes from README.md, csrc/README.md, docs/*.md and the
tutorials; the annotated source from the comments and docstrings; errors and variables from the code that raises and
reads them; the API from docstrings, by Sphinx.

    layout.py      which file becomes which page, in which order
    markdown.py    a Markdown file as a page: its links lead to pages where there is one, else to the file itself
    source.py      a source file as a page: comments beside the code that they stand above
    tutorials.py   a tutorial as a page: its cells, what it prints, its pictures
    errors.py      every message, as the sources word it
    drawings.py    pictures made from the code
    build.py       all of it into build/docs/source, then Sphinx, warnings as errors
"""
