"""A store of a test's own, and the dashboard over it."""

import pytest
from fastapi.testclient import TestClient

from lt2_dashboards.app import create_app
from lt2_dashboards.auth import Access
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore(Storage(str(tmp_path)))


@pytest.fixture
def client(store) -> TestClient:
    return TestClient(create_app(store.storage.root, Access("none")), base_url="http://127.0.0.1:8787")
