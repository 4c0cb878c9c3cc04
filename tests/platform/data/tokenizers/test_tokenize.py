"""The three tokenizers, on vocabularies generated here."""

import base64
import itertools
import json

import numpy as np
import pytest
import tiktoken
from tokenizers import Tokenizer as HubFile
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import (
    LLAMA3_PATTERN,
    LLAMA3_SPECIALS,
    describe,
    encode,
    load_recorded,
    load_tokenizer,
)
from lt2_platform.data.tokenizers.tokenizer_json import write_tokenizer_json
from lt2_platform.storage import Storage

TEXTS = ["plain words", "déjà vu 循環 😀", " \t\n\n", "it's 12345 <|end_of_text|> </s>!", "x"]


@pytest.fixture(scope="module")
def ranks():
    """128,000 tokens: every byte, every pair of letters or spaces, then pairs of bytes and triples."""
    letters = b" abcdefghijklmnopqrstuvwxyz"
    every = itertools.chain(
        (bytes([a]) for a in range(256)),
        (bytes(pair) for pair in itertools.product(letters, letters)),
        (bytes(pair) for pair in itertools.product(range(256), range(256))),
        (bytes(triple) for triple in itertools.product(range(97, 123), range(256), range(256))),
    )
    return list(itertools.islice(dict.fromkeys(every), 128_000))


def ranks_file(tokens) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def llama3_path(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "llama.tiktoken"
    path.write_bytes(ranks_file(ranks))
    return path


@pytest.fixture(scope="module")
def hub_path(tmp_path_factory):
    trained = HubFile(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("hub") / "tokenizer.json"
    trained.save(str(path))
    return path


@pytest.fixture(params=["byte", "llama3", "hub"])
def tokenizer(request):
    if request.param == "byte":
        return load_tokenizer("byte")
    return load_tokenizer(str(request.getfixturevalue(f"{request.param}_path")))


def test_round_trip_and_range(tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.dtype == np.uint32
        assert ids.max() < tokenizer.vocab_size
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())  # specials in text are just text
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.decode([tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id]) == text
        assert encode(tokenizer, text) == [tokenizer.bos_id, *ids.tolist()]
        assert encode(tokenizer, text, bos=False) == ids.tolist()


def test_description(tokenizer):
    found = describe(tokenizer)
    assert sorted(found) == ["bos_id", "eos_id", "name", "pad_id", "sha256", "vocab_size"]
    assert json.loads(json.dumps(found)) == found
    assert len(found["sha256"]) == 64


def test_byte_ids():
    byte = load_tokenizer("byte")
    assert byte.encode_batch(["aé"])[0].tolist() == [97, 0xC3, 0xA9]
    assert (byte.vocab_size, byte.bos_id, byte.eos_id, byte.pad_id) == (259, 256, 257, 258)
    assert byte.decode([0xC3]) == "\ufffd"


def test_llama3_ids(llama3_path, ranks):
    loaded = load_tokenizer(str(llama3_path))
    peer = tiktoken.Encoding(
        "peer", pat_str=LLAMA3_PATTERN, mergeable_ranks={t: i for i, t in enumerate(ranks)}, special_tokens={}
    )
    for text in TEXTS:
        assert loaded.encode_batch([text])[0].tolist() == peer.encode_ordinary(text)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (128_256, 128_000, 128_001)
    assert LLAMA3_SPECIALS[9] == "<|eot_id|>"
    assert LLAMA3_SPECIALS[255] == "<|reserved_special_token_250|>"


def test_llama3_file_with_specials_is_the_same_tokenizer(llama3_path, ranks, tmp_path):
    path = tmp_path / "with-specials.tiktoken"
    path.write_bytes(ranks_file([*ranks, *(name.encode() for name in LLAMA3_SPECIALS)]))
    assert load_tokenizer(str(path)).sha256 == load_tokenizer(str(llama3_path)).sha256
    ids = load_tokenizer(str(path)).encode_batch(["<|begin_of_text|>"])[0]
    assert ids.max() < 128_000


def test_llama3_survives_a_million_spaces(llama3_path):
    loaded = load_tokenizer(str(llama3_path))
    text = "a" + " " * 1_500_000 + "b"
    assert loaded.decode(loaded.encode_batch([text])[0].tolist()) == text


def test_hub_specials_come_from_the_settings_beside_it(hub_path, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(hub_path.read_bytes())
    settings = {"bos_token": None, "eos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    usual, named = load_tokenizer(str(hub_path)), load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (usual.bos_id, usual.eos_id) == (0, 1)
    assert named.eos_id == 0


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("begins", [True, False])
def test_texts_of_others_models_begin_with_bos_where_transformers_begins_them_so(
    hub_path, tmp_path, begins, add_bos_token
):
    file = HubFile.from_file(str(hub_path))
    if begins:
        file.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=file, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    if add_bos_token is not None:
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"add_bos_token": add_bos_token}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert encode(ours, "a loop") == theirs("a loop").input_ids
    assert ours.bos_id == (0 if begins else None)
    recorded = {"file": str(tmp_path / "tokenizer.json"), "bos_id": 0}  # made when every text began with BOS
    assert encode(load_recorded(recorded), "a loop") == [0, *encode(ours, "a loop", bos=False)]
    assert encode(load_recorded(recorded | {"bos_id": None}), "a loop") == encode(ours, "a loop", bos=False)
    assert load_tokenizer(recorded["file"]).bos_id == ours.bos_id


def test_reads_s3(hub_path, s3_root):
    Storage(s3_root).write_bytes("tokenizer.json", hub_path.read_bytes())
    assert load_tokenizer(f"{s3_root}/tokenizer.json").sha256 == load_tokenizer(str(hub_path)).sha256


def test_unknown_names(tmp_path):
    with pytest.raises(ConfigError, match=r"^unknown tokenizer 'gpt2'; use byte, or a path to a tokenizer\.json or a"):
        load_tokenizer("gpt2")
    with pytest.raises(ConfigError, match=r"^tokenizer file /no/such\.json does not exist; use byte, or a path to a"):
        load_tokenizer("/no/such.json")
    (tmp_path / "hub.json").mkdir()
    for folder in (tmp_path / "hub.json", tmp_path):
        with pytest.raises(ConfigError, match=rf"^tokenizer {folder} is a folder; give the tokenizer\.json or"):
            load_tokenizer(str(folder))
    with pytest.raises(ConfigError, match=r"tokenizer\.model is one: copy or link it under such a name"):
        load_tokenizer("Meta-Llama-3-8B/tokenizer.model")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "few.tiktoken",
            ranks_file([b"a", b"b"]),
            r"has 2 ranks, Llama 3 has 128,000; give that model's tokenizer\.json",
        ),
        ("not.tiktoken", b"<html> not ranks", r"is not a tiktoken ranks file \(.*\); download it again"),
        ("bad.json", b"{}", r"is not a tokenizer\.json \(.*\); export it again"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        load_tokenizer(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_hub_file_without_end_of_text(tmp_path):
    HubFile(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"names no end-of-text token; put a tokenizer_config\.json with eos_token"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_model_has_a_row_for_the_largest_id_where_ids_have_gaps(tmp_path):
    gaps = HubFile(models.WordLevel({"a": 0, "</s>": 3, "b": 20}, unk_token="a"))
    gaps.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).vocab_size == 21


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{bad", r"tokenizer_config\.json, beside the tokenizer, is not a JSON object \(.*\); fix or remove it"),
        ("[]", r"tokenizer_config\.json, beside the tokenizer, is not a JSON object \(.*\); fix or remove it"),
        ('{"eos_token": ["</s>"]}', r"bos_token, eos_token and pad_token are each a text or null"),
        ('{"eos_token": "<end>"}', r"has no token '<end>', which tokenizer_config\.json beside it names as eos_token"),
        ('{"bos_token": {"content": "<b>"}}', r"has no token '<b>', which .* names as bos_token"),
    ],
)
def test_damaged_settings_beside_a_tokenizer(hub_path, tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(hub_path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_tiktoken_ranks_as_a_tokenizer_json_give_the_same_ids(llama3_path, tmp_path):
    ours = load_tokenizer(str(llama3_path))
    file = write_tokenizer_json(str(llama3_path), tmp_path)
    written = HubFile.from_file(str(file))
    written.encode_special_tokens = True
    for text in [*TEXTS, "DON'T   stop\r\n\r\n  now", "ab" * 500, ""]:
        assert written.encode(text, add_special_tokens=False).ids == ours.encode_batch([text])[0].tolist()
    special = ours.special_id("<|eot_id|>")
    assert written.token_to_id("<|eot_id|>") == special
    assert written.id_to_token(128_255) == LLAMA3_SPECIALS[255]
    again = load_tokenizer(str(file))
    assert (again.vocab_size, again.bos_id, again.eos_id) == (ours.vocab_size, ours.bos_id, ours.eos_id)
    assert again.vocabulary == ours.vocabulary


def test_a_tokenizer_json_is_copied_from_wherever_it_is(hub_path, tmp_path, s3_root):
    Storage(s3_root).write_bytes("of-a-run.json", hub_path.read_bytes())
    assert write_tokenizer_json(f"{s3_root}/of-a-run.json", tmp_path).read_bytes() == hub_path.read_bytes()
