"""What a pre-training costs: bytes, shards, hours and money from a few numbers.

    python bench/scaling.py --pictures-per-second-per-core 640

Prints the tables of docs/scaling.md. Training takes 6 x MACs x pictures floating-point operations
(forward and backward, two each); MACs are counted from the models (`vitlab.models.cost`), the
loader's rate comes from `bench/load_speed.py`, the rest are the assumptions below, printed too.
"""

import argparse

from vitlab.models.cost import macs
from vitlab.models.zoo import MODELS

SETS = {  # name -> pictures, passes of the paper (Table 3)
    "ImageNet-21k": (14_197_122, 90),
    "JFT-300M": (303_000_000, 14),
}
PASSES = {("vit-b16", "JFT-300M"): 7, ("vit-b32", "JFT-300M"): 7, ("vit-l32", "JFT-300M"): 7}
NAMES = ("vit-b32", "vit-b16", "vit-l16", "vit-h14")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes-a-picture", type=float, default=110e3)
    parser.add_argument("--shard-bytes", type=float, default=1e9)
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of a GPU in bfloat16")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of the peak reached")
    parser.add_argument("--price", type=float, default=2.5, help="of a GPU hour, in dollars")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--pictures-per-second-per-core", type=float, default=640)
    o = parser.parse_args()
    print("| set | pictures | bytes | shards |\n| --- | --- | --- | --- |")
    for name, (pictures, _) in SETS.items():
        size = pictures * o.bytes_a_picture
        print(f"| {name} | {pictures:,} | {size / 1e12:.1f} TB | {size / o.shard_bytes:,.0f} |")
    print("\n| model, set | passes | exaFLOP | GPU hours | hours on "
          f"{o.gpus} GPUs | cost, $ | pictures/s a GPU | cores a GPU | MB/s a GPU |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in NAMES:
        cost = 6 * macs(MODELS[name])
        for which, (pictures, usual) in SETS.items():
            passes = PASSES.get((name, which), usual)
            flop = cost * pictures * passes
            hours = flop / (o.peak * o.utilisation) / 3600
            rate = o.peak * o.utilisation / cost
            print(f"| {name}, {which} | {passes} | {flop / 1e18:,.0f} | {hours:,.0f}"
                  f" | {hours / o.gpus:,.1f} | {hours * o.price:,.0f} | {rate:,.0f}"
                  f" | {rate / o.pictures_per_second_per_core:.1f}"
                  f" | {rate * o.bytes_a_picture / 1e6:,.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
