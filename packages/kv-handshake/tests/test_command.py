"""The command line, recordings and comparisons."""

import json
import signal
import subprocess
import sys

import msgspec
import pytest

from kv_handshake import Codec, ConfigurationError
from kv_handshake.cli import main
from kv_handshake.inspect import Recording, compare
from kv_handshake.security import ServerSecurity
from kv_handshake.testing import load_vectors, sample_envelopes, sample_metadata
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.factors import compatibility_hash
from kv_handshake.wire.replies import decode_envelope

FACTORS = dict.fromkeys(dialect_of(14).hash_factors, "x") | {"vllm_version": "0.32.0", "dtype": "torch.bfloat16"}


def recording(factors=FACTORS, *, silent=False, **changes):
    frame = Codec().encode_envelope({**sample_metadata(), **changes}, factors, dialect=14, rank=(0, 0))
    if silent:
        inner = decode_envelope(frame).agent_metadata_bytes
        frame = msgspec.msgpack.encode(
            {"compatibility_hash": compatibility_hash(factors), "agent_metadata_bytes": inner}
        )
    return Recording(14, {(0, 0): frame})


@pytest.fixture
def served(serve):
    """A factory of listeners that serve a recording, by their addresses."""
    return lambda made: f"127.0.0.1:{serve(payloads=made.payloads).port}"


def test_probe_prints_a_peer(served, capsys):
    assert main(["probe", served(recording())]) == 0
    text = capsys.readouterr().out
    for part in ("engine_id", "engine-a", "block_lens", "[65536, 65536]", "clock offset", " ms", "dtype"):
        assert part in text


def test_probe_in_json(served, capsys):
    peer = served(Recording(14, sample_envelopes([(0, 0), (0, 1), (1, 2)], regions=9)))
    assert main(["probe", peer, "--rank", "0-1", "--rank", "1:2", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [(each["pp"], each["tp"]) for each in seen["ranks"]] == [(0, 0), (0, 1), (1, 2)]
    assert seen["ranks"][2]["metadata"]["device_id"] == 2
    assert seen["ranks"][0]["metadata"]["agent_metadata"]["bytes"] == 256
    assert main(["probe", peer]) == 0
    assert "9 in all" in capsys.readouterr().out


def test_probe_of_an_old_release(served, capsys):
    peer = served(Recording(2, sample_envelopes(dialect=2)))
    assert main(["probe", peer, "--vllm", "0.20.1"]) == 0
    assert "clock" not in capsys.readouterr().out


@pytest.mark.parametrize("silent", [False, True])
def test_against_an_equal_peer_prints_no_difference(served, capsys, silent):
    left, right = served(recording(silent=silent)), served(recording(engine_id="other", num_blocks=7))
    assert main(["probe", left, "--against", right]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "silent", "names", "code"),
    [
        ({"dtype": "torch.float16"}, False, ["dtype"], 1),
        ({"dtype": "torch.float16"}, True, ["dtype"], 1),
        ({"model": "other"}, False, ["model"], 1),
        ({"model": "other"}, True, ["model", "suspect"], 1),
        ({"block_size": 32}, False, ["block_size"], 0),
        ({"vllm_version": "0.32.1"}, True, ["vllm_version"], 0),
    ],
)
def test_against_names_what_differs(served, capsys, changes, silent, names, code):
    metadata = {"block_size": 32} if "block_size" in changes else {}
    other = recording({**FACTORS, **changes}, silent=silent, **metadata)
    for first, second in ((recording(), other), (other, recording())):
        assert main(["probe", served(first), "--against", served(second)]) == code
        text = capsys.readouterr().out.splitlines()[-2:]
        for name in names:
            assert name in "".join(text)


def test_against_a_file_and_a_supposed_model(served, capsys, tmp_path):
    file = tmp_path / "peer.json"
    peer = served(recording())
    assert main(["probe", peer, "--save", str(file)]) == 0
    assert Recording.read(file).payloads == recording().payloads
    other = served(recording({**FACTORS, "model": "/b"}, silent=True))
    suppose = ["--suppose", "model=/b", "--suppose", "head_size=7"]
    assert main(["probe", other, "--against", str(file), *suppose, "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["against"]
    assert [each["name"] for each in found["differences"]] == ["model"]
    assert (found["basis"], found["compatible"]) == ("hash-explained", False)


def test_two_silent_peers():
    same = compare(recording(silent=True), recording(silent=True))
    assert (same.is_equal, same.basis) == (True, "hash")
    other = compare(recording(silent=True), recording({**FACTORS, "model": "b"}, silent=True))
    assert (other.suspects, other.is_compatible) == (("any hashed factor",), False)


def test_first_engine_stands_first_in_every_difference():
    ours, silent = recording(), recording({**FACTORS, "dtype": "torch.float16"}, silent=True)
    (forth,), (back,) = compare(ours, silent).differences, compare(silent, ours).differences
    assert (forth.local, forth.peer) == ("torch.bfloat16", "torch.float16")
    assert (back.local, back.peer) == ("torch.float16", "torch.bfloat16")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["probe", "nowhere"], 2),
        (["probe", "127.0.0.1:1", "--rank", "x"], 2),
        (["probe", "127.0.0.1:1", "--rank", "3-1"], 2),
        (["probe", "127.0.0.1:1", "--vllm", "0.19"], 2),
        (["probe", "127.0.0.1:1", "--secret-key", "x"], 2),
        (["probe", "127.0.0.1:1", "--json"], 3),
        (["probe", "no-such-host.invalid:1"], 3),
        (["serve", "no-such-file"], 2),
    ],
)
def test_exit_codes(arguments, code, capsys):
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"] if "--json" in arguments else printed.err.startswith("kv-handshake: ")


def test_refusals_and_bad_supposition(served, capsys):
    peer = served(Recording(14, sample_envelopes()))
    assert main(["probe", peer, "--rank", "9"]) == 4
    assert main(["probe", peer, "--against", peer, "--suppose", "model"]) == 2
    assert "unknown-rank" in capsys.readouterr().err


def test_questions_that_would_end_a_listener_of_vllm_are_announced(served, capsys):
    peer = served(Recording(14, sample_envelopes([(0, 0), (0, 1)])))
    assert main(["probe", peer]) == 0
    assert "give --vllm" in capsys.readouterr().err
    assert main(["probe", peer, "--vllm", "0.32"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["probe", peer, "--vllm", "0.32", "--rank", "0-1"]) == 0
    assert "a rank that it does not serve; 2 ranks" in capsys.readouterr().err


def test_probe_with_keys(serve, tmp_path):
    for name in ("server", "own"):
        assert main(["keygen", str(tmp_path), name]) == 0
    assert main(["keygen", str(tmp_path), "own", "--json"]) == 2
    security = ServerSecurity.read(tmp_path / "server.key_secret", admits_any_client=True)
    listener = serve(security=security)
    keys = ["--secret-key", tmp_path / "own.key_secret", "--server-key", tmp_path / "server.key"]
    assert main(["probe", f"127.0.0.1:{listener.port}", *map(str, keys)]) == 0


def test_serve_serves_a_recording_until_it_is_interrupted(capsys, tmp_path):
    file = tmp_path / "engine.json"
    recording().write(file)
    command = (
        "import signal, sys; from kv_handshake.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", command, "serve", str(file), "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as server:
        port = json.loads(server.stdout.readline())["port"]
        assert main(["probe", f"127.0.0.1:{port}"]) == 0
        assert main(["serve", str(file), "--port", str(port)]) == 2
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


def test_vectors_are_printed(capsys):
    assert main(["vectors"]) == 0
    printed = capsys.readouterr().out
    assert "envelope-vllm-v14" in printed
    assert len(printed.splitlines()) == len(load_vectors()), "a line a vector"
    assert all(each.data.hex() in printed for each in load_vectors()), "nothing is cut off or broken"
    assert main(["vectors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1


GOOD = '{"format": "kv-handshake-recording", "version": 1, "dialect": 14, "ranks": [%s]}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        GOOD % "",
        GOOD.replace("14", "99") % '{"pp": 0, "tp": 0, "envelope": "gKE="}',
        GOOD % '{"pp": 0, "tp": 0, "envelope": "no base64"}',
        GOOD % '{"pp": -1, "tp": 0, "envelope": ""}',
        GOOD.replace("1,", "2,") % '{"pp": 0, "tp": 0, "envelope": ""}',
        "[" * 5000,
    ],
)
def test_bad_recordings(tmp_path, text):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        Recording.read(file)
    assert caught.value.code == "invalid-recording"
