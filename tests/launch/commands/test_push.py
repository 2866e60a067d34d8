"""`fresco push`: what goes to the hub, by a client that stands in the place of the hub's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from launch.cli import main
from rl.store.digests import DIGESTS, write_digests


class Hub:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, name: str, **told: Any) -> None:
        self.calls.append((name, told))

    def upload_folder(self, **told: Any) -> None:
        self.calls.append(("upload", told))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model.parent / "run.json").write_text("{}")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    write_digests(model, model / DIGESTS)
    return model.parent


def test_the_model_of_a_run_goes_to_the_hub(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "me/my-model", "--private"]) == 0
    (name, made), (_, told) = hub.calls
    assert name == "me/my-model" and made == {"private": True, "exist_ok": True}
    assert told["folder_path"] == run / "model" and told["repo_id"] == "me/my-model"
    assert told["ignore_patterns"] == [DIGESTS]
    assert "https://huggingface.co/me/my-model" in capsys.readouterr().out

    assert main(["push", str(run / "model"), "me/my-model"]) == 0
    assert hub.calls[2][1]["private"] is False


def test_what_is_no_whole_model_is_not_pushed(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model" / "model.safetensors").write_bytes(b"other")
    assert main(["push", str(run), "me/my-model"]) == 2
    assert "model.safetensors was damaged or removed since the model was exported" in capsys.readouterr().err
    (run / "model" / "config.json").unlink()
    assert main(["push", str(run), "me/my-model"]) == 2
    assert "has no model: a run writes" in capsys.readouterr().err and not hub.calls


@pytest.mark.parametrize("name", ["me", "", "me/my/model", "me /model", "https://huggingface.co/me/model"])
def test_a_name_that_no_hub_has_is_not_asked_for(name: str, run: Path, hub: Hub, capsys: Any) -> None:
    assert main(["push", str(run), name]) == 2
    assert f"{name!r} is no OWNER/NAME of the hub" in capsys.readouterr().err and not hub.calls


class Unreachable(Exception):
    """As what an HTTP client raises without a network: no OSError."""


@pytest.mark.parametrize("kind", [OSError, Unreachable])
def test_what_the_hub_refuses_is_one_line(
    kind: type[Exception], run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(name: str, **told: Any) -> None:
        raise kind("401 Client Error.\nInvalid username or password.")

    monkeypatch.setattr(hub, "create_repo", refuse)
    assert main(["push", str(run), "me/my-model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"fresco: 'me/my-model': the hub did not take it ({kind.__name__}: 401 Client Error. Invalid"
    )
