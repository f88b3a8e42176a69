"""What the data doctor found, as one self-contained HTML page with thumbnails: no script."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vitlab.data.decode import Unreadable
from vitlab.data.doctor import KINDS, Checked, Finding
from vitlab.data.writing import written

SIDE = 128  # pixels: no thumbnail is larger; up to half of it pictures are magnified crisply
SHOWN = 60  # findings of a kind
TOGETHER = 8  # pictures of a finding


def write(folder: Path, done: Checked) -> None:
    """Write `index.html` into a folder, aside and renamed; thumbnails are part of it."""
    folder.mkdir(parents=True, exist_ok=True)
    own = done.parts[: done.own]
    title = f"Check of {own[0].spec}"
    facts = {
        "Pictures": f"{int(done.starts[done.own]):,}",
        "Classes": f"{len(own[0].classes):,}",
        **{f"In {source.split}": f"{len(source):,}" for source in own if len(own) > 1},
        **{f"Against {source.spec} {source.split}": f"{len(source):,}"
           for source in done.parts[done.own :]},
    }  # fmt: skip
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{v}</dd></div>\n" for k, v in facts.items())
    found = {kind: [f for f in done.findings if f.kind == kind] for kind in KINDS}
    found = {kind: some for kind, some in found.items() if some}
    head = "".join(
        f'<li><a href="#{kind}">{kind}</a> <b>{len(some):,}</b> {KINDS[kind]}</li>\n'
        for kind, some in found.items()
    )
    body = "".join(_section(done, kind, some) for kind, some in found.items())
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>
<body><main><h1>{escape(title)}</h1>
<dl>{rows}</dl>
{f"<ul>{head}</ul>" if found else "<p>Nothing found.</p>"}
{body}</main><footer>Made by vitlab</footer></body></html>
"""
    with written(folder / "index.html") as aside:
        aside.write_bytes(text.encode("utf-8", "backslashreplace"))


def _section(done: Checked, kind: str, found: Sequence[Finding]) -> str:
    more = f", the first {SHOWN} are shown" if len(found) > SHOWN else ""
    cards = "".join(_card(done, finding) for finding in found[:SHOWN])
    return (
        f'<section><h2 id="{kind}">{kind} ({len(found):,}{more})</h2>\n<p>{KINDS[kind]}</p>\n'
        f'<div class="cards">{cards}</div></section>\n'
    )


def _card(done: Checked, finding: Finding) -> str:
    figures = []
    for p in finding.pictures[:TOGETHER]:
        about = f"<b>{escape(p.label)}</b> <span>{escape(p.split)}</span><br>"
        figures.append(
            f"<figure>{_thumbnail(done, p.row)}<figcaption>{about}<code>{escape(p.file)}</code>"
            "</figcaption></figure>\n"
        )
    if len(finding.pictures) > TOGETHER:
        figures.append(f"<p>and {len(finding.pictures) - TOGETHER:,} more</p>")
    row = f'<div class="row">{"".join(figures)}</div>'
    return f"<article><p>{escape(finding.note)}</p>{row}</article>\n"


def _thumbnail(done: Checked, row: int) -> str:
    source, i = done.place(row)
    try:
        image = Image.fromarray(source.load(i))
    except (Unreadable, OSError):
        return '<div class="none">no picture</div>'
    small = max(image.size) <= SIDE // 2
    image.thumbnail((SIDE, SIDE))  # never enlarges
    kind, form = ("crisp", "PNG") if small else ("smooth", "JPEG")
    return f'<img class="{kind}" alt="" src="{uri(image, form)}">'


def uri(image: Image.Image, form: str) -> str:
    """A picture as part of a page, encoded as PNG or JPEG."""
    data = io.BytesIO()
    image.save(data, form, optimize=True)
    return f"data:image/{form.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def escape(value: object) -> str:
    """Harmless in HTML, and valid UTF-8, which the name of a file need not be."""
    return html.escape(str(value).encode("utf-8", "replace").decode())


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b2430; --dim: #5a6675; --rule: #d8dee6 }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #12161c; --ink: #e7eaef; --dim: #9ba6b5; --rule: #2d3541 } }
* { box-sizing: border-box } dd, figure { margin: 0 }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; font: 1rem/1.4 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.2rem; margin: 2.5rem 0 0 }
p, dt, span, footer { color: var(--dim) } footer { margin: 3rem 0 } p { margin: .25rem 0 .5rem }
a { color: inherit } ul { padding-left: 1.2rem } code { font-size: .7rem }
dl { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)) }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin-top: .75rem }
article { border: 1px solid var(--rule); padding: .5rem; max-width: 100% }
article > p { font-size: .8rem } .row { display: flex; flex-wrap: wrap; gap: .5rem }
figure { width: 8rem } figcaption { font-size: .8rem; line-height: 1.25 }
img, .none { width: 8rem; height: 8rem; object-fit: contain; background: var(--rule) }
.none { display: grid; place-items: center; color: var(--dim); font-size: .8rem }
.crisp { image-rendering: pixelated }
@media print { article { break-inside: avoid } }
"""
