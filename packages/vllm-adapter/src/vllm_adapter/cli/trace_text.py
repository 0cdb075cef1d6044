"""A timeline as text for a terminal, 130 columns at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_adapter.cli.timeline import MOST_UNEXPLAINED
from vllm_adapter.observe.plain_text import plain_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.cli.clocks import Clocks
    from vllm_adapter.cli.joining import HandOver
    from vllm_adapter.cli.timeline import Span, Timeline

__all__ = ["list_text", "timeline_text"]

_BAR_COLUMNS = 28


def timeline_text(timeline: Timeline, clocks: Clocks) -> str:
    """Return the spans with a bar each, the part that is unexplained, and how certain the clocks are."""
    decode = timeline.hand_over.decode
    values = timeline.as_values()
    lines = [
        f"prefill  request {decode.facts.get('peer_request_id')} of engine {decode.facts.get('peer_engine_id')}",
        f"decode   request {decode.request_id} of engine {decode.engine_id}, {values['tokens']} tokens, {values['bytes']} bytes",
        *_streamed(values),
        "",
        f"  {'begins':>11}  {'takes':>11}   {'':{_BAR_COLUMNS}}  where and what",
    ]
    lines += [_line(span, timeline.seen_s) for span in timeline.spans]
    if timeline.side_spans:
        lines += ["", "  beside it"]
        lines += [_line(span, timeline.seen_s) for span in timeline.side_spans]
    lines += ["", *_sum(timeline), *_certainty(timeline, clocks)]
    lines += [f"the read failed: {code}; its prompt was computed here, or refused" for code in values["codes"]]
    return "\n".join(plain_text(line) for line in lines)


def _streamed(values: Mapping[str, Any]) -> list[str]:
    if not values["is_streamed"]:
        return []
    early, whole = values["early_bytes"], values["bytes"]
    share = f" ({early / whole:.0%})" if whole else ""
    return [f"streamed: {early} bytes{share} had arrived when the decode engine saw the end of the prompt's last step"]


def _line(span: Span, whole_s: float) -> str:
    times = f"{_ms(span.begin_s):>11}  {_ms(span.duration_s):>11}"
    return f"  {times}   {_bar(span, whole_s):{_BAR_COLUMNS}}  {span.where}: {span.name}"


def _bar(span: Span, whole_s: float) -> str:
    """Return where a span lies in the whole. Example: a quarter in the middle of 8 columns is `   ##`."""
    if whole_s <= 0:
        return ""
    begin, end = (min(1.0, max(0.0, at_s / whole_s)) for at_s in (span.begin_s, span.begin_s + span.duration_s))
    first = min(_BAR_COLUMNS - 1, int(_BAR_COLUMNS * begin))
    last = max(first + 1, round(_BAR_COLUMNS * end))
    return " " * first + "#" * (last - first)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _sum(timeline: Timeline) -> list[str]:
    whose = "as the engines see it" if timeline.measured_s is None else "as the client measured it"
    part = timeline.unexplained_part
    what = "is unexplained" if timeline.named_s <= timeline.total_s else "more than was measured"
    verdict = "" if part <= MOST_UNEXPLAINED else f" (more than {MOST_UNEXPLAINED:.0%})"
    named = f"named spans cover {_ms(timeline.named_s)}, {part:.1%} {what}{verdict}"
    lines = [f"time to the first token, {whose}: {_ms(timeline.total_s)}; {named}"]
    if timeline.measured_s is None:
        lines.append(
            "not seen by engines: the client's way to prefill's frontend, and the first token's way back; --ttft counts them"
        )
    return lines


def _certainty(timeline: Timeline, clocks: Clocks) -> list[str]:
    known = {name: value for name, value in timeline.uncertainty_s.items() if value is not None and value > 0}
    unknown = [name for name, value in timeline.uncertainty_s.items() if value is None]
    lines: list[str] = []
    if known:
        worst = max(known, key=lambda name: known[name])
        lines.append(
            f"clocks aligned by messages: within {_ms(known[worst])} of {timeline.hand_over.decode.clock} ({worst})"
        )
    if unknown:
        lines.append(f"no messages went both ways to {', '.join(unknown)}: its moments are left out")
    if timeline.hand_over.prefill is None:
        lines.append(
            "the prefill engine was not asked, or has forgotten: run this on its machine with --save, then here --with"
        )
    contradiction_s = clocks.contradiction_s()
    if contradiction_s:
        lines.append(f"messages contradict one another by {_ms(contradiction_s)}: a clock runs faster than another")
    return lines


def list_text(hand_overs: Sequence[HandOver]) -> str:
    """Return a line per hand-over, the latest last."""
    lines = [
        f"{each.decode.engine_id} {each.decode.request_id} from {each.decode.facts.get('peer_engine_id')} "
        f"{each.decode.facts.get('peer_request_id')}{'' if each.prefill else ' (not asked, or forgotten)'}"
        for each in hand_overs
    ]
    return "\n".join(plain_text(line) for line in lines) or "no hand-over is remembered"
