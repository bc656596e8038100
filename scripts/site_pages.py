"""Hooks of MkDocs (mkdocs.yml): pages whose text lies outside docs/, and links to them.

README files of recipes, SECURITY.md and CHANGELOG.md become pages. Links of pages to
other files of the repository, which are no pages, become plain code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/tau2/README.md": "recipes-tau2.md",
    "recipes/gsm8k_calculator/README.md": "recipes-gsm8k-calculator.md",
}
"""File in the repository -> page."""
_LINK = re.compile(
    r"(?<!!)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)"
)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose text lies elsewhere."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = linked(ROOT / source, (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to where the pages are."""
    if page.file.src_uri in PAGES.values():
        return markdown  # done when it was added
    return linked(DOCS / page.file.src_uri, markdown)


def linked(source: Path, text: str) -> str:
    """Return a page's Markdown with links that the site can follow.

    Args:
        source: file that the text is of, which its relative links start from.
    """
    relative = source.relative_to(ROOT).as_posix()
    at = DOCS / PAGES[relative] if relative in PAGES else source

    def replaced(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(source.parent / target))
        if path.is_dir() and (path / "README.md").is_file():
            path = path / "README.md"
        if path.is_relative_to(DOCS) and path.is_file():
            new = os.path.relpath(path, at.parent)
        elif path.is_relative_to(ROOT) and (page := PAGES.get(_name(path))):
            new = os.path.relpath(DOCS / page, at.parent)
        elif path.is_relative_to(ROOT) and path.exists():
            return f"`{_name(path)}`" if label.startswith("`") else label
        else:
            return match[0]  # strict builds report it
        return f"[{label}]({new}{anchor})"

    return _LINK.sub(replaced, text)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
