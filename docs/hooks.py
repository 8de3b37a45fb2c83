"""Lets the site's pages link to any file of the repository, as they do where the repository is browsed.

A page says `[plain_loop.py](../examples/plain_loop.py)`. That file lies outside of docs/, where MkDocs would find
nothing. So each file that a page links to becomes a page below `repository/`: Markdown as it is, other text as a
listing, a folder as its table of contents. Links between pages and such files are rewritten to match.

Invariant: every relative link is resolved from where the file lies in the repository, never from where its page lies.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
AT = "repository"  # where files from outside of docs/ lie in the site
ALWAYS = (  # in the navigation, whether or not a page links there
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("spikes/*/README.md")),
)
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s]+)(?P<after>[^)]*\))")
_NO_TYPE = re.compile(
    r"(<tr class=\"doc-section-item\">\s*<td>\s*<code>[^<]*</code>\s*</td>\s*<td>\s*</td>(?:(?!</tr>).)*?)"
    r"<em>required</em>",
    re.S,
)
_FENCE = re.compile(r"^ {0,3}(```|~~~)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash", ".toml": "toml"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside of docs/ that a page links to, and for those that they link to in turn."""
    waiting = [(_origin(file.src_uri), file.content_string) for file in files.documentation_pages()]
    waiting += [("", "".join(f"[]({name})" for name in ALWAYS))]
    seen: set[str] = set()
    while waiting:
        origin, text = waiting.pop()
        for target in links(text):
            path, _ = resolve(origin, target)
            if path is None or path in seen or _in_docs(path):
                continue
            seen.add(path)
            if _copied(path):
                files.append(File.generated(config, _site_uri(path), abs_src_path=str(ROOT / path)))
                continue
            content = _page_of(path)
            inclusion = InclusionLevel.UNDEFINED if path in ALWAYS else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, _site_uri(path), content=content, inclusion=inclusion))
            if path.endswith((".md", "/")):
                waiting.append((path, content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links of a page at where things lie in the site."""
    return rewrite(markdown, page.file.src_uri, _origin(page.file.src_uri))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """In the reference, don't call "required" what has no place of its own in a signature.

    One entry of a docstring may describe several arguments ("replica, replicas: ...") or one of `**options`; such an
    entry has no type, and would be called required, as no default is found for it.
    """
    return _NO_TYPE.sub(r"\1", html) if page.file.src_uri.startswith("api/") else html


def rewrite(markdown: str, src_uri: str, origin: str) -> str:
    """`markdown` with the links of the file `origin` of the repository made those of the page `src_uri`."""

    def one(match: re.Match[str]) -> str:
        path, fragment = resolve(origin, match["target"])
        if path is None:
            return match[0]
        goal = posixpath.relpath(_site_uri(path), posixpath.dirname(src_uri) or ".")
        return f"{match['before']}{goal}{fragment}{match['after']}"

    return "\n".join(line if code else _LINK.sub(one, line) for line, code in _lines(markdown))


def links(markdown: str) -> list[str]:
    """The targets of all links outside of code blocks."""
    return [m["target"] for line, code in _lines(markdown) if not code for m in _LINK.finditer(line)]


def resolve(origin: str, target: str) -> tuple[str | None, str]:
    """The file or folder of the repository that a link of the file `origin` leads to, and its fragment.

    A folder ends in "/", unless it has a README, which then stands for it. None: an address, an anchor of the same
    page, or nothing that is there (MkDocs says so).
    """
    plain, hash_, fragment = target.partition("#")
    if not plain or re.match(r"[a-z][a-z0-9+.-]*:", plain) or plain.startswith("/"):
        return None, ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), plain))
    if path.startswith("..") or not (ROOT / path).exists():
        return None, ""
    if (ROOT / path).is_dir():
        path = f"{path}/README.md" if (ROOT / path / "README.md").is_file() else f"{path}/"
    return path, f"{hash_}{fragment}"


def _lines(markdown: str) -> list[tuple[str, bool]]:
    """Each line, and whether it belongs to a fenced code block."""
    out: list[tuple[str, bool]] = []
    inside = False
    for line in markdown.split("\n"):
        fence = bool(_FENCE.match(line))
        out.append((line, inside or fence))
        inside ^= fence
    return out


def _origin(src_uri: str) -> str:
    """The file or folder of the repository behind a page of the site."""
    if not src_uri.startswith(f"{AT}/"):
        return f"docs/{src_uri}"
    path = src_uri[len(AT) + 1 :]
    if (ROOT / path).is_file():
        return path
    return path.removesuffix("index.md") if path.endswith("/index.md") else path.removesuffix(".md")


def _in_docs(path: str) -> bool:
    """Does MkDocs take it into the site by itself? Folders it doesn't."""
    return path.startswith("docs/") and not path.endswith("/")


def _copied(path: str) -> bool:
    """Pictures and whatever else isn't shown as text."""
    return not path.endswith("/") and Path(path).suffix not in (".md", *_LANGUAGES)


def _site_uri(path: str) -> str:
    """The page of the site for what `resolve` gives."""
    if _in_docs(path):
        return path[len("docs/") :]
    if path.endswith("/"):
        return f"{AT}/{path}index.md"
    return f"{AT}/{path}" if path.endswith(".md") or _copied(path) else f"{AT}/{path}.md"


def _page_of(path: str) -> str:
    where = ROOT / path
    if path.endswith("/"):
        names = sorted(p.name for p in where.iterdir() if p.is_file() and not p.name.startswith("."))
        return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names), ""])
    text = where.read_text(encoding="utf-8")
    if where.suffix == ".md":
        return text
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"# {path}\n\n{fence}{_LANGUAGES.get(where.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
