"""Third-party models: each type trains here as in transformers, or is refused for a reason that is true.

`docs/reference/models.md` is made by the same code and lists the outcome for each type.
"""

from __future__ import annotations

import pytest
from model_zoo import TYPES, look_at
from processes import run_everywhere

MOST_USED = ["bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "llama", "mamba", "mistral", "mixtral", "mpt", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe"]  # fmt: skip

NOT_BUILT = ("dots3_note", "gemma4_assistant")
"""Wrappers, of images and of another model's drafts, whose parts cannot be made small together."""


@pytest.mark.parametrize("model_type", MOST_USED)
def test_a_type_trains_as_in_transformers(model_type: str) -> None:
    """Loss to 1e-6 and every gradient to 1e-5, packed rows too."""
    (found,) = run_everywhere(lambda: look_at(model_type))
    print(found)
    assert not found.wrong
    assert found.outcome == "trains"
    assert found.packs == (model_type not in ("bloom", "mamba")), (
        "whose positions or states run on from document to document"
    )
    assert found.adapters == (model_type != "mamba"), "whose projections peft does not adapt"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in MOST_USED])
def test_a_type_trains_as_in_transformers_or_is_refused_for_a_true_reason(model_type: str) -> None:
    (found,) = run_everywhere(lambda: look_at(model_type))
    print(found)
    assert not found.wrong
    assert found.outcome in (("not built",) if model_type in NOT_BUILT else ("trains", "refused"))
