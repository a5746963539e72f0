"""Links of the documents into the repository, made good where the documents are a site.

Files outside docs/ are not part of the site: a file that a page links to is copied into it, below
`sources/`, and the link changed. A link to a directory becomes plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]*)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside of docs/."""
    for page in Path(config["docs_dir"]).glob("*.md"):
        for _, target, _ in OUTSIDE.findall(page.read_text("utf-8")):
            path = ROOT / target
            if path.is_file() and files.get_file_from_path(name_of(target)) is None:
                files.append(
                    File.generated(config, name_of(target), content=path.read_text("utf-8"))
                )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point these links at the copies."""

    def changed(found: re.Match[str]) -> str:
        text, target, _ = found.groups()
        return f"[{text}]({name_of(target)})" if (ROOT / target).is_file() else text

    return OUTSIDE.sub(changed, markdown)


def name_of(target: str) -> str:
    """Return the name of a copy: as text, which a browser shows, whatever the file is."""
    return f"sources/{target}.txt"
