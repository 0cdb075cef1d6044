"""The command line and its specifications: tables, JSON, exit codes, and odd files, settings and numbers without a traceback."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import LONG
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from odd_input import captured, places, put

from kv_topology import CostModel
from kv_topology.errors import InvalidGeometry
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, cli
from kv_topology.tools.cli import survey, warnings
from kv_topology.tools.spec import load_spec, model_from_config, parse_spec

EXAMPLES = Path(__file__).parents[1] / "examples"
EXAMPLE = Path(cli.__file__).with_name("example.toml")
README = (EXAMPLES.parent / "README.md").read_text()
SPECS = sorted(path for path in (*EXAMPLES.iterdir(), EXAMPLE) if "config" not in path.name)
CODES = {int(each) for each in re.findall(r"^  (\d)  ", cli._EXIT_CODES, re.MULTILINE)}


def run(*words):
    """Run a command as a program is run; return its exit code, and what it says on both streams."""

    def command():
        with pytest.raises(SystemExit) as stop:
            cli.main(list(words))
        return int(str(stop.value.code))

    code, said, complained = captured(command)
    assert code in CODES
    if code:
        assert (said, bool(complained.strip())) == ("", True)
    elif "--json" in words:
        json.loads(said, parse_constant=pytest.fail)
    return code, said, complained


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.name)
def test_examples_plan(spec):
    assert "readers per producer rank" in run("plan", str(spec))[1]
    report = json.loads(run("plan", str(spec), "--json")[1])
    loaded = load_spec(spec)
    assert len(report["plans"]) == loaded.consumer.tp
    found = survey(loaded)
    for entry in report["plans"]:
        assert [tuple(p["rank"]) for p in entry["producers"]] == list(
            found.plans[tuple(entry["consumer_rank"])].producer_ranks
        )


def test_a_producer_of_another_model_is_refused_by_code(tmp_path):
    spec, config = tmp_path / "pair.json", tmp_path / "float.config.json"
    config.write_text(json.dumps(DENSE))
    model = {"kv_heads": 8, "head_dim": 64, "layers": 2}
    for theirs, code in ((model, 0), ({**model, "layers": 1}, 3), ({**model, "element_bytes": 1}, 3), (config.name, 3)):
        pair = {"model": model, "consumer": {"tp": 2}, "producer": {"tp": 4, "model": theirs}}
        spec.write_text(json.dumps(pair))
        ended, _, complained = run("plan", str(spec))
        assert ended == code
        assert ("element-bytes-differ" in complained) == (theirs == config.name or "element_bytes" in theirs)


def test_the_readmes_commands_run_and_its_wrong_one_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^kv-topology .*$", README, re.MULTILINE):
        command, _, why = line.partition("#")
        words, _, file = command.partition(">")
        code, said, complained = run(*words.split()[1:])
        if file:
            Path(file.strip()).write_text(said)
        assert (code, "pear.toml" in complained) == ((2, True) if why else (0, False)), line
    assert Path("pair.toml").read_text() == EXAMPLE.read_text()


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_help_shows_the_format(command):
    said = [line.strip() for line in run(command, "--help")[1].splitlines()]
    assert [line for line in EXAMPLE.read_text().splitlines() if line not in said] == []


def test_an_estimate_has_one_duration_of_a_rank():
    *rows, _, summary = run("plan", str(EXAMPLE), "--estimate")[1].splitlines()
    assert {row.split()[-3] for row in rows[1:]} == set(re.findall(r"about (\S+) ms", summary)) == {"11.08"}


def test_the_slices_of_an_explanation_are_all_bytes_of_a_token():
    reported = json.loads(run("explain", str(EXAMPLE), "--slices", "1000", "--json")[1])
    slices = [each for producer in reported["producers"] for each in producer["first_slices"]]
    assert sum(each["length_bytes"] / each["unit_tokens"] for each in slices) == reported["bytes_per_token"] == 32768


def test_table_of_the_grouped_query_example():
    lines = run("plan", str(EXAMPLE), "--rank", "3")[1].splitlines()
    row = next(line for line in lines if line.strip().startswith("0/3"))
    assert row.split()[:6] == ["0/3", "0/1", "-", "direct", "32768", "4.000"]
    assert not any(line.strip().startswith("0/2") for line in lines)
    assert lines[-1] == "no warnings"


def test_an_explanation_names_shares_slices_and_both_kinds_of_plan():
    lines = run("explain", str(EXAMPLE), "--rank", "3", "--slices", "1")[1].splitlines()
    assert lines[0] == "consumer rank 0/3 holds head 6 to 7 of 8 (key, value)"
    assert lines[2:4] == [
        "from producer rank 0/1, which holds head 4 to 7 of 8 (key, value):",
        "  32768 bytes a token in 64 slices; it waits for 2 readers",
    ]
    assert lines[5] == "  and 63 more"
    assert lines[-1].startswith("direct: read directly 11.08 ms")


def run_of(**sections):
    data = {"model": {"layers": 2, "kv_heads": 2, "head_dim": 64}, "consumer": {}, "producer": {}, **sections}
    return survey(parse_spec(data, EXAMPLES))


LATENT_MODEL = {"layers": 2, "latent_dim": 512}


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        ({}, None),
        (
            {"model": {"layers": 1, "kv_heads": 1, "head_dim": 8}},
            "tiny descriptors: slices as small as 512 bytes; larger blocks or equal layouts help",
        ),
        ({"model": LATENT_MODEL, "producer": {"tp": 4}}, "replicas without readers, only notified: 0/1 0/2 0/3"),
        (
            {"model": LATENT_MODEL, "consumer": {"tp": 4}},
            "replicated reads: every byte is read 4.00 times, by ranks that share it",
        ),
        (
            {"model": {"layers": 1, "kv_heads": 8, "head_dim": 128}, "consumer": {"tp": 2}, "producer": {"tp": 3}},
            "unequal load: producer ranks send 1024 to 1536 bytes per token",
        ),
        (
            {"consumer": {"layout": "LBNHC"}, "producer": {"layout": "LBHNC"}},
            "staged: consumer ranks 0/0 permute pages after the read",
        ),
        ({"model": LATENT_MODEL, "consumer": {"tp": 2, "dcp": 2}, "producer": {"tp": 2, "dcp": 2}}, None),
        (
            {"consumer": {"layout": "LHBNC"}, "producer": {"layout": "LHBNC"}, "model": {"layers": 1, "head_dim": 999}},
            None,
        ),
    ],
)
def test_warnings(sections, warning):
    found = warnings(run_of(**sections))
    assert found == [] if warning is None else warning in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]", "layers"),
        ("model = 3", "model must be a table"),
        ("[model]\nlayers = 1\n[consumer]\ntp = 0", "consumer.tp is 0"),
        ("[model]\nlayers = 1\n[consumer]\ntp = 2000", "limit is 1024"),
        ("[model]\nlayers = 1\n[consumer]\ntp = true", "consumer.tp must be of type int"),
        ("[model]\nlayers = 1\n[consumer]\nblock_tokens = -4", "must be 0 or a finite number"),
        ("[model]\nlayers = 1\n[consumer]\nspeed = 1", "no setting 'speed'"),
        ("[model]\nlayers = 1\n[consumer]\nkernel_block_tokens = 5", "does not divide"),
        ("[model]\nlayers = 1\n[consumer]", "producer must be a table"),
        ("[model]\nlayers = 1\n[consumer]\n[producer]\n[wire]", "no section 'wire'"),
        ("[model]\nlayers = 1\n[consumer]\n[producer]\n[link]\nbandwidth_gb_s = 0", "must be a positive"),
        ("[model]\nkinds = ['tape']\n", "kinds"),
        ("[model]\nkinds = ['mamba2']\n[model.state]\nheads = 1\n", "incomplete"),
        ("no toml", "does not parse"),
        ("model = 'nowhere.json'", "nowhere.json"),
        ("[model]\nkinds = ['mamba2']\n[consumer]\n[producer]", "state-sizes-missing"),
        ("[model]\nlayers = 1\n[consumer]\nlayout = 'XYZ'\n[producer]", "bad-page-order"),
        ("[model]\nlayers = 1\n[consumer]\ntp = 3\ndcp = 2\n[producer]", "dcp-not-divisor"),
        ("[model]\nlayers = 1\nkv_heads = 0\n[consumer]\n[producer]", "size-out-of-range"),
        ("[model]\nlayers = 2\n[consumer]\npp = 3\n[producer]", "stage-without-layers"),
        ("[model]\nlayers = 1\n[consumer]\n[producer]\n[link]\nbandwidth_gb_s = nan", "finite"),
        ("[model]\nlayers = 1\nheads = 1\n[consumer]\n[producer]", "layers"),
        ("[model]\nlayers = 1000000000000000", "model needs layers (1 to 4096)"),
        ("[model]\nlayers = 1\n[consumer]\n[producer]\n[link]\ndescriptor_us = 1e16", "must be 0 or a finite number"),
        ("model = " + "[" * 40 + "]" * 40, "model must be a table, not a list of 1 items"),
        ("model = " + "[" * 5000, "is nested too deeply"),
    ],
)
def test_bad_specifications(text, message, tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text(text)
    code, _, complaint = run("plan", str(spec), "--json")
    assert code == 2
    assert message in complaint


def test_no_plan(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text("[model]\nlayers = 1\nkv_heads = 4\n[consumer]\n[producer]\ntp = 4\ndcp = 4")
    code, _, complaint = run("plan", str(spec))
    assert code == 3
    assert "no plan" in complaint


@pytest.mark.parametrize("words", [("plan", "--rank", "4"), ("explain", "--stage", "1")])
def test_ranks_and_stages_that_do_not_exist(words):
    assert run(*words, str(EXAMPLE))[0] == 2


# ---------------------------------------------------------------------------------------------------------------- files

ODD_FILES = [
    *(b"", b"\xff\xfe\x00\x01", b'model = "\xe9"', b"\0" * 100, b"prose", b'{"model": ', b"5", b"null", b"NaN", b"[1]"),
    *(
        b'"" = 1',
        b'{"": 1}',
        b'{"\\ud800": "\\ud800"}',
        b'{"model": "\\ud800"}',
        b'{"model": "a\\u0000b"}',
        b"[model]]\nlayers = 4",
    ),
    *(b"[model]]", b"1" * 5000, b'{"model": {"layers": ' + b"1" * 5000 + b"}}", b"[model]\nlayers = " + b"1" * 5000),
    *(b"[" * depth + b"]" * depth for depth in (40, 950, 200_000)),
    *(b'{"model":' * depth + b"1" + b"}" * depth for depth in (250, 5000)),
    *(b"model = " + b"[" * depth + b"]" * depth for depth in (40, 900, 5000)),
    *(b".".join([b"model"] * depth) + b" = 1" for depth in (40, 3000)),
]
READERS = [("plan",), ("plan", "--json"), ("plan", "--estimate", "--json"), ("explain",), ("explain", "--json")]


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_no_file_ends_a_command_with_a_traceback(suffix, tmp_path):
    for number, content in enumerate(ODD_FILES):
        odd, model_of = tmp_path / f"odd{number}.{suffix}", tmp_path / f"of{number}.json"
        odd.write_bytes(content)
        model_of.write_text(json.dumps({"model": odd.name, "consumer": {"tp": 1}, "producer": {"tp": 1}}))
        for file in (odd, model_of):
            code, _, complained = run(*READERS[number % len(READERS)], str(file))
            assert code == 2, content[:40]
            assert complained.startswith(f"kv-topology: invalid specification {file}: ")
            assert complained.count("(spec-malformed)") == 1
            assert len(complained) < 1500


@pytest.mark.parametrize("name", ["none.toml", "", "x" * 300 + ".toml", "a\0b.toml", "\ud800"])
def test_a_file_that_cannot_be_read_is_refused(name, tmp_path):
    code, _, complained = run("plan", str(tmp_path / name))
    assert code == 2
    assert name != "none.toml" or "none.toml: the file cannot be read: No such file or directory." in complained


# ------------------------------------------------------------------------------------------------------------- settings

ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**53, 2**63, 2**64, 10**15, 10**16, 10**400, -(10**400)),
    *(1.5, -0.0, 5e-324, 1e-9, 1e308, math.nan, math.inf, -math.inf, "", "x", "\ud800", "SD", "LBHNC", "latent"),
    *([], [1], [[]], ["attention"], [None], {}, {"a": 1}, {"heads": 1, "head_dim": 1, "state_dim": 1}),
]
MODEL = {"kv_heads": 2, "head_dim": 16, "window_tokens": 32}
SPEC = {
    "model": {**MODEL, "layers": 2, "element_bytes": 2, "latent_dim": 0, "index_dim": 0},
    "consumer": asdict(EngineSpec(2, block_count=8)),
    "producer": {"tp": 1, "layout": "LBNHC"},
    "link": asdict(CostModel(prompt_tokens=256)),
}
HYBRID = {
    "model": {**MODEL, "kinds": ["attention", "mamba2", "sliding"], "state": asdict(StateSpec(4, 8, 8, 2, 3))},
    "consumer": {"tp": 2, "block_tokens": 16, "block_count": 8, "conv_order": "SD"},
    "producer": {"tp": 1, "block_tokens": 16, "block_count": 8},
}
BASES = {
    "dense": SPEC,
    **{kind: put(HYBRID, ("model", "kinds", 1), kind) for kind in ("mamba1", "mamba2", "gated-delta")},
}


@settings(max_examples=400 if LONG else 60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([(base, place) for base in BASES.values() for place in places(base)]),
    st.sampled_from(ODD_VALUES),
    st.data(),
)
@example((SPEC, ("link", "prompt_tokens")), 10**400, None)
@example((SPEC, ("link", "bandwidth_gb_s")), 10**400, None)
@example((SPEC, ("link", "bandwidth_gb_s")), 5e-324, None)
@example((SPEC, ("link", "prompt_tokens")), 10**15, None)
@example((SPEC, ("model", "layers")), 10**15, None)
@example((SPEC, ("model", "kv_heads")), 10**15, None)
@example((SPEC, ("model", "head_dim")), 10**15, None)
@example((SPEC, ("consumer", "base_address")), 10**15, None)
@example((HYBRID, ("model", "state")), {"heads": 1, "head_dim": 1, "state_dim": 1}, None)
def test_a_setting_of_any_value_makes_a_plan_or_is_refused(tmp_path, base_and_place, odd, data):
    base, place = base_and_place
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(put(base, place, odd)))
    reader = ("plan", "--estimate", "--json") if data is None else data.draw(st.sampled_from(READERS))
    run(*reader, str(file))


DENSE = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "torch_dtype": "float32"}
SLIDING = {
    **DENSE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 77, "head_dim": 32,
    "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    **DENSE, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
INDEXED = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
GRANITE = json.loads((EXAMPLES / "granite_hybrid.config.json").read_text())
CONFIGS = [
    (DENSE, ModelSpec(("attention",) * 2, 8, 64, 4)),
    ({"text_config": SLIDING}, ModelSpec(("sliding", "attention"), 4, 32, 4, 77)),
    (INDEXED, ModelSpec(("latent",), latent_dim=576, index_dim=128)),
    (LINEAR, ModelSpec(("gated-delta", "attention"), 8, 64, 4, state=StateSpec(8, 64, 32, 4, 3, 4, 4))),
    (GRANITE, None),
    # Newer releases of transformers name its Mamba layers so.
    (
        {**GRANITE, "layer_types": [str(each).replace("mamba", "linear_attention") for each in GRANITE["layer_types"]]},
        None,
    ),
]


@pytest.mark.parametrize(
    "key", ["sliding_window", "full_attention_interval", "attn_layer_period", "multi_query", "is_encoder_decoder"]
)
def test_a_cache_that_is_not_known_is_refused(key):
    with pytest.raises(InvalidGeometry, match=f"'{key}', whose effect on the cache is not known"):
        model_from_config({**DENSE, key: 4})
    unused = {**DENSE, "sliding_window": 4, "use_sliding_window": False}
    assert model_from_config(unused) == model_from_config(DENSE)


@pytest.mark.parametrize(
    ("config", "model"), CONFIGS, ids=["dense", "sliding", "latent", "gated-delta", "mamba-2", "renamed"]
)
def test_a_models_configuration_of_any_values_is_a_model_or_refused(config, model):
    found = model_from_config(config)
    assert model is None or found == model
    assert model or (found.group_kinds, found.state.conv_rows) == (("mamba2", "attention"), 3)
    for place in places(config):
        for odd in ODD_VALUES:
            try:
                model_from_config(cast("Any", put(config, place, odd)))
            except InvalidGeometry as error:
                assert error.code == "spec-malformed"
                assert len(str(error)) < 300
