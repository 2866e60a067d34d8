"""One model for all rooms of the museum."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.learner.tiny_policies import save_tiny


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings: the learner exports the embedding as the head as well."""
    return save_tiny(tmp_path_factory.mktemp("museum"))
