"""Publications of changes: the mirror holds the published bits, or says why it cannot."""

from __future__ import annotations

import pytest
import torch

from areal.weight_sync.delta import DeltaPublisher, Mirror, WrongBaseError
from areal.weight_sync.publication import PublicationError, open_publication
from areal.weight_sync.transports import open_sent

SIZE = {"bucket_bytes": 1 << 20}


@pytest.fixture
def mirror():
    mirror = Mirror()
    yield mirror
    mirror.close()


def weights_of(version: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    plain = torch.randn(300, 40, generator=random).bfloat16()
    plain[version] += 1
    return {"a": plain, "b": torch.ones(3), "none": torch.zeros(0, 2)}


def assert_equal(source, expected):
    found = dict(source)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_first_whole_then_changes(tmp_path, mirror):
    publisher = DeltaPublisher()
    sizes = []
    for version in (3, 4, 7):
        folder, weights = tmp_path / f"v{version}", weights_of(version)
        manifest = publisher.publish(weights.items(), folder, version, **SIZE)
        sizes.append(manifest.nbytes)
        assert_equal(mirror.take(folder, version=version), weights)
        weights["a"].zero_()  # training goes on in the same memory
    assert open_publication(tmp_path / "v3").manifest.base_version is None
    assert open_publication(tmp_path / "v7").manifest.base_version == 4
    assert sizes[1] < sizes[0] / 20 and sizes[2] < sizes[0] / 20
    with pytest.raises(PublicationError, match="v7 holds only changes of version 4"):
        open_sent(tmp_path / "v7", version=7)


def test_another_base_is_refused_and_a_whole_one_helps(tmp_path, mirror):
    publisher, late = DeltaPublisher(), Mirror()
    for version in (1, 2, 3):
        publisher.publish(weights_of(version).items(), tmp_path / f"v{version}", version, **SIZE)
    with pytest.raises(WrongBaseError, match="v3 changes version 2, here is none"):
        mirror.take(tmp_path / "v3", version=3)
    mirror.take(tmp_path / "v1", version=1)
    with pytest.raises(WrongBaseError, match="v3 changes version 2, here is 1"):
        mirror.take(tmp_path / "v3", version=3)
    publisher.publish_whole(tmp_path / "v3", 3, **SIZE)
    assert_equal(mirror.take(tmp_path / "v3", version=3), weights_of(3))
    assert_equal(late.take(tmp_path / "v3", version=3), weights_of(3))
    late.close()
    publisher.publish(weights_of(4).items(), tmp_path / "v4", 4, **SIZE)
    assert_equal(mirror.take(tmp_path / "v4", version=4), weights_of(4))


def test_a_base_of_the_same_number_with_other_bits_is_refused(tmp_path, mirror):
    ours, theirs = DeltaPublisher(), DeltaPublisher()
    ours.publish(weights_of(1).items(), tmp_path / "ours", 1, **SIZE)
    theirs.publish(weights_of(9).items(), tmp_path / "theirs", 1, **SIZE)
    mirror.take(tmp_path / "theirs", version=1)
    ours.publish(weights_of(2).items(), tmp_path / "v2", 2, **SIZE)
    with pytest.raises(PublicationError, match="the weight a: the patch was made for other values"):
        mirror.take(tmp_path / "v2", version=2)
    # What was held is whole: its own next version fits.
    theirs.publish(weights_of(2).items(), tmp_path / "v2", 2, **SIZE)
    assert_equal(mirror.take(tmp_path / "v2", version=2), weights_of(2))


def test_damage_is_named_and_the_mirror_stays(tmp_path, mirror):
    publisher = DeltaPublisher()
    for version in (1, 2):
        publisher.publish(weights_of(version).items(), tmp_path / f"v{version}", version, **SIZE)
    mirror.take(tmp_path / "v1", version=1)
    file = tmp_path / "v2" / "bucket_00000.safetensors"
    intact = file.read_bytes()
    file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    with pytest.raises(PublicationError, match="bucket_00000.safetensors is damaged"):
        mirror.take(tmp_path / "v2", version=2)
    file.write_bytes(intact)
    assert_equal(mirror.take(tmp_path / "v2", version=2), weights_of(2))


def test_other_weights_and_a_failure_make_the_next_one_whole(tmp_path):
    publisher = DeltaPublisher()
    publisher.publish(weights_of(1).items(), tmp_path / "v1", 1, **SIZE)
    more = weights_of(2) | {"c": torch.ones(2)}
    assert publisher.publish(more.items(), tmp_path / "v2", 2, **SIZE).base_version is None

    def breaks():
        yield "a", torch.ones(2)
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="is gone"):
        publisher.publish(breaks(), tmp_path / "v3", 3, **SIZE)
    assert publisher.publish(more.items(), tmp_path / "v4", 4, **SIZE).base_version is None


def test_a_closed_mirror_leaves_nothing(tmp_path):
    mirror = Mirror()
    publication = mirror.keep(weights_of(1).items(), 1)
    assert publication.folder.exists()
    assert_equal(mirror.keep(weights_of(2).items(), 2), weights_of(2))
    assert not publication.folder.exists()
    mirror.close()
    assert not publication.folder.parent.exists()
