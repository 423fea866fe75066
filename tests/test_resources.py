import sysconfig

import pytest

from flt_mol import resources


@pytest.mark.parametrize("kind", ["datasets", "models", "configs"])
def test_each_folder_is_there(kind):
    folder = resources.folder(kind)
    assert folder.is_dir()
    assert list(folder.rglob("*.yaml"))


def test_a_missing_folder_says_where_it_was_looked_for():
    with pytest.raises(FileNotFoundError, match="'nonsense'.*install the package again"):
        resources.folder("nonsense")


def test_without_a_checkout_the_wheels_data_is_used(tmp_path, monkeypatch):
    data = tmp_path / "share" / "flt_mol" / "models"
    data.mkdir(parents=True)
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "site-packages" / "flt_mol")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert resources.folder("models") == data


def test_data_installed_beside_the_package_is_found(tmp_path, monkeypatch):
    data = tmp_path / "target" / "share" / "flt_mol" / "models"
    data.mkdir(parents=True)
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "target" / "flt_mol")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "elsewhere"))
    monkeypatch.setattr(resources.metadata, "files", lambda name: [])
    assert resources.folder("models") == data
