"""Load a checkpoint, written under any engine, into the tensors of this engine.

    checkpoints/tmp-step-00000200/   every process writes its part here and flushes it to disk, the manifest comes last
    checkpoints/step-00000200/       after one rename; only then are old ones removed
        tensors-00000-of-00002.safetensors   of each process: pieces of param/<name>, exp_avg/<name>, exp_avg_sq/<name>
        state.json                           progress, recipe, data key, loss scale, versions
        manifest.json                        size and checksum of each of them

A checkpoint is complete or does not exist. A tensor is stored as flat pieces in full precision, each with its first
element's position, so no process ever holds more than its own pieces. A piece of some columns only, which parts of layers
have, is stored with these. Nothing is pickled, so a checkpoint cannot execute
code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from acc_lm.checkpointing.format import Checkpoint
from acc_lm.errors import CheckpointError
from acc_lm.modeling.adapter import base_checksum
from acc_lm.progress import Progress
from acc_lm.runtime import (
    WEIGHT,
    Piece,
    bare_model,
    gather_objects,
    pieces_of,
    publish_weights,
    rectangles,
    start_state,
    whole_shapes,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

BUFFER = "buffer"


def load_checkpoint(accelerator: Accelerator, checkpoint: Checkpoint, model: nn.Module, optimizer: Any) -> Progress:
    """Put the saved state into the prepared model and optimizer, each process its own pieces. Every process calls.

    Raises:
        CheckpointError: the tensors do not match or do not cover the model, or belong to an adapter for another base.
    """
    state = checkpoint.state
    base = base_checksum(bare_model(model))
    if state.get("base") != base:
        raise CheckpointError(
            f"{checkpoint.folder} must be of an adapter for this base, got one for other weights; "
            "put back the base that it was trained on, or choose another output_dir"
        )
    start_state(optimizer, state["num_updates"])
    with ExitStack() as stack, torch.no_grad():
        parts, shapes = _open_parts(stack, checkpoint.folder)
        _check_shapes(checkpoint.folder, shapes, kept_shapes(model))
        problem = None
        try:
            for piece in kept_pieces(model, optimizer):
                for kind in piece.kinds:
                    key = f"{kind}/{piece.name}"
                    if key not in parts and f"{WEIGHT}/{piece.name}" in parts:
                        raise CheckpointError(
                            f"{checkpoint.folder} must be of a run with the same optimizer, got one without {key}; "
                            "put back its optimizer.name, or start from its final/ with model.name_or_path"
                        )
                    wanted = _Extent(piece.start, piece.length, piece.columns)
                    piece.put(kind, _assemble(checkpoint.folder, key, parts.get(key, []), wanted, piece.shape))
        except CheckpointError as error:
            problem = error
        for other in gather_objects(accelerator, problem):
            if other is not None:
                raise other
        for name, buffer in persistent_buffers(bare_model(model)):
            found = parts.get(f"{BUFFER}/{name}")
            if found is None:
                raise CheckpointError(f"{checkpoint.folder} must fit the model, got no buffer {name}")
            buffer.copy_(found[0][1][...])
    publish_weights(model)
    if accelerator.scaler is not None and state["loss_scaler"]:
        accelerator.scaler.load_state_dict(state["loss_scaler"])
    return checkpoint.progress


def kept_pieces(model: nn.Module, optimizer: Any) -> list[Piece]:
    """Pieces on this process that a checkpoint holds; for an adapter only its own, because its base is known."""
    is_adapter = base_checksum(bare_model(model)) is not None
    return [piece for piece in pieces_of(model, optimizer) if piece.is_trained or not is_adapter]


def kept_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and complete shape of each tensor whose pieces a checkpoint holds."""
    bare = bare_model(model)
    is_adapter = base_checksum(bare) is not None
    trained = {name for name, p in bare.named_parameters() if p.requires_grad}
    return {name: shape for name, shape in whole_shapes(model).items() if name in trained or not is_adapter}


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(`kind/name`, complete tensor) of everything in a checkpoint, one after the other, without building a model.

    Raises:
        CheckpointError: the pieces in the checkpoint do not cover a tensor.
    """
    with ExitStack() as stack:
        parts, shapes = _open_parts(stack, folder)
        for key in sorted(parts):
            kind, _, name = key.partition("/")
            if kind == BUFFER:
                yield key, parts[key][0][1][...]
            else:
                shape = tuple(shapes[name])
                yield key, _assemble(folder, key, parts[key], _Extent(0, math.prod(shape)), shape).view(shape)


class _Extent(NamedTuple):
    """Elements of a tensor: `length` of them from `start`, counted in all of its columns or in (first, number) of them."""

    start: int
    length: int
    columns: tuple[int, int] | None = None


def _open_parts(stack: ExitStack, folder: Path) -> tuple[dict[str, list[tuple[_Extent, Any]]], dict[str, Any]]:
    """({key: [(elements, slice to read)]}, {name: complete shape}) of all files."""
    from safetensors import SafetensorError, safe_open

    parts: dict[str, list[tuple[_Extent, Any]]] = {}
    shapes: dict[str, Any] = {}
    for path in sorted(folder.glob("tensors-*.safetensors")):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            pieces = json.loads(file.metadata()["pieces"])
            shapes |= pieces["shapes"]
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(key)
                kind, _, name = key.partition("/")
                first = 0 if kind == BUFFER else int(pieces["starts"][name])
                columns = pieces.get("columns", {}).get(name)
                extent = _Extent(
                    first, math.prod(part.get_shape()), None if columns is None else (int(columns[0]), int(columns[1]))
                )
                parts.setdefault(key, []).append((extent, part))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} must hold pieces of tensors, got: {' '.join(str(error).split())}; remove it, or set checkpoint.verify=full, which skips it"
            ) from None
    return parts, shapes


def _check_shapes(folder: Path, saved: dict[str, Any], wanted: dict[str, tuple[int, ...]]) -> None:
    for name in sorted({*saved, *wanted}):
        was, now = tuple(saved.get(name, ())), tuple(wanted.get(name, ()))
        if was != now or (name in saved) != (name in wanted):
            there = was if name in saved else "not there"
            raise CheckpointError(
                f"{folder} must fit the model: {name} is {there}, must be {now if name in wanted else 'absent'}"
            )


def _assemble(
    folder: Path, key: str, parts: list[tuple[_Extent, Any]], wanted_elements: _Extent, shape: tuple[int, ...]
) -> Tensor:
    """Elements of a tensor, assembled from the saved pieces, however it was cut."""
    start, length, columns = wanted_elements
    if any(extent.columns != columns for extent, _ in parts):
        return _assemble_blocks(folder, key, parts, wanted_elements, shape)
    clipped = [(max(first, start), min(first + size, start + length), first, part) for (first, size, _), part in parts]
    wanted = sorted((piece for piece in clipped if piece[0] < piece[1]), key=lambda piece: piece[:2])
    end = start
    for low, high, _, _ in wanted:  # checked before memory is allocated for sizes that a file merely claims
        if low != end:
            raise CheckpointError(
                f"{folder} must hold each element of {key} once, got {'a gap' if low > end else 'pieces that overlap'} "
                f"at element {min(low, end)}; name another checkpoint"
            )
        end = high
    if end != start + length or length == 0:
        raise CheckpointError(
            f"{folder} must hold all of {key}, got {end - start} of {length} elements of a part; name another checkpoint"
        )
    values: Tensor | None = None
    for low, high, first, part in wanted:
        chunk = part[low - first : high - first]
        if values is None:
            values = torch.empty(length, dtype=chunk.dtype)
        values[low - start : high - start] = chunk
    assert values is not None
    return values


def _assemble_blocks(
    folder: Path, key: str, parts: list[tuple[_Extent, Any]], wanted: _Extent, shape: tuple[int, ...]
) -> Tensor:
    """`_assemble` where saved pieces are of other columns than the wanted one: rectangle by rectangle."""
    found = [
        (saved.right - saved.left, in_part, mine.right - mine.left, in_mine, part)
        for extent, part in parts
        for saved in rectangles(extent.start, extent.length, *(extent.columns or (0, shape[-1])))
        for mine in rectangles(wanted.start, wanted.length, *(wanted.columns or (0, shape[-1])))
        if (in_part := mine.within(saved)) and (in_mine := saved.within(mine))
    ]
    covered = sum(in_mine.size for _, _, _, in_mine, _ in found)
    if covered != wanted.length or any(one[3].within(other[3]) for one, other in combinations(found, 2)):
        raise CheckpointError(
            f"{folder} must hold each element of {key} once, got {covered} of {wanted.length} elements of a part, or some of them twice; "
            "name another checkpoint"
        )
    values: Tensor | None = None
    for stride, source, width, target, part in found:
        size = target.bottom - target.top, target.right - target.left
        chunk = part[source.at : source.at + (size[0] - 1) * stride + size[1]]
        if values is None:
            values = torch.empty(wanted.length, dtype=chunk.dtype)
        values.as_strided(size, (width, 1), target.at).copy_(chunk.as_strided(size, (stride, 1)))
    assert values is not None
    return values


def weights_digest(accelerator: Accelerator, model: nn.Module, optimizer: Any, moments: bool = True) -> str:
    """Checksum over all processes of the saved parameters and, with `moments`, the optimizer's moments.

    Buffers are not included. Every process calls.
    """
    import xxhash

    digest = xxhash.xxh3_128()
    for piece in kept_pieces(model, optimizer):
        for kind in piece.kinds if moments else (WEIGHT,):
            values = piece.get(kind).detach().cpu().contiguous()
            digest.update(f"{kind}/{piece.name}/{piece.start}".encode())
            digest.update(values.view(torch.uint8).numpy().data)
    return xxhash.xxh3_128("".join(gather_objects(accelerator, digest.hexdigest())).encode()).hexdigest()


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of each saved buffer; none with an adapter, because the base that owns them all is not saved."""
    if base_checksum(model) is not None:
        return
    owners = {f"{path}." if path else "": module for path, module in model.named_modules()}
    for name, buffer in model.named_buffers():
        path, _, last = name.rpartition(".")
        if last not in owners[f"{path}." if path else ""]._non_persistent_buffers_set:
            yield name, buffer
