"""Train a tiny Llama on this repository's documentation: `python make_words.py DIRECTORY` (host environment, half a minute).

It learns its pages by heart, so that a greedy answer goes on as the page does. What matters for the demo is that a person can
read it, and see where a wrong byte in the cache leads it astray.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/architecture.md", "docs/streaming.md", "docs/transfers.md", "docs/operate/drain.md")
PAGE_CHARACTERS = 4000
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
VOCABULARY = 1024
WINDOW_TOKENS = 288
BATCH = 2
STEPS = 300
TRAIN_WITHIN_S = 90.0
"""A machine that is busy with other things ends with fewer steps and a text that rambles."""
LEARNING_RATE = 6e-3
PROMPT_TOKENS = (250, 210, 170, 140)
"""More than a block of 128 each: the demo's control changes a byte of the first one. With 32 tokens of answer within a window."""


def prose() -> str:
    """Return the paragraphs of the pages: no code, tables, headings, lists or marks."""
    return "\n".join(_prose_of((ROOT / page).read_text())[:PAGE_CHARACTERS] for page in PAGES)


def _prose_of(page: str) -> str:
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    kept = [" ".join(part.split()) for part in page.split("\n\n") if re.match(r"\w", part) and len(part) > 200]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", "\n".join(kept))
    return plain.replace("`", "").replace("*", "")


def trained_tokenizer(text: str) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the text's words and parts of them; any other text is spelt in bytes."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([text], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return fast


def trained_model(tokens: torch.Tensor) -> tuple[transformers.LlamaForCausalLM, int, float]:
    """Return a model that was trained on the tokens, the steps that took, and the last loss."""
    torch.manual_seed(20)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=3, head_dim=32, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
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
    """Write model, tokenizer, prompts and a note."""
    # Threads of so small a model wait for one another most of the time, on a busy machine for seconds.
    torch.set_num_threads(1)
    folder, text = Path(sys.argv[1]), prose()
    tokenizer = trained_tokenizer(text)
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    model, steps, loss = trained_model(tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "prompts.json").write_text(json.dumps(prompts(tokens, tokenizer)))
    note = {"family": "words", "parameters": model.num_parameters(), "steps": steps, "loss": round(loss, 3)}
    (folder / "made.json").write_text(json.dumps(note))


if __name__ == "__main__":
    main()
