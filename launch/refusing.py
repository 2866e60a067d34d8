"""What others refuse, told as bad configuration."""

from __future__ import annotations

from types import TracebackType

from rl.config.schema import ConfigError


class Refusing:
    """Within the block a ValueError, or one of `kinds`, is a ConfigError. where: the field and its value, with which
    its line begins; empty: it says so itself."""

    def __init__(self, where: str = "", *kinds: type[Exception]) -> None:
        self._begin = f"{where}: " if where else ""
        self._kinds = kinds or (ValueError,)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, self._kinds):
            raise ConfigError(f"{self._begin}{error}") from None
