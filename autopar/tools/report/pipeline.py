"""The picture of a pipeline's step as SVG: ranks of the pipeline down, time across, forwards,
backwards, whole or in two halves, and the end of the step in colours of their own, with the
micro-batch's number in each; sends are thin bars below them.

    picture(step_of(plan))    # as a plan's report has it

A simulated step enters (cost/pipeline.py), plain text leaves. page.py shows it where a plan has
stages, and `python -m benchmarks.pictures pipeline` draws that of docs/pipelines.md.
"""

from __future__ import annotations

from autopar.cost.pipeline import PipelineSpan, PipelineStep

_WIDTH, _LEFT, _ROW, _GAP, _TOP = 760, 64, 26, 6, 30
_SEND = 3  # pixels high
_COLOURS = {
    "F": "#4c8dd6",
    "B": "#e08b3e",
    "I": "#e08b3e",
    "W": "#b3639b",
    "send": "#c0453a",
    "end": "#6aa56a",
}
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward: inputs",
    "W": "weights",
    "send": "send",
    "end": "sums of gradients, optimizer",
}
_NARROWEST = 11  # pixels of a span that has a number


def picture(step: PipelineStep, title: str = "") -> str:
    """Return the step as SVG."""
    scale = (_WIDTH - _LEFT) / (step.seconds or 1.0)
    height = _TOP + step.ranks * (_ROW + _GAP) + 24
    shown = [span for span in step.spans if span.end > span.start]
    sends = [span for span in step.sends if span.end > span.start]
    spans = "".join([_span(span, scale) for span in shown] + [_send(s, scale) for s in sends])
    kinds = {_kind(span) for span in shown} | {"send" for _ in sends[:1]} | {"idle"}
    ranks = "".join(
        f'<text x="{_LEFT - 8}" y="{_top(rank) + 17}" text-anchor="end">rank {rank}</text>'
        for rank in range(step.ranks)
    )
    idle = (
        f'<rect x="{_LEFT}" y="{_top(rank)}" width="{_WIDTH - _LEFT}" height="{_ROW}" '
        'fill="#8888881f"/>'
        for rank in range(step.ranks)
    )
    where, legend = _LEFT, ""
    for kind, words in (*_WORDS.items(), ("idle", f"waiting: {step.bubble:.0%}")):
        if kind not in kinds:
            continue
        colour = _COLOURS.get(kind, "#8888884f")
        legend += (
            f'<rect x="{where}" y="6" width="12" height="12" fill="{colour}"/>'
            f'<text x="{where + 17}" y="16">{words}</text>'
        )
        where += 34 + 7 * len(words)
    end = (
        f'<text x="{_WIDTH}" y="{height - 6}" text-anchor="end">{step.seconds * 1e3:,.2f} ms'
        f"{' · ' + title if title else ''}</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="a step of {step.ranks} ranks" font-family="sans-serif" font-size="12" '
        'fill="#888888">'
        f"{''.join(idle)}{spans}{ranks}{legend}{end}</svg>"
    )


def _top(rank: int) -> int:
    return _TOP + rank * (_ROW + _GAP)


def _kind(span: PipelineSpan) -> str:
    return "end" if span.action is None else span.action.kind


def _send(span: PipelineSpan, scale: float) -> str:
    width = max(0.5, (span.end - span.start) * scale)
    return (
        f"<g><title>send of {span.action}: {(span.end - span.start) * 1e3:.2f} ms</title>"
        f'<rect x="{_LEFT + span.start * scale:.1f}" y="{_top(span.rank) + _ROW}" '
        f'width="{width:.1f}" height="{_SEND}" fill="{_COLOURS["send"]}"/></g>'
    )


def _span(span: PipelineSpan, scale: float) -> str:
    kind = _kind(span)
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    label = ""
    if span.action is not None and width >= _NARROWEST:
        label = (
            f'<text x="{x + width / 2:.1f}" y="{_top(span.rank) + 17}" text-anchor="middle" '
            f'fill="#ffffff" font-size="11">{span.action.microbatch}</text>'
        )
    words = _WORDS[kind] if span.action is None else f"{_WORDS[kind]} {span.action}"
    return (
        f"<g><title>{words}: {(span.end - span.start) * 1e3:.2f} ms</title>"
        f'<rect x="{x:.1f}" y="{_top(span.rank)}" width="{max(0.5, width - 1):.1f}" '
        f'height="{_ROW}" fill="{_COLOURS[kind]}"/>{label}</g>'
    )
