"""Attention on this CPU: torch's fused kernel against two products and a softmax.

    python bench/attention.py --rounds 9

Each row: batch x heads x tokens x head width, milliseconds of a forward and backward pass, best of
the interleaved rounds. It is what `vitlab.models.basics.attend` goes by.
"""

import argparse
import os
import time

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as `vitlab` sets it

import torch
from torch import Tensor
from torch.nn import functional as F

SHAPES = [(128, 3, 17, 32), (64, 3, 65, 64), (32, 6, 145, 64), (32, 6, 197, 64), (16, 6, 257, 64),
          (8, 12, 577, 64), (4, 12, 1025, 64)]  # fmt: skip


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1).to(v.dtype) @ v


def once(attention: object, shape: tuple[int, ...], dtype: torch.dtype, grad: bool) -> float:
    b, h, n, d = shape
    z = torch.randn(b, n, 3 * h * d, dtype=dtype, requires_grad=grad)
    began = time.perf_counter()
    out = attention(*z.unflatten(2, (3, h, d)).permute(2, 0, 3, 1, 4))  # type: ignore[operator]
    out = out.transpose(1, 2).flatten(2)
    if grad:
        out.backward(torch.ones_like(out))
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print("| shape | dtype | pass | fused, ms | products, ms | fused / products |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for grad in (False, True):
                times: dict[str, list[float]] = {"fused": [], "products": []}
                for _ in range(rounds):
                    for name, f in (("fused", F.scaled_dot_product_attention),
                                    ("products", products)):  # fmt: skip
                        times[name].append(once(f, shape, dtype, grad))
                a, b = min(times["fused"]), min(times["products"])
                what = "both" if grad else "forward"
                print(f"| {' x '.join(map(str, shape))} | {str(dtype)[6:]} | {what} | {a:.2f}"
                      f" | {b:.2f} | {a / b:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
