"""What ``sangam up`` prints for the newcomer: a curl line and an ``openai`` program that work."""

import json

QUESTION = "What is 17 + 25?"


def curl_line(base_url: str, model: str) -> str:
    """One shell command that asks a question over the public port."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
    return f"curl -s {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def openai_program(base_url: str, model: str) -> str:
    """A Python program that asks the same with the ``openai`` package, streamed."""
    return f"""\
from openai import OpenAI

client = OpenAI(base_url="{base_url}/v1", api_key="none")
stream = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "{QUESTION}"}}],
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
"""
