"""Make a tiny model: `python make_model.py FAMILY DIRECTORY` (host environment).

All families but one have random weights and a byte-level tokenizer. `words` is trained for half a minute on this repository's
documentation: it learns its pages by heart, so that a greedy answer goes on as the page does. What matters for the demo is that
a person can read it, and see where a wrong byte in the cache leads it astray.
"""

from __future__ import annotations

import json
import re
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
# What `words` is made of.
ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/architecture.md", "docs/streaming.md", "docs/transfers.md", "docs/operate/drain.md")
PAGE_CHARACTERS = 4000
VOCABULARY = 1024
WINDOW_TOKENS = 288
BATCH = 2
STEPS = 300
TRAIN_WITHIN_S = 90.0
"""A machine that is busy with other things ends with fewer steps and a text that rambles."""
LEARNING_RATE = 6e-3
PROMPT_TOKENS = (250, 210, 170, 140)
"""More than a block of 128 each: the demo's control changes a byte of the first one. With 32 tokens of answer within a window."""


def build(family: str) -> transformers.PreTrainedModel:
    """Return a model of one family (models.toml) with seeded random weights."""
    families: dict[str, Any] = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
    own = families[family]
    like = families[own.pop("like")] if "like" in own else {}
    values = {**families["common"], **like, **own}
    # TOML has no null: the model has no rank of queries.
    values |= {"q_lora_rank": None} if values["model_type"] == "deepseek_v2" else {}
    torch.manual_seed(20)
    config = transformers.AutoConfig.for_model(
        values.pop("model_type"), **{k: values[k] for k in values if k != "about"}
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def tokenizer(text: str = "") -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, four special ones, and those trained on a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(text))
    raw.decoder = decoders.ByteLevel()
    if text:
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        raw.train_from_iterator([text], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return fast


def prose() -> str:
    """Return the paragraphs of the pages: no code, tables, headings, lists or marks."""
    return "\n".join(_prose_of((ROOT / page).read_text())[:PAGE_CHARACTERS] for page in PAGES)


def _prose_of(page: str) -> str:
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    kept = [" ".join(part.split()) for part in page.split("\n\n") if re.match(r"\w", part) and len(part) > 200]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", "\n".join(kept))
    return plain.replace("`", "").replace("*", "")


def trained_model(tokens: torch.Tensor) -> tuple[transformers.PreTrainedModel, int, float]:
    """Return a model that was trained on the tokens, the steps that took, and the last loss."""
    model = build("words").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began_s, steps, loss, done = time.monotonic(), 0, float("inf"), 0.0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (steps + 1) / 20) * max(0.05, 1 - done)
        starts = torch.randint(0, len(tokens) - WINDOW_TOKENS, (BATCH,)).tolist()
        window = torch.stack([tokens[start : start + WINDOW_TOKENS] for start in starts])
        result = model(input_ids=window, labels=window)
        optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps, loss = steps + 1, result.loss.item()
        done = max(steps / STEPS, (time.monotonic() - began_s) / TRAIN_WITHIN_S)
        if steps % 50 == 0:
            print(f"step {steps}: loss {loss:.2f} after {time.monotonic() - began_s:.0f} s", flush=True)
    return model.eval(), steps, loss


def prompts(tokens: torch.Tensor, tokenizer: transformers.PreTrainedTokenizerFast) -> list[str]:
    """Return parts of the text, from its whole length; each ends where a word does."""
    room = len(tokens) - max(PROMPT_TOKENS) - 64
    pieces = tokenizer.convert_ids_to_tokens(tokens.tolist())
    found: list[str] = []
    for number, length in enumerate(PROMPT_TOKENS):
        start = room * number // len(PROMPT_TOKENS)
        end = next(at for at in range(start + length, len(pieces)) if pieces[at].startswith("\u0120"))
        found.append(tokenizer.decode(tokens[start:end].tolist()).strip())
    return found


def main() -> None:
    """Write model, tokenizer, for `words` prompts, and a note."""
    family, folder = sys.argv[1], Path(sys.argv[2])
    note: dict[str, object] = {"family": family}
    if family == "words":
        # Threads of so small a model wait for one another most of the time, on a busy machine for seconds.
        torch.set_num_threads(1)
        text = prose()
        fast = tokenizer(text)
        tokens = torch.tensor(fast.encode(text, add_special_tokens=False))
        model, steps, loss = trained_model(tokens)
        (folder / "prompts.json").write_text(json.dumps(prompts(tokens, fast)))
        note |= {"steps": steps, "loss": round(loss, 3)}
    else:
        model, fast = build(family).to(torch.float32), tokenizer()
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    (folder / "made.json").write_text(json.dumps({**note, "parameters": model.num_parameters()}))


if __name__ == "__main__":
    main()
