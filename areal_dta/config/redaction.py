"""Secrets of a configuration, kept out of files, logs and loggers. A light import.

A value is secret if its name ends in key, token, secret or password, whatever section
or environment variable it belongs to, or if it is the password of a URL. Keys are best
taken from the environment: ``tau2.user.api_key=${oc.env:USER_MODEL_KEY}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

REDACTED: Final = "(redacted)"
_NAME = re.compile(r"(key|token|secret|password|passwd)\Z", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(\b[a-z][\w+.-]*://)[^/\s@'\"]+@", re.IGNORECASE)
# In running text, where "key=value" also explains what an override looks like.
_ASSIGNED = re.compile(
    r"((?:[\w.-]*(?:api|access|admin|auth|private|provider|secret)[_-]?key"
    r"|[\w.-]*(?:token|secret|password|passwd))\s*[=:]\s*['\"]?)([^\s'\",}]+)",
    re.IGNORECASE,
)
# The last is a public default of AReaL.
_NO_SECRETS = ("", "none", "null", "empty", "???", REDACTED, "areal-admin-key")
_MIN_CHARS = 4  # of a value that is looked for in texts: shorter ones are words


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value of this name is to be hidden."""
    return (
        isinstance(value, str)
        and _NAME.search(name) is not None
        and value.strip().lower() not in _NO_SECRETS
    )


def redacted(value: Any, name: str = "") -> Any:
    """Return a copy of nested dicts and lists in which secrets are `REDACTED`."""
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted(item, name) for item in value)
    if is_secret(name, value):
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without passwords of URLs, ``api_key=…`` and the given values."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = _URL_PASSWORD.sub(rf"\1{REDACTED}@", text)
    return _ASSIGNED.sub(rf"\1{REDACTED}", text)


def secret_values(value: Any, name: str = "") -> set[str]:
    """Return the secrets in nested dicts and lists, to be looked for in texts."""
    if isinstance(value, Mapping):
        parts = [secret_values(item, str(key)) for key, item in value.items()]
        return set().union(*parts)
    if isinstance(value, list | tuple):
        return set().union(*(secret_values(item, name) for item in value))
    found = is_secret(name, value) and len(value) >= _MIN_CHARS
    return {value} if found else set()


def redacted_keys(value: Any, name: str = "") -> list[str]:
    """Return the full names of values that are `REDACTED`: of a saved configuration."""
    if isinstance(value, Mapping):
        pairs = [(f"{name}.{key}" if name else str(key), v) for key, v in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(f"{name}.{i}", item) for i, item in enumerate(value)]
    else:
        hidden = isinstance(value, str) and REDACTED in value
        return [name] if hidden else []
    return [found for key, item in pairs for found in redacted_keys(item, key)]
