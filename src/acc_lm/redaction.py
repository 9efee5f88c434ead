"""Text that may be printed or written: without secrets and terminal control characters."""

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
"""Tokens of the Hub, OpenAI and GitHub, which are recognised by their prefixes."""
SHORTEST_SECRET = 8  # characters; a shorter value of the environment may be an ordinary word that occurs anywhere
# C0 and C1 controls, line and paragraph separators, marks that change the direction of text, and lone surrogates.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def is_secret(name: str) -> bool:
    """Check whether a key, an option or a variable of this name holds a secret."""
    return SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """`text` without logins in URLs, values of secret names, known kinds of tokens and secrets of the environment."""
    for name, value in os.environ.items():
        passwords = [login[2].rpartition(":")[2] for login in URL_LOGIN.finditer(value)]
        for secret in [value] * is_secret(name) + passwords:
            if len(secret) >= SHORTEST_SECRET:
                text = text.replace(secret, HIDDEN)
    text = SECRET_VALUE.sub(rf"\g<1>{HIDDEN}", URL_LOGIN.sub(rf"\g<1>{HIDDEN}@", text))
    return SECRET_WORD.sub(HIDDEN, text)


def redact_words(words: list[str]) -> list[str]:
    """Command line as `redact` leaves it, also without the values after `--api-key` and similar options."""
    before = ["", *words]
    return [
        HIDDEN if option.startswith("--") and is_secret(option) else redact(word)
        for option, word in zip(before, words, strict=False)
    ]


def print_anything() -> None:
    """Let stdout and stderr escape a character that the terminal's encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters escaped, except those in `keep`; with an empty `keep` it is one line."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)
