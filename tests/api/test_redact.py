"""What counts as a secret, and texts without them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api import redact
from areal.api.redact import HIDDEN, hide_secrets, is_secret, remember_secret, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "judge_api_key",
        "apiKey",
        "OPENAI_API_KEY",
        "HF_TOKEN",
        "GITHUB_TOKEN",
        "AREAL_SERVER_TOKEN",
        "token",
        "password",
        "db_password",
        "PGPASSWORD_PASSWORD",
        "client_secret",
        "AWS_SECRET_ACCESS_KEY",
        "private_key",
        "AREAL_ADMIN_API_KEY",
        "credentials",
        "auth_token",
        "accessToken",
        "OPENAI_KEY",
        "openai_key",
        "GH_PAT",
        "gh_pat",
        "AZURE_DEVOPS_EXT_PAT",
        "DB_PASS",
        "db_pass",
        "SMTP_PASS",
        "MYSQL_PWD",
        "PGPASSWORD",
        "REDISCLI_AUTH",
        "SENTRY_DSN",
        "SLACK_WEBHOOK",
        "SOME_VENDOR_KEY",
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name, "something")


@pytest.mark.parametrize(
    "name",
    [
        "pad_token",
        "eos_token",
        "stop_token_ids",
        "max_new_tokens",
        "tokenizer_path",
        "TOKENIZERS_PARALLELISM",
        "key",
        "answer_key",
        "keyboard",
        "tokens_per_second",
        "path",
        "HOME",
        "experiment_name",
        "importance_sampling_level",
        "image_token",
        "per_token",
        "sort_key",
        "prompt_key",
        "PWD",
        "OLDPWD",
        "KEY",
        "first_pass",
        "num_pass",
        "pass_at_1",
        "PASS_RATE",
        "path",
        "PATH",
        "compass",
        "pattern",
        "KEYBOARD_LAYOUT",
        "LS_COLORS",
        "author",
    ],
)
def test_other_names(name):
    assert not is_secret(name, "something")


def test_a_url_with_a_password_is_a_secret():
    assert is_secret("HTTP_PROXY", "http://me:swordfish@proxy:8080")
    assert not is_secret("HTTP_PROXY", "http://proxy:8080/a:b@c")


def test_texts(monkeypatch):
    monkeypatch.setattr(redact, "_remembered", set())
    monkeypatch.setenv("SOME_API_KEY", "abcdefgh12345678")
    remember_secret("a token of the run")
    remember_secret("short")
    assert hide_secrets("x abcdefgh12345678, a token of the run, short") == (
        f"x {HIDDEN}, {HIDDEN}, short"
    )
    assert hide_secrets("Authorization: bearer abc.DEF-123_456=") == (
        f"Authorization: bearer {HIDDEN}"
    )
    assert hide_secrets("'sk-areal-0a1b-xyz_-9' failed") == f"'{HIDDEN}' failed"
    assert hide_secrets("see postgres://me:pw@host/db") == f"see postgres://{HIDDEN}@host/db"
    assert hide_secrets("nothing to see") == "nothing to see"


def test_trees_lose_secrets_by_name_and_by_value(monkeypatch):
    monkeypatch.setattr(redact, "_remembered", set())
    tree = {
        "judge": {"api_key": "k-1234567890", "tokens": [1, 2], "pad_token": "<pad>"},
        "also": ["k-1234567890 in a text", None, 1.5],
        "password": "",
        "token": ["t-1", "t-2"],
    }
    assert without_secrets(tree) == {
        "judge": {"api_key": HIDDEN, "tokens": [1, 2], "pad_token": "<pad>"},
        "also": [f"{HIDDEN} in a text", None, 1.5],
        "password": "",
        "token": [HIDDEN, HIDDEN],
    }
    assert hide_secrets("k-1234567890") == HIDDEN  # and it is known from now on


@given(st.text(alphabet="abcXYZ019-_.", min_size=8), st.text(), st.text())
def test_a_remembered_secret_never_shows(secret, before, after):
    remember_secret(secret)
    try:
        assert secret not in hide_secrets(f"{before}{secret}{after}").replace(HIDDEN, "")
    finally:
        redact._remembered.discard(secret)
