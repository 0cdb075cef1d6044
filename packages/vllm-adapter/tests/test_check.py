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
from engines_to_check import Checked, Rank, config, envelopes, silenced

from kv_handshake.security import ServerSecurity
from vllm_adapter.cli import main
from vllm_adapter.observe.status_socket import REQUEST, StatusSocket

Serve = Callable[..., str]
pytestmark = pytest.mark.usefixtures("no_engines")


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., Checked]:
    return lambda *words: Checked(capsys, *words)


Check = Callable[..., Checked]


def test_two_engines_that_fit_are_a_go_with_plan_and_cost(listen: Serve, check: Check) -> None:
    same = (config(), config())
    found = check(
        listen(envelopes("P", tp=2)),
        listen(envelopes("D", tp=1)),
        "--prefill-config",
        same[0],
        "--decode-config",
        same[1],
    )
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


def test_a_wrong_port(listen: Serve, check: Check) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        found = check(f"127.0.0.1:{unused.getsockname()[1]}", listen(envelopes("D")))
    assert found.code == 1
    assert found.reasons() == [("reach", "connection-refused")]
    assert "not its HTTP port" in found.message("connection-refused")
    assert "prefill 127.0.0.1" in found.message("connection-refused")


def test_the_http_port_of_an_engine(listen: Serve, check: Check) -> None:
    """A web server ends the opening of the connection, as a listener with keys does; without keys here, it is the likelier."""

    def answer(web: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = web.accept()
                with accepted:
                    accepted.recv(64)
                    accepted.sendall(
                        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\nInvalid HTTP request received."
                    )

    with socket.create_server(("127.0.0.1", 0)) as web:
        answering = threading.Thread(target=answer, args=[web])
        answering.start()
        found = check(f"127.0.0.1:{web.getsockname()[1]}", listen(envelopes("D")))
        web.shutdown(socket.SHUT_RDWR)
        answering.join()
    assert found.reasons() == [("reach", "authentication-refused")]
    advice = found.message("authentication-refused")
    assert (
        0 < advice.index("not its HTTP port") < advice.index("side_channel_server_key") < advice.index("are too many")
    )


def test_a_port_that_a_firewall_blocks(listen: Serve, check: Check) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        began_s = time.monotonic()
        found = check(listen(envelopes("P")), f"127.0.0.1:{mute.getsockname()[1]}")
    assert found.reasons() == [("reach", "timed-out")]
    assert "decode 127.0.0.1" in found.message("timed-out")
    assert "firewall" in found.message("timed-out")
    assert time.monotonic() - began_s < 20


def test_a_factor_that_must_match(listen: Serve, check: Check) -> None:
    addresses = listen(envelopes("P", factors={"dtype": "torch.float16"})), listen(envelopes("D"))
    found = check(*addresses)
    assert found.reasons() == [("factors", "factors-differ")]
    assert 'dtype: prefill has "torch.float16", decode "torch.bfloat16"' in found.message("factors-differ")
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
        words = config(kv_lease_duration=prefill_s), config(kv_lease_duration=decode_s)
        return check(*addresses, "--prefill-config", words[0], "--decode-config", words[1])

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
    for told in range(1, 10):
        asked.clear()
        found = check(prefill, decode, "--prefill-tp", str(told))
        assert asked <= served, told
        left_open = "size-not-proven" in found.codes("note")
        if told == tp > 1:
            # More ranks than heads: each holds a whole head, as that of a smaller engine does.
            assert (asked == served, left_open) == (tp <= heads, tp > heads)
            asked.clear()
            assert check(prefill, decode, "--prefill-tp", str(told), "--trust-prefill-tp").code == 0
            assert asked == served
        elif told > tp:
            assert left_open or {code for _, code in found.reasons()} & {"page-bytes-differ", "size-out-of-range"}
    asked.clear()
    if tp <= heads:
        wrong = check(prefill, decode, "--prefill-tp", str(2 * tp), "--trust-prefill-tp")
        assert (asked <= served) is ("page-bytes-differ" in {code for _, code in wrong.reasons()})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Make keys of three engines."""
    from kv_handshake.cli import main as handshake

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
    good = check(
        *addresses, "--prefill-config", prefill, "--decode-config", locked(keys, "decode", "prefill", "prefill")
    )
    assert (good.code, good.reasons()) == (0, [])
    for decode in (locked(keys, "stranger", "prefill", "prefill"), locked(keys, "decode", "stranger", "prefill")):
        wrong = check(*addresses, "--prefill-config", prefill, "--decode-config", decode)
        assert wrong.reasons() == [("keys", "authentication-refused")]
        assert "prefill 127.0.0.1" in wrong.message("authentication-refused")
        advice = wrong.message("authentication-refused")
        assert (
            0
            < advice.index("side_channel_server_key")
            < advice.index("not its HTTP port")
            < advice.index("are too many")
        )
    bare = check(*addresses, "--prefill-config", config(), "--decode-config", config())
    assert set(bare.reasons()) == {("reach", "authentication-refused")}


def test_keys_on_one_side_alone(listen: Serve, check: Check, keys: Path) -> None:
    addresses = listen(envelopes("P")), listen(envelopes("D"))
    decode = locked(keys, "decode", "prefill", "prefill")
    found = check(*addresses, "--prefill-config", config(), "--decode-config", decode)
    assert ("keys", "keys-on-one-side") in found.reasons()
    assert "give the prefill engine side_channel_key" in found.message("keys-on-one-side")


def test_a_wrong_seal(listen: Serve, check: Check, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("first", "second", "both")}
    secrets = {"first": "a" * 32, "second": "b" * 32}
    for name, text in {**secrets, "both": f"{secrets['second']}\n{secrets['first']}"}.items():
        files[name].write_text(text)
        files[name].chmod(0o600)
    addresses = listen(envelopes("P")), listen(envelopes("D"))

    def seals(prefill: str, decode: str) -> Checked:
        words = [config(ticket_secret_files=[str(files[name])]) if name else config() for name in (prefill, decode)]
        return check(*addresses, "--prefill-config", words[0], "--decode-config", words[1])

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


def test_terms_are_those_of_live_engines_of_this_machine(listen: Serve, check: Check) -> None:
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
    live = [StatusSocket("scheduler", {REQUEST: lambda name=name: answers[name]}) for name in answers]  # type: ignore[misc]
    try:
        assert all(each.open() for each in live)
        found = check("engine-p", "engine-d")
        assert set(found.reasons()) == {("lease", "lease-shorter-than-heartbeat"), ("transport", "tcp-only")}
        assert found.codes("note") == set()
        assert "lets the prefill engine use no network but TCP" in found.message("tcp-only")
        assert check(addresses["engine-p"], addresses["engine-d"]).reasons() == found.reasons()
        allowed = check("engine-p", "engine-d", "--allow-tcp")
        assert allowed.reasons() == [("lease", "lease-shorter-than-heartbeat")]
        assert allowed.codes("note") == {"tcp-only"}
        assert check("engine-p", "engine-d", "--prefill-config", config()).code == 0, "a configuration goes first"
    finally:
        for each in live:
            each.close()


def test_what_cannot_be_asked_is_wrong_usage(listen: Serve, check: Check) -> None:
    decode = listen(envelopes("D"))
    for words, said in (
        (("nobody", decode), "neither HOST:PORT nor the id of a live engine"),
        (("127.0.0.1:0", decode), "is not HOST:PORT"),
        (("127.0.0.1:http", decode), "is not HOST:PORT"),
        ((decode, decode, "--prefill-config", '{"kv_rol": 1}'), "did you mean 'kv_role'?"),
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
