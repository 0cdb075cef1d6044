"""Odd files, settings and numbers for `kv-topology`: no traceback, a documented exit code, and JSON that is JSON."""

import copy
import dataclasses
import io
import json
import math
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from samples import LONG, sampled
from test_geometry import engine, junk

from kv_topology import RankGeometry, StageLayer, from_document, to_document
from kv_topology.errors import InvalidGeometry
from kv_topology.tools import cli
from kv_topology.tools.spec import load_spec, model_from_config, parse_spec, read_json, read_spec

EXAMPLE = Path(__file__).parents[1] / "examples" / "gqa_tp4_from_tp2.toml"
CODES = {int(each) for each in re.findall(r"^  (\d)  ", cli._EXIT_CODES, re.MULTILINE)}


class Stream(io.TextIOWrapper):
    """A stream of a program, whose bytes are kept."""

    def __init__(self, errors):
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding="utf-8", errors=errors)

    def text(self):
        self.flush()
        return self.kept.getvalue().decode()


def run(*words):
    """Run a command as a program is run; return its exit code, and what it says on both streams."""
    out, err = Stream("strict"), Stream("backslashreplace")
    with redirect_stdout(out), redirect_stderr(err):
        with pytest.raises(SystemExit) as stop:
            cli.main(list(words))
        code = int(str(stop.value.code))
    said, complained = out.text(), err.text()
    assert code in CODES
    if code:
        assert (said, bool(complained.strip())) == ("", True)
    elif "--json" in words:
        json.loads(said, parse_constant=pytest.fail)
    return code, said, complained


def places(value, at=()):
    below: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in below:
        yield (*at, key)
        yield from places(child, (*at, key))


def changed(value, place, odd):
    made = copy.deepcopy(value)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = odd
    return made


# ---------------------------------------------------------------------------------------------------------------- files

ODD_FILES = {
    "empty": b"",
    "no UTF-8": b"\xff\xfe\x00\x01",
    "Latin-1": b'model = "\xe9"',
    "zero bytes": b"\0" * 100,
    "prose": b"no specification",
    "half": b'{"model": ',
    "number": b"5",
    "null": b"null",
    "NaN": b"NaN",
    "list": b"[1]",
    "empty name": b'"" = 1',
    "empty name in JSON": b'{"": 1}',
    "surrogate": b'{"\\ud800": "\\ud800"}',
    "model of a surrogate": b'{"model": "\\ud800"}',
    "model of a zero byte": b'{"model": "a\\u0000b"}',
    "digits": b"1" * 5000,
    "digits inside": b'{"model": {"layers": ' + b"1" * 5000 + b"}}",
    "digits in TOML": b"[model]\nlayers = " + b"1" * 5000,
    "broken heading": b"[model]]\nlayers = 4",
    **{f"lists {depth}": b"[" * depth + b"]" * depth for depth in (40, 950, 200_000)},
    **{f"open lists {depth}": b"[" * depth for depth in (1000, 200_000)},
    **{f"objects {depth}": b'{"model":' * depth + b"1" + b"}" * depth for depth in (250, 5000)},
    **{f"lists in TOML {depth}": b"model = " + b"[" * depth + b"]" * depth for depth in (40, 900, 5000)},
    **{f"names in TOML {depth}": b".".join([b"model"] * depth) + b" = 1" for depth in (40, 3000)},
}
BY_TYPER = {"no name", "surrogate"}
"""Names that no file can have are refused with the other words of a command."""
READERS = [("plan",), ("plan", "--json"), ("plan", "--estimate", "--json"), ("explain",), ("explain", "--json")]


@pytest.fixture
def odd_files(tmp_path):
    """Write every odd file under both kinds of names, and others that name it as their model; return their paths."""
    (tmp_path / "folder.toml").mkdir()
    found = {
        "missing": "none.toml",
        "folder": "folder.toml",
        "no name": "a\0b.toml",
        "long name": "x" * 300,
        "surrogate": "\ud800",
    }
    for number, content in enumerate(ODD_FILES.values()):
        for suffix in ("toml", "json"):
            (tmp_path / f"odd{number}.{suffix}").write_bytes(content)
            found[f"odd{number}.{suffix}"] = f"odd{number}.{suffix}"
    for name, model in [*found.items()]:
        spec = {"model": model, "consumer": {"tp": 1}, "producer": {"tp": 1}}
        (tmp_path / f"of {name}.json").write_text(json.dumps(spec))
        found[f"of {name}"] = f"of {name}.json"
    return {name: str(tmp_path / file) for name, file in found.items()}


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_no_file_ends_a_command_with_a_traceback(reader, odd_files):
    for name, file in sampled(odd_files.items(), 80):
        code, _, complained = run(*reader, file)
        assert code == 2, name
        is_said = complained.startswith("kv-topology: invalid specification (spec-malformed): ")
        assert is_said or name in BY_TYPER, complained
        assert len(complained) < 1500, name


def test_readers_raise_their_own_error_alone(odd_files):
    for read in (read_json, read_spec, load_spec):
        for name, file in odd_files.items():
            try:
                read(Path(file))
            except InvalidGeometry as error:
                assert error.code == "spec-malformed", name


def test_what_is_wrong_is_said(tmp_path):
    for name, content, said in (
        ("a.json", b"[" * 5000, "is nested more than 32 levels deep."),
        ("a.json", b"\xff", "is no UTF-8 text: "),
        ("a.toml", b"model = " + b"[" * 40 + b"]" * 40, "is nested more than 32 levels deep."),
        ("a.toml", b"[model]\nlayers = 1000000000000000", "model needs layers (1 to 4096)"),
    ):
        (tmp_path / name).write_bytes(content)
        _, _, complained = run("plan", str(tmp_path / name))
        assert said in complained
    assert "none.toml cannot be read: No such file or directory." in run("plan", str(tmp_path / "none.toml"))[2]


# ------------------------------------------------------------------------------------------------------------- settings

ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**53, 2**63, 2**64, 10**15, 10**16, 10**400, -(10**400)),
    *(1.5, -0.0, 5e-324, 1e-9, 1e308, math.nan, math.inf, -math.inf, "", "x", "\ud800", "SD", "LBHNC", "latent"),
    *([], [1], [[]], ["attention"], [None], {}, {"a": 1}, {"heads": 1, "head_dim": 1, "state_dim": 1}),
]
SPEC = {
    "model": {
        "layers": 2, "kv_heads": 2, "head_dim": 16, "element_bytes": 2, "window_tokens": 32, "latent_dim": 0, "index_dim": 0,
    },
    "consumer": {
        "tp": 2, "pp": 1, "dcp": 1, "block_tokens": 16, "kernel_block_tokens": 0, "layout": "LBHNC", "block_count": 8,
        "interleave_tokens": 0, "conv_order": "DS", "base_address": 1 << 32,
    },
    "producer": {"tp": 1, "layout": "LBNHC"},
    "link": {
        "descriptor_us": 2.5, "bandwidth_gb_s": 9.0, "permute_gb_s": 10.0, "permute_launch_us": 20.0, "prompt_tokens": 256,
    },
}  # fmt: skip
HYBRID = {
    "model": {
        "kinds": ["attention", "mamba2", "sliding"], "kv_heads": 2, "head_dim": 16, "window_tokens": 32,
        "state": {
            "heads": 4, "head_dim": 8, "state_dim": 8, "groups": 2, "conv_rows": 3, "conv_element_bytes": 2,
            "state_element_bytes": 4,
        },
    },
    "consumer": {"tp": 2, "block_tokens": 16, "block_count": 8, "conv_order": "SD"},
    "producer": {"tp": 1, "block_tokens": 16, "block_count": 8},
}  # fmt: skip


BASES = {
    "dense": SPEC,
    **{kind: changed(HYBRID, ("model", "kinds", 1), kind) for kind in ("mamba1", "mamba2", "gated-delta")},
}


@settings(max_examples=400 if LONG else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    file.write_text(json.dumps(changed(base, place, odd)))
    reader = ("plan", "--estimate", "--json") if data is None else data.draw(st.sampled_from(READERS))
    run(*reader, str(file))


@pytest.mark.parametrize("base", BASES)
def test_no_setting_of_nothing_ends_a_command(base, tmp_path):
    for place in places(BASES[base]):
        (tmp_path / "spec.json").write_text(json.dumps(changed(BASES[base], place, 0)))
        run("plan", "--estimate", "--json", str(tmp_path / "spec.json"))


CONFIGS = {
    "dense": {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "head_dim": 64, "num_key_value_heads": 4},
    "sliding": {
        "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "sliding_window": 64, "torch_dtype": "float32",
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "latent": {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
    "hybrid": {
        "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "layers_block_type": ["mamba", "attention"],
        "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4,
    },
    "text": {"text_config": {"num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 512}},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_configuration_of_any_values_is_a_model_or_refused(name):
    taken = 0
    for place in places(CONFIGS[name]):
        for odd in ODD_VALUES:
            try:
                model_from_config(cast("Any", changed(CONFIGS[name], place, odd)))
                taken += 1
            except InvalidGeometry as error:
                assert error.code == "spec-malformed"
                assert len(str(error)) < 300
    model_from_config(cast("Any", CONFIGS[name]))
    assert taken


def test_numbers_are_finite_and_of_a_size_that_there_is():
    for odd in (math.nan, math.inf, 10**400, 10**16, 5e-324, -1, -(10**400)):
        with pytest.raises(InvalidGeometry, match=r"link\.descriptor_us must ") as caught:
            parse_spec({**SPEC, "link": {"descriptor_us": odd}}, Path())
        assert len(str(caught.value)) < 200


# -------------------------------------------------------------------------------------------------------------- numbers

ODD_NUMBERS = [
    *("nan", "inf", "-inf", "-1", "0", "1", "3", "1e3", "4294967296", "9" * 40, "9" * 400, "9" * 5000, "-" + "9" * 400),
    *("", " ", "x", "4_0", "0x10", "1,5", "\u0663\u0660", "--json"),
]
WORDS = {"plan": ("plan", str(EXAMPLE)), "explain": ("explain", str(EXAMPLE))}


def numeric_options():
    """Yield (command, option) of every option that takes a number."""
    for command in cli.app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if about and {int, float} & {kind, *get_args(kind)}:
                given_names = (
                    about[0].default,
                    *(about[0].param_decls or ()),
                )  # the first name stands where a default may
                words = [word for word in given_names if isinstance(word, str) and word.startswith("--")]
                yield command.name, words[0] if words else f"--{name.replace('_', '-')}"


NUMERIC = list(numeric_options())


def test_every_command_and_number_is_tried():
    assert set(NUMERIC) == {
        ("plan", "--rank"),
        ("explain", "--rank"),
        ("explain", "--stage"),
        ("explain", "--slices"),
    }
    assert {command.name for command in cli.app.registered_commands} == set(WORDS)


@pytest.mark.parametrize(("command", "option"), NUMERIC)
def test_no_number_ends_a_command_with_a_traceback(command, option):
    for number in ODD_NUMBERS:
        code, _, _ = run(*WORDS[command], option, number, "--json")
        assert code in {0, 2}


MADE = engine(2)[0, 1]
PARTS = st.sampled_from([value for value in vars(MADE).values() if isinstance(value, tuple)])
STAGES = st.lists(
    st.builds(StageLayer, junk | st.text(max_size=3), junk | st.integers(-1, 2), junk | st.just(("key",))).map(tuple)
    | st.builds(StageLayer, junk | st.text(max_size=3), junk | st.integers(-1, 2), junk | st.just(("key",)))
    | junk,
    max_size=2,
).map(tuple)


@settings(max_examples=300 if LONG else 100, deadline=None)
@given(
    st.sampled_from([each.name for each in dataclasses.fields(RankGeometry)]),
    junk | st.lists(junk).map(tuple) | PARTS | STAGES.map(lambda layers: (layers,)) | st.integers(-2, 5),
)
@example("stage_layers", (("a",),))
@example("stage_layers", ((StageLayer("a", 0, cast("Any", "key")),),))
@example("tp_size", 2.0)
@example("groups", [*MADE.groups])
def test_a_field_of_any_value_makes_a_geometry_or_is_a_coded_refusal(name, value):
    """A geometry that is accepted has the declared types: its document, with a type for each value, makes an equal one."""
    try:
        changed = dataclasses.replace(MADE, **{name: value})
    except InvalidGeometry as error:
        assert error.code
        return
    assert from_document(json.loads(json.dumps(to_document(changed)))) == changed
