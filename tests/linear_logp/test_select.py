"""Which provider a path or a name means, and which failures of loading are an absence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from scoring import good, installed

from samebits.linear_logp import LinearLogp, LinearLogpProviderUnavailable, ProviderRejected, ProviderSettings
from samebits.linear_logp.errors import says_unavailable
from samebits.linear_logp.select import ENTRY_POINTS, OWN_PROVIDER, add_arguments, load_provider


def write_package(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> str:
    (home / name).mkdir()
    (home / name / "__init__.py").write_text("")
    (home / name / "inner.py").write_text(source)
    monkeypatch.syspath_prepend(str(home))
    return f"{name}.inner.provider"


def register(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, package: str = "one") -> None:
    info = home / f"{package}_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(home))


def test_flags_become_settings() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--linear-logp-provider", " a.b ", "--linear-logp-provider-mode", "strict"])
    assert ProviderSettings.from_args(args) == ProviderSettings(path="a.b", mode="strict")
    assert ProviderSettings.from_args(parser.parse_args([])) == ProviderSettings(path=None, mode="auto")


@pytest.mark.parametrize("path", [None, "", "  "])
def test_an_empty_path_is_no_provider(path: str | None) -> None:
    args = argparse.Namespace(linear_logp_provider=path, linear_logp_provider_mode=None)
    assert ProviderSettings.from_args(args).path is None
    assert not LinearLogp(ProviderSettings.from_args(args)).configured


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "lenient"}, "must be one of auto, strict, audit"),
        ({"route": "Q"}, "route must be"),
        ({"path": " "}, "is blank"),
        ({"path": "a.b", "mode": "strict", "route": "P"}, "declares production code"),
        ({"path": "a.b", "mode": "audit"}, "declare P"),
    ],
)
def test_settings_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProviderSettings(**changes)


def test_a_dotted_path_is_loaded() -> None:
    assert load_provider(installed(good)) is good
    assert load_provider(OWN_PROVIDER).__module__ == "samebits.linear_logp.provider"


def test_a_registered_name_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, monkeypatch, "mine", "samebits.linear_logp.provider:provider")
    assert load_provider("mine") is load_provider(OWN_PROVIDER)


def test_the_project_s_own_provider_is_registered() -> None:
    assert load_provider("samebits") is load_provider(OWN_PROVIDER)


def test_a_name_registered_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, monkeypatch, "twice", "samebits.linear_logp.provider:provider")
    register(tmp_path, monkeypatch, "twice", "samebits.bits:digest", package="another")
    with pytest.raises(ValueError, match="more than once"):
        load_provider("twice")


@pytest.mark.parametrize(
    "path",
    ["nowhere", "not_installed_at_all.provider", "samebits.linear_logp.provider.providr", "samebits.nope.x", ".."],
)
def test_what_is_not_there_is_unavailable(path: str) -> None:
    with pytest.raises(LinearLogpProviderUnavailable) as caught:
        load_provider(path)
    assert says_unavailable(caught.value)


def test_a_missing_dependency_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_package(tmp_path, monkeypatch, "needs_more", "import a_package_that_nobody_has\n")
    with pytest.raises(LinearLogpProviderUnavailable, match="a_package_that_nobody_has"):
        load_provider(path)


@pytest.mark.parametrize(
    ("name", "source", "error"),
    [
        ("own_module_missing", "from own_module_missing import gone\n", ImportError),
        ("own_file_missing", "import own_file_missing.gone\n", ModuleNotFoundError),
        ("import_raises", "raise AttributeError('typo')\n", AttributeError),
        ("syntax", "def provider(:\n", SyntaxError),
    ],
)
def test_a_bug_at_import_is_no_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, error: type[Exception]
) -> None:
    path = write_package(tmp_path, monkeypatch, name, source)
    for mode in ("auto", "strict"):
        with pytest.raises(error) as caught:
            LinearLogp(ProviderSettings(path=path, mode=mode))  # type: ignore[arg-type]
        assert not says_unavailable(caught.value)


def test_something_that_cannot_be_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_package(tmp_path, monkeypatch, "not_callable", "provider = 3\n")
    with pytest.raises(TypeError, match="must be callable, got int"):
        LinearLogp(ProviderSettings(path=path))


def test_auto_goes_native_when_nothing_can_be_imported(caplog: pytest.LogCaptureFixture) -> None:
    dispatch = LinearLogp(ProviderSettings(path="not_installed_at_all.provider"))
    assert not dispatch.configured
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_strict_refuses_when_nothing_can_be_imported() -> None:
    with pytest.raises(ProviderRejected, match=r"not_installed_at_all\.provider.*unavailable"):
        LinearLogp(ProviderSettings(path="not_installed_at_all.provider", mode="strict"))


def test_a_provider_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from pathlib import Path\n"
    source += f"with Path({str(tmp_path / 'log')!r}).open('a') as log: log.write('x')\n"
    source += "from scoring import good as provider\n"
    path = write_package(tmp_path, monkeypatch, "counted", source)
    from scoring import native, request

    dispatch = LinearLogp(ProviderSettings(path=path, mode="strict"))
    for _ in range(3):
        dispatch(request(), native)
    assert (tmp_path / "log").read_text() == "x"
    assert dispatch.calls == {"provider": 3, "native": 0}
