"""Small stand-ins for what recipes name on the Hub: models of the same families, data sets with the same columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.headers import PUBLISHED, VOCABULARY

# As published: what the arithmetic of a recipe's memory is made from.
TINY = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
        "max_position_embeddings": 256, "vocab_size": 512}  # fmt: skip
FAMILY = {"HuggingFaceTB": "", "openai-community": "", "meta-llama": "llama3", "Qwen": "qwen3"}
"""Family of the chat template and tokens (tests/support/chat_templates.py); a base model's tokenizer has the tokens without the template."""


def make_hub(folder: Path, words: list[str]) -> Path:
    """A folder with `owner/name` for each model, tokenizer and data set that a recipe names."""
    from chat_templates import FAMILIES
    from test_chat import with_tokens
    from transformers import AutoConfig, AutoModelForCausalLM

    from acc_lm.config import TokenizerConfig
    from acc_lm.text.tokenizer import make_tokenizer

    for name in (*PUBLISHED, *VOCABULARY):
        owner = name.split("/")[0]
        tokenizer = make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), words)
        if FAMILY[owner]:
            tokenizer = with_tokens(tokenizer, FAMILIES[FAMILY[owner]])  # type: ignore[arg-type]
        if name not in ("Qwen/Qwen3-0.6B",):
            tokenizer.chat_template = None
        tokenizer.save_pretrained(folder / name)
        if name in PUBLISHED:
            shape = PUBLISHED[name] | TINY | ({"head_dim": 8} if "head_dim" in PUBLISHED[name] else {})
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(folder / name)
    for name, splits in datasets(words).items():
        (folder / name).mkdir(parents=True)
        for split, records in splits.items():
            lines = [json.dumps(record) + "\n" for record in records]
            (folder / name / f"{split}.jsonl").write_text("".join(lines))
    return folder


def datasets(words: list[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Records of each split, with the columns that the data set on the Hub has."""
    web = [
        {"text": text, "id": str(i), "dump": "CC", "url": "http://x", "date": "2024", "file_path": "s3://x", "language": "en",
         "language_score": 0.9, "token_count": 60, "score": 3.1, "int_score": 3}
        for i, text in enumerate(words)
    ]  # fmt: skip
    paragraphs = [{"text": text} for word in words for text in ("", f" {word} \n")]
    pairs = list(exchanges(words))
    empty = {"instruction": "What is missing?", "input": "", "output": ""}
    filled = [{"instruction": question, "input": given, "output": answer} for question, given, answer in pairs]
    talks = [
        {"full_topic": "Words", "messages": [
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello! How can I help you?"},
            {"role": "user", "content": question}, {"role": "assistant", "content": answer},
        ]} for question, _, answer in pairs[:48]
    ]  # fmt: skip
    return {
        "HuggingFaceFW/fineweb-edu": {"train": web},
        "emozilla/pg19": {
            split: [
                {"short_book_title": name, "publication_date": 1890, "url": "http://x", "text": " ".join(books)}
                for name, books in zip("abcdef", [words[number::6] for number in range(6)], strict=True)
            ]
            for split in ("train", "validation", "test")
        },
        "Salesforce/wikitext": {"train": paragraphs[:40], "validation": paragraphs[60:], "test": paragraphs[40:60]},
        "yahma/alpaca-cleaned": {
            "train": [{name: record[name] for name in ("output", "input", "instruction")} for record in filled]
        },
        "tatsu-lab/alpaca": {
            "train": [
                record | {"text": f"Below is ... {record['output']}"} for record in [*filled[:30], empty, *filled[30:]]
            ]
        },
        "HuggingFaceTB/smoltalk": {"train": talks[:40], "test": talks[40:]},
    }


def exchanges(words: list[str]) -> Iterator[tuple[str, str, str]]:
    """240 of (instruction, input, output); four in ten have an input."""
    for number in range(240):
        text = words[number % len(words)]
        given = text[:40] if number % 5 < 2 else ""
        yield f"{number}: what comes then?", given, text[40 : 60 + number % 60]
