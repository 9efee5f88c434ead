"""Skips for releases of transformers in which a model or a template is still wrong; a run refuses such a model by itself."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version


def needs_transformers(release: str, why: str) -> None:
    """Skip the test before this release, for the reason `why`."""
    if Version(transformers.__version__) < Version(release):
        pytest.skip(f"transformers before {release}: {why}")
