import json
from pathlib import Path

import pytest

from demo import model


def test_the_tokenizer_has_one_token_per_byte(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip(
        "tokenizers", reason="needs the tokenizers package (extra cpu or gpu)"
    )
    model._write_tokenizer(tmp_path, 4096)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == model.VOCABULARY_TOKENS
    text = "def f(x):\n    return 'wörld'\n"
    tokens = tokenizer.encode(text).ids
    assert len(tokens) == len(text.encode())
    assert min(tokens) >= model.FIRST_TEXT_TOKEN
    assert tokenizer.decode(tokens) == text
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 4096


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    model.make_tiny_model(tmp_path, 4096)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
