"""One update, and what the loop does when something goes wrong; on tiny models."""

import gc
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors import safe_open
from torch.nn import functional as F

import vitlab
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.models.vit import ViT, ViTConfig
from vitlab.training import loop
from vitlab.training.loop import Job, Plan
from vitlab.training.optim import make_optimizer


def make_job(classes: int = 4, **changes: Any) -> Job:
    config = toys.config(Path("unused"), **{"label_smoothing": 0.0, "clip": 0.0, **changes})
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=16, classes=classes, **toys.SHAPE, dropout=config.dropout or 0.0))
    torch.nn.init.normal_(model.head.weight, std=0.3)
    plan = Plan(
        device="cpu", precision=config.precision or "float32", processes=1, threads=1,
        workers=0, in_memory=True, lr=0.1, steps=10, warmup_steps=0, eval_every=5,
    )  # fmt: skip
    return Job(
        config=config, plan=plan, model=model, preprocess=Preprocess(size=(16, 16)), average=None,
        train=toys.source(classes=min(classes, 4)), val=None,
        optimizer=make_optimizer(model, config.optimizer, config.weight_decay),
    )  # fmt: skip


def make_batch(n: int = 8, classes: int = 4) -> Batch:
    images, _ = toys.pictures(n, min(classes, 4))
    labels = torch.arange(n) % classes
    return Batch(torch.from_numpy(images).permute(0, 3, 1, 2), labels, list(range(n)), [])


def weights(job: Job) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in job.model.parameters()])


# One update ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_equals_the_whole_batch(parts: int) -> None:
    results = []
    for accumulate in (1, parts):
        job = make_job(optimizer="sgd", accumulate=accumulate, mixup=0.5, label_smoothing=0.1)
        job.model.double()
        loss, norm = loop.update(job, lambda x, job=job: job.model(x.double()), make_batch(), 0)
        results.append((loss, norm, weights(job)))
    (loss, norm, whole), (other_loss, other_norm, cut) = results
    assert loss == pytest.approx(other_loss, abs=1e-6)
    assert norm == pytest.approx(other_norm, rel=1e-6)
    assert (whole - cut).abs().max() < 1e-6
    assert (whole - weights(make_job())).abs().max() > 1e-3, "it moved"


def fixed_logits(row: list[float]) -> Any:
    """A forward pass with known logits, through which a gradient still flows."""
    bias = torch.zeros(len(row), requires_grad=True)
    return lambda x: torch.tensor([row]).expand(len(x), -1) + bias


@pytest.mark.parametrize(
    ("smoothing", "expected"), [(0.0, 0.16985), (0.1, 0.33651)], ids=["plain", "smoothed"]
)
def test_hard_loss_by_hand(smoothing: float, expected: float) -> None:
    job = make_job(classes=3, label_smoothing=smoothing)
    batch = replace(make_batch(2, 3), labels=torch.zeros(2, dtype=torch.int64))
    job.model.head.weight.grad = torch.zeros_like(job.model.head.weight)
    loss, _ = loop.update(job, fixed_logits([2.0, 0.0, -1.0]), batch, 0)
    assert loss == pytest.approx(expected, abs=1e-4)


def test_soft_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets 0.7, 0.3, 0 give 0.76985: smoothing is applied once, and only where asked for."""
    soft = torch.tensor([[0.7, 0.3, 0.0]]).expand(2, -1)
    monkeypatch.setattr(loop, "mix", lambda images, *rest: (images, soft))
    for smoothing in (0.0, 0.1):
        job = make_job(classes=3, mixup=0.5, label_smoothing=smoothing)
        job.model.head.weight.grad = torch.zeros_like(job.model.head.weight)
        loss, _ = loop.update(job, fixed_logits([2.0, 0.0, -1.0]), make_batch(2, 3), 0)
        logs = F.log_softmax(torch.tensor([2.0, 0.0, -1.0]), dim=0)
        assert loss == pytest.approx(
            (1 - smoothing) * 0.76985 - smoothing * float(logs.mean()), abs=1e-4
        )


def test_mixup_of_a_single_picture_changes_nothing() -> None:
    results = []
    for mixup, cutmix in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.5, 0.5)):
        job = make_job(batch=1, mixup=mixup, cutmix=cutmix)
        loop.update(job, job.model, make_batch(1), 3)
        results.append(weights(job))
    for other in results[1:]:
        assert torch.allclose(other, results[0], atol=1e-6)


def test_an_odd_batch_is_mixed() -> None:
    job = make_job(mixup=0.5, batch=7)
    loss, norm = loop.update(job, job.model, make_batch(7), 0)
    assert math.isfinite(loss)
    assert math.isfinite(norm)


def test_dropout_depends_on_seed_and_step_alone() -> None:
    def after(seed: int, step: int, noise: int) -> torch.Tensor:
        job = make_job(dropout=0.5, seed=seed)
        job.model.train()
        torch.manual_seed(noise)
        loop.update(job, job.model, make_batch(), step)
        return weights(job)

    assert torch.equal(after(0, 3, noise=1), after(0, 3, noise=2))
    assert not torch.equal(after(0, 3, noise=1), after(0, 4, noise=1))
    assert not torch.equal(after(0, 3, noise=1), after(1, 3, noise=1))


def test_mixing_depends_on_seed_and_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    plain = loop.mix
    monkeypatch.setattr(loop, "mix", lambda *a: seen.append(plain(*a)[1]) or plain(*a))
    for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0)):
        job = make_job(mixup=0.5, seed=seed)
        loop.update(job, job.model, make_batch(), step)
    first, again, *others = seen
    assert torch.equal(first, again)
    assert not any(torch.equal(first, other) for other in others)


def test_the_rate_set_is_that_of_the_step() -> None:
    job = make_job()
    for step in range(3):
        loop.update(job, job.model, make_batch(), step)
        expected = loop.learning_rate(step, 10, peak=0.1, warmup=0, schedule="cosine")
        assert [g["lr"] for g in job.optimizer.param_groups] == [expected] * 2


def test_bf16_gives_finite_results_near_float32() -> None:
    losses = []
    for precision in ("float32", "bf16"):
        job = make_job(precision=precision)
        dtypes = []
        job.model.head.register_forward_hook(lambda m, i, o, d=dtypes: d.append(o.dtype))
        for step in range(3):
            loss, norm = loop.update(job, job.model, make_batch(), step)
            assert math.isfinite(loss + norm)
        losses.append(loss)
        assert set(dtypes) == {torch.bfloat16 if precision == "bf16" else torch.float32}
        assert {p.dtype for p in job.model.parameters()} == {torch.float32}
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


def test_what_is_logged_are_floats_and_tensors_do_not_pile_up() -> None:
    job = make_job()
    counts = []
    for step in range(30):
        loss, norm = loop.update(job, job.model, make_batch(), step)
        assert (type(loss), type(norm)) == (float, float)
        if step in (5, 29):
            gc.collect()
            counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert counts[0] == counts[1]


# What can go wrong -----------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, at: int, how: Any) -> None:
    """Let `how` loose before update number `at`."""
    plain = loop.update

    def update(job: Job, forward: Any, batch: Batch, step: int) -> tuple[float, float]:
        return plain(job, how(forward, job) if step == at else forward, batch, step)

    monkeypatch.setattr(loop, "update", update)


def checkpoints(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("*.safetensors"))


def all_finite(path: Path) -> bool:
    with safe_open(path, framework="pt") as f:
        return all(bool(f.get_tensor(k).isfinite().all()) for k in f.keys())  # noqa: SIM118


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 7, lambda forward, job: lambda x: forward(x) * factor)
    config = toys.config(
        tmp_path / "run", steps=20, save_every="0.000001s", lr=0.002, select="loss", nonfinite=0
    )
    with pytest.raises(FloatingPointError, match=r"step 7: loss nan, .* learning rate 0.00155;"):
        vitlab.train(toys.pictures(), config)
    assert [p.stem for p in checkpoints(tmp_path / "run")] == ["000000006", "000000007"]
    assert all(map(all_finite, checkpoints(tmp_path / "run")))
    assert all_finite(tmp_path / "run" / "checkpoints" / "best")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_gradient_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss still is: clipping would turn the weights into NaN without a word."""

    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * float("inf")

    spoil(monkeypatch, 3, lambda forward, job: lambda x: Overflow.apply(forward(x)))
    config = toys.config(tmp_path / "run", save_every="0.000001s", nonfinite=0)
    with pytest.raises(
        FloatingPointError, match=r"step 3: loss 1.*, norm of the gradient (inf|nan)"
    ):
        vitlab.train(toys.pictures(), config)
    assert all(map(all_finite, checkpoints(tmp_path / "run")))


def test_weights_that_are_not_finite_are_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(forward: Any, job: Job) -> Any:
        job.model.head.bias.data[0] = float("nan")
        return lambda x: forward(x).nan_to_num()

    spoil(monkeypatch, 5, poison)
    config = toys.config(tmp_path / "run", save_every="0.000001s", held_out=0)
    with pytest.raises(FloatingPointError, match=r"step \d+: .* is not finite"):
        vitlab.train(toys.pictures(), config)
    assert checkpoints(tmp_path / "run")
    assert all(map(all_finite, checkpoints(tmp_path / "run")))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"
        ),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_memory_that_runs_out_is_told_with_what_helps(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(forward: Any, job: Job) -> Any:
        raise error

    spoil(monkeypatch, 2, raises)
    config = toys.config(tmp_path / "run", accumulate=2)
    with pytest.raises(MemoryError) as caught:
        vitlab.train(toys.pictures(), config)
    said = str(caught.value)
    for part in ("--batch 8 in 4 parts", "16 x 16", "float32", "--accumulate 8", "bf16", "--size"):
        assert part in said
    assert "\n" not in said


def test_other_errors_pass_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(forward: Any, job: Job) -> Any:
        raise RuntimeError("a bug")

    spoil(monkeypatch, 2, raises)
    with pytest.raises(RuntimeError, match="a bug"):
        vitlab.train(toys.pictures(), toys.config(tmp_path / "run"))


# What a run tells ------------------------------------------------------------------------------


def test_history_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    vitlab.train(toys.pictures(), toys.config(out, ema=0.9, label_smoothing=0.3))
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in history if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 13))
    for line in train:
        assert set(line) == {"kind", "step", "epoch", "loss", "lr", "grad_norm", *toys.TIMING}
        assert 0 <= line["waiting"] <= 1
        assert all(isinstance(v, float) for k, v in line.items() if k not in ("kind", "step"))
    scored = [line for line in history if line["kind"] == "eval"]
    assert [(line["step"], line["weights"]) for line in scored] == [
        (step, weights) for step in (4, 8, 12) for weights in ("last", "ema")
    ]
    assert {line["n"] for line in scored} == {8}


def test_validation_loss_is_never_smoothed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = toys.config(out, steps=60, lr=3e-3, label_smoothing=0.9)
    bundle = vitlab.train(toys.pictures(), config)
    metrics = vitlab.evaluate(bundle, toys.source())
    images = torch.stack(
        [
            torch.from_numpy(image).permute(2, 0, 1)
            for image, _ in map(toys.source().__getitem__, range(40))
        ]
    )
    logits = bundle.model(images.float().div(255).sub(0.5).div(0.5))
    labels = torch.from_numpy(toys.source().labels)
    plain = F.cross_entropy(logits, labels).item()
    assert metrics.loss == pytest.approx(plain, abs=1e-5)
    smoothed = F.cross_entropy(logits, labels, label_smoothing=0.9).item()
    assert abs(smoothed - plain) > 0.01, "the two can be told apart"


def test_average_is_scored_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = toys.config(out, steps=60, lr=3e-3, ema=0.9998)
    bundle = vitlab.train(toys.pictures(), config)
    scored = [line for line in toys.lines(out) if line["kind"] == "eval" and line["step"] == 60]
    accuracy = {line["weights"]: line["top1"] for line in scored}
    assert abs(accuracy["ema"] - accuracy["last"]) <= 0.05
    with safe_open(checkpoints(out)[-1], framework="pt") as f:
        for name, tensor in bundle.model.state_dict().items():
            assert torch.equal(tensor, f.get_tensor(f"average.{name}"))
        assert not torch.equal(bundle.model.head.weight, f.get_tensor("model.head.weight"))
    assert bundle.card.metrics["loss"] == next(
        line["loss"] for line in scored if line["weights"] == "ema"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.01}, "--lr 0.01 is high for adamw"),
        ({"batch": 1, "mixup": 0.2}, "--mixup and --cutmix do nothing"),
        ({"workers": 77, "steps": 1}, "--workers 77 is more than the"),
        ({}, "only 4 patches an image"),
        ({"lr": 0.0}, "every picture is taken for the same class"),
    ],
)
def test_what_looks_like_a_mistake_is_told(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "workers" in changes:  # not really
        plain = loop.loader.train_batches
        monkeypatch.setattr(
            loop.loader, "train_batches", lambda *a, **k: plain(*a, **{**k, "workers": 0})
        )
        score = loop.score
        monkeypatch.setattr(loop, "score", lambda *a, **k: score(*a, **{**k, "workers": 0}))
    with caplog.at_level(logging.WARNING, "vitlab"):
        vitlab.train(toys.pictures(), toys.config(tmp_path / "run", **changes))
    assert said in caplog.text
    if changes:
        assert "4 patches" in caplog.text
    else:
        assert len(caplog.records) == 1, "and nothing else is"
