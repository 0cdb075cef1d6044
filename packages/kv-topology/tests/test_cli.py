"""The command line: tables, JSON, exit codes, and bad specifications."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kv_topology.tools import cli
from kv_topology.tools.report import survey
from kv_topology.tools.spec import load_spec, model_from_config, parse_spec

EXAMPLES = Path(__file__).parents[1] / "examples"
SPECS = sorted(path for path in EXAMPLES.iterdir() if "config" not in path.name)


def main(words):
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return ended.value.code


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.name)
def test_examples_plan(spec, capsys):
    assert main(["plan", str(spec)]) == 0
    text = capsys.readouterr().out
    assert "readers per producer rank" in text
    assert main(["plan", str(spec), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    run = load_spec(spec)
    assert len(report["plans"]) == run.consumer.tp
    found = survey(run)
    for entry in report["plans"]:
        plan = found.plans[tuple(entry["consumer_rank"])]
        assert [tuple(p["rank"]) for p in entry["producers"]] == list(plan.producer_ranks)
        groups = [group for producer in entry["producers"] for group in producer["groups"]]
        per_token = sum(row[6] / g["unit_tokens"] for g in groups if g["unit_tokens"] for row in g["slices"])
        assert per_token == pytest.approx(entry["bytes_per_token"])


def test_table_of_the_grouped_query_example(capsys):
    assert main(["plan", str(EXAMPLES / "gqa_tp4_from_tp2.toml"), "--rank", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.strip().startswith("0/3"))
    assert row.split()[:6] == ["0/3", "0/1", "-", "direct", "32768", "4.000"]
    assert not any(line.strip().startswith("0/2") for line in lines)
    assert lines[-1] == "no warnings"


def run_of(**sections):
    data = {"model": {"layers": 2, "kv_heads": 2, "head_dim": 64}, "consumer": {}, "producer": {}, **sections}
    return survey(parse_spec(data, EXAMPLES))


def test_warnings():
    assert run_of().warnings() == []
    tiny = run_of(model={"layers": 1, "kv_heads": 1, "head_dim": 8}).warnings()
    assert tiny == ["tiny descriptors: slices as small as 512 bytes; larger blocks or equal layouts help"]
    replicas = run_of(model={"layers": 2, "latent_dim": 512}, producer={"tp": 4}).warnings()
    assert replicas == ["replicas without readers, only notified: tp1, tp2, tp3"]
    shared = run_of(model={"layers": 2, "latent_dim": 512}, consumer={"tp": 4}).warnings()
    assert shared == ["replicated reads: every byte is read 4.00 times, by ranks that share it"]
    uneven = run_of(model={"layers": 1, "kv_heads": 8, "head_dim": 128}, consumer={"tp": 2}, producer={"tp": 3})
    assert uneven.warnings()[0].startswith("unequal load: producer ranks send 1024 to 1536")
    staged = run_of(consumer={"layout": "LBNHC"}, producer={"layout": "LBHNC"}).warnings()
    assert staged[-1] == "staged: consumer ranks tp0 permute pages after the read"


def test_estimates_follow_the_prices():
    found = run_of(link={"descriptor_us": 2.0, "bandwidth_gb_s": 1.0, "prompt_tokens": 160})
    plan = found.plans[0, 0]
    moved = 160 * 2 * 2 * 2 * 64 * 2
    assert found.transfer_ms(plan) == pytest.approx((20 * 2.0 + moved / 1e3) / 1e3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]", "layers"),
        ("model = 3", "model must be a table"),
        ("[model]\nlayers = 1\n[consumer]\ntp = 0", "consumer.tp is 0"),
        ("[model]\nlayers = 1\n[consumer]\ntp = 2000", "limit is 1024"),
        ("[model]\nlayers = 1\n[consumer]\ntp = true", "consumer.tp must be of type int"),
        ("[model]\nlayers = 1\n[consumer]\nblock_tokens = -4", "must not be negative"),
        ("[model]\nlayers = 1\n[consumer]\nspeed = 1", "no setting 'speed'"),
        ("[model]\nlayers = 1\n[consumer]\nkernel_block_tokens = 5", "does not divide"),
        ("[model]\nlayers = 1\n[consumer]", "producer must be a table"),
        ("[model]\nlayers = 1\n[consumer]\n[producer]\n[wire]", "no section 'wire'"),
        ("[model]\nlayers = 1\n[consumer]\n[producer]\n[link]\nbandwidth_gb_s = 0", "must be positive"),
        ("[model]\nkinds = ['tape']\n", "kinds"),
        ("[model]\nkinds = ['mamba2']\n[model.state]\nheads = 1\n", "incomplete"),
        ("no toml", "does not parse"),
        ("model = 'nowhere.json'", "nowhere.json"),
    ],
)
def test_bad_specifications(text, message, tmp_path, capsys):
    spec = tmp_path / "spec.toml"
    spec.write_text(text)
    assert main(["plan", str(spec)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nkinds = ['mamba2']\n[consumer]\n[producer]", "state-sizes-missing"),
        ("[model]\nlayers = 1\n[consumer]\nlayout = 'XYZ'\n[producer]", "bad-page-order"),
        ("[model]\nlayers = 1\n[consumer]\ntp = 3\ndcp = 2\n[producer]", "dcp-not-divisor"),
        ("[model]\nlayers = 1\nkv_heads = 0\n[consumer]\n[producer]", "size-out-of-range"),
        ("[model]\nlayers = 2\n[consumer]\npp = 3\n[producer]", "stage-without-layers"),
        ("[model]\nlayers = 1\n[consumer]\n[producer]\n[link]\nbandwidth_gb_s = nan", "finite"),
        ("[model]\nlayers = 1\nheads = 1\n[consumer]\n[producer]", "layers"),
    ],
)
def test_specifications_that_make_no_engine(text, message, tmp_path, capsys):
    spec = tmp_path / "spec.toml"
    spec.write_text(text)
    assert main(["plan", str(spec), "--json"]) == 2
    assert message in capsys.readouterr().err


def test_no_plan(tmp_path, capsys):
    spec = tmp_path / "spec.toml"
    spec.write_text("[model]\nlayers = 1\nkv_heads = 4\n[consumer]\n[producer]\ntp = 4\ndcp = 4")
    assert main(["plan", str(spec)]) == 3
    assert "no plan" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough():
    command = [sys.executable, "-m", "kv_topology", "plan", str(EXAMPLES / "granite_hybrid.json"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as begun:
        begun.stdout.read(1)
        begun.stdout.close()
        assert begun.stderr.read() == ""
        assert begun.wait(60) == 0


def test_other_refusals(tmp_path, capsys):
    spec = str(EXAMPLES / "gqa_tp4_from_tp2.toml")
    assert main(["plan", str(tmp_path / "none.toml")]) == 2
    assert main(["plan", spec, "--rank", "4"]) == 2
    assert main(["explain", spec, "--stage", "1"]) == 2
    assert capsys.readouterr().out == ""
    assert main([]) == 2


def test_as_a_program():
    done = subprocess.run([sys.executable, "-m", "kv_topology", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "exit codes" in done.stdout


def test_model_configurations():
    dense = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "torch_dtype": "float32"}
    model = model_from_config(dense)
    assert (model.kinds, model.kv_heads, model.head_dim, model.element_bytes) == (("attention",) * 2, 8, 64, 4)
    sliding = {**dense, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 77, "head_dim": 32}
    model = model_from_config({"text_config": sliding})
    assert (model.kinds, model.window_tokens, model.head_dim) == (("sliding", "attention"), 77, 32)
    latent = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    model = model_from_config(latent)
    assert (model.kinds, model.latent_dim, model.index_dim) == (("latent",), 576, 128)
    linear = {
        **dense,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }
    model = model_from_config(linear)
    assert (model.kinds, model.state.groups, model.state.heads) == (("gated-delta", "attention"), 4, 8)
    assert (model.state.state_dim, model.state.head_dim, model.state.conv_rows) == (32, 64, 3)
    hybrid = json.loads((EXAMPLES / "granite_hybrid.config.json").read_text())
    model = model_from_config(hybrid)
    assert model.group_kinds == ("mamba2", "attention")
    assert model.state.conv_rows == 3
