"""The prepare step: identities that outlast new options, and checks before anything is written."""

import pytest

from lt2.config import ConfigError
from lt2_workflows.graph import fingerprint
from lt2_workflows.steps import PrepareStep, check_prepare, describe_prepare


@pytest.mark.parametrize(
    ("fields", "digest"),
    [
        ({}, "48e82ce3a032dce0"),
        ({"source": "books/"}, "6905a1e9b94b5134"),
        ({"source": ("a.txt", "b/"), "tokenizer": "byte", "max_documents": 5}, "c3570eb804ae211f"),
        (
            {"source": "x.jsonl", "format": "jsonl", "text_column": "body", "seq_len": 2048},
            "2a1e38648ae0c804",
        ),
    ],
)
def test_prepare_steps_from_before_sources_had_types_are_found_again(fields, digest):
    assert fingerprint(PrepareStep(**fields), {}).startswith(digest)


def test_prepare_checks_every_path_of_a_mixture(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    shares = [
        {"weight": 1, "source": f"{tmp_path}/a.txt"},
        {"weight": 1, "source": {"type": "python_stdlib"}},
        {"weight": 2, "source": {"type": "dclm", "path": f"{tmp_path}/nope"}},
    ]
    step = PrepareStep.model_validate({"source": {"type": "mixture", "sources": shares[:2]}})
    check_prepare(step)
    assert describe_prepare(step, None).startswith(f"50% {tmp_path}/a.txt + 50% python-stdlib -> byte tokens")
    with pytest.raises(ConfigError, match=rf"^prepare\.source {tmp_path}/nope does not exist; give a file, folder"):
        check_prepare(PrepareStep.model_validate({"source": {"type": "mixture", "sources": shares}}))
