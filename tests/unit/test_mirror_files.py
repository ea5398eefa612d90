"""A mirror that is damaged, or whose owner is not known, is left alone, and what to do is said."""

import pytest

from syncer_service.checkpoint_files import MANIFEST_FILE, read_manifest
from syncer_service.checkpoint_storage import open_folder
from syncer_service.mirror import LINEAGE_FILE, MirrorFiles, MirrorRefusedError
from tests.unit.test_checkpoint_files import cut_of


@pytest.fixture
def mirrored(tmp_path):
    files = MirrorFiles(open_folder(str(tmp_path / "mirror")), tmp_path / "state")
    files.copy(cut_of(step=5))
    return files


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}"])
def test_a_damaged_manifest_is_not_overwritten_until_it_is_removed(tmp_path, mirrored, text):
    manifest = tmp_path / "mirror" / MANIFEST_FILE
    manifest.write_text(text)
    with pytest.raises(
        MirrorRefusedError, match=f"{manifest} cannot be read.*remove that file to have the mirror begun"
    ):
        mirrored.copy(cut_of(step=6))
    assert manifest.read_text() == text
    manifest.unlink()
    mirrored.copy(cut_of(step=6))
    assert read_manifest(open_folder(str(tmp_path / "mirror")), "").state.global_step == 6


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}"])
def test_who_does_not_know_its_mirror_any_more_needs_another_one(tmp_path, mirrored, text):
    lineage = tmp_path / "state" / LINEAGE_FILE
    lineage.write_text(text)
    with pytest.raises(
        MirrorRefusedError, match=f"{lineage} is damaged .* remove it and give another syncer.mirror_url"
    ):
        mirrored.copy(cut_of(step=6))
    lineage.unlink()
    with pytest.raises(MirrorRefusedError, match="this run has not come from"):
        mirrored.copy(cut_of(step=6))
    MirrorFiles(open_folder(str(tmp_path / "other")), tmp_path / "state").copy(cut_of(step=6))
