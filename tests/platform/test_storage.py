"""Storage behaves the same on a local folder and on an S3 server (moto)."""

import errno
import os
import pickle

import pytest
from pyarrow import fs as arrow
from s3fs import S3FileSystem

from lt2.config import ConfigError
from lt2_platform import s3_keys
from lt2_platform.fence import FENCE, OvertakenError
from lt2_platform.storage import Storage, default_root


def test_round_trip(storage):
    storage.write_bytes("a/b.bin", b"\x00\xff")
    storage.write_json("a/c.json", {"x": [1, 2.5, None, "é"]})
    assert storage.read_bytes("a/b.bin") == b"\x00\xff"
    assert storage.read_json(storage.join("a", "c.json")) == {"x": [1, 2.5, None, "é"]}
    with storage.open("a/b.bin") as file:
        file.seek(1)
        assert file.read() == b"\xff"
    with storage.writer("a/b.bin") as file:
        file.write(b"n")
        file.write(b"ew")
    assert storage.read_bytes("a/b.bin") == b"new"
    storage.write_bytes("a/b.bin", b"")
    assert storage.read_bytes("a/b.bin") == b""
    storage.write_json("a/c.json", {"error": "of caf\udce9"})  # a name that is no UTF-8
    assert storage.read_json("a/c.json") == {"error": "of caf\udce9"}


def test_listing_shows_what_was_written_and_nothing_else(storage):
    for path in ("x/2.json", "x/1.json", "x/deep/3.json", "y.json", "x/.nfs1", "x/.tmp-4.json"):
        storage.write_bytes(path, b"{}")
    if storage.root.startswith("s3://"):  # the object by which some tools make a folder
        storage.fs.pipe_file(storage.join("x") + "/", b"")
    assert storage.list("x") == ["1.json", "2.json", "deep"]
    assert storage.list() == ["x", "y.json"]
    assert storage.list("absent") == []
    assert storage.glob("x/*.json") == ["x/1.json", "x/2.json"]
    assert storage.glob("x/**/*.json") == ["x/1.json", "x/2.json", "x/deep/3.json"]
    assert storage.exists("x/deep")
    assert not storage.exists("x/4.json")
    storage.delete("x")
    storage.delete("x")
    assert storage.list() == ["y.json"]


@pytest.mark.parametrize("name", ["exp[1]", "exp*", "50% ü#?"])
def test_a_root_whose_name_looks_like_a_pattern(root, name):
    storage = Storage(f"{root}/{name}")
    for place in (storage, Storage(f"{root}/expx"), Storage(f"{root}/exp1")):
        place.write_bytes("x/1.json", b"{}")
    assert storage.glob("*/*.json") == storage.glob("**/*.json") == ["x/1.json"]
    storage.delete("x")
    assert not storage.exists("x")
    assert Storage(root).glob("*/x/*.json") == ["exp1/x/1.json", "expx/x/1.json"]


def test_an_endpoint_without_its_scheme_is_named(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "ceph.local:7480")
    for use in (lambda: Storage("s3://bucket/x").list(), lambda: Storage("s3://bucket/x").arrow_fs()):
        with pytest.raises(ConfigError, match=r"^AWS_ENDPOINT_URL is 'ceph\.local:7480'; give http://host:port or"):
            use()


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        ({"AWS_ENDPOINT_URL": "http://rgw:7480"}, "us-east-1"),
        ({"AWS_DEFAULT_REGION": "eu-central-1"}, "eu-central-1"),
        ({"AWS_ENDPOINT_URL": "http://rgw:7480", "AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "x"}, "eu-west-1"),
    ],
)
def test_arrow_asks_the_region_that_the_environment_names(monkeypatch, variables, region):
    checksums = ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION")
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", *checksums):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    files, path = Storage("s3://bucket/x").arrow_fs("y")
    assert (files.region, path) == (region, "bucket/x/y")
    asked = ["when_required"] * 2 if "AWS_ENDPOINT_URL" in variables else [None] * 2
    assert [os.environ.get(name) for name in checksums] == asked


def test_all_bytes_are_synced_before_a_file_is_seen(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    Storage(str(tmp_path)).write_bytes("a", b"123")
    Storage(str(tmp_path)).create_exclusive("b", b"1234")
    assert synced == [3, 4]


def test_missing_file(storage):
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("nope/here.json")


def test_failed_write_leaves_the_old_file_and_no_rubbish(storage):
    storage.write_bytes("a/f", b"old")
    with pytest.raises(TypeError), storage.writer("a/f") as file:
        file.writelines([b"half of the new", None])
    assert storage.read_bytes("a/f") == b"old"
    assert [name.rsplit("/", 1)[-1] for name in storage.fs.ls(storage.join("a"), detail=False)] == ["f"]


def test_sizes_of_all_files_below(storage):
    storage.write_bytes("a/b/c", b"123")
    storage.write_bytes("a/d", b"")
    storage.write_bytes("e", b"1")
    assert storage.sizes() == {"a/b/c": 3, "a/d": 0, "e": 1}
    assert storage.sizes("a/b") == {"a/b/c": 3}
    assert storage.sizes("nothing") == {}


def test_sizes_follow_links_once(tmp_path):
    """wandb leaves latest-run beside the run; a dataset may lie on another disk."""
    storage = Storage(str(tmp_path / "root"))
    storage.write_bytes("wandb/run-1/log", b"12")
    storage.write_bytes("wandb/run-1/self/log", b"1")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "shard").write_bytes(b"12345")
    for name, to in {
        "wandb/latest": "run-1",
        "wandb/run-1/self/up": "../..",
        "out": tmp_path / "disk",
        "file": tmp_path / "disk" / "shard",
        "nothing": "nowhere",
    }.items():
        (tmp_path / "root" / name).symlink_to(to)
    assert storage.sizes() == {"wandb/run-1/log": 2, "wandb/run-1/self/log": 1, "out/shard": 5, "file": 5}
    assert storage.sizes("out") == {"out/shard": 5}


def test_records_are_written_while_the_disk_here_is_full(s3_root, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    Storage(s3_root).write_json("lease.json", {"beat": 1})
    assert Storage(s3_root).read_json("lease.json") == {"beat": 1}


def test_a_folder_goes_whole_while_another_process_deletes_in_it(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path))
    for name in "abcd":
        storage.write_bytes(f"x/{name}/file", b"")
    unlink = os.unlink

    def overtaken(path, **options):
        monkeypatch.setattr(os, "unlink", unlink)
        unlink(path, **options)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", overtaken)
    storage.delete("x")
    assert os.listdir(tmp_path) == []


def test_of_a_link_the_link_is_deleted_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/mine").touch()
    (tmp_path / "root/deep").mkdir(parents=True)
    for link in ("root/moved", "root/deep/moved"):
        (tmp_path / link).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/dangling").symlink_to(tmp_path / "nowhere")
    for path in ("moved", "deep", "dangling"):
        Storage(str(tmp_path / "root")).delete(path)
    assert os.listdir(tmp_path / "root") == []
    assert os.listdir(tmp_path / "elsewhere") == ["mine"]


def test_delete_takes_a_path_as_it_is(storage):
    for path in ("x/a*[1]/1", "x/ab1/1", "x/a*[1]2"):
        storage.write_bytes(path, b"")
    storage.delete("x/a*[1]")
    assert storage.list("x") == ["a*[1]2", "ab1"]


def test_what_s3_does_not_delete_is_an_error(s3_root, monkeypatch):
    ask = S3FileSystem.call_s3

    def denied(files, method, **options):
        if method == "delete_objects":
            return {"Errors": [{"Key": "root/a/b", "Code": "AccessDenied", "Message": "no"}]}
        return ask(files, method, **options)

    monkeypatch.setattr(S3FileSystem, "call_s3", denied)
    storage = Storage(s3_root)
    storage.write_bytes("a/b", b"")
    with pytest.raises(PermissionError, match=r"root/a/b was not deleted \(AccessDenied: no\)"):
        storage.delete("a")


def test_delete_of_more_files_than_one_request_takes(s3_root, monkeypatch):
    monkeypatch.setattr(s3_keys, "DELETED_AT_ONCE", 3)
    storage = Storage(s3_root)
    for index in range(7):
        storage.write_bytes(f"a/{index}", b"")
    storage.delete("a")
    assert not storage.exists("a")


def test_arrow_sees_the_same_files(storage):
    storage.write_bytes("t/data.bin", b"12345")
    filesystem, path = storage.arrow_fs("t/data.bin")
    assert filesystem.get_file_info(path).size == 5
    assert isinstance(filesystem, arrow.FileSystem)
    with filesystem.open_output_stream(storage.arrow_fs("t/from_arrow.bin")[1]) as out:
        out.write(b"678")
    assert storage.read_bytes("t/from_arrow.bin") == b"678"


def test_paths_stay_under_the_root(storage):
    full = storage.join("runs", "r1", "run.json")
    assert full == f"{storage.root}/runs/r1/run.json"
    assert storage.join(full) == full
    assert storage.relative(full) == "runs/r1/run.json"
    for path in (
        "../elsewhere",
        "/elsewhere",
        "s3://elsewhere/x",
        "a/../../b",
        f"{storage.root}/../b",
        f"{storage.root}2/x",
    ):
        with pytest.raises(ValueError, match="outside the storage root"):
            storage.join(path)
    with pytest.raises(ValueError, match="refusing to delete the storage root"):
        storage.delete("")


def test_travels_to_other_processes(storage):
    assert pickle.loads(pickle.dumps(storage)) == storage


def test_check_writable_leaves_nothing(storage):
    storage.check_writable()
    assert storage.list() == []


def test_unwritable_local_root(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    root = str(tmp_path / "file" / "store")
    with pytest.raises(ConfigError) as error:
        Storage(root).check_writable()
    assert str(error.value) == (
        f"storage root {root} cannot be written (a part of the path is a file); "
        "choose another with --storage or LT2_STORAGE"
    )


def test_missing_bucket(s3_root):
    line = (
        r"root s3://no-such-bucket/x cannot be {} \(there is no bucket no-such-bucket\); create it, or choose another"
    )
    with pytest.raises(ConfigError, match=line.format("written")):
        Storage("s3://no-such-bucket/x").check_writable()
    with pytest.raises(ConfigError, match=line.format("read")):
        Storage("s3://no-such-bucket/x").check_readable()


def test_unreachable_endpoint(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with pytest.raises(ConfigError, match=r"storage root s3://b cannot be written \(Could not connect"):
        Storage("s3://b").check_writable()


def test_check_readable(storage, tmp_path):
    storage.check_readable(new=True)
    storage.write_bytes("x", b"")
    storage.check_readable()
    missing = Storage(str(tmp_path / "mistyped"))
    missing.check_readable(new=True)
    with pytest.raises(ConfigError, match=r"folder /.*/mistyped does not exist; choose another with --storage or"):
        missing.check_readable()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"file cannot be read \(a part of the path is a file\); choose"):
        Storage(str(tmp_path / "file")).check_readable(new=True)


def test_behind_the_fence_nothing_is_written(storage, monkeypatch):
    monkeypatch.setenv(FENCE, storage.join("next/lease.json"))
    storage.write_bytes("a", b"ours")

    def overtaken_between_the_first_byte_and_the_last():
        with storage.writer("a") as file:
            file.write(b"late")
            storage.write_bytes("next/lease.json", b"{}")

    with pytest.raises(OvertakenError, match=r"another process took over \(.*/next/lease\.json\); this one writes no"):
        overtaken_between_the_first_byte_and_the_last()
    for write in (
        lambda: storage.write_json("a", "late"),
        lambda: storage.create_exclusive("b", b"late"),
        lambda: storage.delete("a"),
    ):
        with pytest.raises(OvertakenError):
            write()
    assert storage.list() == ["a", "next"]
    assert storage.read_bytes("a") == b"ours"
    monkeypatch.delenv(FENCE)
    storage.delete("a")


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("", "the storage root is empty; give a folder or s3://bucket/prefix"),
        (" ", "the storage root is empty"),
        ("s3://", "s3:// names no bucket; give s3://bucket/prefix"),
        ("s3:///x", "s3:///x names no bucket"),
    ],
)
def test_a_root_without_a_name(root, message):
    with pytest.raises(ConfigError, match=message):
        Storage(root)


def test_unknown_scheme():
    with pytest.raises(ConfigError, match=r"gs://b/x: unsupported storage scheme; use a local path or s3://"):
        Storage("gs://b/x")


def test_default_root(monkeypatch, tmp_path):
    monkeypatch.setenv("LT2_STORAGE", str(tmp_path))
    assert Storage().root == str(tmp_path)
    monkeypatch.delenv("LT2_STORAGE")
    assert default_root() == "./lt2-storage"
    monkeypatch.chdir(tmp_path)
    assert Storage().root == str(tmp_path / "lt2-storage")
