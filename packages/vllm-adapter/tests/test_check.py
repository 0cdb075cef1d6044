"""`vllm-adapter check`: prepared faults between real listeners, each named with its reason, and what must not matter."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines_to_check import TERMS, Checked, Rank, config, envelopes, silenced
from factories import write_secret

from kv_handshake.cli import main as handshake
from kv_handshake.security import ServerSecurity
from vllm_adapter.cli import main

Serve = Callable[..., str]
pytestmark = pytest.mark.usefixtures("no_engines")


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., Checked]:
    return lambda *words, **given: Checked(capsys, *words, **given)


Check = Callable[..., Checked]


def in_order(text: str, *words: str) -> bool:
    places = [text.index(word) for word in words]
    return places == sorted(places)


def test_two_engines_that_fit_are_a_go_with_plan_and_cost(listen: Serve, check: Check) -> None:
    found = check(listen(envelopes("P", tp=2)), listen(envelopes("D", tp=1)), configs=(config(), config()))
    assert (found.code, found.is_go, found.reasons()) == (0, True, [])
    texts = [each["message"] for each in found.findings]
    # 2 layers x 4 heads x (64 + 64) channels x 4 bytes: 4096 bytes a token, 4 MiB in 1024 tokens.
    assert any("decode rank 0.0 reads from prefill ranks 0.0, 0.1: 4096 bytes a token" in text for text in texts)
    assert any("1024 tokens moves 4.0 MiB" in text for text in texts)
    assert any("all 2 ranks answer" in text for text in texts)
    topics = {each["topic"] for each in found.findings if each["level"] == "ok"}
    assert topics == {"reach", "ranks", "factors", "plan", "clock", "lease", "keys", "seals"}


def test_the_cost_follows_the_speed_of_the_wire(listen: Serve, check: Check) -> None:
    addresses = listen(envelopes("P")), listen(envelopes("D"))

    def cost(*words: str) -> str:
        return next(each["message"] for each in check(*addresses, *words).findings if "1024 tokens" in each["message"])

    assert "shared memory" in cost()
    assert "at 0.01 GB/s" in cost("--gbps", "0.01")
    # 4 MiB at 10 MB/s are 419 ms.
    assert "about 419" in cost("--gbps", "0.01")


@pytest.mark.parametrize(
    ("is_open", "code", "words"),
    [(False, "connection-refused", "not its HTTP port"), (True, "timed-out", "firewall")],
    ids=["a wrong port", "a port that a firewall blocks"],
)
def test_a_port_where_nobody_answers(listen: Serve, check: Check, is_open: bool, code: str, words: str) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if is_open:
            mute.listen()
        found = check(listen(envelopes("P")), f"127.0.0.1:{mute.getsockname()[1]}")
    assert (found.code, found.reasons()) == (1, [("reach", code)])
    assert words in found.message(code)
    assert "decode 127.0.0.1" in found.message(code)


def talk(server: socket.socket, is_eager: bool) -> None:
    """Answer as HTTP servers do: at once on bytes that are no request, or only on the end of one."""
    with contextlib.suppress(OSError):
        while True:
            connection, got = server.accept()[0], b""
            with connection, contextlib.suppress(OSError):
                while not (got.endswith(b"\r\n\r\n") or (is_eager and got)):
                    got += connection.recv(64) or b"\r\n\r\n"
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize("is_eager", [True, False])
def test_http_ports_in_place_of_side_channels(check: Check, capsys: pytest.CaptureFixture[str], is_eager: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=talk, args=(server, is_eager), daemon=True).start()
        found = check(place, place)
        # On the eager one nothing waits; on the other the probe asks by HTTP after its wait.
        assert handshake(["probe", place, "--vllm", "0.32.0", "--timeout", "20" if is_eager else "2"]) == 3
        server.shutdown(socket.SHUT_RDWR)
    said = "an HTTP server answers there, not a side channel; the side channel's port is VLLM_NIXL_SIDE_CHANNEL_PORT"
    assert found.reasons() == [("reach", "authentication-refused")] * 2
    assert [each["message"] for each in found.findings[:2]] == [
        f"{role} {place}: {said}, default 5600" for role in ("prefill", "decode")
    ]
    assert [each["advice"] for each in found.findings[:2]] == ["", ""]
    assert f"{said}, default 5600 (authentication-refused)" in capsys.readouterr().err


def test_a_factor_that_must_match(listen: Serve, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = listen(envelopes("P", factors={"dtype": "torch.float16"})), listen(envelopes("D"))
    found = check(*addresses)
    assert found.reasons() == [("factors", "factors-differ")]
    assert 'dtype: prefill has "torch.float16", decode "torch.bfloat16"' in found.message("factors-differ")
    monkeypatch.setattr("factories.ELEMENT_BYTES", 2)
    halved = listen(envelopes("P", factors={"dtype": "torch.float16"})), addresses[1]
    found = check(*halved)
    assert found.reasons() == [("factors", "factors-differ")], "the plan's refusal follows from it"
    assert "element size" in found.message("plan-not-known")
    assert check(*halved, "--policy", "off").reasons() == [("plan", "element-bytes-differ")]
    off = check(*addresses, "--policy", "off")
    assert off.code == 0
    assert "the text will be wrong" in off.message("factors-differ")


def test_a_factor_that_may_differ_is_refused_by_the_exact_rule_alone(listen: Serve, check: Check) -> None:
    addresses = listen(envelopes("P", factors={"attn_backend_name": "FLASHINFER"})), listen(envelopes("D"))
    exact = check(*addresses)
    assert exact.reasons() == [("factors", "hash-mismatch")]
    assert '"compatibility_policy": "negotiated"' in exact.message("hash-mismatch")
    assert check(*addresses, "--policy", "negotiated").code == 0
    assert check(*addresses, "--decode-config", config(compatibility_policy="negotiated")).code == 0


@pytest.mark.parametrize(
    ("release", "connector", "level", "code"),
    [
        ("0.32.9", 14, "patch", ""),
        ("0.33.0", 15, "minor", ""),
        ("0.33.0", 15, "patch", "factors-differ"),
        ("0.34.0", 15, "minor", "release-differs"),
    ],
)
def test_another_release_of_vllm(
    listen: Serve, check: Check, release: str, connector: int, level: str, code: str
) -> None:
    changes: dict[str, object] = {"vllm_version": release, "nixl_connector_version": connector}
    addresses = listen(envelopes("P", factors=changes)), listen(envelopes("D", factors={"vllm_version": "0.32.0"}))
    found = check(*addresses, "--decode-config", config(may_differ=level))
    assert {name for _, name in found.reasons()} == {code} - {""}
    notes = [each["message"] for each in found.findings if each["code"] == "may-differ"]
    if code == "factors-differ":
        assert '"may_differ": "minor"' in next(each["advice"] for each in found.findings if each["code"] == code)
    else:
        assert f'vllm_version: prefill has "{release}", decode "0.32.0"; may_differ allows that' in notes
    unlike = listen(envelopes("P", factors={**changes, "dtype": "torch.float16"})), addresses[1]
    refused = check(*unlike, "--decode-config", config(may_differ="minor"))
    assert 'dtype: prefill has "torch.float16", decode "torch.bfloat16"' in refused.message("factors-differ")


def test_a_block_size_that_the_kernels_own_order_cannot_join(listen: Serve, check: Check) -> None:
    frames = [envelopes(name, tokens=tokens, kernel_order="neon") for name, tokens in (("P", 128), ("D", 64))]
    found = check(*map(listen, frames))
    assert found.reasons() == [("plan", "packing-differs")]
    assert "neon:64" in found.message("packing-differs")
    assert "neon:128" in found.message("packing-differs")
    good = [envelopes(name, tokens=tokens) for name, tokens in (("P", 128), ("D", 64))]
    assert check(*map(listen, good)).code == 0, "without such an order they can be joined"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_dead_rank(listen: Serve, check: Check, side: str) -> None:
    whole, broken = envelopes("P", tp=2), envelopes("D", tp=2)
    del (whole if side == "prefill" else broken)[0, 1]
    found = check(listen(whole), listen(broken))
    assert found.reasons() == [("ranks", "rank-missing")]
    assert f"{side} 127.0.0.1" in found.message("rank-missing")
    assert "rank 0.1 does not answer" in found.message("rank-missing")


def test_a_lease_that_ends_before_it_is_renewed(listen: Serve, check: Check) -> None:
    addresses = listen(envelopes("P")), listen(envelopes("D"))

    def leases(prefill_s: float, decode_s: float) -> Checked:
        return check(*addresses, configs=[config(kv_lease_duration=each) for each in (prefill_s, decode_s)])

    short = leases(6, 30)
    assert short.reasons() == [("lease", "lease-shorter-than-heartbeat")]
    assert "renews that to 4 s, and decode sends one every 5 s" in short.message("lease-shorter-than-heartbeat")
    assert leases(12, 30).codes("note") == {"one-heartbeat-to-spare"}
    assert leases(30, 30).codes("note") == set()


def test_a_peer_that_sends_only_its_hash_is_named_for_what_it_differs_in(listen: Serve, check: Check) -> None:
    decode = listen(envelopes("D"))
    equal = check(listen(silenced(envelopes("P"))), decode)
    assert (equal.code, equal.reasons()) == (0, [])
    assert {"no-fences", "terms-not-known"} <= equal.codes("note")
    assert any("decode rank 0.0 reads from prefill ranks 0.0: 4096 bytes" in each["message"] for each in equal.findings)
    assert any("vLLM's leaves out cannot be compared" in each["message"] for each in equal.findings)
    other = check(listen(silenced(envelopes("P", factors={"dtype": "torch.float16"}))), decode)
    assert other.reasons() == [("factors", "factors-differ")]
    assert 'dtype: prefill has "torch.float16"' in other.message("factors-differ")
    stranger = check(listen(silenced(envelopes("P", factors={"model": "other"}))), decode)
    assert ("factors", "factors-differ") in stranger.reasons()
    assert any("model probably differs" in each["message"] for each in stranger.findings)
    swapped = check(decode, listen(silenced(envelopes("P"))))
    assert swapped.code == 0
    assert "plan-not-known" in swapped.codes("note")


@pytest.mark.parametrize(("heads", "tp"), [(1, 4), (2, 2), (2, 8), (4, 1), (4, 4), (4, 8)])
def test_no_wrong_size_makes_a_silent_peer_be_asked_for_a_rank_that_it_lacks(
    check: Check, listen: Serve, monkeypatch: pytest.MonkeyPatch, heads: int, tp: int
) -> None:
    """Exhaustive to 9 ranks: a wrong number is refused or left open, the right one is asked for once it is proven or trusted."""
    from kv_handshake.inspect import probe as real
    from vllm_adapter.cli.check import engine

    asked: set[Rank] = set()

    def noting(host: str, port: int, *, ranks: Any, **way: Any) -> Any:
        asked.update(ranks)
        return real(host, port, ranks=ranks, **way)

    monkeypatch.setattr(engine, "probe", noting)
    prefill, decode = (listen(silenced(envelopes("P", tp=tp, heads=heads))), listen(envelopes("D", heads=heads)))
    served = {(0, rank) for rank in range(tp)}
    for reported in range(1, 10):
        asked.clear()
        found = check(prefill, decode, "--prefill-tp", str(reported))
        assert asked <= served, reported
        left_open = "size-not-proven" in found.codes("note")
        if reported == tp > 1:
            # More ranks than heads: each holds a whole head, as that of a smaller engine does.
            assert (asked == served, left_open) == (tp <= heads, tp > heads)
            asked.clear()
            assert check(prefill, decode, "--prefill-tp", str(reported), "--trust-prefill-tp").code == 0
            assert asked == served
        elif reported > tp:
            assert left_open or {code for _, code in found.reasons()} & {"page-bytes-differ", "size-out-of-range"}
    asked.clear()
    if tp <= heads:
        wrong = check(prefill, decode, "--prefill-tp", str(2 * tp), "--trust-prefill-tp")
        assert (asked <= served) is ("page-bytes-differ" in {code for _, code in wrong.reasons()})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Make keys of three engines."""
    for name in ("prefill", "decode", "stranger"):
        assert handshake(["keygen", str(tmp_path / "keys"), name]) == 0
        folder = tmp_path / f"knows-{name}"
        folder.mkdir()
        (folder / f"{name}.key").write_bytes((tmp_path / "keys" / f"{name}.key").read_bytes())
    return tmp_path


def locked(keys: Path, own: str, server: str, clients: str) -> str:
    return config(
        side_channel_key=str(keys / "keys" / f"{own}.key_secret"),
        side_channel_server_key=str(keys / "keys" / f"{server}.key"),
        side_channel_clients=str(keys / f"knows-{clients}"),
    )


def test_a_wrong_key(listen: Serve, check: Check, keys: Path) -> None:
    def listening(own: str, admits: str) -> str:
        security = ServerSecurity.read(keys / "keys" / f"{own}.key_secret", keys / f"knows-{admits}")
        return listen(envelopes(own), security=security)

    addresses = listening("prefill", "decode"), listening("decode", "prefill")
    prefill = locked(keys, "prefill", "decode", "decode")
    good = check(*addresses, configs=(prefill, locked(keys, "decode", "prefill", "prefill")))
    assert (good.code, good.reasons()) == (0, [])
    for decode in (locked(keys, "stranger", "prefill", "prefill"), locked(keys, "decode", "stranger", "prefill")):
        wrong = check(*addresses, configs=(prefill, decode))
        assert wrong.reasons() == [("keys", "authentication-refused")]
        assert "prefill 127.0.0.1" in wrong.message("authentication-refused")
        advice = wrong.message("authentication-refused")
        assert in_order(advice, "side_channel_key", "VLLM_NIXL_SIDE_CHANNEL_PORT", "are too many")
    bare = check(addresses[0], listen(envelopes("D")))
    assert bare.reasons() == [("reach", "authentication-refused")]


def test_keys_on_one_side_alone(listen: Serve, check: Check, keys: Path) -> None:
    addresses = listen(envelopes("P")), listen(envelopes("D"))
    decode = locked(keys, "decode", "prefill", "prefill")
    found = check(*addresses, configs=(config(), decode))
    assert ("keys", "keys-on-one-side") in found.reasons()
    assert "give the prefill engine side_channel_key" in found.message("keys-on-one-side")


def test_a_wrong_seal(listen: Serve, check: Check, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("first", "second", "both")}
    secrets = {"first": "a" * 32, "second": "b" * 32}
    for name, text in {**secrets, "both": f"{secrets['second']}\n{secrets['first']}"}.items():
        write_secret(files[name], text.encode())
    addresses = listen(envelopes("P")), listen(envelopes("D"))

    def seals(prefill: str, decode: str) -> Checked:
        made = [config(ticket_secrets=[str(files[name])]) if name else config() for name in (prefill, decode)]
        return check(*addresses, configs=made)

    assert seals("first", "second").reasons() == [("seals", "seal-not-known")]
    assert seals("both", "first").reasons() == [("seals", "seal-not-known")], "the first one seals"
    assert seals("first", "both").code == 0
    assert seals("", "first").reasons() == [("seals", "seal-missing")]
    assert seals("first", "").codes("note") == {"seals-not-verified"}
    said = json.dumps([each.findings for each in (seals("first", "second"), seals("first", "both"))])
    assert not any(secret in said for secret in secrets.values())


def test_a_skewed_clock_does_not_matter(listen: Serve, check: Check) -> None:
    prefill = listen(envelopes("P"), clock=lambda: time.perf_counter() + 3600)
    found = check(prefill, listen(envelopes("D")))
    assert (found.code, found.reasons()) == (0, [])
    (clock,) = [each["message"] for each in found.findings if each["topic"] == "clock"]
    assert "3600.0 s apart, which does not matter" in clock


def test_one_engine_under_both_addresses(listen: Serve, check: Check) -> None:
    assert check(listen(envelopes("P")), listen(envelopes("P"))).reasons() == [("factors", "same-engine")]


def test_terms_are_those_of_live_engines_of_this_machine(
    listen: Serve, check: Check, serve: Callable[..., object]
) -> None:
    addresses = {name: listen(envelopes(name)) for name in ("engine-p", "engine-d")}
    terms = {
        "part": "scheduler",
        "heartbeat_s": 5.0,
        "compatibility_policy": "exact",
        "seals": [],
        "requires_seals": False,
        "is_encrypted": False,
        "ucx_tls": "",
    }
    answers = {
        name: {**terms, "engine_id": name, "side_channel": address, "lease_s": lease_s}
        for (name, address), lease_s in zip(addresses.items(), (6.0, 30.0), strict=True)
    }
    answers["engine-p"]["ucx_tls"] = "tcp"
    for answer in answers.values():
        serve(answer)
    found = check("engine-p", "engine-d")
    assert set(found.reasons()) == {("lease", "lease-shorter-than-heartbeat"), ("transport", "tcp-only")}
    assert found.codes("note") == set()
    assert "lets the prefill engine use no network but TCP" in found.message("tcp-only")
    assert check(addresses["engine-p"], addresses["engine-d"]).reasons() == found.reasons()
    allowed = check("engine-p", "engine-d", "--allow-tcp")
    assert allowed.reasons() == [("lease", "lease-shorter-than-heartbeat")]
    assert allowed.codes("note") == {"tcp-only"}
    assert check("engine-p", "engine-d", "--prefill-config", config()).code == 0, "a configuration goes first"


def test_what_cannot_be_asked_is_wrong_usage(listen: Serve, check: Check) -> None:
    decode = listen(envelopes("D"))
    for words, said in (
        (("nobody", decode), "neither HOST:PORT nor the id of a live engine"),
        (("127.0.0.1:0", decode), "is not HOST:PORT"),
        (("127.0.0.1:http", decode), "is not HOST:PORT"),
        ((decode, decode, "--prefill-config", '{"kv_rol": 1}'), "did you mean 'kv_role'?"),
        ((decode, decode, "--prefill-config", "[]"), "vllm-adapter: a configuration is a JSON object"),
        ((decode, decode, "--prefill-config", "/nowhere.json"), "/nowhere.json"),
        ((decode, decode, "--vllm", "0.1"), "0.1"),
    ):
        found = check(*words)
        assert (found.code, found.is_go) == (2, None), words
        assert said in found.error


def test_the_answer_in_words(listen: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = listen(envelopes("P", factors={"dtype": "torch.float16"})), listen(envelopes("D"))
    assert main(["check", prefill, decode, "--no-read"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"ok     reach      prefill {prefill}: engine P, tp 1, pp 1; this connector")
    assert 'no-go  factors    dtype: prefill has "torch.float16", decode "torch.bfloat16" (factors-differ)' in lines
    assert lines[-1] == "NO GO: 1 reason"
    assert main(["check", listen(envelopes("P")), decode, "--no-read"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "GO"


# ---------------------------------------------------------------------------------------------- before anything starts

LLAMA = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
TWO = {"tensor-parallel-size": 2}
SEALED = {"kv-transfer-config": {**TERMS, "kv_connector_extra_config": {"kv_lease_duration": 6}}}
PLAIN = {"kv-transfer-config": TERMS}
NEGOTIATED = {"kv-transfer-config": {**TERMS, "kv_connector_extra_config": {"compatibility_policy": "negotiated"}}}
COMPRESSED = {"hf-overrides": {"compression_config": {"quant_method": "compressed-tensors"}}}
SCALED, AWQ = (
    {"hf-overrides": {"quantization_config": {"quant_method": method}}} for method in ("compressed-tensors", "awq")
)


@pytest.mark.parametrize(
    ("prefill", "decode", "reasons"),
    [
        (TWO, {}, []),
        ({"pipeline_parallel_size": 2}, TWO, []),
        ({"kv-cache-dtype": "fp8"}, {}, [("factors", "factors-differ")]),
        ({"--tensor-parallel-size": 3}, {}, [("start", "size-out-of-range")]),
        ({"tp": 8, "hf-overrides": {"num_key_value_heads": 3}}, {}, [("start", "size-out-of-range")]),
        ({"tp": 8, "decode-context-parallel-size": 4}, {}, [("start", "size-out-of-range")]),
        ({"tp": 8, "dcp": 2, "cp-kv-cache-interleave-size": 3}, TWO, [("start", "context-turns-uneven")]),
        ({"tp": 8, "dcp": 2}, TWO, []),
        ({"hf-overrides": {"text_config": 3}}, {}, [("start", "spec-malformed")]),
        ({"hf-overrides": {"sliding_window": 64}}, {}, [("start", "spec-malformed")]),
        ({"tp": 8, "pp": 1024}, {}, [("start", "size-out-of-range")]),
        ({"enable-sleep-mode": True}, {}, [("start", "sleep-mode-unsupported")]),
        (SEALED, PLAIN, [("lease", "lease-shorter-than-heartbeat")]),
    ],
)
def test_engines_that_do_not_run_are_checked_by_their_options(
    check: Check, tmp_path: Path, prefill: dict[str, Any], decode: dict[str, Any], reasons: list[tuple[str, str]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "decode-options.json"
    file.write_text(json.dumps({"model": str(tmp_path), **decode}))
    found = check(json.dumps({"model": str(tmp_path / "config.json"), **prefill}), str(file))
    found.findings = [each for each in found.findings if "model: prefill has" not in each["message"]]
    assert found.reasons() == reasons


@pytest.mark.parametrize(
    ("prefill", "decode", "code"),
    [
        ("fp8", {}, ""),
        ("fp8", {"dtype": "half"}, "factors-differ"),
        ("auto", {"kv-cache-dtype": "fp8"}, "element-types-differ"),
        ("fp8", {"kv-cache-dtype": "fp8_e5m2"}, "element-types-differ"),
        ("fp8_inc", {}, "element-types-differ"),
        ("fp8", SCALED, "element-types-differ"),
        ("fp8", AWQ, ""),
        ("fp8", COMPRESSED, "element-types-differ"),
        ("auto", {**SCALED, "kv-cache-dtype": "float32"}, ""),
    ],
)
def test_elements_of_fewer_bytes_are_planned_where_factors_are_compared_one_by_one(
    check: Check, tmp_path: Path, prefill: str, decode: dict[str, Any], code: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    checkpoint = {name: value for name, value in decode.items() if name == "hf-overrides"}
    options = {"model": str(tmp_path), "kv-cache-dtype": prefill, **checkpoint, **TWO}
    for policy, found in (({}, "factors-differ"), (NEGOTIATED, code)):
        answer = check(json.dumps(options), json.dumps({"model": str(tmp_path), **policy, **decode}))
        assert {name for _, name in answer.reasons()} == {found} - {""}
        assert any("cache_dtype: prefill has" in each["message"] for each in answer.findings)
        advice = [each["advice"] for each in answer.findings if each["code"] == found == "factors-differ"]
        assert policy or '"compatibility_policy": "negotiated"' in "".join(advice)


def test_scales_beside_the_configuration_are_seen(check: Check, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    pair = [json.dumps({"model": str(tmp_path), **one}) for one in ({"kv-cache-dtype": "fp8", **TWO}, NEGOTIATED)]
    assert check(*pair).reasons() == []
    (tmp_path / "hf_quant_config.json").write_text("{}")  # of ModelOpt
    assert [name for _, name in check(*pair).reasons()] == ["element-types-differ"]


def test_options_that_cannot_be_read_are_named(check: Check, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    good = json.dumps({"model": str(tmp_path), "max-model-len": 7})
    scaled = json.dumps({"model": str(tmp_path), "kv-cache-dtype": "int8_per_token_head"})
    assert "(out-of-range)" in check(scaled, good).error
    for wrong, word in (
        ('{"model": 3}', "$.model"),
        ('{"model": "", "tp": 2, "tensor_parallel_size": 4}', "given twice"),
        ('{"model": "", "tensor-paralel-size": 2}', "did you mean 'tensor_parallel_size'?"),
        ('{"model": "", "block-size": 1e99}', "$.block_size"),
        ('{"model": "", "dtype": "half-float"}', "$.dtype"),
        (json.dumps({"model": str(tmp_path), "hf-overrides": {"torch_dtype": [1]}}), "element type '[1]'"),
        ("127.0.0.1:5600", "one engine runs"),
        ("{}", "model"),
        ("nowhere.json", "nowhere.json"),
        ("[", "not JSON"),
    ):
        assert word in check(good, wrong).error
    assert any("max_model_len" in each["message"] for each in check(good, good).findings)
