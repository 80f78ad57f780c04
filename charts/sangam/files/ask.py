"""Ask the deployment one real question, whole and streamed, and check what comes back.

The `helm test` hook runs it in the router's image with the standard library alone. Environment:
ASK_URL, ASK_MODEL, ASK_SECONDS (deadline), and optionally ASK_EXPECT (text that the answer must
hold) and ASK_API_KEYS. While the service is starting (no connection, 502, 503, 504) it asks again.
Exit 0: well; 1: not, with one line that says why.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

QUESTION = "What is 17 + 25?"
NOT_YET = (502, 503, 504)


def ask(is_streamed, seconds):
    """Send the question; return the response's body. Raises OSError."""
    body = {
        "model": os.environ["ASK_MODEL"],
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64,
        "stream": is_streamed,
    }
    headers = {"content-type": "application/json"}
    key = os.environ.get("ASK_API_KEYS", "").split(",")[0].strip()
    if key:
        headers["authorization"] = "Bearer " + key
    url = os.environ["ASK_URL"].rstrip("/") + "/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return response.read().decode()


def whole_text(body):
    """The answer of a plain response. Raises ValueError, LookupError or TypeError: malformed."""
    answer = json.loads(body)
    choice = answer["choices"][0]
    if answer["object"] != "chat.completion" or choice["finish_reason"] not in ("stop", "length"):
        raise ValueError("not a finished chat.completion")
    if answer["usage"]["completion_tokens"] < 1:
        raise ValueError("no token was counted")
    return choice["message"]["content"]


def streamed_text(body):
    """The answer of an event stream. Raises as above."""
    events = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError("the stream has no end")
    text, reason = "", None
    for event in events[:-1]:
        chunk = json.loads(event)
        if "error" in chunk:
            raise ValueError("the stream holds an error")
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
    if reason not in ("stop", "length"):
        raise ValueError("the stream does not say why it ended")
    return text


def body_within(deadline, is_streamed):
    """Ask until the service answers or the deadline has passed; exits with the last problem."""
    while True:
        try:
            return ask(is_streamed, max(1.0, deadline - time.monotonic()))
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}"
            if error.code not in NOT_YET:
                sys.exit(problem)
        except OSError as error:
            problem = f"{os.environ['ASK_URL']}: {error}"
        if time.monotonic() + 2 > deadline:
            sys.exit(f"no answer in time; last: {problem}")
        time.sleep(2)


def main():
    """Ask twice: whole, then streamed."""
    deadline = time.monotonic() + float(os.environ["ASK_SECONDS"])
    for is_streamed in (False, True):
        body = body_within(deadline, is_streamed)
        try:
            text = streamed_text(body) if is_streamed else whole_text(body)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            sys.exit(f"malformed answer ({error!r}): {body[:500]}")
        expected = os.environ.get("ASK_EXPECT", "")
        if not text.strip() or expected not in text:
            sys.exit(f"asked {QUESTION!r}, expected {expected or 'some text'!r}, got {text!r}")
        kind = "streamed" if is_streamed else "whole"
        sys.stdout.write(f"{kind}: {QUESTION} -> {text.strip()[:200]}\n")


if __name__ == "__main__":
    main()
