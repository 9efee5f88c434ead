"""What may be shown or written down: no secret, and nothing that a terminal would act on."""

from __future__ import annotations

import io
import os
import re
import sys

HIDDEN = "***"
_WORDS = r"api[_-]?key|secret|passw(?:or)?d|credential|(?:access|private)[_-]?key"
SECRET_NAME = re.compile(rf"token$|{_WORDS}", re.IGNORECASE)
SECRET_VALUE = re.compile(rf"((?:token=|(?:{_WORDS})[\w-]*[\"']?(?:=|:\s+)|\bbearer\s+)[\"']?)[^\s\"']+", re.IGNORECASE)
URL_LOGIN = re.compile(r"(\w://)([^/?#\s\"']+)@")
SECRET_WORD = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,})")
"""Tokens that are known by how they begin: of the Hub, OpenAI and GitHub."""
SHORTEST_SECRET = 8  # characters; shorter values of the environment are words that may stand anywhere
# C0 and C1 controls, marks that change the direction of the text around them, and halves of characters.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def is_secret(name: str) -> bool:
    """Whether a key, an option or a variable of this name holds what nobody else may see."""
    return SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """`text` without logins in URLs, what is given to a secret name, and the secrets of this process's environment."""
    for name, value in os.environ.items():
        passwords = [login[2].rpartition(":")[2] for login in URL_LOGIN.finditer(value)]
        for secret in [value] * is_secret(name) + passwords:
            if len(secret) >= SHORTEST_SECRET:
                text = text.replace(secret, HIDDEN)
    text = SECRET_VALUE.sub(rf"\g<1>{HIDDEN}", URL_LOGIN.sub(rf"\g<1>{HIDDEN}@", text))
    return SECRET_WORD.sub(HIDDEN, text)


def redact_words(words: list[str]) -> list[str]:
    """A command line as `redact` leaves it, without what follows `--api-key` and its like either."""
    before = ["", *words]
    return [
        HIDDEN if option.startswith("--") and is_secret(option) else redact(word)
        for option, word in zip(before, words, strict=False)
    ]


def print_anything() -> None:
    """Let stdout and stderr spell out a character that the terminal's encoding lacks, instead of ending the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters spelt out, but for those in `keep`; without any it is one line."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)
