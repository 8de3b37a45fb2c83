"""The tensors that a fleet shares: the model's own, beside their float32 anchor and momentum.

Invariant: `anchor` is the state the fleet agreed on last, in float32; nothing but `apply` and `adopt` changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composer_replication.collective.codec import content_hash
from composer_replication.collective.layout import DEFAULT_CHUNK_ELEMENTS, Layout, Part, Slot
from composer_replication.collective.norms import difference_square_norm
from composer_replication.diloco.held import Held, named_tensors
from composer_replication.diloco.outer_step import average_step_, digest, nesterov_step_, pseudo_gradient
from composer_replication.diloco.tied import tied_names
from composer_replication.errors import FleetMismatch

__all__ = ["SharedTensors"]


@dataclass(slots=True)
class _Entry:
    slot: Slot
    held: Held  # the model's tensor
    anchor: Tensor  # 1-D float32 on the outer device
    momentum: Tensor  # 1-D float32 on the outer device
    trained: bool  # at some time in the present interval


def _bytes_of(tensor: Tensor) -> memoryview:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)  # pyright: ignore[reportArgumentType] - numpy's stubs name no buffer before Python 3.12


class SharedTensors:
    """Holds anchor and momentum for the tensors of `model` that are trained, and moves values between them.

    `hold` says how each of them is held: whole in this process, unless it is spread over several.

    Frozen tensors have neither: they are not sent, not changed, and join with zero momentum when they are
    unfrozen (`notice_trainable`). Integer tensors and non-persistent buffers are never touched.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        *,
        device: str | torch.device = "cpu",
        average_buffers: bool = True,
        chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
        hold: Callable[[str, Tensor], Held] = Held,
    ) -> None:
        self._device = device
        self._chunk_elements = chunk_elements
        self._named: dict[str, tuple[Held, str]] = {}
        for name, tensor, kind in named_tensors(model, average_buffers):
            if tensor.is_meta:
                raise ValueError(f"{name} is on the meta device: give it values before the fleet starts")
            if kind == "parameter" and tensor.requires_grad and not tensor.is_floating_point():
                raise ValueError(f"{name} is {tensor.dtype}: only real floating-point tensors can be averaged")
            self._named[name] = (hold(name, tensor), kind)
        self._tied = tied_names(model) if isinstance(model, nn.Module) else {}
        self._entries: dict[str, _Entry] = {}
        self._watched: list[bool] = []
        self.notice_trainable()
        if not any(entry.slot.kind == "parameter" for entry in self._entries.values()):
            raise ValueError("the model has no trainable parameter")

    # -- what takes part ---------------------------------------------------------------------------------------

    def trainable(self) -> list[bool]:
        """Which tensors are to be trained now."""
        return [held.tensor.requires_grad for held, _ in self._named.values()]

    def notice_trainable(self) -> None:
        """Take up tensors that have become trainable. Cheap; called before every inner step."""
        # Which, not how many: one may be frozen in the same moment as another is unfrozen.
        trainable = self.trainable()
        if trainable != self._watched:
            self._watched = trainable
            for name in self._named:
                if self._is_trainable(name):
                    self._track(name).trained = True

    def begin_interval(self) -> None:
        """Forget which tensors were trained in the last interval: those that are trainable now are in the next."""
        for entry in self._entries.values():
            entry.trained = False
        self._watched = []
        self.notice_trainable()

    def _is_trainable(self, name: str) -> bool:
        held, kind = self._named[name]
        return kind == "buffer" or held.tensor.requires_grad or not isinstance(held.tensor, nn.Parameter)

    def _track(self, name: str) -> _Entry:
        if name not in self._entries:
            held, kind = self._named[name]
            slot = Slot(name, held.shape, str(held.dtype), "buffer" if kind == "buffer" else "parameter")
            # Its value before the first step that changes it: what every replica has agreed on for a frozen tensor.
            anchor = self._place(held.read(0, held.elements).to(torch.float32, copy=True))
            self._entries[name] = _Entry(slot, held, anchor, torch.zeros_like(anchor), False)
        return self._entries[name]

    def _place(self, flat: Tensor) -> Tensor:
        if self._device == "model":
            return flat
        pin = str(self._device) == "cpu" and flat.is_cuda
        flat = flat.to(self._device)
        return flat.pin_memory() if pin else flat

    def _ordered(self) -> list[_Entry]:
        return [self._entries[name] for name in self._named if name in self._entries]

    def layout(self) -> Layout:
        """All tensors that have an anchor."""
        return Layout(tuple(entry.slot for entry in self._ordered()), self._chunk_elements)

    def interval_layout(self) -> Layout:
        """The tensors that were trained at some time in this interval: what is exchanged."""
        return Layout(tuple(entry.slot for entry in self._ordered() if entry.trained), self._chunk_elements)

    def frozen_hashes(self) -> dict[str, str]:
        """Content hash of each parameter without an anchor: it is never sent, so it must be equal from the start."""
        return {
            name: content_hash(_bytes_of(held.read(0, held.elements)))
            for name, (held, kind) in self._named.items()
            if kind == "parameter" and name not in self._entries
        }

    def tied(self) -> dict[str, str]:
        """Further names that the model has for a shared parameter, each with the name that it travels under."""
        return dict(self._tied)

    # -- local weights <-> anchor --------------------------------------------------------------------------------

    def pseudo_gradient_into(self, layout: Layout, part: Part, out: Tensor) -> None:
        """Write anchor minus local of one part into `out` (1-D float32 CPU, `part.elements` long).

        For weights narrower than float32 the interval began at the *rounded* anchor, and that is what the local
        weights are taken from: otherwise each round would undo the steps too small for the narrow type, which the
        float32 anchor exists to keep.
        """
        pseudo_gradient(*self._start_and_local(layout, part), out)

    def square_norm(self, layout: Layout, part: Part) -> float:
        """Squared norm of one part's pseudo-gradient; not finite exactly when an element of it is not."""
        return difference_square_norm(*self._start_and_local(layout, part))

    def _start_and_local(self, layout: Layout, part: Part) -> tuple[Tensor, Tensor]:
        """Where the interval began and where it ended, float32 on the CPU: views where they can be."""
        entry = self._entries[layout.slots[part.slot].name]
        local = entry.held.read(part.start, part.stop)
        start = entry.anchor[part.start : part.stop]
        if local.dtype != torch.float32:
            start = start.to(local.dtype).to(torch.float32)
            local = local.to(torch.float32)
        return start.cpu(), local.cpu()

    def apply(
        self, layout: Layout, part: Part, mean: Tensor, *, lr: float, momentum: float, divisor: float, average: bool
    ) -> None:
        """Take the outer step on the anchor of one part and bring the local weights to it.

        `mean` is the agreed mean pseudo-gradient, 1-D float32. Buffers, and everything when `average` is set,
        move to the mean itself.
        """
        entry = self._entries[layout.slots[part.slot].name]
        anchor, velocity = entry.anchor[part.start : part.stop], entry.momentum[part.start : part.stop]
        mean = mean.to(anchor.device)
        local = entry.held.view(part.start, part.stop)
        if local is not None and local.device != anchor.device:
            local = None  # else one pass does it all
        if average or entry.slot.kind == "buffer":
            average_step_(anchor, mean, local=local)
        else:
            nesterov_step_(anchor, velocity, mean, lr=lr, momentum_factor=momentum, divisor=divisor, local=local)
        if local is None:
            entry.held.write(entry.anchor, part.start, part.stop)
        else:
            entry.held.written(entry.anchor, part.start, part.stop)

    def restore(self) -> None:
        """Bring every shared local tensor back to the anchor."""
        for entry in self._ordered():
            entry.held.write(entry.anchor, 0, entry.slot.elements)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model holds the anchor inside the block, and its own weights again after it."""
        kept = [(entry.held, entry.held.keep()) for entry in self._ordered()]
        self.restore()
        try:
            yield
        finally:
            for held, local in kept:
                held.put_back(local)

    # -- whole state ---------------------------------------------------------------------------------------------

    def mark_trained(self, names: Sequence[str]) -> None:
        """The tensors that were trained in the interval being resumed."""
        for name, entry in self._entries.items():
            entry.trained = entry.trained or name in names

    def digest(self, text: str) -> str:
        """Hash of every bit of anchor and momentum, by name, and of `text`."""
        return digest(((e.slot.name, e.anchor, e.momentum) for e in self._ordered()), text)

    def anchors(self) -> list[Tensor]:
        """Anchor of each slot of `layout()`, on the CPU; views where they are there already."""
        return [entry.anchor.cpu() for entry in self._ordered()]

    def momenta(self) -> list[Tensor]:
        return [entry.momentum.cpu() for entry in self._ordered()]

    def adopt(self, layout: Layout, anchor: Sequence[Tensor], momentum: Sequence[Tensor], *, restore: bool) -> None:
        """Take over a shared state (`momentum` empty: zero); with `restore` also into the model.

        Raises FleetMismatch, naming the tensors, when it doesn't fit this model; nothing is changed then.
        """
        wrong: list[str] = []
        for slot in layout.slots:
            if slot.name not in self._named:
                wrong.append(f"{slot.name}: only in the shared state")
            elif self._named[slot.name][0].shape != slot.shape:
                wrong.append(f"{slot.name}: {list(self._named[slot.name][0].shape)} here, {list(slot.shape)} there")
        missing = self._entries.keys() - {slot.name for slot in layout.slots}
        wrong += [f"{name}: trainable here, not in the shared state" for name in sorted(missing)]
        if wrong:
            raise FleetMismatch("the shared state doesn't fit this model: " + "; ".join(wrong[:8]))
        for index, slot in enumerate(layout.slots):
            entry = self._track(slot.name)
            entry.anchor.copy_(anchor[index].reshape(-1))
            if momentum:
                entry.momentum.copy_(momentum[index].reshape(-1))
            else:
                entry.momentum.zero_()
        if restore:
            self.restore()
