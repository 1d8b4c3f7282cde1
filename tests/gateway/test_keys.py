"""The file of API keys: how keys are compared, when it is read, what is refused in it."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest
from api_keys import KEY, OTHER, line, write_keys

from gateway.config import GatewayConfig
from gateway.keys import KeyFile, digest_of, main, parse_keys
from gateway.main import Gateway
from nightjar.errors import ConfigError


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with two keys."""
    return write_keys(tmp_path)


def test_every_key_is_compared_in_constant_time(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever key matches, or none: all hashes are compared, whole, by compare_digest."""
    known = KeyFile(str(keys))
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, stored: bytes) -> bool:
        compared.append((given, stored))
        return original(given, stored)

    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    stored = [digest_of(KEY.encode()), digest_of(OTHER.encode())]
    for key, name in ((KEY, "alice"), (OTHER, "bob"), ("wrong", None), ("", None)):
        compared.clear()
        assert known.name_of(key.encode()) == name
        assert compared == [(digest_of(key.encode()), digest) for digest in stored]


def test_bad_file_changes_nothing_and_an_empty_one_lets_nobody_in(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad or vanished file is complained about once, and the keys of before count."""
    known = KeyFile(str(keys))
    for spoil in (lambda: keys.write_text("dave nonsense\n"), keys.unlink):
        spoil()
        capsys.readouterr()
        known.reload()
        known.reload()
        assert capsys.readouterr().out.count("the keys of before still count") == 1
        assert known.name_of(KEY.encode()) == "alice"
    keys.write_text("")
    known.reload()
    assert known.name_of(KEY.encode()) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("alice\n", "line 1: must be a name"),
        ("\n# a\nalice " + "0" * 63 + "\n", "line 3: must be a name"),
        ("a/b " + "0" * 64, "line 1: must be a name"),
        (line("alice", "1") + line("alice", "2"), "line 2: the name 'alice' stands above"),
        (line("alice", "1") + line("bob", "1"), "line 2: this key stands above"),
    ],
)
def test_bad_line_is_refused_by_number(tmp_path: Path, content: str, problem: str) -> None:
    """The sentence names flag, file, line and what is wrong with it."""
    path = tmp_path / "api-keys"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        KeyFile(str(path))
    assert str(refused.value).startswith(f"--api-keys={str(path)!r}: {problem}")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A gateway that was told of keys never starts without them."""
    config = GatewayConfig(workers=("127.0.0.1:1",), api_keys=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--api-keys=.*none': No such file"):
        Gateway(config)


def test_keygen_makes_a_line_and_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Its line holds the hash of its key, not the key; each key is new, of 32 random bytes."""
    seen = set()
    for name in ("alice", "bob@example.org"):
        assert main([name]) == 0
        out, err = capsys.readouterr()
        key = err.strip().rpartition(" ")[2]
        assert parse_keys("api-keys", out.encode()) == [(name, digest_of(key.encode()))]
        assert len(key) == 43
        assert key not in out
        seen.add(key)
    assert len(seen) == 2
    with pytest.raises(ConfigError, match="must be 1 to 64"):
        main(["a b"])
