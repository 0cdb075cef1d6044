"""Say what a person does about a message: by its code, else by words of its text. Every message but "ok" and "info" has a step.

Rules are tried in order: those of texts whose code means something else in another package, then the first whose pattern is
found in the code, then the first whose pattern is in the text.
"""

from __future__ import annotations

import re

__all__ = ["next_step"]

_CHECK = "`vllm-adapter check PREFILL DECODE` names what differs"
_PROBE = "`kv-handshake probe HOST:PORT` shows who answers there"
_DOCTOR = "`kv-nixl doctor` in the engine's environment"
_CALLER = "a caller's mistake: correct the value that the text names; in an engine's log it is a bug, report it"
_CONFIG = "correct the key that the text names; `vllm-adapter config --check CONFIG` tries it"
_TICKET = "nothing is lost, the prompt is computed here; look at the router and at the engine that gave the ticket"
_RESTART = "restart this engine, and report its log"
_AGAIN = "nothing: it is tried again, or `kv_load_failure_policy` decides"
_USAGE = "`--help` shows the usage; the words after the colon say what is wrong"
_RESTARTED = "nothing: the peer was restarted, and its old tickets end as failures"
_PLAIN = (
    "no text is wrong: prompts are handed over whole or computed by the decode engine; "
    "give all engines one release and `streaming`"
)
_DETAIL = "part of another message, after its colon; alone it is a defect: report it"

_FIRST = (
    (
        (
            r"^(kv_connector_extra_config: )?'\{\w+\}' (must|is missing)|^there is no key|connectors is missing|"
            r"has no connector|configuration is a JSON"
        ),
        _CONFIG,
    ),
    (
        r"^not seen to end within|met anew only after",
        "look whether the peer's process is stopped or its network is slow",
    ),
    (r"no kv_transfer_config with an engine id", "start the engine with `--kv-transfer-config`"),
    (r"but the ticket names none|but the ticket has no digest|but this one has none", _TICKET),
    (r"belongs to the owner thread", _CALLER),
    (
        (
            r"cannot be asked: |hand-over cannot be asked|question for a hand-over|"
            r"(handed over whole|computed here), not|was asked for more than one token|pages are zeroed before|"
            r"could not be left out"
        ),
        _PLAIN,
    ),
    (r"answer to a peer's question|an answer was refused", _PLAIN),
    (r"its ticket is refused, so its prompt is computed here", _TICKET),
    (r"its prompt is not streamed", "look the code up in [Streams](troubleshoot.md#streams)"),
    (
        r"cannot be asked for now",
        "no text is wrong: these prompts are computed by the decode engine; look the code up in [Troubleshoot](troubleshoot.md)",
    ),
    (r"^peer \{key\} is known", _CALLER),
    (
        r"is already the peer",
        "nothing, if it passes: reads of before the peer registered its memory anew still run; else two engines have the same id",
    ),
    (r"^reads are one-sided|^\{host\}, NIXL is \{loaded\}|^\{free\} MiB free", "nothing: it is as it should be"),
    (r"cannot serve on", "choose another `--port`, or end the process that has this one"),
    (
        r"^vllm-adapter status: \{|no such engine lives",
        (
            "run it as the engine's user, on its machine and in its container: "
            "[Ask a live engine](operate/status.md#how-it-is-asked)"
        ),
    ),
    (r"^vllm-adapter trace: \{", "do what the text says: [Trace a hand-over](operate/trace.md)"),
    (r"^kv-topology: (no plan|the specification makes)", "change the specification as the text says"),
    (r"^kv-topology: a proof", "a bug: report it with this text"),
    (
        r"^key file \{file\} cannot be|holds no (secret key|\*\.key)",
        "look at the path and the rights of that file or folder: [Security](security.md)",
    ),
    (r"no connection to .* because of", "raise the limits of threads and open files (`ulimit -u`, `ulimit -n`)"),
)
_BY_CODE = (
    (r"^insecure-key-file$", "`chmod` the file as the text says: [Security](security.md)"),
    (
        (
            r"^(nixl-(cuda|owners|packages|version)|plugin-dir|shared-memory|rdma-devices|"
            r"ucx-(net-devices|tls)|peer-deaths|cma)$"
        ),
        "do what the text says, then run `kv-nixl doctor` again: [Tune UCX and NICs](operate/tune.md)",
    ),
    (r"^(ask-unsupported|malformed-answer|malformed-hand-over|hand-over-mismatch|not-streamed)$", _PLAIN),
    (r"^stream-", "if it goes on, look the code up in [Streams](troubleshoot.md#streams)"),
    (
        r"^ticket-early-(off|uncovered)$",
        "set `streaming`, and a fleet secret or `remote_hosts`, on this engine: [Streams](troubleshoot.md#streams)",
    ),
    (r"^(ticket|hand-over)-seal$", "compare the fleet's secrets on both engines: [Security](security.md)"),
    (
        r"^ticket-role$",
        "correct the router: it sends requests to decode to a prefill engine, or set `kv_role` to `kv_both`",
    ),
    (r"^ticket-own-engine$", "correct the router: it sends both halves of a request to one engine"),
    (r"^ticket-session$", "leave `kv_transfer_params` out of requests with streaming input"),
    (r"^ticket-prompt", "send both engines the same prompt, adapter and images; " + _TICKET),
    (r"^ticket-host$", "widen `remote_hosts` or `peer_ports`, if the ticket is right"),
    (r"^ticket-", _TICKET),
    (r"^(hash-mismatch|factors-differ|protocol-range|capability-missing|first-rank-refused|field-missing)$", _CHECK),
    (r"^generation-mismatch$", _RESTARTED),
    (
        r"^engine-mismatch$",
        (
            "once: nothing, the peer was restarted; on every request: `VLLM_NIXL_SIDE_CHANNEL_HOST` is unset, "
            "or one address leads to several engines"
        ),
    ),
    (
        r"^name-unresolved$",
        "give each engine's `VLLM_NIXL_SIDE_CHANNEL_HOST` an address, or a name that both machines resolve",
    ),
    (r"^(connection-refused|connection-lost|timed-out|recently-failed|transport-failed)$", _PROBE),
    (r"^too-many-peers$", "look why so many peers are silent at once; a later request finds a place again"),
    (
        r"^authentication-refused$",
        (
            "in this order: is the port that of a side channel, not of HTTP; have both sides keys, or neither; are they the "
            "right ones ([Security](security.md)); does the peer's log say that it closes connections because there are too many"
        ),
    ),
    (
        r"^(keys-on-one-side|invalid-key-file|insecure-key-file)$",
        "compare the key files: [Security](security.md)",
    ),
    (r"^(invalid-secret|insecure-secret-file)$", "mend the secret's file or variable: [Security](security.md)"),
    (
        r"^unreadable$",
        "give a file of the kind that the command's `--help` names; for an engine, the release that it runs",
    ),
    (r"^bind-failed$", "choose another `VLLM_NIXL_SIDE_CHANNEL_PORT`, or end the process that has this one"),
    (r"^(refused|rate-limited|not-ready|unknown-rank|no-advertisement)$", "wait for the peer to be ready; " + _PROBE),
    (
        r"^(malformed|wrong-(arity|type|frames)|oversized|unexpected|unknown-command|rank-mismatch|checksum-mismatch)",
        "another program or version speaks there; " + _PROBE,
    ),
    (r"^(invalid-endpoint)$", "give HOST:PORT of a side channel"),
    (r"^(unknown-dialect)$", "give the peer's vLLM release: `--vllm 0.32.0`"),
    (r"^(invalid-recording)$", "record the engine anew: `kv-handshake probe --save FILE`"),
    (
        (
            r"^(unknown-key|wrong-type|out-of-range|readback-(needs-kv-both|drafted-state)|outer-role|(consumer|mirror)-pipeline|"
            r"prefill-context|computed-kv|sleep-mode|unsupported-buffer)"
        ),
        _CONFIG,
    ),
    (r"^(side-channel-)", "set `VLLM_NIXL_SIDE_CHANNEL_HOST` or `_PORT` as the text says"),
    (r"^(unsupported-vllm)$", "install a vLLM of the [support matrix](support.md)"),
    (
        r"^unknown-cache-shape$",
        "choose another attention back end, and report the shape",
    ),
    (r"^(no-cache-layers)$", "leave `--kv-transfer-config` out for this model"),
    (r"^(memory-in-use|thread-dead)$", _RESTART),
    (r"^no-descriptors$", "raise the limit as the text says, and restart this engine"),
    (
        (
            r"^(ucx-|nixl-|rdma-|shared-memory|plugin-dir|peer-deaths|backend-unavailable|"
            r"registration-failed|memlock|file-descriptors|cma)"
        ),
        _DOCTOR,
    ),
    (
        (
            r"^(peer-disconnected|peer-removed|notification-failed|fence-mismatch|"
            r"read-after-expiry|cancelled|closed|agent-closed)$"
        ),
        _AGAIN,
    ),
    (r"^(quarantine-full|deadline-exceeded|peer-draining)$", "look whether the peer's process is stopped; restart it"),
    (r"^(queue-full)$", "wait, or add decode engines"),
    (
        (
            r"^(metadata-|agent-name|mixed-memory|peer-facts|pipeline-|region-count|"
            r"page-bytes|state-bytes|layer-not-held|bad-geometry)"
        ),
        _CHECK,
    ),
    (r"-differ(s)?$|^(peer-|no-producer|packed-block|plan-too|too-many|stage-|not-stageable|layout-not)", _CHECK),
    (r"^(document-)", "run compatible releases on both engines"),
    (
        (
            r"^(no-fences|seals-not-verified|unsealed-tickets|terms-not-known|"
            r"plan-not-known|one-heartbeat-to-spare|no-probe-pages|not-measured|measured-elsewhere|size-not-proven|tcp-only|may-differ)$"
        ),
        "[Check two engines](operate/check.md)",
    ),
    (r"^(rank-missing|same-engine|lease-shorter|seal-)", "[Check two engines](operate/check.md)"),
)

_BY_TEXT = (
    (r"words of streams move after", "set `streaming` to false, restart the engine, and report it with vLLM's version"),
    (r"is streamed already", "report it: the scheduler ordered one stream twice"),
    (r"could not be left out here", "report it, with the model's name and vLLM's version"),
    (
        r"failed \(traceback below\)",
        "report it, with the traceback; the words after the colon say what follows meanwhile",
    ),
    (r"has died|stuck in one turn|caught \{", _RESTART),
    (r"still on the wire|pages stay quarantined", "restart the peer that hangs, if it does not end by itself"),
    (
        r"is stopped, slow or unreachable|is dropped and will be met anew",
        "look at that engine's host and network; " + _DOCTOR,
    ),
    (r"lease ended before it was read|stay leased until", "[Leases expire](troubleshoot.md#leases-expire)"),
    (
        r"prompt is not handed over|order to",
        (
            ""
            "[Troubleshoot](troubleshoot.md#requests-are-answered-but-decode-computes-the-prompt-itself) by the code in the text"
        ),
    ),
    (r"hand-over ticket is refused", _TICKET),
    (
        r"was not taken over|could not be copied",
        "[Troubleshoot](troubleshoot.md#hand-overs-fail) by the code in the text",
    ),
    (r"ends with %d requests", "give the engine time to drain: [Drain](operate/drain.md)"),
    (
        r"names \{surplus\} requests",
        "a decode engine waits with more requests than a heartbeat names: add decode engines, or prolong `kv_lease_duration`",
    ),
    (r"more like this were not logged", "nothing: so many lines of the same cause were left out"),
    (r"shutdown-timeout", "give vLLM the `--shutdown-timeout` that the text names: [Drain](operate/drain.md)"),
    (r"hands over without seals", "seal that engine's tickets, or keep its network closed: [Security](security.md)"),
    (
        r"secrets stay|fleet secret|ticket_policy|encrypted side channel needs",
        "mend the secret's file or key: [Security](security.md)",
    ),
    (r"vLLM'?s? (version|%d)|was made for vLLM", "install a vLLM of the [support matrix](support.md)"),
    (r"mm_processor_cache_gb", "set it above 0, or enable prefix caching, on all engines"),
    (
        r"asks more often|sent a message|connection of|too many frames",
        "look who asks: a scanner, or an engine that restarts in a loop",
    ),
    (
        r"restarts after|goes on after|does not close|raised \{|failed unexpectedly|metric %s|was not noted",
        "nothing now: work goes on; report the traceback",
    ),
    (r"^peer \{peer\}", _CHECK),
    (r"the command line is not installed", "type the line that the text ends with"),
    (
        r"^(vllm-adapter|kv-topology|kv-handshake|kv-nixl)|^--",
        "`--help` shows the usage; the words after the colon say what is wrong",
    ),
)

_NONE_NEEDED = frozenset({"ok", "info", "text", "help"})


def next_step(level: str, code: str, text: str) -> str:
    """Return the next step for a message; empty only for those that need none."""
    if level in _NONE_NEEDED:
        return ""
    for pattern, step in _FIRST:
        if re.search(pattern, text):
            return step
    for pattern, step in _BY_CODE if code else ():
        if re.search(pattern, code):
            return step
    for pattern, step in _BY_TEXT:
        if re.search(pattern, text):
            return step
    if level == "refusal":
        return _USAGE
    return _CALLER if code else _DETAIL
