"""The user's configuration file where it cannot be read."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store import settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration file in a folder that everybody may search."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        file = Path(home, "kernelmark", "config.toml")
        file.parent.mkdir()
        file.write_text('home = "~/results"\n')
        os.chmod(home, 0o755)
        monkeypatch.delenv("KERNELMARK_CONFIG", raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", home)
        yield file
        os.seteuid(0)


def test_the_home_of_somebody_else_has_no_configuration_of_ours(written: Path) -> None:
    written.parent.chmod(0o700)
    os.seteuid(65534)
    assert settings.load() == settings.Settings()


def test_a_file_that_may_not_be_read_is_an_error(written: Path) -> None:
    written.chmod(0o600)
    os.seteuid(65534)
    with pytest.raises(InputError, match=r"config\.toml cannot be read: Permission denied"):
        settings.load()
