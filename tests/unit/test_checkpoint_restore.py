"""A restore that is cut short: begun again it comes to its end, and nothing else begins in its place."""

import pytest

from decoupled_diloco.arrays.digest import state_digest
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.config import ConfigError
from syncer_service.checkpoint_folder import CheckpointFolder
from syncer_service.checkpoint_restore import RESTORING_FILE, find_restore_point, restore_into
from syncer_service.checkpoint_storage import open_folder
from syncer_service.store.durable import DurableStore
from tests.unit.test_checkpoint_files import cut_of

POLICY = Policy(fragment_count=2)


class KilledError(BaseException):
    pass


def killed(*_):
    raise KilledError


@pytest.fixture
def checkpoint(tmp_path):
    cut = cut_of()
    CheckpointFolder(open_folder(str(tmp_path / "checkpoints"))).write(cut, "one", "", False)
    return cut, str(tmp_path / "checkpoints" / "one")


def start(state_dir, url):
    """As a syncer does; returns the store and what it goes on with."""
    store = DurableStore(state_dir, POLICY)
    try:
        found = store.restored()
        point = find_restore_point(url, state_dir, found)
        store.begin("test", {}, POLICY.fragment_count)
        return store, found if point is None else restore_into(store, state_dir, point, POLICY)
    except BaseException:
        store.close()
        raise


@pytest.mark.parametrize("point", ["save_model", "roll_back", "_write_all", "hold"])
def test_one_that_is_killed_anywhere_is_begun_again_or_done(tmp_path, monkeypatch, checkpoint, point):
    cut, url = checkpoint
    state_dir = tmp_path / "state"
    with monkeypatch.context() as patched:
        patched.setattr(DurableStore, point, killed)
        with pytest.raises(KilledError):
            start(state_dir, url)
    if point == "hold":  # all of it is durable
        store, found = start(state_dir, url)
    else:
        with pytest.raises(ConfigError, match=f'restored the run from "{url}", and nothing of it is there yet'):
            start(state_dir, "")
        store, found = start(state_dir, url)
        assert not (state_dir / RESTORING_FILE).exists()
    assert found.state.global_step == cut.state.global_step
    digests = {f: state_digest(commit.state) for f, commit in found.fragments.items()}
    assert digests == {f: state_digest(commit.state) for f, commit in cut.fragments.items()}
    store.close()
    store, again = start(state_dir, "")
    assert again.state.versions == found.state.versions
    store.close()


def test_the_same_command_line_goes_on_with_what_it_had_restored(tmp_path, checkpoint):
    _, url = checkpoint
    state_dir = tmp_path / "state"
    store, found = start(state_dir, url)
    store.close()
    store, again = start(state_dir, url)
    assert again.state.versions == found.state.versions
    store.close()
    other = f"{url}-elsewhere"
    with pytest.raises(ConfigError, match="holds a run already"):
        start(state_dir, other)
