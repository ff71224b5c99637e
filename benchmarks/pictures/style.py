"""What the pictures share: an SVG, light or dark as the page is, and text of a few kinds."""

from __future__ import annotations

from collections.abc import Iterable

STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 14px; fill: #1f2328 }
  .small { font-size: 12.5px; fill: #59636e } .title { font-size: 16px; font-weight: 600 }
  .box { fill: #f6f8fa; stroke: #8c959f } .weight { fill: #ffffff; stroke: #8c959f }
  .held { fill: #1f6feb } .forward { fill: #1a7f37 } .backward { fill: #bc4c00 }
  .line { stroke: #8c959f } .onbar { fill: #ffffff; font-size: 13px }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .box { fill: #161b22; stroke: #6e7681 }
    .weight { fill: #0d1117; stroke: #6e7681 } .held { fill: #4493f8 }
    .forward { fill: #2ea043 } .backward { fill: #db6d28 } .line { stroke: #6e7681 }
  }
"""


def svg(width: float, height: float, label: str, drawn: Iterable[str], more: str = "") -> str:
    """Return the picture. `label` is what a screen reader says, `more` is style of its own."""
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{label}">'
    )
    return "\n".join((opening, f"<style>{STYLE}{more}</style>", *drawn, "</svg>\n"))


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return words at a place, of the kind "title", "small" or, by default, as they are read."""
    kind = f' class="{kind}"' if kind else ""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{words}</text>'
