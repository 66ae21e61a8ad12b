"""What lies about in a store, however it looks, stops no command; and links to directories are no arrays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stats.errors import StoreError
from store.arrays import open_stack
from store.atlas import AtlasStore
from store.integrity import seal, verify
from store.leftovers import model_of


@pytest.mark.parametrize("attributes", ["{", '{"attributes": {}}', "[]"])
def test_unpublished_arrays_with_damaged_attributes_are_told(attributes: str, store_path: Path) -> None:
    store = AtlasStore.open(store_path)
    group = store.models()["llama"].array_group
    shutil.copytree(store.arrays_path / group, store.arrays_path / "stray")
    seal(store, "stray", "raw")
    (store.arrays_path / "stray" / "zarr.json").write_text(attributes)
    assert model_of(store.arrays_path / "stray") == ""
    assert any("stray" in finding.where for finding in verify(store))


def test_a_linked_directory_is_no_array(store_path: Path) -> None:
    store = AtlasStore.open(store_path)
    stack = store.arrays_path / store.models()["llama"].array_group / "raw" / "decoder"
    shutil.move(stack / "alpha", store_path / "elsewhere")
    (stack / "alpha").symlink_to(store_path / "elsewhere", target_is_directory=True)
    with pytest.raises(StoreError, match="not as this program writes"):
        open_stack(stack)
