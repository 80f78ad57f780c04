"""A message that changes its shape needs a new protocol version: old and new run side by side.

Bodies are strict, so a worker of the last release refuses a field that it does not know. The
shapes of each version are kept here as fingerprints; a difference fails with what to do.
"""

import hashlib
import inspect
import json
from typing import Any

from pydantic import TypeAdapter

from sangam_core import decoding, wire
from sangam_core.decoding import WireModel
from sangam_core.wire import PROTOCOL_VERSION

SHAPES = {1: "37f5a23f745619d2", 2: "992205086566ff89"}


def without_words(schema: Any) -> Any:
    """The schema less what says nothing about the shape: titles and descriptions."""
    if isinstance(schema, dict):
        return {
            key: without_words(value)
            for key, value in schema.items()
            if not (key in ("title", "description") and isinstance(value, str))
        }
    return [without_words(each) for each in schema] if isinstance(schema, list) else schema


def shapes() -> dict[str, Any]:
    """The JSON schema of every message, by name."""
    messages = {
        name: each
        for module in (decoding, wire)
        for name, each in vars(module).items()
        if inspect.isclass(each) and issubclass(each, WireModel) and each is not WireModel
    }
    return {
        name: without_words(TypeAdapter(message).json_schema())
        for name, message in sorted(messages.items())
    }


def fingerprint(shapes: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]


def test_the_messages_have_the_shapes_of_their_protocol_version() -> None:
    now = fingerprint(shapes())
    assert now == SHAPES.get(PROTOCOL_VERSION), (
        f"the messages have changed to {now}: since the last release, raise PROTOCOL_VERSION "
        "and add this fingerprint under the new number; within one release, replace it"
    )


def test_a_new_field_changes_the_fingerprint_and_a_new_text_does_not() -> None:
    before = shapes()
    described = json.loads(json.dumps(before))
    described["BlockStart"]["description"] = "other words"
    assert fingerprint(without_words(described)) == fingerprint(before)
    widened = json.loads(json.dumps(before))
    widened["BlockStart"]["properties"]["priority"] = {"type": "integer"}
    assert fingerprint(widened) != fingerprint(before)
