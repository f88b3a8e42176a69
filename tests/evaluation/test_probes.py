"""Probes: the originals' numbers, scikit-learn's, and cases small enough to follow."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from numpy.testing import assert_allclose

import vitlab
from vitlab import cli
from vitlab.data import loader
from vitlab.evaluation import probes
from vitlab.evaluation.probes import Features

FIXTURES = Path(os.environ.get("VITLAB_TEST_DATA", Path(__file__).parents[2] / "../shared"))
SHOTS = (1, 5, 10, 25)


def blobs(n: int, classes: int, width: int, seed: int = 0, spread: float = 1.0) -> Features:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    y = np.arange(n) % classes
    x = centres[y] + spread * rng.normal(size=(n, width))
    return Features(x.astype(np.float32), y)


def test_few_shot_equals_the_original_code() -> None:
    path = FIXTURES / "fixtures" / "original-code" / "fewshot.npz"
    if not path.is_file():
        pytest.skip(f"no {path} (VITLAB_TEST_DATA names its folder)")
    with np.load(path) as file:
        f = {k: file[k] for k in file}
    train = Features(f["features_train"], f["labels_train"].astype(np.int64))
    test = Features(f["features_test"], f["labels_test"].astype(np.int64))
    classes = int(train.y.max()) + 1
    seen = 0
    for seed in range(3):
        rows = probes.few_shot_rows(train.y, seed, SHOTS)
        for j, shots in enumerate(SHOTS):
            name = f"seed{seed}_shots{shots}"
            assert np.array_equal(rows[shots], f[f"{name}/indices"])
            found = probes.few_shot(train, rows[shots], classes)
            weights = np.vstack([found.weights, found.bias / probes.CONSTANT])
            assert_allclose(weights, f[f"{name}/weights_float64"], rtol=0, atol=1e-9)
            assert_allclose(found.scores(test.x), f[f"{name}/scores_float64"], rtol=0, atol=1e-7)
            assert found.accuracy(test) == pytest.approx(float(f["accuracy"][seed, j]), abs=1e-6)
            seen += 1
    assert seen == 12


def test_few_shot_by_hand() -> None:
    """One feature, two pictures: standardised to -1 and 1, so w = 2 / (2 + ridge) times 1."""
    train = Features(np.array([[3.0], [5.0]], np.float32), np.array([0, 1]))
    found = probes.few_shot(train, np.array([0, 1]), classes=2, ridge=2.0)
    assert_allclose(found.mean, [4.0])
    assert_allclose(found.std, [1.0 + 1e-5])
    z = 1 / (1 + 1e-5)
    assert_allclose(found.weights, [[-2 * z / (2 * z * z + 2), 2 * z / (2 * z * z + 2)]])
    assert_allclose(found.bias, [0.0, 0.0], atol=1e-12)


@pytest.mark.parametrize("n", [10, 400])
def test_few_shot_is_the_same_by_either_equation(n: int) -> None:
    """Fewer pictures than features, or more: the normal equations hold in both cases."""
    train = blobs(n, 5, 40)
    rows = np.arange(n)
    found = probes.few_shot(train, rows, 5)
    x = np.column_stack([(train.x - found.mean) / found.std, np.full(n, 100.0)])
    w = np.vstack([found.weights, found.bias / 100])
    y = 2 * np.eye(5)[train.y] - 1
    assert_allclose(x.T @ (x @ w - y) + 2.0**10 * w, 0, atol=1e-7)


def test_more_shots_contain_the_fewer_and_rare_classes_give_what_they_have() -> None:
    labels = np.array([0] * 30 + [1] * 3 + [2] * 30)
    rows = probes.few_shot_rows(labels, seed=1, shots=(1, 5, 10))
    assert [len(rows[k]) for k in (1, 5, 10)] == [3, 13, 23]
    assert set(rows[1]) < set(rows[5]) < set(rows[10])
    assert not np.array_equal(rows[5], probes.few_shot_rows(labels, 2, (5,))[5])


@pytest.mark.parametrize("k", [1, 5, 20])
def test_nearest_neighbours_are_those_of_scikit_learn(k: int) -> None:
    neighbors = pytest.importorskip("sklearn.neighbors")
    train, test = blobs(300, 4, 16, spread=2), blobs(101, 4, 16, seed=1, spread=2)
    theirs = neighbors.KNeighborsClassifier(k, metric="cosine").fit(train.x, train.y)
    found = probes.nearest(train, test.x, k, chunk=32)
    expected = theirs.kneighbors(test.x.astype(np.float64), return_distance=False)
    assert np.array_equal(found, expected)
    accuracy = theirs.score(test.x, test.y)
    assert 0.3 < accuracy < 1
    assert probes.knn(train, test, k, 4) == pytest.approx(accuracy)


@pytest.mark.parametrize("strength", [1e-3, 1.0, 100.0])
def test_linear_is_scikit_learns(strength: float) -> None:
    models = pytest.importorskip("sklearn.linear_model")
    train, test = blobs(300, 4, 16, spread=2), blobs(101, 4, 16, seed=1, spread=2)
    found = probes.linear(train, 4, strength)
    z = (train.x - found.mean) / found.std
    theirs = models.LogisticRegression(C=strength, tol=1e-10, max_iter=10000).fit(z, train.y)
    assert_allclose(found.weights.T, theirs.coef_, atol=1e-5)
    difference = found.bias - theirs.intercept_  # which are free up to a constant
    assert_allclose(difference, difference.mean(), atol=1e-5)
    assert found.accuracy(test) == theirs.score((test.x - found.mean) / found.std, test.y)


def test_strength_is_chosen_on_pictures_held_out() -> None:
    noise = blobs(60, 3, 50, spread=6)  # more features than pictures: strong fits overfit
    assert probes.choose_strength(noise, 3, seed=0) in probes.STRENGTHS
    easy = blobs(60, 3, 5, spread=0.01)
    assert probes.choose_strength(easy, 3, seed=0) <= 0.01, "of those that do, the weakest"


def test_what_the_head_sees_is_what_is_probed() -> None:
    bundle, source = toys.bundle(head_hidden=12), toys.source(9)
    found = probes.features(bundle, source, batch=4)
    (batch,) = loader.eval_batches(source, bundle.preprocess, batch=9)
    with torch.no_grad():
        logits = bundle.model.head(torch.from_numpy(found.x))
        torch.testing.assert_close(logits, bundle.model(batch.images))
    assert found.x.shape == (9, 12)
    assert found.y.tolist() == source.labels.tolist()


def test_layers_and_pools() -> None:
    bundle, source = toys.bundle(), toys.source(5)
    depth = bundle.model.config.depth
    last = probes.features(bundle, source, layer=depth)
    assert np.array_equal(last.x, probes.features(bundle, source, layer=-1).x)
    with torch.no_grad():
        y = bundle.model.norm(torch.from_numpy(last.x)).numpy()
    assert_allclose(y, probes.features(bundle, source).x, atol=1e-6)
    mean = probes.features(bundle, source, layer=1, pool="mean")
    assert mean.x.shape == last.x.shape
    assert not np.allclose(mean.x, probes.features(bundle, source, layer=1, pool="token").x)


def test_what_a_model_does_not_have_is_refused() -> None:
    source = toys.source(5)
    with pytest.raises(ValueError, match="between -3 and 2, not 3"):
        probes.features(toys.bundle(), source, layer=3)
    with pytest.raises(ValueError, match="no class token"):
        probes.features(toys.bundle(pool="mean", class_token=False), source, pool="token")
    with pytest.raises(ValueError, match="Vision Transformer"):
        probes.features(toys.resnet(), source, layer=1)
    assert probes.features(toys.resnet(), source).x.shape[1] == toys.resnet().model.config.features
    with pytest.raises(ValueError, match="between 1 and the 5"):
        probes.nearest(probes.features(toys.bundle(), source), np.zeros((1, 24)), 6)


def test_the_cache_knows_weights_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, source = toys.bundle(), toys.source(9)
    first = probes.features(bundle, source, cache=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(probes.loader, "eval_batches", lambda *a, **k: 1 / 0)
        assert np.array_equal(probes.features(bundle, source, cache=tmp_path).x, first.x)
        with pytest.raises(ZeroDivisionError):
            probes.features(bundle, toys.source(8), cache=tmp_path)
        with pytest.raises(ZeroDivisionError):
            probes.features(bundle, source, layer=1, cache=tmp_path)
        with torch.no_grad():
            bundle.model.norm.bias += 1
        with pytest.raises(ZeroDivisionError):
            probes.features(bundle, source, cache=tmp_path)
    (kept,) = tmp_path.glob("*.safetensors")
    kept.write_bytes(b"damaged")
    with torch.no_grad():
        bundle.model.norm.bias -= 1
    assert_allclose(probes.features(bundle, source, cache=tmp_path).x, first.x, atol=1e-6)


@pytest.mark.usefixtures("shared_process")
@pytest.mark.parametrize("method", ["fewshot", "knn", "linear"])
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    vitlab.save(toys.bundle(), tmp_path / "bundle")
    toys.write_folder(tmp_path / "photos")
    words = ["probe", str(tmp_path / "bundle"), str(tmp_path / "photos"), "--method", method]
    assert cli.main([*words, "--k", "3", "--shots", "1", "3", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == (2 if method == "fewshot" else 1)
    assert all(line["n"] == 4 and 0 <= line["top1"] <= 1 for line in found)
    assert len(found[0]["seeds"]) == (3 if method == "fewshot" else 1)
    assert cli.main([*words, "--k", "3"]) == 0
    assert "95 % interval" in capsys.readouterr().out


def test_probing_does_not_depend_on_the_batch() -> None:
    one, other = (probes.features(toys.bundle(), toys.source(9), batch=b).x for b in (2, 9))
    assert_allclose(one, other, atol=1e-5)
