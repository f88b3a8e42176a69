"""The parts are plain PyTorch: vitlab's model in an ordinary loop with an ordinary DataLoader.

    python examples/plain_loop.py --steps 300

On two CPU cores 300 steps take about half a minute and reach some 80 % on the sample's 2,000
test pictures.
"""

import argparse

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vitlab
from vitlab.data.sources import Source, open_spec


def tensors(source: Source) -> TensorDataset:
    """All pictures [N, 3, 28, 28] in [-1, 1], and labels [N]."""
    images = torch.stack([torch.from_numpy(image.copy()) for image, _ in source])
    return TensorDataset(
        images.permute(0, 3, 1, 2).float() / 127.5 - 1, torch.from_numpy(source.labels)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    sets = open_spec("sample")
    train = DataLoader(tensors(sets["train"]), batch_size=128, shuffle=True, drop_last=True)
    test = DataLoader(tensors(sets["test"]), batch_size=250)

    model = vitlab.create(
        "vit-ti16", image=28, patch=7, width=96, depth=4, heads=4, mlp_width=192, classes=10
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    done = 0
    while done < steps:
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break

    model.eval()
    with torch.inference_mode():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    print(f"{right} of {len(sets['test'])} right after {steps} steps")


if __name__ == "__main__":
    main()
