"""LoRA (arXiv 2106.09685) by way of peft: adapters in training, a plain model afterwards."""

from typing import Any

import torch
from torch import nn

from vitlab.models.vit import ViT
from vitlab.training.optim import HEAD

TARGETS = r"blocks\.\d+\.(attention\.(qkv|out)|mlp\.(up|down))"  # every matrix of a block


def inject(model: nn.Module, rank: int) -> None:
    """Put an adapter beside every matrix of the encoder blocks, in place.

    W x becomes W x + 2 B A x with A [rank, in] random and B [out, rank] zero: at first the model
    is what it was. Only the adapters and the head are trained. Raises ValueError without peft, or
    for a model without encoder blocks.
    """
    try:
        import peft
    except ImportError:
        raise ValueError("--lora needs peft: pip install 'vitlab[lora]'") from None
    if not isinstance(model, ViT):
        raise ValueError("--lora needs the encoder blocks of a Vision Transformer")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS)
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if HEAD.search(name):
            parameter.requires_grad = True


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the adapters to their matrices and take them away, in place: a plain model is left."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            adapted: Any = module
            adapted.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, adapted.get_base_layer())
