"""The corpus of corpora.py, and one Ray per module that can reach moto."""

import json

import pytest

from tests.platform.data.corpora import in_turn, write_corpus
from tests.platform.one_ray import one_ray


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """(folder, [(file name, documents)]) of `write_corpus`; tests must not change it."""
    folder = tmp_path_factory.mktemp("corpus")
    return folder, write_corpus(folder)


@pytest.fixture(scope="module")
def local_ray(s3_environment):
    """A Ray of this module's own, with moto's environment."""
    with one_ray(s3_environment):
        yield


@pytest.fixture
def no_ray(monkeypatch):
    in_turn(monkeypatch)


@pytest.fixture
def three(tmp_path):
    """Config fields of a mixture of a letters file (large), a digits file, and conversations learned in part."""
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps({"body": "abc" * 300}) + "\n" for _ in range(600)))
    (tmp_path / "digits.txt").write_text("0123456789\n\n" * 300)
    turns = [{"from": "user", "value": "Q" * 50}, {"from": "assistant", "value": "R" * 50}]
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"conversations": turns, "id": i}) + "\n" for i in range(40))
    )
    chat = {"type": "openthoughts", "path": f"{tmp_path}/chat.jsonl", "format": "jsonl", "template": "plain"}
    shares = [
        {"weight": 2, "source": {"type": "jsonl", "path": f"{tmp_path}/letters.jsonl", "text_column": "body"}},
        {"weight": 1, "source": f"{tmp_path}/digits.txt"},
        {"weight": 1, "source": {**chat, "loss": "assistant"}},
    ]
    return {"source": {"type": "mixture", "sources": shares}, "seq_len": 31, "validation_fraction": 0}
