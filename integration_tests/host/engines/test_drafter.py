"""Engines whose drafter has a cache of its own (EAGLE): its pages are handed over with those of the model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from fleets import COMPUTED, FAILED, TRANSFERS, VLLM, ours, prompt, started_fleet

from kvdev.engines import local_model

DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
MAKE = """
import json, pathlib, sys, torch, transformers
from safetensors.torch import save_file
target, folder = map(pathlib.Path, sys.argv[1:])
config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
torch.manual_seed(21)
model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config)).to(torch.float32)
state = {name.removeprefix("model."): value.clone() for name, value in model.state_dict().items()}
weights = {name: value for name, value in state.items() if name.startswith("layers.")}
del weights["layers.0.input_layernorm.weight"]
size = config["hidden_size"]
weights["fc.weight"] = torch.cat([torch.eye(size), torch.randn(size, size) * 0.02], dim=1).contiguous()
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
(folder / "config.json").write_text(json.dumps(config))
for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    (folder / name).write_bytes((target / name).read_bytes())
"""
"""Makes a drafter of one layer with random weights from a Llama of the host's, as vLLM loads EAGLE's: a layer and `fc`."""


@pytest.mark.proves("drafter: equal ranks")
@pytest.mark.skipif(not os.environ.get("KVDEV_LONG"), reason="long: dev.py test --long host; more engines start")
def test_a_drafters_own_cache_is_handed_over_too(tmp_path: Path) -> None:
    python, model = local_model(Path(os.environ["KVDEV_UV"]), "dense", VLLM)
    subprocess.run([python, "-c", MAKE, model, tmp_path], check=True, timeout=300)
    drafter = json.dumps({"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 2})
    arguments = {name: ["--speculative-config", drafter] for name in ("one", "two")}
    with started_fleet("dense", {"one": ours(), "two": ours()}, arguments=arguments) as fleet:
        fleet.let_connect("one", "two")
        before = fleet.count("two", TRANSFERS)
        computed = fleet.count("two", COMPUTED, source="local_compute")
        texts = [prompt(10 + number, 20 + 15 * number) for number in range(10)]
        for text in texts:
            # Each by itself: the drafts of a batch change how its tokens are computed.
            assert fleet.answers([text], prefill="one", decode="two") == fleet.answers([text], decode="one")
        assert fleet.count("two", TRANSFERS) - before == len(texts)
        assert fleet.count("two", COMPUTED, source="local_compute") <= computed + len(texts)
        assert fleet.count("two", FAILED) == 0
        assert fleet.count("two", DRAFTED) > 0
        fleet.assert_all_blocks_free()
