"""Hooks of MkDocs: links, anchors and code blocks of docs/ mean on the site what they mean on the forge.

A page may link to any file of the repository. What is not below docs/ is on the site below repository/: Markdown as a
page, everything else as text. The navigation is docs/index.md: its headings, and the links of the tables below them.
"""

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")
SHOWN = (".md", ".svg", ".png")  # by a browser; other files become a page of text


def place_on_site(path: str) -> str:
    """Where a file of the repository is on the site, by the names that MkDocs has for sources."""
    if not path.endswith(SHOWN):
        return f"repository/{path}.html"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def place_in_repository(uri: str) -> str:
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def linked_files(path: str, text: str) -> Iterator[str]:
    for _, target in LINK.findall(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def anchor(title: str, _: str = "-") -> str:
    """As the forge has it, but no digit comes first: the theme's scripts use anchors as CSS selectors."""
    name = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
    return f"_{name}" if name[:1].isdigit() else name


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"] = {"slugify": anchor}
    sections = re.split(r"^## (.*)\n", (ROOT / "docs/index.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    config.nav = [{"Pages": "index.md"}]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        pages = [
            {re.sub("[`*]", "", name): place_on_site(posixpath.normpath(posixpath.join("docs", path)))}
            for name, path in re.findall(r"\[([^]]+)\]\(([^)#\s]+)\)", text)
        ]
        config.nav.append({title: pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    """With the files of the repository that pages link to, and those that these link to."""
    waiting = [place_in_repository(file.src_uri) for file in files if file.src_uri.endswith(".md")]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        for target in linked_files(path, (ROOT / path).read_text(encoding="utf-8")):
            uri = place_on_site(target)
            if target in seen or not (ROOT / target).is_file() or files.get_file_from_path(uri):
                continue
            seen.add(target)
            if target.endswith(SHOWN):
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
                waiting += [target] if target.endswith(".md") else []
            else:
                files.append(File.generated(config, uri, content=text_page(target)))
    return files


def text_page(path: str) -> str:
    text = html.escape((ROOT / path).read_text(encoding="utf-8"))
    head = '<meta charset="utf-8"><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    return f"<!doctype html>{head}<title>{path}</title><pre>{text}</pre>\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    path = place_in_repository(here)

    def on_the_site(match: re.Match[str]) -> str:
        (target,) = linked_files(path, match[0])
        return match[1] + posixpath.relpath(place_on_site(target), posixpath.dirname(here))

    markdown = re.sub(r"(\]\([^)\s]*#)(?=\d)", r"\1_", LINK.sub(on_the_site, markdown))
    return re.sub(r"^```(\w+) .*$", r"```\1", markdown, flags=re.M)  # what our tests read behind the language


def on_post_page(output: str, **_: Any) -> str:
    """With the style sheets that the theme's darkmode.js looks for, also where highlight.js is off."""
    return output.replace("</head>", '<link id="hljs-light"><link id="hljs-dark"></head>', 1)


on_post_template = on_post_page
