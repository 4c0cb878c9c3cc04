"""Saving, finding, checking and loading checkpoints, on one process and on gloo ranks."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from lt2.config import ConfigError
from lt2.model import build
from lt2.train import parallel
from lt2.train.loop import Batch, TrainState
from lt2.train.loss import next_token_objective
from lt2.train.optim import adamw, muon
from lt2_platform.fence import FENCE, OvertakenError
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints import checkpoint, integrity, matching, retention, shards
from lt2_platform.train.checkpoints.shards import HashingFileSystem, save_shards
from tests.platform.train.packed import TOKENIZER, model_config
from tests.ranks import run_ranks


def trained(seed=0, steps=1, make=adamw):
    """A model and optimizer some steps from their beginning, sharded when there are ranks."""
    model = build(model_config(), seed=seed)
    mesh = parallel.data_mesh("cpu")
    sharding = parallel.shard(model, mesh) if mesh is not None else None
    optimizer = make(model, lr=1e-2)
    for step in range(steps):
        tokens = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(step))
        with parallel.micro_step(sharding, last=True):
            next_token_objective()(model, Batch(tokens=tokens))[0].backward()
        parallel.reduce_replicated_gradients(sharding)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(folder, model, optimizer, step=1, **options):
    state = TrainState(step=step, position=8 * step, tokens=96 * step, loss=1.5)
    about = checkpoint.About(model_config(), TOKENIZER)
    return checkpoint.save(str(folder), model, optimizer, state, about, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def contents(model, optimizer):
    """Every weight and moment under its name, gathered."""
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    moments = {
        f"{name}.{key}": whole(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return weights | moments


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("make", [adamw, muon])
def test_load_restores_weights_moments_state_and_rng_bit_for_bit(tmp_path, make):
    model, optimizer = trained(make=make)
    torch.manual_seed(7)
    uri = save(tmp_path, model, optimizer)
    drawn = torch.rand(3)
    other, fresh = trained(seed=1, steps=0, make=make)
    torch.manual_seed(8)
    state = checkpoint.load(uri, other, fresh)
    assert state == TrainState(step=1, position=8, tokens=96, loss=1.5)
    assert_same(contents(model, optimizer), contents(other, fresh))
    assert torch.equal(torch.rand(3), drawn)


def test_a_weight_that_has_no_moments_yet_gets_none(tmp_path):
    model, optimizer = trained()
    del optimizer.state[model.norm.weight]  # as those of a mixer that a random layout has not drawn
    uri = save(tmp_path, model, optimizer)
    assert model.norm.weight not in optimizer.state
    other, fresh = trained(seed=1, steps=0)
    checkpoint.load(uri, other, fresh)
    assert other.norm.weight not in fresh.state
    assert_same(contents(model, optimizer), contents(other, fresh))


def rank_save_and_load(folder, make):
    model, optimizer = trained(steps=2, make=make)
    torch.manual_seed(dist.get_rank())
    uri = save(folder, model, optimizer)
    saved, draw = contents(model, optimizer), torch.rand(2)
    return uri, saved, draw, *rank_load(uri, make)


def rank_load(uri, make):
    model, optimizer = trained(seed=3, steps=0, make=make)
    torch.manual_seed(99)
    checkpoint.load(uri, model, optimizer)
    return contents(model, optimizer), torch.rand(2)


@pytest.mark.parametrize("make", [adamw, muon])
def test_two_ranks_save_what_one_and_two_ranks_load(tmp_path, make):
    ranks = run_ranks(rank_save_and_load, 2, str(tmp_path), make)
    uri, saved = ranks[0][:2]
    for _, _, draw, loaded, draw_again in ranks:
        assert_same(saved, loaded)
        assert torch.equal(draw, draw_again)  # each rank has its own generator back
    assert sorted(path.name for path in Path(uri).glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    model, optimizer = trained(seed=3, steps=0, make=make)
    checkpoint.load(uri, model, optimizer)
    assert_same(saved, contents(model, optimizer))


def test_one_process_saves_what_two_ranks_load(tmp_path):
    model, optimizer = trained()
    uri = save(tmp_path, model, optimizer)
    (first, _), (second, draw) = run_ranks(rank_load, 2, uri, adamw)
    assert_same(contents(model, optimizer), first)
    assert_same(first, second)
    assert torch.equal(draw, torch.rand(2, generator=torch.Generator().manual_seed(99)))  # rank 1 keeps its own


def test_load_model_needs_nothing_but_the_folder(tmp_path):
    model, optimizer = trained()
    files = {"tokenizer/vocab.json": b"{}"}
    tokenizer = TOKENIZER | {"file": "tokenizer/vocab.json"}
    state = TrainState(step=3)
    about = checkpoint.About(model_config(), tokenizer, files)
    uri = checkpoint.save(str(tmp_path / "checkpoints"), model, optimizer, state, about)
    for place in (uri, str(tmp_path), str(tmp_path / "checkpoints")):
        loaded, config, info = checkpoint.load_model(place)
        assert config == model_config()
        assert Path(info["file"]).read_bytes() == b"{}"
        assert not loaded.training
        tokens = torch.arange(10).unsqueeze(0)
        assert torch.equal(loaded(tokens).hidden, model.eval()(tokens).hidden)


def test_behind_the_fence_no_shard_is_written(tmp_path, monkeypatch):
    (tmp_path / "lease.json").write_text("{}")
    monkeypatch.setenv(FENCE, str(tmp_path / "lease.json"))
    storage = Storage(str(tmp_path / "run"))
    with pytest.raises(OvertakenError, match="another process took over"):
        save_shards({"model": trained()[0].state_dict()}, storage, "step-00000001")
    assert storage.glob("step-00000001/*") == []
    with pytest.raises(OvertakenError):  # .metadata gets its name when all shards are there, perhaps much later
        HashingFileSystem(storage.fs).rename(tmp_path / "lease.json", tmp_path / "run")
    assert (tmp_path / "lease.json").exists()


def test_an_error_that_is_not_of_storage_leaves_a_shard_as_it_is(tmp_path):
    files = HashingFileSystem(Storage(str(tmp_path)).fs)
    with pytest.raises(ZeroDivisionError), files.create_stream(str(tmp_path / "shard"), "wb") as stream:
        stream.write(b"1" * (1 // 0))
    assert files.written == {}


def test_a_bug_on_one_rank_is_no_refusal_though_storage_refuses_another(tmp_path, monkeypatch):
    def fails(*arguments, **options):
        raise CheckpointException("saving", {rank: (error, None) for rank, error in enumerate(errors)})  # type: ignore

    monkeypatch.setattr(shards, "save", fails)
    errors: list[Exception] = [OSError("full"), OSError("away")]
    with pytest.raises(shards.StorageRefusedError, match="rank 0: full; rank 1: away"):
        save_shards({}, Storage(str(tmp_path)), "step-00000001")
    errors = [OSError("full"), ZeroDivisionError("a bug")]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        save_shards({}, Storage(str(tmp_path)), "step-00000001")


def test_what_goes_wrong_in_a_shard_is_an_error_like_any_other(tmp_path, monkeypatch):
    model, optimizer = trained()
    uri, stream, said = save(tmp_path, model, optimizer), HashingFileSystem.create_stream, KeyError("SlowDown")

    @contextmanager
    def broken(files, path, mode):
        if "distcp" in str(path):
            raise ZeroDivisionError("a bug") if "w" in mode else OSError("away") from said
        with stream(files, path, mode) as file:
            yield file

    monkeypatch.setattr(HashingFileSystem, "create_stream", broken)
    with pytest.raises(OSError, match="^away$") as away:  # torch's own is no Exception: a step would end without a word
        checkpoint.load_model(uri)
    assert away.value.__cause__ is said  # as s3fs has what the server said
    with pytest.raises(ZeroDivisionError, match="^a bug$"):
        save(tmp_path, model, optimizer, step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_another_model_or_tokenizer_is_refused(tmp_path):
    model, optimizer = trained()
    info = checkpoint.read_info(save(tmp_path, model, optimizer))
    matching.check_matches(info, model_config(), TOKENIZER)
    with pytest.raises(integrity.CheckpointError, match="vocabulary of 23, the model here has 24"):
        matching.check_matches(info, model_config(vocab_size=24), TOKENIZER)
    with pytest.raises(integrity.CheckpointError, match="model differs in n_loops, norm_eps"):
        matching.check_matches(info, model_config(n_loops=3, norm_eps=1e-5), TOKENIZER)
    with pytest.raises(integrity.CheckpointError, match="prepare the data again"):
        matching.check_matches(info, model_config(), TOKENIZER | {"sha256": "1" * 64})


def test_a_newer_schema_is_refused_by_name(tmp_path):
    model, optimizer = trained()
    info = Path(save(tmp_path, model, optimizer), "checkpoint.json")
    info.write_text(json.dumps(json.loads(info.read_text()) | {"schema_version": 2}))
    with pytest.raises(integrity.CheckpointError, match="checkpoint schema 2; this LT2 reads schema 1"):
        checkpoint.read_info(str(info.parent))


def test_a_mixer_whose_file_is_not_there_is_named(tmp_path):
    model, optimizer = trained()
    info = Path(save(tmp_path, model, optimizer), "checkpoint.json")
    record = json.loads(info.read_text())
    record["model"]["layout"] = {"type": "uniform", "mixer": {"type": "mine", "source": "mine.py"}}
    info.write_text(json.dumps(record))
    with pytest.raises(
        ConfigError, match=rf"^{info.parent}: layout.*mixer: source 'mine.py' does not exist in {Path.cwd()}; "
    ):
        checkpoint.read_info(str(info.parent))


def test_s3(s3_root):
    model, optimizer = trained()
    folder = Storage(s3_root).join("run/checkpoints")
    for step in (1, 2, 3):
        save(folder, model, optimizer, step)
    uri = integrity.latest(folder)
    assert uri == f"{folder}/step-00000003"
    assert integrity.complete(folder) == ["step-00000002", "step-00000003"]
    other, fresh = trained(seed=1, steps=0)
    assert checkpoint.load(uri, other, fresh).step == 3
    assert_same(contents(model, optimizer), contents(other, fresh))
    Storage(uri).delete("COMPLETE")
    assert retention.clean(folder) == ["step-00000003"]
    assert checkpoint.load_model(s3_root + "/run")[1] == model_config()


def test_the_golden_checkpoint_of_schema_1_still_loads():
    golden = Path(__file__).parents[1] / "golden"
    model, config, tokenizer = checkpoint.load_model(str(golden))
    assert (config.dim, config.n_loops, config.tie_embeddings, tokenizer["name"]) == (8, 2, True, "byte")
    assert checkpoint.read_info(checkpoint.resolve(str(golden))).state == TrainState(1, 2, 18, 3.0)
    expected = [-0.92878479, -0.90292847, 0.73772621, -1.51249814, -0.75525761, 1.34179306, 0.18382719, 0.97403139]
    with torch.no_grad():
        hidden = model(torch.arange(8).unsqueeze(0)).hidden[0, -1]
    torch.testing.assert_close(hidden, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    optimizer = adamw(model, lr=1e-2)
    checkpoint.load(checkpoint.resolve(str(golden)), model, optimizer)
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


def test_a_step_that_is_made_again_has_nothing_of_what_was_saved_before(tmp_path, monkeypatch):
    model, optimizer = trained()
    place = Path(save(tmp_path, model, optimizer))
    (place / "__1_0.distcp").write_bytes(b"a second rank's, of before")
    found = []

    def noting(*arguments):
        found.append(list(place.glob("*")))  # COMPLETE above all: its sums are of other files
        return save_shards(*arguments)

    monkeypatch.setattr(checkpoint, "save_shards", noting)
    save(tmp_path, model, optimizer)
    assert found == [[]]
    assert sorted(path.name for path in place.iterdir()) == [".metadata", "COMPLETE", "__0_0.distcp", "checkpoint.json"]


def test_any_error_while_saving_leaves_a_whole_checkpoint_or_none(tmp_path):
    model, optimizer = trained()
    with pytest.raises(TypeError):
        save(tmp_path, model, optimizer, tokenizer_files={"tokenizer/vocab": None})
    assert list(tmp_path.iterdir()) == []

    def no_pins():
        raise LookupError("asked when the checkpoint was complete")

    with pytest.raises(LookupError):
        save(tmp_path, model, optimizer, pinned=no_pins)
    assert integrity.latest(str(tmp_path)) == str(tmp_path / "step-00000001")
