"""Lets torchvision, whose wheel is built for CUDA, be imported beside a torch that is not.

SGLang imports torchvision whatever the model; torchvision needs two operators to be declared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Declarations:
    """Declares the operators when torchvision is first looked for; finds no module itself."""

    library: object = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Declarations())
