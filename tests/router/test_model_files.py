"""The model's files: where they are, and what the router reads of the config."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.router.builders import write_model_folder

from sangam_core.errors import ConfigurationError
from sangam_router.model_files import model_folder, read_model_tokens


def dream_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    settings = {
        "architectures": ["DreamModel"],
        "vocab_size": 152064,
        "mask_token_id": 151666,
        "eos_token_id": 151643,
        "max_position_embeddings": 131072,
    }
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def test_a_llada_config_is_read(tmp_path: Path) -> None:
    tokens = read_model_tokens(write_model_folder(tmp_path / "m", embedding_size=300))
    assert (tokens.family, tokens.vocab_size, tokens.mask_id) == ("llada", 300, 261)
    assert (tokens.eos_ids, tokens.max_sequence_tokens) == ((257,), 1024)


def test_without_architectures_the_model_type_tells(tmp_path: Path) -> None:
    folder = dream_folder(tmp_path / "m", architectures=None, model_type="Dream")
    assert read_model_tokens(folder).family == "dream"


def test_a_dream_config_is_read_with_the_end_tokens_of_its_generation_config(
    tmp_path: Path,
) -> None:
    folder = dream_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [151643, 151645]}')
    tokens = read_model_tokens(folder)
    assert (tokens.family, tokens.max_sequence_tokens) == ("dream", 131072)
    assert tokens.eos_ids == (151643, 151645)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"max_sequence_length": "long"}, "max_sequence_length"),
        ({"vocab_size": True}, "vocab_size"),
        ({"embedding_size": "all"}, "embedding_size"),
        ({"embedding_size": 200}, "mask_token_id 261 is not in the vocabulary of 200"),
        ({"eos_token_id": 300}, "eos_token_id must hold ids in 0..287"),
        ({"architectures": ["LLaDAModelLM", "LlamaForCausalLM"]}, "architectures"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_model_tokens(write_model_folder(tmp_path / "m", **change))


def test_a_folder_is_taken_as_it_is(model_folder: Path) -> None:
    from sangam_router.model_files import model_folder as find

    assert find(str(model_folder)) == model_folder


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "just-a-word", "a/b/c"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="neither"):
        model_folder(name)


REPOSITORY = "nobody/nothing-at-all"


def test_a_hub_that_cannot_be_reached_is_not_taken_for_one_without_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed_port = server.getsockname()[1]
    said = refusal_at(f"http://127.0.0.1:{closed_port}", monkeypatch, tmp_path)
    assert said.startswith(f"SANGAM_MODEL={REPOSITORY}: could not be read from the hub: ")
    assert "\n" not in said


def test_a_repository_that_the_hub_does_not_have_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with a_hub_without_repositories() as url:
        said = refusal_at(url, monkeypatch, tmp_path)
    assert said.startswith(f"SANGAM_MODEL={REPOSITORY}: not on the hub: ")


def refusal_at(url: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    """What is said in a process of its own: the hub's client reads its settings when imported."""
    program = (
        "from sangam_core.errors import ConfigurationError\n"
        "from sangam_router.model_files import model_folder\n"
        "try:\n"
        f"    model_folder({REPOSITORY!r})\n"
        "except ConfigurationError as error:\n"
        "    print(error, end='')\n"
    )
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return ran.stdout


@contextmanager
def a_hub_without_repositories() -> Iterator[str]:
    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Keep quiet."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        model_folder(str(tmp_path))


def test_end_tokens_of_the_generation_config_are_checked_too(tmp_path: Path) -> None:
    folder = dream_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [151643, 152064]}')
    with pytest.raises(ConfigurationError, match=r"generation_config\.json: eos_token_id"):
        read_model_tokens(folder)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = dream_folder(tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json: cannot be read"):
        read_model_tokens(folder)
