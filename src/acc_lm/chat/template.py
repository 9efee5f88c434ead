"""Chat templates: load, try on one exchange, render."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc_lm.chat.records import Message, shown
from acc_lm.errors import ConfigError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The end token, which no text can spell, closes every turn, so a text cannot forge the role at the start of a turn.
# A start token is written if the model has a separate one, as its tokenizer would for plain text.
PLAIN_TEMPLATE = """\
{%- if bos_token is defined and bos_token != eos_token %}{{ bos_token }}{% endif %}
{%- if tools %}{{ 'tools:\\n' + tools | tojson + eos_token + '\\n' }}{% endif %}
{%- for message in messages %}
    {{- message.role + ':\\n' + (message.content or '') }}
    {%- if message.tool_calls %}{{ '\\ncalls:\\n' + message.tool_calls | tojson }}{% endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}
"""
OWN = "the tokenizer's chat template"
DAY = "chat_template_date"
"""Key of tokenizer_config.json that stores the date of the run, for users of the exported model."""
TRIAL_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class ChatTemplate:
    text: str
    """Jinja source of the template."""
    origin: str
    """Origin of the template for error messages: a file, or the tokenizer."""
    end_token: str
    """Token that ends an assistant's turn."""
    after_end: str
    """Text after the end token at the end of a conversation; not a target, because generation has stopped before it."""
    control_tokens: re.Pattern[str]
    """Special tokens, which only the template may write."""
    day: str
    """Date that the template receives when it asks for the time, as YYYY-MM-DD."""
    tool_use: str | None = None
    """Jinja source of the tokenizer's template for conversations with tools; None: `text` is used for them too."""

    @property
    def reads_clock(self) -> bool:
        """True if the output of this template can depend on the date."""
        return reads_clock(self.text + (self.tool_use or ""))


def reads_clock(text: str) -> bool:
    """True if the output of a template with this source can depend on the date."""
    return "strftime_now" in text


def load_template(tokenizer: PreTrainedTokenizerBase, file: str | None = None, day: str | None = None) -> ChatTemplate:
    """Load the template of a file, else the tokenizer's own, else `PLAIN_TEMPLATE`, and try it on one exchange.

    Args:
        day: date for a template that reads the clock, as YYYY-MM-DD; None: the date stored in the tokenizer, else today's.

    Raises:
        ConfigError: the template is missing, is not Jinja, or its output cannot be learned exactly.
    """
    day = day or day_of(tokenizer) or date.today().isoformat()
    own = tokenizer.chat_template
    if file is not None:
        return try_template(read_template(file), file, day, tokenizer)
    if not own:
        return try_template(PLAIN_TEMPLATE, "acc-lm's chat template", day, tokenizer)
    if not isinstance(own, dict):
        return try_template(own, OWN, day, tokenizer)
    if "default" not in own:
        raise ConfigError(
            f"the tokenizer must have a chat template named default, got {', '.join(map(repr, sorted(own)))}; "
            "set data.chat_template to a file with the one to use"
        )
    return replace(try_template(own["default"], OWN, day, tokenizer), tool_use=own.get("tool_use"))


def day_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Date of the run that trained this tokenizer's model, stored in its configuration; None if there is none."""
    day: str | None = tokenizer.init_kwargs.get(DAY)
    return day


def try_template(
    text: str,
    origin: str,
    day: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: tuple[Mapping[str, Any], ...] | None = None,
) -> ChatTemplate:
    """Try a template on one exchange, which shows how it ends a turn.

    Raises:
        ConfigError: the template is not Jinja, or its output cannot be learned exactly.
    """
    added = [token for token in tokenizer.added_tokens_decoder.values() if not token.content.isspace()]
    draft = ChatTemplate(text, origin, "", "", _any_of([token.content for token in added if token.special]), day)

    # Render one assistant's turn to find the token that ends it. The answer is a word that no template contains.
    answer = "answerofthetrial"
    asked: tuple[Message, ...] = ({"role": "user", "content": "question"},)
    trial = asked + ({"role": "assistant", "content": answer},)
    try:
        prompt = render(trial[:1], tools, tokenizer, draft, add_generation_prompt=True)
        whole = render(trial, tools, tokenizer, draft, add_generation_prompt=False)
    except TemplateError as error:
        raise ConfigError(f"{error}; correct it, or set data.chat_template to another file") from None
    ending = whole.partition(answer)[2]
    end = _any_of([token.content for token in added]).search(ending)
    if end is None:
        raise ConfigError(
            f"{origin} must end an assistant's turn with a special token of the tokenizer, got {shown(ending)}; "
            "set data.chat_template to a file that does"
        )
    if not whole.startswith(prompt):
        raise ConfigError(
            f"{origin} must begin an assistant's turn with the generation prompt, got {shown(prompt)} and "
            f"{shown(whole)}; set data.chat_template to a file that does"
        )
    special = {token.content for token in added if token.special} | {end[0]}
    return ChatTemplate(text, origin, end[0], ending[end.end() :], _any_of(special), day)


def read_template(file: str) -> str:
    """Read the text of a template file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"data.chat_template must be a template file, got {file!r} ({reason})") from None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class TemplateError(Exception):
    """Error of a template that cannot write a conversation; the message names the template's line."""


def render(
    messages: tuple[Message, ...],
    tools: tuple[Mapping[str, Any], ...] | None,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    *,
    add_generation_prompt: bool,
) -> str:
    def render(messages: list[Message]) -> Any:
        return tokenizer.apply_chat_template(
            messages,  # type: ignore[arg-type]
            tools=None if tools is None else list(tools),  # type: ignore[arg-type]
            chat_template=template.text,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    try:
        with _on_the_day(template):
            try:
                rendered = render(list(messages))
            except Exception:
                if all("content" in message for message in messages):
                    raise
                # A message with tool calls may lack content, which some templates require.
                rendered = render([{"content": ""} | message for message in messages])
    except Exception as error:  # a template is a program and can raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        where = f"{template.origin}:{line}" if line else template.origin
        raise TemplateError(f"{where} must write the conversation, got: {first_line(error)}") from None
    return str(rendered)


@contextmanager
def _on_the_day(template: ChatTemplate) -> Iterator[None]:
    """Render with the template's clock fixed at midnight of its day."""
    if not reads_clock(template.text):
        yield
        return
    from transformers.utils.chat_template_utils import _compile_jinja_template

    known = _compile_jinja_template(template.text).environment.globals
    now = known["strftime_now"]
    known["strftime_now"] = datetime.fromisoformat(template.day).strftime
    try:
        yield
    finally:
        known["strftime_now"] = now
