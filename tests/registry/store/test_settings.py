"""The user's configuration file where it cannot be read."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store import settings
from kernelmark.registry.store.home import Home

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


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


@root
def test_the_home_of_somebody_else_has_no_configuration_of_ours(written: Path) -> None:
    written.parent.chmod(0o700)
    os.seteuid(65534)
    assert settings.load() == settings.Settings()


@root
def test_a_file_that_may_not_be_read_is_an_error(written: Path) -> None:
    written.chmod(0o600)
    os.seteuid(65534)
    with pytest.raises(InputError, match=r"config\.toml cannot be read: Permission denied"):
        settings.load()


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as in a container that runs under a bare number."""

    def unknown(_: object) -> object:
        raise KeyError

    for name in ("HOME", "XDG_CONFIG_HOME", "KERNELMARK_CONFIG", "KERNELMARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_a_user_without_a_home_has_no_configuration(homeless: None) -> None:
    assert settings.load() == settings.Settings()


def test_a_home_that_is_nobodys_is_said(homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text('\ufeffhome = "~/results"\r\n', encoding="utf-8")
    monkeypatch.setenv("KERNELMARK_CONFIG", str(file))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="whose ~ that is is not known here"):
        Home()
